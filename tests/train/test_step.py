"""The step: golden numbers, accumulation, trials, divergence, dtype."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from qkattn.config import MeshConfig, TrialsConfig
from qkattn.data.pipeline import batches
from qkattn.model import build
from qkattn.train import placement, program, sharding, step
from qkattn.train.lifting import lift
from qkattn.train.schedules import schedule


def tokens_XABT1(config, seed=0):
    shape = (*placement.leading_shape(config)[1:], config.model.context + 1)
    return np.random.default_rng(seed).integers(0, 256, shape).astype(np.int32)


def language_batch(tokens_ABT1):
    """Windows of T + 1 tokens as inputs, targets and weights."""
    return {
        'tokens_BT': tokens_ABT1[..., :-1],
        'targets_BT': tokens_ABT1[..., 1:],
        'loss_weights_BT': jnp.ones(tokens_ABT1[..., 1:].shape, jnp.float32),
    }


@functools.cache
def compiled(config, lifting):
    """Initialization and training program; trials differ in data only."""
    mesh = sharding.make_mesh(MeshConfig())
    init = functools.partial(step.init_stack, config)
    return jax.jit(init), jax.jit(step.train_steps(config, lifting, mesh))


def three_steps(config, tokens, lifting='vmap'):
    """State and metrics after three steps on the same tokens."""
    trials = config.trials.trials()
    hyper = {
        name: jnp.array([trial[name] for trial in trials], dtype)
        for name, dtype in program.HYPER.items()
    }
    init, run = compiled(dataclasses.replace(config, trials=TrialsConfig()), lifting)
    batch = language_batch(jnp.broadcast_to(tokens, (3, *tokens.shape)))
    return run(init(hyper['seed']), hyper, batch)


@pytest.fixture
def four(tiny):
    """A run of four trials, small to compile; model and trials are replaced by keywords."""

    def make(trials=None, **model):
        trials = {'learning_rates': (1e-2, 1e-3), 'seeds': (0, 5)} | (trials or {})
        return tiny(model={'scan_unroll': 1} | model, trials=trials)

    return make


GOLDEN = {
    'loss': [6.1501417, 5.9226151],
    'grad_norm': [2.7045262, 2.1575873],
    'update_norm': [0.6097617, 0.6096081],
}


@pytest.mark.stored
def test_golden_step(four):
    """One step in exact numbers, which change only with initialization, loss, optimizer or jax's
    random bits: after an intended change of these, copy the printed numbers. The first loss is that
    of logits of standard deviation 1, about 0.5 nats above log V."""
    config = four({'seeds': (0, 1)})
    _, metrics = three_steps(config, tokens_XABT1(config))
    got = {name: np.asarray(metrics[name][0, :2]).tolist() for name in GOLDEN}
    for name, want in GOLDEN.items():
        np.testing.assert_allclose(got[name], want, rtol=2e-6, err_msg=str(got))
    assert np.log(256) < min(got['loss']) < max(got['loss']) < np.log(256) + 1


def test_microbatches_are_one_batch_weighted_by_tokens(four):
    config = four(num_layers=1)
    params = params_of(config)
    batch = language_batch(jnp.asarray(tokens_XABT1(config)[0]))
    # The two microbatches hold very different numbers of tokens.
    weights_ABT = np.ones((2, 4, 16), np.float32)
    weights_ABT[0, :, 2:] = 0
    batch['loss_weights_BT'] = jnp.asarray(weights_ABT)
    whole = jax.tree.map(lambda a: a.reshape(-1, 16), batch)

    def mean_loss(params):
        return step.loss_sum(config, params, whole, None) / weights_ABT.sum()

    want = jax.jit(jax.value_and_grad(mean_loss))(params)
    gradients = jax.jit(functools.partial(step.gradients, config))
    for batch_ABT in (batch, jax.tree.map(lambda a: a[None], whole)):
        jax.tree.map(
            lambda got, leaf: np.testing.assert_allclose(got, leaf, rtol=1e-6, atol=1e-6),
            gradients(params, batch_ABT),
            want,
        )


@pytest.mark.parametrize('lifting', ['vmap', 'map'])
def test_a_stack_equals_its_trials_alone(four, lifting):
    config = four()
    tokens = tokens_XABT1(config)
    state, metrics = three_steps(config, tokens, lifting)
    rates_C = jnp.stack([schedule(config.optimizer, config.train.num_steps)(i) for i in range(3)])
    np.testing.assert_allclose(metrics['learning_rate'][:, 0], 1e-2 * rates_C, rtol=1e-6)
    assert int(state['step']) == 3 and len(set(rates_C.tolist())) == 3
    for x, trial in enumerate(config.trials.trials()):
        alone = four({'learning_rates': (trial['learning_rate'],), 'seeds': (trial['seed'],)})
        want_state, want = three_steps(alone, tokens[x : x + 1])
        np.testing.assert_allclose(metrics['loss'][:, x], want['loss'][:, 0], rtol=1e-5)
        jax.tree.map(
            lambda got, leaf, x=x: np.testing.assert_allclose(got[x], leaf[0], atol=1e-4),
            state['trials']['params'],
            want_state['trials']['params'],
        )


def loops(jaxpr):
    """The lengths of a program's outermost loops."""
    return [e.params['length'] for e in jaxpr.eqns if e.primitive.name == 'scan']


