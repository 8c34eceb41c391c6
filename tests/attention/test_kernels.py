"""Every kernel equals the einsums, forward and backward. Kernels of TPUs are interpreted."""

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
# The blockwise kernel, with blocks of 8 queries and 8 keys.
blockwise_8x8 = functools.partial(blockwise, target=CPU, block=8)


def padded(length: int, lengths: list[int], **fields: Any) -> Mask:
    """A mask of rows of `length` slots that hold `lengths` tokens."""
    valid_BS = jnp.arange(length) < jnp.array(lengths)[:, None]
    return Mask(valid_BS=valid_BS, **fields)


def packed(segments_BT: list[list[int]], repeats: int = 1) -> Mask:
    """A causal mask of packed rows, each number of which stands for `repeats` tokens."""
    repeated_BT = jnp.repeat(jnp.array(segments_BT), repeats, axis=1)
    return Mask(causal=True, segments_BT=repeated_BT, segments_BS=repeated_BT)


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
    """Random [q, k, v, table of biases], and weights of the output, for two rows of queries.

    `sizes` are (K, V, H, G, S): K key heads, V value heads, and S keys. Keys have H channels, and
    values have G. There are N = 4 query heads. The table has a bias by head and distance.
    """
    K, V, H, G, S = sizes
    shapes = [
        (2, length, N, H),  # q
        (2, S, K, H),  # k
        (2, S, V, G),  # v
        (N, 2 * T),  # table of biases
        (2, length, N, G),  # weights of the output
    ]
    keys = jax.random.split(jax.random.key(0), len(shapes))
    arrays = [jax.random.normal(key, shape, dtype) for key, shape in zip(keys, shapes, strict=True)]
    return arrays[:4], arrays[4]


def call(arrays: Sequence[Any], **options: Any) -> Call:
    """The call of a kernel with q, k, v and, for bias='learned', a table of biases.

    By default, the scale is 1 / sqrt(H), with softmax and without bias, cap or dropout.
    """
    q_BTNH, k_BSKH, v_BSKH = arrays[:3]
    default_scale = q_BTNH.shape[-1] ** -0.5
    options = {**DEFAULTS, 'dropout_key': None, 'scale': default_scale, **options}
    if options['bias'] == 'learned':
        table_ND = arrays[3]

        def look_up(distance_TS):
            """The biases of these distances. The first bias in the table is for the distance -T."""
            return table_ND[:, jnp.clip(distance_TS + T, 0, 2 * T - 1)]

        options['bias'] = look_up
    return Call(q_BTNH=q_BTNH, k_BSKH=k_BSKH, v_BSKH=v_BSKH, **options)


def gradients(kernel: Any, weights: Any = 1.0, **options: Any) -> Any:
    """The function that gives the gradients of the weighted output by q, k and v."""

    def weighted_output(q_BTNH, k_BSKH, v_BSKH):
        o_BTNH = kernel(call([q_BTNH, k_BSKH, v_BSKH], **options))
        return (o_BTNH * weights).sum()

    return jax.grad(weighted_output, (0, 1, 2))


def output_with_gradients(kernel: Any, arrays: list, w_BTNH: jax.Array, **options: Any) -> list:
    """The output, and the gradients of its weighted sum by q, k, v and the table of biases.

    The output of a query without any visible key has no meaning, so it is set to 0.

    Args:
        kernel: The function that computes a `Call`.
        arrays: q, k, v and the table of biases, from `inputs`.
        w_BTNH: The weights of the output.
        options: Further fields of the call, including `mask`.
    """
    q_BTNH, k_BSKH = arrays[:2]
    num_queries = q_BTNH.shape[1]
    num_keys = k_BSKH.shape[1]
    mask_BTS = options['mask'].dense(num_queries, num_keys)
    sees_any_BT11 = mask_BTS.any(-1)[..., None, None]

    def run(*arrays: jax.Array) -> jax.Array:
        return kernel(call(arrays, **options))

    @jax.jit
    def output_and_gradients(*arrays: jax.Array) -> list:
        o_BTNH, pull_back = jax.vjp(run, *arrays)
        return [o_BTNH * sees_any_BT11, *pull_back(w_BTNH * sees_any_BT11)]

    return output_and_gradients(*arrays)


def place_on_mesh(arrays: list, mesh: jax.sharding.Mesh, *rows: Any) -> list:
    """The arrays on a mesh, whose axis 'tensor' splits the heads if there are several.

    `rows` are the mesh axes that split the array axes before the sequence.
    """
    placed = []
    for array in arrays:
        num_heads = array.shape[-2]
        heads = 'tensor' if num_heads > 1 else None
        spec = P(*rows, None, heads)
        placed.append(jax.device_put(array, NamedSharding(mesh, spec)))
    return placed


