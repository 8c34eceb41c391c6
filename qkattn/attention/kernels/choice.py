"""Which kernel computes an attention, and why.

model.kernel='auto' takes the first kernel of the platform's libraries that serves the attention.
Else it is `blockwise` from a context on, below which `einsum` is as fast.
Attention to cached keys in decoding is never a library's.
"""

import contextlib
import contextvars
import functools
import logging
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from qkattn.attention.kernels import library
from qkattn.attention.kernels.blockwise import blockwise
from qkattn.attention.kernels.call import Call, Target
from qkattn.attention.kernels.einsum import einsum
from qkattn.attention.normalizers import Softmax, SoftmaxOffByOne
from qkattn.errors import SpecError

log = logging.getLogger(__name__)

# Contexts from which `blockwise` is chosen: where it is faster than `einsum`, measured on CPUs; on
# accelerators, where the logits of a head begin to take much memory.
BLOCKWISE_FROM = {'cpu': 256}
BLOCKWISE_FROM_ELSEWHERE = 2048

LIBRARIES: dict[str, tuple[Callable, Callable]] = {
    'dot_product': (library.dot_product_obstacle, library.dot_product),
    'tokamax': (library.tokamax_obstacle, library.tokamax),
    'splash': (library.splash_obstacle, library.splash),
}
# The libraries that 'auto' may choose, by platform.
AUTO = {'gpu': ('dot_product',), 'tpu': ('splash',)}
KERNELS = ('auto', 'einsum', 'blockwise', *LIBRARIES)

_target: contextvars.ContextVar[Target] = contextvars.ContextVar('target')


@contextlib.contextmanager
def on(mesh: Mesh | AbstractMesh | None) -> Iterator[None]:
    """Attention traced in the block is for the devices of a mesh.

    With None it is only checked, for devices that are not known yet: a named kernel that serves it
    on no platform is refused, and no device is asked for.
    """
    token = _target.set(Target(None) if mesh is None else Target.of(mesh))
    try:
        yield
    finally:
        _target.reset(token)


def obstacle(kernel: str, call: Call, target: Target) -> str | None:
    """Why a kernel cannot serve a call, as the end of a sentence; None where it can."""
    if kernel == 'einsum':
        return None
    if kernel == 'blockwise':
        return blockwise_obstacle(call)
    if call.mask.first_query is not None:
        return 'takes no cached keys'
    return LIBRARIES[kernel][0](call, target)


def blockwise_obstacle(call: Call) -> str | None:
    normalizer = type(call.normalizer)
    if normalizer not in (Softmax, SoftmaxOffByOne):
        return f'computes softmax and softmax_off_by_one, not normalizer={normalizer.__name__}'
    if normalizer is SoftmaxOffByOne and call.mask.hides_self:
        return 'hides a token from itself with softmax only, not with softmax_off_by_one'
    return None


def choose(kernel: str, call: Call, target: Target) -> tuple[str, str]:
    """The kernel that computes the call, and the reason.

    Args:
      kernel: 'auto', or the name of one.

    Raises:
      SpecError: the named kernel cannot serve the call.
    """
    if kernel != 'auto' and (kernel not in LIBRARIES or call.mask.first_query is None):
        if problem := obstacle(kernel, call, target):
            valid = [k for k in KERNELS[1:] if obstacle(k, call, target) is None]
            raise SpecError(f'kernel={kernel!r} {problem}; valid are auto, {", ".join(valid)}')
        return kernel, 'as model.kernel says'
    for name in AUTO.get(target.platform, ()):
        if obstacle(name, call, target) is None:
            return name, f'the kernel of {target.platform} that serves it'
    if problem := blockwise_obstacle(call):
        return 'einsum', f'blockwise {problem}'
    (T, S), least = call.lengths, BLOCKWISE_FROM.get(target.platform, BLOCKWISE_FROM_ELSEWHERE)
    long = min(T, S) >= least
    return ('blockwise', 'einsum')[not long], f'contexts are {"not " * long}below {least}'


def run(kernel: str, call: Call) -> jax.Array:
    """o_BTNH by the chosen kernel; inside of `on` the choice is logged once."""
    on_mesh, (T, S) = _target.get(None), call.lengths
    if kernel == 'einsum' and not on_mesh:
        return einsum(call)  # costs are counted before there are devices
    target = on_mesh or Target.of(None)
    name, reason = choose(kernel, call, target)
    if target.platform is None:
        return jnp.zeros((*call.q_BTNH.shape[:3], call.v_BSKH.shape[-1]), call.v_BSKH.dtype)
    if on_mesh:
        say_once(f'attention of {T:,} queries to {S:,} keys by {name}: {reason}')
    if name == 'einsum':
        return einsum(call)
    if name == 'blockwise':
        return blockwise(call, target)
    return LIBRARIES[name][1](call, target)


@functools.cache
def say_once(message: str) -> None:
    log.info(message)
