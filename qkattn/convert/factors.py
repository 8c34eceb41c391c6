"""The factors W_Q, W_K, W_V, W_O of a layer in float64, and layers with given parameters."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention import registry
from qkattn.attention.attention import Attention
from qkattn.errors import ConversionError

Arrays = Mapping[str, np.ndarray]


@dataclasses.dataclass(frozen=True)
class Factors:
    """Queries x W_Q + b_Q, keys y W_K + b_K, values y W_V + b_V, output sum_n o_n W_O[n] + b_O.

    All arrays are float64, and the caller's to change. Numbers of heads and head sizes are those
    that the variant computes with: `merged` has one key head of size D. `scale` is that of logits.
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
        repeated: dict[str, Any] = {
            name: np.repeat(array, num_heads // array.shape[-2], axis=-2)
            for name, array in vars(self).items()
            if 'K' in name
        }
        return dataclasses.replace(self, **repeated)

    def with_head_size(self, size: int) -> 'Factors':
        """The factors with zeros appended to every head, up to that size."""
        padded: dict[str, Any] = {}
        for name, array in (self.qk() | self.vo()).items():
            letters = name.rpartition('_')[2]
            padding = [(0, 0)] * array.ndim
            if 'H' in letters:
                axis = letters.index('H')
                padding[axis] = (0, size - array.shape[axis])
            padded[name] = np.pad(array, padding)
        return dataclasses.replace(self, **padded)

    def logit_matrices(self) -> np.ndarray:
        """A_NEF of the logits (x, 1) A[n] (y, 1)^T, E = F = D + 1, with the scale.

        The last row comes from the bias of the queries. The last column, from that of the keys,
        adds the same to all logits of a query, which softmax ignores.
        """
        heads = self.with_kv_heads(len(self.b_q_NH))
        q_ENH = np.concatenate([self.w_q_DNH, self.b_q_NH[None]])
        k_FNH = np.concatenate([heads.w_k_DKH, heads.b_k_KH[None]])
        return self.scale * np.einsum('ENH,FNH->NEF', q_ENH, k_FNH)

    def output_matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """B_NDE = W_V[n] W_O[n], and the output bias b_E = b_O + sum_n b_V[n] W_O[n]."""
        heads = self.with_kv_heads(len(self.w_o_NHD))
        B_NDE = np.einsum('DNH,NHE->NDE', heads.w_v_DKH, self.w_o_NHD)
        b_E = self.b_o_D + np.einsum('NH,NHE->E', heads.b_v_KH, self.w_o_NHD)
        return B_NDE, b_E


def require(condition: bool, reason: str) -> None:
    """Raises ConversionError with the reason unless the condition holds."""
    if not condition:
        raise ConversionError(reason)


def extract_factors(layer: Attention, *, of_qk: bool = True) -> Factors:
    """The factors of a layer, measured by applying its projections to a basis of the stream.

    With of_qk=False only those of the OV circuit: W_Q and W_K are empty, and the Score, which the
    caller keeps as it is, need not be linear. Raises ConversionError if a map is not linear, or for
    biases under probabilities that do not sum to 1.
    """
    spec = layer.spec
    D = spec.d_model
    N = spec.num_heads
    require(layer.value.linear, f'{spec.value} is not linear in the values: it has no matrix B[n]')
    require(
        not spec.biases or registry.find_normalizer(spec.normalizer).simplex,
        'conversions drop the bias of the keys and move that of the values, which softmax allows '
        f'and normalizer={spec.normalizer} does not; only a layer without biases can be converted',
    )
    with jax.enable_x64(True):
        layer = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), layer)
        score = layer.score
        value = layer.value

        def affine_map(
            project: Callable[[jax.Array], jax.Array], name: str
        ) -> tuple[np.ndarray, np.ndarray]:
            """W and b of `project`(y) = y W + b, from its values at 0, at a basis, and at 2."""
            probe_SD = np.concatenate([np.zeros((1, D)), np.eye(D), 2 * np.ones((1, D))])
            projected_SNH = np.array(project(jnp.asarray(probe_SD)[None]))[0]
            b_NH = projected_SNH[0]
            w_DNH = projected_SNH[1:-1] - b_NH
            expected_NH = 2 * w_DNH.sum(0) + b_NH
            error = np.abs(projected_SNH[-1] - expected_NH).max()
            require(
                bool(error <= 1e-9 * (1 + np.abs(projected_SNH).max())),
                f'the {name} of {spec.variant} are not linear in the stream and have no matrix',
            )
            return w_DNH, b_NH

        w_q_DNH = np.zeros((D, N, 0))
        b_q_NH = np.zeros((N, 0))
        w_k_DKH = w_q_DNH
        b_k_KH = b_q_NH
        if of_qk:
            w_q_DNH, b_q_NH = affine_map(score.queries, 'queries')
            w_k_DKH, b_k_KH = affine_map(lambda y_BSD: score.keys(score.cached(y_BSD)), 'keys')
        w_v_DKH, b_v_KH = affine_map(
            lambda y_BSD: value.values(layer.cached(y_BSD), score), 'values'
        )
        H = w_v_DKH.shape[-1]
        probe_TNH = np.concatenate([np.zeros((1, N * H)), np.eye(N * H)]).reshape(-1, N, H)
        zeros_BTD = jnp.zeros((1, len(probe_TNH), D))
        out_TD = np.array(value.output(jnp.asarray(probe_TNH)[None], score, zeros_BTD))[0]
    b_o_D = out_TD[0]
    return Factors(
        w_q_DNH=w_q_DNH,
        b_q_NH=b_q_NH,
        w_k_DKH=w_k_DKH,
        b_k_KH=b_k_KH,
        w_v_DKH=w_v_DKH,
        b_v_KH=b_v_KH,
        w_o_NHD=(out_TD[1:] - b_o_D).reshape(N, H, D),
        b_o_D=b_o_D,
        scale=float(score.scale) * spec.score_scale,
    )