def assert_equal(got: list, want: list, tolerance: float) -> None:
    """Compares outputs and gradients. An array of zeros must be matched exactly."""
    for name, got_array, want_array in zip(('o', 'dq', 'dk', 'dv', 'db'), got, want, strict=False):
        assert got_array.dtype == want_array.dtype
        if np.any(want_array):
            assert error(got_array, want_array) < tolerance, name
        else:
            assert not np.any(got_array), name


PRECISE = [('grouped', jnp.float64, 1e-12), ('learned', jnp.bfloat16, 0.03)]
SINGLE = [(case, jnp.float32, 1e-5) for case in CASES]
QUICK = PRECISE[:1] + [case for case in SINGLE if case[0] in ('packed', 'off_by_one')]


@pytest.mark.parametrize(('case', 'dtype', 'tolerance'), slow_except(QUICK, PRECISE + SINGLE))
def test_blockwise_attention_equals_the_einsums(case, dtype, tolerance):
    options, sizes = CASES[case]
    with jax.enable_x64(dtype == jnp.float64):
        arrays, w_BTNH = inputs(sizes, dtype)
        got = output_with_gradients(blockwise_8x8, arrays, w_BTNH, **options)
        want = output_with_gradients(einsum, arrays, w_BTNH, **options)
        assert_equal(got, want, tolerance)


def test_a_stack_with_traced_scales_has_the_gradients_of_the_einsums():
    """Attention in blocks has the gradients of plain einsums for two trials stacked by vmap.

    Each trial has its own scale of logits, so vmap traces the scale.
    """
    _, sizes = CASES['causal']  # 20 tokens, 4 heads of 8 channels
    (q_BTNH, k_BSKH, v_BSKH, _), w_BTNH = inputs(sizes)
    # The batch of two sequences becomes two trials of one sequence.
    stacked = [array[:, None] for array in (q_BTNH, k_BSKH, v_BSKH, w_BTNH)]
    scales = jnp.array([0.3, 0.7])  # of the two trials

    def stacked_gradients(kernel):
        """The gradients of both trials, by the scale, q, k and v."""

        def weighted(scale, q_BTNH, k_BSKH, v_BSKH, w_BTNH):
            o_BTNH = kernel(call([q_BTNH, k_BSKH, v_BSKH], mask=Mask(causal=True), scale=scale))
            return (o_BTNH * w_BTNH).sum()

        return jax.vmap(jax.grad(weighted, (0, 1, 2, 3)))(scales, *stacked)

    for got, want in zip(stacked_gradients(blockwise_8x8), stacked_gradients(einsum), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-6)


def test_dropped_probabilities_are_the_same_in_the_backward_pass():
    """The forward and backward pass drop the same probabilities, at the given rate.

    Attention in blocks stores no probabilities, so both passes draw dropout from one key.
    """
    _, sizes = CASES['causal']  # 20 tokens, 4 heads of 8 channels
    arrays, w_BTNH = inputs(sizes)
    q_BTNH, k_BSKH, v_BSKH, _ = arrays
    options = {'mask': Mask(), 'dropout': 0.4, 'dropout_key': jax.random.key(3)}

    def run(q_BTNH, v_BSKH):
        return blockwise_8x8(call([q_BTNH, k_BSKH, v_BSKH], **options))

    def weighted_output(q_BTNH, v_BSKH):
        return (run(q_BTNH, v_BSKH) * w_BTNH).sum()

    # With values of 1, each output is a sum of probabilities. Dropout at 0.4 divides the kept
    # probabilities by 0.6, so the sums vary around 1.
    ones_BTNH, pull_back = jax.vjp(lambda v_BSKH: run(q_BTNH, v_BSKH), jnp.ones_like(v_BSKH))
    assert abs(float(ones_BTNH.mean()) - 1) < 0.05
    assert float(ones_BTNH.std()) > 0.1

    # The output P v is linear in v: with weights w, sum(dv v) = sum(P v w).
    dv_BSKH = pull_back(w_BTNH)[0]
    by_gradient = (dv_BSKH * v_BSKH).sum()
    assert abs(float(by_gradient - weighted_output(q_BTNH, v_BSKH))) < 1e-3

    # For a small step, output(q + step) - output(q - step) = 2 sum(dq step).
    _, dq_BTNH, *_ = output_with_gradients(blockwise_8x8, arrays, w_BTNH, **options)
    step_BTNH = 1e-2 * q_BTNH
    above = weighted_output(q_BTNH + step_BTNH, v_BSKH)
    below = weighted_output(q_BTNH - step_BTNH, v_BSKH)
    np.testing.assert_allclose((above - below) / 2, (dq_BTNH * step_BTNH).sum(), rtol=2e-2)


