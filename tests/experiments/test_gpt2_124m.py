"""GPT-2 124M and its study: sizes, memory, and ten steps of tiny models on shards of llm.c."""

import dataclasses
import runpy

import numpy as np
import pytest

from qkattn.data.tasks.task_registry import rows_of
from tests import studies
from tests.data.test_token_formats import write_llm_c
from tests.processes import ROOT
from tests.runs import results_of

SEPARATOR = 50256  # <|endoftext|>, before each document
VOCAB_SIZE = 50304  # 50257, padded to a multiple of 64
STUDY = ('ablate', '--config=ablation_124m')


def documents(seed, number):
    """Joins random documents of 20 to 59 token IDs of GPT-2, with a separator before each."""
    rng = np.random.default_rng(seed)
    parts = []
    for _ in range(number):
        length = rng.integers(20, 60)
        parts.append(np.append(SEPARATOR, rng.integers(0, SEPARATOR, length)))
    return np.concatenate(parts).astype(np.uint16)


@pytest.fixture
def shards(tmp_path):
    """A directory like dev/data/fineweb10B of llm.c, with 3 train shards and a validation shard.

    A train document may begin in one shard and end in the next one.
    """
    path = tmp_path / 'fineweb10B'
    train_shards = np.array_split(documents(seed=0, number=300), 3)
    for index, ids in enumerate(train_shards, start=1):
        write_llm_c(path / f'fineweb_train_{index:06}.bin', ids)
    write_llm_c(path / 'fineweb_val_000000.bin', documents(seed=1, number=60))
    return path


@pytest.mark.slow
def test_the_recipe_trains_from_shards(printed, tmp_path, shards):
    """The recipe of GPT-2 124M trains on shards, which are token files in the format of llm.c.

    The scale `smoke` trains one tiny model for ten steps.
    """
    flags = (f'--config.data.path={shards}', f'--config.data.data_dir={tmp_path}/cache')
    printed('train', '--config=gpt2_124m:smoke', *flags, '--workdir=run')

    results = results_of(tmp_path / 'run')
    assert len(results) == 1
    result = results[0]
    assert result['status'] == 'finished'
    assert result['num_steps'] == 10

    # Token IDs are random, and after ten steps the model still predicts nearly uniformly. So the
    # loss is about ln(VOCAB_SIZE).
    assert result['val_loss'] == pytest.approx(np.log(VOCAB_SIZE), abs=0.1)
    assert result['data']['fingerprints'].keys() == {'train', 'validation'}


def test_the_study_carves_a_test_split_from_the_train_shards(tmp_path, shards):
    get_config = runpy.run_path(str(ROOT / 'configs/ablation_124m.py'))['get_config']
    config = get_config('smoke').base
    data = dataclasses.replace(config.data, path=str(shards), data_dir=str(tmp_path / 'cache'))

    rows = rows_of(dataclasses.replace(config, data=data))

    assert rows.splits == ('train', 'validation', 'test')
    names, _ = rows.documents('test')
    assert len(names) > 20


@pytest.mark.slow
def test_the_study_trains_from_shards(printed, tmp_path, shards):
    """The study of GPT-2 124M trains all its variants on shards (token files) of llm.c.

    There are no test shards, so a test split is carved out of the train shards. The scale `smoke`
    trains tiny models for ten steps.
    """
    data = (f'--config.base.data.path={shards}', f'--config.base.data.data_dir={tmp_path}/cache')
    printed('ablate', '--config=ablation_124m:smoke', *data, '--workdir=study')

    results = studies.read_lines(tmp_path / 'study/results.jsonl')
    num_variants = 7
    num_seeds = 2
    assert len({result['variant'] for result in results}) == num_variants
    assert len(results) == num_variants * num_seeds
    for result in results:
        assert result['status'] == 'finished'
        assert result['num_steps'] == 10
        assert result['data']['carved'].keys() == {'test'}
        # Token IDs are random, and after ten steps a model still predicts nearly uniformly. So the
        # loss is about ln(VOCAB_SIZE).
        assert abs(result['test_loss'] - np.log(VOCAB_SIZE)) < 0.1


@pytest.mark.parametrize(
    ('script', 'config'), [('train', 'gpt2_124m'), ('ablate', 'ablation_124m')]
)
def test_an_unknown_scale_is_refused(refusal, script, config):
    sentence = refusal(script, f'--config={config}:cpu', '--dry_run')
    assert "scale='cpu' must be smoke or gpu" in sentence


def test_the_arms_of_the_study_have_the_parameter_count_of_the_baseline(printed):
    """Every arm of the study has the parameter count of the baseline, up to 0.01 %.

    An arm is a model with a variant of attention. A dry run prints a table of the arms.
    """
    text = printed(*STUDY, '--dry_run')

    # The last 7 lines of the first table are the arms.
    num_arms = 7
    table = text.split('\n\n')[0].splitlines()
    rows = [line.split() for line in table[-num_arms:]]
    variants = [row[0] for row in rows]
    assert variants[:2] == ['qk/vo', 'query_free/vo']

    # Cell 10 is the parameter count. Here the vocabulary of GPT-2 is padded from 50257 to 50304,
    # which adds (50304 - 50257) * 768 = 36,096 parameters.
    baseline_parameters = rows[0][10]
    assert baseline_parameters == '124,475,904'

    # Cell 11 is the deviation from the baseline's count.
    for row in rows:
        deviation_percent = float(row[11].rstrip('%'))
        assert abs(deviation_percent) < 0.01


@pytest.mark.slow
@pytest.mark.parametrize(
    'command',
    [
        pytest.param(('train', '--config=gpt2_124m'), id='recipe'),
        pytest.param((*STUDY, '--config.variants=("qk/vo","shared_qk/vo")'), id='study'),
    ],
)
def test_the_recipe_and_the_study_fit_on_eight_h100(printed, command):
    text = printed(*command, '--dry_run=h100-1x8')
    assert 'mesh trial=1 data=8 fsdp=1 tensor=1' in text
    assert 'DOES NOT FIT' not in text
    assert 'replication' not in text
