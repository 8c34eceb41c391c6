"""Optimizers against optax and by hand, and the schedules."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from qkattn.config import ModelConfig, OptimizerConfig
from qkattn.errors import ConfigError
from qkattn.model.cost import abstract_params
from qkattn.train import train
from qkattn.train.muon import matrix_axes
from qkattn.train.optimizer import OPTIMIZERS, optimizer
from qkattn.train.parameter_names import decayed
from qkattn.train.schedules import schedule
from tests.lanes import only

MODEL = ModelConfig(d_model=8, num_layers=2, num_heads=2, context=4, vocab_size=16, biases=True)
RATE, DECAY = 0.1, 0.5
FRACTIONS = 1.0, 0.25  # of the peak, in the two steps


def trees(model=MODEL, count=3):
    """Parameters and gradients."""
    rng = np.random.default_rng(0)
    return [
        jax.tree.map(
            lambda a: jnp.asarray(rng.standard_normal(a.shape), jnp.float32), abstract_params(model)
        )
        for _ in range(count)
    ]


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
    blocks = path[0].key == 'blocks'
    mu = nu = np.zeros_like(p)
    for t, g in enumerate((first, second), start=1):
        if name == 'sgd':
            mu = g + 0.95 * mu
            u = mu
        elif name == 'muon' and blocks and leaf.startswith('w_'):
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


@pytest.mark.parametrize('decay', ['independent', 'coupled'])
@pytest.mark.parametrize('name', list(OPTIMIZERS))
def test_two_steps_are_those_by_hand(name, decay):
    config = OptimizerConfig(name=name, clip_norm=None, decay=decay)
    params, *grads = trees()

    @jax.jit
    def steps(rate, weight_decay, fractions, params, grads):
        transforms = [optimizer(config, rate, weight_decay, f) for f in fractions]
        return two_steps(transforms, params, *grads)

    got = steps(RATE, DECAY, jnp.array(FRACTIONS), params, grads)
    want = jax.tree_util.tree_map_with_path(
        lambda path, *leaves: by_hand(name, decay, path, *(np.float64(leaf) for leaf in leaves)),
        params,
        *grads,
    )
    jax.tree.map(lambda g, w: np.testing.assert_allclose(g, w, atol=2e-5), got, want)


def test_adamw_is_that_of_optax_and_gradients_are_clipped():
    params, *grads = trees()
    want = optax.chain(
        optax.clip_by_global_norm(1.0),
        optax.adamw(RATE, b1=0.9, b2=0.99, eps=1e-8, weight_decay=DECAY, mask=decayed),
    )
    got = optimizer(OptimizerConfig(decay='coupled'), jnp.float32(RATE), jnp.float32(DECAY))
    both = jax.jit(lambda *trees: [two_steps(2 * [which], *trees) for which in (got, want)])
    jax.tree.map(np.testing.assert_array_equal, *both(params, *grads))


def test_decay_is_of_matrices_and_embeddings_and_muon_trains_the_matrices_of_blocks():
    params = trees(count=1)[0]
    flags = jax.tree_util.tree_leaves_with_path(decayed(params))
    names = {path[-1].key: flag for path, flag in flags}
    assert {name for name, flag in names.items() if not flag} == {
        *('g_D', 'b_D', 'b_q_NH', 'b_k_KH', 'b_v_KH', 'b_o_D', 'b_in_F', 'b_out_D')
    }
    axes = matrix_axes(params)
    assert axes['w_embedding_VD'] is None and axes['blocks']['mlp']['b_in_F'] is None
    assert axes['blocks']['mlp']['w_in_DF'] == ((1,), (2,))
    assert axes['blocks']['attention']['score']['w_q_DNH'] == ((1,), (3,))
    assert axes['blocks']['attention']['value']['w_o_NHD'] == ((2,), (3,))
    both = {'blocks': {'w_mixing_NR': jnp.zeros((5, 2, 3)), 'w_ov_NDE': jnp.zeros((5, 2, 4, 4))}}
    assert matrix_axes(both)['blocks'] == {
        'w_mixing_NR': ((1,), (2,)),
        'w_ov_NDE': ((2,), (3,)),
    }


@pytest.mark.parametrize('name', only(['sgd'], [name for name in OPTIMIZERS if name != 'adamw']))
def test_a_stack_of_trials_learns(tiny, tmp_path, name):
    config = tiny(
        model={'num_layers': 1, 'd_model': 16},
        optimizer={'name': name},
        trials={'learning_rates': (1e-2, 2e-2), 'seeds': (0,)},
        train={'steps_per_dispatch': 4, 'log_every': 4, 'num_steps': 16, 'eval_every': 16},
    )
    results = train(config, tmp_path / name)
    assert all(2 < result['val_loss'] < 5.4 for result in results)
    assert results[0]['val_loss'] != results[1]['val_loss']


@pytest.mark.parametrize('rate', [0.1, 0.4])
@pytest.mark.parametrize('decay', ['independent', 'coupled'])
def test_independent_decay_does_not_depend_on_the_peak_learning_rate(decay, rate):
    params, zero = ({'w_in_DF': jnp.full((2, 3), value)} for value in (1.0, 0.0))
    transform = optimizer(OptimizerConfig(name='sgd', decay=decay), rate, 0.05, 0.5)
    after = two_steps([transform, transform], params, zero, zero)
    kept = (1 - 0.5 * 0.05 * (rate if decay == 'coupled' else 1)) ** 2
    np.testing.assert_allclose(after['w_in_DF'], kept, rtol=1e-6)


@pytest.mark.parametrize('field', ['name', 'schedule'])
def test_an_unknown_name_is_refused_before_anything_is_written(tiny, tmp_path, field):
    with pytest.raises(ConfigError, match=f"unknown optimizer.{field} 'best'; known are"):
        train(tiny(optimizer={field: 'best'}), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
    ('name', 'steps', 'want'),
    [
        ('inverse_sqrt', [0, 1, 3, 4, 16, 64, 400], [1 / 5, 2 / 5, 4 / 5, 1, 1 / 2, 1 / 4, 1 / 10]),
        ('linear', [0, 3, 4, 34, 64], [1 / 5, 4 / 5, 1, 0.6, 0.2]),
        ('cosine', [0, 3, 4, 34, 64], [1 / 5, 4 / 5, 1, 0.6, 0.2]),
        ('cosine', [19], [0.2 + 0.8 * (1 + np.cos(np.pi / 4)) / 2]),
        ('constant', [0, 3, 4, 34, 64], [1 / 5, 4 / 5, 1, 1, 1]),
    ],
)
def test_schedules(name, steps, want):
    config = OptimizerConfig(schedule=name, warmup_steps=4, final_fraction=0.2)
    np.testing.assert_allclose(schedule(config, 64)(jnp.array(steps)), want, rtol=1e-6)
    if name == 'inverse_sqrt':  # independent of the length of the run
        np.testing.assert_allclose(schedule(config, 50)(jnp.array(steps)), want, rtol=1e-6)
