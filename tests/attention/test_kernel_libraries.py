"""Kernels of libraries equal the einsums; Pallas kernels for TPUs interpreted, and lowered."""

import functools

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.attention import Mask
from qkattn.attention.kernels import library
from qkattn.attention.kernels.einsum import Target, einsum
from qkattn.config import MeshConfig
from qkattn.train import sharding
from tests.attention.test_kernels import assert_equal, call, inputs, with_gradients

CPU, TPU = Target('cpu'), Target('tpu')
T = 128
VALID = jnp.arange(T) < jnp.array([[T - 5], [40]])
SEGMENTS = jnp.repeat(jnp.array([[1, 2, 3, 0], [1, 1, 2, 2]]), 32, axis=1)
PACKED = {'segments_BT': SEGMENTS, 'segments_BS': SEGMENTS}
PLAIN = [(Mask(), 4), (Mask(causal=True), 2), (Mask(causal=True, window=9), 1)]


@pytest.mark.parametrize(('mask', 'K'), PLAIN)
def test_dot_product_equals_the_einsums(mask, K):
    arrays, w_BTNH = inputs((K, K, 8, 8, 20))
    got = with_gradients(lambda c: library.dot_product(c, CPU), arrays, w_BTNH, mask=mask)
    assert_equal(got, with_gradients(einsum, arrays, w_BTNH, mask=mask), 1e-5)


def for_cuda(kernel, mask, K):
    """The program of the gradients of two trials, lowered for a GPU that is not there."""
    arrays, _ = inputs((K, K, 64, 64, T), jnp.bfloat16, T)

    def weighted(*arrays: jax.Array) -> jax.Array:
        return (kernel(call([*arrays, None], mask=mask), Target('gpu', None, 9.0)) ** 2).sum()

    gradients = jax.jit(jax.vmap(jax.grad(weighted, (0, 1, 2))))
    stacked = [jnp.stack([array, array]) for array in arrays[:3]]
    return gradients.trace(*stacked).lower(lowering_platforms=('cuda',)).as_text()


@pytest.mark.parametrize(('mask', 'K'), PLAIN)
def test_cudnn_is_one_call_for_all_trials_forward_and_one_backward(cudnn, mask, K):
    text = for_cuda(library.dot_product, mask, K)
    assert [text.count(f'@__cudnn$fmhaSoftmax{suffix}(') for suffix in ('', 'Backward')] == [1, 1]
    assert 'dot_general' not in text and 'stablehlo.while' not in text


SPLASH = {
    'causal': ({'mask': Mask(causal=True)}, (4, 4, 64, 64, T)),
    'merged': ({'mask': Mask(causal=True, window=50), 'logit_cap': 2.0}, (1, 1, 192, 64, T)),
    'padded': ({'mask': Mask(valid_BS=VALID)}, (2, 2, 32, 32, T)),
    'packed': ({'mask': Mask(causal=True, **PACKED)}, (4, 4, 32, 32, T)),
}


SLOW = [pytest.param(case, marks=pytest.mark.slow) for case in ('causal', 'padded', 'packed')]


@pytest.mark.parametrize('case', ['merged', *SLOW])
def test_splash_attention_equals_the_einsums_and_lowers_for_a_tpu(case):
    options, sizes = SPLASH[case]
    arrays, w_BTNH = inputs(sizes, length=T)
    got = with_gradients(lambda c: library.splash(c, CPU), arrays, w_BTNH, **options)
    assert_equal(got, with_gradients(einsum, arrays, w_BTNH, **options), 1e-5)

    def weighted(*arrays: jax.Array) -> jax.Array:
        return (library.splash(call(list(arrays), **options), TPU) * w_BTNH).sum()

    program = jax.jit(jax.grad(weighted, (0, 1, 2)))
    exported = jax.export.export(program, platforms=['tpu'])(*arrays)
    assert exported.mlir_module().count('tpu_custom_call') >= 2


@pytest.mark.slow
@pytest.mark.parametrize('case', ['merged', 'packed'])
def test_splash_attention_of_a_stack_is_computed_where_rows_and_heads_lie(case):
    options, sizes = SPLASH[case]
    arrays, w_BTNH = inputs(sizes, length=T)
    w_BTNH = w_BTNH * options['mask'].dense(T, T).any(-1)[..., None, None]
    stacked = [jnp.stack([array, array[::-1]]) for array in arrays[:3]]
    mesh = sharding.make_mesh(MeshConfig(trial=2, data=2, tensor=2))

    def gradients(kernel, *arrays):
        def weighted(*arrays):
            return (kernel(call([*arrays, None], **options)) * w_BTNH).sum()

        return jax.grad(weighted, (0, 1, 2))(*arrays)

    def stack(kernel):
        run = functools.partial(gradients, kernel)
        return jax.jit(jax.vmap(run, spmd_axis_name='trial'))

    k_heads = None if sizes[0] == 1 else 'tensor'
    placed = [
        jax.device_put(array, NamedSharding(mesh, P('trial', 'data', None, heads)))
        for array, heads in zip(stacked, ('tensor', k_heads, k_heads), strict=True)
    ]
    program = stack(lambda c: library.splash(c, Target('cpu', mesh))).lower(*placed).compile()
    assert 'all-gather' not in program.as_text()
    assert_equal([*program(*placed)], [*stack(einsum)(*stacked)], 1e-5)
