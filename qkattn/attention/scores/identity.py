"""Scores with an identity in place of W_Q or W_K or both, and one with an MLP for W_Q."""

import jax
import jax.numpy as jnp
import numpy as np
import scipy  # It imports submodules such as scipy.special on first use.
from flax import nnx

from qkattn.attention.maps import SLICES, STREAM, Cache, Projection
from qkattn.attention.parameters import affine, heads_of, homogeneous, project, rms_norm
from qkattn.attention.scores.qk import QK
from qkattn.attention.scores.score import TwoMaps
from qkattn.attention.spec import AttentionSpec, one_of, whole

# Added to the mean square in both norms of NonlinearQuery.
EPSILON = 1e-5


class QueryFree(TwoMaps):
    """A[n] = P[n] W_K[n]^T: no W_Q; the query of head n is the n-th slice of the stream, x P[n].

    The gain of the norm before attention acts on the queries like a diagonal W_Q.

    The source uses the scale 1/(2 sqrt(H)), which is `query_free/vo?score_scale=0.5` here, and the
    weight decay 2^-5. configs/query_free_recipe.py compares these values with the defaults.
    """

    equation = 'P[n] W_K[n]^T'
    parameter_count = 'D*K*H'
    source = 'Karbevski & Mijoski 2025, arXiv 2510.23912'
    uses_kv_heads = True
    uses_slices = True
    query_map = SLICES
    key_map = QK.key_map

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        self.w_k_DKH, self.b_k_KH = affine(spec, key, 'w_k_DKH')
        self.scale = spec.head_size**-0.5
        self.spec = spec


class KeyFree(TwoMaps):
    """A[n] = W_Q[n] P[n]^T: no W_K; head n's key is the slice y P[n]. The cache is the stream."""

    equation = 'W_Q[n] P[n]^T'
    parameter_count = 'D*N*H'
    source = 'mirror image of query_free'
    uses_slices = True
    query_map = QK.query_map
    key_map = SLICES

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        self.w_q_DNH, self.b_q_NH = affine(spec, key, 'w_q_DNH')
        self.scale = spec.head_size**-0.5
        self.spec = spec


class Neither(TwoMaps):
    """A[n] = P[n] P[n]^T: neither W_Q nor W_K; head n compares the n-th slices of x and y.

    A token's logit with itself is |x P[n]|^2 * scale, about sqrt(H).
    """

    equation = 'P[n] P[n]^T'
    parameter_count = '0'
    source = 'query_free and key_free together'
    uses_slices = True
    query_map = SLICES
    key_map = SLICES

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        self.scale = spec.head_size**-0.5
        self.spec = spec


class QueryFreeFull(TwoMaps):
    """A[n] = W_K[n]^T with W_K[n] D x D: the query of every head is the whole stream.

    This Score can represent the same functions as `merged`. It caches a key for each head, and
    `merged` caches the stream once.
    """

    equation = 'W_K[n]^T, D x D'
    parameter_count = 'N*D*D'
    source = 'Karbevski & Mijoski 2025, arXiv 2510.23912, at full width'
    supports_rope = False
    key_map = Projection('w_k_DNE', 'b_k_NE', 'k_BSND')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        self.w_k_DNE, self.b_k_NE = affine(spec, key, 'w_k_DNE')
        self.scale = spec.d_model**-0.5
        self.spec = spec

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        B, T, D = x_BTD.shape
        return jnp.broadcast_to(x_BTD[:, :, None, :], (B, T, self.spec.num_heads, D))

    def matrix(self) -> jax.Array:
        k_DNE = homogeneous(self.w_k_DNE, self.b_k_NE)
        A_NED = jnp.transpose(k_DNE, (1, 2, 0))
        if self.b_k_NE is None:
            return A_NED
        # Queries have no bias: the last row of A, for the constant 1, is zero.
        return jnp.pad(A_NED, ((0, 0), (0, 1), (0, 0)))


class NeitherFull(TwoMaps):
    """A[n] = I: the logits are x y^T over the whole stream, the same for all heads.

    A token's logit with itself is |x|^2 * scale, about sqrt(D).
    """

    equation = 'I'
    parameter_count = '0'
    source = 'Luong et al. 2015, section 3.1 ("dot")'
    supports_rope = False
    key_map = STREAM
    queries = QueryFreeFull.queries

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        self.scale = spec.d_model**-0.5
        self.spec = spec

    def queries_and_keys(self, x_BTD: jax.Array, cache: Cache) -> tuple[jax.Array, jax.Array]:
        # All heads have the same logits, so one query head is enough.
        q_BT1D = x_BTD[:, :, None, :]
        return q_BT1D, self.keys(cache)

    def matrix(self) -> jax.Array:
        A_DE = jnp.eye(self.spec.d_model)
        if self.spec.biases:
            A_DE = jnp.pad(A_DE, ((0, 1), (0, 1)))
        return jnp.tile(A_DE[None], (self.spec.num_heads, 1, 1))


