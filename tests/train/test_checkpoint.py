"""Checkpoints on every mesh and in several processes; damage costs at most its checkpoint."""

import contextlib
import errno
import json
import os
import shutil
from pathlib import Path
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn import __version__
from qkattn.config import MeshConfig
from qkattn.errors import CheckpointError, DiskError, ReadError
from qkattn.storage import files
from qkattn.storage.files import as_path
from qkattn.storage.records import with_checksum
from qkattn.train import checkpoint
from qkattn.train.checkpoint import Checkpoints, checksums, leaf_names
from qkattn.train.sharding import make_mesh
from tests import damages
from tests.processes import file_size_limit

RECORD = {'data': {'name': 'x'}, 'train_seconds': 2.5}
DTYPES = ('bool', 'int8', 'int32', 'uint8', 'uint32', 'float16', 'bfloat16', 'float32')


def array_of(dtype: str, seed: int = 0, shape=(2, 16, 32)) -> np.ndarray:
    values = np.random.default_rng(seed).normal(size=shape) * 100
    return (values > 0) if dtype == 'bool' else values.astype(jnp.dtype(dtype))


def state_of(step: int) -> dict:
    """The state after a step: arrays of every type, which differ from step to step."""
    params = {dtype: jnp.asarray(array_of(dtype, step)) for dtype in DTYPES}
    trials = {'params': params | {'b_XF': params['float32'][:, 0]}}
    return {'step': jnp.int32(step), 'trials': trials | {'alive': params['bool'][:, 0, 0]}}


def target_on(**axes: int) -> dict:
    """The target of a restore onto a mesh: trials over `trial`, D over `fsdp`, F over the rest."""
    specs = {1: P('trial'), 2: P('trial', 'tensor'), 3: P('trial', 'fsdp', ('data', 'tensor'))}
    mesh = make_mesh(MeshConfig(**axes))

    def placed(a: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, specs.get(a.ndim, P()))
        return jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding)

    return jax.tree.map(placed, state_of(0))


def save(directory, *steps: int, **axes: int) -> None:
    """Saves checkpoints of these steps, with arrays on a mesh of these axes."""
    shardings = jax.tree.map(lambda a: a.sharding, target_on(**axes))
    with contextlib.closing(Checkpoints(directory)) as saved:
        for step in steps:
            saved.save(step, jax.device_put(state_of(step), shardings), RECORD)


def restore_newest(directory, target: dict | None = None) -> tuple[dict, dict]:
    with contextlib.closing(Checkpoints(directory)) as opened:
        return opened.restore(target or target_on())


def rewrite(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_is_restored_bit_for_bit_on_every_mesh(tmp_path):
    """A restore compares checksums, which are the same on every mesh for arrays of every type."""
    save(tmp_path, 3, trial=2, fsdp=2, tensor=2)
    meshes = [{}, {'data': 2}, {'tensor': 2, 'trial': 2}, {'fsdp': 4}, {'fsdp': 2, 'tensor': 4}]
    for axes in [*meshes, {'trial': 2, 'data': 2, 'tensor': 2}]:
        target = target_on(**axes)
        state, record = restore_newest(tmp_path, target)
        jax.tree.map(np.testing.assert_array_equal, state, state_of(3))
        assert jax.tree.all(jax.tree.map(lambda a, t: a.sharding == t.sharding, state, target))
        assert record['train_seconds'] == 2.5 and record['format'] == checkpoint.FORMAT


def test_a_checkpoint_of_a_later_format_is_refused_with_the_version_that_reads_it(tmp_path):
    save(tmp_path, 4, 8)
    path = tmp_path / '8/record/metadata'
    # A later version wrote it, with a field more.
    record = json.loads(path.read_text()) | {'format': 3, 'version': '0.9.1', 'more': []}
    del record['crc32']
    path.write_text(json.dumps(with_checksum(record)))
    message = rf'8 has format 3 .* is qkattn {__version__}, .* format 2; use qkattn 0\.9\.1 or late'
    for _ in range(2):
        with pytest.raises(CheckpointError, match=message):
            restore_newest(tmp_path)
    assert names_in(tmp_path) == ['4', '8']


def test_a_checkpoint_of_another_config_is_refused_each_time(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path, config_hash='abc')) as saved:
        saved.save(4, state_of(4), RECORD)
    message = f"^{tmp_path}/4 is of a run with another configuration .config_hash 'abc', not 'def'"
    for _ in range(2):
        with (
            contextlib.closing(Checkpoints(tmp_path, config_hash='def')) as opened,
            pytest.raises(CheckpointError, match=message),
        ):
            opened.restore(target_on())
    assert names_in(tmp_path) == ['4']
    with contextlib.closing(Checkpoints(tmp_path, config_hash='abc')) as opened:
        assert int(opened.restore(target_on())[0]['step']) == 4


