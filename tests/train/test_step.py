"""Training steps: losses, gradients, divergence, dropout, memory, and checks of settings."""

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

# Metrics of the first step of two trials.
GOLDEN = {
    'loss': [6.1501417, 5.9226151],
    'grad_norm': [2.7045262, 2.1575873],
    'update_norm': [0.6097617, 0.6096081],
}


@functools.cache
def compiled_functions(model, optimizer, train, lifting):
    """The jitted functions that initialize and train the trials of a run."""
    config = qkattn.Config(model=model, optimizer=optimizer, train=train)
    mesh = sharding.make_mesh(MeshConfig())
    init = functools.partial(step.init_stack, config)
    train_steps = program.train_steps(config, lifting, mesh)
    return jax.jit(init), jax.jit(train_steps)


def random_tokens(config):
    """Rows of T + 1 tokens for each trial and microbatch, [X, A, B, T + 1]."""
    _, X, A, B = sharding.leading_shape(config)
    shape = (X, A, B, config.model.context + 1)
    return np.random.default_rng(0).integers(0, 256, shape).astype(np.int32)


def language_batch(tokens):
    """A batch of next-token prediction from rows of T + 1 tokens."""
    targets = tokens[..., 1:]
    return {
        'tokens_BT': tokens[..., :-1],
        'targets_BT': targets,
        'loss_weights_BT': jnp.ones(targets.shape, jnp.float32),
    }


def three_steps(config, tokens=None, lifting='vmap'):
    """The state after three steps on the same tokens, and the metrics [3, X] of the steps."""
    if tokens is None:
        tokens = random_tokens(config)
    batch = language_batch(jnp.broadcast_to(tokens, (3, *tokens.shape)))
    hyper = {}
    for name, dtype in program.HYPER.items():
        hyper[name] = jnp.array([trial[name] for trial in config.trials.trials()], dtype)

    init, train_steps = compiled_functions(config.model, config.optimizer, config.train, lifting)
    return train_steps(init(hyper['seed']), hyper, batch)


def params_of(config):
    return step.init_trial(config, jnp.uint32(0))['params']


def assert_close(got, want, rtol):
    """Asserts that leaves differ by at most `rtol` times the largest number of a leaf."""

    def assert_leaf_close(got_leaf, want_leaf):
        atol = rtol * np.abs(want_leaf).max()
        np.testing.assert_allclose(got_leaf, want_leaf, rtol=rtol, atol=atol)

    jax.tree.map(assert_leaf_close, got, want)


@pytest.fixture
def four_trials(tiny):
    """A function that makes a config of four trials: two learning rates times two seeds."""

    def make(trials=None, **model):
        trials = {'learning_rates': (1e-2, 1e-3), 'seeds': (0, 5)} | (trials or {})
        return tiny(model={'scan_unroll': 1} | model, trials=trials)

    return make


@pytest.mark.stored
def test_the_first_step_has_the_stored_losses_and_norms(four_trials):
    """The numbers change with the initialization, the loss, the optimizer or JAX's random bits.

    Then copy them from the message. The logits have a standard deviation near 1 before training,
    so the loss is about 0.5 nats above log V.
    """
    _, metrics = three_steps(four_trials({'seeds': (0, 1)}))
    got = {name: np.asarray(metrics[name][0, :2]).tolist() for name in GOLDEN}

    for name, want in GOLDEN.items():
        np.testing.assert_allclose(got[name], want, rtol=2e-6, err_msg=str(got))
    loss_of_uniform_guess = np.log(256)
    assert min(got['loss']) > loss_of_uniform_guess
    assert max(got['loss']) < loss_of_uniform_guess + 1
    assert min(got['loss']) < max(got['loss'])


