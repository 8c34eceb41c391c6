"""`attend`, the attention of every variant, and which kernel computes it.

A kernel is a program for one attention: `einsum`, `blockwise`, or one of a library. With
model.kernel='auto' it is the first of the platform's libraries that serves the attention, but never
for cached keys in decoding. Without one it is `blockwise` in long contexts, `einsum` in short ones.
"""

import contextvars
import functools
import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import NamedTuple

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


class Library(NamedTuple):
    """A kernel of a library."""

    obstacle: Callable[[Call, Target], str | None]  # why it cannot serve a call, or None
    compute: Callable[[Call, Target], jax.Array]


LIBRARIES = {
    'dot_product': Library(library.dot_product_obstacle, library.dot_product),
    'splash': Library(library.splash_obstacle, library.splash),
}
# The libraries that 'auto' may choose, by platform.
AUTO = {'gpu': ('dot_product',), 'tpu': ('splash',)}
KERNELS = ('auto', 'einsum', 'blockwise', *LIBRARIES)

# The devices of the program that is traced; see `on`.
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
    T, S = call.lengths
    call.mask.check(len(q_BTNH), T, S)
    target = _target.get(None)
    in_run = target is not None
    if not in_run:
        if kernel == 'einsum':
            return einsum(call)  # costs are counted before there are devices
        target = Target.from_mesh(None)
    name, reason = choose(kernel, call, target)
    if target.platform is None:
        # Nothing is computed: only the shape and the refusal of `choose` count.
        return jnp.zeros((*q_BTNH.shape[:3], v_BSKH.shape[-1]), v_BSKH.dtype)
    if in_run:
        say_once(f'attention of {T:,} queries to {S:,} keys by {name}: {reason}')
    if name == 'einsum':
        return einsum(call)
    if name == 'blockwise':
        return blockwise(call, target)
    return LIBRARIES[name].compute(call, target)


def on(mesh: Mesh | None) -> AbstractContextManager[None]:
    """Attention traced in the block is for the devices of a mesh; the choice is logged once.

    None is for devices not known yet: only a named kernel that serves on no platform is refused.
    """
    target = Target(None) if mesh is None else Target.from_mesh(mesh)
    return inside(_target, target)


def choose(kernel: str, call: Call, target: Target) -> tuple[str, str]:
    """The kernel that computes the call, and the reason; SpecError where the named one cannot.

    A library named by model.kernel takes no cached keys, so decoding chooses as with 'auto'.
    """
    decoding = call.mask.first_query is not None
    if kernel != 'auto' and not (kernel in LIBRARIES and decoding):
        problem = obstacle(kernel, call, target)
        if problem is not None:
            valid = ['auto']
            for other in KERNELS[1:]:
                if obstacle(other, call, target) is None:
                    valid.append(other)
            raise SpecError(f'kernel={kernel!r} {problem}; valid: {", ".join(valid)}')
        return kernel, 'as model.kernel says'
    for name in AUTO.get(target.platform, ()):
        if obstacle(name, call, target) is None:
            return name, f'the kernel of {target.platform} that serves it'
    problem = obstacle('blockwise', call, target)
    if problem is not None:
        return 'einsum', f'blockwise {problem}'
    least = BLOCKWISE_FROM.get(target.platform, BLOCKWISE_FROM_ELSEWHERE)
    if min(call.lengths) < least:
        return 'einsum', f'contexts are below {least}'
    return 'blockwise', f'contexts are not below {least}'


def obstacle(kernel: str, call: Call, target: Target) -> str | None:
    """Why a kernel cannot serve a call, as the end of a sentence; None where it can."""
    if kernel not in KERNELS:
        return 'is no kernel'
    if kernel in LIBRARIES:
        if call.mask.first_query is not None:
            return 'takes no cached keys'
        return LIBRARIES[kernel].obstacle(call, target)
    if kernel == 'blockwise':
        normalizer = type(call.normalizer)
        if normalizer not in (Softmax, SoftmaxOffByOne):
            return f'computes softmax and softmax_off_by_one, not normalizer={normalizer.__name__}'
        if normalizer is SoftmaxOffByOne and call.mask.hides_self:
            return 'hides a token from itself with softmax only, not with softmax_off_by_one'
    return None


@functools.cache
def say_once(message: str) -> None:
    """Logs the message the first time that it is given."""
    log.info(message)
