"""Scores with an identity in place of W_Q, of W_K, or of both."""

import jax
import jax.numpy as jnp

from qkattn.attention.options import require_slices
from qkattn.attention.parameters import (
    bias,
    grouped,
    heads_of,
    homogeneous,
    project,
    slices_DNH,
    weight,
)
from qkattn.attention.scores.score import Cache, Score
from qkattn.attention.spec import AttentionSpec


class QueryFree(Score):
    """A[n] = P[n] W_K[n]^T: no W_Q; the query of head n is the n-th slice of the stream, x P[n].

    Parameters: D K H. Needs N H = D. The gain of the norm before attention acts as a free diagonal
    W_Q: W_K and W_V can absorb it, P[n] cannot, and gains have no weight decay.

    Karbevski & Mijoski 2025, arXiv 2510.23912 (W_Q = I), who also change the scale to 1/(2 sqrt(H))
    and weight decay from 0.1 to 2^-5 (0.03 in their code). Under their initialization, std 0.02 at
    D = 768, the half brings the first logits from standard deviation 0.55 to 0.28, near the 0.31 of
    their baseline; here all Scores start at 1, so the scale stays H^-1/2. Their scale is
    `query_free/vo?score_scale=0.5`; configs/query_free_recipe.py compares both.
    """

    equation = 'P[n] W_K[n]^T'
    parameter_count = 'D*K*H'
    source = 'Karbevski & Mijoski 2025, arXiv 2510.23912'
    uses_kv_heads = True

    @classmethod
    def check(cls, spec: AttentionSpec) -> None:
        require_slices(spec, 'query_free')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, K, H = spec.d_model, spec.num_kv_heads, spec.head_size
        self.w_k_DKH = weight(key, 'w_k_DKH', (D, K, H), D**-0.5)
        self.b_k_KH = bias(spec, (K, H))
        self.scale = H**-0.5
        self.spec = spec

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return heads_of(x_BTD, self.spec.num_heads)

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'k_BSKH': project(y_BSD, self.w_k_DKH, self.b_k_KH)}

    def keys(self, cache: Cache) -> jax.Array:
        return cache['k_BSKH']

    def matrix(self) -> jax.Array:
        k_DNH = grouped(homogeneous(self.w_k_DKH, self.b_k_KH), self.spec.num_heads)
        return jnp.einsum('DNH,ENH->NDE', slices_DNH(self.spec), k_DNH)


class KeyFree(Score):
    """A[n] = W_Q[n] P[n]^T: no W_K; the key of head n is the n-th slice of the stream, y P[n].

    Parameters: D N H. Needs N H = D. The cache holds the stream, D floats per token, and shares it
    with a Value that caches the stream too.
    """

    equation = 'W_Q[n] P[n]^T'
    parameter_count = 'D*N*H'
    source = 'mirror image of query_free'

    @classmethod
    def check(cls, spec: AttentionSpec) -> None:
        require_slices(spec, 'key_free')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, H = spec.d_model, spec.num_heads, spec.head_size
        self.w_q_DNH = weight(key, 'w_q_DNH', (D, N, H), D**-0.5)
        self.b_q_NH = bias(spec, (N, H))
        self.scale = H**-0.5
        self.spec = spec

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return project(x_BTD, self.w_q_DNH, self.b_q_NH)

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'x_BSD': y_BSD}

    def keys(self, cache: Cache) -> jax.Array:
        return heads_of(cache['x_BSD'], self.spec.num_heads)

    def matrix(self) -> jax.Array:
        q_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        return jnp.einsum('DNH,ENH->NDE', q_DNH, slices_DNH(self.spec))


class Neither(Score):
    """A[n] = P[n] P[n]^T: neither W_Q nor W_K; head n compares the n-th slices of x and y.

    No parameters. Needs N H = D. Logits are symmetric; a token's logit with itself is
    |x P[n]|^2 * scale, about sqrt(H), where other logits have standard deviation 1. The control for
    `query_free` and `key_free`, of which it has both identities.
    """

    equation = 'P[n] P[n]^T'
    parameter_count = '0'
    source = 'query_free and key_free together'

    @classmethod
    def check(cls, spec: AttentionSpec) -> None:
        require_slices(spec, 'neither')

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        self.scale = spec.head_size**-0.5
        self.spec = spec

    queries = QueryFree.queries
    cached = KeyFree.cached
    keys = KeyFree.keys

    def matrix(self) -> jax.Array:
        P_DNH = slices_DNH(self.spec)
        return jnp.einsum('DNH,ENH->NDE', P_DNH, P_DNH)


class QueryFreeFull(Score):
    """A[n] = W_K[n]^T with W_K[n] D x D: the query of every head is the whole stream.

    Parameters: N D^2. The same functions as `merged`, with the matrix on the side of the keys: each
    head caches a key of its own, N D floats per token, where `merged` caches the stream once. (A
    key-free Score of full width is `merged` itself.) A bias on the keys moves all logits of a query
    alike, which the softmax ignores.
    The full-width reading of Karbevski & Mijoski 2025, arXiv 2510.23912 (W_Q = I).
    """

    equation = 'W_K[n]^T, D x D'
    parameter_count = 'N*D*D'
    source = 'Karbevski & Mijoski 2025, arXiv 2510.23912, at full width'
    supports_rope = False

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N = spec.d_model, spec.num_heads
        self.w_k_DNE = weight(key, 'w_k_DNE', (D, N, D), D**-0.5)
        self.b_k_NE = bias(spec, (N, D))
        self.scale = D**-0.5
        self.spec = spec

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        B, T, D = x_BTD.shape
        return jnp.broadcast_to(x_BTD[:, :, None, :], (B, T, self.spec.num_heads, D))

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'k_BSND': project(y_BSD, self.w_k_DNE, self.b_k_NE)}

    def keys(self, cache: Cache) -> jax.Array:
        return cache['k_BSND']

    def matrix(self) -> jax.Array:
        A_NED = jnp.transpose(homogeneous(self.w_k_DNE, self.b_k_NE), (1, 2, 0))
        if self.b_k_NE is None:
            return A_NED
        return jnp.pad(A_NED, ((0, 0), (0, 1), (0, 0)))  # queries have no bias


class NeitherFull(Score):
    """A[n] = I: the logits are x y^T over the whole stream, the same for all heads.

    No parameters. All heads then have one attention pattern, whose OV circuit is sum_n B[n]; N > 1
    is allowed so that num_heads can stay as in the other variants of a study. A token's logit with
    itself is |x|^2 * scale, about sqrt(D).
    """

    equation = 'I'
    parameter_count = '0'
    source = 'Luong et al. 2015, eq. 8 ("dot")'
    supports_rope = False

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        self.scale = spec.d_model**-0.5
        self.spec = spec

    queries = QueryFreeFull.queries
    cached = KeyFree.cached

    def queries_and_keys(self, x_BTD: jax.Array, cache: Cache) -> tuple[jax.Array, jax.Array]:
        return x_BTD[:, :, None, :], self.keys(cache)

    def keys(self, cache: Cache) -> jax.Array:
        return cache['x_BSD'][:, :, None, :]

    def matrix(self) -> jax.Array:
        D, N = self.spec.d_model, self.spec.num_heads
        A_DE = jnp.eye(D)
        if self.spec.biases:
            A_DE = jnp.pad(A_DE, ((0, 1), (0, 1)))
        return jnp.tile(A_DE[None], (N, 1, 1))
