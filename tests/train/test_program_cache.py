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
    """The directory in JAX_COMPILATION_CACHE_DIR, which does not exist yet.

    JAX keeps compiled programs there after a call of `keep_programs`. When a test ends, the
    settings of JAX's cache are restored.
    """
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
    """A list of what JAX has found when it looked for programs in its cache.

    'cache_hits' is a program that JAX has loaded. 'cache_misses' is a program that JAX has compiled
    and kept. While the cache is off, nothing is added.
    """
    events = []

    def listen(event, **_):
        """Is called by JAX with an event such as '/jax/compilation_cache/cache_hits'."""
        name = event.rpartition('/')[2]
        if name in ('cache_hits', 'cache_misses'):
            events.append(name)

    jax.monitoring.register_event_listener(listen)
    yield events
    jax.monitoring.unregister_event_listener(listen)


def compile_and_run():
    """Runs a program, which JAX has to compile or load as in a new process."""
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
            id='the variable of JAX comes first',
        ),
        pytest.param(
            {'XDG_CACHE_HOME': '/xdg', 'JAX_COMPILATION_CACHE_DIR': '/named', 'NPROC': '2'},
            '/named/2-cores',
            id='NPROC is the number of cores',
        ),
    ],
)
def test_environment_variables_name_the_directory(monkeypatch, variables, directory):
    """Each number of cores has its own directory, because XLA compiles other programs for it."""
    set_num_cores(monkeypatch, 3)
    monkeypatch.setenv('HOME', '/home/reader')
    for name in ('JAX_COMPILATION_CACHE_DIR', 'NPROC'):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert program_cache.directory() == Path(directory)


@pytest.mark.usefixtures('cache_directory')  # restores the settings of JAX
@pytest.mark.parametrize('url', ['gs://runs/programs', 'gs://runs/programs/'])
def test_a_bucket_has_a_directory_for_each_number_of_cores(monkeypatch, url):
    monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', url)
    monkeypatch.setenv('NPROC', '3')
    keep_programs()
    # JAX opens the bucket itself when it compiles, which this test does not do.
    assert jax.config.jax_compilation_cache_dir == 'gs://runs/programs/3-cores'


def test_a_program_is_compiled_once_and_then_loaded(cache_directory, cache_events):
    """Each time JAX looks for a program in its cache, `cache_events` gets an event."""
    keep_programs()
    mode = program_cache.directory().stat().st_mode
    permissions_of_others = mode & 0o77
    assert permissions_of_others == 0

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
    program_file = files[0]
    first_bytes = program_file.read_bytes()[:99]
    program_file.write_bytes(first_bytes)

    result_after_damage = compile_and_run()

    np.testing.assert_array_equal(result_after_damage, result)


def test_programs_for_other_cores_are_not_loaded(cache_directory, cache_events, monkeypatch):
    """XLA compiles other programs for another number of cores, but JAX gives both the same key."""
    keep_programs()
    compile_and_run()

    set_num_cores(monkeypatch, 1000)
    keep_programs()
    compile_and_run()

    # The same program was compiled twice, once for each number of cores.
    assert cache_events == ['cache_misses', 'cache_misses']


def test_without_cache_programs_are_neither_loaded_nor_kept(cache_directory, cache_events):
    """In a block `with without_cache()`, JAX does not use its cache.

    Each time JAX looks for a program in its cache, `cache_events` gets an event.
    """
    keep_programs()
    with without_cache():
        compile_and_run()
    assert cache_events == []

    # The program was not kept in the block, so it is compiled again, and now it is kept.
    compile_and_run()
    assert cache_events == ['cache_misses']

    # In a second block, the kept program is not loaded.
    with without_cache():
        compile_and_run()
    assert cache_events == ['cache_misses']


def test_a_user_can_switch_the_cache_of_jax_off(cache_directory, cache_events):
    jax.config.update('jax_enable_compilation_cache', False)
    keep_programs()
    compile_and_run()
    assert cache_events == []


def assert_no_programs_are_kept(cache_directory, cache_events, caplog):
    """Asserts that `keep_programs` turns the cache off, with a warning that names the directory."""
    cache_events.clear()
    keep_programs()
    compile_and_run()
    assert cache_events == []  # JAX did not look for the program in its cache
    assert len(caplog.messages) == 1
    assert 'compiled programs are not kept' in caplog.text
    assert str(cache_directory) in caplog.text


def test_a_file_in_place_of_the_directory_keeps_no_programs(cache_directory, cache_events, caplog):
    cache_directory.write_text('in its place')
    assert_no_programs_are_kept(cache_directory, cache_events, caplog)


def test_a_directory_that_others_can_write_to_keeps_no_programs(
    cache_directory, cache_events, caplog
):
    """Programs in the directory are executed, so nobody else may put one there."""
    keep_programs()
    compile_and_run()
    # The group may write to the directory. Kubernetes gives volumes with an fsGroup this mode.
    program_cache.directory().chmod(0o2770)
    assert_no_programs_are_kept(cache_directory, cache_events, caplog)


def test_the_directory_of_another_user_keeps_no_programs(
    cache_directory, cache_events, caplog, monkeypatch
):
    """Programs in the directory are executed, so nobody else may put one there."""
    keep_programs()
    compile_and_run()
    # Pretend that the process now belongs to another user than the directory.
    monkeypatch.setattr(os, 'geteuid', Mock(return_value=os.geteuid() + 1))
    assert_no_programs_are_kept(cache_directory, cache_events, caplog)


@pytest.fixture
def users_cache(cache_directory, tmp_path, monkeypatch):
    """The default cache of a user: three programs of 100 bytes, with a limit of 200 bytes.

    'old-cache' was last used at time 5, and the other two at time 9. This cache is not used while
    JAX_COMPILATION_CACHE_DIR is set.
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
    # The limit of 200 bytes has room for two of the three programs.
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
    """Runs that differ only in seeds, learning rates and weight decays have the same program.

    These settings are arguments of the program. A study first tunes them for a variant of
    attention, and then trains the variant with fresh seeds.
    """

    def program_text(**trials):
        config = small(trials=trials)
        mesh = sharding.make_mesh(config.mesh)
        state, hyper, batch = program.abstract_inputs(config, mesh)
        return program.lower(config, 'map', mesh, state, hyper, batch).as_text()

    text = program_text(seeds=(0, 1), learning_rates=(1e-2,))
    other_text = program_text(seeds=(5, 7), learning_rates=(3e-3,), weight_decays=(0.3,))
    assert text == other_text
