"""Checkpoints: saved and restored on every mesh, and skipped if they are damaged."""

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
    """Returns a train state with an array of each dtype, whose values depend on the step."""
    params = {dtype: jnp.asarray(array_of(dtype, step)) for dtype in DTYPES}
    alive_X = params['bool'][:, 0, 0]
    params['b_XF'] = params['float32'][:, 0]
    return {'step': jnp.int32(step), 'trials': {'params': params, 'alive': alive_X}}


def target_on(**axes: int) -> dict:
    """Returns the shapes, dtypes and shardings with which `state_of` is restored onto a mesh.

    The sharding of an array depends on its number of dimensions.

    Args:
        **axes: The sizes of mesh axes, as in target_on(data=2, tensor=4). Other axes have size 1.
    """
    mesh = make_mesh(MeshConfig(**axes))
    spec_by_ndim = {
        0: P(),
        1: P('trial'),
        2: P('trial', 'tensor'),
        3: P('trial', 'fsdp', ('data', 'tensor')),
    }

    def with_sharding(array: jax.Array) -> jax.ShapeDtypeStruct:
        sharding = NamedSharding(mesh, spec_by_ndim[array.ndim])
        return jax.ShapeDtypeStruct(array.shape, array.dtype, sharding=sharding)

    return jax.tree.map(with_sharding, state_of(0))


def save(directory, *steps: int, **axes: int) -> None:
    """Saves checkpoints of these steps, with arrays on a mesh of these axes."""
    shardings = jax.tree.map(lambda target: target.sharding, target_on(**axes))
    with contextlib.closing(Checkpoints(directory)) as saved:
        for step in steps:
            saved.save(step, jax.device_put(state_of(step), shardings), RECORD)


def restore_newest(directory, target: dict | None = None) -> tuple[dict, dict]:
    """The state and the record of the newest checkpoint that is not damaged."""
    with contextlib.closing(Checkpoints(directory)) as opened:
        return opened.restore(target or target_on())


def rewrite(path: Path, old: str, new: str) -> None:
    path.write_text(path.read_text().replace(old, new))


