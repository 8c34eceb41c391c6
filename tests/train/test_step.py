"""One step: golden numbers, losses, accumulation, divergence, dropout, memory."""

import dataclasses
import functools
import itertools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import qkattn
from qkattn.attention import AttentionSpec, registry
from qkattn.config import MeshConfig, setting
from qkattn.data.tasks.task_registry import batches
from qkattn.errors import ConfigError, SpecError
from qkattn.model import build, with_params
from qkattn.model.sites import validate
from qkattn.train import program, sharding, step, trials
from qkattn.train.optimizer import schedule
from tests.lanes import slow_except
from tests.refusals import refused

GOLDEN = {'loss': [6.1501417, 5.9226151], 'grad_norm': [2.7045262, 2.1575873]}
GOLDEN |= {'update_norm': [0.6097617, 0.6096081]}


@functools.cache
def init_and_train_steps(model, optimizer, train, lifting):
    """Initialization and training program; trials differ in data only."""
    config = qkattn.Config(model=model, optimizer=optimizer, train=train)
    mesh = sharding.make_mesh(MeshConfig())
    init = functools.partial(step.init_stack, config)
    return jax.jit(init), jax.jit(program.train_steps(config, lifting, mesh))


def tokens_XABT1(config):
    shape = (*sharding.leading_shape(config)[1:], config.model.context + 1)
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)


def language_batch(tokens_ABT1):
    """Windows of T + 1 tokens as inputs, targets and weights."""
    return {
        'tokens_BT': tokens_ABT1[..., :-1],
        'targets_BT': tokens_ABT1[..., 1:],
        'loss_weights_BT': jnp.ones(tokens_ABT1[..., 1:].shape, jnp.float32),
    }


def three_steps(config, tokens=None, lifting='vmap'):
    """State and metrics after three steps on the same tokens."""
    if tokens is None:
        tokens = tokens_XABT1(config)
    hyper = {}
    for name, dtype in program.HYPER.items():
        hyper[name] = jnp.array([trial[name] for trial in config.trials.trials()], dtype)
    init, run = init_and_train_steps(config.model, config.optimizer, config.train, lifting)
    batch = language_batch(jnp.broadcast_to(tokens, (3, *tokens.shape)))
    return run(init(hyper['seed']), hyper, batch)


def params_of(config):
    return step.init_trial(config, jnp.uint32(0))['params']


def assert_close(got, want, rtol):
    """Leaves agree to `rtol` of their largest number; bitwise for 0."""

    def close(a, b):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=rtol * np.abs(b).max())

    jax.tree.map(close, got, want)


@pytest.fixture
def four_trials(tiny):
    """A run of four trials, small to compile; model and trials are replaced by keywords."""

    def make(trials=None, **model):
        trials = {'learning_rates': (1e-2, 1e-3), 'seeds': (0, 5)} | (trials or {})
        return tiny(model={'scan_unroll': 1} | model, trials=trials)

    return make


@pytest.mark.stored
def test_losses_and_norms_of_two_steps_are_the_stored_ones(four_trials):
    """The numbers change only with initialization, loss, optimizer or JAX's random bits.

    Then copy them from the message. The first loss is about 0.5 nats above log V, that of logits
    with standard deviation 1.
    """
    _, metrics = three_steps(four_trials({'seeds': (0, 1)}))
    got = {name: np.asarray(metrics[name][0, :2]).tolist() for name in GOLDEN}
    for name, want in GOLDEN.items():
        np.testing.assert_allclose(got[name], want, rtol=2e-6, err_msg=str(got))
    assert np.log(256) < min(got['loss']) < max(got['loss']) < np.log(256) + 1


def test_gradients_of_microbatches_are_those_of_one_batch(four_trials):
    config = four_trials(num_layers=1)
    params = params_of(config)
    batch = language_batch(jnp.asarray(tokens_XABT1(config)[0]))
    # The two microbatches hold very different numbers of tokens.
    weights_ABT = np.ones((2, 4, 16), np.float32)
    weights_ABT[0, :, 2:] = 0
    batch['loss_weights_BT'] = jnp.asarray(weights_ABT)
    whole = jax.tree.map(lambda a: a.reshape(-1, 16), batch)

    def mean_loss(params):
        return step.objective(config, params, whole)[0] / weights_ABT.sum()

    want = jax.jit(jax.value_and_grad(mean_loss))(params)
    gradients = jax.jit(functools.partial(step.gradients, config))
    for batch_ABT in (batch, jax.tree.map(lambda a: a[None], whole)):
        assert_close(gradients(params, batch_ABT), want, 1e-6)


