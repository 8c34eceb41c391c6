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

# Metrics of the first step of two trials, with the seeds 0 and 1.
GOLDEN = {
    'loss': [6.1501417, 5.9226151],
    'grad_norm': [2.7045262, 2.1575873],
    'update_norm': [0.6097617, 0.6096081],
}


@functools.cache
def compiled_functions(model, optimizer, train, lifting):
    """Returns the jitted functions that initialize and train the trials of a run."""
    config = qkattn.Config(model=model, optimizer=optimizer, train=train)
    mesh = sharding.make_mesh(MeshConfig())
    init = functools.partial(step.init_stack, config)
    train_steps = program.train_steps(config, lifting, mesh)
    return jax.jit(init), jax.jit(train_steps)


def random_tokens(config):
    """Returns random tokens [X, A, B, T + 1] for X trials and A microbatches of B rows."""
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


def take_three_steps(config, tokens=None, lifting='vmap'):
    """Takes three training steps of all X trials of a config. All steps have the same tokens.

    Returns the state after the last step, and the metrics of the steps, [3, X].

    Args:
        config: The settings. Each of its trials has a seed, a learning rate and a weight decay.
        tokens: Rows of tokens, [X, A, B, T + 1]. By default, they are `random_tokens`.
        lifting: 'vmap' computes trials side by side, 'map' one after another.
    """
    if tokens is None:
        tokens = random_tokens(config)
    tokens_of_steps = jnp.broadcast_to(tokens, (3, *tokens.shape))
    batch = language_batch(tokens_of_steps)
    # The seed, learning rate and weight decay of each trial, as arrays [X].
    hyper = {}
    for name, dtype in program.HYPER.items():
        hyper[name] = jnp.array([trial[name] for trial in config.trials.trials()], dtype)

    init, train_steps = compiled_functions(config.model, config.optimizer, config.train, lifting)
    initial_state = init(hyper['seed'])
    return train_steps(initial_state, hyper, batch)


def initial_params(config):
    return step.init_trial(config, jnp.uint32(0))['params']


def assert_close(got, want, rtol):
    """Asserts |got - want| <= rtol * (|want| + max |want|) for each leaf of two trees."""

    def assert_leaf_close(got_leaf, want_leaf):
        atol = rtol * np.abs(want_leaf).max()
        np.testing.assert_allclose(got_leaf, want_leaf, rtol=rtol, atol=atol)

    jax.tree.map(assert_leaf_close, got, want)


@pytest.fixture
def four_trials(tiny):
    """A function that makes a config of four trials: two learning rates times two seeds.

    By default, the rates are 1e-2 for the first two trials and 1e-3 for the others, and the seeds
    are 0 and 5. The dictionary `trials` replaces rates or seeds.
    """

    def make(trials=None, **model):
        trials = {'learning_rates': (1e-2, 1e-3), 'seeds': (0, 5)} | (trials or {})
        return tiny(model={'scan_unroll': 1} | model, trials=trials)

    return make


@pytest.mark.stored
def test_the_first_step_has_the_stored_losses_and_norms(four_trials):
    """The first step of two seeds has the losses and norms in GOLDEN.

    The numbers change if the initialization, the loss, the optimizer or JAX's random bits change.
    The message of the failed test then holds the new numbers.
    """
    _, metrics = take_three_steps(four_trials({'seeds': (0, 1)}))
    # The first of the three steps, and the first two of the four trials.
    got = {name: np.asarray(metrics[name][0, :2]).tolist() for name in GOLDEN}

    for name, stored in GOLDEN.items():
        np.testing.assert_allclose(got[name], stored, rtol=2e-6, err_msg=str(got))

    # A uniform guess has the loss log V. Initial logits have a variance s^2 near 1, which adds
    # about s^2 / 2 = 0.5 nats.
    vocab_size = 256
    loss_of_uniform_guess = np.log(vocab_size)
    assert min(got['loss']) > loss_of_uniform_guess
    assert max(got['loss']) < loss_of_uniform_guess + 1
    # Different seeds give different losses.
    assert min(got['loss']) < max(got['loss'])


