"""The arguments of an attention, the devices that compute it, and the plain kernel: two einsums.

The einsums compute the logits of every query and key. Tests compare the other kernels with them.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qkattn.attention.mask import Mask
from qkattn.attention.normalizers import Normalizer

# A Bias returns b_NTS for distance_TS, the distances t - s. b_NTS is added to the scaled and capped
# logits.
Bias = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The arguments of `attend`. Without a dropout key, `dropout` is 0."""

    q_BTNH: jax.Array
    k_BSKH: jax.Array
    v_BSKH: jax.Array
    mask: Mask
    scale: float | jax.Array
    bias: Bias | None
    logit_cap: float | None
    normalizer: Normalizer
    dropout: float
    dropout_key: jax.Array | None

    @property
    def lengths(self) -> tuple[int, int]:
        """T and S."""
        return self.q_BTNH.shape[1], self.k_BSKH.shape[1]

    def scaled(self) -> jax.Array:
        """Returns the queries times the scale.

        The product is computed in float32 or wider, so that bfloat16 does not round the scale.
        """
        wide = jnp.promote_types(self.q_BTNH.dtype, jnp.float32)
        return (self.q_BTNH * jnp.asarray(self.scale, wide)).astype(self.q_BTNH.dtype)

    def with_static_scale(self) -> tuple[jax.Array, float]:
        """Returns queries and a scale that is a Python float.

        A scale that is an array is multiplied into the queries, which leaves 1.0.
        """
        if isinstance(self.scale, jax.Array):
            return self.scaled(), 1.0
        return self.q_BTNH, self.scale


class Target(NamedTuple):
    """The devices that compute a call."""

    platform: str | None  # JAX's name of it; None if it is not known yet, and nothing is computed
    mesh: Mesh | None = None  # the mesh of devices that share the call; None is one device
    capability: float = 8.0  # compute capability of CUDA devices; 0 for other GPUs

    @classmethod
    def from_mesh(cls, mesh: Mesh | None) -> 'Target':
        """Describes the devices of a mesh, or JAX's first device if mesh is None or abstract."""
        device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else jax.devices()[0]
        # The capability of a CUDA device is a number such as '8.0', that of another GPU a name such
        # as 'gfx90a'. CPUs have none.
        text = str(getattr(device, 'compute_capability', 8.0))
        is_number = text.replace('.', '', 1).isdigit()
        capability = float(text) if is_number else 0.0
        return cls(device.platform, mesh, capability)


def einsum(call: Call) -> jax.Array:
    """Computes o_BTNH of `attend` from the logits of all queries and keys.

    A query without visible keys gets the mean of v (softmax, entmax) or 0 (other normalizers).
    """
    q_BTNH = call.q_BTNH
    k_BSKH = call.k_BSKH
    v_BSKH = call.v_BSKH
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    logits_dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)

    # Logits. M = N / K query heads share a key head, so each key head has Q = M T queries: first
    # the T queries of one query head, then those of the next. XLA's CPU backend would take up to
    # twice the time with M as an axis of its own.
    q_BKMTH = jnp.moveaxis(q_BTNH.reshape(B, T, K, N // K, H), 1, 3)
    q_BKQH = q_BKMTH.reshape(B, K, -1, H)
    k_BKSH = jnp.swapaxes(k_BSKH, 1, 2)
    s_BKQS = jnp.einsum('BKQH,BKSH->BKQS', q_BKQH, k_BKSH, preferred_element_type=logits_dtype)
    s_BNTS = s_BKQS.reshape(B, N, T, S) * call.scale

    # What acts on the logits: the cap, position biases, the mask. The lowest number is halved, so
    # that normalizers can subtract from it.
    if call.logit_cap is not None:
        s_BNTS = call.logit_cap * jnp.tanh(s_BNTS / call.logit_cap)
    if call.bias is not None:
        distance_TS = call.mask.queries(T)[:, None] - jnp.arange(S)
        s_BNTS = s_BNTS + call.bias(distance_TS)
    mask_B1TS = call.mask.dense(T, S)[:, None]
    s_BNTS = jnp.where(mask_B1TS, s_BNTS, jnp.finfo(logits_dtype).min / 2)

    # Probabilities.
    p_BNTS = call.normalizer(s_BNTS, mask_B1TS).astype(v_BSKH.dtype)
    if call.dropout:
        keep_BNTS = jax.random.bernoulli(call.dropout_key, 1 - call.dropout, p_BNTS.shape)
        p_BNTS = jnp.where(keep_BNTS, p_BNTS / (1 - call.dropout), 0)

    # Averages of the values. As above, the queries that share a value head become its rows. There
    # may be more or fewer value heads than key heads.
    num_value_heads = v_BSKH.shape[2]
    p_BKQS = p_BNTS.reshape(B, num_value_heads, -1, S)
    v_BKSH = jnp.swapaxes(v_BSKH, 1, 2)
    o_BKQH = jnp.einsum('BKQS,BKSH->BKQH', p_BKQS, v_BKSH)
    return jnp.swapaxes(o_BKQH.reshape(B, N, T, -1), 1, 2)
