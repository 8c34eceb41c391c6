"""Lifting functions of one trial to many trials, and the times of a run."""

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
    return [eqn.params['length'] for eqn in jaxpr.eqns if eqn.primitive.name == 'scan']


@pytest.mark.parametrize('lifting', ['vmap', 'map'])
def test_a_single_trial_has_no_axis_in_the_program(lifting):
    """A program of a single trial has neither an axis of trials nor a loop over trials."""
    mesh = sharding.make_mesh(MeshConfig())
    matmul = program.map_over_trials(lambda a, b: a @ b, lifting, mesh)

    jaxpr = jax.make_jaxpr(matmul)(jnp.ones((1, 4, 3)), jnp.ones((1, 3, 5))).jaxpr

    # The only matrix product is [4, 3] times [3, 5]. The leading axis of size 1 is gone.
    products = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == 'dot_general']
    shapes = [product.outvars[0].aval.shape for product in products]
    assert shapes == [(4, 5)]
    assert not lengths_of_loops(jaxpr)


@pytest.mark.parametrize('lifting', ['vmap', 'map'])
def test_trials_keep_their_order_over_slices_of_the_mesh(lifting):
    mesh = sharding.make_mesh(MeshConfig(trial=2))
    double = program.map_over_trials(lambda x_D: 2 * x_D, lifting, mesh)
    x_XD = np.arange(12.0).reshape(4, 3)
    np.testing.assert_array_equal(jax.jit(double)(x_XD), 2 * x_XD)


@pytest.mark.parametrize(
    ('lifting', 'length_of_outermost_loop'),
    [
        pytest.param('map', 5, id='map loops over trials'),
        pytest.param('vmap', 3, id='vmap loops over steps'),
    ],
)
def test_the_outermost_loop_is_over_trials_or_steps(tiny, lifting, length_of_outermost_loop):
    """A program takes 3 training steps of 5 trials.

    The lifting 'map' computes all steps of one trial before the next trial. 'vmap' computes one
    step of all trials before the next step.
    """
    three_steps = {'steps_per_dispatch': 3, 'log_every': 3}
    five_trials = {'seeds': (0, 1, 2, 3, 4)}
    config = tiny(trials=five_trials, train=three_steps)
    mesh = sharding.make_mesh(MeshConfig())

    train_steps = program.train_steps(config, lifting, mesh)
    state, hyper, batch = program.abstract_inputs(config, mesh)
    jaxpr = jax.make_jaxpr(train_steps)(state, hyper, batch).jaxpr

    assert lengths_of_loops(jaxpr) == [length_of_outermost_loop]


def test_auto_measures_both_liftings(small, evaluation_only):
    built = program.build(small(train={'lifting': 'auto'}))
    assert built.measured.keys() == {'map', 'vmap'}
    for seconds in built.measured.values():
        assert 1e-6 < seconds < 600


def test_auto_keeps_the_faster_lifting(small, tmp_path, monkeypatch, evaluation_only):
    """With lifting='auto', the first start of a run measures both liftings and records the faster.

    The lifting 'map' computes trials one after another, 'vmap' side by side. Later starts of the
    run read the recorded lifting and measure nothing.
    """
    config = small(train={'lifting': 'auto'})
    # The first measurement is 'map' and the second is 'vmap'. A third one would raise an error.
    seconds = iter([0.2, 0.1])
    monkeypatch.setattr(program, 'seconds_per_dispatch', lambda *_: next(seconds))

    first_start = compile_program(config, tmp_path)
    recorded = read_json(tmp_path / 'lifting.json', {})
    assert first_start.lifting == 'vmap'
    assert recorded == {'lifting': 'vmap', 'seconds_per_step': {'map': 0.2, 'vmap': 0.1}}

    second_start = compile_program(config, tmp_path)
    assert second_start.lifting == 'vmap'
    assert read_json(tmp_path / 'lifting.json', {}) == recorded