@pytest.mark.parametrize('lifting', slow_except(['vmap'], ['vmap', 'map']))
def test_a_stack_equals_its_trials_alone(four_trials, lifting):
    config = four_trials()
    tokens = tokens_XABT1(config)
    state, metrics = three_steps(config, tokens, lifting)
    rates_C = jnp.stack([schedule(config.optimizer, config.train.num_steps)(i) for i in range(3)])
    np.testing.assert_allclose(metrics['learning_rate'][:, 0], 1e-2 * rates_C, rtol=1e-6)
    assert int(state['step']) == 3 and len(set(rates_C.tolist())) == 3

    # Each trial alone has the losses and parameters that it has in the stack.
    for x, trial in enumerate(config.trials.trials()):
        alone = four_trials(
            {'learning_rates': (trial['learning_rate'],), 'seeds': (trial['seed'],)}
        )
        want_state, want = three_steps(alone, tokens[x : x + 1])
        np.testing.assert_allclose(metrics['loss'][:, x], want['loss'][:, 0], rtol=1e-5)
        leaves = (jax.tree.leaves(s['trials']['params']) for s in (state, want_state))
        for got, leaf in zip(*leaves, strict=True):
            np.testing.assert_allclose(got[x], leaf[0], atol=1e-4)


def test_a_diverged_trial_is_frozen_while_the_others_go_on(four_trials):
    state, metrics = three_steps(four_trials({'learning_rates': (1e-2, 1e30)}))
    assert state['trials']['alive'].tolist() == [True, True, False, False]
    assert np.isfinite(metrics['loss'][:, :2]).all() and np.isnan(metrics['loss'][-1, 2:]).all()
    assert all(np.isfinite(p).all() for p in jax.tree.leaves(state['trials']['params']))
    _, want = three_steps(four_trials())
    np.testing.assert_allclose(metrics['loss'][:, :2], want['loss'][:, :2], rtol=1e-5)


def test_a_step_in_bfloat16_keeps_parameters_in_float32(four_trials):
    _, want = three_steps(four_trials())
    state, got = three_steps(four_trials(compute_dtype='bfloat16'))
    assert {str(p.dtype) for p in jax.tree.leaves(state['trials']['params'])} == {'float32'}
    np.testing.assert_allclose(got['loss'][0], want['loss'][0], rtol=2e-2)
    assert np.abs(np.asarray(got['loss'][0] - want['loss'][0])).max() > 1e-6


def test_dropout_is_drawn_by_seed_at_each_step(four_trials):
    points = {'learning_rates': (0.0,), 'weight_decays': (0.0,), 'seeds': (0, 1, 2, 3)}
    runs = (three_steps(four_trials(points, dropout=rate)) for rate in (0.1, 0.1, 0.0))
    losses_CX, again_CX, without_CX = (np.asarray(metrics['loss']) for _, metrics in runs)
    np.testing.assert_array_equal(losses_CX, again_CX)
    assert np.abs(losses_CX[0] - without_CX[0]).min() > 1e-4
    assert np.abs(losses_CX[0] - losses_CX[1]).min() > 1e-4  # other units at another step
    # Each kind asks for a key by itself.
    assert (
        four_trials(attention_dropout=0.1).model.drops
        and four_trials(activation_dropout=0.1).model.drops
    )


@pytest.mark.slow
def test_remat_keeps_less_for_the_same_gradient(four_trials):
    config = four_trials()
    grads = {}
    kept = {}
    params = params_of(config)
    batch = language_batch(jnp.asarray(tokens_XABT1(config)[0, 0]))
    for remat, unroll in (('none', None), ('full', 1), ('dots', 1)):
        config = four_trials(dropout=0.1, remat=remat, scan_unroll=unroll)
        loss = functools.partial(step.objective, config, batch=batch, key=jax.random.key(0))
        total, pullback, _ = jax.vjp(jax.jit(loss), params, has_aux=True)
        (grads[remat],) = pullback(jnp.ones_like(total))
        # What the backward pass reads.
        kept[remat] = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(pullback))
    for remat in ('full', 'dots'):
        assert_close(grads[remat], grads['none'], 1e-4)
    # 'dots' keeps q, k, v, the output of attention and the hidden layer of the MLP (4 D).
    model = config.model
    stream = model.num_layers * 4 * model.context * model.d_model
    assert kept['dots'] - kept['full'] == stream * (3 + 1 + 4)
    assert kept['none'] > kept['dots'] + 2 * stream


