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
    """The matrices and biases of a layer in standard form.

    Queries are x W_Q + b_Q, keys y W_K + b_K, values y W_V + b_V, and the output is
    sum_n o_n W_O[n] + b_O, where o_n is the average of the values of head n. `scale` multiplies the
    logits.

    All arrays are float64, and the caller may change them in place. The numbers and sizes of heads
    are those with which the variant computes: `merged`, for example, has one key head of size D.
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
        """Returns the parameters of the Score `qk`, by name."""
        return {name: getattr(self, name) for name in ('w_q_DNH', 'w_k_DKH', 'b_q_NH', 'b_k_KH')}

    def vo(self) -> dict[str, np.ndarray]:
        """Returns the parameters of the Value `vo`, by name."""
        return {name: getattr(self, name) for name in ('w_v_DKH', 'w_o_NHD', 'b_v_KH', 'b_o_D')}

    def with_kv_heads(self, num_heads: int) -> 'Factors':
        """Repeats key and value heads until there are `num_heads` of each."""
        repeated: dict[str, Any] = {}
        for name, array in vars(self).items():
            if 'K' in name:  # the names end in their axes, as w_k_DKH does
                repeats = num_heads // array.shape[-2]
                repeated[name] = np.repeat(array, repeats, axis=-2)
        return dataclasses.replace(self, **repeated)

    def with_head_size(self, size: int) -> 'Factors':
        """Pads every head with zeros up to a size: the axis H of each array that has one."""
        arrays = self.qk() | self.vo()
        padded: dict[str, Any] = {}
        for name, array in arrays.items():
            axes = name.rpartition('_')[2]  # 'w_q_DNH' -> 'DNH'
            padding = [(0, 0)] * array.ndim
            if 'H' in axes:
                head_axis = axes.index('H')
                padding[head_axis] = (0, size - array.shape[head_axis])
            padded[name] = np.pad(array, padding)
        return dataclasses.replace(self, **padded)

    def logit_matrices(self) -> np.ndarray:
        """Returns a matrix A[n] for each head, with logits (x, 1) A[n] (y, 1)^T; shape [N, E, F].

        E = F = D + 1, because a 1 is appended to x and y for the biases. A includes the scale. Its
        last row comes from the bias of the queries. Its last column comes from the bias of the
        keys. That bias adds the same number to all logits of a query, so softmax ignores it.
        """
        heads = self.with_kv_heads(len(self.b_q_NH))
        q_ENH = np.concatenate([self.w_q_DNH, self.b_q_NH[None]])
        k_FNH = np.concatenate([heads.w_k_DKH, heads.b_k_KH[None]])
        return self.scale * np.einsum('ENH,FNH->NEF', q_ENH, k_FNH)

    def output_matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns B_NDE = W_V[n] W_O[n] and the output bias b_E = b_O + sum_n b_V[n] W_O[n]."""
        heads = self.with_kv_heads(len(self.w_o_NHD))
        B_NDE = np.einsum('DNH,NHE->NDE', heads.w_v_DKH, self.w_o_NHD)
        b_E = self.b_o_D + np.einsum('NH,NHE->E', heads.b_v_KH, self.w_o_NHD)
        return B_NDE, b_E


def require(condition: bool, reason: str) -> None:
    """Raises ConversionError with the reason unless the condition holds."""
    if not condition:
        raise ConversionError(reason)


def extract_factors(layer: Attention, *, of_qk: bool = True) -> Factors:
    """Finds the factors of a layer by applying its projections to a basis of the stream.

    With of_qk=False it finds only those of the OV circuit, and W_Q and W_K are empty. The Score
    then need not be linear.

    Raises ConversionError if a projection is not linear, or if the layer has biases and its
    probabilities do not sum to 1.
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

        # The output for values of zero is b_O. For a 1 in channel h of head n, it is
        # b_O + W_O[n, h].
        H = w_v_DKH.shape[-1]
        probe_TNH = np.concatenate([np.zeros((1, N * H)), np.eye(N * H)]).reshape(-1, N, H)
        zeros_BTD = jnp.zeros((1, len(probe_TNH), D))
        out_TD = np.array(value.output(jnp.asarray(probe_TNH)[None], score, zeros_BTD))[0]
    b_o_D = out_TD[0]
    w_o_NHD = (out_TD[1:] - b_o_D).reshape(N, H, D)
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
    project: Callable[[jax.Array], jax.Array], size: int, name: str
) -> tuple[np.ndarray, np.ndarray]:
    """Returns W and b of a map y W + b by applying it to chosen vectors.

    Args:
      project: the map, from y_BSD to heads_BSNH.
      size: D, the size of y.
      name: what the map computes, for the error, e.g. 'queries of qk/vo'.

    Raises ConversionError if the map does not have this form.
    """
    D = size
    zero_1D = np.zeros((1, D))
    units_DD = np.eye(D)
    twos_1D = 2 * np.ones((1, D))
    probe_SD = np.concatenate([zero_1D, units_DD, twos_1D])
    projected_SNH = np.array(project(jnp.asarray(probe_SD)[None]))[0]

    # The zero vector gives b. Unit vector d gives row d of W, plus b.
    b_NH = projected_SNH[0]
    w_DNH = projected_SNH[1:-1] - b_NH

    # The vector of twos tests both: a map of this form gives twice the sum of all rows, plus b.
    expected_NH = 2 * w_DNH.sum(0) + b_NH
    error = np.abs(projected_SNH[-1] - expected_NH).max()
    tolerance = 1e-9 * (1 + np.abs(projected_SNH).max())
    require(
        bool(error <= tolerance),
        f'the {name} are not linear in the stream and have no matrix',
    )
    return w_DNH, b_NH


def qk_factors(layer: Attention) -> Factors:
    """Returns the factors of a layer, and checks that a conversion may replace W_Q and W_K.

    A conversion keeps the product A[n] = W_Q[n] W_K[n]^T, or approximates it. This keeps the
    function of the layer only if its logits are scale x A[n] y^T. So the following raise
    ConversionError:

    - RoPE and QK-norm: they act on queries and keys between W_Q and W_K.
    - A Score that is not bilinear, masks the diagonal, or adds a bias to the logits.
    - A Value that uses a matrix of the Score: the matrix would change in both.
    - A bias of the keys under a logit cap: conversions drop the bias. Softmax ignores that, but a
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
    """Raises ConversionError unless the logits are x A[n] y^T for all pairs, without a bias."""
    name = layer.spec.score
    score = layer.score
    bias_NTS = score.relative_bias(jnp.zeros((1, 1), int))
    require(bias_NTS is None, f'{name} adds a learned bias to the logits; the target does not')
    require(not score.hides_self, f'{name} masks the diagonal, which the target does not')
    require(score.bilinear, f'{name} is not bilinear in x and y, so it has no matrix A[n]')


