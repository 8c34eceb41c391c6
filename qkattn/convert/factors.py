"""The factors W_Q, W_K, W_V, W_O of any linear variant, in float64."""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.attention.attention import Attention
from qkattn.attention.registry import find_normalizer
from qkattn.errors import ConversionError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Factors:
    """Queries x W_Q + b_Q, keys y W_K + b_K, values y W_V + b_V, output sum_n o_n W_O[n] + b_O.

    All arrays are float64. Numbers of heads and head sizes are those that the variant computes
    with: `merged` has one key head of size D.

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
        return {
            'w_q_DNH': self.w_q_DNH,
            'w_k_DKH': self.w_k_DKH,
            'b_q_NH': self.b_q_NH,
            'b_k_KH': self.b_k_KH,
        }

    def vo(self) -> dict[str, np.ndarray]:
        """The parameters of the Value `vo`."""
        return {
            'w_v_DKH': self.w_v_DKH,
            'w_o_NHD': self.w_o_NHD,
            'b_v_KH': self.b_v_KH,
            'b_o_D': self.b_o_D,
        }

    def with_kv_heads(self, num_heads: int) -> 'Factors':
        """The factors with key and value heads repeated to that number of each."""
        return dataclasses.replace(
            self,
            w_k_DKH=repeat_heads(self.w_k_DKH, num_heads),
            b_k_KH=repeat_heads(self.b_k_KH[None], num_heads)[0],
            w_v_DKH=repeat_heads(self.w_v_DKH, num_heads),
            b_v_KH=repeat_heads(self.b_v_KH[None], num_heads)[0],
        )

    def with_head_size(self, size: int) -> 'Factors':
        """The factors with zeros appended to every head, up to that size."""
        padded = {}
        for name, array in (self.qk() | self.vo()).items():
            axis = name.rpartition('_')[2].find('H')
            width = [(0, size - n if i == axis else 0) for i, n in enumerate(array.shape)]
            padded[name] = np.pad(array, width)
        return Factors(**padded, scale=self.scale)

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
    spec, D = layer.spec, layer.spec.d_model
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

        def keys(y_BSD: jax.Array) -> jax.Array:
            return score.keys(score.cached(y_BSD))

        def values(y_BSD: jax.Array) -> jax.Array:
            return value.values(layer.cached(y_BSD), score)

        variant = str(spec.variant)
        w_q, b_q = _affine_map(score.queries, D, f'the queries of {variant}')
        w_k, b_k = _affine_map(keys, D, f'the keys of {variant}')
        w_v, b_v = _affine_map(values, D, f'the values of {variant}')
        N, H = spec.num_heads, w_v.shape[-1]
        b_o_D = np.asarray(value.output(jnp.zeros((1, 1, N, H)), score, jnp.zeros((1, 1, D))))[0, 0]
        w_o_NHD = np.zeros((N, H, D))
        for n in range(N):
            o_BTNH = jnp.zeros((1, H, N, H)).at[0, :, n].set(jnp.eye(H))
            out_BTD = value.output(o_BTNH, score, jnp.zeros((1, H, D)))
            w_o_NHD[n] = np.asarray(out_BTD)[0] - b_o_D
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


def _affine_map(
    project: Callable[[jax.Array], jax.Array], d_model: int, what: str
) -> tuple[np.ndarray, np.ndarray]:
    """w_DNH and b_NH of project(x) = x w + b; ConversionError where it is not affine."""
    probe_SD = np.concatenate([np.zeros((1, d_model)), np.eye(d_model), 2 * np.ones((1, d_model))])
    projected_SNH = np.asarray(project(jnp.asarray(probe_SD)[None]))[0]
    b_NH, w_DNH = projected_SNH[0], projected_SNH[1:-1] - projected_SNH[0]
    expected_NH = 2 * w_DNH.sum(0) + b_NH
    if np.abs(projected_SNH[-1] - expected_NH).max() > 1e-9 * (1 + np.abs(projected_SNH).max()):
        raise ConversionError(f'{what} are not linear in the stream, so they have no matrix')
    return w_DNH, b_NH


def repeat_heads(w_DKH: np.ndarray, num_heads: int) -> np.ndarray:
    """Each of K heads N / K times in a row."""
    return np.repeat(w_DKH, num_heads // w_DKH.shape[1], axis=1)
