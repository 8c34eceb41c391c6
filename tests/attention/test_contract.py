"""The contract that every variant keeps, registered or named by import path.

Tests with the fixture `score` or `some_score` test only the Score, in a layer with the Value `vo`.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from qkattn.attention import Attention, Mask, registry, visible
from qkattn.config import MeshConfig
from qkattn.errors import SpecError
from qkattn.train import sharding
from tests.attention import layers
from tests.attention.examples import is_from_outside
from tests.attention.layers import N, T, assert_close, causal, error, in_float64, make, stream
from tests.lanes import slow_except

OPTIONS = {'qk_norm': True, 'score_scale': 2.0, 'logit_cap': 3.0, 'window': 3, 'positions': 'alibi'}
# Sizes of the model and numbers of heads.
SIZES = [
    (64, 8),
    (64, 1),
    (64, 4),
    (256, 1),
    (256, 4),
    (256, 8),
    (512, 1),
    (512, 4),
    (512, 8),
]


def mask_of_lengths(lengths: tuple[int, int], **options) -> jax.Array:
    """mask_BTS of two sequences of these lengths."""
    valid_BS = jnp.arange(T)[None, :] < jnp.array(lengths)[:, None]
    return visible(T, T, valid_BS=valid_BS, **options)


def test_a_layer_equals_the_oracle(some):
    layers.assert_equals_oracle(make(some), stream(), mask_of_lengths((T, T - 2), causal=True))


@functools.cache
def biased_layer_and_input(variant: tuple[str, str]) -> tuple[Attention, jax.Array]:
    """A layer with biases and its input x, in float64."""
    with jax.enable_x64(True):
        return in_float64((make(variant, biases=True, residual_gain=0.5), stream()))


def test_a_layer_equals_the_oracle_in_float64(variant):
    layer, x_BTD = biased_layer_and_input(variant)
    with jax.enable_x64(True):
        layers.assert_equals_oracle(layer, x_BTD, causal())


def test_logits_are_those_of_the_matrix(score):
    """Products of queries and keys equal the logits that define a Score.

    The test compares logits, since softmax would hide a constant added to all logits of a query.
    """
    with jax.enable_x64(True):
        layer = make((score, 'vo'), biases=True)
        layer, x_BTD, y_BSD = in_float64((layer, stream(), stream(5)))
        circuit = layer.score

        # Keys are computed from cached arrays. Several query heads may share a key head.
        q_BTNH = circuit.queries(x_BTD)
        k_BSKH = circuit.keys(circuit.cached(y_BSD))
        num_key_heads = k_BSKH.shape[2]
        k_BSNH = jnp.repeat(k_BSKH, N // num_key_heads, axis=2)
        got = circuit.scale * jnp.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSNH)

        want = layers.expected_logits(layer, x_BTD, y_BSD, cross=True)
        assert_close(got, want, 1e-12, f'logits of {score}, from keys that are cached')


def initial_parameters(variant: tuple[str, str], **options) -> dict[str, np.ndarray]:
    """The initial parameters of a layer, by their paths, such as 'score.w_q_DNH'."""
    return layers.by_path(make(variant, moved=False, **options))


def is_random(parameter: np.ndarray) -> bool:
    """Whether the absolute values differ. Ones, zeros and signs are not random."""
    return np.ptp(np.abs(parameter)) > 0


def test_a_factor_scales_only_the_random_matrices_of_its_group(variant):
    before = initial_parameters(variant)
    for factor, group in (('init_qk', 'score.'), ('init_vo', 'value.')):
        doubled = initial_parameters(variant, **{factor: 2.0})
        for path, after in doubled.items():
            is_scaled = path.startswith(group) and is_random(before[path])
            want = 2 * before[path] if is_scaled else before[path]
            np.testing.assert_array_equal(after, want, err_msg=path)


def test_nanogpt_initialization_has_standard_deviation_0_02(variant):
    by_fan_in = initial_parameters(variant)
    by_nanogpt = initial_parameters(variant, init='nanogpt', residual_gain=1.0)
    for path, w in by_nanogpt.items():
        if is_random(w):
            assert abs(w.std() / 0.02 - 1) < 5 * w.size**-0.5, path
        else:
            np.testing.assert_array_equal(w, by_fan_in[path], err_msg=path)


def test_the_residual_gain_multiplies_one_matrix_of_the_value(variant):
    """The residual gain multiplies the initial values of exactly one matrix of the Value.

    A variant is a pair of a Score, which gives logits, and a Value, which gives outputs.
    """
    plain = initial_parameters(variant, init='nanogpt', residual_gain=1.0)
    quartered = initial_parameters(variant, init='nanogpt', residual_gain=0.25)
    gains_in_value = []
    for path, w in plain.items():
        if not is_random(w):
            continue
        # All elements of a matrix are multiplied by the same number.
        gain = (quartered[path] / w).flat[0]
        np.testing.assert_allclose(quartered[path], gain * w, rtol=1e-6, err_msg=path)
        if path.startswith('score.'):
            assert gain == 1, path
        if path.startswith('value.'):
            # A matrix used as both W_V and W_O is multiplied by sqrt(0.25) = 0.5.
            assert gain in (1, 0.25, 0.5), path
            gains_in_value.append(gain)

    multiplied = [gain for gain in gains_in_value if gain < 1]
    # A Value without random matrices has nothing to multiply. `Hadamard` multiplies its diagonal
    # g_o_D, which is not random.
    if gains_in_value and 'value.g_o_D' not in plain:
        assert len(multiplied) == 1
    else:
        assert len(multiplied) == 0


def test_every_parameter_has_a_finite_gradient(variant):
    """The gradient of every parameter is finite, and not 0 unless the parameter is `frozen`."""
    layer, x_BTD = biased_layer_and_input(variant)

    def squared_output(layer):
        return jnp.square(layer(x_BTD, causal())).sum()

    with jax.enable_x64(True):
        layer_gradients = jax.grad(squared_output)(layer)

    for path, gradient in jax.tree_util.tree_leaves_with_path(layer_gradients):
        name = jax.tree_util.keystr(path)
        gradient = np.asarray(gradient)
        assert np.isfinite(gradient).all(), name
        if 'frozen' in name:
            assert np.abs(gradient).max() == 0, name
        # The gradient of b_k may be 0: softmax ignores a constant added to all logits of a query.
        elif 'b_k' not in name:
            assert np.abs(gradient).max() > 0, name


@pytest.mark.parametrize('num_kv_heads', slow_except([2], [2, 1]), ids=['two', 'one'])
def test_grouped_heads_equal_the_oracle(variant, num_kv_heads):
    """With 1 or 2 key heads for 4 query heads, a variant equals the oracle or is refused."""
    score, _ = registry.find_score(variant[0])
    value, _ = registry.find_value(variant[1])

    # A variant without key heads refuses a number of key heads.
    if not (score.uses_kv_heads or value.uses_kv_heads):
        with pytest.raises(SpecError, match='changes nothing|num_kv_heads must be'):
            make(variant, num_kv_heads=num_kv_heads)
        return

    try:
        layer = make(variant, num_kv_heads=num_kv_heads, biases=True)
    except SpecError as refusal:
        # A variant may need as many key heads as query heads. The refusal is one line.
        message = str(refusal)
        assert 'num_kv_heads' in message
        assert '\n' not in message
        return
    layers.assert_equals_oracle(layer, stream(), causal())


def test_a_circuit_has_as_many_parameters_as_it_declares(variant):
    """The formula `parameter_count` of a Score or Value gives its number of parameters."""
    for num_kv_heads in (N, 2):
        try:
            layer = make(variant, num_kv_heads=num_kv_heads)
        except SpecError:
            continue  # the variant does not allow this number of key heads
        for circuit in (layer.score, layer.value):
            size_of_letter = layers.letters(circuit, layer.spec)
            counted = sum(leaf.size for leaf in jax.tree.leaves(circuit))
            # The formula uses the sizes of axes, such as 'D*N*H + D*K*H'.
            declared = eval(circuit.parameter_count, size_of_letter)
            assert counted == declared, size_of_letter


def test_bfloat16_is_near_float32(some):
    layer = make(some, moved=False)
    x_BTD = stream()
    half_layer, half_x_BTD = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (layer, x_BTD))
    got = half_layer(half_x_BTD, causal())
    want = layer(x_BTD, causal())
    assert got.dtype == jnp.bfloat16
    assert 1e-5 < error(got, want) < 0.06


def test_stacked_trials_on_a_mesh_equal_single_ones(some):
    """Two trials stacked on 8 devices have the same outputs as separate trials on one device.

    `sharding.spec` derives from a parameter's name and shape how devices split the array.
    """
    single_layers = [make(some, seed=seed) for seed in (0, 7)]
    x_BTD = stream()
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))

    def stack_on_mesh(path, *leaves):
        """The values of one parameter in both trials, as one array on the mesh."""
        stacked = np.stack(leaves)
        name = jax.tree_util.keystr(path, simple=True, separator='/').removesuffix('/value')
        spec = sharding.spec(name, stacked.shape, mesh)
        return jax.device_put(stacked, NamedSharding(mesh, spec))

    stacked_layer = jax.tree_util.tree_map_with_path(stack_on_mesh, *single_layers)
    run = jax.jit(jax.vmap(lambda layer, x_BTD: layer(x_BTD, causal()), (0, None), axis_size=2))
    stacked_out = run(stacked_layer, x_BTD)
    for got_BTD, layer in zip(stacked_out, single_layers, strict=True):
        want_BTD = layer(x_BTD, causal())
        assert_close(got_BTD, want_BTD, 1e-5, f'stacked and sharded, {layer.spec}')


def make_rotary(variant: tuple[str, str], **options) -> Attention | None:
    """A layer with rotary positions, or None if its variant refuses them.

    Three kinds may refuse: Scores without a rotary form, `latent` without a `rope_size`, and
    classes outside the package and examples/.
    """
    score, _ = variant
    score_class, _ = registry.find_score(score)
    supports_rope = score_class.supports_rope
    try:
        layer = make(variant, positions='rope', **options)
    except SpecError as refusal:
        assert score == 'latent' or is_from_outside(variant) or not supports_rope
        assert '\n' not in str(refusal)
        return None
    assert supports_rope
    return layer


def test_decoding_from_a_cache_equals_attention_over_the_whole_sequence(variant):
    """Keys and values are cached token by token, so no token depends on a later one."""
    layer = make_rotary(variant, biases=True)
    if layer is None:
        layer = make(variant, positions='alibi', biases=True)
    assert_cached_decoding_is_exact(layer)


def assert_cached_decoding_is_exact(layer: Attention) -> None:
    """Step t of decoding equals row t of the output for the whole sequence, to 1e-5.

    Each step gets one token, and reads earlier tokens from a cache.
    """
    x_BTD = stream()
    want_BTD = np.asarray(layer(x_BTD, causal()))

    # Each step t has a cache with T + 1 slots for tokens. Slots that are not written yet hold 1000,
    # and must not be read.
    num_slots = T + 1
    is_written_TS = np.tri(T, num_slots, dtype=bool)  # at step t, slots 0 to t
    tokens = jax.vmap(layer.cached, (1, 0), 1)(x_BTD[:, :, None], jnp.arange(T))
    caches = {}
    for name, array in tokens.items():
        num_feature_axes = array.ndim - 3
        slots_BS = np.full((2, num_slots, *array.shape[3:]), 1e3, np.float32)
        slots_BS[:, :T] = np.asarray(array)[:, :, 0]
        is_written = is_written_TS.reshape(T, 1, num_slots, *[1] * num_feature_axes)
        caches[name] = np.where(is_written, slots_BS, np.float32(1e3))

    def decode(t, x_BD, cache):
        """The output for the token at position t."""
        mask = Mask(causal=True, first_query=t)
        return layer.attend_to(x_BD[:, None], cache, mask)[:, 0]

    # All steps run at once, since each step has its own cache.
    got_TBD = jax.vmap(decode, (0, 1, 0))(jnp.arange(T), x_BTD, caches)
    got_BTD = np.moveaxis(got_TBD, 0, 1)
    assert np.abs(got_BTD - want_BTD).max() < 1e-5 * np.abs(want_BTD).max()


def test_options_together_are_honoured_or_refused(some):
    try:
        layer = make(some, **OPTIONS)
    except SpecError as refusal:
        # Only a class from outside may lack an option.
        assert is_from_outside(some)
        assert '\n' not in str(refusal)
    else:
        layers.assert_equals_oracle(layer, stream(), visible(T, T, causal=True, window=3))


@pytest.mark.parametrize('option', OPTIONS)
def test_an_option_alone_is_honoured(option):
    """The layer applies the options, the same way for every Score and Value."""
    layer = make(('qk', 'vo'), **{option: OPTIONS[option]})
    layers.assert_equals_oracle(layer, stream(), visible(T, T, causal=True, window=3))


def test_rotary_positions_equal_the_complex_form(score):
    layer = make_rotary((score, 'vo'))
    if layer is not None:
        layers.assert_equals_oracle(layer, stream(), causal())


@pytest.mark.parametrize(('d_model', 'num_heads'), slow_except([(64, 8)], SIZES))
def test_initial_logits_have_the_declared_standard_deviation(some_score, d_model, num_heads):
    """The inputs x and y are unit-normal. Every Score of this package declares 1."""
    sizes = {'num_heads': num_heads, 'num_kv_heads': num_heads, 'head_size': d_model // num_heads}
    layers.assert_initial_logits_are_as_declared(some_score, d_model=d_model, **sizes)
    if not is_from_outside((some_score, 'vo')):
        score = make((some_score, 'no_v')).score
        assert score.initial_logit_std == 1