def test_the_loss_is_a_mean_by_weight_smoothed_with_the_uniform_distribution(tiny):
    config = tiny(model={'num_layers': 1})
    model = build(config.model, key=jax.random.key(0))
    params = nnx.to_pure_dict(nnx.state(model))
    batch = next(batches(config))
    batch['loss_weights_BT'] = np.random.default_rng(0).random((8, 16)).astype(np.float32)
    weights_BT = batch['loss_weights_BT']
    logits_BTV = np.asarray(model(batch['tokens_BT']), np.float64)
    nats_BTV = np.log(np.exp(logits_BTV).sum(-1, keepdims=True)) - logits_BTV
    # Cross-entropy with 1 - epsilon of the target and epsilon of everything, word for word.
    target_BTV = np.eye(256)[batch['targets_BT']]
    sums = []
    for epsilon in (0.0, 0.1):
        mixture_BTV = (1 - epsilon) * target_BTV + epsilon / 256
        sums.append(((mixture_BTV * nats_BTV).sum(-1) * weights_BT).sum())
        smooth = tiny(model={'num_layers': 1}, train={'label_smoothing': epsilon})
        minimized, loss = step.objective(smooth, params, batch)
        np.testing.assert_allclose([minimized, loss], sums[-1], rtol=1e-5)
        nats_B = trials.row_sums(smooth, params, batch)['loss']  # which are never smoothed
        np.testing.assert_allclose(nats_B.sum(), sums[0], rtol=1e-5)
    assert abs(sums[0] - sums[1]) > 1e-2
    np.testing.assert_allclose(qkattn.loss(model, batch), sums[0] / weights_BT.sum(), rtol=1e-5)


KERNELS_AND_CHUNKS = [*itertools.product(('einsum', 'blockwise'), (None, 5))]


@pytest.mark.parametrize(('kernel', 'chunk'), slow_except([('einsum', 5)], KERNELS_AND_CHUNKS))
def test_z_loss_adds_the_squared_log_normalizer_to_what_is_minimized_alone(tiny, kernel, chunk):
    """The loss that is logged stays the smoothed cross-entropy."""
    z_loss = 0.5
    model = {'num_layers': 1, 'kernel': kernel}
    train = {'logits_chunk': chunk, 'label_smoothing': 0.1}
    plain = tiny(model=model, train=train)
    penalized = tiny(model=model, train=train | {'z_loss': z_loss})
    params = params_of(plain)
    batch = language_batch(jnp.asarray(tokens_XABT1(plain)[0]))
    rng = np.random.default_rng(0)
    weights_ABT = rng.random(batch['targets_BT'].shape).astype(np.float32)
    batch['loss_weights_BT'] = weights_ABT

    def mean_penalty(params):
        model = with_params(plain.model, params)
        log_z_ABT = jnp.stack([jax.nn.logsumexp(model(t_BT), -1) for t_BT in batch['tokens_BT']])
        return z_loss * jnp.average(log_z_ABT**2, weights=weights_ABT)

    loss, grads = step.gradients(plain, params, batch)
    penalty, penalty_grads = jax.value_and_grad(mean_penalty)(params)
    assert penalty > 0.1 * loss
    want = jax.tree.map(jnp.add, grads, penalty_grads)
    assert_close(step.gradients(penalized, params, batch), (loss, want), 1e-5)


def test_an_evaluation_has_no_z_loss(tiny):
    batch = next(batches(tiny()))
    params = params_of(tiny())
    want = trials.row_sums(tiny(), params, batch)
    got = trials.row_sums(tiny(train={'z_loss': 0.5}), params, batch)
    np.testing.assert_array_equal(got['loss'], want['loss'])


# Logits of a few positions at a time

B, T, V = 4, 16, 8192
# Of which logits are most of what is computed.
LARGE = {'d_model': 8, 'num_layers': 1, 'vocab_size': V}


def gradient(config, params, batch):
    objective = functools.partial(step.objective, config)
    return jax.value_and_grad(objective, has_aux=True)(params, batch)


