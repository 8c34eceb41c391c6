"""Extracts the factors W_Q, W_K, W_V and W_O of a layer, and makes layers with given parameters."""

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
    """The matrices and biases of a layer in standard form, in float64.

    - Queries: x W_Q + b_Q
    - Keys: y W_K + b_K
    - Values: y W_V + b_V
    - Output: sum_n o_n W_O[n] + b_O, where o_n is the weighted average of the values in head n

    The axes are D = d_model, N query heads, K key or value heads, and H, the size of a head. K and
    H may differ from the spec. For example, `merged` has one key head of size D. The caller may
    change the arrays in place.
    """

    w_q_DNH: np.ndarray
    b_q_NH: np.ndarray
    w_k_DKH: np.ndarray
    b_k_KH: np.ndarray
    w_v_DKH: np.ndarray
    b_v_KH: np.ndarray
    w_o_NHD: np.ndarray
    b_o_D: np.ndarray
    scale: float  # multiplies the logits

    def qk(self) -> dict[str, np.ndarray]:
        """Returns the parameters of the Score `qk` by name."""
        return {name: getattr(self, name) for name in ('w_q_DNH', 'w_k_DKH', 'b_q_NH', 'b_k_KH')}

    def vo(self) -> dict[str, np.ndarray]:
        """Returns the parameters of the Value `vo` by name."""
        return {name: getattr(self, name) for name in ('w_v_DKH', 'w_o_NHD', 'b_v_KH', 'b_o_D')}

    def with_kv_heads(self, num_heads: int) -> 'Factors':
        """Repeats key and value heads so that there are `num_heads` of each."""
        repeated: dict[str, Any] = {}
        for name, array in vars(self).items():
            axes = name.rpartition('_')[2]  # 'w_k_DKH' -> 'DKH'
            if 'K' in axes:
                axis = axes.index('K')
                repeats = num_heads // array.shape[axis]
                repeated[name] = np.repeat(array, repeats, axis=axis)
        return dataclasses.replace(self, **repeated)

    def with_head_size(self, size: int) -> 'Factors':
        """Pads every head with zeros to `size`."""
        padded: dict[str, Any] = {}
        for name, array in vars(self).items():
            axes = name.rpartition('_')[2]  # 'w_q_DNH' -> 'DNH'
            if 'H' in axes:
                axis = axes.index('H')
                padding = [(0, 0)] * array.ndim
                padding[axis] = (0, size - array.shape[axis])
                padded[name] = np.pad(array, padding)
        return dataclasses.replace(self, **padded)

    def logit_matrices(self) -> np.ndarray:
        """Returns A_NEF, with logits (x, 1) A[n] (y, 1)^T in head n.

        E = F = D + 1, because a 1 is appended to x and y for the biases. The last row of A[n] comes
        from b_Q, and the last column from b_K. A includes the scale.
        """
        num_heads = len(self.b_q_NH)
        repeated = self.with_kv_heads(num_heads)
        q_ENH = np.concatenate([self.w_q_DNH, self.b_q_NH[None]])
        k_FNH = np.concatenate([repeated.w_k_DKH, repeated.b_k_KH[None]])
        return self.scale * np.einsum('ENH,FNH->NEF', q_ENH, k_FNH)

    def output_matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns B_NDE = W_V[n] W_O[n] and the output bias b_E = b_O + sum_n b_V[n] W_O[n].

        E = D is the axis of the output.
        """
        num_heads = len(self.w_o_NHD)
        repeated = self.with_kv_heads(num_heads)
        B_NDE = np.einsum('DNH,NHE->NDE', repeated.w_v_DKH, self.w_o_NHD)
        b_E = self.b_o_D + np.einsum('NH,NHE->E', repeated.b_v_KH, self.w_o_NHD)
        return B_NDE, b_E


def require(condition: bool, reason: str) -> None:
    """Raises ConversionError with the reason unless the condition holds."""
    if not condition:
        raise ConversionError(reason)


def extract_factors(layer: Attention, *, of_qk: bool = True) -> Factors:
    """Computes the factors of a layer by applying its projections to unit vectors.

    Args:
        layer: The layer.
        of_qk: Whether to extract W_Q and W_K. If False, they are empty, and the Score need not be
            linear.

    Raises:
        ConversionError: A projection is not linear, or the layer has biases and its attention
            probabilities do not sum to 1.
    """
    spec = layer.spec
    D = spec.d_model
    N = spec.num_heads
    require(layer.value.linear, f'{spec.value} is not linear in the values: it has no matrix B[n]')
    probabilities_sum_to_1 = registry.find_normalizer(spec.normalizer).simplex
    require(
        not spec.biases or probabilities_sum_to_1,
        'conversions drop the bias of the keys and move that of the values, which softmax allows '
        f'and normalizer={spec.normalizer} does not; only a layer without biases can be converted',
    )
    with jax.enable_x64(True):
        layer = jax.tree.map(lambda array: jnp.asarray(np.asarray(array), jnp.float64), layer)
        score = layer.score
        value = layer.value

        def keys(y_BSD: jax.Array) -> jax.Array:
            return score.keys(score.cached(y_BSD))

        def values(y_BSD: jax.Array) -> jax.Array:
            return value.values(layer.cached(y_BSD), score)

        w_q_DNH = np.zeros((D, N, 0))
        b_q_NH = np.zeros((N, 0))
        w_k_DKH = w_q_DNH
        b_k_KH = b_q_NH
        if of_qk:
            w_q_DNH, b_q_NH = _affine_map(score.queries, D, f'queries of {spec.variant}')
            w_k_DKH, b_k_KH = _affine_map(keys, D, f'keys of {spec.variant}')
        w_v_DKH, b_v_KH = _affine_map(values, D, f'values of {spec.variant}')
        w_o_NHD, b_o_D = _output_map(layer, H=w_v_DKH.shape[-1])
    return Factors(
        w_q_DNH=w_q_DNH,
        b_q_NH=b_q_NH,
        w_k_DKH=w_k_DKH,
        b_k_KH=b_k_KH,
        w_v_DKH=w_v_DKH,
        b_v_KH=b_v_KH,
        w_o_NHD=w_o_NHD,
        b_o_D=b_o_D,
        scale=float(score.scale) * spec.score_scale,
    )


def _affine_map(
    project: Callable[[jax.Array], jax.Array], D: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns w_DNH and b_NH of an affine map y W + b.

    Args:
        project: The map, from y_BSD to heads_BSNH.
        D: The size of y.
        name: What the map computes, for the error, such as 'queries of qk/vo'.

    Raises ConversionError if the map is not affine.
    """
    zero_1D = np.zeros((1, D))
    units_DD = np.eye(D)
    twos_1D = 2 * np.ones((1, D))
    y_SD = np.concatenate([zero_1D, units_DD, twos_1D])
    projected_BSNH = project(jnp.asarray(y_SD)[None])  # B = 1
    projected_SNH = np.array(projected_BSNH)[0]

    # Zero gives b. Unit vectors give the rows of W plus b.
    b_NH = projected_SNH[0]
    w_DNH = projected_SNH[1:-1] - b_NH

    # The vector of twos checks that the map is affine.
    expected_NH = 2 * w_DNH.sum(0) + b_NH
    error = np.abs(projected_SNH[-1] - expected_NH).max()
    tolerance = 1e-9 * (1 + np.abs(projected_SNH).max())
    require(
        bool(error <= tolerance),
        f'the {name} are not linear in the stream and have no matrix',
    )
    return w_DNH, b_NH


