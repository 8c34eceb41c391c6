"""Sets of the tfds catalogue and of Hugging Face `datasets`, and a stand-in for its Hub."""

import json
import sys
import types

import numpy as np
import pytest
import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus_registry import find
from qkattn.data.load import load
from tests.data.refusals import refused

SENTENCES = [{'en': f'number {i}', 'de': f'Nummer {i}', 'fr': f'le {i}'} for i in range(300)]
TEXT, NUMBER = tfds.features.Text(), tfds.features.Scalar(np.int64)
PAIRS = tfds.features.Translation(languages=['de', 'en', 'fr'])
SETS = {
    'Own': (('train', 'dev'), tfds.features.FeaturesDict({'text': TEXT, 'n': NUMBER})),
    'Texts': (('train', 'test'), tfds.features.FeaturesDict({'title': TEXT, 'body': TEXT})),
    'Inner': (('train', 'test'), tfds.features.FeaturesDict({'title': TEXT, 'sentences': PAIRS})),
    'Numbers': (('train',), tfds.features.FeaturesDict({'n': NUMBER})),
    'NoTrain': (('validation', 'test'), tfds.features.FeaturesDict({'text': TEXT})),
    'Pairs': (('train', 'validation', 'test'), PAIRS),
}


class Local(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Splits of SENTENCES, with the name, splits and features of a subclass."""

    VERSION = tfds.core.Version('2.1.0')

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=self.FEATURES, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in self.SPLITS}

    def _generate_examples(self, split):
        for number, sentence in enumerate(SENTENCES):
            values = {'title': sentence['en'], 'body': sentence['de'], 'n': 1, **sentence}
            values |= {'text': f'{split} {sentence["en"]}', 'sentences': sentence}
            yield number, {feature: values[feature] for feature in self.FEATURES}


def prepared(directory, name, version='2.1.0'):
    """As `tfds build` does, but for what needs TensorFlow."""
    splits, features = SETS[name]
    values = {'__module__': __name__, 'SPLITS': splits, 'FEATURES': features}
    values['VERSION'] = tfds.core.Version(version)
    if name == 'Pairs':
        values['BUILDER_CONFIGS'] = [tfds.core.BuilderConfig(name='second.1')]
    cls = type(Local)(name, (Local,), values, skip_registration=True)
    cls(data_dir=directory).download_and_prepare(file_format='array_record')


@pytest.fixture(scope='module')
def data_dir(tmp_path_factory):
    directory = tmp_path_factory.mktemp('tfds')
    for name in SETS:
        prepared(directory, name)
    return directory


@pytest.fixture
def corpus(data_dir):
    def make(name, **options):
        return find(DataConfig(name=f'tfds:{name}', data_dir=str(data_dir), **options))

    return make


def test_text_of_the_only_or_the_named_feature(corpus):
    found = corpus('own')
    assert (found.name, found.version) == ('tfds-own-text', '2.1.0')
    assert (found.languages, found.splits) == ((), ('train', 'validation'))
    assert {split: list(texts) for split, texts in found.documents(None).items()} == {
        'train': [f'train number {i}'.encode() for i in range(300)],
        'validation': [f'dev number {i}'.encode() for i in range(300)],
    }
    found = corpus('texts', feature='body')
    assert found.name == 'tfds-texts-body' and found.carved == {'validation': 0.1}
    assert list(found.documents(None)['test'])[7] == b'Nummer 7'


@pytest.mark.parametrize('name', ['pairs/second.1', 'inner'])
def test_translation_set_in_the_direction_asked_for(corpus, name):
    found = corpus(name, languages='fr-en')
    assert found.name == f'tfds-{name.replace("/", "-")}-fr-en'
    assert found.languages == ('fr', 'en')
    for language in found.languages:
        expected = [sentence[language].encode() for sentence in SENTENCES]
        assert list(found.documents(language)['test']) == expected


@pytest.mark.parametrize(
    ('name', 'options', 'says'),
    [
        *((name, {}, "is not of the form 'tfds:NAME'") for name in ('', 'a/b/c', '../x', '9')),
        ('pairs', {'languages': 'fr-en'}, 'tfds build pairs --data_dir=.*=array_record'),
        ('lm1b', {}, "='tfds:lm1b' is not prepared; run `tfds build lm1b --data_dir=/"),
        ('texts', {}, r'data.feature=None and .* do not name one .* texts are body, title'),
        ('texts', {'feature': 'author'}, "data.feature='author' .* texts are body, title"),
        ('inner', {'languages': 'en-es'}, r"'en-es' .* translations sentences \(de, en, fr\)"),
        ('own', {'languages': 'en-de'}, 'translations none'),
        ('inner', {'languages': 'en-de', 'feature': 'title'}, "data.feature='title' and"),
        ('numbers', {}, 'texts are none'),
        ('no_train', {}, "no_train' has no train split, only 'validation', 'test'"),
    ],
)
def test_settings_that_do_not_fit_the_set_are_one_sentence(corpus, name, options, says):
    with refused(says):
        corpus(name, **options)


def test_the_newest_whole_version_is_read_and_files_that_cannot_be_read_are_named(tmp_path):
    for version in ('2.1.0', '10.0.0'):
        prepared(tmp_path, 'Own', version)
    (tmp_path / 'own' / '2.1.0').rename(tmp_path / 'own' / 'incomplete.A_11.0.0')
    config = DataConfig(name='tfds:own', data_dir=str(tmp_path))
    assert find(config).version == '10.0.0'
    prepared(tmp_path, 'Own', '9.0.0')
    assert find(config).version == '10.0.0'
    directory = tmp_path / 'own' / '10.0.0'
    (path,) = directory.glob('*-train.array_record*')
    path.write_bytes(path.read_bytes()[:1000])
    with refused(f"'{directory}' cannot be read: .*; delete that directory and prepare it again"):
        list(find(config).documents(None)['train'])
    info = directory / 'dataset_info.json'
    info.write_text(json.dumps(json.loads(info.read_text()) | {'fileFormat': 'tfrecord'}))
    with refused('not in the format array_record'):
        list(find(config).documents(None)['train'])


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
    assert dataset.tokenizer.decode(np.asarray(dataset.split('validation'))[:-1]) == 'v'
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