def test_gradients_of_microbatches_are_those_of_one_batch(four_trials):
    """Loss and gradient are means over all targets of a batch, not means of microbatch means.

    The two microbatches have different numbers of targets, so these means differ.
    """
    config = four_trials(num_layers=1)
    params = initial_params(config)
    tokens_of_first_trial = random_tokens(config)[0]
    batch = language_batch(jnp.asarray(tokens_of_first_trial))
    # Rows of the first microbatch have 2 targets each, and rows of the second have 16.
    weights_ABT = np.ones((2, 4, 16), np.float32)
    weights_ABT[0, :, 2:] = 0
    batch['loss_weights_BT'] = jnp.asarray(weights_ABT)
    whole_batch = jax.tree.map(lambda a_ABT: a_ABT.reshape(-1, 16), batch)

    # The expected loss is the sum over the whole batch divided by its number of targets.
    def mean_loss(params):
        loss_sum, _ = step.objective(config, params, whole_batch)
        return loss_sum / weights_ABT.sum()

    expected = jax.jit(jax.value_and_grad(mean_loss))(params)

    # `step.gradients` takes arrays [A, B, T] of A microbatches. Here A is 2, and then 1.
    gradients = jax.jit(functools.partial(step.gradients, config))
    one_microbatch = jax.tree.map(lambda a_BT: a_BT[None], whole_batch)
    assert_close(gradients(params, batch), expected, 1e-6)
    assert_close(gradients(params, one_microbatch), expected, 1e-6)


def test_means_over_targets_do_not_depend_on_the_scale_of_their_weights(four_trials):
    """The weights of a task from outside may sum to less than 1."""
    config = four_trials(num_layers=1)
    params = initial_params(config)
    batch = language_batch(jnp.asarray(random_tokens(config)[0]))
    gradients = jax.jit(functools.partial(step.gradients, config))
    expected = gradients(params, batch)
    batch['loss_weights_BT'] *= 1e-4
    assert_close(gradients(params, batch), expected, 1e-5)


@pytest.mark.parametrize('lifting', slow_except(['vmap'], ['vmap', 'map']))
def test_trials_train_as_they_do_alone(four_trials, lifting):
    """Trials that are trained together have the losses and parameters of single trials.

    The lifting 'vmap' computes trials side by side, 'map' one after another.
    """
    config = four_trials()
    tokens = random_tokens(config)

    state, metrics = take_three_steps(config, tokens, lifting)

    # The learning rate of the first trial is 1e-2 times the fraction that the schedule gives.
    assert int(state['step']) == 3
    fraction_of_step = schedule(config.optimizer, config.train.num_steps)
    fractions_C = jnp.stack([fraction_of_step(i) for i in range(3)])
    assert len(set(fractions_C.tolist())) == 3  # the learning rate changes at each step
    rates_of_first_trial = metrics['learning_rate'][:, 0]
    np.testing.assert_allclose(rates_of_first_trial, 1e-2 * fractions_C, rtol=1e-6)

    # Train each trial again on the same tokens, without the other trials.
    for x, trial in enumerate(config.trials.trials()):
        only_trial = {'learning_rates': (trial['learning_rate'],), 'seeds': (trial['seed'],)}
        state_alone, metrics_alone = take_three_steps(four_trials(only_trial), tokens[x : x + 1])

        losses = metrics['loss'][:, x]
        losses_alone = metrics_alone['loss'][:, 0]
        np.testing.assert_allclose(losses, losses_alone, rtol=1e-5)

        leaves = jax.tree.leaves(state['trials']['params'])
        leaves_alone = jax.tree.leaves(state_alone['trials']['params'])
        for leaf, leaf_alone in zip(leaves, leaves_alone, strict=True):
            np.testing.assert_allclose(leaf[x], leaf_alone[0], atol=1e-4)


