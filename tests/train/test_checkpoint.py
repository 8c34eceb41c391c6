"""Checkpoints on every mesh and in several processes; damage costs at most its checkpoint."""

import contextlib
import json
import shutil

import jax
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn import __version__
from qkattn.config import MeshConfig
from qkattn.errors import CheckpointError, DiskError
from qkattn.storage.records import with_checksum
from qkattn.train import checkpoint, checksums
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.sharding import make_mesh
from tests import damages
from tests.jobs.jobs import ended, start_job

RECORD = {'data': {'name': 'x'}, 'train_seconds': 2.5}


def state_of(step: int) -> dict:
    w_XDF = jax.numpy.asarray(np.random.default_rng(step).normal(size=(2, 32, 64)), 'float32')
    trials = {'params': {'w_XDF': w_XDF, 'b_XF': w_XDF[:, 0].astype('bfloat16')}}
    return {'step': jax.numpy.int32(step), 'trials': trials | {'alive': w_XDF[:, 0, 0] > 0}}


def target_on(**axes: int) -> dict:
    """The target of a restore onto a mesh: trials over `trial`, D over `fsdp`, F over the rest."""
    specs = {1: P('trial'), 2: P('trial', 'tensor'), 3: P('trial', 'fsdp', ('data', 'tensor'))}
    mesh = make_mesh(MeshConfig(**axes))
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, specs.get(a.ndim, P()))
        ),
        state_of(0),
    )


def save(directory, *steps: int, **axes: int) -> None:
    shardings = jax.tree.map(lambda a: a.sharding, target_on(**axes))
    with contextlib.closing(Checkpoints(directory)) as saved:
        for step in steps:
            saved.save(step, jax.device_put(state_of(step), shardings), RECORD, 2.0)


def restored(directory, target: dict | None = None) -> tuple[dict, dict]:
    with contextlib.closing(Checkpoints(directory)) as opened:
        return opened.restore(target or target_on())


def rewrite_record(directory, change) -> None:
    path = directory / 'record/metadata'
    path.write_text(change(path.read_text()))


def test_a_checkpoint_is_restored_bit_for_bit_on_every_mesh(tmp_path):
    save(tmp_path, 3, trial=2, fsdp=2, tensor=2)
    meshes = [{}, {'data': 2}, {'tensor': 2, 'trial': 2}, {'fsdp': 4}, {'fsdp': 2, 'tensor': 4}]
    for axes in [*meshes, {'trial': 2, 'data': 2, 'tensor': 2}]:
        target = target_on(**axes)
        state, record = restored(tmp_path, target)
        jax.tree.map(np.testing.assert_array_equal, state, state_of(3))
        assert jax.tree.all(jax.tree.map(lambda a, t: a.sharding == t.sharding, state, target))
        assert record['train_seconds'] == 2.5 and record['format'] == checkpoint.FORMAT


