"""From one trial to a stack: lifting, its choice, and what it becomes on a GPU."""

import collections
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.config import Config, MeshConfig, ModelConfig, TrainConfig, TrialsConfig
from qkattn.storage.records import read_json
from qkattn.train import program, sharding
from qkattn.train.loop import build_program


def loops(jaxpr):
    """The lengths of a program's outermost loops."""
    return [e.params['length'] for e in jaxpr.eqns if e.primitive.name == 'scan']


@pytest.mark.parametrize('lifting', ['vmap', 'map'])
def test_a_single_trial_has_no_axis_and_several_keep_their_order_over_slices(lifting):
    square = program.lift(lambda a, b: a @ b, lifting, sharding.make_mesh(MeshConfig()))
    jaxpr = jax.make_jaxpr(square)(jnp.ones((1, 4, 3)), jnp.ones((1, 3, 5))).jaxpr
    (product,) = (e for e in jaxpr.eqns if e.primitive.name == 'dot_general')
    assert product.outvars[0].aval.shape == (4, 5) and not loops(jaxpr)
    double = program.lift(lambda a: 2 * a, lifting, sharding.make_mesh(MeshConfig(trial=2)))
    x_XD = np.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(jax.jit(double)(x_XD), 2 * x_XD)


def test_map_takes_all_steps_of_a_trial_before_those_of_the_next(tiny):
    steps = {'steps_per_dispatch': 3, 'log_every': 3}
    config = tiny(trials={'seeds': (0, 1, 2, 3, 4)}, train=steps)
    mesh = sharding.make_mesh(MeshConfig())

    def lengths(lifting):
        steps = program.train_steps(config, lifting, mesh)
        return loops(jax.make_jaxpr(steps)(*program.abstract_inputs(config, mesh)).jaxpr)

    assert (lengths('map'), lengths('vmap')) == ([5], [3])


def lowered(trials, lifting):
    """Counts of loops, and of products with and without a batch, in a step for CUDA."""
    sizes = {'num_layers': 2, 'd_model': 32, 'num_heads': 2, 'context': 16, 'vocab_size': 32}
    config = Config(
        model=ModelConfig(compute_dtype='bfloat16', **sizes),
        train=TrainConfig(batch_size=2, steps_per_dispatch=2, lifting=lifting),
        trials=TrialsConfig(seeds=tuple(range(trials)), learning_rates=(1e-3,)),
    )
    mesh = sharding.make_mesh(config.mesh)
    steps = jax.jit(program.train_steps(config, lifting, mesh))
    traced = steps.trace(*program.abstract_inputs(config, mesh))
    text = traced.lower(lowering_platforms=('cuda',)).as_text()
    counts = collections.Counter({'loop': text.count('stablehlo.while')})
    for line in re.findall('.*stablehlo.dot_general.*', text):
        counts['batched' if 'batching_dims = ' in line else 'product'] += 1
    return counts


def test_products_are_batched_side_by_side_and_in_one_more_loop_one_after_another():
    one, stack = (lowered(trials, 'vmap') for trials in (1, 8))
    assert one['product'] > 20 and stack['product'] == 0
    assert stack['batched'] == one['product'] + one['batched']
    assert stack['loop'] == one['loop']
    one, stack = (lowered(trials, 'map') for trials in (1, 8))
    assert stack == one + collections.Counter(['loop'])


def test_auto_keeps_the_faster_lifting(small, tmp_path, monkeypatch, evaluation_only):
    config = small(train={'lifting': 'auto'})
    built = program.build(config)
    assert set(built.measured) == {'map', 'vmap'}
    assert all(1e-6 < seconds < 600 for seconds in built.measured.values())
    seconds = iter([0.2, 0.1])
    monkeypatch.setattr(program, 'seconds_per_dispatch', lambda *a: next(seconds))
    recorded = {'lifting': 'vmap', 'seconds_per_step': {'map': 0.2, 'vmap': 0.1}}
    for _ in range(2):  # a later start does not measure (the iterator is used up)
        assert build_program(config, tmp_path).lifting == 'vmap'
        assert read_json(tmp_path / 'lifting.json', {}) == recorded
    one = program.build(small(train={'lifting': 'auto'}, trials={'seeds': (0,)}))
    assert one.lifting == 'vmap' and one.measured == {}