def test_a_diverged_trial_is_frozen_while_the_others_go_on(four_trials):
    """A trial diverges when its loss is not finite. Then it keeps its last finite parameters."""
    # Each of the two learning rates has two seeds. The first two trials have the rate 1e-2. The
    # last two have 1e30, and diverge.
    state, metrics = take_three_steps(four_trials({'learning_rates': (1e-2, 1e30)}))
    # Without the high rate, no trial diverges.
    _, expected_metrics = take_three_steps(four_trials())

    assert state['trials']['alive'].tolist() == [True, True, False, False]

    # The first two trials have the same losses as in the stack where no trial diverges.
    losses = metrics['loss'][:, :2]
    expected_losses = expected_metrics['loss'][:, :2]
    assert np.isfinite(losses).all()
    np.testing.assert_allclose(losses, expected_losses, rtol=1e-5)

    losses_at_last_step = metrics['loss'][-1]
    assert np.isnan(losses_at_last_step[2:]).all()
    for leaf in jax.tree.leaves(state['trials']['params']):
        assert np.isfinite(leaf).all()


def test_a_step_in_bfloat16_keeps_parameters_in_float32(four_trials):
    """With compute_dtype='bfloat16', the model computes in bfloat16. Parameters stay float32."""
    # By default, steps compute in float32.
    _, expected_metrics = take_three_steps(four_trials())
    state, metrics = take_three_steps(four_trials(compute_dtype='bfloat16'))

    for leaf in jax.tree.leaves(state['trials']['params']):
        assert leaf.dtype == 'float32'

    # The losses of the first step differ a little, because bfloat16 rounds to 8 bits.
    loss_of_first_step = np.asarray(metrics['loss'][0])
    expected_loss = np.asarray(expected_metrics['loss'][0])
    np.testing.assert_allclose(loss_of_first_step, expected_loss, rtol=2e-2)
    largest_difference = np.abs(loss_of_first_step - expected_loss).max()
    assert largest_difference > 1e-6


def test_dropout_is_drawn_by_seed_at_each_step(four_trials):
    """A trial drops other units at each step, and the same units when it is trained again."""
    # Parameters never change, and all steps have the same tokens. So the losses of one trial differ
    # only because other units are dropped.
    no_updates = {'learning_rates': (0.0,), 'weight_decays': (0.0,), 'seeds': (0, 1, 2, 3)}

    def losses_with(dropout):
        """Returns the losses of the four trials in three steps, [3, 4]."""
        _, metrics = take_three_steps(four_trials(no_updates, dropout=dropout))
        return np.asarray(metrics['loss'])

    losses_CX = losses_with(dropout=0.1)
    losses_again_CX = losses_with(dropout=0.1)
    losses_without_dropout_CX = losses_with(dropout=0.0)

    np.testing.assert_array_equal(losses_CX, losses_again_CX)

    # Dropout changes the loss of every trial in the first step.
    changes_by_dropout_X = np.abs(losses_CX[0] - losses_without_dropout_CX[0])
    assert changes_by_dropout_X.min() > 1e-4

    # In each trial, the second step drops other units than the first.
    changes_by_step_X = np.abs(losses_CX[0] - losses_CX[1])
    assert changes_by_step_X.min() > 1e-4


@pytest.mark.parametrize('field', ['attention_dropout', 'activation_dropout'])
def test_each_kind_of_dropout_alone_draws_random_numbers(four_trials, field):
    config = four_trials(**{field: 0.1})
    assert config.model.drops


# The number of rows in a microbatch of `four_trials`.
ROWS_OF_MICROBATCH = 4


