"""Normalizers, which turn the logits of attention into probabilities."""

import functools
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # It imports submodules such as scipy.special on first use.

from qkattn.errors import SpecError


class Normalizer:
    """Turns the logits s of a query into probabilities p[s].

    The options of a subclass are keyword-only arguments of its `__init__`.
    """

    source: ClassVar[str]  # the publication of the form
    # Whether the probabilities of a query sum to 1, and do not change if a constant is added to all
    # of its logits.
    simplex: ClassVar[bool] = True

    def __call__(self, s_BNTS: jax.Array, mask_B1TS: jax.Array) -> jax.Array:
        """Returns p_BNTS, which is 0 at masked keys if the query has a visible key.

        Args:
            s_BNTS: Logits in float32 or wider; -1e38 or lower at masked keys.
            mask_B1TS: False at masked keys; B may be 1.
        """
        raise NotImplementedError

    def reference(self, s_S: np.ndarray) -> np.ndarray:
        """Returns p_S of the visible keys of one query, a test reference in float64 numpy."""
        raise NotImplementedError


class Softmax(Normalizer):
    """exp(s) / sum exp(s). A query without visible keys attends to all keys equally."""

    source = 'Vaswani et al. 2017'

    def __call__(self, s_BNTS: jax.Array, mask_B1TS: jax.Array) -> jax.Array:
        return jax.nn.softmax(s_BNTS, axis=-1)

    def reference(self, s_S: np.ndarray) -> np.ndarray:
        p_S = np.exp(s_S - s_S.max())
        return p_S / p_S.sum()


class SoftmaxOffByOne(Normalizer):
    """exp(s) / (1 + sum exp(s)), as if there were one more key with logit 0 and value 0."""

    source = 'Miller 2023, "Attention is off by one"'
    simplex = False

    def __call__(self, s_BNTS: jax.Array, mask_B1TS: jax.Array) -> jax.Array:
        # exp(s - max) / (exp(-max) + sum exp(s - max)) does not depend on max. The maximum,
        # including the logit 0, avoids overflow.
        max_BNT1 = jnp.maximum(s_BNTS.max(-1, keepdims=True), 0)
        max_BNT1 = jax.lax.stop_gradient(max_BNT1)
        exp_BNTS = jnp.exp(s_BNTS - max_BNT1)
        return exp_BNTS / (jnp.exp(-max_BNT1) + exp_BNTS.sum(-1, keepdims=True))

    def reference(self, s_S: np.ndarray) -> np.ndarray:
        return np.exp(s_S - np.logaddexp(0, scipy.special.logsumexp(s_S)))


class Sigmoid(Normalizer):
    """sigmoid(s + b), independently for each key.

    Args:
        bias: b. None is -log S, where S is the number of visible keys of the query. The
            probabilities then sum to about 1 at initialization.
    """

    source = 'Ramapuram et al. 2024, arXiv 2409.04431'
    simplex = False

    def __init__(self, *, bias: float | None = None):
        is_number = isinstance(bias, int | float) and not isinstance(bias, bool)
        is_finite = is_number and abs(bias) < 1e38
        if bias is not None and not is_finite:
            raise SpecError(f'sigmoid(bias={bias!r}) must be a finite number, or None')
        self.bias = bias

    def __call__(self, s_BNTS: jax.Array, mask_B1TS: jax.Array) -> jax.Array:
        if self.bias is not None:
            return jax.nn.sigmoid(s_BNTS + self.bias)
        num_visible_B1T1 = mask_B1TS.sum(-1, keepdims=True, dtype=s_BNTS.dtype)
        log_visible_B1T1 = jnp.log(jnp.maximum(num_visible_B1T1, 1))
        return jax.nn.sigmoid(s_BNTS - log_visible_B1T1)

    def reference(self, s_S: np.ndarray) -> np.ndarray:
        bias = -np.log(len(s_S)) if self.bias is None else self.bias
        return scipy.special.expit(s_S + bias)


