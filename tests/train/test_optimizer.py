"""Optimizers and schedules: their steps, and the contract that those from outside keep."""

import functools
import sys

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
    """Random parameters, and random gradients of two steps."""
    rng = np.random.default_rng(0)
    shapes = abstract_params(MODEL)

    def random_tree():
        return jax.tree.map(lambda leaf: jnp.float32(rng.standard_normal(leaf.shape)), shapes)

    return random_tree(), random_tree(), random_tree()


def optimizer_of(weight_decay=0.0, clip_norm=None, **fields):
    config = OptimizerConfig(clip_norm=clip_norm, **fields)
    return optimizers.optimizer(config, jnp.float32(RATE), jnp.float32(weight_decay))


def take_steps(transform, params, *gradients):
    """Returns the parameters after one step for each of the gradients."""
    state = transform.init(params)
    for grads in gradients:
        updates, state = transform.update(grads, state, params)
        params = optax.apply_updates(params, updates)
    return params


def params_after_two_steps(transform, other_transform):
    """Returns the parameters after two steps of each optimizer. One program computes both."""

    @jax.jit
    def with_both(params, *gradients):
        after = take_steps(transform, params, *gradients)
        other_after = take_steps(other_transform, params, *gradients)
        return after, other_after

    return with_both(*params_and_gradients())


def assert_allclose(params, other_params, rtol, atol):
    close = functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol)
    jax.tree.map(close, params, other_params)


def test_adamw_takes_the_steps_of_optax_on_clipped_gradients():
    adamw = optimizer_of(DECAY, clip_norm=1.0, decay='coupled')
    adamw_of_optax = optax.chain(
        optax.clip_by_global_norm(1.0),
        ADAM(weight_decay=DECAY, mask=decay_mask),
    )
    params, expected_params = params_after_two_steps(adamw, adamw_of_optax)
    jax.tree.map(np.testing.assert_array_equal, params, expected_params)


def test_sgd_takes_the_steps_of_optax():
    sgd = optimizer_of(name='sgd')
    sgd_of_optax = optax.sgd(RATE, momentum=0.95)
    params, expected_params = params_after_two_steps(sgd, sgd_of_optax)
    assert_allclose(params, expected_params, rtol=1e-6, atol=1e-6)


def is_matrix_of_block(path):
    """Whether the parameter at a path, such as blocks/attention/w_q_DNH, is trained by Muon."""
    return path[0].key == 'blocks' and path[-1].key.startswith('w_')


def test_muon_makes_the_step_of_each_head_near_orthogonal():
    """The singular values of an orthogonal matrix are all 1. Muon's are 0.7 to 1.2.

    The bounds are from Jordan et al. 2024. Muon then scales a step by 0.2 * sqrt(longer side).
    """
    muon = optimizer_of(name='muon', weight_decay=0.0)
    params, gradients, _ = params_and_gradients()

    params_after_step = jax.jit(functools.partial(take_steps, muon))(params, gradients)

    steps = jax.tree.map(lambda before, after: (before - after) / RATE, params, params_after_step)
    for path, step in jax.tree_util.tree_leaves_with_path(steps):
        if not is_matrix_of_block(path):
            continue
        # A name ends in the letters of its axes. The axis of layers has no letter.
        name = path[-1].key
        matrices = step
        if name.endswith(('DNH', 'DKH')):
            # N and K are axes of heads, and each head has a matrix [D, H].
            # So [layers, D, heads, H] becomes [layers, heads, D, H].
            matrices = np.moveaxis(step, 2, 1)
        # An orthogonal matrix has the root mean square 1 / sqrt(longer side). A step has about 0.2.
        longer_side = max(matrices.shape[-2:])
        scale = 0.2 * longer_side**0.5
        singular_values = np.linalg.svd(matrices, compute_uv=False) / scale
        # The tested bounds are a little wider than 0.7 and 1.2.
        assert singular_values.min() > 0.6, name
        assert singular_values.max() < 1.25, name


def test_muon_trains_all_but_the_matrices_of_blocks_with_adam():
    muon = optimizer_of(name='muon', weight_decay=0.0)
    adam = ADAM(nesterov=True, weight_decay=0.0)

    params_after_muon, params_after_adam = params_after_two_steps(muon, adam)

    def assert_trained_with_adam(path, after_muon, after_adam):
        if not is_matrix_of_block(path):
            np.testing.assert_allclose(after_muon, after_adam, rtol=1e-4, atol=1e-5)

    jax.tree_util.tree_map_with_path(assert_trained_with_adam, params_after_muon, params_after_adam)


@pytest.mark.parametrize('name', slow_except(['adamw'], OPTIMIZERS))
def test_coupled_decay_is_independent_decay_times_the_learning_rate(name):
    coupled = optimizer_of(DECAY, name=name, decay='coupled')
    independent = optimizer_of(RATE * DECAY, name=name)
    params, expected_params = params_after_two_steps(coupled, independent)
    assert_allclose(params, expected_params, rtol=1e-4, atol=1e-5)