def test_auto_measures_nothing_for_a_single_trial(small, evaluation_only):
    config = small(train={'lifting': 'auto'}, trials={'seeds': (0,)})
    built = program.build(config)
    assert built.lifting == 'vmap'
    assert built.measured == {}


def test_the_choice_of_a_lifting_is_logged(caplog):
    caplog.set_level('INFO', 'qkattn')
    program._fastest({'map': 0.2, 'vmap': 0.1})
    assert caplog.messages == [
        'a step takes 0.2 s with the trials one after another, 0.1 s with the trials side by side; '
        'the faster way is kept'
    ]


@pytest.fixture
def log_levels_of_xla(monkeypatch):
    """A list of the levels to which the messages of XLA would be set. No level is really set."""
    levels: list[int] = []
    monkeypatch.delenv('TF_CPP_MIN_LOG_LEVEL', raising=False)
    monkeypatch.setattr(program.utils, 'absl_set_min_log_level', levels.append)
    return levels


def test_one_cpu_device_compiles_without_messages_of_xla(log_levels_of_xla):
    fatal_errors = 3
    warnings = 1
    mesh = sharding.make_mesh(MeshConfig(data=1))
    with program._without_slow_compile_notice(mesh):
        assert log_levels_of_xla == [fatal_errors]
    assert log_levels_of_xla == [fatal_errors, warnings]


def test_two_devices_compile_with_messages_of_xla(log_levels_of_xla):
    """With two devices, messages may come from XLA's partitioner, so none are hidden."""
    mesh = sharding.make_mesh(MeshConfig(data=2))
    with program._without_slow_compile_notice(mesh):
        assert log_levels_of_xla == []
    assert log_levels_of_xla == []


# Times


@pytest.fixture
def wait(monkeypatch):
    """Returns a function wait(seconds) that moves the clock of `timing` forward.

    Otherwise the clock stands still, so a test knows all times exactly.
    """
    now = 100.0

    def wait(seconds):
        nonlocal now
        now += seconds

    monkeypatch.setattr(timing, 'time', types.SimpleNamespace(perf_counter=lambda: now))
    return wait


def test_waits_for_inputs_are_counted(wait):
    """The clock stands still except in `wait(seconds)`."""
    clock = Clock(record={})  # no times of earlier starts
    num_inputs = 3

    def slow_inputs():
        for _ in range(num_inputs):
            wait(2)
            yield

    for _ in clock.inputs(slow_inputs()):
        wait(7)  # training on the input

    # Training time would count from `clock.start`, which is not called here.
    assert clock.seconds == {
        'train_seconds': 0,
        'input_seconds': num_inputs * 2,
        'logging_seconds': 0,
    }


def test_a_resumed_run_adds_to_its_times(wait):
    """Times include the times in the checkpoint. The speed includes only this start.

    The clock stands still except in `wait(seconds)`. Training time includes logging.
    """
    clock = Clock({'train_seconds': 40.0, 'logging_seconds': 2.0})

    # Train 10 tokens in 0.5 s, all of it spent on logging.
    clock.start()
    with clock.counted_as('logging_seconds'):
        wait(0.5)
    clock.pause(tokens=10)
    wait(11)  # in the pause, so it is not counted

    # Train 10 tokens in 1.5 s.
    clock.start()
    wait(1.5)
    clock.pause(tokens=10)

    assert clock.seconds == {
        'train_seconds': 40 + 0.5 + 1.5,
        'logging_seconds': 2 + 0.5,
        'input_seconds': 0,  # no time in the checkpoint, and no wait for input since
    }
    tokens_of_this_start = 10 + 10
    seconds_of_this_start = 0.5 + 1.5
    assert clock.tokens_per_second == tokens_of_this_start / seconds_of_this_start


