"""Sets of the tfds catalogue and of Hugging Face `datasets`."""

import dataclasses
import sys

import numpy as np
import pytest
import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus_registry import find
from tests.data.datasets import documents
from tests.refusals import refused

SENTENCES = [{'en': f'number {i}', 'de': f'Nummer {i}', 'fr': f'le {i}'} for i in range(40)]
VALUES = {language: [sentence[language] for sentence in SENTENCES] for language in SENTENCES[0]}
VALUES |= {'n': list(range(40)), 'sentences': SENTENCES}
# Features and splits.
SETS = {
    'own': (('en', 'n'), ('train', 'dev')),
    'texts': (('en', 'de'), ('train', 'test')),
    'inner': (('fr', 'sentences'), ('train', 'test')),
    'sides': (('de', 'en', 'fr'), ('train', 'validation', 'test')),
    'no_train': (('en',), ('validation', 'test')),
}


class Local(tfds.dataset_builders.AdhocBuilder, skip_registration=True):
    def _split_generators(self, dl_manager):  # without TensorFlow
        return {split: enumerate(examples) for split, examples in self._split_datasets.items()}


def tfds_set(directory, name, version='2.1.0', config=None):
    """As `tfds build` does, but for what needs TensorFlow."""
    names, splits = SETS[name]
    pairs = tfds.features.Translation(languages=['de', 'en', 'fr'])
    kinds = {'n': tfds.features.Scalar(np.int64), 'sentences': pairs}
    features = {feature: kinds.get(feature, tfds.features.Text()) for feature in names}
    examples = [{feature: VALUES[feature][number] for feature in names} for number in range(40)]
    Local(
        name=name,
        version=version,
        config=config,
        features=pairs if name == 'sides' else tfds.features.FeaturesDict(features),
        split_datasets=dict.fromkeys(splits, examples),
        data_dir=directory,
        disable_shuffling=True,
    ).download_and_prepare(file_format='array_record')
    return DataConfig(name=f'tfds:{name}', data_dir=str(directory))


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
    sides = documents(corpus, language)
    return {split: [text.decode() for text in texts] for split, texts in sides.items()}


def test_text_and_translations_are_those_that_the_settings_name(config):
    assert read(find(config('own'))) == dict.fromkeys(('train', 'validation'), VALUES['en'])
    corpus = find(config('texts', feature='de'))
    assert corpus.name in ('tfds-texts-de', 'hf-de') and corpus.carved == {'validation': 0.1}
    assert read(corpus)['test'] == VALUES['de']
    for name in ('sides', 'inner'):
        corpus = find(config(name, languages='fr-en'))
        assert corpus.name in (f'tfds-{name}-fr-en', 'hf-fr-en')
        for language in corpus.languages:
            assert read(corpus, language)['test'] == VALUES[language]
    for name, fields, says in (
        ('texts', {}, r'data.feature=None and .* do not name one .* texts are de, en'),
        ('own', {'feature': 'n'}, "data.feature='n' .* texts are en"),
        ('inner', {'languages': 'en-es'}, r"'en-es' .* translations sentences \(de, en, fr\)"),
        ('inner', {'languages': 'en-de', 'feature': 'fr'}, "data.feature='fr' and"),
        ('no_train', {}, 'has no train split; its splits are validation, test'),
    ):
        with refused(says):
            find(config(name, **fields))


def test_the_newest_whole_version_of_a_prepared_set_is_read(tmp_path):
    for name, says in (('tfds:own', 'run `tfds build own --data_dir=/'), ('tfds:../x', 'must be')):
        with refused(says):
            find(DataConfig(name=name, data_dir=str(tmp_path)))
    directory = tmp_path / 'own' / 'small.1'
    for version in ('11.0.0', '10.0.0', '9.0.0'):
        tfds_set(tmp_path, 'own', version, config='small.1')
    (directory / '11.0.0').rename(directory / 'incomplete.A_11.0.0')
    config = DataConfig(name='tfds:own/small.1', data_dir=str(tmp_path))
    assert (find(config).name, find(config).version) == ('tfds-own-small.1-en', '10.0.0')
    (path,) = (directory / '10.0.0').glob('*-train.array_record*')
    path.write_bytes(path.read_bytes()[:100])
    with refused(f'{path.parent} cannot be read .*; delete it and prepare it again'):
        read(find(config))


def test_rows_of_hugging_face_without_text_are_left_out_and_the_files_are_the_version(tmp_path):
    version = find(saved_set(tmp_path, 'own')).version
    corpus = find(saved_set(tmp_path, 'own', en=[None, '', *VALUES['en'][2:]]))
    assert corpus.version != version and read(corpus)['train'] == VALUES['en'][2:]
    empty = [{'en': '', 'de': 'a'}, {'en': None, 'de': 'b'}, *SENTENCES[2:]]
    config = dataclasses.replace(saved_set(tmp_path, 'inner', sentences=empty), languages='en-de')
    assert read(find(config), 'de')['test'] == VALUES['de'][2:]
    with refused("data.path='absent' cannot be read .* a directory"):
        find(DataConfig(name='hf', path='absent'))


def test_a_published_set_is_asked_for_by_owner_name_and_config(tmp_path, monkeypatch):
    path = saved_set(tmp_path, 'own').path

    def load_dataset(*names):
        if names != ('owner/set', 'config'):
            raise ConnectionError("Couldn't reach it\non the Hub.")
        return datasets.load_from_disk(path)

    datasets = pytest.importorskip('datasets')
    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    corpus = find(DataConfig(name='hf:owner/set/config'))
    # The files of a published set are in a directory that its revision names.
    assert (corpus.name, corpus.version) == ('hf-owner-set-config-en', 'None-train')
    with refused(r"hf:squad' cannot be read \(ConnectionError: .*on the Hub\); check name"):
        find(DataConfig(name='hf:squad'))
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with refused(r"datasets needs the package datasets: pip install -e '.\[datasets\]'"):
        find(DataConfig(name='hf:owner/set'))
