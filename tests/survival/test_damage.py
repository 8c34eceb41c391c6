"""Each file of a run or study is damaged in each of many ways.

A run with a damaged file ends as the sound run, or is refused. The refusal is one sentence with the
name of the file. Resuming or reporting a study names the damaged file, and trains nothing again.
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
    """A run with a damaged file is refused, or ends bitwise as the sound run.

    Each case is the name of a damage and the damaged content. Each `every`-th case is tried.
    """
    config, sound_run = small_run
    sound_content = (sound_run / name).read_bytes()
    cases = list(damages.whole(sound_content))
    if name != 'metrics.jsonl':
        cases += damages.fields(sound_content)

    for damage, content in damages.some(cases, name, every):
        run = shutil.copytree(sound_run, tmp_path / 'run')
        # A run without result.json is not finished, so `train` resumes it at its last step.
        if name != 'result.json':
            (run / 'result.json').unlink()
        damages.replace(run / name, content)

        try:
            train(config, run)
        except (ConfigError, CheckpointError) as error:
            # The message is one line that names the file. The file is not changed.
            assert name in str(error)
            assert '\n' not in str(error)
            assert damages.content_of(run / name) == content
            # No result.json is written. One exists only if it is itself the damaged file.
            has_results = (run / 'result.json').exists()
            assert has_results == (name == 'result.json')
        else:
            # metrics.jsonl is repaired. A file that lacks only its checksum is accepted.
            assert name == 'metrics.jsonl' or damage == '0: without crc32', damage
            assert_same_run(run, sound_run)
        shutil.rmtree(run)


def write_run(config, workdir, **_):
    """Stands in for `train`: writes the files of a finished run, where each trial has loss 2.

    The name of the directory `workdir` ends with the hash of the config.
    """
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
    # The run was started once, with this commit and machine.
    write_json(workdir / 'provenance.json', {'starts': [START]})
    write_metrics(workdir, results, num_evals=2)
    write_documents(workdir, results, number=3)
    # `write_documents` writes no checksum. `write_json` adds one.
    documents = json.loads((workdir / 'documents.json').read_text())
    write_json(workdir / 'documents.json', documents)
    write_json(workdir / 'result.json', results)


@pytest.fixture(scope='module')
def study(tmp_path_factory):
    """The directory of a finished study, whose runs are written by `write_run`.

    If a test trains a run of the study, the test fails.
    """
    path = tmp_path_factory.mktemp('sound') / 'study'
    arms = build_arms(SMALL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(worker, 'train', write_run)
        # To save time, the worker gets these arms again at each start, and reads no data.
        patch.setattr(worker, 'build_arms', lambda study: arms)
        patch.setattr(worker, 'rows_of', lambda config: None)
        patch.setattr(worker, 'check_documents', lambda rows, data: None)
        worker.run(SMALL, path)

        refuse_training = Mock(side_effect=AssertionError('trained again'))
        patch.setattr(worker, 'train', refuse_training)
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


def messages_about(study, file, damage, content, sound_files):
    """Reports a study with a damaged file, then resumes it, and returns all messages.

    Asserts that only plan.jsonl and results.jsonl may change. They are made again from the results
    of the runs. At the end, all files are sound again.

    Args:
        study: The directory of the study.
        file: The path of the file.
        damage: The name of the damage.
        content: The damaged content of the file.
        sound_files: The sound content of all files by path.
    """
    files_to_restore = {file} | {study / derived for derived in DERIVED}
    messages = []
    for command in (report, resume):
        damages.replace(file, content)
        messages += messages_of(command, study)

        if file.name not in DERIVED:
            assert damages.content_of(file) == content, damage
        for path in files_to_restore:
            damages.replace(path, sound_files[path])
        for path, sound_content in sound_files.items():
            assert path.read_bytes() == sound_content, damage
    return messages


@pytest.mark.parametrize('every', damages.SOME)
@pytest.mark.parametrize('name', (*OF_STUDY, *OF_PLANNED))
def test_a_damaged_file_of_a_study_is_named_and_no_run_is_trained_again(study, caplog, name, every):
    """If a file of a finished study is damaged, reporting or resuming the study names the file.

    The fixture `study` fails the test if a run is trained again. Each case is the name of a damage
    and the damaged content. Each `every`-th case is tried.
    """
    directory = study if name in OF_STUDY else planned_run(study)
    file = directory / name
    sound_files = {
        path: path.read_bytes()
        for path in study.rglob('*')
        if path.is_file() and path.name != 'lock'
    }
    sound_content = sound_files[file]
    cases = [*damages.whole(sound_content), *damages.fields(sound_content)]

    damages_not_named = set()
    for damage, content in damages.some(cases, name, every):
        caplog.clear()
        messages = messages_about(study, file, damage, content, sound_files)

        for message in messages:
            # A message about other settings lists them in further lines.
            sentence, _, _ = message.partition('holds a study with other')
            assert '\n' not in sentence
        is_named = any(name in text for text in (*messages, caplog.text))
        if not is_named:
            damages_not_named.add(damage)

    if name in DERIVED or name == 'metrics.jsonl':
        # Not every field of these files is read, so damages of fields may pass. Only two damages of
        # the whole file may pass: no lines, and all lines twice.
        damages_of_whole_file = damages_not_named & damages.DAMAGES.keys()
        assert damages_of_whole_file.issubset({'twice', 'empty'})
    else:
        # A file that lacks only its checksum is accepted.
        assert damages_not_named.issubset({'0: without crc32'})


def test_results_of_other_trials_are_refused(study):
    file = planned_run(study) / 'result.json'
    sound_content = file.read_bytes()
    results_in_another_order = read_json(file, [{}])[::-1]
    write_json(file, results_in_another_order)

    with pytest.raises(ConfigError, match='result.json is damaged .it has results of .*remove it'):
        worker.run(SMALL, study)

    file.write_bytes(sound_content)
