"""The interface of a Score, one way to write A[n] in the logits scale * x_t A[n] y_s^T.

x is the normed stream of the queries, y that of the keys (y = x in self-attention). With biases, x
and y stand for (x, 1) and (y, 1), and A[n] has one more row and column.

A Score starts with logits of standard deviation 1 for independent x and y of unit variance, so that
differences in training come from the form of A[n], not from the size of the first logits. One that
is defined with another size declares it as `initial_logit_std`; no registered one does.
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
    What an option changes is set in `__init__` in place of the class attribute.
    """

    equation: str  # A[n] or B[n] as text
    source: ClassVar[str]  # where the form comes from
    # Parameters without biases, in letters: 'D*N*H'. What a Value shares counts in the Score.
    parameter_count: str
    uses_kv_heads: ClassVar[bool] = False  # whether num_kv_heads changes this circuit
    uses_slices: ClassVar[bool] = False  # whether heads are slices of the stream, where N H = D
    # What the value of each option must be, by the name of the option; `check` is for the rest.
    options: ClassVar[Mapping[str, Check]] = {}
    uses_layer: ClassVar[bool] = False  # whether this circuit reads `layer`
    # Index among all layers of its decoder or encoder, from 0; an array where they are scanned.
    # It is set after `__init__`.
    layer: int | jax.Array

    @classmethod
    def check(cls, spec: AttentionSpec, *args: Any, **options: Any) -> None:
        """Raises SpecError where the circuit cannot be built with `spec` and these options."""


class Score(Circuit):
    """A factorization of A[n], built by `__init__(spec, *, key, **options)`."""

    scale: float  # factor on q k^T, which `__init__` sets
    initial_logit_std: float = 1.0
    # Whether both may be rotated; merged and identity maps of full width have no rotary form.
    supports_rope: ClassVar[bool] = True
    # The projections that a Value may use, as the attribute names of matrix and bias: 'query' and
    # 'key' for x W + b = queries(x) and y W + b = keys(cached(y)), 'latent' for a latent y W + b
    # that is cached as 'latent_BSR'.
    shareable: ClassVar[Mapping[str, tuple[str, str]]] = {}

    # Whether the logits are scale * x A[n] y^T; else `reference_logits` replaces `matrix`.
    bilinear: bool = True
    # How many of the last channels of queries and keys are rotated; None is all.
    rope_size: int | None = None
    # Whether a query attends to its own position only where no other one is visible.
    hides_self: bool = False

    def queries(self, x_BTD: jax.Array) -> jax.Array:
        """q_BTNH."""
        raise NotImplementedError

    def cached(self, y_BSD: jax.Array) -> Cache:
        """The arrays [B, S, ...] from which `keys` are computed: what a decoding cache holds.

        Names end in axes, as 'k_BSKH'. A Score and a Value share what they cache under one name.
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
        """b_NTS of t - s, added to the capped logits, but not in cross-attention; or None."""
        return None

    def matrix(self) -> jax.Array:
        """A_NDD without the scale; (D+1) x (D+1) in homogeneous coordinates with biases."""
        raise NotImplementedError

    def reference_logits(self, x_BTD: np.ndarray, y_BSD: np.ndarray) -> np.ndarray:
        """s_BNTS / scale in float64, computed independently of `queries` and `keys`."""
        raise NotImplementedError

    def shared(self, which: str) -> tuple[jax.Array, jax.Array | None]:
        """Matrix and bias of a shareable projection; the bias is None without biases."""
        matrix_name, bias_name = self.shareable[which]
        return getattr(self, matrix_name), getattr(self, bias_name)


class TwoMaps(Score):
    """A[n] = Q[n] K[n]^T, where a subclass declares the maps to queries x Q[n] and keys y K[n]."""

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
