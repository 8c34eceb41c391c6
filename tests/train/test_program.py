"""From one trial to a stack: lifting and its choice; where the time of its run goes."""

import types
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.config import MeshConfig
from qkattn.storage.records import read_json
from qkattn.train import program, sharding, timing
from qkattn.train.chips import peak_flops
from qkattn.train.loop import compile_program, train
from qkattn.train.timing import Clock, Trace


def lengths_of_loops(jaxpr):
    """The lengths of a program's outermost loops."""
    return [e.params['length'] for e in jaxpr.eqns if e.primitive.name == 'scan']


@pytest.mark.parametrize('lifting', ['vmap', 'map'])
def test_a_single_trial_has_no_axis(lifting):
    square = program.map_over_trials(lambda a, b: a @ b, lifting, sharding.make_mesh(MeshConfig()))
    jaxpr = jax.make_jaxpr(square)(jnp.ones((1, 4, 3)), jnp.ones((1, 3, 5))).jaxpr
    products = [e for e in jaxpr.eqns if e.primitive.name == 'dot_general']
    assert [product.outvars[0].aval.shape for product in products] == [(4, 5)]
    assert not lengths_of_loops(jaxpr)


@pytest.mark.parametrize('lifting', ['vmap', 'map'])
def test_trials_keep_their_order_over_slices_of_the_mesh(lifting):
    double = program.map_over_trials(
        lambda a: 2 * a, lifting, sharding.make_mesh(MeshConfig(trial=2))
    )
    x_XD = np.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(jax.jit(double)(x_XD), 2 * x_XD)


def test_map_takes_all_steps_of_a_trial_before_those_of_the_next(tiny):
    steps = {'steps_per_dispatch': 3, 'log_every': 3}
    config = tiny(trials={'seeds': (0, 1, 2, 3, 4)}, train=steps)
    mesh = sharding.make_mesh(MeshConfig())

    def lengths(lifting):
        steps = program.train_steps(config, lifting, mesh)
        return lengths_of_loops(jax.make_jaxpr(steps)(*program.abstract_inputs(config, mesh)).jaxpr)

    # The outermost loop is over 5 trials, or over 3 steps of all trials.
    assert (lengths('map'), lengths('vmap')) == ([5], [3])


def test_auto_keeps_the_faster_lifting(small, tmp_path, monkeypatch, evaluation_only):
    config = small(train={'lifting': 'auto'})
    built = program.build(config)
    assert set(built.measured) == {'map', 'vmap'}
    assert all(1e-6 < seconds < 600 for seconds in built.measured.values())

    # Where map takes 0.2 s a step and vmap 0.1 s, vmap is compiled and recorded.
    seconds = iter([0.2, 0.1])
    monkeypatch.setattr(program, 'seconds_per_dispatch', lambda *a: next(seconds))
    recorded = {'lifting': 'vmap', 'seconds_per_step': {'map': 0.2, 'vmap': 0.1}}
    for _ in range(2):  # a later start does not measure (the iterator is used up)
        assert compile_program(config, tmp_path).lifting == 'vmap'
        assert read_json(tmp_path / 'lifting.json', {}) == recorded

    # A single trial needs no measurement.
    one = program.build(small(train={'lifting': 'auto'}, trials={'seeds': (0,)}))
    assert one.lifting == 'vmap' and one.measured == {}


def test_the_choice_of_a_lifting_is_logged_in_plain_words(caplog):
    caplog.set_level('INFO', 'qkattn')
    program._fastest({'map': 0.2, 'vmap': 0.1})
    assert caplog.messages == [
        'a step takes 0.2 s with the trials one after another, 0.1 s with the trials side by side; '
        'the faster way is kept'
    ]


@pytest.mark.parametrize(('devices', 'levels'), [(1, [3, 1]), (2, [])])
def test_one_cpu_device_compiles_without_the_notice_of_xla(monkeypatch, devices, levels):
    """Messages of the partitioner stay."""
    monkeypatch.delenv('TF_CPP_MIN_LOG_LEVEL', raising=False)
    calls: list[int] = []
    monkeypatch.setattr(program.utils, 'absl_set_min_log_level', calls.append)
    with program._without_slow_compile_notice(sharding.make_mesh(MeshConfig(data=devices))):
        assert calls == levels[:1]
    assert calls == levels


