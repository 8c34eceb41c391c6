"""Models by themselves: saved, loaded, taken from a run, trained further; damage is named."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from qkattn.config import ModelConfig, fingerprint, to_json
from qkattn.errors import CheckpointError
from qkattn.model.cost import abstract_params
from qkattn.storage.files import as_path
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import write_json
from qkattn.train import exported
from qkattn.train.initial_parameters import InitialParameters
from qkattn.train.loop import train
from tests import damages
from tests.processes import other_modes, umask
from tests.refusals import refused

MODEL = ModelConfig(d_model=16, num_layers=2, num_heads=2, context=8)


def params_of(model: ModelConfig) -> dict:
    draw = np.random.default_rng(0).standard_normal
    return jax.tree.map(lambda a: np.float32(draw(a.shape)), abstract_params(model))


@pytest.mark.parametrize('where', ['disk', 'bucket'])
def test_a_directory_returns_what_was_saved_and_is_not_overwritten(tmp_path, bucket, where):
    path = str(tmp_path / 'w') if where == 'disk' else 'gs://runs/w'
    params = params_of(MODEL)
    assert exported.save(path, MODEL, params, origin={'made': 'here'}) == as_path(path)
    model, loaded = exported.load(path)
    assert model == MODEL
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    with refused(f'{path} already holds parameters'):
        exported.save(path, MODEL, params, origin={})
    with refused('holds neither exported parameters .* nor a run'):
        exported.load(f'{path}/absent')


def test_training_goes_on_from_a_run_and_from_a_directory(small, small_run, tmp_path):
    model, params = exported.load(small_run[1])
    assert model == small_run[0].model
    with umask(0o002):
        exported.save(tmp_path / 'w', model, params, origin={})
    config = small(train={'init_from': f'{tmp_path}/w'})
    with umask(0o077):
        trained = train(config, tmp_path / 'run')
    assert not other_modes(tmp_path / 'w', 0o002) and not other_modes(tmp_path / 'run', 0o077)
    first, again = (read_metrics(run / 'metrics.jsonl') for run in (small_run[1], tmp_path / 'run'))
    assert again[0]['loss'][0] < first[0]['loss'][0] - 0.5  # it starts where the small run ended
    kept = json.loads((tmp_path / 'w' / exported.ABOUT).read_text())['parameters_sha256']
    assert (
        kept == exported.parameters_sha256(params) != exported.parameters_sha256(params_of(model))
    )
    # It resumes from its checkpoint, where the directory is gone, too.
    (tmp_path / 'run/result.json').unlink()
    shutil.rmtree(tmp_path / 'w')
    resumed = train(config, tmp_path / 'run')
    assert [one['test_loss'] for one in resumed] == [one['test_loss'] for one in trained]
    imported = [one['provenance']['imported'] for one in (*trained, *resumed)]
    assert imported == [{'train.init_from': kept}] * 2 * len(trained)
    with refused('holds neither exported parameters'):
        train(config, tmp_path / 'other')
    assert not (tmp_path / 'other').exists()  # so that init_from can be corrected


def test_a_checkpoint_of_another_run_is_not_loaded(small, small_run, tmp_path):
    path = shutil.copytree(small_run[1], tmp_path / 'run')
    config = small(trials={'seeds': (5, 7)})
    write_json(path / 'config.json', {'hash': fingerprint(config), 'config': to_json(config)})
    with refused('12 is of a run with another configuration', CheckpointError):
        exported.load(path)


def test_settings_of_a_model_that_the_run_does_not_have_are_named(small, tmp_path, caplog):
    config = small()
    fields = {'activation': 'gelu', 'd_ff': config.model.mlp_width, 'window': 3, 'logit_cap': 9.0}
    model = dataclasses.replace(config.model, **fields, encoder_variant='a/b', cross_variant='a/b')
    exported.save(tmp_path / 'w', model, params_of(model), origin={})
    config = small(train={'init_from': f'{tmp_path}/w'})
    loaded = InitialParameters(config).load()
    jax.tree.map(np.testing.assert_array_equal, loaded, params_of(model))
    changes = 'encoder_variant: "a/b" -> null, cross_variant: "a/b" -> null, activation: "gelu" -> '
    changes += '"gelu_tanh", logit_cap: 9.0 -> null, window: 3 -> null\n'
    assert f'{tmp_path}/w has other settings: {changes}' in caplog.text


def test_other_parameters_are_refused_by_name():
    for change, message in (
        ({'value': 'no_v'}, 'has no place for parameter blocks.attention.value.w_v_DKH'),
        ({'tied_embeddings': False}, 'lacks parameter w_output_DV'),
        ({'d_ff': 100}, r'blocks.mlp.w_in_DF is \(2, 16, 64\), not \(2, 16, 100\)'),
    ):
        with refused(message):
            exported.check(dataclasses.replace(MODEL, **change), params_of(MODEL), 'w')


@pytest.mark.parametrize('name', [exported.PARAMETERS, exported.ABOUT])
def test_damaged_files_are_named(tmp_path, name):
    exported.save(tmp_path, MODEL, params_of(MODEL), origin={})
    sound = (tmp_path / name).read_bytes()
    flipped = sound[:-5] + bytes([sound[-5] ^ 1]) + sound[-4:]
    fields = damages.fields(sound) if name == exported.ABOUT else ()
    for label, content in [*damages.whole(sound), ('one bit', flipped), *fields]:
        damages.replace(tmp_path / name, content)
        if label == '0: without crc32':
            exported.load(tmp_path)
            continue
        with refused(name):
            exported.load(tmp_path)
