"""A stored study has a few files, from which its directory comes back byte for byte."""

import hashlib
import json

import pytest

from qkattn.errors import ConfigError, ReportError
from qkattn.storage import archive, ledger
from qkattn.study import stored
from qkattn.verdict import load_findings
from tests.studies import read_lines, run_name, tuned_arm, write_lines, write_tuned

RUN = run_name('qk/no_o', 'd_model=128', 'verdict')
LOG = f'{RUN}/metrics.jsonl'


@pytest.fixture(scope='module')
def study(tmp_path_factory):
    """A tuned study with a diverged trial."""
    records = tuned_arm('qk/vo') + tuned_arm('qk/no_o', losses=[2.1, None, 2.2])
    path = write_tuned(tmp_path_factory.mktemp('stored') / 'study', records)
    ledger.record_look(path)
    return path


@pytest.fixture
def packed_study(study, tmp_path):
    """The study in its stored form: a few files, and its logs in logs.zip."""
    stored.pack(study, tmp_path / 'kept')
    return tmp_path / 'kept'


def files_below(path):
    """The bytes of each file below a directory by its relative path, without locks."""
    files = {}
    for file in path.rglob('*'):
        if file.is_file() and file.name != 'lock':
            files[file.relative_to(path).as_posix()] = file.read_bytes()
    return files


def logs_of(packed_study):
    """The bytes of each file in logs.zip by its name."""
    logs = stored.open_files(packed_study).archive
    return {name: logs.read(name) for name in logs.names}


def change_logs(packed_study, changes):
    """Writes files into logs.zip. A file whose content is None is taken out."""
    logs = logs_of(packed_study)
    for name, content in changes.items():
        if content is None:
            del logs[name]
        else:
            logs[name] = content
    (packed_study / stored.LOGS).write_bytes(archive.zip_bytes(logs))


def plan_with_directory(packed_study, directory):
    """The content of plan.jsonl, with another directory for the last run."""
    lines = logs_of(packed_study)['plan.jsonl'].splitlines(keepends=True)
    last_run = json.loads(lines[-1])
    last_run['directory'] = directory
    lines[-1] = json.dumps(last_run).encode() + b'\n'
    return b''.join(lines)


def test_a_packed_study_has_every_file_that_a_verdict_reads(study, packed_study):
    """A packed study consists of logs.zip and three files outside it.

    It leaves out training records and the documents of screening runs. No verdict reads them.
    """
    files_before = files_below(study)
    files_after = logs_of(packed_study)
    for name in stored.WHOLE_FILES:
        files_after[name] = (packed_study / name).read_bytes()

    # In place of documents.json, a screening run has a small file with its SHA-256.
    # `documents_of_digest` maps the name of that small file to the content of documents.json.
    left_out = set()
    documents_of_digest = {}
    for name, content in files_before.items():
        if 'screening' in name and name.endswith('documents.json'):
            left_out.add(name)
            digest_name = name.replace('documents.json', ledger.DOCUMENTS_SHA256)
            documents_of_digest[digest_name] = content
    assert left_out
    for digest_name, documents in documents_of_digest.items():
        digest = files_after[digest_name].decode().strip()
        assert digest == hashlib.sha256(documents).hexdigest()

    # No other file is left out or added.
    packed_names = files_before.keys() - left_out
    assert files_after.keys() == packed_names | documents_of_digest.keys()

    # The packed files lack only the lines with training records.
    for name in packed_names:
        lines = files_before[name].splitlines(keepends=True)
        packed_lines = [line for line in lines if not ledger.is_training(line)]
        assert files_after[name] == b''.join(packed_lines)


def test_the_digests_of_a_ledger_are_those_of_the_working_directory(study, packed_study):
    logs = stored.open_files(packed_study)
    assert ledger.file_digests(logs) == ledger.file_digests(study)
    assert ledger.run_digests(logs) == ledger.run_digests(study)


def test_a_stored_study_is_stored_again_with_the_same_bytes(packed_study, tmp_path):
    stored.pack(stored.open_files(packed_study), tmp_path / 'again')
    assert files_below(tmp_path / 'again') == files_below(packed_study)


