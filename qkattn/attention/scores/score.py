"""The interface of a Score, one way to write A[n] in the logits scale * x_t A[n] y_s^T.

x is the normed stream of the queries, and y the normed stream of the keys (y = x in
self-attention). With biases, x and y stand for (x, 1) and (y, 1), and A[n] has one more row and
column.

At initialization, the logits of all registered Scores have standard deviation 1, for independent x
and y of unit variance.
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

    A subclass creates its parameters in `__init__`, which takes the key and the options as
    keyword-only arguments. The names of parameters end in their axes, which decide how they are
    sharded: matrices `w_q_DNH`, biases `b_q_NH`, gains `g_q_H`.
    """

    equation: str  # A[n] or B[n] as text
    source: ClassVar[str]  # the publication of the form
    # The number of parameters without biases, in axis letters, such as 'D*N*H'. A Value does not
    # count the parameters of its Score.
    parameter_count: str
    uses_kv_heads: ClassVar[bool] = False  # whether num_kv_heads changes this circuit
    uses_slices: ClassVar[bool] = False  # whether heads are slices of the stream; then N H = D
    options: ClassVar[Mapping[str, Check]] = {}  # the check of each option
    uses_layer: ClassVar[bool] = False  # whether this circuit reads `layer`
    # The index of the layer in its decoder or encoder, from 0; set after `__init__`. It is an array
    # inside the scan over layers.
    layer: int | jax.Array

    @classmethod
    def check(cls, spec: AttentionSpec, *args: Any, **options: Any) -> None:
        """Raises SpecError if the circuit cannot be built with `spec` and these options."""


class Score(Circuit):
    """A factorization of A[n], built by `__init__(spec, *, key, **options)`."""

    scale: float  # the factor on q k^T; set by `__init__`
    initial_logit_std: float = 1.0  # the standard deviation of logits at initialization
    supports_rope: ClassVar[bool] = True  # whether queries and keys may be rotated
    # The attribute names (matrix, bias) of the projections that a Value may use: 'query' for
    # queries(x) = x W + b, 'key' for keys(cached(y)) = y W + b, and 'latent' for the array
    # 'latent_BSR' of the cache, y W + b.
    shareable: ClassVar[Mapping[str, tuple[str, str]]] = {}

    # Whether the logits are scale * x A[n] y^T. If not, a subclass defines `reference_logits`
    # instead of `matrix`.
    bilinear: bool = True
    rope_size: int | None = None  # the last `rope_size` channels are rotated; None for all channels
    hides_self: bool = False  # whether a token attends to itself only if it sees no other token

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        """Returns q_BTNH."""
        raise NotImplementedError

    def cached(self, y_BSD: jax.Array) -> Cache:
        """Returns the arrays [B, S, ...] to cache in decoding, by name.

        Names end in axes, as in 'k_BSKH'. An array that the Value caches under the same name is
        stored once.
        """
        raise NotImplementedError

    def keys(self, cache: Cache) -> jax.Array:
        """Returns k_BSKH, where K divides N."""
        raise NotImplementedError

    def queries_and_keys(self, x_BTD: jax.Array, cache: Cache) -> tuple[jax.Array, jax.Array]:
        """Returns q_BTNH and k_BSKH, or cheaper arrays with the same products q k^T.

        If all heads have the same logits, the arrays may have a single head.
        """
        return self.queries(x_BTD), self.keys(cache)

    def relative_bias(self, distance_TS: jax.Array) -> jax.Array | None:
        """Returns the biases b_NTS for the distances t - s, or None.

        In self-attention, the biases are added to the capped logits.
        """
        return None

    def matrix(self) -> jax.Array:
        """Returns A_NDD without the scale; with biases, (D + 1) x (D + 1) for (x, 1) and (y, 1)."""
        raise NotImplementedError

    def reference_logits(self, x_BTD: np.ndarray, y_BSD: np.ndarray) -> np.ndarray:
        """Computes s_BNTS / scale in float64, without `queries` and `keys`."""
        raise NotImplementedError

    def shared(self, which: str) -> tuple[jax.Array, jax.Array | None]:
        """Returns the matrix and the bias (or None) of a projection in `shareable`."""
        matrix_name, bias_name = self.shareable[which]
        return getattr(self, matrix_name), getattr(self, bias_name)


class TwoMaps(Score):
    """A[n] = Q[n] K[n]^T, where `query_map` is x -> x Q[n] and `key_map` is y -> y K[n]."""

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
