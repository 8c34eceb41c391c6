"""The cache of compiled programs: what is loaded, compiled again, and deleted."""

import os
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from qkattn.train import program, program_cache, sharding
from qkattn.train.program_cache import keep_programs, without_cache


@pytest.fixture
def cache_directory(tmp_path, monkeypatch):
    """The directory that JAX_COMPILATION_CACHE_DIR names. `keep_programs` turns the cache on."""
    options = ('jax_compilation_cache_dir', 'jax_enable_compilation_cache')
    before = {name: getattr(jax.config, name) for name in options}
    monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'programs'))
    monkeypatch.delenv('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS')
    jax.clear_caches()
    yield tmp_path / 'programs'
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def cache_events():
    """A list that gets 'cache_hits' for each loaded program, and 'cache_misses' for each other."""
    events = []

    def listen(event, **_):
        name = event.rpartition('/')[2]
        if name in ('cache_hits', 'cache_misses'):
            events.append(name)

    jax.monitoring.register_event_listener(listen)
    yield events
    jax.monitoring.unregister_event_listener(listen)


def compile_and_run():
    """Compiles and runs one program, as a process of its own would."""
    jax.clear_caches()
    return np.asarray(jax.jit(lambda x: jnp.sin(x) * 3)(np.ones(5, np.float32)))


def set_num_cores(monkeypatch, num_cores):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: range(num_cores), raising=False)


@pytest.mark.parametrize(
    ('variables', 'directory'),
    [
        pytest.param(
            {'XDG_CACHE_HOME': 'relative'},
            '/home/reader/.cache/qkattn/compiled/3-cores',
            id='a relative path is ignored',
        ),
        pytest.param(
            {'XDG_CACHE_HOME': '/xdg'},
            '/xdg/qkattn/compiled/3-cores',
            id='the cache of the user',
        ),
        pytest.param(
            {'XDG_CACHE_HOME': '/xdg', 'JAX_COMPILATION_CACHE_DIR': '/named'},
            '/named/3-cores',
            id='the variable of JAX',
        ),
        pytest.param(
            {'XDG_CACHE_HOME': '/xdg', 'JAX_COMPILATION_CACHE_DIR': '/named', 'NPROC': '2'},
            '/named/2-cores',
            id='the number of cores',
        ),
    ],
)
def test_environment_variables_name_the_directory(monkeypatch, variables, directory):
    set_num_cores(monkeypatch, 3)
    monkeypatch.setenv('HOME', '/home/reader')
    for name in ('JAX_COMPILATION_CACHE_DIR', 'NPROC'):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert program_cache.directory() == Path(directory)


def test_a_program_is_compiled_once_and_then_loaded(cache_directory, cache_events):
    keep_programs()
    assert program_cache.directory().stat().st_mode & 0o77 == 0  # for this user alone

    first_result = compile_and_run()
    second_result = compile_and_run()

    assert cache_events == ['cache_misses', 'cache_hits']
    np.testing.assert_array_equal(second_result, first_result)


@pytest.mark.filterwarnings('ignore:Error reading persistent compilation cache')
def test_a_damaged_program_is_compiled_again(cache_directory):
    keep_programs()
    result = compile_and_run()
    files = list(cache_directory.glob('*/*'))
    assert len(files) == 1
    files[0].write_bytes(files[0].read_bytes()[:99])

    np.testing.assert_array_equal(compile_and_run(), result)


def test_programs_for_other_cores_are_not_loaded(cache_directory, cache_events, monkeypatch):
    keep_programs()
    compile_and_run()

    set_num_cores(monkeypatch, 1000)
    keep_programs()
    compile_and_run()

    assert cache_events == ['cache_misses', 'cache_misses']


def test_without_cache_programs_are_neither_loaded_nor_kept(cache_directory, cache_events):
    keep_programs()
    with without_cache():
        compile_and_run()
    assert cache_events == []

    compile_and_run()
    assert cache_events == ['cache_misses']

    with without_cache():
        compile_and_run()
    assert cache_events == ['cache_misses']


def test_a_user_can_switch_the_cache_of_jax_off(cache_directory, cache_events):
    jax.config.update('jax_enable_compilation_cache', False)
    keep_programs()
    compile_and_run()
    assert cache_events == []


def assert_no_programs_are_kept(cache_directory, cache_events, caplog):
    cache_events.clear()
    keep_programs()
    compile_and_run()
    assert cache_events == []
    assert len(caplog.messages) == 1
    assert 'compiled programs are not kept' in caplog.text
    assert str(cache_directory) in caplog.text


def test_a_file_in_place_of_the_directory_keeps_no_programs(cache_directory, cache_events, caplog):
    cache_directory.write_text('in its place')
    assert_no_programs_are_kept(cache_directory, cache_events, caplog)


def test_a_directory_that_others_can_write_to_keeps_no_programs(
    cache_directory, cache_events, caplog
):
    keep_programs()
    compile_and_run()
    # As Kubernetes leaves a volume with an fsGroup.
    program_cache.directory().chmod(0o2770)
    assert_no_programs_are_kept(cache_directory, cache_events, caplog)


def test_the_directory_of_another_user_keeps_no_programs(
    cache_directory, cache_events, caplog, monkeypatch
):
    keep_programs()
    compile_and_run()
    monkeypatch.setattr(os, 'geteuid', Mock(return_value=os.geteuid() + 1))
    assert_no_programs_are_kept(cache_directory, cache_events, caplog)


@pytest.fixture
def users_cache(cache_directory, tmp_path, monkeypatch):
    """The cache of a user, with 300 bytes in use and a limit of 200.

    Programs are kept elsewhere while JAX_COMPILATION_CACHE_DIR is set.
    """
    directory = tmp_path / 'qkattn/compiled'
    (directory / '1-cores').mkdir(parents=True)
    (directory / '2-cores').mkdir()
    for name, last_read, last_written in (
        ('1-cores/old-cache', 5, 5),
        ('2-cores/new-cache', 6, 9),
        ('2-cores/used-cache', 9, 5),
    ):
        (directory / name).write_bytes(b'x' * 100)
        os.utime(directory / name, (last_read, last_written))
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    monkeypatch.setattr(program_cache, 'LIMIT', 200)
    return directory


def names_of_programs(directory):
    return sorted(path.name for path in directory.glob('*/*'))


def test_the_least_recently_used_programs_are_deleted(users_cache, monkeypatch, caplog):
    monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR')
    keep_programs()
    assert not caplog.messages
    assert names_of_programs(users_cache) == ['new-cache', 'used-cache']


def test_a_directory_that_the_user_names_has_no_limit(users_cache):
    assert 'JAX_COMPILATION_CACHE_DIR' in os.environ
    keep_programs()
    assert names_of_programs(users_cache) == ['new-cache', 'old-cache', 'used-cache']


def test_a_program_that_another_process_has_just_deleted_is_ignored(
    users_cache, monkeypatch, caplog
):
    (users_cache / '2-cores/gone-cache').symlink_to('nowhere')
    monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR')
    keep_programs()
    assert not caplog.messages


def test_stages_of_an_arm_share_their_program(small):
    """Seeds, learning rates and weight decays are arguments of the program."""

    def program_text(**trials):
        config = small(trials=trials)
        mesh = sharding.make_mesh(config.mesh)
        state, hyper, batch = program.abstract_inputs(config, mesh)
        return program.lower(config, 'map', mesh, state, hyper, batch).as_text()

    other_text = program_text(seeds=(5, 7), learning_rates=(3e-3,), weight_decays=(0.3,))
    assert program_text() == other_text