def test_a_checkpoint_without_a_config_hash_is_restored(tmp_path):
    """Earlier versions stored none."""
    save(tmp_path, 4)
    assert 'config_hash' not in json.loads((tmp_path / '4/record/metadata').read_text())
    with contextlib.closing(Checkpoints(tmp_path, config_hash='abc')) as opened:
        assert int(opened.restore(target_on())[0]['step']) == 4


@pytest.mark.parametrize('change', [('2.5', '3.5'), ('"format": 2', '"format": 3')])
def test_a_checkpoint_with_a_changed_record_is_passed_over(tmp_path, caplog, change):
    save(tmp_path, 4, 8)
    rewrite(tmp_path / '8/record/metadata', *change)
    state, record = restore_newest(tmp_path)
    assert (int(state['step']), record['train_seconds']) == (4, 2.5)
    assert 'checkpoint 8 is damaged (record/metadata: ' in caplog.text


def test_a_checkpoint_with_a_changed_array_is_passed_over(tmp_path, monkeypatch, caplog):
    save(tmp_path, 4)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, 'checksums', lambda state: checksums(state).at[1].add(1))
        save(tmp_path, 8)
    state, record = restore_newest(tmp_path)
    assert (int(state['step']), record['train_seconds']) == (4, 2.5)
    name = leaf_names(state_of(0))[1]
    assert f'checkpoint 8 is damaged (checksum of {name}' in caplog.text


def test_the_time_that_training_waits_is_summed_over_starts(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path)) as first:
        first.save(1, state_of(1), RECORD)
        saved = first.stall_seconds
        first.save(2, state_of(2), RECORD)
    with contextlib.closing(Checkpoints(tmp_path)) as second:
        second.restore({})
        # The record of the last save has the time of the save before it.
        assert 0 < saved == second.stall_seconds < first.stall_seconds


def test_the_newest_checkpoints_are_kept_also_of_steps_that_are_written_again(tmp_path):
    """After the damaged checkpoint 5 was passed over, steps from 4 on are saved once more."""
    save(tmp_path, 3, 5)
    rewrite(tmp_path / '5/record/metadata', '2.5', '3.5')
    with contextlib.closing(Checkpoints(tmp_path, keep=3)) as saved:
        assert int(saved.restore(target_on())[0]['step']) == 3
        saved.discard_after(3)
        for step in range(4, 10):
            saved.save(step, state_of(step), RECORD)
            assert len(list(tmp_path.glob('[0-9]*'))) <= 4  # with the one being written
        saved.wait()
        assert not list(tmp_path.glob('trash/*'))
        steps = [int(state['step']) for state, _ in saved.read_undamaged(target_on())]
    assert steps == [9, 8, 7]


# Disks


@pytest.fixture
def saved(tmp_path):
    """The open checkpoints of a run, after step 1."""
    saved = Checkpoints(tmp_path / 'run/checkpoints')
    saved.save(1, state_of(1), RECORD)
    saved.wait()
    return saved


def test_a_checkpoint_that_its_disk_cannot_hold_is_refused(saved, monkeypatch):
    monkeypatch.setattr(files.shutil, 'disk_usage', Mock(return_value=Mock(free=9)))
    message = f'^{saved.directory} cannot be written: its disk has 9 of the .* bytes'
    with pytest.raises(DiskError, match=message):
        saved.save(2, state_of(2), RECORD)
    saved.close()
    assert names_in(saved.directory) == ['1']