def names_in(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_a_checkpoint_is_restored_bitwise_on_every_mesh(tmp_path):
    """A checkpoint that 8 devices saved is restored on meshes of other sizes and axes."""
    save(tmp_path, 3, trial=2, fsdp=2, tensor=2)
    meshes = [
        {},  # one device
        {'data': 2},
        {'tensor': 2, 'trial': 2},
        {'fsdp': 4},
        {'fsdp': 2, 'tensor': 4},
        {'trial': 2, 'data': 2, 'tensor': 2},
    ]
    for axes in meshes:
        target = target_on(**axes)

        state, record = restore_newest(tmp_path, target)

        # The arrays have the saved values, and the shardings of the mesh.
        jax.tree.map(np.testing.assert_array_equal, state, state_of(3))
        shardings = jax.tree.map(lambda array: array.sharding, state)
        assert shardings == jax.tree.map(lambda leaf: leaf.sharding, target)
        # `save` stores RECORD with the arrays. In RECORD, training took 2.5 seconds.
        assert record['train_seconds'] == RECORD['train_seconds'] == 2.5
        assert record['format'] == checkpoint.FORMAT


def test_a_checkpoint_of_a_later_format_is_refused(tmp_path):
    """A checkpoint of a later version of qkattn is an error. It is neither skipped nor deleted."""
    save(tmp_path, 4, 8)
    # Change checkpoint 8 as if qkattn 0.9.1 had written it, with a new field and no checksum yet.
    path = tmp_path / '8/record/metadata'
    record = json.loads(path.read_text())
    record |= {'format': 3, 'version': '0.9.1', 'more': []}
    del record['crc32']
    path.write_text(json.dumps(with_checksum(record)))

    assert checkpoint.FORMAT == 2
    message = (
        rf'8 has format 3 of qkattn 0\.9\.1, but this is qkattn {__version__}, which reads '
        r'format 2; use qkattn 0\.9\.1 or later'
    )
    # The first attempt changes nothing, so the second attempt is refused, too.
    for _ in range(2):
        with pytest.raises(CheckpointError, match=message):
            restore_newest(tmp_path)

    assert names_in(tmp_path) == ['4', '8']


def test_a_checkpoint_of_another_config_is_refused(tmp_path):
    """A checkpoint is restored only by a run whose settings have the hash in the checkpoint."""
    with contextlib.closing(Checkpoints(tmp_path, config_hash='abc')) as saved:
        saved.save(4, state_of(4), RECORD)

    message = (
        rf"^{tmp_path}/4 is of a run with another configuration \(config_hash 'abc', not 'def'\)"
    )
    # The first attempt changes nothing, so the second attempt is refused, too.
    for _ in range(2):
        with (
            contextlib.closing(Checkpoints(tmp_path, config_hash='def')) as opened,
            pytest.raises(CheckpointError, match=message),
        ):
            opened.restore(target_on())

    # The run that saved the checkpoint can still restore it.
    assert names_in(tmp_path) == ['4']
    with contextlib.closing(Checkpoints(tmp_path, config_hash='abc')) as opened:
        state, _ = opened.restore(target_on())
    assert int(state['step']) == 4


def test_a_checkpoint_without_a_config_hash_is_restored(tmp_path):
    """Earlier versions stored no hash."""
    save(tmp_path, 4)
    record = json.loads((tmp_path / '4/record/metadata').read_text())
    assert 'config_hash' not in record

    with contextlib.closing(Checkpoints(tmp_path, config_hash='abc')) as opened:
        state, _ = opened.restore(target_on())

    assert int(state['step']) == 4


@pytest.mark.parametrize(
    ('text', 'changed_text'),
    [
        pytest.param('2.5', '3.5', id='train_seconds'),
        pytest.param('"format": 2', '"format": 3', id='format'),
    ],
)
def test_a_checkpoint_with_a_changed_record_is_skipped(tmp_path, caplog, text, changed_text):
    save(tmp_path, 4, 8)
    rewrite(tmp_path / '8/record/metadata', text, changed_text)

    state, record = restore_newest(tmp_path)

    assert int(state['step']) == 4
    assert record['train_seconds'] == 2.5
    assert 'checkpoint 8 is damaged (record/metadata: ' in caplog.text


def test_a_checkpoint_with_a_wrong_checksum_is_skipped(tmp_path, monkeypatch, caplog):
    """A checkpoint is skipped if an array does not have its recorded checksum."""
    save(tmp_path, 4)

    def checksums_with_an_error(state):
        """Replaces `checksums`, which returns a number for each array. Adds 1 to number 1."""
        return checksums(state).at[1].add(1)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, 'checksums', checksums_with_an_error)
        save(tmp_path, 8)

    state, record = restore_newest(tmp_path)

    # Checkpoint 8 is skipped, so checkpoint 4 is restored.
    assert int(state['step']) == 4
    assert record['train_seconds'] == RECORD['train_seconds'] == 2.5
    name_of_array_1 = leaf_names(state_of(0))[1]
    assert f'checkpoint 8 is damaged (checksum of {name_of_array_1}' in caplog.text


def test_stall_seconds_are_summed_over_starts(tmp_path):
    """`stall_seconds` is how long training has waited for checkpoints, over all starts of a run."""
    with contextlib.closing(Checkpoints(tmp_path)) as first_start:
        first_start.save(1, state_of(1), RECORD)
        seconds_before_last_save = first_start.stall_seconds
        first_start.save(2, state_of(2), RECORD)
    assert 0 < seconds_before_last_save < first_start.stall_seconds

    # A checkpoint holds the seconds before its own save. So the seconds of the last save are lost.
    with contextlib.closing(Checkpoints(tmp_path)) as second_start:
        second_start.restore({})  # reads only the record of the newest checkpoint
        assert second_start.stall_seconds == seconds_before_last_save


