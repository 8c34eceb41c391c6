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
    records = [*tuned_arm('qk/vo'), *tuned_arm('qk/no_o', losses=[2.1, None, 2.2])]
    path = write_tuned(tmp_path_factory.mktemp('stored') / 'study', records)
    ledger.record_look(path)
    return path


@pytest.fixture
def packed_study(study, tmp_path):
    """The study as it is stored: a few files, and its logs in logs.zip."""
    stored.pack(study, tmp_path / 'kept')
    return tmp_path / 'kept'


def files_below(path):
    """The bytes of each file below a directory by its relative path, but for locks."""
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob('*')
        if file.is_file() and file.name != 'lock'
    }


def logs_of(packed_study):
    """The files in logs.zip."""
    logs = stored.open_files(packed_study).archive
    return {name: logs.read(name) for name in logs.names}


def change_logs(packed_study, changes):
    """Writes files into logs.zip, or takes out those that are None."""
    logs = logs_of(packed_study) | changes
    whole = {name: content for name, content in logs.items() if content is not None}
    (packed_study / stored.LOGS).write_bytes(archive.zip_bytes(whole))


def plan_with_directory(packed_study, directory):
    """plan.jsonl with another directory of the last run."""
    *lines, last = logs_of(packed_study)['plan.jsonl'].splitlines(keepends=True)
    run = json.loads(last) | {'directory': directory}
    return b''.join([*lines, json.dumps(run).encode() + b'\n'])


def test_a_packed_study_has_every_file_that_a_verdict_reads(study, packed_study):
    before = files_below(study)
    after = logs_of(packed_study) | {
        name: (packed_study / name).read_bytes() for name in stored.WHOLE_FILES
    }

    # Documents of screening runs are left out: a digest takes the place of each.
    left_out = {name for name in before if 'screening' in name and name.endswith('documents.json')}
    documents_of_digest = {}
    for name in left_out:
        digest_name = name.replace('documents.json', ledger.DOCUMENTS_SHA256)
        documents_of_digest[digest_name] = before[name]
    assert left_out
    assert after.keys() == (before.keys() - left_out) | documents_of_digest.keys()

    # Every other file is kept, but for the lines of training steps.
    for name, content in after.items():
        if name in documents_of_digest:
            digest = hashlib.sha256(documents_of_digest[name]).hexdigest()
            assert content.decode().strip() == digest
        else:
            lines = before[name].splitlines(keepends=True)
            assert content == b''.join(line for line in lines if not ledger.is_training(line))


def test_ledgers_see_the_same_files(study, packed_study):
    logs = stored.open_files(packed_study)
    assert ledger.file_digests(logs) == ledger.file_digests(study)
    assert ledger.run_digests(logs) == ledger.run_digests(study)


def test_a_stored_study_is_stored_again_with_the_same_bytes(packed_study, tmp_path):
    stored.pack(stored.open_files(packed_study), tmp_path / 'again')
    assert files_below(tmp_path / 'again') == files_below(packed_study)


def test_reading_a_packed_study_writes_no_file(packed_study, tmp_path, monkeypatch):
    empty = tmp_path / 'tmp'
    empty.mkdir()
    monkeypatch.setenv('TMPDIR', str(empty))
    monkeypatch.setattr('tempfile.tempdir', None)
    before = files_below(packed_study)
    load_findings(packed_study)
    assert files_below(packed_study) == before
    assert not list(empty.iterdir())


def test_a_packed_study_becomes_a_working_directory(packed_study):
    logs = logs_of(packed_study)
    for _ in range(2):  # and again, where nothing is stored
        stored.unpack_in_place(packed_study)
        assert stored.LOGS not in files_below(packed_study)
        assert files_below(packed_study).items() >= logs.items()
    results = [line for line in read_lines(packed_study / 'results.jsonl') if line['run'] == RUN]
    entries = json.loads((packed_study / RUN / 'result.json').read_text())
    assert [entry['val_loss'] for entry in entries] == [line['val_loss'] for line in results]


def test_unpacking_that_was_interrupted_is_done_again(packed_study, monkeypatch):
    def interrupt(path, content):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(stored, 'write_json', interrupt)
        stored.unpack_in_place(packed_study)
    stored.unpack_in_place(packed_study)
    assert (packed_study / RUN / 'result.json').is_file()
    assert not (packed_study / stored.LOGS).exists()


REFUSED = [
    ({'plan.jsonl': None}, 'logs.zip has no plan.jsonl'),
    ({'results.jsonl': None}, 'logs.zip has no results.jsonl'),
    ({'plan.jsonl': b'{}\n'}, r'logs.zip, member plan.jsonl, line 1 is damaged .*is missing'),
    ({'study.json': b'{}'}, 'member study.json is no file of a run in its plan.jsonl'),
    ({'ledger.jsonl': b''}, 'member ledger.jsonl is no file of a run'),
    ({'other/metrics.jsonl': b''}, 'member other/metrics.jsonl is no file of a run'),
    ({f'{RUN}/result.json': b'[]'}, 'result.json is no file of a run'),
]


