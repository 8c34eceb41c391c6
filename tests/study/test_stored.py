"""A stored study has a few files, from which its directory comes back byte for byte."""

import hashlib
import shutil

import pytest

from qkattn.errors import ReportError
from qkattn.storage import ledger
from qkattn.study import stored
from qkattn.verdict import load_findings
from tests.studies import tuned_arm, write_tuned


@pytest.fixture(scope='module')
def study(tmp_path_factory):
    """A tuned study with a diverged trial."""
    records = [*tuned_arm('qk/vo'), *tuned_arm('qk/no_o', losses=[2.1, None, 2.2])]
    path = write_tuned(tmp_path_factory.mktemp('stored') / 'study', records)
    ledger.look(path)
    return path


@pytest.fixture
def kept(study, tmp_path):
    stored.pack(study, tmp_path / 'kept')
    return tmp_path / 'kept'


def flipped(content, place):
    """With one bit changed."""
    return content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :]


def files(path):
    return {
        file.relative_to(path).as_posix(): file.read_bytes()
        for file in path.rglob('*')
        if file.is_file() and file.name != 'lock'
    }


def test_all_comes_back_but_training_and_documents_of_screening(study, kept):
    before, after = files(study), files(stored.opened(kept))
    left_out = {name for name in before if 'screening' in name and name.endswith('documents.json')}
    digests = {name.replace('documents.json', ledger.DOCUMENTS_SHA256): name for name in left_out}
    assert left_out and after.keys() == before.keys() - left_out | digests.keys()
    for name, content in after.items():
        if name in digests:
            digest = hashlib.sha256(before[digests[name]]).hexdigest()
            assert content.decode().strip() == digest
        else:  # without training records
            lines = before[name].splitlines(keepends=True)
            assert content == b''.join(line for line in lines if not ledger.is_training(line))
    assert ledger.digests(stored.opened(kept)) == ledger.digests(study)
    # In place, for a worker that goes on; and again, where nothing is stored.
    for _ in range(2):
        stored.unpack_in_place(kept)
        assert not {stored.RUNS, stored.DOCUMENTS} & files(kept).keys()
        assert files(kept).items() >= after.items()


def test_what_would_not_come_back_is_refused_and_nothing_is_written(study, tmp_path):
    copy = shutil.copytree(study, tmp_path / 'copy')
    documents = next(copy.glob('*verdict*/documents.json'))
    documents.write_bytes(documents.read_bytes().replace(b', ', b',', 1))
    with pytest.raises(ReportError, match=f'{documents} cannot be stored: it would not come back'):
        stored.pack(copy, tmp_path / 'kept')
    assert not (tmp_path / 'kept').exists()


@pytest.mark.parametrize(
    ('name', 'change'),
    [
        ('runs.jsonl', lambda content: content[:-20]),
        ('runs.jsonl', lambda content: content.replace(b'"format": 1', b'"format": 2')),
        ('runs.jsonl', lambda content: content.replace(b'"data": 0', b'"data": 7', 1)),
        ('documents.npz', lambda content: content[: len(content) // 2]),
        ('runs.jsonl', lambda content: content.replace(b'"log": [', b'"log": [null, ', 1)),
        ('documents.npz', lambda content: b''),
        ('documents.npz', lambda content: flipped(content, 28)),  # raises zlib.error
        ('documents.npz', lambda content: flipped(content, 103)),  # TokenError
    ],
)
def test_damage_is_one_sentence(kept, name, change):
    (kept / name).write_bytes(change((kept / name).read_bytes()))
    with pytest.raises(ReportError, match='the stored study .* is damaged .*; restore it'):
        load_findings(kept)