@pytest.mark.parametrize('compute', [gradient, trials.row_sums])
def test_logits_in_chunks_give_the_same_loss_in_less_memory(tiny, compute):
    rng = np.random.default_rng(0)
    params = params_of(tiny(model=LARGE))
    reached = {}
    batch = {name: rng.integers(0, V, (B, T), np.int32) for name in ('tokens_BT', 'targets_BT')}
    batch['loss_weights_BT'] = (rng.random((B, T)) > 0.2).astype(np.float32)
    penalized = {'label_smoothing': 0.1, 'z_loss': 1e-2}
    for chunk in (None, 3):  # which does not divide 16 positions
        config = tiny(model=LARGE, train={'logits_chunk': chunk, **penalized})
        compiled = jax.jit(functools.partial(compute, config)).lower(params, batch).compile()
        memory = compiled.memory_analysis().temp_size_in_bytes
        reached[chunk] = compiled(params, batch), memory
        assert_close(reached[chunk][0], reached[None][0], 1e-5)
    logits = 4 * B * T * V
    # A chunk of three positions has three sixteenths of the logits, and their gradient.
    assert reached[None][1] > logits and reached[3][1] < reached[None][1] / 2


def test_no_device_holds_the_whole_vocabulary(tiny):
    """The embedding splits V over fsdp and tensor, logits over tensor, and rows over fsdp."""
    config = tiny(model=LARGE, train={'accumulation': 1})
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2))
    inputs = program.abstract_inputs(config, mesh)
    compiled = program.lower(config, 'vmap', mesh, *inputs).compile()
    state = jax.tree.leaves(inputs[0])
    for leaf, placed in zip(state, jax.tree.leaves(compiled.output_shardings[0]), strict=True):
        assert placed.is_equivalent_to(leaf.sharding, leaf.ndim)  # where it was before the step
    # Shapes in the program: V is divided by 2 and by 4, and never whole.
    text = compiled.as_text()
    sizes = {int(n) for shape in re.findall(r'f32\[([\d,]+)\]', text) for n in shape.split(',')}
    assert V not in sizes and {V // 2, V // 4} < sizes
    rows = config.train.batch_size // 2
    assert f'f32[2,{rows},{T},{V // 2}]' in text and f'{2 * rows},{T},{V // 2}]' not in text


@pytest.fixture
def names_of_checks(monkeypatch):
    """A list that gets the name of the check for each setting, circuit and spec that is checked."""
    checked = []

    def recorded(owner, name):
        function = getattr(owner, name)

        def recording(*arguments, **options):
            checked.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, recording)

    recorded(setting, '_check_value')
    recorded(registry, '_check_circuit')
    recorded(AttentionSpec, '__post_init__')
    return checked


KINDS = [{}, {'kind': 'encoder_decoder'}, {'pattern': 'qk/vo,qk/no_v'}]


@pytest.mark.parametrize('changes', KINDS, ids=str)
def test_a_config_that_was_validated_is_not_checked_again_on_the_way_to_a_gradient(
    names_of_checks, changes
):
    model = qkattn.ModelConfig(d_model=8, num_heads=2, num_layers=3, context=6, **changes)
    config = qkattn.Config(model=model)
    validate(config)
    # Sections that are their defaults may have been checked before.
    assert names_of_checks.count('_check_value') >= len(dataclasses.fields(model))
    names_of_checks.clear()
    state = jax.eval_shape(functools.partial(step.init_trial, config), jnp.uint32(0))
    tokens_1BT = jax.ShapeDtypeStruct((1, 2, 6), jnp.int32)
    batch = dict.fromkeys(('tokens_BT', 'targets_BT'), tokens_1BT)
    batch['loss_weights_BT'] = jax.ShapeDtypeStruct((1, 2, 6), jnp.float32)
    if model.kind == 'encoder_decoder':
        batch['source_BS'] = tokens_1BT
    jax.eval_shape(functools.partial(step.gradients, config), state['params'], batch)
    assert not names_of_checks


def test_building_a_model_checks_each_setting_once(names_of_checks):
    model = qkattn.ModelConfig(d_model=8, num_heads=2, num_layers=2, context=6)
    build(model, key=jax.random.key(0))
    assert names_of_checks.count('_check_value') == len(dataclasses.fields(model))
    assert names_of_checks.count('__post_init__') == 1
    names_of_checks.clear()
    build(model, key=jax.random.key(1))
    assert not names_of_checks


def test_settings_that_replace_checked_ones_are_checked():
    model = qkattn.ModelConfig(d_model=8, num_heads=2, num_layers=1, context=6)
    build(model, key=jax.random.key(0))
    with refused('model.d_model=0 must be at least 1', ConfigError):
        build(dataclasses.replace(model, d_model=0), key=jax.random.key(0))
    with refused('d_model=8 must be a multiple of num_heads=3', SpecError):
        build(dataclasses.replace(model, num_heads=3), key=jax.random.key(0))
