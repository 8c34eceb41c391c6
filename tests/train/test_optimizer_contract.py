"""What every optimizer and schedule keeps, registered or from outside.

`--optimizer=module:function` and `--schedule=module:function` name one.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qkattn.config import OptimizerConfig
from qkattn.errors import ConfigError
from qkattn.train import optimizer as optimizers
from qkattn.train import schedules
from qkattn.train.optimizer import OPTIMIZERS, check_optimizer
from qkattn.train.schedules import SCHEDULES
from tests.outside import chosen

pytestmark = pytest.mark.usefixtures('outside')

STEPS, WARMUP = 60, 4


def pytest_generate_tests(metafunc):
    chosen(metafunc, 'optimizer', [*OPTIMIZERS, 'lion:lion', 'lion:lion(b1=0.8, b2=0.9)'])
    chosen(metafunc, 'schedule', [*SCHEDULES, 'wsd:wsd', 'wsd:wsd(decay=0.5)'])


@pytest.fixture
def train(optimizer):
    """train(rate, weight_decay): parameters before and after eight steps down sum of squares."""
    config = OptimizerConfig(name=optimizer, clip_norm=None)
    params = {
        'w_embedding_VD': jnp.linspace(-1, 1, 12).reshape(4, 3),
        'blocks': {
            'w_in_DF': jnp.linspace(1, 2, 12).reshape(3, 4),
            'w_frozen_DF': jnp.ones((3, 4)),
            'b_in_F': jnp.ones(4),
        },
    }

    @jax.jit
    def step(state, rate, weight_decay):
        params, inner = state
        grads = jax.tree.map(lambda p: 2 * p, params)
        grads['blocks']['w_frozen_DF'] *= 0
        transform = optimizers.optimizer(config, rate, weight_decay, fraction=0.5)
        updates, inner = transform.update(grads, inner, params)
        return optax.apply_updates(params, updates), inner

    def run(rate, weight_decay):
        # The state depends on none of the numbers.
        state = params, optimizers.optimizer(config, 0.0, 0.0).init(params)
        for _ in range(8):
            state = step(state, rate, weight_decay)
        assert step._cache_size() == 1
        return params, state[0]

    return run


def test_an_optimizer_descends_and_leaves_what_has_no_gradient(train):
    before, after = train(0.02, 0.0)
    np.testing.assert_array_equal(after['blocks'].pop('w_frozen_DF'), 1)
    del before['blocks']['w_frozen_DF']
    squares = [[float(jnp.sum(p**2)) for p in jax.tree.leaves(tree)] for tree in (before, after)]
    assert np.all(np.less(squares[1], squares[0]))


def test_without_a_learning_rate_only_independent_decay_moves_an_optimizer(train):
    before, after = train(0.0, 0.1)
    kept = (1 - 0.5 * 0.1) ** 8
    np.testing.assert_allclose(after['w_embedding_VD'], kept * before['w_embedding_VD'], rtol=1e-5)
    np.testing.assert_array_equal(after['blocks']['b_in_F'], before['blocks']['b_in_F'])
    np.testing.assert_array_equal(after['blocks']['w_frozen_DF'], 1)


def test_a_schedule_warms_up_to_the_peak_and_ends_where_it_says(schedule):
    config = OptimizerConfig(schedule=schedule, warmup_steps=WARMUP, final_fraction=0.1)
    check_optimizer(config, STEPS)
    fraction = jax.jit(jax.vmap(schedules.schedule(config, STEPS)))
    fractions = np.asarray(fraction(jnp.arange(STEPS + 1)))
    np.testing.assert_allclose(fractions[: WARMUP + 1], np.arange(1, 6) / 5, rtol=1e-5)
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
        ({'name': 'lion:lion(rank=1)'}, "has no option 'rank'; it takes b1, b2"),
        ({'name': 'wsd:wsd'}, r'is not a function \(config, learning_rate, weight_decay'),
        ({'name': 'optax:adam'}, "name='optax:adam' fails, TypeError in .*, line "),
        ({'name': 'strange:returns_nothing'}, 'must return an optax.GradientT.*, not None'),
        (
            {'name': 'strange:fails'},
            "optimizer.name='strange:fails' fails, KeyError in .*strange.py, line 4: 'x'",
        ),
        ({'schedule': 'lion:lion'}, r'is not a function \(config, decay_steps'),
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
    low, high = (
        OptimizerConfig(schedule='strange:ends_at_a_third', final_fraction=f) for f in (0.1, 1 / 3)
    )
    assert low.anneals and high.decays and not high.anneals
    assert not OptimizerConfig(schedule='constant').decays
