"""What all conversions stand on: factors of any cell in float64, and cells built from arrays."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention import registry
from qkattn.attention.attention import Attention
from qkattn.attention.scores.score import Score
from qkattn.attention.spec import AttentionSpec
from qkattn.attention.values.value import Value
from qkattn.errors import ConversionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors:
    """A cell as queries x Q + b, keys y K + b, values y V + b and output sum_n o_n O[n] + b.

    All float64. Q, K, V, O have as many heads and as wide ones as the cell computes with: `merged`
    has one key head of width D.

    Attributes:
      scale: factor on q k^T, the Score's and the spec's.
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

    def logit_matrices(self) -> np.ndarray:
        """A_NED with logits (x, 1) A[n] y^T: D + 1 rows, the last from the bias of the queries.

        What the bias of the keys adds depends on the query alone, and softmax ignores it.
        """
        q_ENH = np.concatenate([self.w_q_DNH, self.b_q_NH[None]])
        k_DNH = repeated(self.w_k_DKH, q_ENH.shape[1])
        return self.scale * np.einsum('ENH,DNH->NED', q_ENH, k_DNH)

    def output_matrices(self) -> tuple[np.ndarray, np.ndarray]:
        """B_NDE and the bias b_E of the output, into which the bias of the values goes whole."""
        N = len(self.w_o_NHD)
        B_NDE = np.einsum('DNH,NHE->NDE', repeated(self.w_v_DKH, N), self.w_o_NHD)
        b_v_NH = repeated(self.b_v_KH[None], N)[0]
        return B_NDE, self.b_o_D + np.einsum('NH,NHE->E', b_v_NH, self.w_o_NHD)


def factors(layer: Attention) -> Factors:
    """Reads the factors off what the layer computes, so that every linear cell has them.

    Raises:
      ConversionError: queries, keys or values are not linear in the stream.
    """
    spec, D = layer.spec, layer.spec.d_model
    with jax.enable_x64(True):
        layer = jax.tree.map(lambda a: jnp.asarray(np.asarray(a), jnp.float64), layer)
        score, value = layer.score, layer.value

        def keys(y_BSD):
            return score.keys(score.cached(y_BSD))

        def values(y_BSD):
            return value.values(layer.cached(y_BSD), score)

        found = {}
        for name, project in (('queries', score.queries), ('keys', keys), ('values', values)):
            found[name] = _affine(project, D, f'the {name} of {spec.score}/{spec.value}')
        N, H = spec.num_heads, found['values'][0].shape[-1]
        b_o_D = np.asarray(value.output(jnp.zeros((1, 1, N, H)), score))[0, 0]
        w_o_NHD = np.zeros((N, H, D))
        for n in range(N):
            o_BTNH = jnp.zeros((1, H, N, H)).at[0, :, n].set(jnp.eye(H))
            w_o_NHD[n] = np.asarray(value.output(o_BTNH, score))[0] - b_o_D
    (w_q, b_q), (w_k, b_k), (w_v, b_v) = found.values()
    return Factors(
        w_q_DNH=w_q,
        b_q_NH=b_q,
        w_k_DKH=w_k,
        b_k_KH=b_k,
        w_v_DKH=w_v,
        b_v_KH=b_v,
        w_o_NHD=w_o_NHD,
        b_o_D=b_o_D,
        scale=float(score.scale) * spec.score_scale,
    )


def _affine(project, d_model: int, what: str) -> tuple[np.ndarray, np.ndarray]:
    """w_DNH and b_NH of a map of the stream; ConversionError where it is not affine."""
    probe_SD = np.concatenate([np.zeros((1, d_model)), np.eye(d_model), 2 * np.ones((1, d_model))])
    got_SNH = np.asarray(project(jnp.asarray(probe_SD)[None]))[0]
    b_NH, w_DNH = got_SNH[0], got_SNH[1:-1] - got_SNH[0]
    want_NH = 2 * w_DNH.sum(0) + b_NH
    if np.abs(got_SNH[-1] - want_NH).max() > 1e-9 * (1 + np.abs(got_SNH).max()):
        raise ConversionError(f'{what} are not linear in the stream, so they have no matrix')
    return w_DNH, b_NH