def test_memory_of_blockwise_attention_is_linear_in_the_context():
    """Twice the context takes the blockwise kernel twice the memory, and einsums four times.

    The blockwise kernel holds only the logits of one block of queries and keys at a time. Einsums
    hold the logits of all pairs of tokens.
    """

    def temporary_bytes(kernel, length):
        """The memory of the compiled gradient, without its inputs and outputs."""
        array = jax.ShapeDtypeStruct((1, length, N, 8), jnp.float32)
        program = jax.jit(gradients(kernel, mask=Mask(causal=True), bias=ALIBI))
        compiled = program.lower(array, array, array).compile()
        return compiled.memory_analysis().temp_size_in_bytes

    growth_in_blocks = temporary_bytes(blockwise_8x8, 512) / temporary_bytes(blockwise_8x8, 256)
    growth_of_einsums = temporary_bytes(einsum, 512) / temporary_bytes(einsum, 256)
    assert 1.5 < growth_in_blocks < 2.2
    assert 3.5 < growth_of_einsums < 4.2


def test_blocks_beyond_the_mask_are_not_computed():
    """Attention in blocks skips every block in which no query may attend to a key.

    `blockwise_8x8` cuts 64 queries and 64 keys into 8 blocks each, so 8 * 8 pairs.
    """

    def num_blocks(mask):
        """The number of blocks that the program computes."""
        array = jnp.zeros((1, 64, N, 8))
        jaxpr = jax.make_jaxpr(lambda x: blockwise_8x8(call([x, x, x], mask=mask)))(array)
        # The scan over blocks is printed with length=NUMBER.
        after_length = str(jaxpr).split('length=')[1]
        return int(after_length.split()[0])

    assert num_blocks(Mask()) == 8 * 8

    # Causal: row i of 8 has i blocks up to the diagonal, and 1 + 2 + ... + 8 = 36.
    assert num_blocks(Mask(causal=True)) == 36

    # A window of 9 reaches 8 tokens back, so only into the block next to the diagonal.
    on_diagonal = 8
    on_one_side = 7
    assert num_blocks(Mask(causal=True, window=9)) == on_diagonal + on_one_side
    assert num_blocks(Mask(window=9)) == on_diagonal + 2 * on_one_side


def test_blocks_of_sharded_arrays_need_no_communication():
    """Devices that split the rows and heads compute attention without exchanging arrays."""
    # Four devices: each has half of the rows and half of the heads.
    mesh = sharding.make_mesh(MeshConfig(data=2, tensor=2))
    arrays, _ = inputs((N, N, 8, 8, T))
    q_k_v = arrays[:3]
    options = {'mask': Mask(causal=True), 'bias': ALIBI}
    placed_q_k_v = place_on_mesh(q_k_v, mesh, ('data', 'fsdp'))
    program = jax.jit(gradients(blockwise_8x8, **options)).lower(*placed_q_k_v).compile()

    text = program.as_text()
    for communication in ('all-gather', 'all-to-all', 'collective-permute'):
        assert communication not in text

    # The gradients equal the gradients of einsums on one device.
    got = program(*placed_q_k_v)
    want = gradients(einsum, **options)(*q_k_v)
    assert_equal([*got], [*want], 1e-5)


@pytest.mark.parametrize(('mask', 'num_kv_heads'), slow_except(PLAIN[2:], PLAIN))
def test_dot_product_equals_the_einsums(mask, num_kv_heads):
    arrays, w_BTNH = inputs((num_kv_heads, num_kv_heads, 8, 8, 20))
    dot_product = functools.partial(library.dot_product, target=CPU)
    got = output_with_gradients(dot_product, arrays, w_BTNH, mask=mask)
    want = output_with_gradients(einsum, arrays, w_BTNH, mask=mask)
    assert_equal(got, want, 1e-5)


@pytest.mark.parametrize(('mask', 'num_kv_heads'), slow_except(PLAIN[1:2], PLAIN))
def test_cudnn_is_one_call_for_all_trials_in_each_direction(cudnn, mask, num_kv_heads):
    """Two trials, stacked by vmap, share one call of the library cuDNN, forward and backward.

    The fixture `cudnn` lets JAX lower the program on a machine without a GPU. The program has no
    other matrix product and no loop.
    """
    # Key heads, value heads, channels of a key, channels of a value, number of keys.
    arrays, _ = inputs((num_kv_heads, num_kv_heads, 64, 64, LONG), jnp.bfloat16, LONG)
    # A GPU without a mesh, of compute capability 9.0.
    hopper = Target('gpu', None, 9.0)

    def squares(attention):
        # The gradient of a square depends on the output, so each trial has its own.
        return library.dot_product(attention, hopper) ** 2

    program = jax.jit(jax.vmap(gradients(squares, mask=mask)))
    stacked = [jnp.stack([array, array]) for array in arrays[:3]]
    text = program.trace(*stacked).lower(lowering_platforms=('cuda',)).as_text()
    assert text.count('@__cudnn$fmhaSoftmax(') == 1
    assert text.count('@__cudnn$fmhaSoftmaxBackward(') == 1
    assert 'dot_general' not in text  # a matrix product
    assert 'stablehlo.while' not in text  # a loop