@functools.cache
def gradient_and_num_kept(config):
    """Returns the gradient of the loss of one microbatch, and how many numbers are kept for it.

    The forward pass keeps these numbers for the backward pass.
    """
    tokens_of_first_trial = random_tokens(config)[0]
    first_microbatch = tokens_of_first_trial[0]
    assert len(first_microbatch) == ROWS_OF_MICROBATCH
    batch = language_batch(jnp.asarray(first_microbatch))
    objective = functools.partial(step.objective, config, batch=batch, key=jax.random.key(0))

    loss_sum, backward_pass, _ = jax.vjp(jax.jit(objective), initial_params(config), has_aux=True)

    (gradient_of_params,) = backward_pass(jnp.ones_like(loss_sum))
    # The leaves of the backward pass are the arrays that were kept for it.
    num_kept = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(backward_pass))
    return gradient_of_params, num_kept


@pytest.fixture
def config_by_remat(four_trials):
    """Configs with dropout, by the value of their setting `remat`.

    As by default, the layers are unrolled without remat, and scanned one at a time with it.
    """
    return {
        'none': four_trials(dropout=0.1, remat='none', scan_unroll=None),
        'full': four_trials(dropout=0.1, remat='full', scan_unroll=1),
        'dots': four_trials(dropout=0.1, remat='dots', scan_unroll=1),
    }


@pytest.mark.slow
@pytest.mark.parametrize('remat', ['full', 'dots'])
def test_remat_gives_the_same_gradient(config_by_remat, remat):
    """With rematerialization, the backward pass computes arrays again that are otherwise kept."""
    expected_gradient, _ = gradient_and_num_kept(config_by_remat['none'])
    gradient_with_remat, _ = gradient_and_num_kept(config_by_remat[remat])
    assert_close(gradient_with_remat, expected_gradient, 1e-4)


@pytest.mark.slow
def test_remat_keeps_less_for_the_gradient(config_by_remat):
    """remat='full' keeps the input of each layer. 'dots' also keeps results of matrix products."""
    num_kept = {}
    for remat, config in config_by_remat.items():
        _, num_kept[remat] = gradient_and_num_kept(config)

    # The size of an array that is as wide as the stream, in all layers together.
    model = config_by_remat['none'].model
    stream = model.num_layers * ROWS_OF_MICROBATCH * model.context * model.d_model

    # 'dots' keeps q, k, v, the output of attention, and the hidden layer of the MLP.
    queries_keys_and_values = 3 * stream
    output_of_attention = stream
    hidden_layer = 4 * stream
    matrix_products = queries_keys_and_values + output_of_attention + hidden_layer
    assert num_kept['dots'] == num_kept['full'] + matrix_products

    # Without remat, each layer keeps more than two further arrays that are as wide as the stream.
    assert num_kept['none'] > num_kept['dots'] + 2 * stream


def model_and_weighted_batch(tiny):
    """A model of one layer, and a batch whose targets have random loss weights."""
    config = tiny(model={'num_layers': 1})
    model = build(config.model, key=jax.random.key(0))
    batch = next(batches(config))
    loss_weights_BT = np.random.default_rng(0).random((8, 16)).astype(np.float32)
    return model, batch | {'loss_weights_BT': loss_weights_BT}


def expected_loss_sum(model, batch, epsilon):
    """The smoothed loss in numpy, summed over all targets with their loss weights.

    It is the cross-entropy with the distribution (1 - epsilon) * target + epsilon / V.
    """
    V = 256
    one_hot_BTV = np.eye(V)[batch['targets_BT']]
    distribution_BTV = (1 - epsilon) * one_hot_BTV + epsilon / V

    logits_BTV = np.asarray(model(batch['tokens_BT']), np.float64)
    log_normalizer_BT1 = np.log(np.exp(logits_BTV).sum(-1, keepdims=True))
    log_probability_BTV = logits_BTV - log_normalizer_BT1

    loss_BT = -(distribution_BTV * log_probability_BTV).sum(-1)
    return (loss_BT * batch['loss_weights_BT']).sum()


