"""Optimizers by hand and against optax, schedules, and what those from outside keep."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qkattn.config import ModelConfig, OptimizerConfig
from qkattn.errors import ConfigError
from qkattn.model.cost import abstract_params
from qkattn.train import optimizer as optimizers
from qkattn.train.optimizer import OPTIMIZERS, SCHEDULES, check_optimizer, decayed, matrix_axes
from tests.fixtures import chosen
from tests.lanes import only

MODEL = ModelConfig(d_model=8, num_layers=2, num_heads=2, context=4, vocab_size=16, biases=True)
RATE, DECAY = 0.1, 0.5
FRACTIONS = 1.0, 0.25  # of the peak, in the two steps


def trees():
    """Parameters, and gradients of two steps."""
    draw, shapes = np.random.default_rng(0).standard_normal, abstract_params(MODEL)
    return [jax.tree.map(lambda a: jnp.float32(draw(a.shape)), shapes) for _ in range(3)]


def two_steps(transforms, params, first, second):
    state = transforms[0].init(params)
    for transform, grads in zip(transforms, (first, second), strict=True):
        updates, state = transform.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def newton_schulz(g):
    """Five iterations of Jordan et al. 2024, word for word."""
    x = g / (np.linalg.norm(g) + 1e-8)
    x = x.T if g.shape[0] > g.shape[1] else x
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.775 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


def by_hand(name, decay, path, p, first, second):
    """The parameter after two steps without clipping, in float64."""
    leaf = path[-1].key
    weight_decay = DECAY if leaf.startswith('w_') else 0.0
    mu = nu = np.zeros_like(p)
    for t, g in enumerate((first, second), start=1):
        if name == 'sgd':
            mu = g + 0.95 * mu
            u = mu
        elif name == 'muon' and path[0].key == 'blocks' and leaf.startswith('w_'):
            mu = 0.95 * mu + 0.05 * g
            m = 0.95 * mu / (1 - 0.95 ** (t + 1)) + 0.05 * g / (1 - 0.95**t)
            # [L, rows, columns], or [L, D, N, H] and [L, N, H, D] with one matrix a head.
            heads = {'H': -2, 'D': -3}[leaf[-1]] if m.ndim == 4 else None
            m = m if heads is None else np.moveaxis(m, heads, 1)
            u = np.stack([newton_schulz(x) for x in m.reshape(-1, *m.shape[-2:])]).reshape(m.shape)
            u = 0.2 * max(m.shape[-2:]) ** 0.5 * u
            u = u if heads is None else np.moveaxis(u, 1, heads)
        else:
            mu, nu = 0.9 * mu + 0.1 * g, 0.99 * nu + 0.01 * g * g
            hat = mu / (1 - 0.9**t)
            if name == 'muon':  # Nesterov momentum
                hat = 0.9 * mu / (1 - 0.9 ** (t + 1)) + 0.1 * g / (1 - 0.9**t)
            u = hat / (np.sqrt(nu / (1 - 0.99**t)) + 1e-8)
        fraction = FRACTIONS[t - 1]
        if decay == 'coupled':
            p = p - fraction * RATE * (u + weight_decay * p)
        else:
            p = p - fraction * RATE * u - fraction * weight_decay * p
    return p


@pytest.mark.parametrize('decay', only(['independent'], ['independent', 'coupled']))
@pytest.mark.parametrize('name', list(OPTIMIZERS))
def test_two_steps_are_those_by_hand(name, decay):
    config = OptimizerConfig(name=name, clip_norm=None, decay=decay)
    params, *grads = trees()

    @jax.jit
    def steps(rate, weight_decay, fractions, params, grads):
        transforms = [optimizers.optimizer(config, rate, weight_decay, f) for f in fractions]
        return two_steps(transforms, params, *grads)

    got = steps(RATE, DECAY, jnp.array(FRACTIONS), params, grads)
    exact = jax.tree.map(np.float64, (params, *grads))
    want = jax.tree_util.tree_map_with_path(functools.partial(by_hand, name, decay), *exact)
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=2e-5), got, want)


def test_adamw_is_that_of_optax_and_gradients_are_clipped():
    params, *grads = trees()
    adamw = optax.adamw(RATE, b1=0.9, b2=0.99, eps=1e-8, weight_decay=DECAY, mask=decayed)
    want = optax.chain(optax.clip_by_global_norm(1.0), adamw)
    config = OptimizerConfig(decay='coupled')
    got = optimizers.optimizer(config, jnp.float32(RATE), jnp.float32(DECAY))
    both = jax.jit(lambda *trees: [two_steps(2 * [which], *trees) for which in (got, want)])
    jax.tree.map(np.testing.assert_array_equal, *both(params, *grads))


def test_muon_trains_the_matrices_of_blocks_of_which_heads_are_batches():
    both = {'w_mixing_NR': jnp.zeros((5, 2, 3)), 'w_ov_NDE': jnp.zeros((5, 2, 4, 4))}
    want = {'w_mixing_NR': ((1,), (2,)), 'w_ov_NDE': ((2,), (3,))}
    assert matrix_axes({'blocks': both}) == {'blocks': want}


@pytest.mark.parametrize(
    ('name', 'length', 'fractions'),
    [
        ('inverse_sqrt', 64, {16: 1 / 2, 64: 1 / 4}),
        ('inverse_sqrt', 50, {16: 1 / 2, 64: 1 / 4}),
        ('linear', 64, {34: 0.6, 64: 0.2}),
        ('cosine', 64, {19: 0.2 + 0.8 * (1 + np.cos(np.pi / 4)) / 2, 34: 0.6}),
        ('constant', 64, {34: 1, 64: 1}),
    ],
)
def test_schedules(name, length, fractions):
    config = OptimizerConfig(schedule=name, warmup_steps=4, final_fraction=0.2)
    got = optimizers.schedule(config, length)(jnp.array([*fractions]))
    np.testing.assert_allclose(got, [*fractions.values()], rtol=1e-6)


# What every optimizer and schedule keeps, registered or from outside


def pytest_generate_tests(metafunc):
    chosen(metafunc, 'optimizer', [*OPTIMIZERS, 'lion:lion', 'lion:lion(b1=0.8, b2=0.9)'])
    chosen(metafunc, 'schedule', [*SCHEDULES, 'wsd:wsd', 'wsd:wsd(decay=0.5)'])


def test_an_optimizer_descends_and_decays_independently_of_its_rate(outside, optimizer):
    """Eight steps down the sum of squares, by one program; what is frozen stays."""
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
        params, inner = before, optimizers.optimizer(config, 0.0, 0.0).init(before)
        for _ in range(8):
            params, inner = step(params, inner, rate, weight_decay)
        np.testing.assert_array_equal(params['blocks']['w_frozen_DF'], 1)
        return [params['w_embedding_VD'], params['blocks']['w_in_DF'], params['blocks']['b_in_F']]

    w, w_in, b = before['w_embedding_VD'], rising, jnp.ones(4)
    for first, last in zip((w, w_in, b), after(0.02, 0.0), strict=True):
        assert jnp.sum(last**2) < jnp.sum(first**2)
    w_decayed, _, b_kept = after(0.0, 0.1)
    np.testing.assert_allclose(w_decayed, (1 - 0.5 * 0.1) ** 8 * w, rtol=1e-5)
    np.testing.assert_array_equal(b_kept, b)
    assert step._cache_size() == 1


def test_a_schedule_warms_up_to_the_peak_and_ends_where_it_says(outside, schedule):
    config = OptimizerConfig(schedule=schedule, warmup_steps=4, final_fraction=0.1)
    check_optimizer(config, 60)
    fractions = np.asarray(jax.vmap(optimizers.schedule(config, 60))(jnp.arange(61)))
    np.testing.assert_allclose(fractions[:5], np.arange(1, 6) / 5, rtol=1e-5)
    assert np.all((fractions >= 0) & (fractions <= 1 + 1e-6))
    if config.decays:
        np.testing.assert_allclose(fractions[-1], 0.1, rtol=1e-5)


OUTSIDE = """
import optax
def returns_nothing(config, learning_rate, weight_decay): pass
def fails(config, learning_rate, weight_decay): raise KeyError('x')
def ends_at_a_third(config, decay_steps): return lambda steps: 1 - 2 * steps / decay_steps / 3
def divides(config, decay_steps): return lambda steps: 1 / (steps - decay_steps)
"""


@pytest.mark.parametrize(
    ('fields', 'says'),
    [
        ({'name': 'best'}, "unknown optimizer.name 'best'; known are adamw, muon, sgd, or an imp"),
        ({'schedule': 'cosin'}, "unknown optimizer.schedule 'cosin', did you mean 'cosine'"),
        ({'name': 'adamw(b1=1.0)'}, "adamw has no option 'b1'; it takes none"),
        ({'name': 'wsd:wsd'}, r'is not a function \(config, learning_rate, weight_decay'),
        ({'name': 'strange:returns_nothing'}, 'must return an optax.GradientT.*, not None'),
        ({'name': 'strange:fails'}, "name='strange:fails' fails, KeyError in .*strange.py, line 4"),
        ({'schedule': 'strange:divides'}, 'fails, ZeroDivisionError in .*strange.py, line 6: '),
        ({'schedule': 'strange:ends_at_a_third'}, 'final_fraction=0.0 must be 0.3333, where opti'),
    ],
)
def test_what_is_none_is_refused_in_one_sentence(outside, fields, says):
    (outside / 'strange.py').write_text(OUTSIDE)
    with pytest.raises(ConfigError, match=says) as caught:
        check_optimizer(OptimizerConfig(**fields), 1000)
    assert '\n' not in str(caught.value)


def test_a_schedule_from_outside_anneals_where_it_ends_low():
    name = 'strange:ends_at_a_third'
    low, high = (OptimizerConfig(schedule=name, final_fraction=f) for f in (0.1, 1 / 3))
    assert low.anneals and high.decays and not high.anneals
    assert not OptimizerConfig(schedule='constant').decays