def qk_factors(layer: Attention) -> Factors:
    """The factors of a layer whose logits are scale x A[n] y^T, so that A[n] may be rewritten.

    Raises ConversionError where something stands in the way:

    - RoPE or QK-norm, which act on queries and keys between W_Q and W_K;
    - a Score that is not bilinear, masks the diagonal, or adds a bias to the logits;
    - a Value that shares a matrix of the Score, which would change with it;
    - a bias of the keys under a logit cap, which does not ignore it as softmax does.
    """
    spec = layer.spec
    require(
        spec.positions != 'rope',
        'RoPE rotates queries and keys between W_Q and W_K, so their product cannot be rewritten; '
        'it can with positions none, learned, sinusoidal or alibi',
    )
    require(
        not spec.qk_norm,
        'QK-norm divides queries and keys by their length, which is another one after the rewrite',
    )
    require_bilinear(layer)
    require(
        not layer.value.shares,
        f'{spec.value} shares a matrix of {spec.score}, which is replaced; apply to_standard first',
    )
    factors = extract_factors(layer)
    require(
        spec.logit_cap is None or not factors.b_k_KH.any(),
        'the bias of the keys, which is dropped, shifts all logits of a query alike; softmax '
        f'ignores that, but logit_cap={spec.logit_cap} does not',
    )
    return factors


def require_bilinear(layer: Attention) -> None:
    """Requires logits that are a bilinear form of x and y, for all pairs and nothing more."""
    name = layer.spec.score
    score = layer.score
    bias_NTS = score.relative_bias(jnp.zeros((1, 1), int))
    require(bias_NTS is None, f'{name} adds a learned bias to the logits; the target does not')
    require(not score.hides_self, f'{name} masks the diagonal, which the target does not')
    require(score.bilinear, f'{name} is not bilinear in x and y, so it has no matrix A[n]')