def test_the_training_loss_is_weighted_and_smoothed_with_the_uniform_distribution(tiny):
    model, batch = model_and_weighted_batch(tiny)
    params = nnx.to_pure_dict(nnx.state(model))
    plain_sum = expected_loss_sum(model, batch, epsilon=0.0)
    smoothed_sum = expected_loss_sum(model, batch, epsilon=0.1)
    assert abs(plain_sum - smoothed_sum) > 1e-2  # so that the tolerances below tell them apart

    for epsilon, expected_sum in ((0.0, plain_sum), (0.1, smoothed_sum)):
        config = tiny(model={'num_layers': 1}, train={'label_smoothing': epsilon})
        minimized_sum, logged_sum = step.objective(config, params, batch)
        np.testing.assert_allclose(logged_sum, expected_sum, rtol=1e-5)
        # By default there is no z-loss, so a step minimizes the loss that it logs.
        np.testing.assert_allclose(minimized_sum, expected_sum, rtol=1e-5)


@pytest.mark.parametrize('epsilon', [0.0, 0.1])
def test_the_loss_of_an_evaluation_is_weighted_and_never_smoothed(tiny, epsilon):
    model, batch = model_and_weighted_batch(tiny)
    params = nnx.to_pure_dict(nnx.state(model))
    config = tiny(model={'num_layers': 1}, train={'label_smoothing': epsilon})

    loss_B = trials.row_sums(config, params, batch)['loss']

    plain_sum = expected_loss_sum(model, batch, epsilon=0.0)
    np.testing.assert_allclose(loss_B.sum(), plain_sum, rtol=1e-5)


def test_the_loss_of_a_model_is_its_weighted_mean_over_targets(tiny):
    """`qkattn.loss` takes a model and a batch, and smooths nothing."""
    model, batch = model_and_weighted_batch(tiny)
    mean_loss = qkattn.loss(model, batch)
    plain_sum = expected_loss_sum(model, batch, epsilon=0.0)
    np.testing.assert_allclose(mean_loss, plain_sum / batch['loss_weights_BT'].sum(), rtol=1e-5)


KERNELS_AND_CHUNKS = [*itertools.product(('einsum', 'blockwise'), (None, 5))]


@pytest.mark.parametrize(('kernel', 'chunk'), slow_except([('einsum', 5)], KERNELS_AND_CHUNKS))
def test_z_loss_adds_to_the_gradient_but_not_to_the_logged_loss(tiny, kernel, chunk):
    """A step minimizes the loss plus the z-loss, which is z_loss * mean((log Z)^2).

    Z is the sum of exp(logits) at a target. `chunk` is the number of positions whose logits are
    computed at a time. None computes all positions at once.
    """
    z_loss = 0.5
    model = {'num_layers': 1, 'kernel': kernel}
    train = {'logits_chunk': chunk, 'label_smoothing': 0.1}
    plain = tiny(model=model, train=train)
    penalized = tiny(model=model, train=train | {'z_loss': z_loss})
    params = initial_params(plain)
    # Two microbatches of the first trial, with random loss weights.
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

    # The penalty is large, so the logged loss would differ if it included the penalty.
    assert penalty > 0.1 * loss
    assert_close(penalized_loss, loss, 1e-5)
    sum_of_grads = jax.tree.map(jnp.add, grads, penalty_grads)
    assert_close(penalized_grads, sum_of_grads, 1e-5)