def test_the_newest_checkpoints_are_kept_when_steps_are_saved_again(tmp_path):
    """With keep=3, the three newest checkpoints are kept, even if a step is saved a second time.

    Checkpoint 5 is damaged. The run resumes from step 3, so it saves step 5 again.
    """
    num_kept = 3
    save(tmp_path, 3, 5)
    # The changed record does not have its checksum, so checkpoint 5 is damaged.
    rewrite(tmp_path / '5/record/metadata', '2.5', '3.5')

    with contextlib.closing(Checkpoints(tmp_path, keep=num_kept)) as saved:
        state, _ = saved.restore(target_on())
        assert int(state['step']) == 3
        saved.discard_after(3)

        for step in range(4, 10):
            saved.save(step, state_of(step), RECORD)
            directories = list(tmp_path.glob('[0-9]*'))
            assert len(directories) <= num_kept + 1  # one more, which is still being written

        # Checkpoints are moved to `trash` before they are deleted.
        saved.wait()
        assert not list(tmp_path.glob('trash/*'))
        steps = [int(state['step']) for state, _ in saved.read_undamaged(target_on())]

    # Checkpoints are read from the newest to the oldest.
    assert steps == [9, 8, 7]


# Disks


@pytest.fixture
def saved(tmp_path):
    """Open `Checkpoints` with a checkpoint of step 1."""
    saved = Checkpoints(tmp_path / 'run/checkpoints')
    saved.save(1, state_of(1), RECORD)
    saved.wait()
    return saved


def test_a_save_to_a_full_disk_is_refused(saved, monkeypatch):
    monkeypatch.setattr(files.shutil, 'disk_usage', Mock(return_value=Mock(free=9)))

    message = f'^{saved.directory} cannot be written: its disk has 9 of the .* bytes'
    with pytest.raises(DiskError, match=message):
        saved.save(2, state_of(2), RECORD)
    saved.close()

    assert names_in(saved.directory) == ['1']


def test_a_save_names_a_directory_that_is_gone(saved, tmp_path):
    (tmp_path / 'run').rename(tmp_path / 'moved')

    message = f'^{tmp_path}/run is gone: it was removed, renamed or unmounted'
    with pytest.raises(DiskError, match=message):
        saved.save(2, state_of(2), RECORD)
    saved.close()

    assert names_in(tmp_path / 'moved/checkpoints') == ['1']


def test_a_save_names_a_directory_that_was_replaced(saved, tmp_path):
    """A save fails if its directory was moved, even if a new directory has the same path.

    `saved` is an open `Checkpoints` of the directory run/checkpoints, which holds step 1.
    """
    (tmp_path / 'run').rename(tmp_path / 'moved')
    saved.directory.mkdir(parents=True)
    # Orbax raises errors of many types, here a ZeroDivisionError. All lead to the same message.
    saved._manager.save = Mock(side_effect=ZeroDivisionError)

    message = f'^{saved.directory} is gone: it was removed, renamed or unmounted'
    with pytest.raises(DiskError, match=message):
        saved.save(2, state_of(2), RECORD)
    saved.close()

    # The moved directory still has its checkpoint.
    assert names_in(tmp_path / 'moved/checkpoints') == ['1']


def test_a_checkpoint_that_cannot_be_written_is_removed(saved):
    large_state = {'w': jnp.arange(1e5)}  # 400 kB

    message = f'^{saved.directory} cannot be written: a file is larger than'
    with file_size_limit(64 * 1024), pytest.raises(DiskError, match=message):
        saved.save(2, large_state, RECORD)
        saved.close()  # orbax writes in its own threads, so the error may come only here
    saved.close()

    assert names_in(saved.directory) == ['1']


# Damage


@pytest.fixture(scope='module')
def checkpoints_4_and_8(tmp_path_factory):
    """A directory with checkpoints of the steps 4 and 8."""
    directory = tmp_path_factory.mktemp('checkpoints') / 'c'
    save(directory, 4, 8)
    # Earlier versions wrote a file of metrics, too.
    for step in ('4', '8'):
        (directory / step / 'metrics').mkdir()
        (directory / step / 'metrics/metrics').write_text('{"val_loss": 2.0}')
    return directory


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
def test_a_damaged_file_costs_at_most_its_checkpoint(checkpoints_4_and_8, tmp_path, name, every):
    """If checkpoint 8 has a damaged file, checkpoint 4 is restored, or 8 if the file is not needed.

    A damaged file is, for example, empty, cut, or a directory. Of all damages, the test tries the
    first and every `every`-th of the others.
    """
    file = sorted((checkpoints_4_and_8 / '8').glob(name))[0]
    all_damages = list(damages.whole(file.read_bytes()))
    for label, damaged_content in damages.some(all_damages, name, every):
        copy = shutil.copytree(checkpoints_4_and_8, tmp_path / label)
        damaged_file = copy / file.relative_to(checkpoints_4_and_8)
        damages.replace(damaged_file, damaged_content)

        state, record = restore_newest(copy)

        # The restored checkpoint has the arrays and the record that were saved.
        step = int(state['step'])
        assert step in (4, 8), label
        jax.tree.map(np.testing.assert_array_equal, state, state_of(step))
        assert record['train_seconds'] == RECORD['train_seconds'] == 2.5