def test_gradients_of_microbatches_are_those_of_one_batch(four_trials):
    config = four_trials(num_layers=1)
    params = params_of(config)
    batch = language_batch(jnp.asarray(random_tokens(config)[0]))
    # The two microbatches hold very different numbers of targets.
    weights_ABT = np.ones((2, 4, 16), np.float32)
    weights_ABT[0, :, 2:] = 0
    batch['loss_weights_BT'] = jnp.asarray(weights_ABT)
    whole_batch = jax.tree.map(lambda a_ABT: a_ABT.reshape(-1, 16), batch)

    def mean_loss(params):
        loss_sum, _ = step.objective(config, params, whole_batch)
        return loss_sum / weights_ABT.sum()

    expected = jax.jit(jax.value_and_grad(mean_loss))(params)

    gradients = jax.jit(functools.partial(step.gradients, config))
    one_microbatch = jax.tree.map(lambda a_BT: a_BT[None], whole_batch)
    assert_close(gradients(params, batch), expected, 1e-6)
    assert_close(gradients(params, one_microbatch), expected, 1e-6)


@pytest.mark.parametrize('lifting', slow_except(['vmap'], ['vmap', 'map']))
def test_trials_train_as_they_do_alone(four_trials, lifting):
    config = four_trials()
    tokens = random_tokens(config)

    state, metrics = three_steps(config, tokens, lifting)

    assert int(state['step']) == 3
    fraction_of_step = schedule(config.optimizer, config.train.num_steps)
    fractions_C = jnp.stack([fraction_of_step(i) for i in range(3)])
    assert len(set(fractions_C.tolist())) == 3  # the learning rate changes at each step
    np.testing.assert_allclose(metrics['learning_rate'][:, 0], 1e-2 * fractions_C, rtol=1e-6)

    for x, trial in enumerate(config.trials.trials()):
        alone = {'learning_rates': (trial['learning_rate'],), 'seeds': (trial['seed'],)}
        state_alone, metrics_alone = three_steps(four_trials(alone), tokens[x : x + 1])
        np.testing.assert_allclose(metrics['loss'][:, x], metrics_alone['loss'][:, 0], rtol=1e-5)
        leaves = jax.tree.leaves(state['trials']['params'])
        leaves_alone = jax.tree.leaves(state_alone['trials']['params'])
        for leaf, leaf_alone in zip(leaves, leaves_alone, strict=True):
            np.testing.assert_allclose(leaf[x], leaf_alone[0], atol=1e-4)


def test_a_diverged_trial_is_frozen_while_the_others_go_on(four_trials):
    state, metrics = three_steps(four_trials({'learning_rates': (1e-2, 1e30)}))
    _, expected_metrics = three_steps(four_trials())

    # The first two trials have the learning rate 1e-2.
    assert state['trials']['alive'].tolist() == [True, True, False, False]
    assert np.isfinite(metrics['loss'][:, :2]).all()
    np.testing.assert_allclose(metrics['loss'][:, :2], expected_metrics['loss'][:, :2], rtol=1e-5)

    # A diverged trial keeps its last finite parameters.
    assert np.isnan(metrics['loss'][-1, 2:]).all()
    for leaf in jax.tree.leaves(state['trials']['params']):
        assert np.isfinite(leaf).all()


def test_a_step_in_bfloat16_keeps_parameters_in_float32(four_trials):
    _, expected_metrics = three_steps(four_trials())
    state, metrics = three_steps(four_trials(compute_dtype='bfloat16'))

    for leaf in jax.tree.leaves(state['trials']['params']):
        assert leaf.dtype == 'float32'

    # The loss is rounded, but not by much.
    loss = np.asarray(metrics['loss'][0])
    expected_loss = np.asarray(expected_metrics['loss'][0])
    np.testing.assert_allclose(loss, expected_loss, rtol=2e-2)
    assert np.abs(loss - expected_loss).max() > 1e-6