def test_a_lap_leaves_out_pauses(wait):
    """A lap is the speed of training since the last lap. It leaves out pauses.

    The clock stands still except in `wait(seconds)`.
    """
    # The run resumes at step 5, so these earlier times do not count.
    clock = Clock({'train_seconds': 40.0, 'input_seconds': 3.0}, step=5)

    def slow_input():
        wait(1)
        yield

    # The first lap has two steps in 1 + 1 + 2 = 4 s. One second is a wait for input.
    clock.start()
    next(clock.inputs(slow_input()))
    wait(1)
    clock.pause(tokens=0)
    wait(100)
    clock.start()
    wait(2)
    lap = clock.lap(step=5 + 2)
    assert lap.steps_per_second == 2 / 4
    assert lap.input_wait_fraction == 1 / 4

    # The second lap has one step in 2 s, without a wait for input.
    wait(2)
    clock.pause(tokens=0)
    wait(100)
    lap = clock.lap(step=5 + 2 + 1)
    assert lap.steps_per_second == 1 / 2
    assert lap.input_wait_fraction == 0


def test_peak_flops_are_known_by_the_device_kind_of_jax():
    assert peak_flops('NVIDIA H100 80GB HBM3') == 989e12
    assert peak_flops('TPU7x') == 2307e12 / 2  # a chip has two devices
    assert peak_flops('NVIDIA H100 PCIe') is None
    assert peak_flops(jax.devices('cpu')[0].device_kind) is None


@pytest.fixture
def profiler(monkeypatch):
    """A mock in place of the profiler of JAX."""
    profiler = Mock()
    monkeypatch.setattr(timing.jax, 'profiler', profiler)
    return profiler


def names_of_calls(mock):
    return [call[0] for call in mock.method_calls]


@pytest.mark.parametrize(
    ('num_dispatches', 'num_calls_by_dispatch'),
    [
        pytest.param(9, [0, 0, 1, 1, 1, 2, 2, 2, 2], id='the trace ends before dispatch 6'),
        pytest.param(4, [0, 0, 1, 1], id='the trace ends after dispatch 4'),
    ],
)
def test_the_dispatches_3_to_5_are_traced(
    tmp_path, profiler, caplog, num_dispatches, num_calls_by_dispatch
):
    """A trace begins before dispatch 3, and ends before dispatch 6 or when training ends.

    A dispatch is a call of the compiled program. `profiler` is a mock of JAX's profiler. Call 1
    starts the trace, and call 2 stops it.
    """
    # The number of calls of the profiler before each dispatch.
    num_calls = []
    with Trace(tmp_path) as trace:
        for _ in range(num_dispatches):
            trace.before_dispatch(None)
            num_calls.append(len(profiler.method_calls))

    assert num_calls == num_calls_by_dispatch
    assert names_of_calls(profiler) == ['start_trace', 'stop_trace']
    # A trace was written, so there is no warning.
    assert 'no trace written' not in caplog.text


def test_a_start_of_two_dispatches_has_no_trace(tmp_path, profiler, caplog):
    with Trace(tmp_path) as trace:
        for _ in range(2):
            trace.before_dispatch(None)

    assert names_of_calls(profiler) == []
    assert 'begins at dispatch 3 of a start, and this one had 2' in caplog.text


def test_a_trace_ends_if_the_run_fails(tmp_path, profiler, caplog):
    """The trace begins before dispatch 3. `profiler` is a mock of JAX's profiler."""
    with pytest.raises(RuntimeError), Trace(tmp_path) as trace:
        for _ in range(3):
            trace.before_dispatch(None)
        raise RuntimeError

    assert names_of_calls(profiler) == ['start_trace', 'stop_trace']
    assert 'no trace' not in caplog.text


@pytest.mark.slow
def test_training_with_profile_writes_a_trace(small, tmp_path):
    config = small(trials={'seeds': (0,)})
    train(config, tmp_path / 'run', profile=f'{tmp_path}/trace')
    traces = list((tmp_path / 'trace').rglob('*.xplane.pb'))
    assert len(traces) == 1
