"""Optimizers by hand and against optax, schedules, and what those from outside keep."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qkattn.config import ModelConfig, OptimizerConfig
from qkattn.model.cost import abstract_params
from qkattn.train import optimizer as optimizers
from qkattn.train.optimizer import OPTIMIZERS, SCHEDULES, check_optimizer, decay_mask, matrix_axes
from tests.fixtures import chosen
from tests.lanes import slow_except
from tests.refusals import refused

MODEL = ModelConfig(d_model=8, num_layers=2, num_heads=2, context=4, vocab_size=16, biases=True)
RATE = 0.1
DECAY = 0.5
ADAM = functools.partial(optax.adamw, RATE, b1=0.9, b2=0.99, eps=1e-8)


def params_and_gradients():
    """[parameters, gradients of the first step, gradients of the second step], random."""
    draw = np.random.default_rng(0).standard_normal
    shapes = abstract_params(MODEL)
    return [jax.tree.map(lambda a: jnp.float32(draw(a.shape)), shapes) for _ in range(3)]


def optimizer_of(weight_decay=0.0, clip_norm=None, **fields):
    config = OptimizerConfig(clip_norm=clip_norm, **fields)
    return optimizers.optimizer(config, jnp.float32(RATE), jnp.float32(weight_decay))


def after_two_steps(one, other):
    """The parameters after two steps of one optimizer, and of the other, by one program."""
    return jax.jit(
        lambda *params_and_gradients: [
            two_steps(which, *params_and_gradients) for which in (one, other)
        ]
    )(*params_and_gradients())


def two_steps(transform, params, *gradients):
    """The parameters after a step with each of these gradients."""
    state = transform.init(params)
    for grads in gradients:
        updates, state = transform.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def test_steps_of_adamw_are_those_of_optax_on_clipped_gradients():
    expected = optax.chain(
        optax.clip_by_global_norm(1.0),
        ADAM(weight_decay=DECAY, mask=decay_mask),
    )
    adamw = optimizer_of(DECAY, clip_norm=1.0, decay='coupled')
    jax.tree.map(np.testing.assert_array_equal, *after_two_steps(adamw, expected))


def test_steps_of_sgd_are_those_of_optax():
    sgd = after_two_steps(optimizer_of(name='sgd'), optax.sgd(RATE, 0.95))
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-6, atol=1e-6), *sgd)


def test_muon_makes_the_step_of_each_head_near_orthogonal():
    """A step of a matrix of a block has singular values from 0.7 to 1.2 (Jordan et al. 2024).

    They are times 0.2 sqrt(longer side). All other parameters are trained by AdamW.
    """
    params, gradients, _ = params_and_gradients()
    after, adam = after_two_steps(optimizer_of(name='muon'), ADAM(nesterov=True, weight_decay=0.0))
    first = jax.jit(
        lambda *params_and_gradients: two_steps(optimizer_of(name='muon'), *params_and_gradients)
    )(params, gradients)

    def check(path, p, got, want, one):
        name = path[-1].key
        if path[0].key != 'blocks' or not name.startswith('w_'):
            return np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5)
        u = (p - one) / RATE  # [L, rows, columns], or [L, D, N, H] and [L, N, H, D] by head
        u = np.moveaxis(u, 2, 1) if name.endswith('DNH') or name.endswith('DKH') else u
        scale = 0.2 * max(u.shape[-2:]) ** 0.5
        sizes = np.linalg.svd(u, compute_uv=False) / scale
        assert 0.6 < sizes.min() and sizes.max() < 1.25, name

    jax.tree_util.tree_map_with_path(check, params, after, adam, first)


@pytest.mark.parametrize('name', slow_except(['adamw'], OPTIMIZERS))
def test_coupled_decay_is_the_independent_one_times_the_learning_rate(name):
    after = after_two_steps(
        optimizer_of(DECAY, name=name, decay='coupled'), optimizer_of(RATE * DECAY, name=name)
    )
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-4, atol=1e-5), *after)


def test_muon_trains_the_matrices_of_blocks_of_which_heads_are_batches():
    blocks = {'w_mixing_NR': jnp.zeros((5, 2, 3)), 'w_ov_NDE': jnp.zeros((5, 2, 4, 4))}
    want = {'w_mixing_NR': ((1,), (2,)), 'w_ov_NDE': ((2,), (3,))}
    assert matrix_axes({'blocks': blocks}) == {'blocks': want}


def test_schedules_have_the_fractions_worked_out_by_hand():
    for name, length, fractions in (
        ('inverse_sqrt', 64, {16: 1 / 2, 64: 1 / 4}),
        ('inverse_sqrt', 50, {16: 1 / 2, 64: 1 / 4}),
        ('linear', 64, {34: 0.6, 64: 0.2}),
        ('cosine', 64, {19: 0.2 + 0.8 * (1 + np.cos(np.pi / 4)) / 2, 34: 0.6}),
        ('constant', 64, {34: 1, 64: 1}),
        # A quarter of 64 steps, the warm-up among them.
        ('wsd', 64, {4: 1, 48: 1, 56: 0.6, 64: 0.2}),
    ):
        config = OptimizerConfig(
            schedule=name, warmup_steps=4, final_fraction=0.2, decay_fraction=0.25
        )
        got = optimizers.schedule(config, length)(jnp.array([*fractions]))
        np.testing.assert_allclose(got, [*fractions.values()], rtol=1e-6, err_msg=name)


# What every optimizer and schedule keeps, registered or from outside


def pytest_generate_tests(metafunc):
    chosen(metafunc, 'optimizer', [*OPTIMIZERS, 'lion:lion', 'lion:lion(b1=0.8, b2=0.9)'])
    chosen(metafunc, 'schedule', [*SCHEDULES, 'cooldown:cooldown', 'cooldown:cooldown(decay=0.5)'])


def test_an_optimizer_keeps_its_contract(outside, optimizer):
    """Eight steps lower a sum of squares, decay acts on matrices alone, and a zero gradient and no
    decay leave a parameter as it is; numbers are arguments of one compiled program."""
    config = OptimizerConfig(name=optimizer, clip_norm=None)
    rising = jnp.linspace(1, 2, 12).reshape(3, 4)
    blocks = {'w_in_DF': rising, 'w_frozen_DF': jnp.ones((3, 4)), 'b_in_F': jnp.ones(4)}
    before = {'w_embedding_VD': jnp.linspace(-1, 1, 12).reshape(4, 3), 'blocks': blocks}

    @jax.jit
    def step(params, inner, rate, weight_decay):
        grads = jax.tree.map(lambda p: 2 * p, params)
        grads['blocks']['w_frozen_DF'] *= 0
        transform = optimizers.optimizer(config, rate, weight_decay, fraction=0.5)
        updates, inner = transform.update(grads, inner, params)
        return optax.apply_updates(params, updates), inner

    def after(rate, weight_decay):
        # The state depends on none of the numbers.
        params = before
        inner = optimizers.optimizer(config, 0.0, 0.0).init(before)
        for _ in range(8):
            params, inner = step(params, inner, rate, weight_decay)
        np.testing.assert_array_equal(params['blocks']['w_frozen_DF'], 1)
        return [params['w_embedding_VD'], params['blocks']['w_in_DF'], params['blocks']['b_in_F']]

    w = before['w_embedding_VD']
    w_in = rising
    b = jnp.ones(4)
    for first, last in zip((w, w_in, b), after(0.02, 0.0), strict=True):
        assert jnp.sum(last**2) < jnp.sum(first**2)
    w_decayed, _, b_kept = after(0.0, 0.1)
    np.testing.assert_allclose(w_decayed, (1 - 0.5 * 0.1) ** 8 * w, rtol=1e-5)
    np.testing.assert_array_equal(b_kept, b)
    assert step._cache_size() == 1


def test_a_schedule_keeps_its_contract(outside, schedule):
    config = OptimizerConfig(schedule=schedule, warmup_steps=4, final_fraction=0.1)
    check_optimizer(config, 60)
    fractions = np.asarray(jax.vmap(optimizers.schedule(config, 60))(jnp.arange(61)))
    # Four steps of warm-up, then a fraction of the peak, at the end a tenth.
    np.testing.assert_allclose(fractions[:5], np.arange(1, 6) / 5, rtol=1e-5)
    assert np.all((fractions >= 0) & (fractions <= 1 + 1e-6))
    if config.decays:
        np.testing.assert_allclose(fractions[-1], 0.1, rtol=1e-5)


STRANGE_MODULE = """
import optax
def returns_nothing(config, learning_rate, weight_decay): pass
def fails(config, learning_rate, weight_decay): raise KeyError('x')
def ends_at_a_third(config, decay_steps): return lambda steps: 1 - 2 * steps / decay_steps / 3
def divides(config, decay_steps): return lambda steps: 1 / (steps - decay_steps)
"""


def test_a_name_of_no_optimizer_or_schedule_is_refused_in_one_sentence(outside):
    (outside / 'strange.py').write_text(STRANGE_MODULE)
    for fields, says in (
        ({'name': 'best'}, "unknown optimizer.name 'best'; known: adamw, muon, sgd, or an imp"),
        ({'name': 'adamw(b1=1.0)'}, "adamw has no option 'b1'; it takes none"),
        ({'name': 'cooldown:cooldown'}, r'is not a function \(config, learning_rate, weight_decay'),
        ({'name': 'strange:returns_nothing'}, 'must return an optax.GradientT.*, not None'),
        ({'name': 'strange:fails'}, "name='strange:fails' fails, KeyError in .*strange.py, line 4"),
        ({'schedule': 'strange:divides'}, 'fails, ZeroDivisionError in .*strange.py, line 6: '),
        ({'schedule': 'strange:ends_at_a_third'}, 'final_fraction=0.0 must be 0.3333, where opti'),
    ):
        with refused(says):
            check_optimizer(OptimizerConfig(**fields), 1000)
    # With no step after the warm-up a schedule has no end, and the config is refused for that.
    check_optimizer(OptimizerConfig(schedule='strange:ends_at_a_third'), 50)


def test_a_schedule_anneals_where_it_decays_to_a_low_final_fraction():
    name = 'strange:ends_at_a_third'
    low, high = (OptimizerConfig(schedule=name, final_fraction=f) for f in (0.1, 1 / 3))
    assert low.anneals and high.decays and not high.anneals
    for end in ('', '()'):
        decaying = [name for name in SCHEDULES if OptimizerConfig(schedule=name + end).decays]
        assert decaying == ['linear', 'cosine', 'wsd']
