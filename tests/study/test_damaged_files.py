"""Damaged files of a study: one sentence, nothing trained again, and a report that lists them."""

import dataclasses
import json
import shutil

import pytest

from qkattn.config import TrialsConfig, TuningConfig
from qkattn.errors import ConfigError
from qkattn.storage.records import read_json, write_json
from qkattn.study import worker
from qkattn.study.arms import build_arms
from qkattn.verdict import find, load_study
from tests import damages
from tests.studies import result_record, write_documents, write_metrics
from tests.study.test_plan import STUDY

START = {'git': {'commit': 'a', 'dirty': False}, 'python': '3.11', 'versions': {}, 'devices': {}}
OF_RUN = ('config.json', 'provenance.json', 'metrics.jsonl', 'documents.json', 'result.json')
OF_STUDY = ('study.json', 'ledger.jsonl', 'plan.jsonl', 'results.jsonl', 'orphans.jsonl')
EVERY = 16  # cases, of which one is tried in the quick tests
# Made again by every worker from the results of the runs.
DERIVED = ('plan.jsonl', 'results.jsonl', 'orphans.jsonl')


def train(config, workdir, **_):
    """Writes the files of a run."""
    results = []
    for trial in config.trials.trials():
        loss = 2 + abs(trial['learning_rate'] - 4e-3) + trial['seed'] / 100
        size = {'d_model': config.model.d_model, 'd_ff': config.model.mlp_width}
        known = {'config_hash': workdir.name.rpartition('-')[2], 'num_steps': 1000, 'config': size}
        results.append(result_record(trial=trial, val_loss=loss, test_loss=loss, **known))
    workdir.mkdir(parents=True)
    write_json(workdir / 'config.json', {'hash': 'x', 'config': {}})
    write_json(workdir / 'provenance.json', {'starts': [START]})
    write_metrics(workdir, results, num_evals=2)
    write_documents(workdir, results, number=3)
    write_json(workdir / 'documents.json', json.loads((workdir / 'documents.json').read_text()))
    write_json(workdir / 'result.json', results)


SMALL = dataclasses.replace(
    STUDY,
    base=dataclasses.replace(
        STUDY.base, trials=TrialsConfig(seeds=(0, 1), learning_rates=(4e-3,), weight_decays=(0.1,))
    ),
    tuning=TuningConfig(),
)


@pytest.fixture(scope='module')
def arms():
    return build_arms(SMALL)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch, arms):
    """Training that writes what a run leaves; preparations that do not depend on files."""
    monkeypatch.setattr(worker, 'train', train)
    monkeypatch.setattr(worker, 'build_arms', lambda study: arms)
    monkeypatch.setattr(worker, 'rows_of', lambda config: None)
    monkeypatch.setattr(worker, 'check_documents', lambda rows, data: None)


@pytest.fixture(scope='module')
def study(tmp_path_factory, arms):
    """A finished study with a run outside its plan."""
    path = tmp_path_factory.mktemp('sound') / 'study'
    with pytest.MonkeyPatch.context() as patch:
        stand_ins.__wrapped__(patch, arms)
        worker.run(SMALL, path)
        shutil.copytree(sorted(path.glob('runs/*'))[0], path / 'runs/outside')
        worker.run(SMALL, path)
    return path


def ablate(path):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, 'train', unwanted)
        worker.run(SMALL, path)
    return []


def unwanted(config, workdir, **_):
    raise AssertionError(f'{workdir} is trained again')


def report(path):
    study = load_study(path)
    find(study)
    return study.problems


def contents(path):
    return {p: p.read_bytes() for p in path.rglob('*') if p.is_file() and p.name != 'lock'}


def what_is_said(read, path):
    """(sentences, None) or (none, what is no sentence) of a command that reads the study."""
    try:
        return list(read(path)), None
    except ConfigError as error:
        return [str(error)], None
    except Exception as error:
        return [], f'{read.__name__}: {type(error).__name__}: {str(error)[:150]}'


@pytest.mark.parametrize(
    'every', [pytest.param(1, marks=pytest.mark.slow, id='all'), pytest.param(EVERY, id='some')]
)
@pytest.mark.parametrize('name', (*OF_STUDY, *OF_RUN, 'outside/config.json', 'outside/result.json'))
def test_a_damaged_file_is_named_and_nothing_is_made_again(study, caplog, name, every):
    planned = json.loads((study / 'plan.jsonl').read_text().splitlines()[0])['directory']
    of_run = study / 'runs' if '/' in name else study / planned
    file = (study if name in OF_STUDY else of_run) / name
    before = contents(study)
    cases = [*damages.whole(before[file]), *damages.fields(before[file])]
    tracebacks, changed, unnamed = [], [], []
    for label, damaged in cases[len(name) % every :: every]:
        caplog.clear()
        said = []
        for read in (report, ablate):
            damages.replace(file, damaged)
            sentences, bug = what_is_said(read, study)
            said += sentences
            tracebacks += [f'{label}: {bug}'] if bug else []
            after = contents(study)
            changed += [
                f'{label}: {path.name}'
                for path in before
                if path.name not in DERIVED
                and after.get(path) != (damaged if path == file else before[path])
            ]
            for path in {file, *(study / derived for derived in DERIVED)}:
                damages.replace(path, before[path])
        if not any(file.name in sentence for sentence in (*said, caplog.text)):
            unnamed.append(label)
        assert not [s for s in said if '\n' in s.partition('holds a study of other settings')[0]]
    assert not tracebacks and not changed
    if name in (*DERIVED, 'metrics.jsonl'):  # not every field is read
        unnamed = [label for label in unnamed if label in damages.WHOLE]
        assert set(unnamed) <= {'twice', 'empty'}
    else:
        assert set(unnamed) <= {'0: without crc32'}


@pytest.mark.parametrize('change', [lambda results: results[:-1], lambda results: results[::-1]])
def test_results_of_other_trials_are_refused(study, change):
    planned = json.loads((study / 'plan.jsonl').read_text().splitlines()[0])['directory']
    file = study / planned / 'result.json'
    sound = file.read_bytes()
    write_json(file, change(read_json(file, [{}])))
    (sentence,), bug = what_is_said(ablate, study)
    file.write_bytes(sound)
    assert bug is None
    assert 'result.json is damaged (it has results of ' in sentence and 'remove it' in sentence