def test_a_directory_that_is_gone_is_named(saved, tmp_path):
    (tmp_path / 'run').rename(tmp_path / 'moved')
    message = f'^{tmp_path}/run is gone: it was removed, renamed or unmounted'
    with pytest.raises(DiskError, match=message):
        saved.save(2, state_of(2), RECORD)
    saved.close()
    assert names_in(tmp_path / 'moved/checkpoints') == ['1']


def test_a_directory_that_was_replaced_is_named(saved, tmp_path):
    (tmp_path / 'run').rename(tmp_path / 'moved')
    saved.directory.mkdir(parents=True)
    saved._manager.save = lambda *_, **__: 1 / 0  # errors may be of any kind
    message = f'^{saved.directory} is gone: it was removed, renamed or unmounted'
    with pytest.raises(DiskError, match=message):
        saved.save(2, state_of(2), RECORD)
    saved.close()
    assert names_in(tmp_path / 'moved/checkpoints') == ['1']


def test_a_checkpoint_that_could_not_be_written_is_removed(saved):
    """orbax fails in its own threads, after `save` has returned."""
    message = f'^{saved.directory} cannot be written: a file is larger than'
    with file_size_limit(64 * 1024), pytest.raises(DiskError, match=message):
        saved.save(2, {'w': jnp.arange(1e5)}, RECORD)
        saved.close()
    saved.close()
    assert names_in(saved.directory) == ['1']


# Damage


@pytest.fixture(scope='module')
def directory_of_two(tmp_path_factory):
    """A directory of two checkpoints."""
    save(path := tmp_path_factory.mktemp('checkpoints') / 'c', 4, 8)
    for step in ('4', '8'):  # as earlier versions wrote them
        (path / step / 'metrics').mkdir()
        (path / step / 'metrics/metrics').write_text('{"val_loss": 2.0}')
    return path


FILES = (
    '_CHECKPOINT_METADATA',
    'commit_success.txt',
    'metrics/metrics',
    'record/commit_success.txt',
    'record/metadata',
    'state/_METADATA',
    'state/_sharding',
    'state/array_metadatas/process_0',
    'state/d/*',
    'state/manifest.ocdbt',
    'state/ocdbt.process_0/manifest.ocdbt',
)


@pytest.mark.parametrize('every', damages.SOME)
@pytest.mark.parametrize('name', FILES)
def test_a_damaged_file_costs_at_most_its_checkpoint(directory_of_two, tmp_path, name, every):
    file = sorted((directory_of_two / '8').glob(name))[0]
    for label, content in damages.some([*damages.whole(file.read_bytes())], name, every):
        path = shutil.copytree(directory_of_two, tmp_path / label)
        damages.replace(path / file.relative_to(directory_of_two), content)
        state, record = restore_newest(path)
        # Where the damage is not in what is read, 8 is restored.
        assert int(state['step']) in (4, 8), label
        jax.tree.map(np.testing.assert_array_equal, state, state_of(int(state['step'])))
        assert record['train_seconds'] == 2.5


@pytest.mark.parametrize(
    'name', ['metrics/metrics', 'record/metadata', 'state/_METADATA', 'an array', 'a remote array']
)
def test_a_checkpoint_that_cannot_be_read_at_present_is_not_called_damaged(
    directory_of_two, tmp_path, monkeypatch, name
):
    """The start fails and changes nothing, so that the next one can read the newest checkpoint."""
    path = shutil.copytree(directory_of_two, tmp_path / 'c')
    error = OSError(errno.EIO, os.strerror(errno.EIO))
    read_regular = files.read_regular

    def failing(file: Path, most: int) -> bytes:
        if file == path / '8' / name:
            raise error
        return read_regular(file, most)

    def restore(*_, **__):
        try:  # as orbax does, whose own text does not say why
            text = (
                'UNAVAILABLE: HTTP 503' if 'remote' in name else f'UNKNOWN: w/0: {error.strerror}'
            )
            raise ValueError(text)
        except ValueError as cause:
            raise Exception('Encountered error while reading array index') from cause

    with monkeypatch.context() as patch:
        if 'array' in name:
            patch.setattr(checkpoint.ocp.StandardCheckpointHandler, 'restore', restore)
        elif name.startswith('state'):
            patch.setattr(
                checkpoint.ocp.StandardCheckpointHandler, 'restore', Mock(side_effect=error)
            )
        else:
            patch.setattr(files, 'read_regular', failing)
        with pytest.raises(ReadError, match=rf'^{path}/8.* cannot be read .*; nothing was changed'):
            restore_newest(path)
    assert names_in(path) == ['4', '8'] and int(restore_newest(path)[0]['step']) == 8


