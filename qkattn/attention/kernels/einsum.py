"""The arguments of an attention, the devices that compute it, and the kernel of two einsums."""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qkattn.attention.mask import Mask
from qkattn.attention.normalizers import Normalizer

# Maps distance_TS, the distances t - s, to biases b_NTS for the scaled and capped logits.
Bias = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The arguments of `attend`. `dropout` is 0 if there is no dropout key."""

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
        """The numbers of queries and keys, T and S."""
        return self.q_BTNH.shape[1], self.k_BSKH.shape[1]

    def scaled(self) -> jax.Array:
        """Returns the queries times the scale, multiplied in float32 or wider."""
        dtype = jnp.promote_types(self.q_BTNH.dtype, jnp.float32)
        scaled_BTNH = self.q_BTNH * jnp.asarray(self.scale, dtype)
        return scaled_BTNH.astype(self.q_BTNH.dtype)

    def with_static_scale(self) -> tuple[jax.Array, float]:
        """Returns (queries, scale), where the scale is a Python float."""
        if isinstance(self.scale, jax.Array):
            return self.scaled(), 1.0
        return self.q_BTNH, self.scale


class Target(NamedTuple):
    """The devices that compute a call."""

    platform: str | None  # such as 'cpu'; None if not known yet
    mesh: Mesh | None = None  # None for one device
    capability: float = 8.0  # compute capability of CUDA devices; 0 for other GPUs

    @classmethod
    def from_mesh(cls, mesh: Mesh | None) -> 'Target':
        """Describes the devices of a mesh, or JAX's first device if mesh is None or abstract."""
        device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else jax.devices()[0]
        # '8.0' for a CUDA device, a name such as 'gfx90a' for other GPUs, missing for CPUs.
        text = str(getattr(device, 'compute_capability', 8.0))
        text_without_dot = text.replace('.', '', 1)
        is_number = text_without_dot.isdigit()
        capability = float(text) if is_number else 0.0
        return cls(platform=device.platform, mesh=mesh, capability=capability)


def einsum(call: Call) -> jax.Array:
    """Computes o_BTNH of `attend` from the logits of all queries and keys.

    A query without visible keys gets the mean of v (softmax, entmax) or 0 (other normalizers).
    There may be fewer key heads and value heads than query heads N.
    """
    q_BTNH = call.q_BTNH
    k_BSKH = call.k_BSKH
    v_BSKH = call.v_BSKH
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    logits_dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)

    # Logits. M = N / K query heads share a key head. Axis Q holds the M * T queries of a key head:
    # with M as a separate axis, XLA takes up to twice the time on a CPU.
    q_BKMTH = jnp.moveaxis(q_BTNH.reshape(B, T, K, N // K, H), 1, 3)
    q_BKQH = q_BKMTH.reshape(B, K, -1, H)
    k_BKSH = jnp.swapaxes(k_BSKH, 1, 2)
    s_BKQS = jnp.einsum('BKQH,BKSH->BKQS', q_BKQH, k_BKSH, preferred_element_type=logits_dtype)
    s_BNTS = s_BKQS.reshape(B, N, T, S) * call.scale

    # Cap, position biases and mask.
    if call.logit_cap is not None:
        s_BNTS = call.logit_cap * jnp.tanh(s_BNTS / call.logit_cap)
    if call.bias is not None:
        distance_TS = call.mask.queries(T)[:, None] - jnp.arange(S)
        s_BNTS = s_BNTS + call.bias(distance_TS)
    mask_B1TS = call.mask.dense(T, S)[:, None]
    # Half of the lowest number, so that normalizers can subtract from it.
    masked_logit = jnp.finfo(logits_dtype).min / 2
    s_BNTS = jnp.where(mask_B1TS, s_BNTS, masked_logit)

    # Probabilities.
    p_BNTS = call.normalizer(s_BNTS, mask_B1TS).astype(v_BSKH.dtype)
    if call.dropout:
        keep_BNTS = jax.random.bernoulli(call.dropout_key, 1 - call.dropout, p_BNTS.shape)
        p_BNTS = jnp.where(keep_BNTS, p_BNTS / (1 - call.dropout), 0)

    # Averages of the values. Here K is the number of value heads, and axis Q holds the N / K * T
    # queries of a value head.
    num_value_heads = v_BSKH.shape[2]
    p_BKQS = p_BNTS.reshape(B, num_value_heads, -1, S)
    v_BKSH = jnp.swapaxes(v_BSKH, 1, 2)
    o_BKQH = jnp.einsum('BKQS,BKSH->BKQH', p_BKQS, v_BKSH)
    return jnp.swapaxes(o_BKQH.reshape(B, N, T, -1), 1, 2)
