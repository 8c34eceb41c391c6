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

END = 50256  # <|endoftext|>, before each document
STUDY = ('ablate', '--config=ablation_124m')


def documents(seed, number):
    """Documents of 20 to 60 ids of GPT-2."""
    rng = np.random.default_rng(seed)
    parts = [np.append(END, rng.integers(0, END, rng.integers(20, 60))) for _ in range(number)]
    return np.concatenate(parts).astype(np.uint16)


@pytest.fixture
def shards(tmp_path):
    """A directory as dev/data/fineweb10B; documents of the train split go on in the next shard."""
    path = tmp_path / 'fineweb10B'
    for index, ids in enumerate(np.array_split(documents(0, 300), 3)):
        write_llm_c(path / f'fineweb_train_{index + 1:06}.bin', ids)
    write_llm_c(path / 'fineweb_val_000000.bin', documents(1, 60))
    return path


@pytest.mark.slow
def test_the_recipe_trains_from_shards(printed, tmp_path, shards):
    flags = (f'--config.data.path={shards}', f'--config.data.data_dir={tmp_path}/cache')
    printed('train', '--config=gpt2_124m:smoke', *flags, '--workdir=run')
    (result,) = results_of(tmp_path / 'run')
    assert (result['status'], result['num_steps']) == ('finished', 10)
    # Ids are drawn uniformly, and the first predictions are nearly uniform.
    assert result['val_loss'] == pytest.approx(np.log(50304), abs=0.1)
    assert result['data']['fingerprints'].keys() == {'train', 'validation'}


def test_shards_are_valid_data_of_its_study(tmp_path, shards):
    config = runpy.run_path(str(ROOT / 'configs/ablation_124m.py'))['get_config']('smoke').base
    data = dataclasses.replace(config.data, path=str(shards), data_dir=str(tmp_path / 'cache'))
    rows = rows_of(dataclasses.replace(config, data=data))
    assert rows.splits == ('train', 'validation', 'test')
    names, _ = rows.documents('test')  # carved from the train shards
    assert len(names) > 20


@pytest.mark.slow
def test_the_study_of_gpt2_124m_trains_from_shards(printed, tmp_path, shards):
    data = (f'--config.base.data.path={shards}', f'--config.base.data.data_dir={tmp_path}/cache')
    printed('ablate', '--config=ablation_124m:smoke', *data, '--workdir=study')
    results = studies.read_lines(tmp_path / 'study/results.jsonl')
    assert len({result['variant'] for result in results}) == 7 and len(results) == 14
    assert all((result['status'], result['num_steps']) == ('finished', 10) for result in results)
    assert all(result['data']['carved'].keys() == {'test'} for result in results)
    assert all(abs(result['test_loss'] - np.log(50304)) < 0.1 for result in results)


def test_an_unknown_scale_is_refused(refusal):
    for command in (('train', '--config=gpt2_124m:cpu'), ('ablate', '--config=ablation_124m:cpu')):
        assert "scale='cpu' must be smoke or gpu" in refusal(*command, '--dry_run')


def test_the_arms_of_gpt2_124m_have_the_parameters_of_gpt2(printed):
    table = printed(*STUDY, '--dry_run').split('\n\n')[0].splitlines()
    rows = [row.split() for row in table[-7:]]
    assert [row[0] for row in rows][:2] == ['qk/vo', 'query_free/vo']
    assert rows[0][10] == '124,475,904'
    assert all(abs(float(row[11].rstrip('%'))) < 0.01 for row in rows)


@pytest.mark.slow
@pytest.mark.parametrize(
    'command',
    [
        ('train', '--config=gpt2_124m'),
        (*STUDY, '--config.variants=("qk/vo","shared_qk/vo")'),
    ],
    ids=['recipe', 'study'],
)
def test_the_recipe_and_the_study_fit_on_a_host_of_eight_h100(printed, command):
    text = printed(*command, '--dry_run=h100-1x8')
    assert 'mesh trial=1 data=8 fsdp=1 tensor=1' in text
    assert 'DOES NOT FIT' not in text and 'replication' not in text