def test_reading_a_packed_study_writes_no_file(packed_study, tmp_path, monkeypatch):
    """The files in logs.zip are read in memory, and never unpacked."""
    # Temporary files would be written to this empty directory.
    temporary = tmp_path / 'tmp'
    temporary.mkdir()
    monkeypatch.setenv('TMPDIR', str(temporary))
    monkeypatch.setattr('tempfile.tempdir', None)  # so that TMPDIR is read again
    before = files_below(packed_study)

    load_findings(packed_study)

    assert files_below(packed_study) == before
    assert list(temporary.iterdir()) == []


def test_a_packed_study_becomes_a_working_directory(packed_study):
    """Unpacking replaces logs.zip by its files, and writes result.json of each finished run."""
    logs = logs_of(packed_study)

    stored.unpack_in_place(packed_study)

    unpacked_files = files_below(packed_study)
    assert 'logs.zip' not in unpacked_files
    for name, content in logs.items():
        assert unpacked_files[name] == content

    # results.jsonl has the results of all runs. result.json has the results of one run.
    lines = read_lines(packed_study / 'results.jsonl')
    expected_losses = [line['val_loss'] for line in lines if line['run'] == RUN]
    entries = json.loads((packed_study / RUN / 'result.json').read_text())
    assert [entry['val_loss'] for entry in entries] == expected_losses

    # Unpacking a second time changes nothing.
    stored.unpack_in_place(packed_study)
    assert files_below(packed_study) == unpacked_files


def test_unpacking_that_was_interrupted_is_done_again(packed_study, monkeypatch):
    """logs.zip is removed only after all other files are written, so unpacking can start again."""

    def raise_keyboard_interrupt(path, content):
        """Raises the error of Ctrl-C where `write_json` would write the first result.json."""
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(stored, 'write_json', raise_keyboard_interrupt)
        with pytest.raises(KeyboardInterrupt):
            stored.unpack_in_place(packed_study)

    stored.unpack_in_place(packed_study)

    assert (packed_study / RUN / 'result.json').is_file()
    assert not (packed_study / 'logs.zip').exists()


@pytest.mark.parametrize(
    # `changes` has the new content of files in logs.zip. None takes a file out.
    ('changes', 'message'),
    [
        ({'plan.jsonl': None}, 'logs.zip has no plan.jsonl'),
        ({'results.jsonl': None}, 'logs.zip has no results.jsonl'),
        ({'plan.jsonl': b'{}\n'}, r'logs.zip, member plan.jsonl, line 1 is damaged .*is missing'),
        ({'study.json': b'{}'}, 'member study.json is no file of a run in its plan.jsonl'),
        ({'ledger.jsonl': b''}, 'member ledger.jsonl is no file of a run in its plan.jsonl'),
        (
            {'other/metrics.jsonl': b''},
            'member other/metrics.jsonl is no file of a run in its plan.jsonl',
        ),
        ({f'{RUN}/result.json': b'[]'}, 'result.json is no file of a run in its plan.jsonl'),
    ],
)
def test_logs_that_do_not_fit_the_plan_are_refused(packed_study, changes, message):
    change_logs(packed_study, changes)
    before = files_below(packed_study)
    for read in (load_findings, stored.unpack_in_place):
        with pytest.raises(
            ReportError, match=f'{packed_study}.*{message}.*; restore it from a copy'
        ):
            read(packed_study)
    assert files_below(packed_study) == before


OUTSIDE_THE_STUDY = ['/tmp/x', '..', '../x', 'runs/../../x']
NO_DIRECTORY_OF_A_RUN = ['runs/a/b', '', 'a\\b', 'a\0b', 'a/']
NAMES_OF_OTHER_FILES = ['study.json', 'runs/metrics.jsonl', 'plan.jsonl/a', 'lock']


