"""Attention kernels of JAX's own libraries: cuDNN on GPUs and splash attention on TPUs.

Each kernel has an obstacle function, which returns why the kernel cannot compute a call. The reason
ends a sentence, as in "kernel='splash' cannot hide a token from itself".
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
# Splash attention uses the largest of these block sizes that divides T and S.
SPLASH_BLOCKS = (512, 256, 128)
SMALLEST_SPLASH_BLOCK = SPLASH_BLOCKS[-1]


def _common_obstacle(call: Call) -> str | None:
    """Returns a reason why no library kernel can compute a call; None if there is none."""
    normalizer = type(call.normalizer)
    if normalizer is not Softmax:
        return f'computes softmax, not normalizer={normalizer.__name__}'
    k_heads = call.k_BSKH.shape[2]
    v_heads = call.v_BSKH.shape[2]
    if k_heads != v_heads:
        return f'needs as many key as value heads, not {k_heads} and {v_heads}'
    if call.bias is not None:
        return 'cannot add position biases (positions=alibi, or biases of the score)'
    if call.dropout:
        return f'cannot drop attention probabilities, and their dropout is {call.dropout}'
    if call.mask.hides_self:
        return 'cannot hide a token from itself'
    if call.mask.mask_BTS is not None:
        return 'does not take a mask_BTS'
    return None


def dot_product_obstacle(call: Call, target: Target) -> str | None:
    """Returns why `dot_product` cannot compute a call, such as 'cannot hide a token from itself'.

    Returns None if it can.
    """
    obstacle = _common_obstacle(call)
    if obstacle is not None:
        return obstacle
    mask = call.mask
    if call.logit_cap is not None:
        return f'cannot cap logits, and logit_cap is {call.logit_cap}'
    if mask.valid_BS is not None or mask.segments_BS is not None:
        return 'does not take padding or packed sequences'
    k_size = call.k_BSKH.shape[-1]
    v_size = call.v_BSKH.shape[-1]
    if k_size != v_size:
        return f'needs keys and values of one size, not {k_size} and {v_size}'
    if mask.window is not None and not mask.causal:
        return f'takes a window with a causal mask only, and window is {mask.window}'
    if target.platform != 'gpu':
        return None

    # On a GPU, cuDNN computes the attention, and has limits of its own.
    dtype = call.q_BTNH.dtype
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f'needs bfloat16 on a GPU, not {dtype}'
    if target.capability < 8:
        return f'needs a CUDA device of compute capability 8.0, not {target.capability}'
    q_size = call.q_BTNH.shape[-1]
    max_size = 256 if target.capability >= 9 else 128
    if q_size % 8 != 0 or q_size > max_size:
        return f'needs heads of 8, 16, ... {max_size}, not {q_size}'
    return None


def dot_product(call: Call, target: Target) -> jax.Array:
    """Computes o_BTNH with jax.nn.dot_product_attention: cuDNN on a GPU, XLA elsewhere."""
    mask = call.mask
    q_BTNH, scale = call.with_static_scale()
    window = None
    if mask.window is not None:
        keys_before = mask.window - 1
        keys_after = 0  # a window is always causal here
        window = (keys_before, keys_after)
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
    """Returns why `splash` cannot compute a call; None if it can."""
    obstacle = _common_obstacle(call)
    if obstacle is not None:
        return obstacle
    T, S = call.lengths
    block = SMALLEST_SPLASH_BLOCK
    if T % block != 0 or S % block != 0:
        return f'needs contexts that are multiples of {block}, not {T} and {S}'
    if target.platform not in ('tpu', None):
        return f'runs on a TPU, not on {target.platform}'
    return None


def splash(call: Call, target: Target) -> jax.Array:
    """Computes o_BTNH with JAX's splash attention, a Pallas kernel for TPUs.

    On other platforms Pallas interprets the kernel, which is slow.
    """
    splash_attention = load_extra(SPLASH, 'tpu')
    head_mask = _splash_mask(call)
    block_sizes = _splash_block_sizes(call)
    # Splash attention has no scale, so the queries are multiplied by it before.
    arrays = (call.scaled(), call.k_BSKH, call.v_BSKH, _segments(call))

    def attention_on_device(
        q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments: Any
    ) -> jax.Array:
        """Computes the attention of the rows and heads of one device."""
        num_heads = q_BTNH.shape[2]
        kernel = splash_attention.make_splash_mha(
            splash_attention.MultiHeadMask([head_mask] * num_heads),
            block_sizes=block_sizes,
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=call.logit_cap,
            interpret=target.platform != 'tpu',
        )
        # The kernel takes one row, with axes NTH and KSH.
        q_BNTH = jnp.swapaxes(q_BTNH, 1, 2)
        k_BKSH = jnp.swapaxes(k_BSKH, 1, 2)
        v_BKSH = jnp.swapaxes(v_BSKH, 1, 2)
        o_BNTH = jax.vmap(kernel)(q_BNTH, k_BKSH, v_BKSH, segments)
        return jnp.swapaxes(o_BNTH, 1, 2)

    mesh = target.mesh
    if mesh is None or mesh.size == 1:
        return attention_on_device(*arrays)

    # XLA cannot partition a Pallas kernel, so run it on the rows and heads of each device.
    q_spec, kv_spec, segments_spec = _splash_specs(call, mesh)
    sharded_attention = jax.shard_map(
        attention_on_device,
        mesh=mesh,
        in_specs=(q_spec, kv_spec, kv_spec, segments_spec),
        out_specs=q_spec,
        check_vma=False,  # the kernel does not declare which mesh axes its output varies along
    )
    return sharded_attention(*arrays)


def _splash_mask(call: Call) -> Any:
    """Returns the causal mask or window of one head in the splash library.

    Padding and packed sequences are left to `_segments`.
    """
    splash_attention = load_extra(SPLASH, 'tpu')
    mask = call.mask
    if mask.window is not None:
        keys_before = mask.window - 1
        keys_after = 0 if mask.causal else keys_before
        return splash_attention.LocalMask(call.lengths, (keys_before, keys_after), offset=0)
    if mask.causal:
        return splash_attention.CausalMask(call.lengths)
    return splash_attention.FullMask(call.lengths)


def _splash_block_sizes(call: Call) -> Any:
    """Returns block sizes for splash attention, all equal."""
    splash_attention = load_extra(SPLASH, 'tpu')
    T, S = call.lengths
    # The largest size that divides both lengths. `splash_obstacle` refuses lengths without one.
    block = max(size for size in SPLASH_BLOCKS if T % size == 0 and S % size == 0)
    return splash_attention.BlockSizes(
        block_q=block,
        block_kv=block,
        block_kv_compute=block,
        block_q_dkv=block,
        block_kv_dkv=block,
        block_kv_dkv_compute=block,
        block_q_dq=block,
        block_kv_dq=block,
    )


def _splash_specs(call: Call, mesh: Mesh) -> tuple[P, P, P]:
    """Returns the PartitionSpecs of queries, of keys and values, and of segment ids.

    Rows are split over the mesh axes 'data' and 'fsdp', heads over 'tensor'. Rows or heads that do
    not divide evenly are replicated.
    """
    B, _, N, _ = call.q_BTNH.shape
    K = call.k_BSKH.shape[2]

    row_shards = mesh.shape['data'] * mesh.shape['fsdp']
    rows = ('data', 'fsdp') if B % row_shards == 0 else None

    head_shards = mesh.shape['tensor']
    if K == 1:
        # Replicate the key head, because all query heads need it.
        q_heads = 'tensor' if N % head_shards == 0 else None
        kv_heads = None
    else:
        # K divides N. If key heads divide evenly, so do query heads.
        q_heads = 'tensor' if K % head_shards == 0 else None
        kv_heads = q_heads
    q_spec = P(rows, None, q_heads)  # rows, positions, heads
    kv_spec = P(rows, None, kv_heads)
    segments_spec = P(rows)
    return q_spec, kv_spec, segments_spec


def _segments(call: Call) -> Any:
    """Returns splash segment ids, which hide padding and the other sequences of a row.

    A query sees the keys with its own id. Returns None if there are neither padding nor rows with
    several sequences.
    """
    mask = call.mask
    if mask.valid_BS is None and mask.segments_BS is None:
        return None
    B = len(call.q_BTNH)
    T, S = call.lengths
    hidden = -1  # the id of keys on padding, which no query has
    if mask.segments_BS is None:
        query_ids_BT = jnp.ones((B, T), jnp.int32)
        key_ids_BS = jnp.ones((B, S), jnp.int32)
    else:
        # The mask may have a single row, which holds for all rows.
        query_ids_BT = jnp.broadcast_to(mask.segments_BT, (B, T))
        is_token_BS = mask.segments_BS > 0  # 0 is padding
        ids_BS = jnp.where(is_token_BS, mask.segments_BS, hidden)
        key_ids_BS = jnp.broadcast_to(ids_BS, (B, S))
    if mask.valid_BS is not None:
        key_ids_BS = jnp.where(mask.valid_BS, key_ids_BS, hidden)
    return load_extra(SPLASH, 'tpu').SegmentIds(q=query_ids_BT, kv=key_ids_BS)
