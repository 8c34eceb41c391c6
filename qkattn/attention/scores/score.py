"""The interface of a Score, one way to write A[n] in the logits scale * x_t A[n] y_s^T.

x is the normed stream of the queries, y that of the keys (y = x in self-attention). With biases, x
and y stand for (x, 1) and (y, 1), and A[n] has one more row and column.

At initialization, the logits have standard deviation 1 for independent x and y of unit variance.
Differences in training then come from the form of A[n], not from the size of the first logits. A
Score with another standard deviation declares it as `initial_logit_std`; no registered one does.
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
    arguments, and overrides the defaults below where it differs. If an option changes a class
    attribute, `__init__` sets the attribute on the instance.

    The name of a parameter says its role and axes: matrices `w_q_DNH`, biases `b_q_NH`, gains
    `g_q_H`. The axes decide how a parameter is sharded.
    """

    equation: str  # A[n] or B[n] as text
    source: ClassVar[str]  # the publication of the form
    # The number of parameters in axis letters, without biases: 'D*N*H'. The Score counts the
    # parameters that a Value shares with it.
    parameter_count: str
    uses_kv_heads: ClassVar[bool] = False  # whether num_kv_heads changes this circuit
    uses_slices: ClassVar[bool] = False  # whether heads are slices of the stream; then N H = D
    # The check of each option by itself. `check` is for conditions that involve more than one.
    options: ClassVar[Mapping[str, Check]] = {}
    uses_layer: ClassVar[bool] = False  # whether this circuit reads `layer`
    # The index of the layer in its decoder or encoder, from 0, set after `__init__`. It is an array
    # inside the scan over layers.
    layer: int | jax.Array

    @classmethod
    def check(cls, spec: AttentionSpec, *args: Any, **options: Any) -> None:
        """Raises SpecError if the circuit cannot be built with `spec` and these options."""


class Score(Circuit):
    """A factorization of A[n], built by `__init__(spec, *, key, **options)`."""

    scale: float  # the factor on q k^T, which `__init__` sets
    initial_logit_std: float = 1.0
    # Whether queries and keys may be rotated. Merged maps, and identity maps of full width, have no
    # rotary form.
    supports_rope: ClassVar[bool] = True
    # The projections that a Value may use, as the attribute names of their matrix and bias.
    # 'query' means x W + b = queries(x), 'key' means y W + b = keys(cached(y)), and 'latent' means
    # that y W + b is cached as 'latent_BSR'.
    shareable: ClassVar[Mapping[str, tuple[str, str]]] = {}

    # Whether the logits are scale * x A[n] y^T. If not, the Score defines `reference_logits` in
    # place of `matrix`.
    bilinear: bool = True
    # How many of the last channels of queries and keys are rotated; None is all.
    rope_size: int | None = None
    # Whether a query attends to itself only if no other key is visible.
    hides_self: bool = False

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        """Returns q_BTNH."""
        raise NotImplementedError

    def cached(self, y_BSD: jax.Array) -> Cache:
        """Returns the arrays [B, S, ...] that decoding caches, from which `keys` computes the keys.

        Names end in axes, e.g. 'k_BSKH'. If the Value caches an array under the same name, it is
        stored once for both.
        """
        raise NotImplementedError

    def keys(self, cache: Cache) -> jax.Array:
        """Returns k_BSKH, where K divides N."""
        raise NotImplementedError

    def queries_and_keys(self, x_BTD: jax.Array, cache: Cache) -> tuple[jax.Array, jax.Array]:
        """Returns q_BTNH and k_BSKH, or arrays with the same products that cost less.

        Which form costs less may depend on T and S. If all N heads have the same logits, the
        result may have one query head and one key head.
        """
        return self.queries(x_BTD), self.keys(cache)

    def relative_bias(self, distance_TS: jax.Array) -> jax.Array | None:
        """Returns b_NTS for the distances t - s, or None without such biases.

        They are added to the capped logits in self-attention, and left out in cross-attention.
        """
        return None

    def matrix(self) -> jax.Array:
        """Returns A_NDD without the scale; with biases (D + 1) x (D + 1), acting on (x, 1)."""
        raise NotImplementedError

    def reference_logits(self, x_BTD: np.ndarray, y_BSD: np.ndarray) -> np.ndarray:
        """Computes s_BNTS / scale again in float64, without `queries` and `keys`."""
        raise NotImplementedError

    def shared(self, which: str) -> tuple[jax.Array, jax.Array | None]:
        """Returns matrix and bias of a shareable projection; the bias is None without biases."""
        matrix_name, bias_name = self.shareable[which]
        return getattr(self, matrix_name), getattr(self, bias_name)


class TwoMaps(Score):
    """A[n] = Q[n] K[n]^T; a subclass declares the maps to the queries x Q[n] and keys y K[n]."""

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
