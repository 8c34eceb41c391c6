"""The contract that every cell of the grid keeps, registered or named by import path."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding

from qkattn.attention import Attention, AttentionSpec, oracle, registry, visible
from qkattn.config import Config, MeshConfig, ModelConfig, TrainConfig, TrialsConfig
from qkattn.errors import SpecError
from qkattn.study import catalogue
from qkattn.train import program, sharding
from qkattn.train.step import train_steps

D, N, H, T = 32, 4, 8, 7


def make(cell: tuple[str, str], *, seed: int = 0, moved: bool = True, **options) -> Attention:
    """A layer, every parameter moved off its initial value so that zero biases count."""
    options = {'d_model': D, 'num_heads': N, 'num_kv_heads': N, 'head_size': H, **options}
    spec = AttentionSpec(score=cell[0], value=cell[1], **options)
    layer = Attention(spec, key=jax.random.key(seed))
    leaves, tree = jax.tree.flatten(layer)
    if not moved or not leaves:
        return layer
    keys = jax.random.split(jax.random.key(seed + 1), len(leaves))
    leaves = [a + 0.1 * jax.random.normal(k, a.shape) for a, k in zip(leaves, keys, strict=True)]
    return jax.tree.unflatten(tree, leaves)


def stream(length: int = T, seed: int = 5, d_model: int = D) -> jax.Array:
    return jax.random.normal(jax.random.key(seed), (2, length, d_model))


def causal(length: int = T) -> jax.Array:
    return visible(length, length, causal=True)


def reference_logits(layer: Attention, x_BTD, y_BSD) -> np.ndarray:
    score = layer.score
    if score.bilinear:
        return oracle.logits(np.asarray(score.matrix()), x_BTD, y_BSD, scale=score.scale)
    return score.scale * score.reference_logits(np.asarray(x_BTD), np.asarray(y_BSD))


def reference(layer: Attention, x_BTD, y_BSD, mask_BTS) -> np.ndarray:
    if layer.score.hides_self and x_BTD is y_BSD:
        others_BTS = mask_BTS & (jnp.arange(x_BTD.shape[1])[:, None] != jnp.arange(y_BSD.shape[1]))
        mask_BTS = jnp.where(others_BTS.any(-1, keepdims=True), others_BTS, mask_BTS)
    s_BNTS = reference_logits(layer, x_BTD, y_BSD)
    return oracle.mix(s_BNTS, np.asarray(layer.value.matrix(layer.score)), y_BSD, mask_BTS)


def error(got, want) -> float:
    """Largest difference relative to the largest element."""
    return float(np.abs(np.asarray(got, np.float64) - want).max() / np.abs(want).max())


@pytest.mark.parametrize('biases', [False, True], ids=['plain', 'biases'])
def test_it_equals_the_oracle(cell, biases):
    layer, x_BTD = make(cell, biases=biases), stream()
    valid_BS = jnp.arange(T)[None, :] < jnp.array([[T], [T - 2]])
    mask_BTS = visible(T, T, causal=True, valid_BS=valid_BS)
    assert error(layer(x_BTD, mask_BTS), reference(layer, x_BTD, x_BTD, mask_BTS)) < 1e-5


def test_it_equals_the_oracle_in_float64(cell):
    with jax.enable_x64(True):
        layer = jax.tree.map(lambda a: a.astype(jnp.float64), make(cell, biases=True))
        x_BTD, y_BSD = stream().astype(jnp.float64), stream(5, seed=6).astype(jnp.float64)
        got = layer(x_BTD, causal())
        assert got.dtype == jnp.float64
        assert error(got, reference(layer, x_BTD, x_BTD, causal())) < 1e-12
        mask_BTS = visible(T, 5, causal=False)
        got = layer(x_BTD, mask_BTS, y_BSD=y_BSD)
        assert error(got, reference(layer, x_BTD, y_BSD, mask_BTS)) < 1e-12


def test_grouped_heads_equal_the_oracle(cell):
    score, value = registry.find_score(cell[0])[0], registry.find_value(cell[1])[0]
    for num_kv_heads in (1, 2):
        if not (score.uses_kv_heads or value.uses_kv_heads):
            with pytest.raises(SpecError, match='changes nothing|num_kv_heads must be'):
                make(cell, num_kv_heads=num_kv_heads)
            continue
        try:
            layer = make(cell, num_kv_heads=num_kv_heads, biases=True)
        except SpecError as refusal:  # a pair that needs as many key heads as query heads
            assert 'num_kv_heads' in str(refusal) and '\n' not in str(refusal)
            continue
        x_BTD = stream()
        assert error(layer(x_BTD, causal()), reference(layer, x_BTD, x_BTD, causal())) < 1e-5


def test_no_position_depends_on_a_later_one(cell):
    layer, x_BTD = make(cell), stream()
    for t in (0, 3):
        gradient_BTD = jax.grad(lambda x, t=t: jnp.square(layer(x, causal())[:, t]).sum())(x_BTD)
        assert jnp.all(gradient_BTD[:, t + 1 :] == 0)
        assert jnp.abs(gradient_BTD[:, : t + 1]).max() > 0


def test_padding_is_never_read(cell):
    layer, x_BTD = make(cell), stream()
    valid_BS = jnp.arange(T)[None, :] < jnp.array([[T - 3], [T - 1]])
    mask_BTS = visible(T, T, causal=False, valid_BS=valid_BS)
    other_BTD = jnp.where(valid_BS[..., None], x_BTD, 100.0)
    got, want = (np.asarray(layer(z, mask_BTS))[valid_BS] for z in (other_BTD, x_BTD))
    np.testing.assert_allclose(got, want, atol=1e-6 * np.abs(want).max())


def test_every_parameter_has_a_finite_gradient(cell):
    layer, x_BTD = make(cell, biases=True), stream()
    gradients = jax.grad(lambda layer: jnp.square(layer(x_BTD, causal())).sum())(layer)
    for path, gradient in jax.tree_util.tree_leaves_with_path(gradients):
        name = jax.tree_util.keystr(path)
        assert np.isfinite(gradient).all(), name
        # A constant added to every key moves all logits of a query alike: softmax ignores it.
        if 'frozen' in name:
            assert np.abs(gradient).max() == 0, name
        elif 'b_k' not in name:
            assert np.abs(gradient).max() > 0, name


def test_weights_equal_the_documented_formula(cell):
    for num_kv_heads in (N, 2):
        try:
            layer = make(cell, num_kv_heads=num_kv_heads)
        except SpecError:
            continue
        for circuit in (layer.score, layer.value):
            letters = catalogue.letters(circuit, layer.spec)
            counted = sum(leaf.size for leaf in jax.tree.leaves(circuit))
            assert counted == eval(circuit.parameter_count, letters), letters


def test_initial_logits_have_unit_standard_deviation(cell):
    """Off the diagonal, for independent unit-normal x and y."""
    for d_model in (64, 256):
        stds = []
        for seed in range(3):
            options = {'d_model': d_model, 'head_size': d_model // N, 'moved': False}
            score = make(cell, seed=seed, **options).score
            x_BTD, y_BSD = (stream(96, seed=s, d_model=d_model) for s in (seed + 50, seed + 90))
            q_BTNH, k_BSKH = score.queries(x_BTD), score.keys(score.cached(y_BSD))
            k_BSNH = jnp.repeat(k_BSKH, N // k_BSKH.shape[2], axis=2)
            stds.append(score.scale * jnp.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSNH).std())
        assert 0.9 < np.mean(stds) < 1.1, (d_model, stds)


def test_bfloat16_is_near_float32(cell):
    layer, x_BTD = make(cell, moved=False), stream()
    half = jax.tree.map(lambda a: a.astype(jnp.bfloat16), layer)
    got, want = half(x_BTD.astype(jnp.bfloat16), causal()), layer(x_BTD, causal())
    assert got.dtype == jnp.bfloat16
    assert 1e-5 < error(got, np.asarray(want)) < 0.06


def test_sharded_equals_unsharded(cell):
    """Parameters placed by the letters of their names on a mesh of 8 devices."""
    layer, x_BTD = make(cell), stream(8)
    mesh = sharding.make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))

    def place(path, leaf):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        name = name.removesuffix('/value')
        spec = sharding.spec(name, (1, *leaf.shape), mesh)
        return jax.device_put(leaf, NamedSharding(mesh, jax.sharding.PartitionSpec(*spec[1:])))

    placed = jax.tree_util.tree_map_with_path(place, layer)
    run = jax.jit(lambda layer, x_BTD: layer(x_BTD, causal(8)))
    assert error(run(placed, x_BTD), np.asarray(layer(x_BTD, causal(8)))) < 1e-5


def test_stacked_trials_equal_single_ones(cell):
    x_BTD = stream()
    layers = [make(cell, seed=seed) for seed in (0, 7)]
    stacked = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    got = jax.vmap(lambda layer: layer(x_BTD, causal()), axis_size=2)(stacked)
    for x, layer in enumerate(layers):
        assert error(got[x], np.asarray(layer(x_BTD, causal()))) < 1e-5


@pytest.mark.parametrize('positions', ['rope', 'alibi'])
def test_cached_decoding_equals_the_whole(cell, positions):
    try:
        layer = make(cell, positions=positions, biases=True)
    except SpecError as refusal:
        assert positions == 'rope' and '\n' not in str(refusal)
        return
    x_BTD = stream()
    want = np.asarray(layer(x_BTD, causal()))
    pieces = [layer.cached(x_BTD[:, t : t + 1]) for t in range(T)]
    for t in range(T):
        # Positions that are not written yet hold rubbish, which nobody may read.
        cache = {
            name: jnp.concatenate(
                [p[name] for p in pieces[: t + 1]] + [jnp.full_like(pieces[0][name], 1e3)], axis=1
            )
            for name in pieces[0]
        }
        mask_BTS = visible(1, t + 2, causal=True, first_query=t)
        got = layer.attend_to(x_BTD[:, t : t + 1], cache, mask_BTS, first_query=t)
        assert np.abs(np.asarray(got)[:, 0] - want[:, t]).max() < 1e-5 * np.abs(want).max()


def test_rotary_positions_equal_the_complex_form(cell):
    try:
        layer = make(cell, positions='rope')
    except SpecError as refusal:
        assert '\n' not in str(refusal)
        return
    score, x_BTD, mask_BTS = layer.score, stream(), causal()
    s_BNTS = oracle.rotary_logits(
        score.queries(x_BTD),
        score.keys(score.cached(x_BTD)),
        scale=score.scale,
        rope_size=score.rope_size,
    )
    if score.hides_self:
        others_TS = mask_BTS[0] & ~jnp.eye(T, dtype=bool)
        mask_BTS = jnp.where(others_TS.any(-1, keepdims=True), others_TS, mask_BTS)
    want = oracle.mix(s_BNTS, np.asarray(layer.value.matrix(score)), x_BTD, mask_BTS)
    assert error(layer(x_BTD, causal()), want) < 1e-5


def logits_with_options(layer: Attention, x_BTD) -> np.ndarray:
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


@pytest.mark.parametrize(
    'option',
    [
        {'qk_norm': True},
        {'score_scale': 0.5},
        {'logit_cap': 1.0},
        {'window': 2},
        {'positions': 'alibi'},
        {'qk_norm': True, 'score_scale': 2.0, 'logit_cap': 3.0, 'window': 3, 'positions': 'alibi'},
    ],
    ids=lambda option: '_'.join(option) if len(option) == 1 else 'together',
)
def test_options_are_honoured_or_refused_in_one_sentence(cell, option):
    try:
        layer = make(cell, **option)
    except SpecError as refusal:
        assert '\n' not in str(refusal) and cell[0].split('(')[0] in str(refusal)
        return
    x_BTD = stream()
    mask_BTS = visible(T, T, causal=True, window=layer.spec.window)
    reads_TS = mask_BTS[0]
    if layer.spec.window is not None:
        t, s = np.nonzero(np.asarray(reads_TS))
        assert (t - s).max() == layer.spec.window - 1
    if layer.score.hides_self:
        others_TS = reads_TS & ~jnp.eye(T, dtype=bool)
        reads_TS = jnp.where(others_TS.any(-1, keepdims=True), others_TS, reads_TS)
    B_NDE = np.asarray(layer.value.matrix(layer.score))
    want = oracle.mix(logits_with_options(layer, x_BTD), B_NDE, x_BTD, reads_TS[None])
    assert error(layer(x_BTD, mask_BTS), want) < 1e-5


def test_a_train_step_lowers_for_a_pod_without_devices(cell):
    config = Config(
        model=ModelConfig(
            score=cell[0], value=cell[1], d_model=64, num_layers=2, num_heads=4, context=16
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