def test_a_later_format_says_which_version_reads_it_and_nothing_is_deleted(tmp_path):
    save(tmp_path, 4, 8)

    def later(text):
        record = json.loads(text)
        del record['crc32']
        return json.dumps(with_checksum(record | {'format': 3, 'version': '0.9.1', 'more': []}))

    rewrite_record(tmp_path / '8', later)
    message = rf'8 has format 3 .* is qkattn {__version__}, .* format 2; use qkattn 0\.9\.1 or late'
    for _ in range(2):
        with pytest.raises(CheckpointError, match=message):
            restored(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['4', '8']


@pytest.mark.parametrize('change', [('2.5', '3.5'), ('"format": 2', '"format": 3'), ('"x"', '"y"')])
def test_a_changed_record_costs_its_checkpoint(tmp_path, caplog, change):
    save(tmp_path, 4, 8)
    rewrite_record(tmp_path / '8', lambda text: text.replace(*change))
    state, record = restored(tmp_path)
    assert (int(state['step']), record['train_seconds']) == (4, 2.5)
    assert 'checkpoint 8 is damaged (record/metadata: its checksum is not' in caplog.text


def test_changed_sums_cost_their_checkpoint(tmp_path, monkeypatch, caplog):
    save(tmp_path, 4)
    real = checksums.sums
    with monkeypatch.context() as patch:
        patch.setattr(checksums, 'sums', lambda state: real(state).at[1].add(1))
        save(tmp_path, 8)
    assert int(restored(tmp_path)[0]['step']) == 4
    assert f'checksum of {checksums.names(state_of(0))[1]}' in caplog.text


def test_a_save_after_prepare_compiles_nothing(tmp_path):
    compiled = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if 'backend_compile' in event:
            compiled.append(seconds)

    state = state_of(0)
    state['trials']['w_XE'] = jax.numpy.zeros((2, 17))  # a tree that no other test sums
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        with contextlib.closing(Checkpoints(tmp_path)) as saved:
            saved.prepare(state)
            assert compiled
            compiled.clear()
            saved.save(1, state, RECORD, 2.0)
            assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


def test_the_time_that_training_waits_is_summed_over_starts(tmp_path):
    with contextlib.closing(Checkpoints(tmp_path)) as first:
        assert first.stall_seconds == 0.0
        first.save(1, state_of(1), RECORD, 2.0)
        saved = first.stall_seconds
        first.save(2, state_of(2), RECORD, 2.0)
        assert 0 < saved < first.stall_seconds
    with contextlib.closing(Checkpoints(tmp_path)) as second:
        second.restore(target_on())
        assert second.stall_seconds == saved == second.record()['checkpoint_seconds']


def test_superseded_checkpoints_are_deleted_while_training_goes_on(tmp_path):
    """The newest two and the best stay; a step that is written again can be superseded again."""
    save(tmp_path, 3, 5)
    rewrite_record(tmp_path / '5', lambda text: text.replace('2.5', '3.5'))
    with contextlib.closing(Checkpoints(tmp_path)) as saved:
        assert int(saved.restore(target_on())[0]['step']) == 3
        saved.discard_after(3)
        for step in range(4, 12):
            saved.save(step, state_of(step), RECORD, float(step))
            # Of the save before: the newest two, the best, the one being written, and no trash.
            assert len(list(tmp_path.glob('[0-9]*'))) <= 4 and not list(tmp_path.glob('trash/*/*'))
        saved.wait()
        assert not list(tmp_path.glob('trash/*'))
    assert sorted(p.name for p in tmp_path.iterdir()) == ['10', '11', '3']


@pytest.mark.parametrize('recreated', [False, True])
def test_a_directory_that_is_gone_is_one_sentence(tmp_path, recreated):
    directory = tmp_path / 'run/checkpoints'
    saved = Checkpoints(directory)
    saved.save(1, state_of(1), RECORD, 2.0)
    saved.wait()
    (tmp_path / 'run').rename(tmp_path / 'moved')
    if recreated:
        directory.mkdir(parents=True)
        saved._manager.save = lambda *_, **__: 1 / 0  # errors may be of any kind
    gone = directory if recreated else tmp_path / 'run'
    with pytest.raises(DiskError, match=f'^{gone} is gone: it was removed, renamed or unmounted'):
        saved.save(2, state_of(2), RECORD, 2.0)
    saved.close()
    assert [p.name for p in (tmp_path / 'moved/checkpoints').iterdir()] == ['1']


@pytest.fixture(scope='module')
def two(tmp_path_factory):
    """A directory of two checkpoints."""
    save(path := tmp_path_factory.mktemp('checkpoints') / 'c', 4, 8)
    return path


FILES = (
    *('_CHECKPOINT_METADATA', 'commit_success.txt', 'metrics/metrics', 'record/metadata'),
    *('record/commit_success.txt', 'state/_METADATA', 'state/_sharding', 'state/manifest.ocdbt'),
    *('state/d/*', 'state/ocdbt.process_0/manifest.ocdbt', 'state/array_metadatas/process_0'),
)


@pytest.mark.parametrize('every', damages.SOME)
@pytest.mark.parametrize('name', FILES)
def test_a_damaged_file_costs_at_most_its_checkpoint(two, tmp_path, name, every):
    file = sorted((two / '8').glob(name))[0]
    for label, content in damages.some([*damages.whole(file.read_bytes())], name, every):
        path = tmp_path / label
        shutil.copytree(two, path)
        damages.replace(path / file.relative_to(two), content)
        state, record = restored(path)
        assert int(state['step']) in (4, 8), label
        jax.tree.map(np.testing.assert_array_equal, state, state_of(int(state['step'])))
        assert record['train_seconds'] == 2.5


def test_checkpoints_whose_descriptions_are_damaged_are_never_started_over(two, tmp_path):
    path = shutil.copytree(two, tmp_path / 'c')
    for step in ('4', '8'):
        (path / step / '_CHECKPOINT_METADATA').write_text('3')
    with pytest.raises(CheckpointError, match='c/[48] is damaged .*go'):
        Checkpoints(path, read_only=True)
    assert sorted(p.name for p in path.iterdir()) == ['4', '8']
    for _ in range(2):  # the same command again
        with pytest.raises(CheckpointError, match='every checkpoint in .* is damaged'):
            restored(path)
    assert sorted(p.name for p in path.iterdir()) == ['4.damaged', '8.damaged']


JOB = """
    import contextlib, json, logging, shutil, sys
    from pathlib import Path

    import numpy as np
    from qkattn.jobs import agreement, bootstrap
    from qkattn.errors import CheckpointError
    from qkattn.train import checksums
    from qkattn.train.checkpoint import Checkpoints
    from tests.train.test_checkpoint import save, target_on

    bootstrap.start()
    own, single = map(Path, sys.argv[1:])

    def restore(directory, discard=False):
        with contextlib.closing(Checkpoints(directory)) as opened:
            try:
                state, record = opened.restore(target_on(trial=2, fsdp=2))
            except CheckpointError as error:
                return str(error)
            if discard:
                opened.discard_after(int(state['step']))
            return [int(state['step']), np.asarray(checksums.sums(state)).tolist()]

    save(own, 4, 8, trial=2, fsdp=2)
    seen = {'own': restore(own), 'single': restore(single)}
    # What process 1 wrote of the newest checkpoint, and process 0 does not read.
    def damage():
        shutil.copytree(own, copy)  # tensorstore has cached what it has read
        for path in (copy / '8/state/ocdbt.process_1/d').iterdir():
            path.unlink()

    copy, logged = own.with_name('copy'), []
    agreement.on_owner(damage)
    logging.getLogger('qkattn.train.checkpoint').addFilter(lambda r: logged.append(r.getMessage()))
    seen |= {'one damaged': restore(copy, discard=True), 'logged': logged}
    agreement.on_owner(lambda: (copy / '4/record/metadata').write_text('{}') and None)
    seen |= {'all damaged': restore(copy), 'left': sorted(path.name for path in copy.iterdir())}
    print(json.dumps(seen))
"""


@pytest.mark.slow
def test_two_processes_restore_the_same_checkpoint_whatever_one_of_them_finds(tmp_path):
    save(tmp_path / 'single', 4)
    flags = '--xla_force_host_platform_device_count=2'
    job = start_job(JOB, 2, tmp_path / 'own', tmp_path / 'single', XLA_FLAGS=flags)
    results = ended(job)
    assert [code for code, _, _ in results] == [0, 0], results
    seen, other = (json.loads(out.splitlines()[-1]) for _, out, _ in results)
    sums = {step: checksums.sums(state_of(step)).tolist() for step in (4, 8)}
    assert seen['own'] == [8, sums[8]]
    assert seen['single'] == seen['one damaged'] == [4, sums[4]]
    assert seen['logged'][0].startswith('checkpoint 8 is damaged (process 1: ')
    assert 'every checkpoint' in seen['all damaged'] and seen['left'] == ['4']
    assert seen == other