class Entmax15(Normalizer):
    """max(s / 2 - tau, 0)^2, where tau makes the sum 1. Keys with low logits get exactly 0.

    A query without visible keys attends to all keys equally.
    """

    source = 'Peters et al. 2019, arXiv 1905.05702'
    alpha: ClassVar[float] = 1.5

    def __call__(self, s_BNTS: jax.Array, mask_B1TS: jax.Array) -> jax.Array:
        return _entmax(self.alpha, s_BNTS)

    def reference(self, s_S: np.ndarray) -> np.ndarray:
        z_S = (self.alpha - 1) * (s_S - s_S.max())
        power = 1 / (self.alpha - 1)

        def excess(tau: float) -> float:
            """Returns by how much the sum of the probabilities exceeds 1."""
            return (np.maximum(z_S - tau, 0) ** power).sum() - 1

        # The largest z is 0, so the sum is at least 1 at tau = -1, and it is 0 at tau = 0.
        tau = scipy.optimize.brentq(excess, -1, 0, xtol=1e-16)
        return np.maximum(z_S - tau, 0) ** power


class Sparsemax(Entmax15):
    """max(s - tau, 0), where tau makes the sum 1. Keys with low logits get exactly 0."""

    source = 'Martins & Astudillo 2016, arXiv 1602.02068'
    alpha = 2.0


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _entmax(alpha: float, s_BNTS: jax.Array) -> jax.Array:
    """Returns max(z - tau, 0)^(1 / (alpha - 1)), where tau makes the sum over the last axis 1.

    Here z = (alpha - 1) (s - max(s)), and alpha is 1.5 or 2. For example, alpha = 2 and
    s = [3, 2.5, 0] give z = [0, -0.5, -3], tau = -0.75 and p = [0.75, 0.25, 0].

    Algorithm 2 of Peters et al. 2019 for alpha = 1.5, and algorithm 1 of Martins & Astudillo 2016
    for alpha = 2.
    """
    z_BNTS = (alpha - 1) * (s_BNTS - s_BNTS.max(-1, keepdims=True))
    # Clip masked logits. All z below -1 have p = 0, and -2 leaves a margin for rounding.
    z_BNTS = jnp.maximum(z_BNTS, -2)

    # For each k, compute tau as if only the k largest z had p > 0.
    sorted_BNTS = -jnp.sort(-z_BNTS, axis=-1)
    k_S = jnp.arange(1, z_BNTS.shape[-1] + 1, dtype=z_BNTS.dtype)
    mean_BNTS = jnp.cumsum(sorted_BNTS, -1) / k_S
    if alpha == 2:
        tau_of_k_BNTS = mean_BNTS - 1 / k_S
    else:
        variance_BNTS = jnp.cumsum(sorted_BNTS**2, -1) / k_S - mean_BNTS**2
        tau_of_k_BNTS = mean_BNTS - jnp.sqrt(jnp.maximum(1 / k_S - variance_BNTS, 0))

    # The true k is the number of k for which the k-th largest z reaches tau.
    k_BNT1 = (tau_of_k_BNTS <= sorted_BNTS).sum(-1, keepdims=True)
    tau_BNT1 = jnp.take_along_axis(tau_of_k_BNTS, k_BNT1 - 1, axis=-1)
    return jnp.maximum(z_BNTS - tau_BNT1, 0) ** (1 / (alpha - 1))


@_entmax.defjvp
def _entmax_jvp(
    alpha: float, primals: tuple[jax.Array], tangents: tuple[jax.Array]
) -> tuple[jax.Array, jax.Array]:
    """Returns p and dp = g (ds - <g, ds> / sum(g)), where g = p^(2 - alpha) if p > 0, else 0.

    Peters et al. 2019, proposition 2.
    """
    (s_BNTS,) = primals
    (ds_BNTS,) = tangents
    p_BNTS = _entmax(alpha, s_BNTS)
    g_BNTS = jnp.where(p_BNTS > 0, p_BNTS ** (2 - alpha), 0)
    inner_BNT1 = (g_BNTS * ds_BNTS).sum(-1, keepdims=True)
    sum_BNT1 = g_BNTS.sum(-1, keepdims=True)
    dp_BNTS = g_BNTS * (ds_BNTS - inner_BNT1 / sum_BNT1)
    return p_BNTS, dp_BNTS


# The normalizers of the package, by name.
NORMALIZERS: dict[str, type[Normalizer]] = {
    'softmax': Softmax,
    'softmax_off_by_one': SoftmaxOffByOne,
    'sigmoid': Sigmoid,
    'entmax15': Entmax15,
    'sparsemax': Sparsemax,
}
