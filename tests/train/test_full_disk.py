"""A full disk ends a run in one sentence; with room it ends as if there always had been."""

import multiprocessing
import os
import resource
import subprocess
import time
from pathlib import Path

import jax
import pytest

from qkattn.errors import DiskError
from qkattn.train import checkpoint
from qkattn.train.loop import train
from tests.train.test_loop import outcome

KIB = 1024
FORKS = multiprocessing.get_context('forkserver')


pytestmark = pytest.mark.usefixtures('programs_kept')


@pytest.fixture
def disk(tmp_path):
    """A disk of 3 MiB of its own."""
    mount = ['mount', '-t', 'tmpfs', '-o', 'size=3m', 'tmpfs', str(tmp_path)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode:
        pytest.skip('mounting a small disk needs root')
    yield tmp_path
    subprocess.run(['umount', '-l', str(tmp_path)], check=True)


def fill(disk: Path, left: int) -> None:
    """Writes a file that leaves `left` bytes of the disk."""
    with (disk / 'filler').open('wb', buffering=0) as file:
        filesystem = os.statvfs(disk)
        os.posix_fallocate(file.fileno(), 0, filesystem.f_bavail * filesystem.f_frsize - left)


# When the disk is filled (dispatches of one step; checkpoints are every four), how many KiB are
# left, what that is enough for, and the checkpoints that stay.
@pytest.mark.parametrize(
    ('step', 'left', 'directory', 'kept'),
    [
        (0, 0, 'run', []),  # not even config.json
        (9, 0, 'run', ['4', '8']),  # half a record, where the log needs another page
        (6, 512, 'run/checkpoints', ['4']),  # records, but no checkpoint
    ],
)
def test_a_full_disk_is_one_sentence_and_the_run_goes_on_when_there_is_room(
    small_run, disk, step, left, directory, kept
):
    (config, straight), asked = small_run, []

    def lost():
        asked.append(None)
        if len(asked) == step:
            while not all((disk / 'run/checkpoints' / saved).exists() for saved in kept):
                time.sleep(0.01)
            fill(disk, left * KIB)
        return False

    if step == 0:
        fill(disk, left * KIB)
    with pytest.raises(DiskError) as refusal:
        train(config, disk / 'run', lost=lost)
    message = str(refusal.value)
    assert message.startswith(f'{disk / directory} cannot be written: ') and '\n' not in message
    assert ('the disk is full' in message) == (directory == 'run')
    assert sorted(p.name for p in (disk / 'run').glob('checkpoints/*')) == kept
    assert not [p for p in (disk / 'run').rglob('*') if p.name.endswith('tmp')]
    (disk / 'filler').unlink()
    train(config, disk / 'run')
    assert outcome(disk / 'run') == outcome(straight)


def save_with_small_files(directory: Path) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (64 * KIB, resource.RLIM_INFINITY))
    state = {'step': jax.numpy.int32(0), 'w': jax.numpy.arange(1e5)}
    checkpoints = checkpoint.Checkpoints(directory)
    checkpoints.save(1, {'step': state['step']}, {}, 1.0)
    try:
        checkpoints.save(2, state, {}, 1.0)
        checkpoints.close()
    except DiskError as error:
        (directory.parent / 'message').write_text(str(error))
        checkpoints.close()


def test_a_checkpoint_that_could_not_be_written_is_removed(tmp_path):
    """orbax fails in its own threads, after `save` has returned."""
    process = FORKS.Process(target=save_with_small_files, args=(tmp_path / 'checkpoints',))
    process.start()
    process.join(120)
    message = (tmp_path / 'message').read_text()
    assert message.startswith(f'{tmp_path}/checkpoints cannot be written: a file is larger than')
    assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['1']


@pytest.fixture
def read_only(tmp_path):
    """A directory, and what makes it read-only, as a file system that has failed is."""
    directory, undo = tmp_path / 'checkpoints', []
    directory.mkdir()

    def close():
        if os.geteuid() != 0:
            directory.chmod(0o555)
            undo.append(lambda: directory.chmod(0o755))
            return
        for arguments in (['--bind', directory, directory], ['-o', 'remount,ro,bind', directory]):
            if subprocess.run(['mount', *map(str, arguments)], capture_output=True).returncode:
                pytest.skip('root writes everywhere but on a read-only mount, which is not allowed')
            undo.append(lambda: subprocess.run(['umount', '-l', str(directory)], check=False))

    yield directory, close, undo
    for call in undo:
        call()


def test_a_read_only_directory_is_one_sentence_and_older_checkpoints_stay(read_only):
    directory, close, undo = read_only
    state = {'step': jax.numpy.int32(1), 'w': jax.numpy.arange(8.0)}
    record = {'data': {}, 'train_seconds': 0.0}
    checkpoints = checkpoint.Checkpoints(directory)
    checkpoints.save(1, state, record, 1.0)
    checkpoints.wait()
    close()
    with pytest.raises(DiskError, match='checkpoints cannot be written: .*; make it writable and'):
        checkpoints.save(2, state, record, 1.0)
        checkpoints.wait()
    checkpoints.close()
    while undo:
        undo.pop()()
    again = checkpoint.Checkpoints(directory)
    assert again.steps() == [1] and again.record()['train_seconds'] == 0.0
    again.save(2, state, record, 1.0)
    again.close()
    assert sorted(path.name for path in directory.iterdir()) == ['1', '2']