def test_dropout_is_drawn_by_seed_at_each_step(four_trials):
    # Without updates, losses differ only by what is dropped.
    no_updates = {'learning_rates': (0.0,), 'weight_decays': (0.0,), 'seeds': (0, 1, 2, 3)}

    def losses_with(dropout):
        _, metrics = three_steps(four_trials(no_updates, dropout=dropout))
        return np.asarray(metrics['loss'])

    losses_CX = losses_with(dropout=0.1)
    losses_again_CX = losses_with(dropout=0.1)
    losses_without_dropout_CX = losses_with(dropout=0.0)

    np.testing.assert_array_equal(losses_CX, losses_again_CX)
    assert np.abs(losses_CX[0] - losses_without_dropout_CX[0]).min() > 1e-4
    # Each step drops other units.
    assert np.abs(losses_CX[0] - losses_CX[1]).min() > 1e-4


@pytest.mark.parametrize('field', ['attention_dropout', 'activation_dropout'])
def test_each_kind_of_dropout_alone_draws_random_numbers(four_trials, field):
    config = four_trials(**{field: 0.1})
    assert config.model.drops


@pytest.mark.slow
def test_remat_keeps_less_for_the_same_gradient(four_trials):
    plain_config = four_trials()
    params = params_of(plain_config)
    batch = language_batch(jnp.asarray(random_tokens(plain_config)[0, 0]))
    grads = {}
    num_kept = {}
    for remat, unroll in (('none', None), ('full', 1), ('dots', 1)):
        config = four_trials(dropout=0.1, remat=remat, scan_unroll=unroll)
        objective = functools.partial(step.objective, config, batch=batch, key=jax.random.key(0))
        total, pullback, _ = jax.vjp(jax.jit(objective), params, has_aux=True)
        (grads[remat],) = pullback(jnp.ones_like(total))
        # The leaves of a pullback are the arrays that the backward pass reads.
        num_kept[remat] = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(pullback))

    assert_close(grads['full'], grads['none'], 1e-4)
    assert_close(grads['dots'], grads['none'], 1e-4)

    # 'dots' keeps q, k, v, the output of attention, and the hidden layer of the MLP.
    model = plain_config.model
    stream = model.num_layers * 4 * model.context * model.d_model  # a batch of 4 rows
    hidden = 4 * stream
    assert num_kept['dots'] - num_kept['full'] == 3 * stream + stream + hidden
    assert num_kept['none'] > num_kept['dots'] + 2 * stream


def test_the_loss_is_weighted_and_smoothed_with_the_uniform_distribution(tiny):
    V = 256
    model_fields = {'num_layers': 1}
    config = tiny(model=model_fields)
    model = build(config.model, key=jax.random.key(0))
    params = nnx.to_pure_dict(nnx.state(model))
    batch = next(batches(config))
    weights_BT = np.random.default_rng(0).random((8, 16)).astype(np.float32)
    batch['loss_weights_BT'] = weights_BT

    # The negative log probability of each token.
    logits_BTV = np.asarray(model(batch['tokens_BT']), np.float64)
    log_normalizer_BT1 = np.log(np.exp(logits_BTV).sum(-1, keepdims=True))
    nats_BTV = log_normalizer_BT1 - logits_BTV
    one_hot_BTV = np.eye(V)[batch['targets_BT']]

    def expected_sum(epsilon):
        """The cross-entropy with (1 - epsilon) of the target and epsilon of the uniform."""
        distribution_BTV = (1 - epsilon) * one_hot_BTV + epsilon / V
        loss_BT = (distribution_BTV * nats_BTV).sum(-1)
        return (loss_BT * weights_BT).sum()

    plain_sum = expected_sum(0.0)
    assert abs(plain_sum - expected_sum(0.1)) > 1e-2
    for epsilon in (0.0, 0.1):
        smooth_config = tiny(model=model_fields, train={'label_smoothing': epsilon})
        minimized, loss = step.objective(smooth_config, params, batch)
        np.testing.assert_allclose(minimized, expected_sum(epsilon), rtol=1e-5)
        np.testing.assert_allclose(loss, expected_sum(epsilon), rtol=1e-5)
        # The loss of an evaluation is never smoothed.
        nats_B = trials.row_sums(smooth_config, params, batch)['loss']
        np.testing.assert_allclose(nats_B.sum(), plain_sum, rtol=1e-5)
    mean_loss = qkattn.loss(model, batch)
    np.testing.assert_allclose(mean_loss, plain_sum / weights_BT.sum(), rtol=1e-5)


