"""Scores: ways to write A[n] in the logits  s[n, t, s] = scale * x_t A[n] y_s^T  (QK circuit).

x is the normed stream that asks, y the memory that is read (y = x in self-attention). With
biases, x and y stand for (x, 1) and (y, 1), and A[n] has one more row and column.

Initial weights make the off-diagonal logits of independent unit-variance inputs have standard
deviation 1 in every Score; weights that look alike at birth do not decide a comparison.
"""

import dataclasses
from typing import ClassVar

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention.spec import (
    AttentionSpec,
    bias,
    grouped,
    heads_of,
    homogeneous,
    project,
    require_slices,
    slices_DNH,
    weight,
)
from qkattn.errors import SpecError

Memory = dict[str, jax.Array]


class Score(nnx.Module):
    """Interface of a factorization of A[n].

    A subclass sets the class attributes, builds its parameters in
    `__init__(spec, *, key, **options)`, and defines the four methods. Parameters are named
    `w_` (matrices) or `b_` (biases), then their axes: `w_q_DNH`.

    Attributes:
      equation: A[n] as text.
      weights: number of weights in the letters of the spec (biases left out); a test evaluates it.
      source: where the form comes from.
      uses_kv_heads: whether num_kv_heads changes this Score.
      supports_rope: whether rotating queries and keys by position keeps the form's meaning; the
        full-width merged and identity maps have no canonical rotary form.
      bilinear: whether the logits are x A[n] y^T. Where not, `reference_logits` takes the place
        of `matrix`.
      scale: factor on q k^T.
      rope_size: how many of the last channels of q and k are rotated; None is all.
      hides_self: whether a query reads itself only where nothing else is visible.
    """

    equation: ClassVar[str]
    weights: ClassVar[str]
    source: ClassVar[str]
    uses_kv_heads: ClassVar[bool] = False
    supports_rope: ClassVar[bool] = True
    bilinear: ClassVar[bool] = True
    scale: float
    rope_size: int | None = None
    hides_self: bool = False

    @classmethod
    def check(cls, spec: AttentionSpec, **options) -> None:
        """Raises SpecError where this Score cannot be built with `spec` and its own options."""

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        """q_BTNH of the asking stream."""
        raise NotImplementedError

    def remember(self, y_BSD: jax.Array) -> Memory:
        """What a decoding cache must hold of y for `keys`; equal names hold equal arrays."""
        raise NotImplementedError

    def keys(self, memory: Memory) -> jax.Array:
        """k_BSKH from what is remembered."""
        raise NotImplementedError

    def matrix(self) -> jax.Array:
        """A_NDD, without the scale; (D+1) x (D+1) in homogeneous coordinates with biases."""
        raise NotImplementedError


class QK(Score):
    """A[n] = W_Q[n] W_K[n]^T, rank <= H: standard multi-head attention.

    Weights D N H + D K H. With K < N, heads share keys in groups of N / K.
    Vaswani et al. 2017, section 3.2.2; Shazeer 2019 (K = 1); Ainslie et al. 2023 (K < N).
    """

    equation = 'W_Q[n] W_K[n]^T'
    weights = 'D*N*H + D*K*H'
    source = 'Vaswani et al. 2017; Shazeer 2019; Ainslie et al. 2023'
    uses_kv_heads = True
    query_weight = 'w_q_DNH'
    key_weight = 'w_k_DKH'

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, K, H = spec.d_model, spec.num_heads, spec.num_kv_heads, spec.head_size
        self.w_q_DNH = weight(key, 'w_q_DNH', (D, N, H), D**-0.5)
        self.w_k_DKH = weight(key, 'w_k_DKH', (D, K, H), D**-0.5)
        self.b_q_NH = bias(spec, (N, H))
        self.b_k_KH = bias(spec, (K, H))
        self.scale = H**-0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return project(x_BTD, self.w_q_DNH, self.b_q_NH)

    def remember(self, y_BSD: jax.Array) -> Memory:
        return {'k_BSKH': project(y_BSD, self.w_k_DKH, self.b_k_KH)}

    def keys(self, memory: Memory) -> jax.Array:
        return memory['k_BSKH']

    def matrix(self) -> jax.Array:
        q_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        k_DNH = grouped(homogeneous(self.w_k_DKH, self.b_k_KH), q_DNH.shape[1])
        return jnp.einsum('DNH,ENH->NDE', q_DNH, k_DNH)


