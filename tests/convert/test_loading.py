"""A run by its directory: models, settings, step; directories that are none, or damaged."""

import contextlib
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.config import Config, ModelConfig, to_json
from qkattn.convert.loading import Loaded, load, tokenizer_for
from qkattn.errors import CheckpointError, ConfigError
from qkattn.storage.records import write_json
from qkattn.train import exported
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.step import init_stack
from tests.refusals import refused


class TrainedRun(NamedTuple):
    directory: Path
    config: Config
    state: dict[str, Any]


def save_checkpoint(
    run: Path, state: dict, *, step: int, alive: list[bool], factor: float = 1.0, keep: int = 2
) -> None:
    """Saves a state of training as a checkpoint of `step`.

    Args:
        run: The directory of the run.
        state: The state.
        step: The step under which it is saved.
        alive: For each trial, whether it has not diverged.
        factor: The saved parameters are the parameters of the state times this factor.
        keep: The number of newest checkpoints that are not deleted.
    """
    trials = dict(state['trials'], alive=jnp.array(alive))
    trials['params'] = jax.tree.map(lambda leaf: factor * leaf, trials['params'])
    changed_state = {**state, 'trials': trials, 'step': jnp.int32(step)}
    record = {'data': {}, 'train_seconds': 0.0}
    with contextlib.closing(Checkpoints(run / 'checkpoints', keep=keep)) as checkpoints:
        checkpoints.save(step, changed_state, record)


@pytest.fixture(scope='module')
def trained(tiny, tmp_path_factory):
    """A run with one checkpoint, of step 4. The first of its two trials has diverged."""
    directory = tmp_path_factory.mktemp('runs') / 'run'
    config = tiny(model={'num_layers': 1}, trials={'seeds': (0, 1)})
    write_json(directory / 'config.json', {'hash': '', 'config': to_json(config)})
    state = jax.jit(lambda seeds: init_stack(config, seeds))(jnp.arange(2, dtype=jnp.uint32))
    save_checkpoint(directory, state, step=4, alive=[False, True])
    return TrainedRun(directory, config, state)


def test_a_run_loads_with_a_model_per_trial(trained, caplog):
    """The run `trained` has two trials, which differ in their seeds, and a checkpoint of step 4."""
    run = load(trained.directory)

    assert run.path == trained.directory
    assert run.config == trained.config
    assert run.step == 4
    assert run.trials == trained.config.trials.trials()
    assert len(run.models) == 2
    # 1 row of 5 tokens has logits for 256 ids, which are bytes.
    logits_BTV = run.model(np.zeros((1, 5), np.int32))
    assert logits_BTV.shape == (1, 5, 256)
    # There is no warning.
    assert not caplog.records


def test_the_model_of_a_run_is_its_first_trial_alive(trained):
    run = load(trained.directory)

    assert run.alive == [False, True]
    assert run.trial == 1
    assert run.model is run.models[1]
    with refused(r'trial=2 must be in \[0, 2\)'):
        run.check_trial(2)


def test_a_loaded_run_describes_itself(trained):
    run = load(trained.directory)

    num_steps = trained.config.train.num_steps
    assert repr(run) == (
        f'Loaded(decoder qk/vo, d_model=32, num_layers=1, step 4 of {num_steps}, '
        f'trials: {run.trials}, path: {trained.directory})'
    )


@pytest.fixture(scope='module')
def run_with_three_checkpoints(trained, tmp_path_factory):
    """The directory of a run with checkpoints of steps 4, 6 and 8. Tests only read it.

    The checkpoints have the parameters of step 4 times 1, 3 and 5. As saved in `alive`, the first
    trial has diverged in step 4, and the second in step 8.
    """
    run = shutil.copytree(trained.directory, tmp_path_factory.mktemp('runs') / 'run')
    save_checkpoint(run, trained.state, step=6, factor=3.0, alive=[True, True], keep=3)
    save_checkpoint(run, trained.state, step=8, factor=5.0, alive=[True, False], keep=3)
    return run


@pytest.mark.parametrize(
    ('average', 'mean_factor'), [(1, 5.0), (2, (5.0 + 3.0) / 2), (3, (5.0 + 3.0 + 1.0) / 3)]
)
def test_the_newest_checkpoints_of_a_run_are_averaged(
    trained, run_with_three_checkpoints, average, mean_factor
):
    """The checkpoints of steps 8, 6 and 4 hold the same parameters times 5, 3 and 1."""
    second_trial = 1
    run_with_step_4 = load(trained.directory)
    parameters_of_step_4 = jax.tree.leaves(run_with_step_4.params[second_trial])

    loaded = load(run_with_three_checkpoints, average=average)

    # Only the parameters are averaged. The rest comes from the newest checkpoint, of step 8. There,
    # the second trial has diverged. In step 4, the first had.
    assert loaded.step == 8
    assert loaded.alive == [True, False]
    # The parameters of every trial are averaged, whether it is alive or not.
    averages = jax.tree.leaves(loaded.params[second_trial])
    for averaged, parameter in zip(averages, parameters_of_step_4, strict=True):
        np.testing.assert_allclose(averaged, mean_factor * parameter, rtol=1e-6)