SPLASH = {
    'causal': ({'mask': Mask(causal=True)}, (4, 4, 64, 64, LONG)),
    'merged': ({'mask': Mask(causal=True, window=50), 'logit_cap': 2.0}, (1, 1, 192, 64, LONG)),
    'padded': ({'mask': padded(LONG, [LONG - 5, 40])}, (2, 2, 32, 32, LONG)),
    'packed': ({'mask': packed([[1, 2, 3, 0], [1, 1, 2, 2]], 32)}, (4, 4, 32, 32, LONG)),
    # The arrays have two rows, and the mask has one row for both.
    'one_row': ({'mask': packed([[1, 2, 2, 0]], 32)}, (2, 2, 32, 32, LONG)),
}


def test_queries_are_scaled_by_all_digits_of_the_scale():
    scale = 112**-0.5
    q_BTNH = jnp.linspace(1, 2, 256, dtype=jnp.bfloat16).reshape(1, -1, 1, 1)
    expected = np.asarray(q_BTNH, np.float64) * scale
    for typed_scale in (scale, jnp.float32(scale)):
        scaled = call([q_BTNH, q_BTNH, q_BTNH], mask=Mask(), scale=typed_scale).scaled()
        np.testing.assert_allclose(np.float64(scaled), expected, rtol=2**-8)


@pytest.mark.parametrize('case', slow_except(['merged', 'one_row'], SPLASH))
def test_splash_attention_equals_the_einsums(case):
    options, sizes = SPLASH[case]
    arrays, w_BTNH = inputs(sizes, length=LONG)
    splash = functools.partial(library.splash, target=CPU)
    got = output_with_gradients(splash, arrays, w_BTNH, **options)
    want = output_with_gradients(einsum, arrays, w_BTNH, **options)
    assert_equal(got, want, 1e-5)


@pytest.mark.parametrize('case', slow_except(['merged'], SPLASH))
def test_splash_attention_lowers_for_a_tpu(case):
    options, sizes = SPLASH[case]
    arrays, w_BTNH = inputs(sizes, length=LONG)
    splash = functools.partial(library.splash, target=Target('tpu'))
    program = jax.jit(gradients(splash, w_BTNH, **options))
    exported = jax.export.export(program, platforms=['tpu'])(*arrays[:3])
    assert exported.mlir_module().count('tpu_custom_call') >= 2


@pytest.mark.slow
@pytest.mark.parametrize('case', ['merged', 'packed'])
def test_splash_attention_of_a_sharded_stack_needs_no_all_gather(case):
    """Devices that split trials, rows and heads compute splash attention without gathering arrays.

    Splash attention is a kernel for TPUs, which is interpreted here on CPUs. In the case 'merged',
    all query heads share one key head. In 'packed', a row has several texts.
    """
    options, sizes = SPLASH[case]
    arrays, w_BTNH = inputs(sizes, length=LONG)
    # The output of a query without any visible key has no meaning.
    sees_any_BT = options['mask'].dense(LONG, LONG).any(-1)
    w_BTNH = w_BTNH * sees_any_BT[..., None, None]
    # Eight devices: two parts of the trials, of the rows and of the heads.
    mesh = sharding.make_mesh(MeshConfig(trial=2, data=2, tensor=2))
    splash = functools.partial(library.splash, target=Target('cpu', mesh))

    def stacked_gradients(kernel):
        """The jitted function that gives the gradients of both trials by q, k and v."""
        one_trial = gradients(kernel, w_BTNH, **options)
        return jax.jit(jax.vmap(one_trial, spmd_axis_name='trial'))

    # The second trial has the two rows in reverse order, so that the trials differ.
    stacked = [jnp.stack([array, array[::-1]]) for array in arrays[:3]]
    placed = place_on_mesh(stacked, mesh, 'trial', 'data')
    program = stacked_gradients(splash).lower(*placed).compile()
    assert 'all-gather' not in program.as_text()

    got = program(*placed)
    want = stacked_gradients(einsum)(*stacked)
    assert_equal([*got], [*want], 1e-5)