def dtype_of(layer: Attention) -> np.dtype:
    """Dtype of the parameters; float32 for a layer without any."""
    leaves = jax.tree.leaves(layer)
    return leaves[0].dtype if leaves else np.dtype('float32')


def logit_scale(layer: Attention) -> float:
    """The factor on q k^T."""
    return layer.score.scale * layer.spec.score_scale


def empty_layer(source: Attention, **changes: Any) -> Attention:
    """A layer without values, of the spec of `source` with changes; it has its QK-norm gains.

    num_kv_heads becomes num_heads where no circuit shares heads. ConversionError if queries get
    another size than the QK-norm gains have.
    """
    spec = dataclasses.replace(source.spec, **changes)
    score_class, _ = registry.find_score(spec.score)
    value_class, _ = registry.find_value(spec.value)
    if not (score_class.uses_kv_heads or value_class.uses_kv_heads):
        spec = dataclasses.replace(spec, num_kv_heads=spec.num_heads)
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    if not spec.qk_norm:
        return layer
    for name in ('g_q_H', 'g_k_H'):
        gain_H = getattr(source, name)
        (size,) = getattr(layer, name).shape
        require(
            gain_H.shape == (size,),
            f'QK-norm acts on queries of size {len(gain_H)}; in {spec.variant} they have size '
            f'{size}',
        )
        setattr(layer, name, nnx.Param(jnp.array(gain_H[...], dtype_of(source))))
    return layer


def fill(
    layer: Attention, source: Attention, *, score: Arrays | None = None, value: Arrays | None = None
) -> Attention:
    """Sets every parameter of an empty layer, in the dtype of `source`, and returns the layer.

    `score` and `value` are parameters by name; None copies those of `source`. ConversionError for a
    non-zero bias where the circuit has no parameter for it.
    """
    for part, arrays in (('score', score), ('value', value)):
        circuit = getattr(layer, part)
        if arrays is None:
            nnx.update(circuit, jax.tree.map(jnp.array, nnx.state(getattr(source, part))))
            continue
        parameters = {name: a for name, a in vars(circuit).items() if isinstance(a, nnx.Param)}
        for name, parameter in parameters.items():
            assert parameter.shape == arrays[name].shape, (name, arrays[name].shape)
            setattr(circuit, name, nnx.Param(jnp.array(arrays[name], dtype_of(source))))
        for name in arrays.keys() - parameters.keys():
            assert name.startswith('b_'), f'{type(circuit).__name__} has no parameter {name}'
            reason = f'{type(circuit).__name__} without biases has no parameter for {name}'
            require(not arrays[name].any(), reason)
    return layer


def balanced_factors(A_NED: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, float]:
    """left_ENR = U S^1/2 and right_DNR = V S^1/2 of A[n] = U S V^T, and what cutting it loses.

    Balanced factors have the least sum of squares. The error, relative to the norm of A over all
    heads, is the least at this rank (Eckart & Young 1936). Zeros fill columns beyond the size of A.
    """
    left_NER, s_NR, right_NRD = np.linalg.svd(A_NED, full_matrices=False)
    lost = np.linalg.norm(s_NR[:, rank:]) / (np.linalg.norm(A_NED) or 1.0)
    root_NR = np.sqrt(s_NR[:, :rank])
    left_ENR = np.moveaxis(left_NER[..., :rank] * root_NR[:, None], 0, 1)
    right_DNR = np.moveaxis(right_NRD[:, :rank], -1, 0) * root_NR
    padding = ((0, 0), (0, 0), (0, rank - root_NR.shape[1]))
    return np.pad(left_ENR, padding), np.pad(right_DNR, padding), float(lost)


def relative_error(approximate: np.ndarray, exact: np.ndarray) -> float:
    """|approximate - exact| / |exact| in the Frobenius norm."""
    return float(np.linalg.norm(approximate - exact) / np.linalg.norm(exact))
