"""The contract that every variant keeps, registered or named by import path.

Tests with the fixture `score` or `some_score` hold for the Score alone, beside the Value `vo`.
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
from tests.attention.layers import N, T, assert_close, causal, error, make, stream, wide
from tests.lanes import slow_except

OPTIONS = {'qk_norm': True, 'score_scale': 2.0, 'logit_cap': 3.0, 'window': 3, 'positions': 'alibi'}
SIZES = [(64, 8), (64, 1), (64, 4), *((256, n) for n in (1, 4, 8)), *((512, n) for n in (1, 4, 8))]


def mask_of_lengths(lengths: tuple[int, int], **options) -> jax.Array:
    """mask_BTS of two sequences of these lengths."""
    valid_BS = jnp.arange(T)[None, :] < jnp.array(lengths)[:, None]
    return visible(T, T, valid_BS=valid_BS, **options)


def test_a_layer_equals_the_oracle(some):
    layers.assert_equals_oracle(make(some), stream(), mask_of_lengths((T, T - 2), causal=True))


@functools.cache
def biased_layer_and_gradients(variant: tuple[str, str]) -> tuple[Attention, jax.Array, tuple]:
    """A layer with biases, its input x, and the gradients of sum |out|^2 by both."""
    with jax.enable_x64(True):
        layer, x_BTD = wide((make(variant, biases=True, residual_gain=0.5), stream()))
        out_BTD, pull_back = jax.vjp(lambda layer, x: layer(x, causal()), layer, x_BTD)
        return layer, x_BTD, pull_back(2 * out_BTD)


def test_a_layer_equals_the_oracle_in_float64(variant):
    layer, x_BTD, _ = biased_layer_and_gradients(variant)
    with jax.enable_x64(True):
        layers.assert_equals_oracle(layer, x_BTD, causal())


def test_logits_are_those_of_the_matrix(score):
    """Logits are compared, since softmax would hide a number that is added to all keys."""
    with jax.enable_x64(True):
        layer = make((score, 'vo'), biases=True)
        layer, x_BTD, y_BSD = wide((layer, stream(), stream(5)))
        circuit = layer.score
        q_BTNH = circuit.queries(x_BTD)
        k_BSKH = circuit.keys(circuit.cached(y_BSD))
        k_BSNH = jnp.repeat(k_BSKH, N // k_BSKH.shape[2], axis=2)
        got = circuit.scale * jnp.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSNH)
        want = layers.expected_logits(layer, x_BTD, y_BSD, cross=True)
        assert_close(got, want, 1e-12, f'logits of {score}, from keys that are cached')


def initial(variant: tuple[str, str], **options) -> dict[str, np.ndarray]:
    return layers.by_path(make(variant, moved=False, **options))


def is_random(parameter: np.ndarray) -> bool:
    """Whether initial values differ in size; ones, zeros and signs do not."""
    return np.ptp(np.abs(parameter)) > 0


def test_a_factor_scales_only_the_random_matrices_of_its_group(variant):
    before = initial(variant)
    for factor, group in (('init_qk', 'score.'), ('init_vo', 'value.')):
        for path, after in initial(variant, **{factor: 2.0}).items():
            scaled = path.startswith(group) and is_random(before[path])
            np.testing.assert_array_equal(after, (2 if scaled else 1) * before[path], err_msg=path)


def test_nanogpt_initialization_has_standard_deviation_0_02_and_the_residual_gain(variant):
    """The residual gain multiplies one matrix of the value; what is not random is as for fan_in."""
    fan_in = initial(variant)
    one, quarter = (initial(variant, init='nanogpt', residual_gain=g) for g in (1.0, 0.25))
    gains = {}
    for path, w in one.items():
        if is_random(w):
            gains[path] = (quarter[path] / w).flat[0]
            np.testing.assert_allclose(quarter[path], gains[path] * w, rtol=1e-6, err_msg=path)
            assert abs(w.std() / 0.02 - 1) < 5 * w.size**-0.5, path
        else:
            np.testing.assert_array_equal(w, fan_in[path], err_msg=path)
    assert all(gain == 1 for path, gain in gains.items() if path.startswith('score.'))
    values = [gain for path, gain in gains.items() if path.startswith('value.')]
    # A matrix that is both W_V and W_O has the root; `Hadamard` has the gain in its diagonal.
    assert set(values) <= {1, 0.25, 0.5}
    assert len([g for g in values if g < 1]) == bool(values and 'value.g_o_D' not in one)


def test_every_parameter_has_a_finite_gradient(variant):
    gradients, _ = biased_layer_and_gradients(variant)[2]
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path)
        gradient = np.asarray(gradient)
        assert np.isfinite(gradient).all(), name
        # A constant added to every key moves all logits of a query alike: softmax ignores it.
        if 'frozen' in name:
            assert np.abs(gradient).max() == 0, name
        elif 'b_k' not in name:
            assert np.abs(gradient).max() > 0, name


@pytest.mark.parametrize('num_kv_heads', slow_except([2], [2, 1]), ids=['two', 'one'])
def test_grouped_heads_equal_the_oracle(variant, num_kv_heads):
    score = registry.find_score(variant[0])[0]
    value = registry.find_value(variant[1])[0]
    if not (score.uses_kv_heads or value.uses_kv_heads):
        with pytest.raises(SpecError, match='changes nothing|num_kv_heads must be'):
            make(variant, num_kv_heads=num_kv_heads)
        return
    try:
        layer = make(variant, num_kv_heads=num_kv_heads, biases=True)
    except SpecError as refusal:  # a pair that needs as many key heads as query heads
        assert 'num_kv_heads' in str(refusal) and '\n' not in str(refusal)
        return
    layers.assert_equals_oracle(layer, stream(), causal())


def test_a_circuit_has_as_many_parameters_as_it_declares(variant):
    for num_kv_heads in (N, 2):
        try:
            layer = make(variant, num_kv_heads=num_kv_heads)
        except SpecError:
            continue
        for circuit in (layer.score, layer.value):
            letters = layers.letters(circuit, layer.spec)
            counted = sum(leaf.size for leaf in jax.tree.leaves(circuit))
            assert counted == eval(circuit.parameter_count, letters), letters


def test_bfloat16_is_near_float32(some):
    layer = make(some, moved=False)
    x_BTD = stream()
    half, x_half_BTD = jax.tree.map(lambda a: a.astype(jnp.bfloat16), (layer, x_BTD))
    got = half(x_half_BTD, causal())
    assert got.dtype == jnp.bfloat16
    assert 1e-5 < error(got, layer(x_BTD, causal())) < 0.06


def test_stacked_trials_on_a_mesh_equal_single_ones(some):
    """Parameters placed by the letters of their names on a mesh of 8 devices."""
    layers = [make(some, seed=seed) for seed in (0, 7)]
    x_BTD = stream()
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))

    def stack(path, *leaves):
        stacked = np.stack(leaves)
        name = jax.tree_util.keystr(path, simple=True, separator='/').removesuffix('/value')
        return jax.device_put(
            stacked, NamedSharding(mesh, sharding.spec(name, stacked.shape, mesh))
        )

    stacked = jax.tree_util.tree_map_with_path(stack, *layers)
    run = jax.jit(jax.vmap(lambda layer, x_BTD: layer(x_BTD, causal()), (0, None), axis_size=2))
    for got_BTD, layer in zip(run(stacked, x_BTD), layers, strict=True):
        want_BTD = layer(x_BTD, causal())
        assert_close(got_BTD, want_BTD, 1e-5, f'stacked and sharded, {layer.spec}')


def make_rotary(variant: tuple[str, str], **options) -> Attention | None:
    """A layer with rotary positions, or None where its variant refuses them.

    Only a Score without a rotary form, `latent` without a size or a class from outside may refuse.
    """
    supported = registry.find_score(variant[0])[0].supports_rope
    try:
        layer = make(variant, positions='rope', **options)
    except SpecError as refusal:
        assert variant[0] == 'latent' or is_from_outside(variant) or not supported
        assert '\n' not in str(refusal)
        return None
    assert supported
    return layer


def test_decoding_from_a_cache_equals_attention_over_the_whole_sequence(variant):
    """One token at a time, from cached keys and values: no position depends on a later one."""
    rotary = make_rotary(variant, biases=True)
    assert_cached_decoding_is_exact(rotary or make(variant, positions='alibi', biases=True))


def assert_cached_decoding_is_exact(layer: Attention) -> None:
    """Every step t of decoding gives row t of the output for the whole sequence, to 1e-5."""
    x_BTD = stream()
    want = np.asarray(layer(x_BTD, causal()))
    tokens = jax.vmap(layer.cached, (1, 0), 1)(x_BTD[:, :, None], jnp.arange(T))
    # Slots that are not written yet hold large numbers, which must not be read.
    written_TS = np.tri(T, T + 1, dtype=bool)
    cache = {}  # of every step t, by name
    for name, array in tokens.items():
        slots_BS = np.full((2, T + 1, *array.shape[3:]), 1e3, np.float32)
        slots_BS[:, :T] = np.asarray(array)[:, :, 0]
        written = written_TS.reshape(T, 1, T + 1, *[1] * (array.ndim - 3))
        cache[name] = np.where(written, slots_BS, np.float32(1e3))

    def step(t, x_BD, cache):
        mask = Mask(causal=True, first_query=t)
        return layer.attend_to(x_BD[:, None], cache, mask)[:, 0]

    got_TBD = jax.vmap(step, (0, 1, 0))(jnp.arange(T), x_BTD, cache)
    assert np.abs(np.moveaxis(got_TBD, 0, 1) - want).max() < 1e-5 * np.abs(want).max()


def test_options_together_are_honoured_or_refused(some):
    try:
        layer = make(some, **OPTIONS)
    except SpecError as refusal:  # of a class from outside: all others have all options
        assert is_from_outside(some) and '\n' not in str(refusal)
    else:
        layers.assert_equals_oracle(layer, stream(), visible(T, T, causal=True, window=3))


@pytest.mark.parametrize('option', OPTIONS)
def test_an_option_alone_is_honoured(option):
    """The layer applies the options, the same way for every Score and Value."""
    layer = make(('qk', 'vo'), **{option: OPTIONS[option]})
    layers.assert_equals_oracle(layer, stream(), visible(T, T, causal=True, window=3))


def test_rotary_positions_equal_the_complex_form(score):
    if layer := make_rotary((score, 'vo')):
        layers.assert_equals_oracle(layer, stream(), causal())


@pytest.mark.parametrize(('d_model', 'num_heads'), slow_except([(64, 8)], SIZES))
def test_initial_logits_have_the_declared_standard_deviation(some_score, d_model, num_heads):
    """For unit-normal x and y. Every Score of this package declares 1, so that variants differ
    in form alone."""
    sizes = {'num_heads': num_heads, 'num_kv_heads': num_heads, 'head_size': d_model // num_heads}
    layers.assert_initial_logits_are_as_declared(some_score, d_model=d_model, **sizes)
    if not is_from_outside((some_score, 'vo')):
        assert make((some_score, 'no_v')).score.initial_logit_std == 1