class NonlinearQuery(TwoMaps):
    """s[n] = Q(x) P[n] W_K[n]^T y^T with Q(x) = (x + f(x)) / 2: `query_free` with an MLP for W_Q.

    f(x) = LayerNorm(gelu(RMSNorm(x) W_1) W_2), where both norms have a gain. With R = D / 2 and
    K = N, this Score has 2 D more parameters than `qk`.

    Args:
        form: 'residual' for Q(x) = (x + f(x)) / 2, 'bottleneck' for Q(x) = f(x).
        rank: R, the width of the MLP; by default D // 2.
    """

    equation = '(I + f)/2 P[n] W_K[n]^T'
    parameter_count = '2*D*R + 2*D + D*K*H'
    source = 'Karbevski 2026, arXiv 2603.13381'
    options = {'form': one_of('residual', 'bottleneck'), 'rank': whole(1)}
    uses_kv_heads = True
    uses_slices = True
    bilinear = False
    key_map = QK.key_map

    def __init__(
        self,
        spec: AttentionSpec,
        *,
        key: jax.Array,
        form: str = 'residual',
        rank: int | None = None,
    ):
        D = spec.d_model
        H = spec.head_size
        R = max(1, D // 2) if rank is None else rank
        # f(x) = LayerNorm(gelu(RMSNorm(x) W_1) W_2), and the keys are y W_K[n].
        self.w_in_DR, self.b_in_R = affine(spec, key, 'w_q_in_DR', R=R)  # W_1
        self.w_out_RD, self.b_out_D = affine(spec, key, 'w_q_out_RD', R=R)  # W_2
        self.w_k_DKH, self.b_k_KH = affine(spec, key, 'w_k_DKH')
        self.g_in_D = nnx.Param(jnp.ones((D,), jnp.float32))  # of the RMSNorm
        self.g_out_D = nnx.Param(jnp.ones((D,), jnp.float32))  # of the LayerNorm
        self.residual = form == 'residual'

        # The scale gives the logits variance 1. Residual queries are the mean of two uncorrelated
        # vectors, so their variance is 1/2. QK-norm gives all queries variance 1.
        query_variance = 1.0
        if self.residual and not spec.qk_norm:
            query_variance = 0.5
        self.scale = (1 / query_variance / H) ** 0.5
        self.spec = spec

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        """Returns q_BTNH: (x + f(x)) / 2 or f(x), cut into one slice for each head.

        f(x) = LayerNorm(gelu(RMSNorm(x) W_1) W_2), where both norms have a gain.
        """
        # gelu(RMSNorm(x) W_1) W_2
        normed_BTD = rms_norm(x_BTD, epsilon=EPSILON) * self.g_in_D[...]
        hidden_BTR = project(normed_BTD, self.w_in_DR, self.b_in_R)
        out_BTD = jax.nn.gelu(hidden_BTR, approximate=False) @ self.w_out_RD[...]

        # LayerNorm, in float32 or wider
        wide_BTD = out_BTD.astype(jnp.promote_types(out_BTD.dtype, jnp.float32))
        standardized_BTD = jax.nn.standardize(wide_BTD, epsilon=EPSILON).astype(x_BTD.dtype)
        f_BTD = standardized_BTD * self.g_out_D[...]
        if self.b_out_D is not None:
            f_BTD = f_BTD + self.b_out_D[...]

        q_BTD = (x_BTD + f_BTD) / 2 if self.residual else f_BTD
        return heads_of(q_BTD, self.spec.num_heads)

    def matrix(self) -> jax.Array:
        raise NotImplementedError('nonlinear_query is not bilinear and has no matrix')

    def reference_logits(self, x_BTD: np.ndarray, y_BSD: np.ndarray) -> np.ndarray:
        """Computes s_BNTS / scale in float64, without `queries` and `keys`."""

        def float64(parameter: nnx.Param | None) -> np.ndarray:
            """Returns a parameter in float64; 0 for a bias that is None."""
            return np.zeros(()) if parameter is None else np.asarray(parameter[...], np.float64)

        x_BTD = np.asarray(x_BTD, np.float64)
        y_BSD = np.asarray(y_BSD, np.float64)

        # RMSNorm(x) W_1
        normed_BTD = x_BTD / np.sqrt((x_BTD**2).mean(-1, keepdims=True) + EPSILON)
        scaled_BTD = normed_BTD * float64(self.g_in_D)
        hidden_BTR = scaled_BTD @ float64(self.w_in_DR) + float64(self.b_in_R)

        # gelu(h) W_2, where gelu(h) = h Phi(h)
        gelu_BTR = hidden_BTR * scipy.special.ndtr(hidden_BTR)
        out_BTD = gelu_BTR @ float64(self.w_out_RD)

        # LayerNorm
        centered_BTD = out_BTD - out_BTD.mean(-1, keepdims=True)
        variance_BT1 = (centered_BTD**2).mean(-1, keepdims=True)
        standardized_BTD = centered_BTD / np.sqrt(variance_BT1 + EPSILON)
        f_BTD = standardized_BTD * float64(self.g_out_D) + float64(self.b_out_D)

        q_BTD = (x_BTD + f_BTD) / 2 if self.residual else f_BTD
        q_BTNH = q_BTD.reshape(*q_BTD.shape[:2], self.spec.num_heads, -1)
        k_BSKH = np.tensordot(y_BSD, float64(self.w_k_DKH), axes=1) + float64(self.b_k_KH)
        k_BSNH = np.repeat(k_BSKH, self.spec.num_heads // k_BSKH.shape[2], axis=2)
        return np.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSNH)
