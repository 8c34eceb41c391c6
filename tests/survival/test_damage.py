"""Damaged files of runs and studies: a table of file x damage.

A run whose file is damaged is refused in one sentence that names the file, or ends as it would
have. A study names the file when it is resumed or reported, and trains nothing again.
"""

import dataclasses
import json
import shutil
from unittest.mock import Mock

import pytest

from qkattn.config import TrialsConfig, TuningConfig, to_json
from qkattn.errors import CheckpointError, ConfigError
from qkattn.storage.records import read_json, write_json
from qkattn.study import worker
from qkattn.study.arms import build_arms
from qkattn.train.loop import train
from qkattn.verdict import find, load_study
from tests import damages
from tests.runs import assert_same_run
from tests.studies import result_record, write_documents, write_metrics
from tests.study.test_plan import STUDY

OF_RUN = ('config.json', 'provenance.json', 'lifting.json', 'metrics.jsonl', 'result.json')
OF_STUDY = ('study.json', 'ledger.jsonl', 'plan.jsonl', 'results.jsonl')
OF_PLANNED = ('config.json', 'provenance.json', 'metrics.jsonl', 'documents.json', 'result.json')
# Made again by every worker from the results of the runs.
DERIVED = ('plan.jsonl', 'results.jsonl')
START = {'git': {'commit': 'a', 'dirty': False}, 'python': '3.11', 'versions': {}, 'devices': {}}
BASE = dataclasses.replace(STUDY.base, trials=TrialsConfig(seeds=(0, 1), learning_rates=(4e-3,)))
SMALL = dataclasses.replace(STUDY, base=BASE, tuning=TuningConfig())


@pytest.mark.usefixtures('programs_kept')
@pytest.mark.parametrize('every', damages.SOME)
@pytest.mark.parametrize('name', OF_RUN)
def test_a_damaged_run_is_refused_or_ends_as_the_sound_one(small_run, tmp_path, name, every):
    config, source = small_run
    sound = (source / name).read_bytes()
    cases = [*damages.whole(sound), *(() if name == 'metrics.jsonl' else damages.fields(sound))]
    for label, content in damages.some(cases, name, every):
        path = shutil.copytree(source, tmp_path / 'run')
        if name != 'result.json':  # the run is resumed at its end
            (path / 'result.json').unlink()
        damages.replace(path / name, content)
        try:
            train(config, path)
        except (ConfigError, CheckpointError) as error:
            assert name in str(error) and '\n' not in str(error)
            assert damages.content_of(path / name) == content
            assert (path / 'result.json').exists() == (name == 'result.json')
        else:
            assert name == 'metrics.jsonl' or label == '0: without crc32', label
            assert_same_run(path, source)
        shutil.rmtree(path)


def write_run(config, workdir, **_):
    """Stands in for training: writes the files of a finished run."""
    size = {'d_model': config.model.d_model, 'd_ff': config.model.mlp_width}
    known = {'config_hash': workdir.name.rpartition('-')[2], 'num_steps': 1000, 'config': size}
    losses = dict.fromkeys(('val_loss', 'test_loss'), 2.0)
    results = [result_record(trial=t, **known, **losses) for t in config.trials.trials()]
    write_json(workdir / 'config.json', {'hash': known['config_hash'], 'config': to_json(config)})
    write_json(workdir / 'provenance.json', {'starts': [START]})
    write_metrics(workdir, results, num_evals=2)
    write_documents(workdir, results, number=3)
    write_json(workdir / 'documents.json', json.loads((workdir / 'documents.json').read_text()))
    write_json(workdir / 'result.json', results)


@pytest.fixture(scope='module')
def study(tmp_path_factory):
    """A finished study; training any of its runs again would fail the test."""
    path = tmp_path_factory.mktemp('sound') / 'study'
    arms = build_arms(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, 'train', write_run)
        patch.setattr(worker, 'build_arms', lambda study: arms)
        patch.setattr(worker, 'rows_of', lambda config: None)
        patch.setattr(worker, 'check_documents', lambda rows, data: None)
        worker.run(SMALL, path)
        patch.setattr(worker, 'train', Mock(side_effect=AssertionError('trained again')))
        yield path


def resume(path):
    worker.run(SMALL, path)
    return []


def report(path):
    loaded = load_study(path)
    find(loaded)
    return loaded.problems


def planned_run(study):
    return study / json.loads((study / 'plan.jsonl').read_text().splitlines()[0])['directory']


@pytest.mark.parametrize('every', damages.SOME)
@pytest.mark.parametrize('name', (*OF_STUDY, *OF_PLANNED))
def test_a_damaged_file_of_a_study_is_named_and_no_run_is_trained_again(study, caplog, name, every):
    file = (study if name in OF_STUDY else planned_run(study)) / name
    files = [p for p in study.rglob('*') if p.is_file() and p.name != 'lock']
    before = {path: path.read_bytes() for path in files}
    cases = [*damages.whole(before[file]), *damages.fields(before[file])]
    unnamed = set()
    for label, content in damages.some(cases, name, every):
        caplog.clear()
        messages = []
        for command in (report, resume):
            damages.replace(file, content)
            try:
                messages += command(study)
            except ConfigError as error:
                messages.append(str(error))
            if file.name not in DERIVED:
                assert damages.content_of(file) == content, label
            for path in {file, *(study / derived for derived in DERIVED)}:
                damages.replace(path, before[path])
            assert all(path.read_bytes() == before[path] for path in files), label
        if not any(file.name in sentence for sentence in (*messages, caplog.text)):
            unnamed.add(label)
        assert not [m for m in messages if '\n' in m.partition('holds a study with other')[0]]
    if name in (*DERIVED, 'metrics.jsonl'):  # not every field is read
        assert unnamed & damages.DAMAGES.keys() <= {'twice', 'empty'}
    else:
        assert unnamed <= {'0: without crc32'}


def test_results_of_other_trials_are_refused(study):
    file = planned_run(study) / 'result.json'
    sound = file.read_bytes()
    write_json(file, read_json(file, [{}])[::-1])
    with pytest.raises(ConfigError, match='result.json is damaged .it has results of .*remove it'):
        worker.run(SMALL, study)
    file.write_bytes(sound)