@pytest.mark.parametrize(('changes', 'message'), REFUSED)
def test_logs_that_do_not_fit_the_plan_are_refused(packed_study, changes, message):
    change_logs(packed_study, changes)
    before = files_below(packed_study)
    for read in (load_findings, stored.unpack_in_place):
        with pytest.raises(
            ReportError, match=f'{packed_study}.*{message}.*; restore it from a copy'
        ):
            read(packed_study)
    assert files_below(packed_study) == before


ELSEWHERE = ['/tmp/x', '..', '../x', 'runs/../../x', 'runs/a/b', '', 'a\\b', 'a\0b', 'a/']
# Names of other files of a study.
TAKEN = ['study.json', 'runs/metrics.jsonl', 'plan.jsonl/a', 'lock']


@pytest.mark.parametrize('directory', [*ELSEWHERE, *TAKEN])
def test_a_plan_names_no_directory_elsewhere(packed_study, tmp_path, directory):
    change_logs(packed_study, {'plan.jsonl': plan_with_directory(packed_study, directory)})
    before = files_below(tmp_path)
    message = r"logs.zip, member plan.jsonl, line \d+ is damaged \(field 'directory' is .*expected"
    for read in (load_findings, stored.unpack_in_place):
        with pytest.raises(ReportError, match=message):
            read(packed_study)
    assert files_below(tmp_path) == before


@pytest.mark.parametrize('directory', ['../x', '/tmp/x'])
def test_a_study_whose_plan_names_a_directory_elsewhere_is_not_stored(
    study, packed_study, tmp_path, directory
):
    stored.unpack_in_place(packed_study)
    *runs, last = read_lines(packed_study / 'plan.jsonl')
    write_lines(packed_study / 'plan.jsonl', [*runs, last | {'directory': directory}])
    with pytest.raises(ReportError, match=f'{packed_study}/plan.jsonl, line .* is damaged'):
        stored.pack(packed_study, tmp_path / 'other')
    assert not (tmp_path / 'other').exists()


def test_a_study_with_too_large_logs_is_not_stored(study, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, 'MAX_MEMBER', 100)
    with pytest.raises(ReportError, match='logs.zip, member .* bytes, more than 100'):
        stored.pack(study, tmp_path / 'other')
    assert not (tmp_path / 'other').exists()


@pytest.mark.parametrize('place', ['', 'runs'])
def test_no_link_is_followed_where_files_are_taken_out(packed_study, tmp_path, place):
    directory = f'{place}/link'.strip('/')
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    # The plan and the archive name a run below a link, which leads out of the study.
    moved = {name: None for name in logs_of(packed_study) if name.startswith(RUN)}
    moved[f'{directory}/metrics.jsonl'] = b''
    change_logs(packed_study, moved | {'plan.jsonl': plan_with_directory(packed_study, directory)})
    link = packed_study / (place or directory)
    link.symlink_to(elsewhere)
    with pytest.raises(ReportError, match=f'{link} is a link, but files of .*logs.zip go there'):
        stored.unpack_in_place(packed_study)
    assert not list(elsewhere.iterdir())
    assert (packed_study / stored.LOGS).exists()


def test_a_damaged_log_is_named_with_its_archive(packed_study):
    change_logs(packed_study, {LOG: logs_of(packed_study)[LOG].replace(b'"step"', b'"stop"')})
    (problem,) = load_findings(packed_study).study.problems
    assert problem.startswith(f'{packed_study}/logs.zip, member {LOG}, line 1 is damaged')
    (packed_study / stored.LOGS).write_bytes((packed_study / stored.LOGS).read_bytes()[:-20])
    with pytest.raises(
        ReportError, match=f'{packed_study}/logs.zip is damaged .*; restore it from a copy'
    ):
        load_findings(packed_study)


def test_damaged_results_are_refused_and_nothing_is_unpacked(packed_study):
    change_logs(packed_study, {'results.jsonl': b'{"run": '})
    before = files_below(packed_study)
    with pytest.raises(ConfigError, match='logs.zip, member results.jsonl, line 1 is damaged'):
        stored.unpack_in_place(packed_study)
    assert files_below(packed_study) == before


def test_an_archive_that_memory_may_not_hold_is_not_read(packed_study, monkeypatch):
    monkeypatch.setattr(stored, 'MAX_LOGS', 100)
    with pytest.raises(ReportError, match=r'logs.zip has [\d,]+ bytes, more than 100; restore it'):
        stored.open_files(packed_study)