# Times


@pytest.fixture
def wait(monkeypatch):
    """wait(seconds) moves the time of the module, which otherwise stands still."""
    now = 100.0

    def wait(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(timing, 'time', types.SimpleNamespace(perf_counter=lambda: now))
    return wait


def test_waits_for_inputs_are_a_part_of_the_time(wait):
    clock = Clock({})
    for _ in clock.inputs(wait(2) for _ in range(3)):
        wait(7)  # what is done with a batch is no wait
    assert clock.seconds == {'train_seconds': 0, 'input_seconds': 6, 'logging_seconds': 0}


def test_a_resumed_run_adds_to_its_times(wait):
    clock = Clock({'train_seconds': 40.0, 'logging_seconds': 2.0})
    # Of training, 0.5 s are logging and 1.5 s are steps; the pause of 11 s is not counted.
    clock.start()
    with clock.counted_as('logging_seconds'):
        wait(0.5)
    clock.pause(tokens=10)
    wait(11)
    clock.start()
    wait(1.5)
    clock.pause(tokens=10)
    assert clock.seconds == {'train_seconds': 42, 'input_seconds': 0, 'logging_seconds': 2.5}
    assert clock.tokens_per_second == 10


def test_steps_per_second_and_input_share_of_a_lap_leave_out_pauses(wait):

    # A second each of input and of training, then a pause; and 2 s more.
    clock = Clock({'train_seconds': 40.0, 'input_seconds': 3.0}, step=5)
    clock.start()
    next(clock.inputs(wait(1) for _ in range(1)))
    wait(1)
    clock.pause(tokens=0)
    wait(100)
    clock.start()
    wait(2)
    assert clock.lap(step=7) == (2 / 4, 1 / 4)
    wait(2)
    clock.pause(tokens=0)
    wait(100)
    assert clock.lap(step=8) == (1 / 2, 0)


def test_the_peak_rate_is_of_a_device_that_jax_names():
    assert peak_flops('NVIDIA H100 80GB HBM3') == 989e12
    assert peak_flops('TPU7x') == 2307e12 / 2  # a chip is two devices
    assert peak_flops('NVIDIA H100 PCIe') is None
    assert peak_flops(jax.devices('cpu')[0].device_kind) is None


@pytest.mark.parametrize(('number', 'calls'), [(9, '001112'), (4, '0011'), (2, '00')])
def test_the_third_to_the_fifth_dispatch_are_traced(tmp_path, monkeypatch, caplog, number, calls):
    """The calls of the profiler so far, at each dispatch, and after the end."""
    profiler = Mock()
    seen = ''
    monkeypatch.setattr(timing.jax, 'profiler', profiler)
    with Trace(tmp_path) as trace:
        for _ in range(number):
            trace.before_dispatch(None)
            seen += str(len(profiler.method_calls))
    assert seen[:6] == calls
    is_traced = number > 2
    names = [call[0] for call in profiler.method_calls]
    assert names == (['start_trace', 'stop_trace'] if is_traced else [])
    warning = 'begins at dispatch 3 of a start, and this one had 2'
    assert (warning in caplog.text) == (not is_traced)


def test_a_trace_ends_where_a_run_fails(tmp_path, monkeypatch, caplog):
    profiler = Mock()
    monkeypatch.setattr(timing.jax, 'profiler', profiler)
    with pytest.raises(RuntimeError), Trace(tmp_path) as trace:
        for _ in range(3):
            trace.before_dispatch(None)
        raise RuntimeError
    assert [call[0] for call in profiler.method_calls] == ['start_trace', 'stop_trace']
    assert 'no trace' not in caplog.text


@pytest.mark.slow
def test_training_with_profile_writes_a_trace(small, tmp_path):
    train(small(trials={'seeds': (0,)}), tmp_path / 'run', profile=f'{tmp_path}/trace')
    assert len(list((tmp_path / 'trace').rglob('*.xplane.pb'))) == 1