KERNELS_AND_CHUNKS = [*itertools.product(('einsum', 'blockwise'), (None, 5))]


@pytest.mark.parametrize(('kernel', 'chunk'), slow_except([('einsum', 5)], KERNELS_AND_CHUNKS))
def test_z_loss_adds_to_the_gradient_but_not_to_the_logged_loss(tiny, kernel, chunk):
    """z-loss is z_loss times the mean of (log Z)^2, where Z is the sum of exp(logits)."""
    z_loss = 0.5
    model = {'num_layers': 1, 'kernel': kernel}
    train = {'logits_chunk': chunk, 'label_smoothing': 0.1}
    plain = tiny(model=model, train=train)
    penalized = tiny(model=model, train=train | {'z_loss': z_loss})
    params = params_of(plain)
    batch = language_batch(jnp.asarray(random_tokens(plain)[0]))
    rng = np.random.default_rng(0)
    weights_ABT = rng.random(batch['targets_BT'].shape).astype(np.float32)
    batch['loss_weights_BT'] = weights_ABT

    def mean_penalty(params):
        model = with_params(plain.model, params)
        log_z_ABT = jnp.stack(
            [jax.nn.logsumexp(model(tokens_BT), -1) for tokens_BT in batch['tokens_BT']]
        )
        return z_loss * jnp.average(log_z_ABT**2, weights=weights_ABT)

    loss, grads = step.gradients(plain, params, batch)
    penalty, penalty_grads = jax.value_and_grad(mean_penalty)(params)
    penalized_loss, penalized_grads = step.gradients(penalized, params, batch)

    assert penalty > 0.1 * loss
    assert_close(penalized_loss, loss, 1e-5)
    assert_close(penalized_grads, jax.tree.map(jnp.add, grads, penalty_grads), 1e-5)


def test_an_evaluation_has_no_z_loss(tiny):
    batch = next(batches(tiny()))
    params = params_of(tiny())
    sums = trials.row_sums(tiny(train={'z_loss': 0.5}), params, batch)
    expected_sums = trials.row_sums(tiny(), params, batch)
    np.testing.assert_array_equal(sums['loss'], expected_sums['loss'])


# Logits of a few positions at a time

B, T, V = 4, 16, 8192
# A model whose logits take most of its memory.
LARGE_VOCABULARY = {'d_model': 8, 'num_layers': 1, 'vocab_size': V}


def gradient(config, params, batch):
    objective = functools.partial(step.objective, config)
    return jax.value_and_grad(objective, has_aux=True)(params, batch)


@pytest.mark.parametrize('compute', [gradient, trials.row_sums])
def test_logits_in_chunks_give_the_same_loss_in_less_memory(tiny, compute):
    rng = np.random.default_rng(0)
    params = params_of(tiny(model=LARGE_VOCABULARY))
    batch = {
        'tokens_BT': rng.integers(0, V, (B, T), np.int32),
        'targets_BT': rng.integers(0, V, (B, T), np.int32),
        'loss_weights_BT': (rng.random((B, T)) > 0.2).astype(np.float32),
    }

    def result_and_memory(logits_chunk):
        train = {'logits_chunk': logits_chunk, 'label_smoothing': 0.1, 'z_loss': 1e-2}
        config = tiny(model=LARGE_VOCABULARY, train=train)
        compiled = jax.jit(functools.partial(compute, config)).lower(params, batch).compile()
        return compiled(params, batch), compiled.memory_analysis().temp_size_in_bytes

    expected, memory_of_whole = result_and_memory(None)
    result, memory_of_chunks = result_and_memory(3)  # 3 does not divide the 16 positions

    assert_close(result, expected, 1e-5)
    bytes_of_logits = 4 * B * T * V
    assert memory_of_whole > bytes_of_logits
    # A chunk holds 3/16 of the logits, and of their gradient.
    assert memory_of_chunks < memory_of_whole / 2