def repeated(w_DKH: np.ndarray, num_heads: int) -> np.ndarray:
    """Each of K heads N/K times in a row."""
    return np.repeat(w_DKH, num_heads // w_DKH.shape[1], axis=1)


def padded(array: np.ndarray, axis: int, size: int) -> np.ndarray:
    """Zeros behind `array` along one axis, up to `size`."""
    width = [(0, 0)] * array.ndim
    width[axis] = (0, size - array.shape[axis])
    return np.pad(array, width)


def dtype_of(layer: Attention) -> np.dtype:
    """Of the parameters; float32 for a layer without any."""
    leaves = jax.tree.leaves(layer)
    return leaves[0].dtype if leaves else np.dtype('float32')


def tolerance(layer: Attention) -> float:
    """Relative size below which a singular value is rounding: 256 ulp of the parameters."""
    return 256 * float(jnp.finfo(dtype_of(layer)).eps)


def respecified(spec: AttentionSpec, **changes) -> AttentionSpec:
    """The spec of the target; num_kv_heads becomes num_heads where nothing is left to share."""
    spec = dataclasses.replace(spec, **changes)
    score, value = registry.find_score(spec.score)[0], registry.find_value(spec.value)[0]
    if not (score.uses_kv_heads or value.uses_kv_heads):
        spec = dataclasses.replace(spec, num_kv_heads=spec.num_heads)
    return spec


def blank(spec: AttentionSpec, like: Attention) -> Attention:
    """A layer of `spec` in the dtype of `like`, with its QK-norm gains where widths agree."""
    layer = Attention(spec, key=jax.random.key(0))
    for name in ('g_q_H', 'g_k_H'):
        if getattr(layer, name) is not None:
            old, new = getattr(like, name)[...], getattr(layer, name)[...]
            if old.shape != new.shape:
                raise ConversionError(
                    f'QK-norm acts on queries of width {old.shape[0]}, and in '
                    f'{spec.score}/{spec.value} they have width {new.shape[0]}'
                )
            setattr(layer, name, nnx.Param(old))
    return jax.tree.map(lambda a: a.astype(dtype_of(like)), layer)


def fill(circuit: Score | Value, dtype: np.dtype, **arrays: np.ndarray) -> None:
    """Sets every parameter of a circuit; biases may be left out where the circuit has none.

    Raises:
      ConversionError: a bias that is not zero and that the circuit cannot hold.
    """
    own = {name for name, a in vars(circuit).items() if isinstance(a, nnx.Param)}
    for name, array in arrays.items():
        if name in own:
            parameter = getattr(circuit, name)
            assert parameter.shape == array.shape, (name, parameter.shape, array.shape)
            setattr(circuit, name, nnx.Param(jnp.asarray(array, dtype)))
        elif not name.startswith('b_'):
            raise AssertionError(f'{type(circuit).__name__} has no parameter {name}')
        elif np.abs(array).max() > 0:
            raise ConversionError(f'{type(circuit).__name__} without biases cannot hold {name}')
    missing = own - set(arrays)
    assert not missing, f'{type(circuit).__name__} still needs {sorted(missing)}'


def keep(circuit: Score | Value, source: Score | Value) -> None:
    """Copies all parameters of a circuit of the same class."""
    nnx.update(circuit, jax.tree.map(lambda a: jnp.array(a), nnx.state(source)))


def require_free_logits(layer: Attention, conversion: str) -> None:
    """Raises where something between the projections and the softmax sees q and k themselves."""
    spec, score = layer.spec, layer.score
    if spec.positions == 'rope':
        raise ConversionError(
            f'{conversion} rewrites W_Q W_K^T as a product, and RoPE rotates queries and keys '
            'between its two factors; it is exact for positions none, learned, sinusoidal or alibi'
        )
    if spec.qk_norm:
        raise ConversionError(
            f'{conversion} changes the length of queries and keys, which QK-norm divides by'
        )
    require_plain_score(layer, conversion)
    if not score.bilinear:
        raise ConversionError(f'{spec.score} is not bilinear in x and y, so it has no matrix A[n]')


def require_plain_score(layer: Attention, conversion: str) -> None:
    """Raises where the Score masks more than its target would."""
    if layer.score.hides_self:
        raise ConversionError(
            f'{layer.spec.score} hides each query from itself, which the target of {conversion} '
            'does not'
        )


def require_own_value(layer: Attention, conversion: str) -> None:
    """Raises where the Value reads the matrix that the conversion is about to replace."""
    if getattr(layer.value, 'shares', ()):
        raise ConversionError(
            f'{layer.spec.value} reads a matrix of {layer.spec.score}, which {conversion} '
            'replaces; convert with to_standard first'
        )


def require_no_cap_on(layer: Attention, b_k_KH: np.ndarray, conversion: str) -> None:
    """Raises where a constant on the logits of a query would pass through the logit cap."""
    if layer.spec.logit_cap is not None and np.abs(b_k_KH).max() > 0:
        raise ConversionError(
            f'{conversion} drops the bias of the keys, which moves all logits of a query alike; '
            f'softmax ignores that, but logit_cap={layer.spec.logit_cap} does not'
        )


def require_one_kv_head_each(layer: Attention, conversion: str) -> None:
    """Raises unless every query head has its own key and value head."""
    if layer.spec.num_kv_heads != layer.spec.num_heads:
        raise ConversionError(
            f'{conversion} gives every query head a key head of its own, and this layer shares '
            f'num_kv_heads={layer.spec.num_kv_heads} among {layer.spec.num_heads}; '
            'convert with gqa_to_mha first'
        )


def own_logits(layer: Attention, conversion: str) -> Factors:
    """The factors of a layer conversionse QK circuit may be rewritten, all preconditions checked.

    Raises:
      ConversionError: RoPE, QK-norm, a Score that is not bilinear or hides the diagonal, a Value
        that reads the Score, or a logit cap beside a bias on the keys.
    """
    require_free_logits(layer, conversion)
    require_own_value(layer, conversion)
    parts = factors(layer)
    require_no_cap_on(layer, parts.b_k_KH, conversion)
    return parts