def fail_to_read(monkeypatch, path: Path, name: str) -> None:
    """Makes reads of one part of a checkpoint fail, as on a broken disk.

    Args:
        monkeypatch: Replaces the functions that read.
        path: The directory of the checkpoint.
        name: A file in `path`, 'an array' on a disk, or 'a remote array' on a server.
    """
    io_error = OSError(errno.EIO, os.strerror(errno.EIO))
    read_regular = files.read_regular

    def read_other_files(file: Path, most: int) -> bytes:
        """Replaces files.read_regular. Fails only for the named file."""
        if file == path / name:
            raise io_error
        return read_regular(file, most)

    def restore_arrays(*_, **__) -> None:
        """Replaces the function of orbax that reads all arrays of a checkpoint. Always fails."""
        # As in orbax, the error itself names no reason. The reason is in its cause.
        reason = f'UNKNOWN: w/0: {io_error.strerror}'
        if name == 'a remote array':
            reason = 'UNAVAILABLE: HTTP 503'
        message = 'Encountered error while reading array index'
        raise Exception(message) from ValueError(reason)

    handler = checkpoint.ocp.StandardCheckpointHandler
    if name in ('an array', 'a remote array'):
        monkeypatch.setattr(handler, 'restore', restore_arrays)
    elif name == 'state/_METADATA':
        # Orbax reads this file itself.
        monkeypatch.setattr(handler, 'restore', Mock(side_effect=io_error))
    else:
        monkeypatch.setattr(files, 'read_regular', read_other_files)


@pytest.mark.parametrize(
    'name', ['metrics/metrics', 'record/metadata', 'state/_METADATA', 'an array', 'a remote array']
)
def test_a_failed_read_is_not_taken_for_damage(checkpoints_4_and_8, tmp_path, monkeypatch, name):
    """If the system fails to read the newest checkpoint, no older checkpoint is restored.

    A damaged checkpoint is skipped. But after a failed read, the checkpoint may be undamaged.
    """
    path = shutil.copytree(checkpoints_4_and_8, tmp_path / 'c')

    # In this block, reads of `name` in checkpoint 8 fail with an I/O error.
    with monkeypatch.context() as patch:
        fail_to_read(patch, path / '8', name)
        with pytest.raises(ReadError, match=rf'^{path}/8.* cannot be read .*; nothing was changed'):
            restore_newest(path)

    # After the block, reads succeed again, and the newest checkpoint is restored.
    assert names_in(path) == ['4', '8']
    state, _ = restore_newest(path)
    assert int(state['step']) == 8


@pytest.fixture
def damaged_checkpoints(checkpoints_4_and_8, tmp_path):
    """A directory of the checkpoints 4 and 8, both damaged."""
    path = shutil.copytree(checkpoints_4_and_8, tmp_path / 'c')
    for step in ('4', '8'):
        (path / step / '_CHECKPOINT_METADATA').write_text('3')  # not a JSON object
    return path


def test_a_damaged_checkpoint_that_is_only_read_is_not_renamed(damaged_checkpoints):
    """The message says how the user gets past the damaged checkpoint.

    If the run is finished, only moving the checkpoint away helps: the training command then returns
    the results of the run, and renames nothing. If the run is not finished, the training command
    renames the checkpoint.
    """
    reason_in_parentheses = r'\(.*\)'
    message = (
        f'c/[48] is damaged {reason_in_parentheses}; move it away, or, if the run is not finished, '
        'run the training command again, which goes on from the checkpoint before'
    )
    with pytest.raises(CheckpointError, match=message):
        Checkpoints(damaged_checkpoints, read_only=True)
    assert names_in(damaged_checkpoints) == ['4', '8']


