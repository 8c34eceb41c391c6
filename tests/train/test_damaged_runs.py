"""Damaged files of runs, checkpoints and exported parameters: one sentence, or no difference."""

import shutil

import jax
import numpy as np
import pytest

from qkattn.config import ModelConfig
from qkattn.errors import CheckpointError, ConfigError
from qkattn.model.cost import abstract_params
from qkattn.train import exported, train
from qkattn.train.checkpoint import Checkpoints
from tests import damages
from tests.train.test_resume import outcome

EVERY = 24  # cases, of which one is tried in the quick tests, from one of the first twelve
FIRST = 12
SOME = [pytest.param(1, marks=pytest.mark.slow, id='all'), pytest.param(EVERY, id='some')]
FILES = ('config.json', 'provenance.json', 'lifting.json', 'metrics.jsonl', 'result.json')


def outcome_or_refusal(call, *arguments):
    """(what a call returns, None), or (None, the sentence with which it refuses)."""
    try:
        return call(*arguments), None
    except (ConfigError, CheckpointError) as error:
        return None, str(error)


@pytest.mark.usefixtures('programs_kept')
@pytest.mark.parametrize('every', SOME)
@pytest.mark.parametrize('name', FILES)
def test_a_run_with_a_damaged_file_refuses_or_ends_as_it_would_have(
    small_run, tmp_path, name, every
):
    config, source = small_run
    sound = (source / name).read_bytes()
    cases = [*damages.whole(sound), *(() if name == 'metrics.jsonl' else damages.fields(sound))]
    for number, (label, content) in enumerate(cases[len(name) % min(every, FIRST) :: every]):
        path = tmp_path / str(number)
        shutil.copytree(source, path)
        if name != 'result.json':  # the run is resumed at its end
            (path / 'result.json').unlink()
        damages.replace(path / name, content)
        _, refused = outcome_or_refusal(train, config, path)
        if refused is None:
            assert name == 'metrics.jsonl' or label == '0: without crc32', label
            assert outcome(path) == outcome(source)
        else:
            assert name in refused and '\n' not in refused
            assert (
                path.joinpath(name).is_dir()
                if content is None
                else (path.joinpath(name).read_bytes() == content)
            )
            assert (path / 'result.json').exists() == (name == 'result.json')
        shutil.rmtree(path)


@pytest.fixture(scope='module')
def checkpoints(tmp_path_factory):
    """A directory of two checkpoints, and what is restored of them."""
    path = tmp_path_factory.mktemp('checkpoints') / 'c'
    saved = Checkpoints(path)
    for step in (4, 8):
        state = {'step': jax.numpy.int32(step), 'w': jax.numpy.arange(64.0) + step}
        saved.save(step, state, {'data': {}, 'train_seconds': 1.0}, 2.0)
    saved.close()
    return path, jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), state)


OF_CHECKPOINT = (
    *('_CHECKPOINT_METADATA', 'commit_success.txt', 'metrics/metrics', 'record/metadata'),
    *('record/commit_success.txt', 'state/_METADATA', 'state/_sharding', 'state/manifest.ocdbt'),
    *('state/d/*', 'state/ocdbt.process_0/manifest.ocdbt', 'state/array_metadatas/process_0'),
)


@pytest.mark.parametrize('every', SOME)
@pytest.mark.parametrize('name', OF_CHECKPOINT)
def test_a_damaged_file_of_a_checkpoint_costs_at_most_that_checkpoint(
    checkpoints, tmp_path, name, every
):
    source, target = checkpoints
    (found,) = sorted((source / '8').glob(name))[:1]
    sound = found.read_bytes()
    cases = list(damages.whole(sound))
    for label, content in cases[len(name) % min(every, FIRST) :: every]:
        path = tmp_path / label
        shutil.copytree(source, path)
        damages.replace(path / found.relative_to(source), content)
        opened = Checkpoints(path)
        state, record = opened.restore(target)
        opened.close()
        assert int(state['step']) in (4, 8), label
        np.testing.assert_array_equal(state['w'], np.arange(64.0) + int(state['step']))
        assert record['train_seconds'] == 1.0


def test_a_checkpoint_whose_description_is_damaged_is_never_started_over(checkpoints, tmp_path):
    source, target = checkpoints
    path = tmp_path / 'c'
    shutil.copytree(source, path)
    for step in ('4', '8'):
        (path / step / '_CHECKPOINT_METADATA').write_text('3')
    with pytest.raises(CheckpointError, match='c/[48] is damaged .*go'):
        Checkpoints(path, read_only=True)
    assert sorted(p.name for p in path.iterdir()) == ['4', '8']
    for _ in range(2):  # the same command again
        opened = Checkpoints(path)
        with pytest.raises(CheckpointError, match='every checkpoint in .* is damaged'):
            opened.restore(target)
        opened.close()
    assert sorted(p.name for p in path.iterdir()) == ['4.damaged', '8.damaged']


@pytest.mark.parametrize('name', [exported.PARAMETERS, exported.ABOUT])
def test_damaged_exported_parameters_are_named(tmp_path, name):
    model = ModelConfig(d_model=16, num_layers=1, num_heads=2, context=8)
    shapes = abstract_params(model)
    params = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    exported.save(tmp_path, model, params, origin={})
    sound = (tmp_path / name).read_bytes()
    flipped = bytearray(sound)
    flipped[-5] ^= 1
    cases = [*damages.whole(sound), ('one bit', bytes(flipped))]
    for label, content in [*cases, *(damages.fields(sound) if name == exported.ABOUT else ())]:
        damages.replace(tmp_path / name, content)
        found, refused = outcome_or_refusal(exported.load, tmp_path)
        if label == '0: without crc32':
            assert found is not None
        else:
            assert name in refused and '\n' not in refused, label
    damages.replace(tmp_path / name, sound)
    jax.tree.map(np.testing.assert_array_equal, exported.load(tmp_path)[1], params)
