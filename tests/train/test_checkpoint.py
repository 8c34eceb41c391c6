"""Checkpoints by format, on every mesh, and what their records say."""

import json

import jax
import numpy as np
import orbax.checkpoint as ocp
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

RECORD = {'data': {'name': 'x'}, 'train_seconds': 2.5}


def state_of(step: int) -> dict:
    w_XDF = jax.numpy.asarray(np.random.default_rng(step).normal(size=(2, 32, 64)), 'float32')
    trials = {'params': {'w_XDF': w_XDF, 'b_XF': w_XDF[:, 0].astype('bfloat16')}}
    return {'step': jax.numpy.int32(step), 'trials': trials | {'alive': w_XDF[:, 0, 0] > 0}}


def placed(state: dict, config: MeshConfig) -> dict:
    """The target of a restore onto a mesh: trials over `trial`, D over `fsdp`, F over the rest."""
    axes = {1: P('trial'), 2: P('trial', 'tensor'), 3: P('trial', 'fsdp', ('data', 'tensor'))}
    mesh = make_mesh(config)
    return jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(
            a.shape, a.dtype, sharding=NamedSharding(mesh, axes.get(a.ndim, P()))
        ),
        state,
    )


def save(directory, *steps: int) -> dict:
    saved = Checkpoints(directory)
    for step in steps:
        saved.save(step, state_of(step), RECORD, 2.0)
    saved.close()
    return placed(state_of(0), MeshConfig())


def save_format_1(directory, step: int) -> None:
    """As the versions before format 2 saved."""
    state = state_of(step)
    record = {**RECORD, 'crc32': checksums.crc32s(state)}
    options = ocp.CheckpointManagerOptions(best_fn=lambda metrics: metrics['val_loss'])
    with ocp.CheckpointManager(directory, options=options) as manager:
        items = {'state': ocp.args.StandardSave(state), 'record': ocp.args.JsonSave(record)}
        manager.save(step, args=ocp.args.Composite(**items), metrics={'val_loss': 2.0})


def rewrite_record(directory, change) -> None:
    path = directory / 'record/metadata'
    path.write_text(change(path.read_text()))


def restored(directory, target: dict) -> tuple[dict, dict]:
    opened = Checkpoints(directory)
    try:
        return opened.restore(target)
    finally:
        opened.close()


def test_a_checkpoint_is_restored_bit_for_bit_on_every_mesh(tmp_path):
    save(tmp_path, 3)
    want = state_of(3)
    meshes = [{}, {'data': 2}, {'tensor': 2, 'trial': 2}, {'fsdp': 4}, {'fsdp': 2, 'tensor': 4}]
    for axes in [*meshes, {'trial': 2, 'data': 2, 'tensor': 2}]:
        target = placed(want, MeshConfig(**axes))
        state, record = restored(tmp_path, target)
        jax.tree.map(np.testing.assert_array_equal, state, want)
        assert jax.tree.all(jax.tree.map(lambda a, t: a.sharding == t.sharding, state, target))
        assert record['train_seconds'] == 2.5 and record['format'] == checkpoint.FORMAT


def test_a_sharded_checkpoint_is_restored_on_one_device(tmp_path):
    target = placed(state_of(3), MeshConfig(trial=2, fsdp=2, tensor=2))
    state = jax.tree.map(lambda a, t: jax.device_put(a, t.sharding), state_of(3), target)
    saved = Checkpoints(tmp_path)
    saved.save(3, state, RECORD, 2.0)
    saved.close()
    found, _ = restored(tmp_path, placed(state, MeshConfig()))
    jax.tree.map(np.testing.assert_array_equal, found, state_of(3))


def test_a_checkpoint_of_format_1_is_restored_and_its_checksums_are_compared(tmp_path, caplog):
    target = save(tmp_path, 4)
    save_format_1(tmp_path, 8)
    state, record = restored(tmp_path, target)
    assert int(state['step']) == 8 and 'format' not in record
    jax.tree.map(np.testing.assert_array_equal, state, state_of(8))
    rewrite_record(tmp_path / '8', lambda text: text.replace('"step": ', '"step": 1'))
    assert int(restored(tmp_path, target)[0]['step']) == 4
    assert 'checkpoint 8 is damaged (checksum of step)' in caplog.text


