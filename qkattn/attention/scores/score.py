"""Scores: ways to write A[n] in the logits  s[n, t, s] = scale * x_t A[n] y_s^T  (QK circuit).

x is the normed stream that asks, y the memory that is read (y = x in self-attention). With
biases, x and y stand for (x, 1) and (y, 1), and A[n] has one more row and column.

Initial weights make the off-diagonal logits of independent unit-variance inputs have standard
deviation 1 in every Score; weights that look alike at birth do not decide a comparison.
"""

from typing import ClassVar

import jax
from flax import nnx

from qkattn.attention.spec import AttentionSpec

Cache = dict[str, jax.Array]


class Score(nnx.Module):
    """Interface of a factorization of A[n].

    A subclass sets the class attributes, builds its parameters in
    `__init__(spec, *, key, **options)`, and defines the four methods. Parameters are named
    `w_` (matrices) or `b_` (biases), then their axes: `w_q_DNH`.

    Attributes:
      equation: A[n] as text.
      parameter_count: number of parameters in letters, biases left out; a test evaluates it.
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
    parameter_count: ClassVar[str]
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

    def cached(self, y_BSD: jax.Array) -> Cache:
        """What a decoding cache must hold of y for `keys`; equal names hold equal arrays."""
        raise NotImplementedError

    def keys(self, cache: Cache) -> jax.Array:
        """k_BSKH from what is remembered."""
        raise NotImplementedError

    def matrix(self) -> jax.Array:
        """A_NDD, without the scale; (D+1) x (D+1) in homogeneous coordinates with biases."""
        raise NotImplementedError
