"""Every kernel equals the einsums, forward and backward; those of TPUs interpreted and lowered."""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.attention import Mask
from qkattn.attention.kernels import library
from qkattn.attention.kernels.blockwise import blockwise
from qkattn.attention.kernels.einsum import Call, Target, einsum
from qkattn.attention.normalizers import Softmax, SoftmaxOffByOne
from qkattn.attention.rope import linear_bias
from qkattn.config import MeshConfig
from qkattn.train import sharding
from tests.attention.layers import error
from tests.lanes import slow_except

CPU = Target('cpu')
T = 20
N = 4
LONG = 128
DEFAULTS = {'bias': None, 'logit_cap': None, 'normalizer': Softmax(), 'dropout': 0.0}
PLAIN = [(Mask(), 4), (Mask(causal=True), 2), (Mask(causal=True, window=9), 1)]
in_blocks = functools.partial(blockwise, target=CPU, block=8)


def padded(length: int, lengths: list[int], **fields: Any) -> Mask:
    return Mask(valid_BS=jnp.arange(length) < jnp.array(lengths)[:, None], **fields)


def packed(segments_BT: list[list[int]], repeats: int = 1) -> Mask:
    segments_BT = jnp.repeat(jnp.array(segments_BT), repeats, axis=1)
    return Mask(causal=True, segments_BT=segments_BT, segments_BS=segments_BT)


PACKED = packed([[1] * 5 + [2] * 12 + [0] * 3, [1] * 11 + [2] * 9])
ALIBI = functools.partial(linear_bias, N)

# Options of the call, and sizes: key heads, value heads, their sizes, keys.
CASES: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    'causal': ({'mask': Mask(causal=True)}, (4, 4, 8, 8, T)),
    'grouped': ({'mask': Mask(causal=True, window=5), 'logit_cap': 1.5}, (2, 1, 8, 6, T)),
    'merged': ({'mask': Mask(causal=True), 'bias': ALIBI}, (1, 4, 16, 4, T)),
    'learned': ({'mask': Mask(window=9), 'bias': 'learned', 'logit_cap': 2.0}, (4, 2, 4, 4, T)),
    'cross': ({'mask': Mask(), 'bias': 'learned'}, (4, 4, 8, 8, 13)),
    'padded': ({'mask': padded(T, [17, 9], causal=True)}, (4, 4, 8, 8, T)),
    'packed': ({'mask': PACKED}, (4, 4, 8, 8, T)),
    'off_by_one': ({'mask': Mask(causal=True), 'normalizer': SoftmaxOffByOne()}, (2, 2, 8, 8, T)),
    'hides_self': ({'mask': Mask(causal=True, hides_self=True)}, (4, 4, 8, 8, T)),
    'cached': ({'mask': Mask(causal=True, first_query=jnp.int32(7))}, (1, 1, 8, 8, 31)),
    'dense': ({'mask': Mask(mask_BTS=jnp.tri(T, dtype=bool)[None])}, (4, 4, 8, 8, T)),
}


def inputs(sizes: tuple[int, ...], dtype: Any = jnp.float32, length: int = T) -> tuple[list, Any]:
    """q, k, v and a table of biases, and weights of the output."""
    K, V, H, G, S = sizes
    shapes = [(2, length, N, H), (2, S, K, H), (2, S, V, G), (N, 2 * T), (2, length, N, G)]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    *arrays, w_BTNH = (jax.random.normal(*pair, dtype) for pair in zip(keys, shapes, strict=True))
    return arrays, w_BTNH


def call(arrays: Sequence[Any], **options: Any) -> Call:
    """The call of a kernel with these queries, keys, values and, for a learned bias, its table."""
    q_BTNH, k_BSKH, v_BSKH, *tables = arrays
    scale = q_BTNH.shape[-1] ** -0.5
    options = DEFAULTS | {'dropout_key': None, 'scale': scale} | options
    if options['bias'] == 'learned':
        options['bias'] = lambda distance_TS: tables[0][:, jnp.clip(distance_TS + T, 0, 2 * T - 1)]
    return Call(q_BTNH=q_BTNH, k_BSKH=k_BSKH, v_BSKH=v_BSKH, **options)