def test_muon_trains_the_matrices_of_blocks():
    blocks = {'w_mixing_NR': jnp.zeros((5, 2, 3)), 'w_ov_NDE': jnp.zeros((5, 2, 4, 4))}
    # Axis 0 has the layers. Axis 1 of w_ov_NDE has the heads, and each head has its own matrix.
    rows_and_columns = {'w_mixing_NR': ((1,), (2,)), 'w_ov_NDE': ((2,), (3,))}
    assert matrix_axes({'blocks': blocks}) == {'blocks': rows_and_columns}


# The cosine schedule falls with (1 + cos(angle)) / 2. The angle goes from 0 to pi.
FALL_OF_COSINE_AT_A_QUARTER = (1 + np.cos(np.pi / 4)) / 2


@pytest.mark.parametrize(
    ('name', 'num_steps', 'fraction_by_step'),
    [
        # After W = 4 steps of warm-up, the fraction at step s is sqrt(W / s).
        ('inverse_sqrt', 64, {16: 1 / 2, 64: 1 / 4}),
        # The number of steps makes no difference.
        ('inverse_sqrt', 50, {16: 1 / 2, 64: 1 / 4}),
        # The decay lasts from step 4 to step 64, and from 1 to 0.2. Step 19 = 4 + 60 / 4 is a
        # quarter of the way, and step 34 = 4 + 60 / 2 is half. The mean of 1 and 0.2 is 0.6.
        ('linear', 64, {34: 0.6, 64: 0.2}),
        ('cosine', 64, {19: 0.2 + (1 - 0.2) * FALL_OF_COSINE_AT_A_QUARTER, 34: 0.6}),
        ('constant', 64, {34: 1, 64: 1}),
        # The decay lasts for 0.25 * 64 = 16 steps, from step 48 to step 64.
        ('wsd', 64, {4: 1, 48: 1, 56: 0.6, 64: 0.2}),
    ],
)
def test_schedules_have_the_expected_fractions(name, num_steps, fraction_by_step):
    """A schedule returns the fraction of the peak learning rate at each step.

    After a warm-up of 4 steps, the fraction is 1. A decay ends at final_fraction=0.2.
    """
    config = OptimizerConfig(schedule=name, warmup_steps=4, final_fraction=0.2, decay_fraction=0.25)
    steps = list(fraction_by_step)
    expected_fractions = list(fraction_by_step.values())

    fractions = optimizers.schedule(config, num_steps)(jnp.array(steps))

    np.testing.assert_allclose(fractions, expected_fractions, rtol=1e-6)


# Contracts of optimizers and schedules, registered or from outside


def pytest_generate_tests(metafunc):
    chosen(metafunc, 'optimizer', [*OPTIMIZERS, 'lion:lion', 'lion:lion(b1=0.8, b2=0.9)'])
    chosen(metafunc, 'schedule', [*SCHEDULES, 'cooldown:cooldown', 'cooldown:cooldown(decay=0.5)'])


def test_an_optimizer_keeps_its_contract(outside, optimizer):
    """An optimizer lowers a loss, does not change frozen parameters, and decays only matrices.

    `optimizer` is a registered name or an import path. One compiled program serves all learning
    rates and weight decays.
    """
    config = OptimizerConfig(name=optimizer, clip_norm=None)
    embedding = jnp.linspace(-1, 1, 12).reshape(4, 3)
    matrix = jnp.linspace(1, 2, 12).reshape(3, 4)
    bias = jnp.ones(4)
    frozen = jnp.ones((3, 4))
    initial_params = {
        'w_embedding_VD': embedding,
        'blocks': {'w_in_DF': matrix, 'b_in_F': bias, 'w_frozen_DF': frozen},
    }
    fraction_of_schedule = 0.5
    num_steps = 8

    @jax.jit
    def step(params, state, rate, weight_decay):
        """Takes a step on the sum of squares of all parameters except the frozen one."""
        grads = jax.tree.map(lambda p: 2 * p, params)
        grads['blocks']['w_frozen_DF'] *= 0
        transform = optimizers.optimizer(config, rate, weight_decay, fraction=fraction_of_schedule)
        updates, state = transform.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    def params_after_steps(rate, weight_decay):
        params = initial_params
        # The initial state does not depend on the rate and the decay, so both are 0 here.
        state = optimizers.optimizer(config, 0.0, 0.0).init(initial_params)
        for _ in range(num_steps):
            params, state = step(params, state, rate, weight_decay)
        return params

    # Steps without decay lower the sum of squares.
    params = params_after_steps(rate=0.02, weight_decay=0.0)
    assert jnp.sum(params['w_embedding_VD'] ** 2) < jnp.sum(embedding**2)
    assert jnp.sum(params['blocks']['w_in_DF'] ** 2) < jnp.sum(matrix**2)
    assert jnp.sum(params['blocks']['b_in_F'] ** 2) < jnp.sum(bias**2)
    np.testing.assert_array_equal(params['blocks']['w_frozen_DF'], frozen)

    # With a learning rate of 0, only the decay changes parameters: matrices that are not frozen.
    weight_decay = 0.1
    params = params_after_steps(rate=0.0, weight_decay=weight_decay)
    factor_per_step = 1 - fraction_of_schedule * weight_decay
    expected_embedding = factor_per_step**num_steps * embedding
    np.testing.assert_allclose(params['w_embedding_VD'], expected_embedding, rtol=1e-5)
    np.testing.assert_array_equal(params['blocks']['b_in_F'], bias)
    np.testing.assert_array_equal(params['blocks']['w_frozen_DF'], frozen)

    # Both calls of `params_after_steps` used the same program.
    num_compiled_programs = step._cache_size()
    assert num_compiled_programs == 1


