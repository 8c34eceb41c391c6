"""The choice of lifting, and placement of what each process reads."""

import dataclasses
import logging

import jax
import numpy as np
import pytest

from qkattn.config import MeshConfig, to_json
from qkattn.errors import ConfigError
from qkattn.storage.records import read_json
from qkattn.train import placement, program, sharding, start
from qkattn.train.start import build_program


def test_auto_measures_both_liftings_and_keeps_the_faster(
    tiny, tmp_path, monkeypatch, evaluation_only, caplog
):
    caplog.set_level(logging.INFO, 'qkattn')
    config = tiny(train={'lifting': 'auto'})
    seconds = iter([0.2, 0.1 + 1 / 30000])
    monkeypatch.setattr(program, 'seconds_per_dispatch', lambda *a: next(seconds))
    assert build_program(config, tmp_path).lifting == 'vmap'
    assert read_json(tmp_path / 'lifting.json', {}) == {
        'lifting': 'vmap',
        'seconds_per_step': {'map': 0.2, 'vmap': 0.1 + 1 / 30000},
    }
    assert caplog.messages[-1] == (
        'trials are trained side by side (vmap): 0.1 s per step; one after another (map): 0.2 s '
        'per step'
    )
    # A later start takes the recorded choice without measuring (the iterator is used up).
    assert build_program(config, tmp_path).lifting == 'vmap'


def test_the_measurement_is_of_seconds(tiny, evaluation_only):
    small = {'num_layers': 1, 'd_model': 16}
    built = program.build(tiny(model=small, train={'lifting': 'auto'}))
    assert set(built.measured) == {'map', 'vmap'}
    assert all(1e-6 < s < 600 for s in built.measured.values())


def test_one_trial_is_not_measured(tiny, evaluation_only):
    built = program.build(tiny(train={'lifting': 'auto'}, trials={'seeds': (0,)}))
    assert built.lifting == 'vmap' and built.measured == {}


def test_rows_become_microbatches_in_turn(tiny):
    config = dataclasses.replace(tiny(), mesh=MeshConfig(trial=2, data=2, fsdp=2))
    mesh = sharding.make_mesh(config.mesh)
    share = placement.local_share(config, mesh)
    assert share.trials.tolist() == [0, 1] and share.rows.tolist() == list(range(8))
    local_CXBT = np.arange(1 * 2 * 8 * 16, dtype=np.int32).reshape(1, 2, 8, 16)
    placed = placement.place_batch(config, mesh, {'tokens_BT': local_CXBT})['tokens_BT']
    assert placed.shape == (1, 2, 2, 4, 16)
    for a in range(2):
        np.testing.assert_array_equal(placed[0, :, a], local_CXBT[0, :, a::2])
    assert len({str(s.index) for s in placed.addressable_shards}) == 8


def test_initial_trials_are_those_of_their_seeds(tiny, evaluation_only):
    state = program.build(tiny(trials={'seeds': (3, 4)}), 'vmap').init()
    alone = program.build(tiny(trials={'seeds': (4,)}), 'vmap').init()
    jax.tree.map(
        lambda stacked, one: np.testing.assert_array_equal(stacked[1], one[0]),
        state['trials']['params'],
        alone['trials']['params'],
    )


def test_processes_with_other_settings_or_another_directory_are_refused(
    tiny, tmp_path, monkeypatch
):
    config = tiny()
    start.require_same_settings(config)
    other = to_json(dataclasses.replace(config, mesh=MeshConfig(data=2)))
    monkeypatch.setattr(start.agreement, 'from_all', lambda own: [own, own, other])
    with pytest.raises(ConfigError, match=r'process 2 has other settings .* \(mesh.data: 1 -> 2\)'):
        start.require_same_settings(config)

    monkeypatch.setattr(start, 'SEEN_WITHIN', 0.0)
    monkeypatch.setattr(start.agreement, 'from_all', lambda own: [[True, '/a'], own])
    with pytest.raises(ConfigError, match=f'workdir={tmp_path} of process 1 is not /a of process'):
        start.require_shared(tmp_path)
    (tmp_path / 'config.json').touch()
    start.require_shared(tmp_path)


def test_a_quick_compilation_gives_the_same_initial_trials(tiny, monkeypatch, evaluation_only):
    config = tiny(model={'num_layers': 1, 'd_model': 16})
    plain = program.build(config, 'vmap').init()
    monkeypatch.delenv('XLA_FLAGS')  # XLA has read it; it sets a level of the tests
    quick = program.build(config, 'vmap').init()
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=2e-6), quick, plain)
