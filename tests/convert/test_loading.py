"""A run by its directory: models, settings, step; directories that are none, or damaged."""

import contextlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.config import to_json
from qkattn.convert.loading import load
from qkattn.errors import CheckpointError, ConfigError
from qkattn.storage.records import write_json
from qkattn.train import exported
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.step import init_stack
from tests.refusals import refused


@pytest.fixture(scope='module')
def trained(tiny, tmp_path_factory):
    """A run of two trials after 4 steps, the first of which diverged, its config and its state."""
    directory = tmp_path_factory.mktemp('runs') / 'run'
    config = tiny(model={'num_layers': 1}, trials={'seeds': (0, 1)})
    record = {'data': {}, 'train_seconds': 0.0}
    write_json(directory / 'config.json', {'hash': '', 'config': to_json(config)})
    state = jax.jit(lambda seeds: init_stack(config, seeds))(jnp.arange(2, dtype=jnp.uint32))
    state['trials']['alive'] = jnp.array([False, True])
    with contextlib.closing(Checkpoints(directory / 'checkpoints')) as checkpoints:
        checkpoints.save(4, {**state, 'step': jnp.int32(4)}, record)
    return directory, config, state


def test_a_run_loads_with_a_model_per_trial(trained, caplog):
    directory, config, _ = trained
    run = load(directory)
    assert (run.path, run.config, run.step) == (directory, config, 4)
    assert run.trials == config.trials.trials()
    assert len(run.models) == 2
    # The first trial diverged, so the second one is the run's model.
    assert run.alive == [False, True]
    assert run.trial == 1
    assert run.model is run.models[1]
    with refused(r'trial=2 must be in \[0, 2\)'):
        run.check_trial(2)
    assert run.model(np.zeros((1, 5), np.int32)).shape == (1, 5, 256)
    about = f'decoder qk/vo, d_model=32, num_layers=1, step 4 of {config.train.num_steps}, trials: '
    assert repr(run) == f'Loaded({about}{run.trials}, path: {directory})'
    assert not caplog.records


def test_the_newest_checkpoints_of_a_run_are_averaged(trained, tmp_path):
    # To the checkpoint of step 4, add those of steps 6 and 8 with 3 and 5 times its parameters.
    # Another trial is alive in the last one.
    source, config, state = trained
    directory = tmp_path / 'run'
    shutil.copytree(source, directory)
    for step, factor in ((6, 3.0), (8, 5.0)):
        trials = dict(state['trials'], alive=jnp.array([True, step == 6]))
        trials['params'] = jax.tree.map(lambda leaf, by=factor: by * leaf, trials['params'])
        later = {**state, 'trials': trials, 'step': jnp.int32(step)}
        with contextlib.closing(Checkpoints(directory / 'checkpoints', keep=3)) as saved:
            saved.save(step, later, {'data': {}, 'train_seconds': 0.0})

    # The mean over the newest 1, 2 or 3 of the factors 5, 3 and 1.
    for average, factor in ((1, 5.0), (2, 4.0), (3, 3.0)):
        run = load(directory, average=average)
        assert run.step == 8
        assert run.alive == [True, False]
        averaged = jax.tree.leaves(run.params[1])
        of_step_4 = jax.tree.leaves(load(trained[0]).params[1])
        for leaf, first in zip(averaged, of_step_4, strict=True):
            np.testing.assert_allclose(leaf, factor * first, rtol=1e-6)
    with refused(r'average=4 .* checkpoints of .* are of steps \[8, 6, 4\]; train.keep'):
        load(directory, average=4)

    # Checkpoints further apart than their regular distance are not averaged.
    with contextlib.closing(Checkpoints(directory / 'checkpoints')) as saved:
        later['step'] = jnp.int32(8 + 2 * config.train.checkpoint_every)
        saved.save(int(later['step']), later, {'data': {}, 'train_seconds': 0.0})
    with refused(rf'average=2 .* are of steps \[{later["step"]}, 8\]'):
        load(directory, average=2)

    # Exported parameters are one model, without a run.
    exported.save(tmp_path / 'w', config.model, run.params[0], origin={})
    loaded = load(tmp_path / 'w')
    assert (loaded.config, loaded.step, loaded.trials, loaded.trial) == (None, None, [{}], 0)
    with refused('average=2 needs the checkpoints of a run'):
        load(tmp_path / 'w', average=2)


@pytest.mark.parametrize(
    ('removed', 'message'),
    [
        ('checkpoints', 'holds neither exported parameters'),
        ('checkpoints/*/state', 'every checkpoint in .* is damaged'),
        ('checkpoints/*', 'has no checkpoint yet'),
        ('', 'does not exist'),
    ],
)
def test_a_directory_without_a_readable_checkpoint_is_refused_in_one_sentence(
    trained, tmp_path, removed, message
):
    run = shutil.copytree(trained[0], tmp_path / 'run')
    for path in tmp_path.glob(f'run/{removed}'):
        shutil.rmtree(path)
    with refused(message, (ConfigError, CheckpointError)) as raised:
        load(run)
    assert str(run) in str(raised.value)


def test_a_study_is_refused_and_one_of_its_runs_is_named(trained, tmp_path):
    (tmp_path / 'study.json').write_text('{}')
    with refused('is a study without runs yet'):
        load(tmp_path)
    shutil.copytree(trained[0], tmp_path / 'runs/qk-vo')
    with refused(f'give one of its runs, e.g. {tmp_path}/runs/qk'):
        load(tmp_path)