def test_no_device_holds_the_whole_vocabulary(tiny):
    """The embedding splits V over fsdp and tensor; logits split V over tensor, rows over fsdp."""
    config = tiny(model=LARGE_VOCABULARY, train={'accumulation': 1})
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2))
    state, hyper, batch = program.abstract_inputs(config, mesh)

    compiled = program.lower(config, 'vmap', mesh, state, hyper, batch).compile()

    # The state stays where it was before the step.
    leaves = jax.tree.leaves(state)
    output_shardings = jax.tree.leaves(compiled.output_shardings[0])
    for leaf, output_sharding in zip(leaves, output_shardings, strict=True):
        assert output_sharding.is_equivalent_to(leaf.sharding, leaf.ndim)

    # The sizes of all axes in the program, which is that of one device.
    text = compiled.as_text()
    sizes = set()
    for shape in re.findall(r'f32\[([\d,]+)\]', text):
        sizes.update(int(size) for size in shape.split(','))
    assert V // 4 in sizes
    assert V // 2 in sizes
    assert V not in sizes

    num_rows = config.train.batch_size
    assert f'f32[2,{num_rows // 2},{T},{V // 2}]' in text  # the logits of two trials
    assert f'{num_rows},{T},{V // 2}]' not in text


# Checks of settings


@pytest.fixture
def names_of_checks(monkeypatch):
    """A list that gets a name for each check.

    '_check_value' is the check of a setting, '_check_circuit' of an attention circuit, and
    '__post_init__' of an AttentionSpec.
    """
    names = []

    def record_calls(owner, name):
        function = getattr(owner, name)

        def recording_function(*arguments, **options):
            names.append(name)
            return function(*arguments, **options)

        monkeypatch.setattr(owner, name, recording_function)

    record_calls(setting, '_check_value')
    record_calls(registry, '_check_circuit')
    record_calls(AttentionSpec, '__post_init__')
    return names


@pytest.mark.parametrize(
    'changes', [{}, {'kind': 'encoder_decoder'}, {'pattern': 'qk/vo,qk/no_v'}], ids=str
)
def test_tracing_a_gradient_does_not_check_a_valid_config_again(names_of_checks, changes):
    model = qkattn.ModelConfig(d_model=8, num_heads=2, num_layers=3, context=6, **changes)
    config = qkattn.Config(model=model)
    validate(config)
    # At least the settings of the model were checked. Default sections may have been before.
    assert names_of_checks.count('_check_value') >= len(dataclasses.fields(model))
    names_of_checks.clear()

    state = jax.eval_shape(functools.partial(step.init_trial, config), jnp.uint32(0))
    tokens_ABT = jax.ShapeDtypeStruct((1, 2, 6), jnp.int32)
    batch = {
        'tokens_BT': tokens_ABT,
        'targets_BT': tokens_ABT,
        'loss_weights_BT': jax.ShapeDtypeStruct((1, 2, 6), jnp.float32),
    }
    if model.kind == 'encoder_decoder':
        batch['source_BS'] = tokens_ABT
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


def test_a_changed_copy_of_a_checked_config_is_checked():
    model = qkattn.ModelConfig(d_model=8, num_heads=2, num_layers=1, context=6)
    build(model, key=jax.random.key(0))

    with refused('model.d_model=0 must be at least 1', ConfigError):
        build(dataclasses.replace(model, d_model=0), key=jax.random.key(0))
    with refused('d_model=8 must be a multiple of num_heads=3', SpecError):
        build(dataclasses.replace(model, num_heads=3), key=jax.random.key(0))
