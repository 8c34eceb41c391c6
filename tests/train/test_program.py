"""From one trial to a stack: lifting and its choice."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.config import MeshConfig
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
