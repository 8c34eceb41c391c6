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

# Files of a run, of a study, and of a run in a study.
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
    config, sound_run = small_run
    sound_content = (sound_run / name).read_bytes()
    cases = list(damages.whole(sound_content))
    if name != 'metrics.jsonl':
        cases += damages.fields(sound_content)

    for damage, content in damages.some(cases, name, every):
        run = shutil.copytree(sound_run, tmp_path / 'run')
        # Without result.json, the run is resumed at its last step.
        if name != 'result.json':
            (run / 'result.json').unlink()
        damages.replace(run / name, content)

        try:
            train(config, run)
        except (ConfigError, CheckpointError) as error:
            assert name in str(error)
            assert '\n' not in str(error)
            assert damages.content_of(run / name) == content
            assert (run / 'result.json').exists() == (name == 'result.json')
        else:
            # The log is repaired. Without its checksum, a file is as sound as before.
            assert name == 'metrics.jsonl' or damage == '0: without crc32', damage
            assert_same_run(run, sound_run)
        shutil.rmtree(run)


def write_run(config, workdir, **_):
    """Stands in for training: writes the files of a finished run."""
    config_hash = workdir.name.rpartition('-')[2]
    results = []
    for trial in config.trials.trials():
        result = result_record(
            trial=trial,
            config_hash=config_hash,
            num_steps=1000,
            config={'d_model': config.model.d_model, 'd_ff': config.model.mlp_width},
            val_loss=2.0,
            test_loss=2.0,
        )
        results.append(result)
    write_json(workdir / 'config.json', {'hash': config_hash, 'config': to_json(config)})
    write_json(workdir / 'provenance.json', {'starts': [START]})
    write_metrics(workdir, results, num_evals=2)
    write_documents(workdir, results, number=3)
    # `write_json` adds the checksum.
    documents = json.loads((workdir / 'documents.json').read_text())
    write_json(workdir / 'documents.json', documents)
    write_json(workdir / 'result.json', results)


@pytest.fixture(scope='module')
def study(tmp_path_factory):
    """The directory of a finished study. Training one of its runs again fails the test."""
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
    """Resumes a study. Returns no messages."""
    worker.run(SMALL, path)
    return []


def report(path):
    """Evaluates a study. Returns messages about its problems."""
    loaded = load_study(path)
    find(loaded)
    return loaded.problems


def messages_of(command, study):
    """The messages of `resume` or `report`, or the error that it raises."""
    try:
        return command(study)
    except ConfigError as error:
        return [str(error)]


def planned_run(study):
    """The directory of the first run in the plan."""
    lines = (study / 'plan.jsonl').read_text().splitlines()
    first_run = json.loads(lines[0])
    return study / first_run['directory']


@pytest.mark.parametrize('every', damages.SOME)
@pytest.mark.parametrize('name', (*OF_STUDY, *OF_PLANNED))
def test_a_damaged_file_of_a_study_is_named_and_no_run_is_trained_again(study, caplog, name, every):
    directory = study if name in OF_STUDY else planned_run(study)
    file = directory / name
    sound_files = {
        path: path.read_bytes()
        for path in study.rglob('*')
        if path.is_file() and path.name != 'lock'
    }
    cases = [*damages.whole(sound_files[file]), *damages.fields(sound_files[file])]
    files_to_restore = {file} | {study / derived for derived in DERIVED}

    damages_not_named = set()
    for damage, content in damages.some(cases, name, every):
        caplog.clear()
        messages = []
        for command in (report, resume):
            damages.replace(file, content)
            messages += messages_of(command, study)

            # No file has changed, except that derived files are made again.
            if name not in DERIVED:
                assert damages.content_of(file) == content, damage
            for path in files_to_restore:
                damages.replace(path, sound_files[path])
            for path, sound_content in sound_files.items():
                assert path.read_bytes() == sound_content, damage

        for message in messages:
            # A message about other settings lists them on lines of their own.
            sentence, _, _ = message.partition('holds a study with other')
            assert '\n' not in sentence
        if not any(name in text for text in (*messages, caplog.text)):
            damages_not_named.add(damage)

    if name in DERIVED or name == 'metrics.jsonl':
        # Not every field of these files is read.
        damages_of_whole_file = damages_not_named & damages.DAMAGES.keys()
        assert damages_of_whole_file.issubset({'twice', 'empty'})
    else:
        assert damages_not_named.issubset({'0: without crc32'})


def test_results_of_other_trials_are_refused(study):
    file = planned_run(study) / 'result.json'
    sound_content = file.read_bytes()
    results_in_another_order = read_json(file, [{}])[::-1]
    write_json(file, results_in_another_order)

    with pytest.raises(ConfigError, match='result.json is damaged .it has results of .*remove it'):
        worker.run(SMALL, study)

    file.write_bytes(sound_content)
