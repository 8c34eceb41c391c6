"""Sets of the Hugging Face `datasets` library: saved directories, and a stand-in for the Hub."""

import sys
import types

import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus_registry import find
from qkattn.data.load import load
from tests.data.refusals import refused

TEXTS = [f'number {n}\n' for n in range(40)]


@pytest.fixture
def library():
    return pytest.importorskip('datasets', reason="pip install 'qkattn[datasets]' to run it")


@pytest.fixture
def saved(library, tmp_path):
    """saved(train={column: values}, ...): a directory that the library wrote."""

    def save(**splits) -> str:
        library.disable_progress_bars()
        sets = {name: library.Dataset.from_dict(columns) for name, columns in splits.items()}
        library.DatasetDict(sets).save_to_disk(tmp_path / 'set')
        return str(tmp_path / 'set')

    return save


def read(corpus, language=None):
    return {split: list(texts) for split, texts in corpus.documents(language).items()}


def test_a_saved_directory_is_text(saved, tmp_path):
    path = saved(
        train={'text': [*TEXTS, None, ''], 'label': [0] * 42}, dev={'text': ['v'], 'label': [1]}
    )
    found = find(DataConfig(name='hf', path=path))
    assert (found.name, found.languages, found.splits) == ('hf-text', (), ('train', 'validation'))
    assert found.version.startswith('sha256-') and not found.carved
    assert read(found) == {'train': [text.encode() for text in TEXTS], 'validation': [b'v']}
    dataset = load(DataConfig(name='hf', path=path, data_dir=str(tmp_path / 'cache')))
    assert dataset.tokenizer.decode(dataset.split('validation')[:-1]) == 'v'
    version = found.version
    path = saved(train={'text': TEXTS, 'title': TEXTS[::-1]})
    changed = find(DataConfig(name='hf', path=path, feature='title', carve_test=True))
    assert changed.version.removesuffix('-carved-validation-test') != version
    assert changed.carved == {'validation': 0.1, 'test': 0.1}
    assert {split: len(texts) for split, texts in read(changed).items()} == {
        'train': 32,
        'validation': 4,
        'test': 4,
    }


@pytest.mark.parametrize('nested', [True, False])
def test_a_saved_directory_is_parallel_text(saved, nested):
    english, german = ['one', '', 'three'], ['eins', 'zwei', 'drei']
    columns = {'en': english, 'de': german}
    if nested:
        pairs = zip(english, german, strict=True)
        columns = {'translation': [{'en': e, 'de': d} for e, d in pairs], 'n': [1, 2, 3]}
    path = saved(train=columns, validation=columns, test=columns)
    found = find(DataConfig(name='hf', path=path, languages='de-en'))
    assert found.name == 'hf-de-en'
    assert read(found, 'en')['test'] == [b'one', b'three']
    assert read(found, 'de')['train'] == [b'eins', b'drei']
    with refused("data.languages='de-fr' do not name one text of .* (de, en|translation \\()"):
        find(DataConfig(name='hf', path=path, languages='de-fr'))


@pytest.mark.parametrize(
    ('fields', 'says'),
    [
        ({}, 'data.feature=None .* not name one text of data.path=.* texts are body, title'),
        ({'feature': 'n'}, "data.feature='n' .* do not name one text"),
        ({'path': 'absent'}, "data.path='absent' cannot be opened .*; it must be a directory"),
        ({'path': None}, "data.path=None: data.name='hf' needs the file or directory"),
    ],
)
def test_a_saved_directory_that_does_not_fit_is_one_sentence(saved, fields, says):
    path = saved(train={'title': ['a'], 'body': ['b'], 'n': [1]})
    with refused(says):
        find(DataConfig(**{'name': 'hf', 'path': path} | fields))


def test_without_the_library_it_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, 'datasets', None)
    for fields in ({'name': 'hf', 'path': 'x'}, {'name': 'hf:owner/set'}):
        with refused(r"datasets needs the package datasets: pip install -e '.\[datasets\]'"):
            find(DataConfig(**fields))


class Rows(list):
    """As much of a `datasets.Dataset` as is read."""

    features = {'text': types.SimpleNamespace(dtype='string')}
    info = types.SimpleNamespace(version='1.2.0')
    cache_files = [{'filename': '/cache/owner___set/config/1.2.0/0123abc/set-train.arrow'}]

    def select_columns(self, columns):
        return self

    def iter(self, size):
        return iter([{'text': self[start : start + size]} for start in range(0, len(self), size)])


def test_a_published_set_is_asked_for_by_owner_name_and_config(monkeypatch):
    asked = []

    def load_dataset(*names):
        asked.append(names)
        if 'absent' in names[0]:
            raise ConnectionError("Couldn't reach 'absent'\non the Hub.")
        return {'train': Rows(TEXTS)}

    monkeypatch.setitem(sys.modules, 'datasets', types.SimpleNamespace(load_dataset=load_dataset))
    found = find(DataConfig(name='hf:owner/set/config'))
    assert (found.name, found.version) == (
        'hf-owner-set-config-text',
        '1.2.0-0123abc-carved-validation-test',
    )
    assert sum(map(len, read(found).values())) == 40
    for name, wanted in (('hf:squad', ('squad',)), ('hf:owner/set', ('owner/set',))):
        find(DataConfig(name=name))
        assert asked[-1] == wanted
    with refused(r"hf:absent' cannot be opened \(ConnectionError: .*on the Hub\); check its name"):
        find(DataConfig(name='hf:absent'))
    for name in ('hf:', 'hf:a/b/c/d', 'hf:a b', 'hf:/a'):
        with refused("is not of the form 'hf:OWNER/NAME' or 'hf:OWNER/NAME/CONFIG'"):
            find(DataConfig(name=name))