def test_more_checkpoints_than_a_run_has_are_not_averaged(run_with_three_checkpoints):
    with refused(r'average=4 .* checkpoints of .* are of steps \[8, 6, 4\]; train.keep'):
        load(run_with_three_checkpoints, average=4)


def test_checkpoints_with_a_gap_are_not_averaged(trained, tmp_path):
    run = shutil.copytree(trained.directory, tmp_path / 'run')
    step = 4 + 2 * trained.config.train.checkpoint_every
    save_checkpoint(run, trained.state, step=step, alive=[True, False])

    with refused(rf'average=2 .* are of steps \[{step}, 4\]'):
        load(run, average=2)


def test_checkpoints_with_a_gap_before_a_stop_are_not_averaged(trained, tmp_path):
    """A stop saves a checkpoint between the regular ones, which does not make up for a gap."""
    run = shutil.copytree(trained.directory, tmp_path / 'run')
    # Regular checkpoints are 4 steps apart, so the checkpoint of step 8 is missing.
    assert trained.config.train.checkpoint_every == 4
    for step in (10, 12):
        save_checkpoint(run, trained.state, step=step, alive=[True, False], keep=3)

    # From step 4 to 10 are 6 steps, although the mean distance of all three is 4.
    with refused(r'average=3 .* are of steps \[12, 10, 4\]'):
        load(run, average=3)


def test_exported_parameters_load_as_one_model(trained, tmp_path):
    """Only the parameters of one trial are exported, without the config and step of its run."""
    first_trial = load(trained.directory).params[0]
    exported.save(tmp_path, trained.config.model, first_trial, origin={})

    loaded = load(tmp_path)

    assert loaded.config is None
    assert loaded.step is None
    # The only trial has no known seed or other setting.
    assert loaded.trials == [{}]
    assert loaded.trial == 0
    with refused('average=2 needs the checkpoints of a run'):
        load(tmp_path, average=2)


def test_a_number_of_heads_is_refused_for_a_model_with_a_config(trained, tmp_path):
    """A run and exported parameters know their number of heads."""
    exported.save(tmp_path, trained.config.model, load(trained.directory).params[0], origin={})

    for path in (trained.directory, tmp_path):
        with refused(f'num_heads=2 is for published files, and {path} has a config'):
            load(path, num_heads=2)


def test_a_model_of_more_ids_than_bytes_needs_a_tokenizer(tmp_path):
    """Without --data, text is bytes. The 300 ids of this model must mean something else."""
    model = ModelConfig(vocab_size=300)
    loaded = Loaded(tmp_path, model, params=[{}], trials=[{}], alive=[True])

    with refused(f'--data is required: {tmp_path} has 300 ids, and text of bytes only 256'):
        tokenizer_for(loaded, None, otherwise='--prompt_tokens')

    # With --data=stdlib, the 44 ids beyond the bytes are padding.
    assert tokenizer_for(loaded, 'stdlib', otherwise='--prompt_tokens').name == 'bytes'


@pytest.mark.parametrize(
    ('removed', 'message'),
    [
        ('checkpoints', 'holds neither exported parameters'),
        ('checkpoints/*/state', 'every checkpoint in .* is damaged'),
        ('checkpoints/*', 'has no checkpoint yet'),
        ('', 'does not exist'),
    ],
)
def test_a_directory_without_a_readable_checkpoint_is_refused(trained, tmp_path, removed, message):
    run = shutil.copytree(trained.directory, tmp_path / 'run')
    for path in tmp_path.glob(f'run/{removed}'):
        shutil.rmtree(path)

    with refused(message, (ConfigError, CheckpointError)) as raised:
        load(run)

    assert str(run) in str(raised.value)


def test_a_study_without_runs_is_refused(tmp_path):
    (tmp_path / 'study.json').write_text('{}')

    with refused('is a study without runs yet'):
        load(tmp_path)


def test_a_study_is_refused_and_one_of_its_runs_is_named(trained, tmp_path):
    (tmp_path / 'study.json').write_text('{}')
    shutil.copytree(trained.directory, tmp_path / 'runs/qk-vo')

    with refused(f'give one of its runs, e.g. {tmp_path}/runs/qk'):
        load(tmp_path)