@pytest.mark.parametrize('lifting', ['vmap', 'map'])
def test_a_single_trial_is_computed_without_an_axis(lifting):
    square = lift(lambda a, b: a @ b, lifting, sharding.make_mesh(MeshConfig()))
    jaxpr = jax.make_jaxpr(square)(jnp.ones((1, 4, 3)), jnp.ones((1, 3, 5))).jaxpr
    (product,) = (e for e in jaxpr.eqns if e.primitive.name == 'dot_general')
    assert product.outvars[0].aval.shape == (4, 5) and not loops(jaxpr)


def test_map_takes_all_steps_of_a_trial_before_those_of_the_next(four):
    mesh = sharding.make_mesh(MeshConfig())
    config = four({'seeds': (0, 1, 2, 3, 4)})
    state, hyper, _ = program.abstract_inputs(config, mesh)
    batch = language_batch(np.broadcast_to(tokens_XABT1(config), (3, *tokens_XABT1(config).shape)))

    def lengths(lifting):
        steps = step.train_steps(config, lifting, mesh)
        return loops(jax.make_jaxpr(steps)(state, hyper, batch).jaxpr)

    assert (lengths('map'), lengths('vmap')) == ([10], [3])


def test_a_diverged_trial_is_frozen_and_the_others_go_on(four):
    config = four({'learning_rates': (1e-2, 1e30)})
    tokens = tokens_XABT1(config)
    state, metrics = three_steps(config, tokens)
    assert state['trials']['alive'].tolist() == [True, True, False, False]
    assert np.isfinite(metrics['loss'][:, :2]).all() and np.isnan(metrics['loss'][-1, 2:]).all()
    assert all(np.isfinite(p).all() for p in jax.tree.leaves(state['trials']['params']))
    _, want = three_steps(four(), tokens)
    np.testing.assert_allclose(metrics['loss'][:, :2], want['loss'][:, :2], rtol=1e-5)


def test_bfloat16_computes_near_float32_and_keeps_float32_parameters(four):
    config = four()
    tokens = tokens_XABT1(config)
    _, want = three_steps(config, tokens)
    state, got = three_steps(four(compute_dtype='bfloat16'), tokens)
    assert {str(p.dtype) for p in jax.tree.leaves(state['trials']['params'])} == {'float32'}
    np.testing.assert_allclose(got['loss'][0], want['loss'][0], rtol=2e-2)
    assert np.abs(np.asarray(got['loss'][0] - want['loss'][0])).max() > 1e-6


def test_dropout_depends_on_seed_and_step_only(four):
    trials = {'learning_rates': (0.0,), 'weight_decays': (0.0,), 'seeds': (0, 1, 2, 3)}
    config = four(trials, dropout=0.1)
    tokens = tokens_XABT1(config)
    losses_CX = np.asarray(three_steps(config, tokens)[1]['loss'])
    again_CX = np.asarray(three_steps(config, tokens)[1]['loss'])
    np.testing.assert_array_equal(losses_CX, again_CX)
    _, without = three_steps(four(trials), tokens)
    assert np.abs(losses_CX[0] - without['loss'][0]).min() > 1e-4
    assert np.abs(losses_CX[0] - losses_CX[1]).min() > 1e-4  # other units at another step


def test_remat_and_unroll_change_no_gradient_and_what_is_kept(four):
    params, found, kept = params_of(four()), {}, {}
    for remat, unroll in (('none', None), ('full', 1), ('dots', 1)):
        config = four(dropout=0.1, remat=remat, scan_unroll=unroll)
        traced = jax.jit(jax.grad(loss_of(config))).trace(params)
        found[remat] = jax.tree.leaves(traced.lower().compile()(params))
        kept[remat] = sum(math.prod(shape) for shape in residuals(loss_of(config), params))
    for remat in ('full', 'dots'):
        for want, got in zip(found['none'], found[remat], strict=True):
            np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4 * np.abs(want).max())
    # 'dots' keeps q, k, v, the output of attention and the hidden layer of the MLP (4 D).
    model = four().model
    stream = model.num_layers * 4 * model.context * model.d_model
    assert kept['dots'] - kept['full'] == stream * (3 + 1 + 4)
    assert kept['none'] > kept['dots'] + 2 * stream


def residuals(function, *args):
    """The shapes of what the backward pass of a function reads."""
    _, pullback = jax.vjp(jax.jit(function), *args)
    return [leaf.shape for leaf in jax.tree.leaves(pullback)]


def params_of(config):
    return step.init_trial(config, jnp.uint32(0))['params']


def loss_of(config):
    batch = language_batch(jnp.asarray(tokens_XABT1(config)[0, 0]))
    key = jax.random.key(0)
    return lambda params: step.loss_sum(config, params, batch, key)


def test_the_loss_of_a_model_is_the_mean_that_training_sums(tiny):
    config = tiny(model={'num_layers': 1})
    model = build(config.model, key=jax.random.key(0))
    batch = next(batches(config))
    batch['loss_weights_BT'] = np.random.default_rng(0).random((8, 16)).astype(np.float32)
    params = nnx.to_pure_dict(nnx.state(model))
    total = step.loss_sum(config, params, batch)
    np.testing.assert_allclose(
        step.loss(model, batch), total / batch['loss_weights_BT'].sum(), rtol=1e-6
    )
