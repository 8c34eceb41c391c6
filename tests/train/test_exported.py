"""Exported models: saved, loaded, taken from a run, and trained further."""

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
from qkattn.train import exported, program
from qkattn.train.initial_parameters import InitialParameters
from qkattn.train.loop import train
from tests import damages
from tests.processes import other_modes, umask
from tests.refusals import refused
from tests.runs import results_of, without_times

MODEL = ModelConfig(d_model=16, num_layers=2, num_heads=2, context=8)


def params_of(model: ModelConfig) -> dict:
    """Random parameters, the same at each call."""
    rng = np.random.default_rng(0)
    shapes = abstract_params(model)
    return jax.tree.map(lambda leaf: np.float32(rng.standard_normal(leaf.shape)), shapes)


@pytest.mark.parametrize('place', ['disk', 'bucket'])
def test_load_returns_what_was_saved(tmp_path, bucket, place):
    """An export of a model, on a disk or in a bucket, holds its settings and parameters.

    The fixture `bucket` serves gs://runs.
    """
    path = str(tmp_path / 'w') if place == 'disk' else 'gs://runs/w'
    params = params_of(MODEL)

    saved_path = exported.save(path, MODEL, params, origin={'made': 'here'})
    loaded_model, loaded_params = exported.load(path)

    assert saved_path == as_path(path)
    assert loaded_model == MODEL
    jax.tree.map(np.testing.assert_array_equal, loaded_params, params)

    # A path without an export is refused.
    with refused('holds neither exported parameters .* nor a run'):
        exported.load(f'{path}/absent')


def test_an_export_is_not_overwritten(tmp_path):
    exported.save(tmp_path, MODEL, params_of(MODEL), origin={})
    with refused(f'{tmp_path} already holds parameters'):
        exported.save(tmp_path, MODEL, params_of(MODEL), origin={})


def test_an_export_has_the_permissions_of_the_umask(tmp_path):
    with umask(0o002):
        exported.save(tmp_path / 'w', MODEL, params_of(MODEL), origin={})
    assert not other_modes(tmp_path / 'w', 0o002)


# Training that starts from exported parameters (train.init_from)


@dataclasses.dataclass(frozen=True)
class ContinuedRun:
    """A finished run that started from the exported parameters of `small_run`."""

    config: Config
    path: Path
    # The hash of these parameters. Their directory is deleted.
    parameters_sha256: str


@pytest.fixture(scope='module')
def continued(small, small_run, tmp_path_factory):
    """A finished run that started from the last parameters of `small_run`.

    The export of these parameters is deleted after training. The umask during training was 0o077,
    so only the user can read the files of the run.
    """
    directory = tmp_path_factory.mktemp('continued')
    model, params = exported.load(small_run.path)
    assert model == small_run.config.model
    export = exported.save(directory / 'w', model, params, origin={})
    about = json.loads((export / exported.ABOUT).read_text())
    assert about['parameters_sha256'] == exported.parameters_sha256(params)

    config = small(train={'init_from': f'{export}'})
    with umask(0o077):
        train(config, directory / 'run')

    shutil.rmtree(export)
    return ContinuedRun(config, directory / 'run', about['parameters_sha256'])


def test_training_starts_from_exported_parameters(small_run, continued):
    """`small_run` started from random parameters. `continued` started where `small_run` ended."""
    random_start_records = read_metrics(small_run.path / 'metrics.jsonl')
    records = read_metrics(continued.path / 'metrics.jsonl')
    # The losses of the first trial at the first step, in nats.
    loss_of_random_start = random_start_records[0]['loss'][0]
    loss = records[0]['loss'][0]
    assert loss < loss_of_random_start - 0.5


REMEMBERING_MODULE = """
import optax
def remember(config, learning_rate, weight_decay):
    def update(gradient, state, params):
        return gradient, state
    return optax.GradientTransformation(lambda params: params, update)
"""


def test_an_optimizer_starts_from_exported_parameters(small, outside, evaluation_only):
    """The state of an optimizer may hold the first parameters, as in schedule-free training.

    The state of the optimizer `remember` is a copy of the parameters that it is initialized with.
    """
    (outside / 'remembering.py').write_text(REMEMBERING_MODULE)
    config = small(optimizer={'name': 'remembering:remember'})
    params = params_of(config.model)

    state = program.build(config).init(params)

    trials = state['trials']
    # The optimizer is a chain of clipping, `remember` and weight decay.
    _, remembered_params, _ = trials['opt_state']
    jax.tree.map(np.testing.assert_array_equal, remembered_params, trials['params'])
    # Both trials start from the same given parameters.
    params_of_trials = jax.tree.map(lambda leaf: np.stack([leaf, leaf]), params)
    jax.tree.map(np.testing.assert_array_equal, trials['params'], params_of_trials)
    assert trials['alive'].tolist() == [True, True]
    assert int(state['step']) == 0