class Merged(Score):
    """A[n] = W_QK[n], full rank: one D x D matrix a head; the keys are the stream itself.

    Weights N D^2; more than the factored 2 D N H whenever D > 2 H. The one key head of width D is
    shared by all query heads and is never copied to them. Luong et al. 2015, "general".

    Args:
      init: 'dense' draws every entry; 'product' starts from W_Q[n] W_K[n]^T of rank H, the very
        logits with which `qk` starts under the same seed, and leaves the rank free to grow.
    """

    equation = 'W_QK[n]'
    weights = 'N*D*D'
    source = 'Luong et al. 2015, eq. 8 ("general")'
    supports_rope = False

    @classmethod
    def check(cls, spec: AttentionSpec, *, init: str = 'dense') -> None:
        if init not in ('dense', 'product'):
            raise SpecError(f"merged(init={init!r}) must be 'dense' or 'product'")

    def __init__(self, spec: AttentionSpec, *, key: jax.Array, init: str = 'dense'):
        D, N = spec.d_model, spec.num_heads
        if init == 'product':
            A_NDE = QK(dataclasses.replace(spec, biases=False), key=key).matrix()
            rescale = (D / spec.head_size) ** 0.5  # the scale on the logits differs from that of qk
            self.w_qk_DNE = nnx.Param(rescale * jnp.moveaxis(A_NDE, 0, 1))
        else:
            self.w_qk_DNE = weight(key, 'w_qk_DNE', (D, N, D), D**-0.5)
        self.b_q_NE = bias(spec, (N, D))
        self.scale = D**-0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return project(x_BTD, self.w_qk_DNE, self.b_q_NE)

    def remember(self, y_BSD: jax.Array) -> Memory:
        return {'x_BSD': y_BSD}

    def keys(self, memory: Memory) -> jax.Array:
        return memory['x_BSD'][:, :, None, :]

    def matrix(self) -> jax.Array:
        A_NDE = jnp.moveaxis(homogeneous(self.w_qk_DNE, self.b_q_NE), 1, 0)
        if self.b_q_NE is None:
            return A_NDE
        return jnp.pad(A_NDE, ((0, 0), (0, 0), (0, 1)))  # the raw key has no constant part


class SharedQK(Score):
    """A[n] = W[n] W[n]^T, symmetric and positive semi-definite: one matrix for queries and keys.

    Weights D N H. Off the diagonal x W W^T y has variance H (1 + H/D) std^4 D^2, hence the
    standard deviation below. On the diagonal the logit is |x W|^2 * scale, about
    sqrt(H) / sqrt(1 + H/D): every token first reads itself. Kitaev et al. 2020 (Reformer) hide
    the diagonal for that reason; here it is visible.
    """

    equation = 'W_Q[n] W_Q[n]^T'
    weights = 'D*N*H'
    source = 'Kitaev et al. 2020, section 2; Courtois et al. 2024 ("symmetric")'
    query_weight = 'w_q_DNH'
    key_weight = 'w_q_DNH'

    def __init__(self, spec: AttentionSpec, *, key: jax.Array):
        D, N, H = spec.d_model, spec.num_heads, spec.head_size
        self.w_q_DNH = weight(key, 'w_q_DNH', (D, N, H), D**-0.5 * (1 + H / D) ** -0.25)
        self.b_q_NH = bias(spec, (N, H))
        self.scale = H**-0.5

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return project(x_BTD, self.w_q_DNH, self.b_q_NH)

    def remember(self, y_BSD: jax.Array) -> Memory:
        return {'k_BSNH': self.queries(y_BSD)}

    def keys(self, memory: Memory) -> jax.Array:
        return memory['k_BSNH']

    def matrix(self) -> jax.Array:
        w_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        return jnp.einsum('DNH,ENH->NDE', w_DNH, w_DNH)


class QueryFree(Score):
    """A[n] = P[n] W_K[n]^T: no W_Q; the query of head n is the n-th slice of the stream.

    Weights D K H; needs N H = D. Karbevski & Mijoski 2025, arXiv 2510.23912 (W_Q = I).
    """

    equation = 'P[n] W_K[n]^T'
    weights = 'D*K*H'
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

    def remember(self, y_BSD: jax.Array) -> Memory:
        return {'k_BSKH': project(y_BSD, self.w_k_DKH, self.b_k_KH)}

    def keys(self, memory: Memory) -> jax.Array:
        return memory['k_BSKH']

    def matrix(self) -> jax.Array:
        k_DNH = grouped(homogeneous(self.w_k_DKH, self.b_k_KH), self.spec.num_heads)
        return jnp.einsum('DNH,ENH->NDE', slices_DNH(self.spec), k_DNH)


class KeyFree(Score):
    """A[n] = W_Q[n] P[n]^T: no W_K; the key of head n is the n-th slice of the memory.

    Weights D N H; needs N H = D. The cache holds the stream itself, D floats a token, and shares
    it with a Value that reads the stream too.
    """

    equation = 'W_Q[n] P[n]^T'
    weights = 'D*N*H'
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

    def remember(self, y_BSD: jax.Array) -> Memory:
        return {'x_BSD': y_BSD}

    def keys(self, memory: Memory) -> jax.Array:
        return heads_of(memory['x_BSD'], self.spec.num_heads)

    def matrix(self) -> jax.Array:
        q_DNH = homogeneous(self.w_q_DNH, self.b_q_NH)
        return jnp.einsum('DNH,ENH->NDE', q_DNH, slices_DNH(self.spec))
