"""Sets of the tfds catalogue and of Hugging Face `datasets`."""

import dataclasses
import sys
import types

import numpy as np
import pytest
import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus_registry import find
from tests.data.refusals import refused

SENTENCES = [{'en': f'number {i}', 'de': f'Nummer {i}', 'fr': f'le {i}'} for i in range(40)]
VALUES = {
    'title': [sentence['en'] for sentence in SENTENCES],
    'body': [sentence['de'] for sentence in SENTENCES],
    'n': list(range(len(SENTENCES))),
    'sentences': SENTENCES,
    **{language: [sentence[language] for sentence in SENTENCES] for language in SENTENCES[0]},
}
# Features and splits.
SETS = {
    'own': (('title', 'n'), ('train', 'dev')),
    'texts': (('title', 'body'), ('train', 'test')),
    'inner': (('title', 'sentences'), ('train', 'test')),
    'sides': (('de', 'en', 'fr'), ('train', 'validation', 'test')),
    'no_train': (('title',), ('validation', 'test')),
}


class Local(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Splits of VALUES, with the name, features and splits of a subclass."""

    def _info(self):
        text, number = tfds.features.Text(), tfds.features.Scalar(np.int64)
        pairs = tfds.features.Translation(languages=['de', 'en', 'fr'])
        kinds = {'n': number, 'sentences': pairs}
        features = {name: kinds.get(name, text) for name in self.FEATURES}
        features = pairs if 'en' in features else tfds.features.FeaturesDict(features)
        return tfds.core.DatasetInfo(builder=self, features=features, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples() for split in self.SPLITS}

    def _generate_examples(self):
        for number in range(len(SENTENCES)):
            yield number, {name: VALUES[name][number] for name in self.FEATURES}


def tfds_set(directory, name, version='2.1.0', config=None):
    """As `tfds build` does, but for what needs TensorFlow."""
    features, splits = SETS[name]
    values = {'__module__': __name__, 'SPLITS': splits, 'FEATURES': features, 'name': name}
    values['VERSION'] = tfds.core.Version(version)
    values['BUILDER_CONFIGS'] = [tfds.core.BuilderConfig(name=config)] if config else []
    cls = type(Local)(name, (Local,), values, skip_registration=True)
    cls(data_dir=directory).download_and_prepare(file_format='array_record')
    name = f'tfds:{name}/{config}' if config else f'tfds:{name}'
    return DataConfig(name=name, data_dir=str(directory))


def saved_set(directory, name, **changes):
    library = pytest.importorskip('datasets', reason="pip install 'qkattn[datasets]' to run it")
    library.disable_progress_bars()
    features, splits = SETS[name]
    rows = library.Dataset.from_dict({name: (VALUES | changes)[name] for name in features})
    library.DatasetDict(dict.fromkeys(splits, rows)).save_to_disk(directory / name)
    return DataConfig(name='hf', path=str(directory / name))


@pytest.fixture(scope='module', params=[tfds_set, saved_set])
def config(request, tmp_path_factory):
    """config('own', feature=...): the settings of a set that is there."""
    directory = tmp_path_factory.mktemp('sets')
    configs = {name: request.param(directory, name) for name in SETS}
    return lambda name, **fields: dataclasses.replace(configs[name], **fields)


def read(corpus, language=None):
    return {
        split: [text.decode() for text in texts]
        for split, texts in corpus.documents(language).items()
    }


def test_text_and_translations_are_those_that_the_settings_name(config):
    corpus = find(config('own'))
    assert corpus.name in ('tfds-own-title', 'hf-title')
    assert (corpus.languages, corpus.splits) == ((), ('train', 'validation'))
    assert read(corpus) == dict.fromkeys(corpus.splits, VALUES['title'])
    corpus = find(config('texts', feature='body'))
    assert corpus.name in ('tfds-texts-body', 'hf-body') and corpus.carved == {'validation': 0.1}
    assert read(corpus)['test'] == VALUES['body']
    for name in ('sides', 'inner'):
        corpus = find(config(name, languages='fr-en'))
        assert corpus.name in (f'tfds-{name}-fr-en', 'hf-fr-en')
        assert corpus.languages == ('fr', 'en')
        for language in corpus.languages:
            assert read(corpus, language)['test'] == VALUES[language]
    for name, fields, says in (
        ('texts', {}, r'data.feature=None and .* do not name one .* texts are body, title'),
        ('own', {'feature': 'n'}, "data.feature='n' .* texts are title"),
        ('inner', {'languages': 'en-es'}, r"'en-es' .* translations sentences \(de, en, fr\)"),
        ('inner', {'languages': 'en-de', 'feature': 'title'}, "data.feature='title' and"),
        ('no_train', {}, 'has no train split; its splits are validation, test'),
    ):
        with refused(says):
            find(config(name, **fields))


@pytest.mark.parametrize(
    ('fields', 'says'),
    [
        *(({'name': name}, "must be written 'tfds:NAME'") for name in ('tfds:../x', 'hf:a/b/c/d')),
        ({'name': 'tfds:lm1b'}, r'run `tfds build lm1b --data_dir=/.*array_record'),
        ({'name': 'hf', 'path': 'absent'}, "data.path='absent' cannot be read .* a directory"),
    ],
)
def test_a_set_that_is_not_there_is_one_sentence(tmp_path, fields, says):
    with refused(says):
        find(DataConfig(data_dir=str(tmp_path), **fields))


def test_the_newest_whole_version_of_a_prepared_set_is_read(tmp_path):
    config = tfds_set(tmp_path, 'own', '2.1.0', config='small.1')
    assert config.name == 'tfds:own/small.1' and find(config).name == 'tfds-own-small.1-title'
    directory = tmp_path / 'own' / 'small.1'
    (directory / '2.1.0').rename(directory / 'incomplete.A_11.0.0')
    for version in ('10.0.0', '9.0.0'):
        tfds_set(tmp_path, 'own', version, config='small.1')
    assert find(config).version == '10.0.0'
    (path,) = (directory / '10.0.0').glob('*-train.array_record*')
    path.write_bytes(path.read_bytes()[:100])
    with refused(f'{path.parent} cannot be read .*; delete it and prepare it again'):
        read(find(config))


def test_rows_of_hugging_face_without_text_are_left_out_and_the_files_are_the_version(tmp_path):
    version = find(saved_set(tmp_path, 'own')).version
    corpus = find(saved_set(tmp_path, 'own', title=[None, '', *VALUES['title'][2:]]))
    assert version.startswith('sha256-') and corpus.version != version
    assert read(corpus)['train'] == VALUES['title'][2:]
    empty = [{'en': '', 'de': 'a'}, {'en': None, 'de': 'b'}, *SENTENCES[2:]]
    config = dataclasses.replace(saved_set(tmp_path, 'inner', sentences=empty), languages='en-de')
    assert read(find(config), 'de')['test'] == VALUES['de'][2:]


class Rows(list):
    """As much of a `datasets.Dataset` as is read."""

    features = {'text': types.SimpleNamespace(dtype='string')}
    info = types.SimpleNamespace(version='1.2.0')
    cache_files = [{'filename': '/cache/owner___set/config/1.2.0/0123abc/set-train.arrow'}]

    def select_columns(self, columns):
        return [{'text': text} for text in self]


def test_a_published_set_is_asked_for_by_owner_name_and_config(monkeypatch):
    def load_dataset(*names):
        if names != ('owner/set', 'config'):
            raise ConnectionError("Couldn't reach it\non the Hub.")
        return {'train': Rows(VALUES['title'])}

    monkeypatch.setitem(sys.modules, 'datasets', types.SimpleNamespace(load_dataset=load_dataset))
    corpus = find(DataConfig(name='hf:owner/set/config'))
    assert corpus.name == 'hf-owner-set-config-text'
    assert corpus.version == '1.2.0-0123abc-carved-validation-test'
    assert sum(map(len, read(corpus).values())) == 40
    with refused(r"hf:squad' cannot be read \(ConnectionError: .*on the Hub\); check name"):
        find(DataConfig(name='hf:squad'))
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with refused(r"datasets needs the package datasets: pip install -e '.\[datasets\]'"):
        find(DataConfig(name='hf:owner/set'))