def _output_map(layer: Attention, H: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns w_o_NHD and b_o_D of the map from heads of size H to the output of a layer."""
    N = layer.spec.num_heads
    D = layer.spec.d_model
    zero_and_units = np.concatenate([np.zeros((1, N * H)), np.eye(N * H)])
    heads_TNH = zero_and_units.reshape(-1, N, H)
    x_BTD = jnp.zeros((1, len(heads_TNH), D))
    out_BTD = layer.value.output(jnp.asarray(heads_TNH)[None], layer.score, x_BTD)
    out_TD = np.array(out_BTD)[0]

    # Zero gives b_O. Unit vectors give the rows of W_O plus b_O.
    b_o_D = out_TD[0]
    w_o_NHD = (out_TD[1:] - b_o_D).reshape(N, H, D)
    return w_o_NHD, b_o_D


def qk_factors(layer: Attention) -> Factors:
    """Returns the factors of a layer whose W_Q and W_K can be rewritten.

    The logits must depend on W_Q and W_K only through A[n] = W_Q[n] W_K[n]^T.

    Raises:
        ConversionError: The layer has

            - RoPE or QK-norm, which act between W_Q and W_K.
            - a Score that is not bilinear, masks the diagonal, or adds a bias to the logits.
            - a Value that uses a matrix of the Score.
            - a logit cap and a key bias. Conversions drop the key bias, which softmax ignores but a
              cap does not.
    """
    spec = layer.spec
    require(
        spec.positions != 'rope',
        'RoPE rotates queries and keys between W_Q and W_K, so their product cannot be rewritten; '
        'it can with positions none, learned, sinusoidal or alibi',
    )
    require(
        not spec.qk_norm,
        'QK-norm divides queries and keys by their length, which the rewrite changes',
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
    """Raises ConversionError unless the logits are x A[n] y^T for all pairs of tokens."""
    name = layer.spec.score
    score = layer.score
    distance_11 = jnp.zeros((1, 1), int)
    bias_NTS = score.relative_bias(distance_11)  # None if the Score adds no bias to logits
    require(bias_NTS is None, f'{name} adds a learned bias to the logits; the target does not')
    require(not score.hides_self, f'{name} masks the diagonal, which the target does not')
    require(score.bilinear, f'{name} is not bilinear in x and y, so it has no matrix A[n]')


def dtype_of(layer: Attention) -> np.dtype:
    """Returns the dtype of the parameters; float32 for a layer without any."""
    leaves = jax.tree.leaves(layer)
    return leaves[0].dtype if leaves else np.dtype('float32')


def logit_scale(layer: Attention) -> float:
    """Returns the factor by which q k^T is multiplied."""
    return layer.score.scale * layer.spec.score_scale


def empty_layer(source: Attention, **changes: Any) -> Attention:
    """Returns a layer whose parameters have shapes but no values. `fill` sets the values.

    Args:
        source: The layer that is converted. Its gains of QK-norm are copied.
        **changes: Fields of the spec that differ from `source.spec`.

    Raises:
        ConversionError: The gains of QK-norm do not fit the size of the queries.
    """
    spec = dataclasses.replace(source.spec, **changes)

    # If neither Score nor Value supports grouped heads, every query head has its own.
    score_class, _ = registry.find_score(spec.score)
    value_class, _ = registry.find_value(spec.value)
    if not (score_class.uses_kv_heads or value_class.uses_kv_heads):
        spec = dataclasses.replace(spec, num_kv_heads=spec.num_heads)

    # `eval_shape` gives the shapes of the parameters without drawing them.
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    if not spec.qk_norm:
        return layer

    for name in ('g_q_H', 'g_k_H'):
        gain_H = getattr(source, name)
        query_size = getattr(layer, name).shape[0]
        require(
            gain_H.shape == (query_size,),
            f'QK-norm acts on queries of size {len(gain_H)}; in {spec.variant} they have size '
            f'{query_size}',
        )
        setattr(layer, name, nnx.Param(jnp.array(gain_H[...], dtype_of(source))))
    return layer


def fill(
    layer: Attention, source: Attention, *, score: Arrays | None = None, value: Arrays | None = None
) -> Attention:
    """Sets every parameter of an empty layer and returns the layer.

    Args:
        layer: The return value of `empty_layer`.
        source: The layer that is converted. Its dtype is the dtype of the parameters.
        score: Parameters of layer.score by name; None copies source.score.
        value: Parameters of layer.value by name; None copies source.value.

    Raises:
        ConversionError: `score` or `value` has a nonzero bias, but the layer has no biases.
    """
    dtype = dtype_of(source)
    for module_name, arrays in (('score', score), ('value', value)):
        module = getattr(layer, module_name)
        if arrays is None:
            source_state = nnx.state(getattr(source, module_name))
            copied_state = jax.tree.map(jnp.array, source_state)
            nnx.update(module, copied_state)
            continue

        parameters = {}
        for name, attribute in vars(module).items():
            if isinstance(attribute, nnx.Param):
                parameters[name] = attribute
        for name, parameter in parameters.items():
            array = arrays[name]
            assert parameter.shape == array.shape, (name, array.shape)
            setattr(module, name, nnx.Param(jnp.array(array, dtype)))

        # Biases that the module lacks must be zero.
        extra_names = arrays.keys() - parameters.keys()
        for name in extra_names:
            assert name.startswith('b_'), f'{type(module).__name__} has no parameter {name}'
            is_zero = not arrays[name].any()
            require(is_zero, f'{type(module).__name__} without biases has no parameter for {name}')
    return layer


def balanced_factors(A_NED: np.ndarray, rank: int) -> tuple[np.ndarray, np.ndarray, float]:
    """Factors each matrix A[n] = U S V^T into U S^1/2 and V S^1/2, truncated to a rank.

    The product of the factors is the best approximation of A[n] with this rank (Eckart & Young
    1936). Of all factors with this product, these have the smallest sum of squares.

    Args:
        A_NED: The matrices.
        rank: R, the number of singular values that are kept. If A[n] has fewer, the factors are
            padded with zeros.

    Returns:
        left_ENR: U S^1/2.
        right_DNR: V S^1/2.
        error: The relative error of the product, in the Frobenius norm over all heads.
    """
    # U, the singular values on the diagonal of S, and V^T.
    u_NES, s_NS, vh_NSD = np.linalg.svd(A_NED, full_matrices=False)
    norm = float(np.linalg.norm(A_NED))
    # The error of a truncated SVD is the norm of the dropped singular values.
    error_norm = float(np.linalg.norm(s_NS[:, rank:]))
    error = 0.0 if norm == 0 else error_norm / norm

    root_NR = np.sqrt(s_NS[:, :rank])
    left_ENR = np.moveaxis(u_NES[..., :rank] * root_NR[:, None], 0, 1)
    right_DNR = np.moveaxis(vh_NSD[:, :rank], -1, 0) * root_NR

    padding = ((0, 0), (0, 0), (0, rank - root_NR.shape[1]))
    return np.pad(left_ENR, padding), np.pad(right_DNR, padding), error


def relative_error(approximate: np.ndarray, exact: np.ndarray) -> float:
    """Returns |approximate - exact| / |exact| in the Frobenius norm."""
    return float(np.linalg.norm(approximate - exact) / np.linalg.norm(exact))