@pytest.mark.parametrize(
    'directory', OUTSIDE_THE_STUDY + NO_DIRECTORY_OF_A_RUN + NAMES_OF_OTHER_FILES
)
def test_a_plan_with_a_wrong_directory_of_a_run_is_refused(packed_study, tmp_path, directory):
    change_logs(packed_study, {'plan.jsonl': plan_with_directory(packed_study, directory)})
    before = files_below(tmp_path)
    message = r"logs.zip, member plan.jsonl, line \d+ is damaged \(field 'directory' is .*expected"
    for read in (load_findings, stored.unpack_in_place):
        with pytest.raises(ReportError, match=message):
            read(packed_study)
    assert files_below(tmp_path) == before


@pytest.mark.parametrize('directory', ['../x', '/tmp/x'])
def test_a_study_with_a_directory_outside_is_not_stored(packed_study, tmp_path, directory):
    stored.unpack_in_place(packed_study)
    runs = read_lines(packed_study / 'plan.jsonl')
    runs[-1]['directory'] = directory
    write_lines(packed_study / 'plan.jsonl', runs)

    with pytest.raises(ReportError, match=f'{packed_study}/plan.jsonl, line .* is damaged'):
        stored.pack(packed_study, tmp_path / 'other')

    assert not (tmp_path / 'other').exists()


def test_a_study_with_too_large_logs_is_not_stored(study, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, 'MAX_MEMBER', 100)
    with pytest.raises(ReportError, match='logs.zip, member .* bytes, more than 100'):
        stored.pack(study, tmp_path / 'other')
    assert not (tmp_path / 'other').exists()


@pytest.mark.parametrize(
    ('link_name', 'run_directory'),
    [
        pytest.param('link', 'link', id='the directory of a run is a link'),
        pytest.param('runs', 'runs/link', id='the directory above a run is a link'),
    ],
)
def test_no_link_is_followed_where_files_are_unpacked(
    packed_study, tmp_path, link_name, run_directory
):
    """A link in the study could lead anywhere, so nothing is unpacked through it."""
    # Move the last run to another directory, in the plan and in logs.zip.
    changes = {
        'plan.jsonl': plan_with_directory(packed_study, run_directory),
        f'{run_directory}/metrics.jsonl': b'',
    }
    for name in logs_of(packed_study):
        if name.startswith(RUN):
            changes[name] = None  # removes the file
    change_logs(packed_study, changes)

    # The path of that directory contains a link, which leads out of the study.
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    link = packed_study / link_name
    link.symlink_to(elsewhere)

    with pytest.raises(ReportError, match=f'{link} is a link, but files of .*logs.zip go there'):
        stored.unpack_in_place(packed_study)

    # Nothing was unpacked.
    assert list(elsewhere.iterdir()) == []
    assert (packed_study / 'logs.zip').exists()


def test_a_damaged_log_is_named_with_its_archive(packed_study):
    damaged = logs_of(packed_study)[LOG].replace(b'"step"', b'"stop"')
    change_logs(packed_study, {LOG: damaged})

    (problem,) = load_findings(packed_study).study.problems

    assert problem.startswith(f'{packed_study}/logs.zip, member {LOG}, line 1 is damaged')


def test_a_damaged_archive_is_refused(packed_study):
    logs = packed_study / stored.LOGS
    logs.write_bytes(logs.read_bytes()[:-20])
    with pytest.raises(ReportError, match=f'{logs} is damaged .*; restore it from a copy'):
        load_findings(packed_study)


def test_damaged_results_are_refused_and_nothing_is_unpacked(packed_study):
    change_logs(packed_study, {'results.jsonl': b'{"run": '})
    before = files_below(packed_study)

    with pytest.raises(ConfigError, match='logs.zip, member results.jsonl, line 1 is damaged'):
        stored.unpack_in_place(packed_study)

    assert files_below(packed_study) == before


def test_an_archive_that_memory_may_not_hold_is_not_read(packed_study, monkeypatch):
    monkeypatch.setattr(stored, 'MAX_LOGS', 100)  # bytes
    with pytest.raises(ReportError, match=r'logs.zip has [\d,]+ bytes, more than 100; restore it'):
        stored.open_files(packed_study)
