"""The contract that every variant keeps, registered or named by import path.

Tests with the fixture `score` hold for the Score alone and run beside the Value `vo`.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from qkattn.attention import Attention, oracle, registry, visible
from qkattn.config import Config, MeshConfig, ModelConfig, TrainConfig, TrialsConfig
from qkattn.errors import SpecError
from qkattn.study import catalogue
from qkattn.train import program, sharding
from qkattn.train.step import train_steps
from tests.attention.layers import (
    N,
    T,
    assert_equals_oracle_in_float64,
    causal,
    error,
    hide_self,
    make,
    reference,
    stream,
)


@pytest.mark.parametrize('biases', [False, True], ids=['plain', 'biases'])
def test_it_equals_the_oracle(variant, biases):
    layer, x_BTD = make(variant, biases=biases), stream()
    valid_BS = jnp.arange(T)[None, :] < jnp.array([[T], [T - 2]])
    mask_BTS = visible(T, T, causal=True, valid_BS=valid_BS)
    assert error(layer(x_BTD, mask_BTS), reference(layer, x_BTD, x_BTD, mask_BTS)) < 1e-5


def test_it_equals_the_oracle_in_float64(variant):
    with jax.enable_x64(True):
        assert_equals_oracle_in_float64(make(variant, biases=True))


def test_grouped_heads_equal_the_oracle(variant):
    score, value = registry.find_score(variant[0])[0], registry.find_value(variant[1])[0]
    for num_kv_heads in (1, 2):
        if not (score.uses_kv_heads or value.uses_kv_heads):
            with pytest.raises(SpecError, match='changes nothing|num_kv_heads must be'):
                make(variant, num_kv_heads=num_kv_heads)
            continue
        try:
            layer = make(variant, num_kv_heads=num_kv_heads, biases=True)
        except SpecError as refusal:  # a pair that needs as many key heads as query heads
            assert 'num_kv_heads' in str(refusal) and '\n' not in str(refusal)
            continue
        x_BTD = stream()
        assert error(layer(x_BTD, causal()), reference(layer, x_BTD, x_BTD, causal())) < 1e-5


def test_no_position_depends_on_a_later_one(variant):
    layer, x_BTD = make(variant), stream()
    for t in (0, 3):
        gradient_BTD = jax.grad(lambda x, t=t: jnp.square(layer(x, causal())[:, t]).sum())(x_BTD)
        assert jnp.all(gradient_BTD[:, t + 1 :] == 0)
        assert jnp.abs(gradient_BTD[:, : t + 1]).max() > 0


def test_padding_is_never_read(variant):
    layer, x_BTD = make(variant), stream()
    valid_BS = jnp.arange(T)[None, :] < jnp.array([[T - 3], [T - 1]])
    mask_BTS = visible(T, T, causal=False, valid_BS=valid_BS)
    other_BTD = jnp.where(valid_BS[..., None], x_BTD, 100.0)
    got, want = (np.asarray(layer(z, mask_BTS))[valid_BS] for z in (other_BTD, x_BTD))
    np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())


def test_every_parameter_has_a_finite_gradient(variant):
    layer, x_BTD = make(variant, biases=True), stream()
    gradients = jax.grad(lambda layer: jnp.square(layer(x_BTD, causal())).sum())(layer)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(gradient).all(), name
        # A constant added to every key moves all logits of a query alike: softmax ignores it.
        if 'frozen' in name:
            assert np.abs(gradient).max() == 0, name
        elif 'b_k' not in name:
            assert np.abs(gradient).max() > 0, name


def test_the_parameter_count_is_as_declared(variant):
    for num_kv_heads in (N, 2):
        try:
            layer = make(variant, num_kv_heads=num_kv_heads)
        except SpecError:
            continue
        for circuit in (layer.score, layer.value):
            letters = catalogue.letters(circuit, layer.spec)
            counted = sum(leaf.size for leaf in jax.tree.leaves(circuit))
            assert counted == eval(circuit.parameter_count, letters), letters


def test_bfloat16_is_near_float32(variant):
    layer, x_BTD = make(variant, moved=False), stream()
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), layer)
    got, want = half(x_BTD.astype(jnp.bfloat16), causal()), layer(x_BTD, causal())
    assert got.dtype == jnp.bfloat16
    assert 1e-5 < error(got, want) < 0.06


def test_sharded_equals_unsharded(variant):
    """Parameters placed by the letters of their names on a mesh of 8 devices."""
    layer, x_BTD = make(variant), stream()
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))

    def place(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        name = name.removesuffix('/value')
        spec = sharding.spec(name, (1, *leaf.shape), mesh)
        return jax.device_put(leaf, NamedSharding(mesh, jax.sharding.PartitionSpec(*spec[1:])))

    placed = jax.tree_util.tree_map_with_path(place, layer)
    run = jax.jit(lambda layer, x_BTD: layer(x_BTD, causal()))
    assert error(run(placed, x_BTD), layer(x_BTD, causal())) < 1e-5


def test_stacked_trials_equal_single_ones(variant):
    x_BTD = stream()
    layers = [make(variant, seed=seed) for seed in (0, 7)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    got = jax.vmap(lambda layer: layer(x_BTD, causal()), axis_size=2)(stacked)
    for x, layer in enumerate(layers):
        assert error(got[x], layer(x_BTD, causal())) < 1e-5


@pytest.mark.parametrize('positions', ['rope', 'alibi'])
def test_cached_decoding_equals_the_whole(variant, positions):
    try:
        layer = make(variant, positions=positions, biases=True)
    except SpecError as refusal:
        assert positions == 'rope' and '\n' not in str(refusal)
        return
    x_BTD = stream()
    want = np.asarray(layer(x_BTD, causal()))
    pieces = [layer.cached(x_BTD[:, t : t + 1]) for t in range(T)]
    # Slots that are not written yet hold large numbers, which must not be read.
    cache = {name: jnp.full((2, T + 1, *array.shape[2:]), 1e3) for name, array in pieces[0].items()}
    for t, piece in enumerate(pieces):
        cache = {name: cache[name].at[:, t].set(piece[name][:, 0]) for name in cache}
        mask_BTS = visible(1, T + 1, causal=True, first_query=t)
        got = layer.attend_to(x_BTD[:, t : t + 1], cache, mask_BTS, first_query=t)
        assert np.abs(np.asarray(got)[:, 0] - want[:, t]).max() < 1e-5 * np.abs(want).max()


def logits_with_options(layer: Attention, x_BTD: jax.Array) -> np.ndarray:
    """s_BNTS in plain numpy from queries and keys: QK-norm, scales, cap, linear biases."""
    score, spec = layer.score, layer.spec
    q_BTNH, k_BSKH = score.queries(x_BTD), score.keys(score.cached(x_BTD))
    q_BTNH, k_BSKH = np.asarray(q_BTNH, np.float64), np.asarray(k_BSKH, np.float64)
    if spec.qk_norm:
        q_BTNH, k_BSKH = (
            z / np.sqrt((z**2).mean(-1, keepdims=True)) * np.asarray(gain[...])
            for z, gain in ((q_BTNH, layer.g_q_H), (k_BSKH, layer.g_k_H))
        )
    k_BSNH = np.repeat(k_BSKH, N // k_BSKH.shape[2], axis=2)
    s_BNTS = spec.score_scale * score.scale * np.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSNH)
    if spec.logit_cap is not None:
        s_BNTS = spec.logit_cap * np.tanh(s_BNTS / spec.logit_cap)
    if spec.positions == 'alibi':
        for n, t, s in np.ndindex(*s_BNTS.shape[1:]):
            s_BNTS[:, n, t, s] -= 2 ** (-8 * (n + 1) / N) * abs(t - s)
    return s_BNTS


def assert_options_are_honoured_or_refused(variant: tuple[str, str], **options) -> None:
    try:
        layer = make(variant, **options)
    except SpecError as refusal:
        assert '\n' not in str(refusal) and variant[0].split('(')[0] in str(refusal)
        return
    x_BTD = stream()
    mask_BTS = visible(T, T, causal=True, window=layer.spec.window)
    if layer.spec.window is not None:
        t, s = np.nonzero(np.asarray(mask_BTS[0]))
        assert (t - s).max() == layer.spec.window - 1
    B_NDE = np.asarray(layer.value.matrix(layer.score))
    s_BNTS = logits_with_options(layer, x_BTD)
    want = oracle.mix(s_BNTS, B_NDE, x_BTD, hide_self(layer.score, mask_BTS))
    assert error(layer(x_BTD, mask_BTS), want) < 1e-5


def test_options_together_are_honoured_or_refused(variant):
    assert_options_are_honoured_or_refused(
        variant, qk_norm=True, score_scale=2.0, logit_cap=3.0, window=3, positions='alibi'
    )


@pytest.mark.parametrize(
    'option',
    [
        {'qk_norm': True},
        {'score_scale': 0.5},
        {'logit_cap': 1.0},
        {'window': 2},
        {'positions': 'alibi'},
    ],
    ids=lambda option: next(iter(option)),
)
def test_an_option_is_honoured_or_refused(score, option):
    assert_options_are_honoured_or_refused((score, 'vo'), **option)


def test_rotary_positions_equal_the_complex_form(score):
    try:
        layer = make((score, 'vo'), positions='rope')
    except SpecError as refusal:
        assert '\n' not in str(refusal)
        return
    circuit, x_BTD = layer.score, stream()
    s_BNTS = oracle.rotary_logits(
        circuit.queries(x_BTD),
        circuit.keys(circuit.cached(x_BTD)),
        scale=circuit.scale,
        rope_size=circuit.rope_size,
    )
    B_NDE = np.asarray(layer.value.matrix(circuit))
    want = oracle.mix(s_BNTS, B_NDE, x_BTD, hide_self(circuit, causal()))
    assert error(layer(x_BTD, causal()), want) < 1e-5


QUICK = [(64, 8), (256, 4), (512, 1)]
SLOW = [(64, 1), (64, 4), (256, 1), (256, 8), (512, 4), (512, 8)]


@pytest.mark.parametrize(
    ('d_model', 'num_heads'),
    [*QUICK, *(pytest.param(*sizes, marks=pytest.mark.slow) for sizes in SLOW)],
)
def test_initial_logits_have_unit_standard_deviation(score, d_model, num_heads):
    """For independent unit-normal x and y."""
    sizes = {'num_heads': num_heads, 'num_kv_heads': num_heads, 'head_size': d_model // num_heads}
    stds = []
    for seed in range(6 if d_model == 64 else 2):
        circuit = make((score, 'no_v'), seed=seed, d_model=d_model, moved=False, **sizes).score
        x_BTD, y_BSD = (stream(64, seed=seed + s, d_model=d_model) for s in (50, 90))
        q_BTNH, k_BSKH = circuit.queries(x_BTD), circuit.keys(circuit.cached(y_BSD))
        q_BTKMH = q_BTNH.reshape(*q_BTNH.shape[:2], k_BSKH.shape[2], -1, q_BTNH.shape[3])
        s_BKMTS = circuit.scale * jnp.einsum('BTKMH,BSKH->BKMTS', q_BTKMH, k_BSKH)
        stds.append(float(s_BKMTS.std()))
    assert 0.9 < np.mean(stds) < 1.1, stds


def test_a_train_step_lowers_for_a_pod_without_devices(variant):
    config = Config(
        model=ModelConfig(
            score=variant[0], value=variant[1], d_model=64, num_layers=2, num_heads=4, context=16
        ),
        train=TrainConfig(batch_size=64, accumulation=2, steps_per_dispatch=1),
        trials=TrialsConfig(seeds=(0, 1)),
    )
    config = dataclasses.replace(config, mesh=MeshConfig(trial=2, data=4, fsdp=4, tensor=4))
    names = ('trial', 'data', 'fsdp', 'tensor')
    mesh = AbstractMesh((2, 4, 4, 4), names, axis_types=(AxisType.Auto,) * 4)
    state, hyper, tokens = program.abstract_inputs(config, mesh)
    step = jax.jit(train_steps(config, 'vmap', mesh))
    lowered = step.trace(state, hyper, tokens).lower(lowering_platforms=('tpu',))
    assert 'dot_general' in lowered.as_text()
    after, metrics = lowered.out_info
    assert jax.tree.map(lambda a: a.shape, after) == jax.tree.map(lambda a: a.shape, state)
    assert metrics['loss'].shape == (1, 2)