def test_a_later_format_says_which_version_reads_it_and_nothing_is_deleted(tmp_path):
    target = save(tmp_path, 4, 8)

    def later(text):
        record = json.loads(text)
        del record['crc32']
        return json.dumps(with_checksum(record | {'format': 3, 'version': '0.9.1', 'more': []}))

    rewrite_record(tmp_path / '8', later)
    message = rf'8 has format 3 .* is qkattn {__version__}, .* up to 2; use qkattn 0\.9\.1 or later'
    for _ in range(2):
        with pytest.raises(CheckpointError, match=message):
            restored(tmp_path, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ['4', '8']


@pytest.mark.parametrize('change', [('2.5', '3.5'), ('"format": 2', '"format": 3'), ('"x"', '"y"')])
def test_a_changed_record_costs_its_checkpoint(tmp_path, caplog, change):
    target = save(tmp_path, 4, 8)
    rewrite_record(tmp_path / '8', lambda text: text.replace(*change))
    state, record = restored(tmp_path, target)
    assert (int(state['step']), record['train_seconds']) == (4, 2.5)
    assert 'checkpoint 8 is damaged (record/metadata: its checksum is not' in caplog.text


def test_a_changed_array_and_changed_sums_cost_their_checkpoint(tmp_path, monkeypatch, caplog):
    target = save(tmp_path, 4)
    real = checksums.sums
    monkeypatch.setattr(checksums, 'sums', lambda state: real(state).at[1].add(1))
    save(tmp_path, 8)
    monkeypatch.undo()
    assert int(restored(tmp_path, target)[0]['step']) == 4
    assert f'checksum of {checksums.names(target)[1]}' in caplog.text


def test_a_save_after_prepare_compiles_nothing(tmp_path):
    compiled = []

    def listen(event: str, seconds: float, **_: object) -> None:
        if 'backend_compile' in event:
            compiled.append(seconds)

    state = state_of(0)
    state['trials']['w_XE'] = jax.numpy.zeros((2, 17))  # a tree that no other test sums
    saved = Checkpoints(tmp_path)
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        saved.prepare(state)
        assert compiled
        compiled.clear()
        saved.save(1, state, RECORD, 2.0)
        assert not compiled
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)
        saved.close()


def test_the_time_that_training_waits_goes_on_over_starts(tmp_path):
    first = Checkpoints(tmp_path)
    assert first.stall_seconds == 0.0
    first.save(1, state_of(1), RECORD, 2.0)
    saved = first.stall_seconds
    first.save(2, state_of(2), RECORD, 2.0)
    assert 0 < saved < first.stall_seconds
    first.close()
    second = Checkpoints(tmp_path)
    second.restore(placed(state_of(0), MeshConfig()))
    assert second.stall_seconds == saved == second.record()['checkpoint_seconds']
    second.close()


def test_superseded_checkpoints_are_deleted_while_training_goes_on(tmp_path):
    saved = Checkpoints(tmp_path)
    for step in range(1, 9):
        saved.save(step, state_of(step), RECORD, float(step))
        # Of the save before: the newest two, the best, the one being written, and no trash.
        assert len(list(tmp_path.glob('[0-9]*'))) <= 4 and not list(tmp_path.glob('trash/*/*'))
    saved.wait()
    assert not list(tmp_path.glob('trash/*'))
    saved.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ['1', '7', '8']


def test_a_step_that_is_written_again_after_damage_can_be_superseded(tmp_path):
    target = save(tmp_path, 4, 8)
    rewrite_record(tmp_path / '8', lambda text: text.replace('2.5', '3.5'))
    again = Checkpoints(tmp_path)
    assert int(again.restore(target)[0]['step']) == 4
    again.discard_after(4)
    for step in (8, 12, 16, 20):
        again.save(step, state_of(step), RECORD, float(step))
    again.close()
    assert sorted(p.name for p in tmp_path.iterdir()) == ['16', '20', '4']


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