def dtype_of(layer: Attention) -> np.dtype:
    """Returns the dtype of the parameters; float32 for a layer without any."""
    leaves = jax.tree.leaves(layer)
    return leaves[0].dtype if leaves else np.dtype('float32')


def logit_scale(layer: Attention) -> float:
    """Returns the factor on q k^T."""
    return layer.score.scale * layer.spec.score_scale


def empty_layer(source: Attention, **changes: Any) -> Attention:
    """Returns a layer whose parameters have shapes but no values yet; `fill` sets them.

    Only the gains of QK-norm, if there are any, are copied from `source` already.

    Args:
      source: the layer that is converted.
      changes: the fields of its spec that are different in the returned layer.

    Raises:
      ConversionError: the gains of QK-norm do not fit the size of the queries.
    """
    spec = dataclasses.replace(source.spec, **changes)

    # Query heads can share key or value heads only if the Score or the Value supports it. If
    # neither does, every query head gets its own.
    score_class, _ = registry.find_score(spec.score)
    value_class, _ = registry.find_value(spec.value)
    if not (score_class.uses_kv_heads or value_class.uses_kv_heads):
        spec = dataclasses.replace(spec, num_kv_heads=spec.num_heads)

    # `eval_shape` gives the parameters their shapes without computing initial values.
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    if not spec.qk_norm:
        return layer

    # Copy the gains of QK-norm. They have the size of queries, which may be another one here.
    for name in ('g_q_H', 'g_k_H'):
        gain_H = getattr(source, name)
        size = getattr(layer, name).shape[0]
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
    """Sets every parameter of an empty layer and returns the layer.

    Args:
      layer: the return value of `empty_layer`.
      source: the layer that is converted. Its dtype is the dtype of the parameters.
      score: parameters of layer.score by name; None copies source.score.
      value: parameters of layer.value by name; None copies source.value.

    Raises:
      ConversionError: `score` or `value` has a nonzero bias, but the layer has no biases.
    """
    dtype = dtype_of(source)
    for module_name, arrays in (('score', score), ('value', value)):
        module = getattr(layer, module_name)
        if arrays is None:
            source_state = nnx.state(getattr(source, module_name))
            nnx.update(module, jax.tree.map(jnp.array, source_state))
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
    """Splits each matrix A[n] = U S V^T into two factors, U S^1/2 and V S^1/2.

    Only the `rank` largest singular values are kept, so the product of the factors is the best
    approximation of A[n] with this rank (Eckart & Young 1936). Of all factors with this product,
    these have the least sum of squares. If A has fewer singular values than `rank`, columns of
    zeros are appended.

    Returns:
      left_ENR: U S^1/2.
      right_DNR: V S^1/2.
      lost: the error of their product, as the norm of the difference divided by the norm of A, both
        over all heads.
    """
    left_NER, s_NR, right_NRD = np.linalg.svd(A_NED, full_matrices=False)
    norm = float(np.linalg.norm(A_NED))
    if norm == 0:
        norm = 1.0  # A zero matrix loses nothing.
    lost = float(np.linalg.norm(s_NR[:, rank:])) / norm

    root_NR = np.sqrt(s_NR[:, :rank])
    left_ENR = np.moveaxis(left_NER[..., :rank] * root_NR[:, None], 0, 1)
    right_DNR = np.moveaxis(right_NRD[:, :rank], -1, 0) * root_NR

    padding = ((0, 0), (0, 0), (0, rank - root_NR.shape[1]))
    return np.pad(left_ENR, padding), np.pad(right_DNR, padding), lost


def relative_error(approximate: np.ndarray, exact: np.ndarray) -> float:
    """Returns |approximate - exact| / |exact| in the Frobenius norm."""
    return float(np.linalg.norm(approximate - exact) / np.linalg.norm(exact))
