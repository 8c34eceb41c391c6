"""Attention probabilities and the mix of values, and which kernel computes them.

model.kernel='auto' takes the first kernel of the platform's libraries that serves the attention,
never for cached keys in decoding. Else it is `blockwise` from a context on, `einsum` below it.
"""

import contextvars
import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qkattn.attention.kernels import library
from qkattn.attention.kernels.blockwise import blockwise
from qkattn.attention.kernels.einsum import Bias, Call, Target, einsum
from qkattn.attention.mask import Mask
from qkattn.attention.normalizers import Normalizer, Softmax, SoftmaxOffByOne
from qkattn.attention.parameters import inside
from qkattn.errors import SpecError

log = logging.getLogger(__name__)

SOFTMAX = Softmax()

# Contexts from which `blockwise` is chosen: where it is faster than `einsum`, measured on CPUs; on
# accelerators, where the logits of a head begin to take much memory.
BLOCKWISE_FROM = {'cpu': 256}
BLOCKWISE_FROM_ELSEWHERE = 2048

LIBRARIES: dict[str, tuple[Callable, Callable]] = {
    'dot_product': (library.dot_product_obstacle, library.dot_product),
    'splash': (library.splash_obstacle, library.splash),
}
# The libraries that 'auto' may choose, by platform.
AUTO = {'gpu': ('dot_product',), 'tpu': ('splash',)}
KERNELS = ('auto', 'einsum', 'blockwise', *LIBRARIES)

_target: contextvars.ContextVar[Target] = contextvars.ContextVar('target')


def attend(
    q_BTNH: jax.Array,
    k_BSKH: jax.Array,
    v_BSKH: jax.Array,
    mask: Mask | jax.Array,
    *,
    scale: float | jax.Array,
    bias: Bias | None = None,
    logit_cap: float | None = None,
    normalizer: Normalizer = SOFTMAX,
    dropout: float = 0.0,
    dropout_key: jax.Array | None = None,
    kernel: str = 'auto',
) -> jax.Array:
    """o[t, n] = sum_s softmax_s(scale * q[t, n] . k[s]) v[s]; probabilities in float32 or wider.

    Keys and values may have fewer heads than queries, each a number that divides N, and values may
    have another head size. A shared head is not copied to the N query heads. What a query without
    visible keys returns is finite, but without meaning. SpecError where the kernel cannot do it or
    the mask does not fit.

    Args:
      mask: a Mask, or a mask_BTS, True where a query may attend to a key; B may be 1.
      bias: of the distances t - s, added to the scaled (and capped) logits.
      logit_cap: c in c tanh(logit / c); None is off.
      dropout: rate at which attention probabilities are dropped; off without a key.
    """
    call = Call(
        q_BTNH=q_BTNH,
        k_BSKH=k_BSKH,
        v_BSKH=v_BSKH,
        mask=Mask.from_array(mask),
        scale=scale,
        bias=bias,
        logit_cap=logit_cap,
        normalizer=normalizer,
        dropout=0.0 if dropout_key is None else dropout,
        dropout_key=dropout_key,
    )
    on_mesh, (T, S) = _target.get(None), call.lengths
    call.mask.check(len(q_BTNH), T, S)
    if kernel == 'einsum' and not on_mesh:
        return einsum(call)  # costs are counted before there are devices
    target = on_mesh or Target.from_mesh(None)
    name, reason = choose(kernel, call, target)
    if target.platform is None:
        return jnp.zeros((*q_BTNH.shape[:3], v_BSKH.shape[-1]), v_BSKH.dtype)
    if on_mesh:
        say_once(f'attention of {T:,} queries to {S:,} keys by {name}: {reason}')
    if name == 'einsum':
        return einsum(call)
    if name == 'blockwise':
        return blockwise(call, target)
    return LIBRARIES[name][1](call, target)


def on(mesh: Mesh | None) -> AbstractContextManager[None]:
    """Attention traced in the block is for the devices of a mesh; the choice is logged once.

    None is for devices not known yet: only a named kernel that serves on no platform is refused.
    """
    return inside(_target, Target(None) if mesh is None else Target.from_mesh(mesh))


def choose(kernel: str, call: Call, target: Target) -> tuple[str, str]:
    """The kernel that computes the call, and the reason; SpecError where the named one cannot."""
    if kernel != 'auto' and (kernel not in LIBRARIES or call.mask.first_query is None):
        if problem := obstacle(kernel, call, target):
            valid = [k for k in KERNELS[1:] if obstacle(k, call, target) is None]
            raise SpecError(f'kernel={kernel!r} {problem}; valid: auto, {", ".join(valid)}')
        return kernel, 'as model.kernel says'
    for name in AUTO.get(target.platform, ()):
        if obstacle(name, call, target) is None:
            return name, f'the kernel of {target.platform} that serves it'
    if problem := obstacle('blockwise', call, target):
        return 'einsum', f'blockwise {problem}'
    least = BLOCKWISE_FROM.get(target.platform, BLOCKWISE_FROM_ELSEWHERE)
    if min(call.lengths) < least:
        return 'einsum', f'contexts are below {least}'
    return 'blockwise', f'contexts are not below {least}'


def obstacle(kernel: str, call: Call, target: Target) -> str | None:
    """Why a kernel cannot serve a call, as the end of a sentence; None where it can."""
    if kernel in LIBRARIES:
        if call.mask.first_query is not None:
            return 'takes no cached keys'
        return LIBRARIES[kernel][0](call, target)
    if kernel not in KERNELS:
        return 'is no kernel'
    normalizer = type(call.normalizer)
    if kernel == 'blockwise' and normalizer not in (Softmax, SoftmaxOffByOne):
        return f'computes softmax and softmax_off_by_one, not normalizer={normalizer.__name__}'
    if kernel == 'blockwise' and normalizer is SoftmaxOffByOne and call.mask.hides_self:
        return 'hides a token from itself with softmax only, not with softmax_off_by_one'
    return None


@functools.cache
def say_once(message: str) -> None:
    log.info(message)
