"""Scores with fewer learned maps: the stream itself asks, or is asked, or both."""

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
    """A[n] = P[n] W_K[n]^T: no W_Q; the query of head n is the n-th slice of the stream.

    Weights D K H; needs N H = D. Karbevski & Mijoski 2025, arXiv 2510.23912 (W_Q = I).
    """

    equation = 'P[n] W_K[n]^T'
    parameter_count = 'D*K*H'
    source = 'Karbevski & Mijoski 2025, arXiv 2510.23912'
    uses_kv_heads = True

    @classmethod
    def check(cls, spec: AttentionSpec, **options) -> None:
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
    """A[n] = W_Q[n] P[n]^T: no W_K; the key of head n is the n-th slice of the memory.

    Weights D N H; needs N H = D. The cache holds the stream itself, D floats a token, and shares
    it with a Value that reads the stream too.
    """

    equation = 'W_Q[n] P[n]^T'
    parameter_count = 'D*N*H'
    source = 'mirror image of query_free'

    @classmethod
    def check(cls, spec: AttentionSpec, **options) -> None:
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


class QueryFreeFull(Score):
    """A[n] = W_K[n]^T with W_K[n] D x D: every head asks with the whole stream, x W_K[n]^T y^T.

    Weights N D^2. `merged` with its matrix on the side of the keys, hence the same functions; but
    each head caches a key of its own width D, N D floats a token, where `merged` caches the stream
    once. (A key-free Score of full width, x W_Q[n] y^T, is `merged` itself, cache included.)
    A bias on the keys moves all logits of a query alike, and softmax ignores it.
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
        return jnp.pad(A_NED, ((0, 0), (0, 1), (0, 0)))  # the raw query has no constant part


class Neither(Score):
    """A[n] = P[n] P[n]^T: neither W_Q nor W_K; head n compares the n-th slices. No weights.

    Needs N H = D. Logits are symmetric, and a token reads itself with |x P[n]|^2 * scale, about
    sqrt(H) at birth, against a standard deviation of 1 elsewhere. The control for query_free and
    key_free: what is left when both are.
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

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return heads_of(x_BTD, self.spec.num_heads)

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'x_BSD': y_BSD}

    def keys(self, cache: Cache) -> jax.Array:
        return heads_of(cache['x_BSD'], self.spec.num_heads)

    def matrix(self) -> jax.Array:
        P_DNH = slices_DNH(self.spec)
        return jnp.einsum('DNH,ENH->NDE', P_DNH, P_DNH)


class NeitherFull(Score):
    """A[n] = I: x y^T over the whole stream, with no weights. All heads have the same pattern.

    N heads are then one pattern with an OV circuit sum_n B[n]: more heads widen what is moved,
    never what is looked for. They are allowed so that num_heads can stay as in the other arms. A
    token reads itself with |x|^2 * scale, about sqrt(D) at birth.
    """

    equation = 'I'
    parameter_count = '0'
    source = 'Luong et al. 2015, eq. 8 ("dot")'
    supports_rope = False

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        self.scale = spec.d_model**-0.5
        self.spec = spec

    queries = QueryFreeFull.queries

    def cached(self, y_BSD: jax.Array) -> Cache:
        return {'x_BSD': y_BSD}

    def keys(self, cache: Cache) -> jax.Array:
        return cache['x_BSD'][:, :, None, :]

    def matrix(self) -> jax.Array:
        D, N = self.spec.d_model, self.spec.num_heads
        A_DE = jnp.eye(D)
        if self.spec.biases:
            A_DE = jnp.pad(A_DE, ((0, 1), (0, 1)))
        return jnp.tile(A_DE[None], (N, 1, 1))
