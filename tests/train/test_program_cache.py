"""Compiled programs on disk: what is loaded, what is compiled again, and what is deleted."""

import os
import zlib
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import cache_key, compilation_cache

from qkattn.train import placement, program, program_cache, train
from qkattn.train.compiling import without_cache
from qkattn.train.program_cache import keep_programs

OPTIONS = ('jax_compilation_cache_dir', 'jax_enable_compilation_cache')


@pytest.fixture
def kept(tmp_path, monkeypatch):
    """The directory of kept programs, in this process for the time of a test."""
    before = {name: getattr(jax.config, name) for name in OPTIONS}
    monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'programs'))
    monkeypatch.setattr(cache_key, 'custom_hook', cache_key.custom_hook)
    monkeypatch.setattr(compilation_cache, 'get_file_cache', compilation_cache.get_file_cache)
    jax.clear_caches()
    yield tmp_path / 'programs'
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def count(monkeypatch):
    """count() -> programs that were 'loaded' and 'compiled' since the last call."""
    events = Counter()

    def listen(event, **_):
        events[event.rpartition('/')[2]] += 1

    jax.monitoring.register_event_listener(listen)

    def counted():
        found = {'loaded': events['cache_hits'], 'compiled': events['cache_misses']}
        events.clear()
        return found

    yield counted
    jax.monitoring.unregister_event_listener(listen)


def use(start=1.0):
    """Compiles and runs one program, as a process of its own would."""
    jax.clear_caches()
    return np.asarray(jax.jit(lambda x: jnp.sin(x) * 3)(np.full(5, start, np.float32)))


def test_the_directory_is_the_one_named_or_in_the_users_cache(monkeypatch, tmp_path):
    monkeypatch.setenv('HOME', str(tmp_path / 'home'))
    monkeypatch.setenv('QKATTN_DATA', str(tmp_path / 'shared'))
    monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
    monkeypatch.delenv('JAX_COMPILATION_CACHE_DIR')
    assert program_cache.directory() == tmp_path / 'home/.cache/qkattn/compiled'
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'xdg'))
    assert program_cache.directory() == tmp_path / 'xdg/qkattn/compiled'
    monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', str(tmp_path / 'named'))
    assert program_cache.directory() == tmp_path / 'named'


def test_programs_are_kept_and_loaded_by_processes_with_as_many_cores(kept, count, monkeypatch):
    keep_programs()
    assert kept.stat().st_mode & 0o77 == 0
    first = use()
    assert count() == {'loaded': 0, 'compiled': 1}
    np.testing.assert_array_equal(use(), first)
    assert count() == {'loaded': 1, 'compiled': 0}
    monkeypatch.setattr(os, 'sched_getaffinity', lambda _: range(1000), raising=False)
    use()
    assert count() == {'loaded': 0, 'compiled': 1}
    assert len(list(kept.iterdir())) == 2


@pytest.mark.parametrize('damage', [b'', b'not compressed', zlib.compress(b'no program')])
def test_a_damaged_program_is_compiled_again_and_replaced(kept, count, damage, caplog):
    keep_programs()
    first = use()
    (file,) = kept.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage or whole[: len(whole) // 2])
    count()
    np.testing.assert_array_equal(use(), first)
    assert count()['compiled'] == 1
    use()
    assert count() == {'loaded': 1, 'compiled': 0}
    if damage != zlib.compress(b'no program'):
        assert [r.message for r in caplog.records if 'is damaged' in r.message]


def test_a_directory_that_cannot_be_written_is_one_warning(kept, count, caplog):
    kept.write_text('a file in its place')
    keep_programs()
    np.testing.assert_allclose(use(), 3 * np.sin(1.0), rtol=1e-6)
    assert count() == {'loaded': 0, 'compiled': 0}
    (message,) = (r.message for r in caplog.records)
    assert 'compiled programs are not kept' in message and str(kept) in message


def test_a_full_disk_is_one_warning(kept, caplog, monkeypatch):
    def full(*_):
        raise OSError(28, os.strerror(28), str(kept))

    keep_programs()
    monkeypatch.setattr(program_cache, 'write_atomic', full)
    use()
    jax.jit(lambda x: x + 1)(1.0)
    (message,) = (r.message for r in caplog.records)
    assert 'No space left on device' in message


def test_the_least_recently_used_are_deleted_beyond_a_limit(kept, count, monkeypatch):
    keep_programs()
    use()
    (used,) = kept.iterdir()
    size = used.stat().st_size
    for age, name in ((30, 'old-cache'), (20, 'older-than-used-cache'), (10, 'notes.txt')):
        (kept / name).write_bytes(b'x' * size)
        os.utime(kept / name, (0, used.stat().st_mtime - age))
    os.utime(used, (0, 0))
    use()  # is a use, which counts
    monkeypatch.setattr(program_cache, '_limit', lambda: 2 * size)
    keep_programs()
    assert {p.name for p in kept.iterdir()} == {used.name, 'older-than-used-cache', 'notes.txt'}


def test_it_is_switched_off_by_jax_and_by_dry_runs(kept):
    keep_programs()
    with without_cache():
        use()
    assert not list(kept.iterdir())
    jax.config.update('jax_enable_compilation_cache', False)
    keep_programs()
    use()
    assert not list(kept.iterdir())


def test_stages_of_an_arm_share_their_programs_which_are_the_same_to_the_last_bit(
    tiny, kept, count
):
    """Seeds, learning rates and weight decays are arguments of a program."""

    def one_step(**trials):
        config = tiny(model={'num_layers': 1, 'd_model': 16}, trials=trials)
        built = program.build(config)
        batch = placement.constant_batch(config, built.mesh)
        return jax.tree.map(np.asarray, built.train(built.init(), batch))

    keep_programs()
    compiled = one_step()
    assert count()['compiled'] > 1
    one_step(seeds=(5, 7), learning_rates=(3e-3,), weight_decays=(0.3,))
    jax.clear_caches()
    jax.tree.map(np.testing.assert_array_equal, one_step(), compiled)
    found = count()
    assert found['compiled'] == 0 and found['loaded'] > 2


@pytest.mark.slow
def test_a_run_with_loaded_programs_is_bitwise_one_that_compiles(tiny, kept, count, tmp_path):
    config = tiny(model={'num_layers': 1, 'd_model': 16})
    with without_cache():
        train(config, tmp_path / 'compiled')
    keep_programs()
    for name in ('keeps', 'loads'):
        jax.clear_caches()
        train(config, tmp_path / name)
    assert count()['loaded'] > 2
    compiled, loaded = (
        (tmp_path / name / 'metrics.jsonl').read_bytes() for name in ('compiled', 'loads')
    )
    assert loaded == compiled