def gradients(kernel: Any, weights: Any = 1.0, **options: Any) -> Any:
    """The function from q, k and v to the gradients of the weighted output."""
    return jax.grad(lambda *qkv: (kernel(call(qkv, **options)) * weights).sum(), (0, 1, 2))


def with_gradients(kernel: Any, arrays: list, w_BTNH: jax.Array, **options: Any) -> list:
    """The output, and the gradients of its weighted sum by q, k, v and the table of biases.

    Queries without any visible key are left out of both, since their output has no meaning.
    """
    seen_BT = options['mask'].dense(arrays[0].shape[1], arrays[1].shape[1]).any(-1)
    w_BTNH = w_BTNH * seen_BT[..., None, None]

    @jax.jit
    def both(*arrays: jax.Array) -> list:
        o_BTNH, pull_back = jax.vjp(lambda *arrays: kernel(call(arrays, **options)), *arrays)
        return [o_BTNH * seen_BT[..., None, None], *pull_back(w_BTNH)]

    return both(*arrays)


def place_on_mesh(arrays: list, mesh: jax.sharding.Mesh, *rows: Any) -> list:
    """Arrays on a mesh: axes before the sequence as given, more than one head over 'tensor'."""
    specs = [P(*rows, None, 'tensor' if array.shape[-2] > 1 else None) for array in arrays]
    places = [NamedSharding(mesh, spec) for spec in specs]
    return list(map(jax.device_put, arrays, places))


def assert_equal(got: list, want: list, tolerance: float) -> None:
    for name, a, b in zip(('o', 'dq', 'dk', 'dv', 'db'), got, want, strict=False):
        assert a.dtype == b.dtype
        assert error(a, b) < tolerance if np.any(b) else not np.any(a), name


PRECISE = [('grouped', jnp.float64, 1e-12), ('learned', jnp.bfloat16, 0.03)]
SINGLE = [(case, jnp.float32, 1e-5) for case in CASES]
QUICK = PRECISE[:1] + [case for case in SINGLE if case[0] in ('packed', 'off_by_one')]


@pytest.mark.parametrize(('case', 'dtype', 'tolerance'), slow_except(QUICK, PRECISE + SINGLE))
def test_blockwise_attention_equals_the_einsums(case, dtype, tolerance):
    options, sizes = CASES[case]
    with jax.enable_x64(dtype == jnp.float64):
        arrays, w_BTNH = inputs(sizes, dtype)
        got, want = (with_gradients(k, arrays, w_BTNH, **options) for k in (in_blocks, einsum))
        assert_equal(got, want, tolerance)


