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
def kept(study, tmp_path):
    stored.pack(study, tmp_path / 'kept')
    return tmp_path / 'kept'


def files(path):
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob('*')
        if file.is_file() and file.name != 'lock'
    }


def logs_of(kept):
    """The files in logs.zip."""
    logs = stored.open_files(kept).archive
    return {name: logs.read(name) for name in logs.names}


def edit(kept, changes):
    """Writes files into logs.zip, or takes out those that are None."""
    logs = logs_of(kept) | changes
    whole = {name: content for name, content in logs.items() if content is not None}
    (kept / stored.LOGS).write_bytes(archive.zip_bytes(whole))


def replanned(kept, directory):
    """plan.jsonl with another directory of the last run."""
    *lines, last = logs_of(kept)['plan.jsonl'].splitlines(keepends=True)
    run = json.loads(last) | {'directory': directory}
    return b''.join([*lines, json.dumps(run).encode() + b'\n'])


def test_all_comes_back_that_a_verdict_reads(study, kept):
    before = files(study)
    after = logs_of(kept) | {name: (kept / name).read_bytes() for name in stored.WHOLE_FILES}
    left_out = {name for name in before if 'screening' in name and name.endswith('documents.json')}
    documents_of_digest = {}
    for name in left_out:
        digest_name = name.replace('documents.json', ledger.DOCUMENTS_SHA256)
        documents_of_digest[digest_name] = before[name]
    assert left_out
    assert after.keys() == (before.keys() - left_out) | documents_of_digest.keys()
    for name, content in after.items():
        if name in documents_of_digest:
            digest = hashlib.sha256(documents_of_digest[name]).hexdigest()
            assert content.decode().strip() == digest
        else:
            lines = before[name].splitlines(keepends=True)
            assert content == b''.join(line for line in lines if not ledger.is_training(line))


def test_ledgers_see_the_same_files(study, kept):
    logs = stored.open_files(kept)
    assert ledger.file_digests(logs) == ledger.file_digests(study)
    assert ledger.run_digests(logs) == ledger.run_digests(study)


def test_a_stored_study_is_stored_again_with_the_same_bytes(kept, tmp_path):
    stored.pack(stored.open_files(kept), tmp_path / 'again')
    assert files(tmp_path / 'again') == files(kept)


def test_reading_leaves_no_file_behind(kept, tmp_path, monkeypatch):
    empty = tmp_path / 'tmp'
    empty.mkdir()
    monkeypatch.setenv('TMPDIR', str(empty))
    monkeypatch.setattr('tempfile.tempdir', None)
    before = files(kept)
    load_findings(kept)
    assert files(kept) == before and not list(empty.iterdir())


def test_a_copy_becomes_a_working_directory(kept):
    logs = logs_of(kept)
    for _ in range(2):  # and again, where nothing is stored
        stored.unpack_in_place(kept)
        assert stored.LOGS not in files(kept)
        assert files(kept).items() >= logs.items()
    results = [line for line in read_lines(kept / 'results.jsonl') if line['run'] == RUN]
    entries = json.loads((kept / RUN / 'result.json').read_text())
    assert [entry['val_loss'] for entry in entries] == [line['val_loss'] for line in results]


def test_unpacking_that_was_interrupted_is_done_again(kept, monkeypatch):
    def interrupted(path, content):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
        patched.setattr(stored, 'write_json', interrupted)
        stored.unpack_in_place(kept)
    stored.unpack_in_place(kept)
    assert (kept / RUN / 'result.json').is_file() and not (kept / stored.LOGS).exists()


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
def test_files_that_are_not_of_its_plan_are_refused(kept, changes, message):
    edit(kept, changes)
    before = files(kept)
    for read in (load_findings, stored.unpack_in_place):
        with pytest.raises(ReportError, match=f'{kept}.*{message}.*; restore it from a copy'):
            read(kept)
    assert files(kept) == before


ELSEWHERE = ['/tmp/x', '..', '../x', 'runs/../../x', 'runs/a/b', '', 'a\\b', 'a\0b', 'a/']
# Names of other files of a study.
TAKEN = ['study.json', 'runs/metrics.jsonl', 'plan.jsonl/a', 'lock']


@pytest.mark.parametrize('directory', [*ELSEWHERE, *TAKEN])
def test_a_plan_names_no_directory_elsewhere(kept, tmp_path, directory):
    edit(kept, {'plan.jsonl': replanned(kept, directory)})
    before = files(tmp_path)
    message = r"logs.zip, member plan.jsonl, line \d+ is damaged \(field 'directory' is .*expected"
    for read in (load_findings, stored.unpack_in_place):
        with pytest.raises(ReportError, match=message):
            read(kept)
    assert files(tmp_path) == before


@pytest.mark.parametrize('directory', ['../x', '/tmp/x'])
def test_a_study_with_such_a_plan_is_not_stored(study, kept, tmp_path, directory):
    stored.unpack_in_place(kept)
    *runs, last = read_lines(kept / 'plan.jsonl')
    write_lines(kept / 'plan.jsonl', [*runs, last | {'directory': directory}])
    with pytest.raises(ReportError, match=f'{kept}/plan.jsonl, line .* is damaged'):
        stored.pack(kept, tmp_path / 'other')
    assert not (tmp_path / 'other').exists()


def test_what_could_not_be_read_again_is_not_stored(study, tmp_path, monkeypatch):
    monkeypatch.setattr(archive, 'MAX_MEMBER', 100)
    with pytest.raises(ReportError, match='logs.zip, member .* bytes, more than 100'):
        stored.pack(study, tmp_path / 'other')
    assert not (tmp_path / 'other').exists()


@pytest.mark.parametrize('place', ['', 'runs'])
def test_no_link_is_followed_where_files_are_taken_out(kept, tmp_path, place):
    directory = f'{place}/link'.strip('/')
    elsewhere = tmp_path / 'elsewhere'
    elsewhere.mkdir()
    moved = {name: None for name in logs_of(kept) if name.startswith(RUN)}
    moved[f'{directory}/metrics.jsonl'] = b''
    edit(kept, moved | {'plan.jsonl': replanned(kept, directory)})
    link = kept / (place or directory)
    link.symlink_to(elsewhere)
    with pytest.raises(ReportError, match=f'{link} is a link, but files of .*logs.zip go there'):
        stored.unpack_in_place(kept)
    assert not list(elsewhere.iterdir()) and (kept / stored.LOGS).exists()


def test_damage_names_the_archive_that_was_given(kept):
    edit(kept, {LOG: logs_of(kept)[LOG].replace(b'"step"', b'"stop"')})
    (problem,) = load_findings(kept).study.problems
    assert problem.startswith(f'{kept}/logs.zip, member {LOG}, line 1 is damaged')
    (kept / stored.LOGS).write_bytes((kept / stored.LOGS).read_bytes()[:-20])
    with pytest.raises(ReportError, match=f'{kept}/logs.zip is damaged .*; restore it from a copy'):
        load_findings(kept)


def test_results_that_are_damaged_change_nothing(kept):
    edit(kept, {'results.jsonl': b'{"run": '})
    before = files(kept)
    with pytest.raises(ConfigError, match='logs.zip, member results.jsonl, line 1 is damaged'):
        stored.unpack_in_place(kept)
    assert files(kept) == before


def test_an_archive_that_memory_may_not_hold_is_not_read(kept, monkeypatch):
    monkeypatch.setattr(stored, 'MAX_LOGS', 100)
    with pytest.raises(ReportError, match=r'logs.zip has [\d,]+ bytes, more than 100; restore it'):
        stored.open_files(kept)