def test_results_hold_the_hash_of_the_first_parameters(continued):
    for result in results_of(continued.path):
        imported = result['provenance']['imported']
        assert imported == {'train.init_from': continued.parameters_sha256}


def test_other_parameters_have_another_hash(continued):
    other_params = params_of(continued.config.model)
    assert exported.parameters_sha256(other_params) != continued.parameters_sha256


def test_a_run_has_the_permissions_of_the_umask(continued):
    assert not other_modes(continued.path, 0o077)


def test_a_run_resumes_after_its_first_parameters_were_deleted(continued, tmp_path):
    result_file = shutil.ignore_patterns('result.json')
    path = shutil.copytree(continued.path, tmp_path / 'run', ignore=result_file)

    results = train(continued.config, path)

    assert without_times(results) == without_times(results_of(continued.path))


def test_a_run_without_its_first_parameters_makes_no_directory(continued, tmp_path):
    """A run directory would fix train.init_from, which the user still has to correct."""
    with refused('holds neither exported parameters'):
        train(continued.config, tmp_path / 'run')
    assert not (tmp_path / 'run').exists()


def test_the_checkpoint_of_another_run_is_not_loaded(small, small_run, tmp_path):
    """A checkpoint is loaded only if it has the hash of the settings in the run directory."""
    path = shutil.copytree(small_run.path, tmp_path / 'run')
    # Replace the settings in the copy. The new settings have other seeds.
    other_config = small(trials={'seeds': (5, 7)})
    other_settings = {'hash': fingerprint(other_config), 'config': to_json(other_config)}
    write_json(path / 'config.json', other_settings)

    # The newest checkpoint has step 12.
    with refused('12 is of a run with another configuration', CheckpointError):
        exported.load(path)


def test_differences_between_the_settings_of_export_and_run_are_logged(small, tmp_path, caplog):
    export = tmp_path / 'w'
    config = small(train={'init_from': str(export)})
    exported_model = dataclasses.replace(
        config.model,
        encoder_variant='a/b',
        cross_variant='a/b',
        activation='gelu',
        logit_cap=9.0,
        window=3,
        # The run has d_ff=None, which means the same width.
        d_ff=config.model.mlp_width,
    )
    exported_params = params_of(exported_model)
    exported.save(export, exported_model, exported_params, origin={})

    loaded_params = InitialParameters(config).load()

    # Exported and expected parameters have the same shapes, so loading succeeds.
    jax.tree.map(np.testing.assert_array_equal, loaded_params, exported_params)

    # The entries are 'field: exported value -> value of the run'. The field d_ff is not listed,
    # because another width would show in the shapes.
    changes = [
        'encoder_variant: "a/b" -> null',
        'cross_variant: "a/b" -> null',
        'activation: "gelu" -> "gelu_tanh"',
        'logit_cap: 9.0 -> null',
        'window: 3 -> null',
    ]
    message = f'train.init_from={export} has other settings: {", ".join(changes)}\n'
    assert message in caplog.text


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        pytest.param(
            {'value': 'no_v'},
            'has no place for parameter blocks.attention.value.w_v_DKH',
            id='an additional parameter',
        ),
        pytest.param(
            {'tied_embeddings': False},
            'lacks parameter w_output_DV',
            id='a missing parameter',
        ),
        pytest.param(
            {'d_ff': 100},
            r'blocks.mlp.w_in_DF is \(2, 16, 64\), not \(2, 16, 100\)',
            id='another shape',
        ),
    ],
)
def test_parameters_that_do_not_fit_a_model_are_refused_by_name(changes, message):
    """The parameters of MODEL do not fit a model where one setting differs.

    MODEL has matrices W_V, tied embeddings, 2 layers, d_model=16 and MLPs of width 64.
    """
    other_model = dataclasses.replace(MODEL, **changes)
    with refused(message):
        exported.check(other_model, params_of(MODEL), 'w')


@pytest.mark.parametrize('name', [exported.PARAMETERS, exported.ABOUT])
def test_damaged_files_are_named(tmp_path, name):
    """If one of the two files of an export is damaged, loading fails with its name.

    PARAMETERS is the file of arrays. ABOUT is a JSON file of settings and checksums.
    """
    exported.save(tmp_path, MODEL, params_of(MODEL), origin={})
    content = (tmp_path / name).read_bytes()

    # A damage changes the whole file, one bit, or one field of the JSON.
    content_with_flipped_bit = bytearray(content)
    content_with_flipped_bit[-5] ^= 1
    labels_and_damages = [*damages.whole(content), ('one bit', bytes(content_with_flipped_bit))]
    if name == exported.ABOUT:
        labels_and_damages += damages.fields(content)

    for label, damaged_content in labels_and_damages:
        damages.replace(tmp_path / name, damaged_content)
        # The field crc32 of the JSON file is optional.
        if label == '0: without crc32':
            exported.load(tmp_path)
        else:
            with refused(name):
                exported.load(tmp_path)