def test_a_stack_with_traced_scales_has_the_gradients_of_the_einsums():
    arrays, w_BTNH = inputs(CASES['causal'][1])
    stacked = [array[:, None] for array in (*arrays[:3], w_BTNH)]  # of two trials

    def gradient(kernel):
        def weighted(scale, q_BTNH, k_BSKH, v_BSKH, w_BTNH):
            qkv = q_BTNH, k_BSKH, v_BSKH
            return (kernel(call(qkv, mask=Mask(causal=True), scale=scale)) * w_BTNH).sum()

        return jax.vmap(jax.grad(weighted, (0, 1, 2, 3)))(jnp.array([0.3, 0.7]), *stacked)

    for got, want in zip(gradient(in_blocks), gradient(einsum), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_dropped_probabilities_are_the_same_in_the_backward_pass():
    """The forward and backward pass draw the same dropout, of the given rate.

    As o = P v, the gradient of sum(o w) by v is P^T w; that by q is compared with a difference.
    """
    arrays, w_BTNH = inputs(CASES['causal'][1])
    options = {'mask': Mask(), 'dropout': 0.4, 'dropout_key': jax.random.key(3)}

    def run(v_BSKH):
        return in_blocks(call([*arrays[:2], v_BSKH], **options))

    whole_BTNH, pull_back = jax.vjp(run, jnp.ones_like(arrays[2]))
    # Each query keeps 0.6 of T probabilities, divided by 0.6.
    assert abs(float(whole_BTNH.mean()) - 1) < 0.05 and float(whole_BTNH.std()) > 0.1
    (dv_BSKH,) = pull_back(w_BTNH)
    assert abs(float((dv_BSKH * arrays[2]).sum() - (run(arrays[2]) * w_BTNH).sum())) < 1e-3
    step = 1e-2 * arrays[0]
    moved = [
        (in_blocks(call([arrays[0] + change, *arrays[1:]], **options)) * w_BTNH).sum()
        for change in (step, -step)
    ]
    dq_BTNH = with_gradients(in_blocks, arrays, w_BTNH, **options)[1]
    np.testing.assert_allclose((moved[0] - moved[1]) / 2, (dq_BTNH * step).sum(), rtol=2e-2)


def test_memory_of_blockwise_attention_is_linear_in_the_context():
    def temporaries(kernel, length):
        array = jax.ShapeDtypeStruct((1, length, N, 8), jnp.float32)
        program = jax.jit(gradients(kernel, mask=Mask(causal=True), bias=ALIBI))
        return program.lower(*[array] * 3).compile().memory_analysis().temp_size_in_bytes

    # How the memory grows where the context doubles: about 2 or 4 times.
    for kernel, low, high in ((in_blocks, 1.5, 2.2), (einsum, 3.5, 4.2)):
        assert low < temporaries(kernel, 512) / temporaries(kernel, 256) < high


def test_blocks_beyond_the_mask_are_not_computed():
    def blocks(mask):
        array = jnp.zeros((1, 64, N, 8))
        jaxpr = jax.make_jaxpr(lambda x: in_blocks(call([x, x, x], mask=mask)))(array)
        return int(str(jaxpr).split('length=')[1].split()[0])

    # Of 8 x 8 blocks: all, those up to the diagonal, and with a window those beside it.
    counts = [blocks(Mask(causal=c, window=w)) for c, w in ((0, None), (1, None), (1, 9), (0, 9))]
    assert counts == [64, 36, 15, 22]


def test_blocks_of_sharded_arrays_need_no_communication():
    mesh = sharding.make_mesh(MeshConfig(data=2, tensor=2))
    (*arrays, _), _ = inputs((N, N, 8, 8, T))
    options = {'mask': Mask(causal=True), 'bias': ALIBI}
    placed_arrays = place_on_mesh(arrays, mesh, ('data', 'fsdp'))
    program = jax.jit(gradients(in_blocks, **options)).lower(*placed_arrays).compile()
    text = program.as_text()
    assert not any(name in text for name in ('all-gather', 'all-to-all', 'collective-permute'))
    assert_equal([*program(*placed_arrays)], [*gradients(einsum, **options)(*arrays)], 1e-5)


@pytest.mark.parametrize(('mask', 'K'), slow_except(PLAIN[2:], PLAIN))
def test_dot_product_equals_the_einsums(mask, K):
    arrays, w_BTNH = inputs((K, K, 8, 8, 20))
    got = with_gradients(lambda c: library.dot_product(c, CPU), arrays, w_BTNH, mask=mask)
    assert_equal(got, with_gradients(einsum, arrays, w_BTNH, mask=mask), 1e-5)


@pytest.mark.parametrize(('mask', 'K'), slow_except(PLAIN[1:2], PLAIN))
def test_cudnn_is_one_call_for_all_trials_in_each_direction(cudnn, mask, K):
    """The gradients of two trials, lowered for a GPU that is not there."""
    arrays, _ = inputs((K, K, 64, 64, LONG), jnp.bfloat16, LONG)

    def squares(attention):  # whose gradients differ between trials
        return library.dot_product(attention, Target('gpu', None, 9.0)) ** 2

    program = jax.jit(jax.vmap(gradients(squares, mask=mask)))
    stacked = [jnp.stack([array, array]) for array in arrays[:3]]
    text = program.trace(*stacked).lower(lowering_platforms=('cuda',)).as_text()
    assert [text.count(f'@__cudnn$fmhaSoftmax{suffix}(') for suffix in ('', 'Backward')] == [1, 1]
    assert 'dot_general' not in text and 'stablehlo.while' not in text


SPLASH = {
    'causal': ({'mask': Mask(causal=True)}, (4, 4, 64, 64, LONG)),
    'merged': ({'mask': Mask(causal=True, window=50), 'logit_cap': 2.0}, (1, 1, 192, 64, LONG)),
    'padded': ({'mask': padded(LONG, [LONG - 5, 40])}, (2, 2, 32, 32, LONG)),
    'packed': ({'mask': packed([[1, 2, 3, 0], [1, 1, 2, 2]], 32)}, (4, 4, 32, 32, LONG)),
}


def test_queries_are_scaled_by_all_digits_of_the_scale():
    q_BTNH = jnp.linspace(1, 2, 256, dtype=jnp.bfloat16).reshape(1, -1, 1, 1)
    for scale in (112**-0.5, jnp.float32(112**-0.5)):
        scaled = call([q_BTNH] * 3, mask=Mask(), scale=scale).scaled()
        expected = np.asarray(q_BTNH, np.float64) * 112**-0.5
        np.testing.assert_allclose(np.float64(scaled), expected, rtol=2**-8)


@pytest.mark.parametrize('case', slow_except(['merged'], SPLASH))
def test_splash_attention_equals_the_einsums(case):
    options, sizes = SPLASH[case]
    arrays, w_BTNH = inputs(sizes, length=LONG)
    got = with_gradients(lambda c: library.splash(c, CPU), arrays, w_BTNH, **options)
    assert_equal(got, with_gradients(einsum, arrays, w_BTNH, **options), 1e-5)


@pytest.mark.parametrize('case', slow_except(['merged'], SPLASH))
def test_splash_attention_lowers_for_a_tpu(case):
    options, sizes = SPLASH[case]
    arrays, w_BTNH = inputs(sizes, length=LONG)
    program = jax.jit(gradients(lambda c: library.splash(c, Target('tpu')), w_BTNH, **options))
    exported = jax.export.export(program, platforms=['tpu'])(*arrays[:3])
    assert exported.mlir_module().count('tpu_custom_call') >= 2


@pytest.mark.slow
@pytest.mark.parametrize('case', ['merged', 'packed'])
def test_splash_attention_of_a_sharded_stack_needs_no_all_gather(case):
    options, sizes = SPLASH[case]
    arrays, w_BTNH = inputs(sizes, length=LONG)
    w_BTNH = w_BTNH * options['mask'].dense(LONG, LONG).any(-1)[..., None, None]
    # A stack of two trials on a mesh of 2 x 2 x 2 devices.
    stacked = [jnp.stack([array, array[::-1]]) for array in arrays[:3]]
    mesh = sharding.make_mesh(MeshConfig(trial=2, data=2, tensor=2))

    def stack(kernel):
        return jax.jit(jax.vmap(gradients(kernel, w_BTNH, **options), spmd_axis_name='trial'))

    placed_arrays = place_on_mesh(stacked, mesh, 'trial', 'data')
    program = (
        stack(lambda c: library.splash(c, Target('cpu', mesh))).lower(*placed_arrays).compile()
    )
    assert 'all-gather' not in program.as_text()
    assert_equal([*program(*placed_arrays)], [*stack(einsum)(*stacked)], 1e-5)
