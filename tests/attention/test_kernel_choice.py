"""Which kernel computes an attention, what is logged, and what a named one refuses."""

import logging
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AxisType

from qkattn.attention import Mask, SpecError, attend, registry
from qkattn.attention.kernels import choice
from qkattn.attention.kernels.einsum import Target
from tests.attention import test_kernels
from tests.refusals import refused

CPU, GPU, TPU = (Target(platform) for platform in ('cpu', 'gpu', 'tpu'))
TURING, HOPPER = (Target('gpu', capability=number) for number in (7.5, 9.0))
BF16 = jnp.bfloat16
F32 = jnp.float32
MESH = jax.make_mesh((1,), ('data',), axis_types=(AxisType.Auto,))


def call(T=256, *, H=64, G=None, N=4, K=4, V=None, dtype=BF16, **options):
    """A call of attention to T keys by T queries, with shapes instead of arrays.

    There are N query, K key and V value heads. Queries and keys have H channels, values have G. By
    default, G = H, V = K, the mask is causal and the normalizer is softmax.
    """
    if G is None:
        G = H
    if V is None:
        V = K
    queries = jax.ShapeDtypeStruct((1, T, N, H), dtype)
    keys = jax.ShapeDtypeStruct((1, T, K, H), dtype)
    values = jax.ShapeDtypeStruct((1, T, V, G), dtype)
    options.setdefault('mask', Mask(causal=True))
    options['normalizer'] = registry.find_normalizer(options.get('normalizer', 'softmax'))
    return test_kernels.call([queries, keys, values], **options)


CACHED = Mask(causal=True, first_query=jnp.int32(3))  # a step of decoding


@pytest.mark.parametrize(
    ('target', 'options', 'kernel', 'reason'),
    [
        (CPU, {}, 'blockwise', 'contexts are not below 256'),
        (CPU, {'T': 255}, 'einsum', 'contexts are below 256'),
        (CPU, {'normalizer': 'entmax15'}, 'einsum', 'blockwise computes softmax'),
        (GPU, {}, 'dot_product', 'the kernel of gpu'),
        (HOPPER, {'H': 256}, 'dot_product', 'the kernel of gpu'),
        (TURING, {}, 'einsum', 'contexts are below 2048'),
        (GPU, {'dtype': F32}, 'einsum', 'contexts are below 2048'),
        (GPU, {'G': 32, 'T': 4096}, 'blockwise', 'contexts are not below 2048'),
        (GPU, {'mask': CACHED}, 'einsum', 'below 2048'),
        (TPU, {'G': 128, 'dtype': F32}, 'splash', 'the kernel of tpu'),
        (TPU, {'T': 200}, 'einsum', 'contexts are below 2048'),
        (TPU, {'K': 1, 'V': 4, 'T': 4096}, 'blockwise', 'contexts are not below 2048'),
    ],
)
def test_auto_takes_the_kernel_of_the_platform_that_serves_the_attention(
    target, options, kernel, reason
):
    chosen, why = choice.choose('auto', call(**options), target)
    assert chosen == kernel
    assert reason in why


PADDED = Mask(valid_BS=jnp.ones((1, 256), bool))


@pytest.mark.parametrize(
    ('kernel', 'target', 'options', 'message'),
    [
        ('blockwize', CPU, {}, 'is not a kernel; valid: auto, einsum, blockwise'),
        ('blockwise', CPU, {'normalizer': 'sigmoid'}, 'not normalizer=Sigmoid; valid: auto, '),
        ('dot_product', CPU, {'G': 32}, 'needs keys and values of one size, not 64 and 32'),
        ('dot_product', CPU, {'K': 1, 'V': 4}, 'as many key as value heads, not 1 and 4'),
        ('dot_product', CPU, {'logit_cap': 3.0}, 'cannot cap logits, and logit_cap is 3.0'),
        ('dot_product', CPU, {'mask': PADDED}, 'does not take padding'),
        ('dot_product', GPU, {'dtype': F32}, 'needs bfloat16 on a GPU, not float32'),
        ('dot_product', GPU, {'H': 256}, 'needs heads of 8, 16, ... 128, not 256'),
        ('dot_product', HOPPER, {'H': 264}, 'needs heads of 8, 16, ... 256, not 264'),
        ('dot_product', TURING, {}, 'needs a CUDA device of compute capability 8.0, not 7.5'),
        ('splash', CPU, {}, 'runs on a TPU, not on cpu; valid: auto, einsum, blockwise, dot'),
        ('splash', TPU, {'T': 100}, 'needs contexts that are multiples of 128, not 100 and 100'),
        ('splash', TPU, {'mask': Mask(hides_self=True)}, 'cannot hide a token from itself'),
        ('splash', TPU, {'bias': abs}, 'cannot add position biases'),
        ('splash', TPU, {'dropout': 0.1}, 'drop attention probabilities, and their dropout is 0.1'),
    ],
)
def test_a_named_kernel_refuses_what_it_cannot_serve(kernel, target, options, message):
    with refused(f'^kernel={kernel!r} .*{re.escape(message)}', SpecError):
        choice.choose(kernel, call(**options), target)


def test_attention_to_cached_keys_is_never_of_a_library():
    cached = call(dtype=F32, mask=CACHED)
    kernel, _ = choice.choose('dot_product', cached, CPU)
    assert kernel == 'blockwise'


def test_the_choice_is_logged_once(caplog):
    """Attention logs its choice of kernel once, while a program is traced for a mesh."""
    choice.say_once.cache_clear()
    x_BTNH = jnp.ones((1, 3, 2, 4))
    with caplog.at_level(logging.INFO):
        # This call is not traced for a mesh, so it is not logged.
        attend(x_BTNH, x_BTNH, x_BTNH, Mask(), scale=1.0, kernel='blockwise')
        for _ in range(2):
            with choice.tracing_for_mesh(MESH):
                attend(x_BTNH, x_BTNH, x_BTNH, Mask(causal=True), scale=1.0)

    # On a CPU, einsum is chosen for contexts below 256, and here are only 3 tokens.
    messages = [record.message for record in caplog.records if 'attention' in record.message]
    assert messages == ['attention of 3 queries to 3 keys by einsum: contexts are below 256']
