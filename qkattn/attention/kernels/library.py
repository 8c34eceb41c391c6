"""Kernels from libraries, and obstacles: ends of the sentence 'kernel=NAME ...', or None."""

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

from qkattn.attention.kernels.einsum import Call, Target
from qkattn.attention.normalizers import Softmax
from qkattn.config.imports import load_extra

SPLASH = 'jax.experimental.pallas.ops.tpu.splash_attention'
SPLASH_BLOCKS = (512, 256, 128)  # of queries and keys, the largest that divides both


def _common_obstacle(call: Call) -> str | None:
    """What both kernels lack."""
    normalizer, k_heads, v_heads = call.normalizer, call.k_BSKH.shape[2], call.v_BSKH.shape[2]
    if type(normalizer) is not Softmax:
        return f'computes softmax, not normalizer={type(normalizer).__name__}'
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
    """Of cuDNN on a GPU, and of the same function by XLA elsewhere."""
    mask, size, dtype = call.mask, call.q_BTNH.shape[-1], call.q_BTNH.dtype
    if obstacle := _common_obstacle(call):
        return obstacle
    if call.logit_cap is not None:
        return f'has no logit_cap, which is {call.logit_cap}'
    if mask.valid_BS is not None or mask.segments_BS is not None:
        return 'takes no padding and no packed sequences'
    sizes = call.k_BSKH.shape[-1], call.v_BSKH.shape[-1]
    if sizes[0] != sizes[1]:
        return f'needs keys and values of one size, not {sizes[0]} and {sizes[1]}'
    if mask.window is not None and not mask.causal:
        return f'takes a window with a causal mask only, and window is {mask.window}'
    if target.platform != 'gpu':
        return None
    if dtype not in (jnp.bfloat16, jnp.float16):
        return f'needs bfloat16 on a GPU, not {dtype}'
    if target.capability < 8:
        return f'needs a CUDA device of compute capability 8.0, not {target.capability}'
    largest = 256 if target.capability >= 9 else 128
    if size % 8 or size > largest:
        return f'needs heads of 8, 16, ... {largest}, not {size}'
    return None


def dot_product(call: Call, target: Target) -> jax.Array:
    """jax.nn.dot_product_attention."""
    mask, (q_BTNH, scale) = call.mask, call.with_static_scale()
    return jax.nn.dot_product_attention(
        q_BTNH,
        call.k_BSKH,
        call.v_BSKH,
        scale=scale,
        is_causal=mask.causal,
        local_window_size=None if mask.window is None else (mask.window - 1, 0),
        implementation='cudnn' if target.platform == 'gpu' else 'xla',
    )


def splash_obstacle(call: Call, target: Target) -> str | None:
    (T, S), block = call.lengths, SPLASH_BLOCKS[-1]
    if obstacle := _common_obstacle(call):
        return obstacle
    if T % block or S % block:
        return f'needs contexts that are multiples of {block}, not {T} and {S}'
    if target.platform in ('tpu', None):
        return None
    return f'runs on a TPU, not on {target.platform}'


def splash(call: Call, target: Target) -> jax.Array:
    """JAX's splash attention, a Pallas kernel (XLA does not partition it), interpreted off TPUs."""
    splash_attention = load_extra(SPLASH, 'tpu')
    mask, mesh, (T, S) = call.mask, target.mesh, call.lengths
    if mask.window is None:
        one = (splash_attention.CausalMask if mask.causal else splash_attention.FullMask)((T, S))
    else:
        reach = mask.window - 1
        one = splash_attention.LocalMask((T, S), (reach, 0 if mask.causal else reach), 0)
    block = next(b for b in SPLASH_BLOCKS if T % b == 0 and S % b == 0)

    def attention(
        q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments: Any
    ) -> jax.Array:
        kernel = splash_attention.make_splash_mha(
            splash_attention.MultiHeadMask([one] * q_BTNH.shape[2]),
            block_sizes=splash_attention.BlockSizes(*[block] * 8),
            head_shards=1,
            q_seq_shards=1,
            attn_logits_soft_cap=call.logit_cap,
            interpret=target.platform != 'tpu',
        )
        heads_first = (jnp.swapaxes(array, 1, 2) for array in (q_BTNH, k_BSKH, v_BSKH))
        return jnp.swapaxes(jax.vmap(kernel)(*heads_first, segments), 1, 2)

    def partitioned(
        q_BTNH: jax.Array, k_BSKH: jax.Array, v_BSKH: jax.Array, segments: Any
    ) -> jax.Array:
        over_rows = mesh.shape['data'] * mesh.shape['fsdp']
        rows = ('data', 'fsdp') if len(q_BTNH) % over_rows == 0 else None
        shards, (N, K) = mesh.shape['tensor'], (q_BTNH.shape[2], k_BSKH.shape[2])
        q_heads = 'tensor' if N % shards == 0 and (K == 1 or K % shards == 0) else None
        q_spec, k_spec = (P(rows, None, h) for h in (q_heads, q_heads if K > 1 else None))
        return jax.shard_map(
            attention,
            mesh=mesh,
            in_specs=(q_spec, k_spec, k_spec, P(rows)),
            out_specs=q_spec,
            check_vma=False,
        )(q_BTNH, k_BSKH, v_BSKH, segments)

    run = attention if mesh is None or mesh.size == 1 else partitioned
    return run(call.scaled(), call.k_BSKH, call.v_BSKH, _segments(call))


def _segments(call: Call) -> Any:
    """Sequences by number, with -1 at keys that no query sees."""
    mask, (T, S), B = call.mask, call.lengths, len(call.q_BTNH)
    if mask.valid_BS is None and mask.segments_BS is None:
        return None
    q_BT, kv_BS = jnp.ones((B, T), jnp.int32), jnp.ones((B, S), jnp.int32)
    if mask.segments_BS is not None:
        q_BT, kv_BS = mask.segments_BT, jnp.where(mask.segments_BS > 0, mask.segments_BS, -1)
    if mask.valid_BS is not None:
        kv_BS = jnp.where(mask.valid_BS, kv_BS, -1)
    return load_extra(SPLASH, 'tpu').SegmentIds(q=q_BT, kv=kv_BS)