def test_an_evaluation_has_no_z_loss(tiny):
    batch = next(batches(tiny()))
    params = initial_params(tiny())
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
    """With train.logits_chunk=3, only the logits of 3 positions are in memory at a time.

    A training step computes `gradient`, and an evaluation `row_sums`. The logits [B, T, V] take
    most of the memory.
    """
    rng = np.random.default_rng(0)
    params = initial_params(tiny(model=LARGE_VOCABULARY))
    batch = {
        'tokens_BT': rng.integers(0, V, (B, T), np.int32),
        'targets_BT': rng.integers(0, V, (B, T), np.int32),
        'loss_weights_BT': (rng.random((B, T)) > 0.2).astype(np.float32),
    }

    def result_and_memory(logits_chunk):
        """Returns the result of `compute`, and the bytes of temporary arrays of its program."""
        train = {'logits_chunk': logits_chunk, 'label_smoothing': 0.1, 'z_loss': 1e-2}
        config = tiny(model=LARGE_VOCABULARY, train=train)
        compiled = jax.jit(functools.partial(compute, config)).lower(params, batch).compile()
        return compiled(params, batch), compiled.memory_analysis().temp_size_in_bytes

    expected_result, memory_of_whole = result_and_memory(None)
    result, memory_of_chunks = result_and_memory(3)  # 3 does not divide the 16 positions

    assert_close(result, expected_result, 1e-5)
    bytes_per_number = 4
    bytes_of_logits = bytes_per_number * B * T * V
    assert memory_of_whole > bytes_of_logits
    # A chunk has 3/16 of the logits. The bound of 1/2 leaves room for other arrays.
    assert memory_of_chunks < memory_of_whole / 2


def test_no_device_holds_the_whole_vocabulary(tiny):
    """The mesh axes fsdp and tensor split the embedding along V, the number of tokens.

    Logits [B, T, V] are split along B by fsdp, and along V by tensor. Both mesh axes have size 2.
    """
    config = tiny(model=LARGE_VOCABULARY, train={'accumulation': 1})
    mesh = sharding.make_mesh(MeshConfig(fsdp=2, tensor=2))
    state, hyper, batch = program.abstract_inputs(config, mesh)

    compiled = program.lower(config, 'vmap', mesh, state, hyper, batch).compile()

    # The first output is the new state. It has the shardings of the state before the step.
    leaves = jax.tree.leaves(state)
    output_shardings = jax.tree.leaves(compiled.output_shardings[0])
    for leaf, output_sharding in zip(leaves, output_shardings, strict=True):
        assert output_sharding.is_equivalent_to(leaf.sharding, leaf.ndim)

    # Collect the sizes of all axes in the program of one device. Its text shows an array of shape
    # [2, 4, 16] as f32[2,4,16].
    text = compiled.as_text()
    sizes = set()
    for shape in re.findall(r'f32\[([\d,]+)\]', text):
        sizes.update(int(size) for size in shape.split(','))
    assert V // 4 in sizes  # of the embedding
    assert V // 2 in sizes  # of the logits
    assert V not in sizes

    # A device holds the logits of 2 trials, for half of the rows and half of V.
    num_rows = config.train.batch_size
    assert f'f32[2,{num_rows // 2},{T},{V // 2}]' in text
    assert f'{num_rows},{T},{V // 2}]' not in text  # the logits of all rows


# Checks of settings


@pytest.fixture
def names_of_checks(monkeypatch):
    """Returns a list to which each call of a check adds the name of the check.

    '_check_value' checks a setting, '_check_circuit' an attention circuit, and '__post_init__' an
    AttentionSpec. The checks work as before.
    """
    names = []

    def record_calls(owner, name):
        """Makes the function `name` of a module or class add its name to `names` when called."""
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
    """A config that was found valid is not checked again when JAX traces its gradient.

    Each check adds its name to the list `names_of_checks`. '_check_value' checks one setting.
    """
    model = qkattn.ModelConfig(d_model=8, num_heads=2, num_layers=3, context=6, **changes)
    config = qkattn.Config(model=model)

    validate(config)
    # All settings of the model were checked. Earlier tests may have checked the default sections.
    num_model_settings = len(dataclasses.fields(model))
    assert names_of_checks.count('_check_value') >= num_model_settings

    # Trace the gradient on one microbatch of 2 rows of 6 tokens. `eval_shape` computes nothing.
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
