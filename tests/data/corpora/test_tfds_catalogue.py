import json

import numpy as np
import pytest
import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus_registry import find
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
    with refused(f"'{directory}' cannot be read .*; delete that directory and prepare it again"):
        list(find(config).documents(None)['train'])
    info = directory / 'dataset_info.json'
    info.write_text(json.dumps(json.loads(info.read_text()) | {'fileFormat': 'tfrecord'}))
    with refused('not in the format array_record'):
        list(find(config).documents(None)['train'])
