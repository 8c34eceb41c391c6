"""Attention kernels of JAX's own libraries: cuDNN on GPUs and splash attention on TPUs.

Each has an obstacle function, which says why it cannot serve a call: the end of the sentence
"kernel='splash' ...", or None where it can.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from qkattn.attention.kernels.einsum import Call, Target
from qkattn.attention.normalizers import Softmax
from qkattn.config.imports import load_extra

SPLASH = 'jax.experimental.pallas.ops.tpu.splash_attention'
SPLASH_BLOCKS = (512, 256, 128)  # of queries and keys, the largest that divides both


def _common_obstacle(call: Call) -> str | None:
    """What neither kernel does."""
    normalizer = type(call.normalizer)
    if normalizer is not Softmax:
        return f'computes softmax, not normalizer={normalizer.__name__}'
    k_heads = call.k_BSKH.shape[2]
    v_heads = call.v_BSKH.shape[2]
    if k_heads != v_heads:
        return f'needs as many key as value heads, not {k_heads} and {v_heads}'
    if call.bias is not None:
        return 'has no biases of positions (positions=alibi, or those of the score)'
    if call.dropout:
        return f'has no dropout of attention probabilities, which is {call.dropout}'
    if call.mask.hides_self:
        return 'cannot hide a token from itself'
    if call.mask.mask_BTS is not None:
        return 'takes no mask of pairs'
    return None


def dot_product_obstacle(call: Call, target: Target) -> str | None:
    """The obstacle of `dot_product`, which is cuDNN on a GPU and XLA elsewhere."""
    obstacle = _common_obstacle(call)
    if obstacle is not None:
        return obstacle
    mask = call.mask
    if call.logit_cap is not None:
        return f'has no logit_cap, which is {call.logit_cap}'
    if mask.valid_BS is not None or mask.segments_BS is not None:
        return 'takes no padding and no packed sequences'
    k_size = call.k_BSKH.shape[-1]
    v_size = call.v_BSKH.shape[-1]
    if k_size != v_size:
        return f'needs keys and values of one size, not {k_size} and {v_size}'
    if mask.window is not None and not mask.causal:
        return f'takes a window with a causal mask only, and window is {mask.window}'
    if target.platform != 'gpu':
        return None
    dtype = call.q_BTNH.dtype
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f'needs bfloat16 on a GPU, not {dtype}'
    if target.capability < 8:
        return f'needs a CUDA device of compute capability 8.0, not {target.capability}'
    size = call.q_BTNH.shape[-1]
    largest = 256 if target.capability >= 9 else 128
    if size % 8 or size > largest:
        return f'needs heads of 8, 16, ... {largest}, not {size}'
    return None


def dot_product(call: Call, target: Target) -> jax.Array:
    """o_BTNH by jax.nn.dot_product_attention."""
    mask = call.mask
    q_BTNH, scale = call.with_static_scale()
    window = None if mask.window is None else (mask.window - 1, 0)  # keys before and after a query
    return jax.nn.dot_product_attention(
        q_BTNH,
        call.k_BSKH,
        call.v_BSKH,
        scale=scale,
        is_causal=mask.causal,
        local_window_size=window,
        implementation='cudnn' if target.platform == 'gpu' else 'xla',
    )


def splash_obstacle(call: Call, target: Target) -> str | None:
    """The obstacle of `splash`."""
    obstacle = _common_obstacle(call)
    if obstacle is not None:
        return obstacle
    T, S = call.lengths
    block = SPLASH_BLOCKS[-1]
    if T % block or S % block:
        return f'needs contexts that are multiples of {block}, not {T} and {S}'
    if target.platform not in ('tpu', None):
        return f'runs on a TPU, not on {target.platform}'
    return None


def splash(call: Call, target: Target) -> jax.Array:
    """o_BTNH by JAX's splash attention, a Pallas kernel, which is interpreted off TPUs."""
    splash_attention = load_extra(SPLASH, 'tpu')
    mask = call.mask
    T, S = call.lengths
    if mask.window is not None:
        reach = mask.window - 1
        head_mask = splash_attention.LocalMask((T, S), (reach, 0 if mask.causal else reach), 0)
    elif mask.causal:
        head_mask = splash_attention.CausalMask((T, S))
    else:
        head_mask = splash_attention.FullMask((T, S))
    block = next(size for size in SPLASH_BLOCKS if T % size == 0 and S % size == 0)

    def attention(
        q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments: Any
    ) -> jax.Array:
        num_heads = q_BTNH.shape[2]
        kernel = splash_attention.make_splash_mha(
            splash_attention.MultiHeadMask([head_mask] * num_heads),
            block_sizes=splash_attention.BlockSizes(*[block] * 8),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=call.logit_cap,
            interpret=target.platform != 'tpu',
        )
        heads_first = (jnp.swapaxes(array, 1, 2) for array in (q_BTNH, k_BSKH, v_BSKH))
        return jnp.swapaxes(jax.vmap(kernel)(*heads_first, segments), 1, 2)

    mesh = target.mesh
    arrays = (call.scaled(), call.k_BSKH, call.v_BSKH, _segments(call))
    if mesh is None or mesh.size == 1:
        return attention(*arrays)
    # XLA does not partition a Pallas kernel: each device runs it on its own rows and heads.
    q_spec, k_spec = _splash_specs(call, mesh)
    sharded = jax.shard_map(
        attention,
        mesh=mesh,
        in_specs=(q_spec, k_spec, k_spec, P(q_spec[0])),
        out_specs=q_spec,
        check_vma=False,
    )
    return sharded(*arrays)


def _splash_specs(call: Call, mesh: Mesh) -> tuple[P, P]:
    """How queries, and keys and values, are split: rows and heads where the mesh divides them."""
    B, _, N, _ = call.q_BTNH.shape
    K = call.k_BSKH.shape[2]
    rows: tuple[str, str] | None = ('data', 'fsdp')
    if B % (mesh.shape['data'] * mesh.shape['fsdp']):
        rows = None
    shards = mesh.shape['tensor']
    q_heads = 'tensor' if N % shards == 0 and (K == 1 or K % shards == 0) else None
    k_heads = None if K == 1 else q_heads  # a key head that all query heads share is everywhere
    return P(rows, None, q_heads), P(rows, None, k_heads)


def _segments(call: Call) -> Any:
    """The sequences of queries and keys by number, with -1 at keys that no query sees; or None."""
    mask = call.mask
    if mask.valid_BS is None and mask.segments_BS is None:
        return None
    B = len(call.q_BTNH)
    T, S = call.lengths
    q_BT = jnp.ones((B, T), jnp.int32)
    kv_BS = jnp.ones((B, S), jnp.int32)
    if mask.segments_BS is not None:
        q_BT = mask.segments_BT
        kv_BS = jnp.where(mask.segments_BS > 0, mask.segments_BS, -1)
    if mask.valid_BS is not None:
        kv_BS = jnp.where(mask.valid_BS, kv_BS, -1)
    return load_extra(SPLASH, 'tpu').SegmentIds(q=q_BT, kv=kv_BS)