def test_a_run_whose_checkpoints_are_all_damaged_is_never_started_over(directory_of_two, tmp_path):
    path = shutil.copytree(directory_of_two, tmp_path / 'c')
    for step in ('4', '8'):
        (path / step / '_CHECKPOINT_METADATA').write_text('3')
    with pytest.raises(CheckpointError, match='c/[48] is damaged .*go'):
        Checkpoints(path, read_only=True)
    assert names_in(path) == ['4', '8']
    for _ in range(2):  # the same command again
        with pytest.raises(CheckpointError, match='every checkpoint in .* is damaged'):
            restore_newest(path)
    assert names_in(path) == ['4.damaged', '8.damaged']
    shutil.copytree(path / '4.damaged', path / '4')  # a copy that is damaged as well
    with pytest.raises(CheckpointError, match='every checkpoint in .* is damaged'):
        restore_newest(path)
    assert names_in(path) == ['4.damaged', '8.damaged']


def test_a_checkpoint_superseded_while_it_is_read_is_not_damaged(directory_of_two, tmp_path):
    path = shutil.copytree(directory_of_two, tmp_path / 'c')
    with contextlib.closing(Checkpoints(path, read_only=True)) as saved:
        sound = saved.read_undamaged(target_on())
        assert int(next(sound)[0]['step']) == 8
        shutil.rmtree(path / '4')
        assert list(sound) == []
        shutil.rmtree(path / '8')
        assert saved.restore({}) is None


def test_a_checkpoint_superseded_while_it_is_opened_is_not_damaged(
    directory_of_two, tmp_path, monkeypatch
):
    path = shutil.copytree(directory_of_two, tmp_path / 'c')
    parse = checkpoint.parse_file

    # Another process deletes checkpoint 4 before its files are parsed.
    def superseded(file, schema):
        shutil.rmtree(path / '4', ignore_errors=True)
        return parse(file, schema)

    monkeypatch.setattr(checkpoint, 'parse_file', superseded)
    Checkpoints(path, read_only=True).close()


def test_an_unfinished_checkpoint_in_a_bucket_is_removed(bucket):
    save(url := as_path('gs://runs/c'), 4, 8)
    del bucket.buckets['runs']['c/8/commit_success.txt']
    assert int(restore_newest(url)[0]['step']) == 4 and bucket.names('runs', 'c/8') == []


def test_the_checksum_of_an_array_depends_on_every_element_and_its_place():
    """Sums are stored in checkpoints, also in those of earlier versions, so they may not change."""

    def sum_of(array) -> int:
        return int(checksums([jnp.asarray(array)])[0])

    for dtype in DTYPES:
        array = array_of(dtype, shape=(4, 8))
        changed = array.copy()
        changed[3, 5] = array[3, 5] == 0
        exchanged = array.copy()
        other = tuple(np.argwhere(array != array[0, 0])[0])
        exchanged[0, 0] = array[other]
        exchanged[other] = array[0, 0]
        assert len({*map(sum_of, (array, changed, exchanged))}) == 3, dtype
    wide = np.arange(6, dtype=np.uint64) << 30  # eight bytes count as two elements
    with jax.enable_x64(True):
        assert sum_of(wide) == sum_of(wide.view(np.uint32))
    assert len({*map(sum_of, jax.random.split(jax.random.key(0), 3))}) == 3
