"""The interface of a Score, one way to write A[n] in the logits scale * x_t A[n] y_s^T.

x is the normed stream of the queries, y that of the keys (y = x in self-attention). With biases, x
and y stand for (x, 1) and (y, 1), and A[n] has one more row and column.

Every Score initializes its parameters so that the logits of independent x and y of unit variance
have standard deviation 1. Differences in training then come from the form of A[n], not from the
size of the first logits.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention.maps import Cache, Map
from qkattn.attention.parameters import grouped
from qkattn.attention.spec import AttentionSpec, Check


class Circuit(nnx.Module):
    """A Score or a Value: a factorization of A[n] or of B[n].

    A subclass builds its parameters in `__init__`, with the key and its options as keyword-only
    arguments, and overrides what differs from the defaults below. Parameters are named by role and
    axes: matrices `w_q_DNH`, biases `b_q_NH`, gains `g_q_H`; the axes decide how they are sharded.
    Where options do not change a property, a subclass may override it with a class attribute:
    `parameter_count = 'D*N*H'`.

    Attributes:
      equation: A[n] or B[n] as text.
      source: where the form comes from.
      uses_kv_heads: whether num_kv_heads changes this circuit.
      uses_slices: whether heads are slices of the stream, which needs N H = D.
      options: what the value of an option has to be; `check` is for the rest.
      uses_layer: whether this circuit reads `layer`.
      layer: index of the layer in its stack, from 0; an array in a stack that is scanned. It is
        known in every method but `__init__`, with `uses_layer`.
    """

    equation: ClassVar[str]
    source: ClassVar[str]
    uses_kv_heads: ClassVar[bool] = False
    uses_slices: ClassVar[bool] = False
    options: ClassVar[Mapping[str, Check]] = {}
    uses_layer: ClassVar[bool] = False
    layer: int | jax.Array

    @property
    def parameter_count(self) -> str:
        """The number of parameters without biases, in the letters of their axes: 'D*N*H'.

        What a Value shares with its Score counts in the Score.
        """
        raise NotImplementedError

    @classmethod
    def check(cls, spec: AttentionSpec, *args: Any, **options: Any) -> None:
        """Raises SpecError where the circuit cannot be built with `spec` and these options."""


class Score(Circuit):
    """A factorization of A[n], built by `__init__(spec, *, key, **options)`.

    Attributes:
      scale: factor on q k^T, which `__init__` sets.
      supports_rope: whether queries and keys may be rotated by position; full-width merged and
        identity maps have no canonical rotary form.
      shareable: the projections that a Value may use, as the attribute names of matrix and bias:
        'query' and 'key' for x W + b = queries(x) and y W + b = keys(cached(y)), 'latent' for a
        latent y W + b that is cached as 'latent_BSR'.
    """

    scale: float
    supports_rope: ClassVar[bool] = True
    shareable: ClassVar[Mapping[str, tuple[str, str]]] = {}

    @property
    def bilinear(self) -> bool:
        """Whether the logits are scale * x A[n] y^T; else `reference_logits` replaces `matrix`."""
        return True

    @property
    def rope_size(self) -> int | None:
        """How many of the last channels of queries and keys are rotated; None is all."""
        return None

    @property
    def hides_self(self) -> bool:
        """Whether a query attends to its own position only where no other one is visible."""
        return False

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        """q_BTNH."""
        raise NotImplementedError

    def cached(self, y_BSD: jax.Array) -> Cache:
        """The arrays [B, S, ...] from which `keys` are computed: what a decoding cache holds.

        A name ends in the axes of its array, as in 'k_BSKH'. A Score and a Value that cache an
        array under the same name share it, so equal names must mean equal arrays.
        """
        raise NotImplementedError

    def keys(self, cache: Cache) -> jax.Array:
        """k_BSKH, where K divides N."""
        raise NotImplementedError

    def queries_and_keys(self, x_BTD: jax.Array, cache: Cache) -> tuple[jax.Array, jax.Array]:
        """q_BTNH and k_BSKH, or others with the same products that are cheaper for this T and S.

        One query head and one key head stand for the logits that all N heads have in common.
        """
        return self.queries(x_BTD), self.keys(cache)

    def relative_bias(self, distance_TS: jax.Array) -> jax.Array | None:
        """b_NTS of the distances t - s, added to the scaled and capped logits; None is without.

        It is left out in cross-attention, whose two streams have no common positions.
        """
        return None

    def matrix(self) -> jax.Array:
        """A_NDD without the scale; (D+1) x (D+1) in homogeneous coordinates with biases."""
        raise NotImplementedError

    def reference_logits(self, x_BTD: np.ndarray, y_BSD: np.ndarray) -> np.ndarray:
        """s_BNTS / scale in float64, computed independently of `queries` and `keys`."""
        raise NotImplementedError

    def shared(self, which: str) -> tuple[jax.Array, jax.Array | None]:
        """Matrix and bias of a shareable projection; the bias is None without biases."""
        matrix, bias = self.shareable[which]
        return getattr(self, matrix), getattr(self, bias)


class TwoMaps(Score):
    """A Score of the form A[n] = Q[n] K[n]^T: the queries x Q[n] and the keys y K[n] are maps.

    A subclass declares the maps, and overrides what it adds to them.
    """

    query_map: Map
    key_map: Map

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        return self.query_map(self, x_BTD)

    def cached(self, y_BSD: jax.Array) -> Cache:
        return self.key_map.cached(self, y_BSD)

    def keys(self, cache: Cache) -> jax.Array:
        return self.key_map.heads(self, cache)

    def matrix(self) -> jax.Array:
        q_DNH = self.query_map.matrix(self)
        k_DNH = grouped(self.key_map.matrix(self), q_DNH.shape[1])
        return jnp.einsum('DNH,ENH->NDE', q_DNH, k_DNH)