def test_a_run_never_starts_over_if_all_its_checkpoints_are_damaged(damaged_checkpoints):
    """If all checkpoints are damaged, every start fails, and no checkpoint is deleted."""
    path = damaged_checkpoints

    # The first start renames the checkpoints. The second start finds only renamed checkpoints.
    for _ in range(2):
        with pytest.raises(CheckpointError, match='every checkpoint in .* is damaged'):
            restore_newest(path)
        assert names_in(path) == ['4.damaged', '8.damaged']

    # A user restores checkpoint 4 from a copy, but the copy is damaged, too.
    shutil.copytree(path / '4.damaged', path / '4')
    with pytest.raises(CheckpointError, match='every checkpoint in .* is damaged'):
        restore_newest(path)
    assert names_in(path) == ['4.damaged', '8.damaged']


def test_a_checkpoint_deleted_while_it_is_read_is_not_damaged(checkpoints_4_and_8, tmp_path):
    """A run may delete its old checkpoints while another process reads them."""
    path = shutil.copytree(checkpoints_4_and_8, tmp_path / 'c')
    with contextlib.closing(Checkpoints(path, read_only=True)) as saved:
        # Checkpoint 8 is read first, because it is the newest.
        undamaged = saved.read_undamaged(target_on())
        state, _ = next(undamaged)
        assert int(state['step']) == 8

        # Checkpoint 4 is deleted before it is read, so it is left out without an error.
        shutil.rmtree(path / '4')
        assert list(undamaged) == []

        # Checkpoint 8 is deleted, too, so there is none to restore.
        shutil.rmtree(path / '8')
        assert saved.restore({}) is None


def test_a_checkpoint_deleted_while_it_is_opened_is_not_damaged(
    checkpoints_4_and_8, tmp_path, monkeypatch
):
    """A run may delete a checkpoint just before another process reads its metadata."""
    path = shutil.copytree(checkpoints_4_and_8, tmp_path / 'c')
    parse_file = checkpoint.parse_file

    def delete_checkpoint_4_and_parse(file, schema):
        """Replaces `parse_file`, which reads metadata. Deletes checkpoint 4 before."""
        shutil.rmtree(path / '4', ignore_errors=True)
        return parse_file(file, schema)

    monkeypatch.setattr(checkpoint, 'parse_file', delete_checkpoint_4_and_parse)

    # With read_only, opening a damaged checkpoint raises an error. A deleted one raises none.
    Checkpoints(path, read_only=True).close()


def test_an_unfinished_checkpoint_in_a_bucket_is_removed(bucket):
    url = as_path('gs://runs/c')
    save(url, 4, 8)
    del bucket.buckets['runs']['c/8/commit_success.txt']  # the last file that a save writes

    state, _ = restore_newest(url)

    assert int(state['step']) == 4
    assert bucket.names('runs', 'c/8') == []


# Checksums


def checksum_of(array) -> int:
    return int(checksums([jnp.asarray(array)])[0])


@pytest.mark.parametrize('dtype', DTYPES)
def test_a_checksum_depends_on_every_element_and_its_place(dtype):
    array = array_of(dtype, shape=(4, 8))

    # One element gets another value.
    changed = array.copy()
    is_zero = array[3, 5] == 0
    changed[3, 5] = 1 if is_zero else 0

    # The first element is exchanged with the first that has another value.
    is_different = array != array[0, 0]
    row, column = np.argwhere(is_different)[0]
    exchanged = array.copy()
    exchanged[0, 0] = array[row, column]
    exchanged[row, column] = array[0, 0]

    assert checksum_of(changed) != checksum_of(array)
    assert checksum_of(exchanged) != checksum_of(array)
    assert checksum_of(changed) != checksum_of(exchanged)


def test_eight_bytes_count_as_two_elements_of_a_checksum():
    array = np.arange(6, dtype=np.uint64) << 30
    with jax.enable_x64(True):
        assert checksum_of(array) == checksum_of(array.view(np.uint32))


def test_different_random_keys_have_different_checksums():
    keys = jax.random.split(jax.random.key(0), 3)
    sums = {checksum_of(key) for key in keys}
    assert len(sums) == 3
