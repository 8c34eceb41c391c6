"""`attend`, which computes attention with a chosen kernel.

The kernels are `einsum`, `blockwise`, and those of libraries. With model.kernel='auto', a library
kernel of the platform is preferred. If there is none, or in decoding, long contexts use `blockwise`
and short ones `einsum`.
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

# The minimum context length for `blockwise`, by platform.
BLOCKWISE_FROM = {'cpu': 256}  # measured: `blockwise` is faster than `einsum` from here on
BLOCKWISE_FROM_ELSEWHERE = 2048  # not measured: the logits take much memory from here on


class Library(NamedTuple):
    """A kernel of a library."""

    # Returns why the kernel cannot compute a call; None if it can.
    obstacle: Callable[[Call, Target], str | None]
    compute: Callable[[Call, Target], jax.Array]


LIBRARIES = {
    'dot_product': Library(library.dot_product_obstacle, library.dot_product),
    'splash': Library(library.splash_obstacle, library.splash),
}
# The libraries that 'auto' may choose, by platform.
AUTO = {'gpu': ('dot_product',), 'tpu': ('splash',)}
KERNELS = ('auto', 'einsum', 'blockwise', *LIBRARIES)

# The devices of the program that is traced, set by `tracing_for_mesh`.
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

    Probabilities are computed in float32 or wider. The output of a query without visible keys is
    finite but meaningless.

    Args:
        q_BTNH: Queries, N heads of size H.
        k_BSKH: Keys. The number of heads must divide N.
        v_BSKH: Values. The number of heads must divide N. The head size may differ from H.
        mask: A Mask, or a mask_BTS that is True where a query may attend to a key; B may be 1.
        scale: Multiplies the logits.
        bias: Maps distances t - s to biases, which are added to the scaled and capped logits.
        logit_cap: C in c * tanh(logit / c); None for no cap.
        normalizer: Takes the place of softmax.
        dropout: The dropout rate of attention probabilities.
        dropout_key: The random key of dropout; None for no dropout.
        kernel: The name of a kernel, or 'auto'.

    Raises:
        SpecError: The kernel cannot compute this attention, or the mask does not fit.
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
    is_traced_for_mesh = target is not None
    if not is_traced_for_mesh:
        if kernel == 'einsum':
            return einsum(call)  # without starting JAX's devices
        target = Target.from_mesh(None)
    name, reason = choose(kernel, call, target)
    if target.platform is None:
        # Only the shape is needed.
        return jnp.zeros((*q_BTNH.shape[:3], v_BSKH.shape[-1]), v_BSKH.dtype)

    if is_traced_for_mesh:
        say_once(f'attention of {T:,} queries to {S:,} keys by {name}: {reason}')
    if name == 'einsum':
        return einsum(call)
    if name == 'blockwise':
        return blockwise(call, target)
    return LIBRARIES[name].compute(call, target)


def tracing_for_mesh(mesh: Mesh | None) -> AbstractContextManager[None]:
    """A `with` block in which `attend` is traced for the devices of a mesh.

    `attend` logs its choice of a kernel once. With a mesh of None, the devices are not known yet,
    and `attend` only checks whether any platform could run the kernel.
    """
    target = Target(None) if mesh is None else Target.from_mesh(mesh)
    return set_context_variable(_target, target)


def choose(kernel: str, call: Call, target: Target) -> tuple[str, str]:
    """Returns the kernel to use for a call, and the reason for this choice.

    Args:
        kernel: The name of a kernel, or 'auto'.
        call: The arguments of `attend`.
        target: The devices.

    Raises:
        SpecError: The named kernel cannot compute the call.
    """
    # Only decoding gives the position of the first query. Libraries do not take its cached keys.
    is_decoding = call.mask.first_query is not None
    if is_decoding and kernel in LIBRARIES:
        kernel = 'auto'

    if kernel != 'auto':
        obstacle = why_unsupported(kernel, call, target)
        if obstacle is None:
            return kernel, 'as model.kernel says'
        valid = [name for name in KERNELS if why_unsupported(name, call, target) is None]
        raise SpecError(f'kernel={kernel!r} {obstacle}; valid: {", ".join(valid)}')

    # 'auto' prefers a library's kernel for the platform.
    for name in AUTO.get(target.platform, ()):
        if why_unsupported(name, call, target) is None:
            return name, f'the kernel of {target.platform} that serves it'

    # Otherwise, long contexts use `blockwise`.
    obstacle = why_unsupported('blockwise', call, target)
    if obstacle is not None:
        return 'einsum', f'blockwise {obstacle}'
    min_length = BLOCKWISE_FROM.get(target.platform, BLOCKWISE_FROM_ELSEWHERE)
    if min(call.lengths) < min_length:
        return 'einsum', f'contexts are below {min_length}'
    return 'blockwise', f'contexts are not below {min_length}'


def why_unsupported(kernel: str, call: Call, target: Target) -> str | None:
    """Returns why a kernel cannot compute a call, such as 'is not a kernel'; None if it can."""
    if kernel not in KERNELS:
        return 'is not a kernel'
    if kernel in LIBRARIES:
        is_decoding = call.mask.first_query is not None
        if is_decoding:
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
    """Logs a message if this process has not logged it before."""
    log.info(message)
