"""Models by themselves: saved, loaded, taken from a run, trained further; damage is named."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from qkattn.config import Config, ModelConfig, fingerprint, to_json
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
from tests.runs import results_of, without_times

MODEL = ModelConfig(d_model=16, num_layers=2, num_heads=2, context=8)


def params_of(model: ModelConfig) -> dict:
    draw = np.random.default_rng(0).standard_normal
    return jax.tree.map(lambda a: np.float32(draw(a.shape)), abstract_params(model))


@pytest.mark.parametrize('where', ['disk', 'bucket'])
def test_a_directory_returns_what_was_saved(tmp_path, bucket, where):
    path = str(tmp_path / 'w') if where == 'disk' else 'gs://runs/w'
    params = params_of(MODEL)
    assert exported.save(path, MODEL, params, origin={'made': 'here'}) == as_path(path)
    model, loaded = exported.load(path)
    assert model == MODEL
    jax.tree.map(np.testing.assert_array_equal, loaded, params)
    with refused('holds neither exported parameters .* nor a run'):
        exported.load(f'{path}/absent')


def test_an_export_is_not_overwritten(tmp_path):
    exported.save(tmp_path, MODEL, params_of(MODEL), origin={})
    with refused(f'{tmp_path} already holds parameters'):
        exported.save(tmp_path, MODEL, params_of(MODEL), origin={})


def test_an_export_has_the_permissions_of_the_user(tmp_path):
    with umask(0o002):
        exported.save(tmp_path / 'w', MODEL, params_of(MODEL), origin={})
    assert not other_modes(tmp_path / 'w', 0o002)


# Training that goes on from a model


@dataclasses.dataclass(frozen=True)
class ContinuedRun:
    """A finished run that began with the parameters of the small run."""

    config: Config
    path: Path
    sha256: str  # of the parameters that it began with, whose directory is gone


@pytest.fixture(scope='module')
def continued(small, small_run, tmp_path_factory):
    """A `ContinuedRun`, made under a umask that lets nobody else read its files."""
    directory = tmp_path_factory.mktemp('continued')
    model, params = exported.load(small_run.path)
    assert model == small_run.config.model
    export = exported.save(directory / 'w', model, params, origin={})
    sha256 = json.loads((export / exported.ABOUT).read_text())['parameters_sha256']
    assert sha256 == exported.parameters_sha256(params)
    config = small(train={'init_from': f'{export}'})
    with umask(0o077):
        train(config, directory / 'run')
    shutil.rmtree(export)
    return ContinuedRun(config, directory / 'run', sha256)


def test_training_goes_on_from_exported_parameters(small_run, continued):
    first_losses = read_metrics(small_run.path / 'metrics.jsonl')[0]['loss']
    losses = read_metrics(continued.path / 'metrics.jsonl')[0]['loss']
    assert losses[0] < first_losses[0] - 0.5


def test_results_hold_the_hash_of_the_first_parameters(continued):
    for result in results_of(continued.path):
        assert result['provenance']['imported'] == {'train.init_from': continued.sha256}


def test_other_parameters_have_another_hash(continued):
    assert continued.sha256 != exported.parameters_sha256(params_of(continued.config.model))


def test_a_run_has_the_permissions_of_the_user(continued):
    assert not other_modes(continued.path, 0o077)


def test_a_run_resumes_where_its_first_parameters_are_gone(continued, tmp_path):
    no_result = shutil.ignore_patterns('result.json')
    path = shutil.copytree(continued.path, tmp_path / 'run', ignore=no_result)
    results = train(continued.config, path)
    assert without_times(results) == without_times(results_of(continued.path))


def test_a_run_whose_first_parameters_are_absent_makes_no_directory(continued, tmp_path):
    with refused('holds neither exported parameters'):
        train(continued.config, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()  # so that init_from can be corrected


def test_a_checkpoint_of_another_run_is_not_loaded(small, small_run, tmp_path):
    path = shutil.copytree(small_run.path, tmp_path / 'run')
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


def test_parameters_that_do_not_fit_a_model_are_refused_by_name():
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
