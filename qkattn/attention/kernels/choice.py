"""`attend`, the attention of every variant, and the choice of the kernel that computes it.

A kernel is a program for one attention: `einsum`, `blockwise`, or one of a library. With
model.kernel='auto', a library kernel is chosen if the platform has one that can compute the
attention. Otherwise, and when decoding attends to cached keys, the choice is `blockwise` for long
contexts and `einsum` for short ones.
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
from qkattn.attention.parameters import set_context_variable
from qkattn.errors import SpecError

log = logging.getLogger(__name__)

SOFTMAX = Softmax()

# The context length from which `blockwise` is chosen. On CPUs it is faster than `einsum` from here
# on (measured). Elsewhere the logits of a head begin to take much memory here (not measured).
BLOCKWISE_FROM = {'cpu': 256}
BLOCKWISE_FROM_ELSEWHERE = 2048


class Library(NamedTuple):
    """A kernel of a library."""

    # Returns why the kernel cannot compute a call; see `why_unsupported`.
    obstacle: Callable[[Call, Target], str | None]
    compute: Callable[[Call, Target], jax.Array]


LIBRARIES = {
    'dot_product': Library(library.dot_product_obstacle, library.dot_product),
    'splash': Library(library.splash_obstacle, library.splash),
}
# The libraries that 'auto' may choose, by platform.
AUTO = {'gpu': ('dot_product',), 'tpu': ('splash',)}
KERNELS = ('auto', 'einsum', 'blockwise', *LIBRARIES)

# The devices of the program that is traced; see `tracing_for_mesh`.
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
    """Returns o_BTNH, o[t, n] = sum_s softmax_s(scale * q[t, n] . k[s]) v[s].

    Keys and values may have fewer heads than queries; both numbers must divide N. Such a shared
    head is not copied to its query heads. Values may have a head size of their own. Probabilities
    are computed in float32 or wider. The output of a query without visible keys is finite, but
    means nothing.

    Args:
      mask: a Mask, or a mask_BTS that is True where a query may attend to a key; B may be 1.
      bias: returns, for distances t - s, what is added to the scaled (and capped) logits.
      logit_cap: c in c tanh(logit / c); None is off.
      dropout: the rate at which attention probabilities are dropped; without a key nothing is.
      kernel: the name of a kernel, or 'auto'.

    Raises:
      SpecError: if the kernel cannot compute this attention, or the mask does not fit.
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
            # The cost of a model is counted this way, possibly before JAX has any devices.
            return einsum(call)
        target = Target.from_mesh(None)
    name, reason = choose(kernel, call, target)
    if target.platform is None:
        # The caller traces this only for the shape, and for a SpecError from `choose`.
        return jnp.zeros((*q_BTNH.shape[:3], v_BSKH.shape[-1]), v_BSKH.dtype)

    if in_run:
        say_once(f'attention of {T:,} queries to {S:,} keys by {name}: {reason}')
    if name == 'einsum':
        return einsum(call)
    if name == 'blockwise':
        return blockwise(call, target)
    return LIBRARIES[name].compute(call, target)


def tracing_for_mesh(mesh: Mesh | None) -> AbstractContextManager[None]:
    """Declares that attention traced inside the block runs on the devices of a mesh.

    `attend` then logs each choice of a kernel once. Pass None if the devices are not known yet;
    then `attend` refuses only a named kernel that no platform could use.
    """
    target = Target(None) if mesh is None else Target.from_mesh(mesh)
    return set_context_variable(_target, target)


def choose(kernel: str, call: Call, target: Target) -> tuple[str, str]:
    """Returns the kernel that computes the call, and the reason for the choice.

    `kernel` is the setting model.kernel: the name of a kernel, or 'auto'. A named kernel is chosen,
    or SpecError is raised if it cannot compute the call. In decoding the name of a library kernel
    counts as 'auto', because libraries do not take cached keys.
    """
    is_decoding = call.mask.first_query is not None
    if is_decoding and kernel in LIBRARIES:
        kernel = 'auto'
    if kernel != 'auto':
        problem = why_unsupported(kernel, call, target)
        if problem is None:
            return kernel, 'as model.kernel says'
        valid = [other for other in KERNELS if why_unsupported(other, call, target) is None]
        raise SpecError(f'kernel={kernel!r} {problem}; valid: {", ".join(valid)}')

    # 'auto' prefers the library kernel of the platform.
    for name in AUTO.get(target.platform, ()):
        if why_unsupported(name, call, target) is None:
            return name, f'the kernel of {target.platform} that serves it'

    # Without one, it takes `blockwise` if both contexts, of queries and keys, are long enough, and
    # otherwise `einsum`.
    problem = why_unsupported('blockwise', call, target)
    if problem is not None:
        return 'einsum', f'blockwise {problem}'
    blockwise_from = BLOCKWISE_FROM.get(target.platform, BLOCKWISE_FROM_ELSEWHERE)
    if min(call.lengths) < blockwise_from:
        return 'einsum', f'contexts are below {blockwise_from}'
    return 'blockwise', f'contexts are not below {blockwise_from}'


def why_unsupported(kernel: str, call: Call, target: Target) -> str | None:
    """Returns why a kernel cannot compute a call, or None if it can; 'auto' always can.

    The reason is the end of a sentence: "kernel='splash' does not take cached keys".
    """
    if kernel not in KERNELS:
        return 'is not a kernel'
    if kernel in LIBRARIES:
        # Only decoding says where the queries begin, behind the cached keys.
        if call.mask.first_query is not None:
            return 'does not take cached keys'
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
    """Logs a message, unless the same message has been logged before."""
    log.info(message)
