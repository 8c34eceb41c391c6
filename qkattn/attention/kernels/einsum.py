"""The arguments of an attention, the devices it is for, and the plain kernel: two einsums.

The einsums compute the logits of all pairs of a query and a key. They are what other kernels are
compared with.
"""

import dataclasses
from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qkattn.attention.mask import Mask
from qkattn.attention.normalizers import Normalizer

# distance_TS -> b_NTS, what is added to the scaled and capped logits at distances t - s.
Bias = Callable[[jax.Array], jax.Array]


@dataclasses.dataclass(frozen=True, kw_only=True, eq=False)
class Call:
    """The arguments of `attend`; `dropout` is 0 without a key."""

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
        """The queries times the scale, which is not rounded to a narrow dtype like bfloat16."""
        wide = jnp.promote_types(self.q_BTNH.dtype, jnp.float32)
        return (self.q_BTNH * jnp.asarray(self.scale, wide)).astype(self.q_BTNH.dtype)

    def with_static_scale(self) -> tuple[jax.Array, float]:
        """The queries and the scale; an array as scale is multiplied into the queries."""
        if isinstance(self.scale, jax.Array):
            return self.scaled(), 1.0
        return self.q_BTNH, self.scale


class Target(NamedTuple):
    """Where a call is computed."""

    platform: str | None  # as JAX names it; None is not known yet, and nothing is computed
    mesh: Mesh | None = None  # of the devices that share it; None is one device
    capability: float = 8.0  # compute capability of CUDA devices; 0 of other GPUs

    @classmethod
    def from_mesh(cls, mesh: Mesh | None) -> 'Target':
        """The devices of a mesh; JAX's first device without one, or with an abstract one."""
        device = mesh.devices.flat[0] if isinstance(mesh, Mesh) else jax.devices()[0]
        # CUDA devices have a number, as '8.0'; other GPUs a name, as 'gfx90a'; CPUs nothing.
        text = str(getattr(device, 'compute_capability', 8.0))
        is_number = text.replace('.', '', 1).isdigit()
        capability = float(text) if is_number else 0.0
        return cls(device.platform, mesh, capability)


def einsum(call: Call) -> jax.Array:
    """o_BTNH as in `attend`; without visible keys the mean of v (softmax, entmax) or 0."""
    q_BTNH = call.q_BTNH
    k_BSKH = call.k_BSKH
    v_BSKH = call.v_BSKH
    B, T, N, H = q_BTNH.shape
    S, K = k_BSKH.shape[1:3]
    logits_dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    # The query heads of a key head are further rows, Q = M T: XLA's CPU backend takes up to twice
    # the time for products with an axis M = N / K of their own, and for a softmax over five axes.
    q_BKMTH = jnp.moveaxis(q_BTNH.reshape(B, T, K, N // K, H), 1, 3)
    s_BKQS = jnp.einsum(
        'BKQH,BKSH->BKQS',
        q_BKMTH.reshape(B, K, -1, H),
        jnp.swapaxes(k_BSKH, 1, 2),
        preferred_element_type=logits_dtype,
    )
    s_BNTS = s_BKQS.reshape(B, N, T, S) * call.scale
    if call.logit_cap is not None:
        s_BNTS = call.logit_cap * jnp.tanh(s_BNTS / call.logit_cap)
    if call.bias is not None:
        s_BNTS = s_BNTS + call.bias(call.mask.queries(T)[:, None] - jnp.arange(S))
    mask_B1TS = call.mask.dense(T, S)[:, None]
    s_BNTS = jnp.where(mask_B1TS, s_BNTS, jnp.finfo(logits_dtype).min / 2)
    p_BNTS = call.normalizer(s_BNTS, mask_B1TS).astype(v_BSKH.dtype)
    if call.dropout:
        keep_BNTS = jax.random.bernoulli(call.dropout_key, 1 - call.dropout, p_BNTS.shape)
        p_BNTS = jnp.where(keep_BNTS, p_BNTS / (1 - call.dropout), 0)
    p_BKQS = p_BNTS.reshape(B, v_BSKH.shape[2], -1, S)
    o_BKQH = jnp.einsum('BKQS,BKSH->BKQH', p_BKQS, jnp.swapaxes(v_BSKH, 1, 2))
    return jnp.swapaxes(o_BKQH.reshape(B, N, T, -1), 1, 2)
