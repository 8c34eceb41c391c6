"""Compiled programs on disk: what is loaded, what is compiled again, and what is deleted."""

import os
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
    """The directory of kept programs, in this process for the time of a test."""
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
def loaded_and_compiled():
    """A function: how many programs were loaded and how many compiled since its last call."""
    events = []

    def listen(event, **_):
        events.append(event.rpartition('/')[2])

    def counted():
        seen = events.count('cache_hits'), events.count('cache_misses')
        events.clear()
        return seen

    jax.monitoring.register_event_listener(listen)
    yield counted
    jax.monitoring.unregister_event_listener(listen)


def compile_and_run():
    """Compiles and runs one program, as a process of its own would."""
    jax.clear_caches()
    return np.asarray(jax.jit(lambda x: jnp.sin(x) * 3)(np.ones(5, np.float32)))


def test_the_directory_is_the_one_named_or_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: range(3), raising=False)
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR')
    # Each variable that is set in addition, and the directory that follows.
    for name, value, where in (
        ('XDG_CACHE_HOME', 'relative', 'home/.cache/qkattn/compiled/3-cores'),
        ('XDG_CACHE_HOME', tmp_path / 'xdg', 'xdg/qkattn/compiled/3-cores'),
        ('JAX_COMPILATION_CACHE_DIR', tmp_path / 'named', 'named/3-cores'),
        ('NPROC', '2', 'named/2-cores'),
    ):
        monkeypatch.setenv(name, str(value))
        assert program_cache.directory() == tmp_path / where


@pytest.mark.filterwarnings('ignore:Error reading persistent compilation cache')
def test_programs_are_loaded_unless_damaged_switched_off_or_for_other_cores(
    cache_directory, loaded_and_compiled, monkeypatch
):
    # A program is compiled once, then loaded. `loaded_and_compiled` counts from its last call on.
    keep_programs()
    assert program_cache.directory().stat().st_mode & 0o77 == 0
    first = compile_and_run()
    assert loaded_and_compiled() == (0, 1)
    np.testing.assert_array_equal(compile_and_run(), first)
    assert loaded_and_compiled() == (1, 0)

    # A damaged file is not loaded.
    (file,) = cache_directory.glob('*/*')
    file.write_bytes(file.read_bytes()[:99])
    np.testing.assert_array_equal(compile_and_run(), first)

    # On a machine with other cores, nothing is loaded; `without_cache` does not even count.
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: range(1000), raising=False)
    keep_programs()
    loaded_and_compiled()
    with without_cache():
        compile_and_run()
    assert loaded_and_compiled() == (0, 0)
    compile_and_run()
    assert loaded_and_compiled() == (0, 1)

    # A user has switched the cache of JAX off.
    jax.config.update('jax_enable_compilation_cache', False)
    keep_programs()
    compile_and_run()
    assert loaded_and_compiled() == (0, 0)


@pytest.mark.parametrize('why', ['a file', 'by mode', 'by owner'])
def test_a_directory_that_cannot_be_trusted_keeps_no_programs(
    cache_directory, loaded_and_compiled, caplog, monkeypatch, why
):
    if why == 'a file':
        cache_directory.write_text('in its place')
    else:
        keep_programs()
        compile_and_run()
    if why == 'by mode':
        program_cache.directory().chmod(0o2770)  # as Kubernetes leaves a volume with an fsGroup
    elif why == 'by owner':
        monkeypatch.setattr(os, 'geteuid', Mock(return_value=os.geteuid() + 1))
    keep_programs()
    loaded_and_compiled()
    compile_and_run()
    assert loaded_and_compiled() == (0, 0)
    (message,) = caplog.messages
    assert 'compiled programs are not kept' in message and str(cache_directory) in message


def test_the_least_recently_used_are_deleted_beyond_a_limit(
    tmp_path, cache_directory, monkeypatch, caplog
):
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path))
    files = {'1-cores/old-cache': (5, 5), '2-cores/new-cache': (6, 9), '2-cores/used-cache': (9, 5)}
    for name, moments in files.items():
        file = tmp_path / 'qkattn/compiled' / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b'x' * 100)
        os.utime(file, moments)
    monkeypatch.setattr(program_cache, 'LIMIT', 200)
    keep_programs()  # of a directory that is named
    assert len(list(tmp_path.glob('qkattn/*/*/*'))) == 3
    monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR')
    keep_programs()
    assert {path.name for path in tmp_path.glob('qkattn/*/*/*')} == {'new-cache', 'used-cache'}
    file.with_name('gone-cache').symlink_to('nowhere')  # as one that another start has just deleted
    keep_programs()
    assert not caplog.messages


def test_stages_of_an_arm_share_their_program(small):
    """Seeds, learning rates and weight decays are its arguments."""

    def text(**trials):
        config = small(trials=trials)
        mesh = sharding.make_mesh(config.mesh)
        inputs = program.abstract_inputs(config, mesh)
        return program.lower(config, 'map', mesh, *inputs).as_text()

    assert text() == text(seeds=(5, 7), learning_rates=(3e-3,), weight_decays=(0.3,))
