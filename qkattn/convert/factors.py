"""The factors W_Q, W_K, W_V, W_O of any linear variant, in float64, and those of low rank."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.attention.attention import Attention
from qkattn.attention.registry import find_normalizer
from qkattn.errors import ConversionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors:
    """Queries x W_Q + b_Q, keys y W_K + b_K, values y W_V + b_V, output sum_n o_n W_O[n] + b_O.

    All arrays are float64, and the caller's to change. Numbers of heads and head sizes are those
    that the variant computes with: `merged` has one key head of size D.

    Attributes:
      scale: factor on q k^T, the product of the Score's scale and the spec's score_scale.
    """

    w_q_DNH: np.ndarray
    b_q_NH: np.ndarray
    w_k_DKH: np.ndarray
    b_k_KH: np.ndarray
    w_v_DKH: np.ndarray
    b_v_KH: np.ndarray
    w_o_NHD: np.ndarray
    b_o_D: np.ndarray
    scale: float

    def qk(self) -> dict[str, np.ndarray]:
        """The parameters of the Score `qk`."""
        return {name: getattr(self, name) for name in ('w_q_DNH', 'w_k_DKH', 'b_q_NH', 'b_k_KH')}

    def vo(self) -> dict[str, np.ndarray]:
        """The parameters of the Value `vo`."""
        return {name: getattr(self, name) for name in ('w_v_DKH', 'w_o_NHD', 'b_v_KH', 'b_o_D')}

    def with_kv_heads(self, num_heads: int) -> 'Factors':
        """The factors with key and value heads repeated to that number of each."""
        shared: dict[str, Any] = {
            n: repeat_heads(a, num_heads) for n, a in vars(self).items() if 'K' in n
        }
        return dataclasses.replace(self, **shared)

    def with_head_size(self, size: int) -> 'Factors':
        """The factors with zeros appended to every head, up to that size."""
        padded: dict[str, Any] = {}
        for name, array in (self.qk() | self.vo()).items():
            axis = name.rpartition('_')[2].find('H')
            width = [(0, size - n if i == axis else 0) for i, n in enumerate(array.shape)]
            padded[name] = np.pad(array, width)
        return dataclasses.replace(self, **padded)

    def logit_matrices(self) -> np.ndarray:
        """A_NED of the logits (x, 1) A[n] y^T; row D + 1 comes from the bias of the queries.

        The bias of the keys adds the same to all logits of a query, which softmax ignores.
        """
        q_ENH = np.concatenate([self.w_q_DNH, self.b_q_NH[None]])
        k_DNH = repeat_heads(self.w_k_DKH, q_ENH.shape[1])
        return self.scale * np.einsum('ENH,DNH->NED', q_ENH, k_DNH)

    def output_matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """B_NDE = W_V[n] W_O[n], and the output bias b_E = b_O + sum_n b_V[n] W_O[n]."""
        heads = self.with_kv_heads(len(self.w_o_NHD))
        B_NDE = np.einsum('DNH,NHE->NDE', heads.w_v_DKH, self.w_o_NHD)
        return B_NDE, self.b_o_D + np.einsum('NH,NHE->E', heads.b_v_KH, self.w_o_NHD)


def extract_factors(layer: Attention) -> Factors:
    """The factors of a layer, measured by applying its projections to a basis of the stream.

    Raises:
      ConversionError: queries, keys, values or the output are not linear in the stream; or biases
        under a normalizer whose probabilities do not sum to 1.
    """
    spec, D, N = layer.spec, layer.spec.d_model, layer.spec.num_heads
    if not layer.value.linear:
        raise ConversionError(f'{spec.value} is not linear in the values, so it has no matrix B[n]')
    if spec.biases and not find_normalizer(spec.normalizer).simplex:
        raise ConversionError(
            'conversions drop the bias of the keys and move that of the values, which softmax '
            f'allows and normalizer={spec.normalizer} does not; only a layer without biases '
            'can be converted'
        )
    with jax.enable_x64(True):
        layer = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), layer)
        score, value = layer.score, layer.value
        w_q, b_q = _affine_map(score.queries, layer, 'queries')
        w_k, b_k = _affine_map(lambda y_BSD: score.keys(score.cached(y_BSD)), layer, 'keys')
        w_v, b_v = _affine_map(
            lambda y_BSD: value.values(layer.cached(y_BSD), score), layer, 'values'
        )
        H = w_v.shape[-1]
        probe_TNH = np.concatenate([np.zeros((1, N * H)), np.eye(N * H)]).reshape(-1, N, H)
        zeros_BTD = jnp.zeros((1, len(probe_TNH), D))
        out_TD = np.array(value.output(jnp.asarray(probe_TNH)[None], score, zeros_BTD))[0]
    return Factors(
        w_q_DNH=w_q,
        b_q_NH=b_q,
        w_k_DKH=w_k,
        b_k_KH=b_k,
        w_v_DKH=w_v,
        b_v_KH=b_v,
        w_o_NHD=(out_TD[1:] - out_TD[0]).reshape(N, H, D),
        b_o_D=out_TD[0],
        scale=float(score.scale) * spec.score_scale,
    )


def _affine_map(
    project: Callable[[jax.Array], jax.Array], layer: Attention, result: str
) -> tuple[np.ndarray, np.ndarray]:
    """w_DNH and b_NH of project(x) = x w + b; ConversionError where it is not affine."""
    D = layer.spec.d_model
    probe_SD = np.concatenate([np.zeros((1, D)), np.eye(D), 2 * np.ones((1, D))])
    projected_SNH = np.array(project(jnp.asarray(probe_SD)[None]))[0]
    b_NH, w_DNH = projected_SNH[0], projected_SNH[1:-1] - projected_SNH[0]
    expected_NH = 2 * w_DNH.sum(0) + b_NH
    if np.abs(projected_SNH[-1] - expected_NH).max() > 1e-9 * (1 + np.abs(projected_SNH).max()):
        raise ConversionError(
            f'the {result} of {layer.spec.variant} are not linear in the stream, so they have no '
            'matrix'
        )
    return w_DNH, b_NH


def repeat_heads(array: np.ndarray, num_heads: int) -> np.ndarray:
    """Each of the K heads on the last axis but one N / K times in a row."""
    return np.repeat(array, num_heads // array.shape[-2], axis=-2)


@dataclasses.dataclass(frozen=True)
class Truncation:
    """The error of keeping the `rank` largest singular values of each head.

    Attributes:
      rank: singular values kept.
      frobenius_N: norm of what is cut from A[n] (with its scale) or B[n], the least error of any
        matrix of this rank (Eckart & Young 1936).
      relative: the same over all heads, relative to the norm of all heads.
      measured: root mean square error of the logits (QK circuit) or of the single-head outputs (OV
        circuit) of unit-normal streams, relative to theirs.
    """

    rank: int
    frobenius_N: np.ndarray
    relative: float
    measured: float


def balanced_factors(A_NED: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """left_ENR = U S^1/2 and right_DNR = V S^1/2 of A[n] = U S V^T; and the norm_N of the rest.

    Of all factorizations, the balanced one has the smallest sum of squares. Where `rank` exceeds
    the size of A[n], zeros fill the last columns.
    """
    left_NER, s_NR, right_NRD = np.linalg.svd(A_NED, full_matrices=False)
    frobenius_N = np.sqrt((s_NR[:, rank:] ** 2).sum(-1))
    root_NR = np.sqrt(s_NR[:, :rank])
    left_ENR = np.moveaxis(left_NER[..., :rank] * root_NR[:, None], 0, 1)
    right_DNR = np.moveaxis(right_NRD[:, :rank], -1, 0) * root_NR
    padding = ((0, 0), (0, 0), (0, rank - root_NR.shape[1]))
    return np.pad(left_ENR, padding), np.pad(right_DNR, padding), frobenius_N


def relative_error(approximate: np.ndarray, exact: np.ndarray) -> float:
    """|approximate - exact| / |exact| in the Frobenius norm."""
    return float(np.linalg.norm(approximate - exact) / np.linalg.norm(exact))