def test_a_schedule_keeps_its_contract(outside, schedule):
    """A schedule rises to 1 in the warm-up, stays between 0 and 1, and may decay.

    Its values are fractions of the peak learning rate. A decay ends at `final_fraction`. `schedule`
    is a registered name or an import path.
    """
    num_steps = 60
    config = OptimizerConfig(schedule=schedule, warmup_steps=4, final_fraction=0.1)
    check_optimizer(config, num_steps)

    fraction_of_step = optimizers.schedule(config, num_steps)
    fractions = np.asarray(jax.vmap(fraction_of_step)(jnp.arange(num_steps + 1)))

    # The steps 0 to 3 of the warm-up have the fractions 1/5 to 4/5. Step 4 has the full rate.
    np.testing.assert_allclose(fractions[:5], [0.2, 0.4, 0.6, 0.8, 1.0], rtol=1e-5)
    assert np.all(fractions >= 0)
    assert np.all(fractions <= 1 + 1e-6)  # 1, with room for rounding
    if config.decays:
        np.testing.assert_allclose(fractions[-1], 0.1, rtol=1e-5)


STRANGE_MODULE = """
import optax
def returns_nothing(config, learning_rate, weight_decay): pass
def fails(config, learning_rate, weight_decay): raise KeyError('x')
def ends_at_a_third(config, decay_steps): return lambda steps: 1 - 2 * steps / decay_steps / 3
def divides_by_zero(config, decay_steps): return lambda steps: 1 / (steps - decay_steps)
"""


@pytest.fixture
def strange_module(outside):
    """Puts STRANGE_MODULE on the path as `strange`."""
    (outside / 'strange.py').write_text(STRANGE_MODULE)
    yield
    sys.modules.pop('strange', None)


@pytest.mark.parametrize(
    ('fields', 'message'),
    [
        pytest.param(
            {'name': 'best'},
            "unknown optimizer.name 'best'; known: adamw, muon, sgd, or an import path",
            id='unknown name',
        ),
        pytest.param(
            {'name': 'adamw(b1=1.0)'},
            "adamw has no option 'b1'; it takes none",
            id='unknown option',
        ),
        pytest.param(
            {'name': 'cooldown:cooldown'},
            r'is not a function \(config, learning_rate, weight_decay',
            id='a schedule as optimizer',
        ),
        pytest.param(
            {'name': 'strange:returns_nothing'},
            'must return an optax.GradientTransformation, not None',
            id='an optimizer returns None',
        ),
        pytest.param(
            {'name': 'strange:fails'},
            "name='strange:fails' fails, KeyError in .*strange.py, line 4",
            id='an optimizer fails',
        ),
        pytest.param(
            {'schedule': 'strange:divides_by_zero'},
            'fails, ZeroDivisionError in .*strange.py, line 6: ',
            id='a schedule fails',
        ),
        pytest.param(
            {'schedule': 'strange:ends_at_a_third'},
            'final_fraction=0.0 must be 0.3333, where optimizer.schedule=',
            id='a schedule has another end',
        ),
    ],
)
def test_an_invalid_optimizer_or_schedule_is_refused(strange_module, fields, message):
    """`strange_module` puts the module `strange` on the path, whose functions break the rules.

    In this module, `fails` is in line 4 and `divides_by_zero` in line 6. `ends_at_a_third` goes
    from 1 to 1/3, but `final_fraction` is 0.0 by default.
    """
    with refused(message):
        check_optimizer(OptimizerConfig(**fields), num_steps=1000)


def test_the_end_of_a_schedule_is_not_checked_without_steps_after_the_warmup(strange_module):
    """Such a config is refused elsewhere."""
    config = OptimizerConfig(schedule='strange:ends_at_a_third')
    assert config.warmup_steps >= 50
    check_optimizer(config, num_steps=50)


def test_a_schedule_from_outside_anneals_with_a_low_final_fraction():
    name = 'strange:ends_at_a_third'
    low = OptimizerConfig(schedule=name, final_fraction=0.1)
    high = OptimizerConfig(schedule=name, final_fraction=1 / 3)
    assert low.anneals
    assert high.decays
    assert not high.anneals


@pytest.mark.parametrize('options', ['', '()'])
def test_linear_cosine_and_wsd_schedules_decay(options):
    decaying = [name for name in SCHEDULES if OptimizerConfig(schedule=name + options).decays]
    assert decaying == ['linear', 'cosine', 'wsd']
