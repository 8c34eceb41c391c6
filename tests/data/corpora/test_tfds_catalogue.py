import json
import shutil
import sys
from pathlib import Path

import numpy as np
import pytest
import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.data.corpora import tfds_catalogue, tfds_prepare
from qkattn.data.corpora.corpus_registry import find
from qkattn.errors import ConfigError
from tests.data.web import unplug

SENTENCES = [{'en': f'number {i}', 'de': f'Nummer {i}', 'fr': f'le {i}'} for i in range(300)]


TEXT, NUMBER = tfds.features.Text(), tfds.features.Scalar(np.int64)
PAIRS = tfds.features.Translation(languages=['de', 'en', 'fr'])


class Local(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Splits of SENTENCES, with the names and FEATURES of a subclass."""

    VERSION = tfds.core.Version('2.1.0')
    SPLITS = ('train', 'validation', 'test')
    FEATURES = {}

    def _info(self):
        features = self.FEATURES
        return tfds.core.DatasetInfo(
            builder=self,
            features=tfds.features.FeaturesDict(features) if type(features) is dict else features,
            disable_shuffling=True,
        )

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in self.SPLITS}

    def _generate_examples(self, split):
        for number, sentence in enumerate(SENTENCES):
            values = {
                'text': f'{split} {sentence["en"]}',
                'title': sentence['en'],
                'body': sentence['de'],
                'n': 1,
                'sentences': sentence,
            }
            yield (
                number,
                sentence if self.FEATURES is PAIRS else {x: values[x] for x in self.FEATURES},
            )


class QkattnText(Local):
    SPLITS = ('train', 'dev')
    FEATURES = {'text': TEXT, 'n': NUMBER}


class QkattnTexts(Local):
    FEATURES = {'title': TEXT, 'body': TEXT}


class QkattnPairs(Local):
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in ('first', 'second.1')]
    FEATURES = PAIRS


class QkattnInner(Local):
    FEATURES = {'title': TEXT, 'sentences': PAIRS}


class QkattnNumbers(Local):
    FEATURES = {'n': NUMBER}


class QkattnNoValidation(Local):
    SPLITS = ('train', 'test')
    FEATURES = {'text': TEXT}


class QkattnVarying(Local):
    FEATURES = {'talk': TEXT, 'all': tfds.features.TranslationVariableLanguages()}


class QkattnByHand(QkattnText):
    MANUAL_DOWNLOAD_INSTRUCTIONS = 'Ask the\n  authors.'

    def _split_generators(self, dl_manager):
        assert (dl_manager.manual_dir / 'x').exists()
        return super()._split_generators(dl_manager)


@pytest.fixture
def corpus(tmp_path):
    def make(name, **options):
        return find(DataConfig(name=f'tfds:{name}', data_dir=str(tmp_path / 'data'), **options))

    return make


def test_text_set_with_another_name_of_its_validation_split(corpus):
    found = corpus('qkattn_text')
    assert (found.name, found.version) == ('tfds-qkattn_text-text', '2.1.0')
    assert (found.languages, found.splits) == ((), ('train', 'validation'))
    documents = {split: list(texts) for split, texts in found.documents(None).items()}
    assert documents == {
        'train': [f'train number {i}'.encode() for i in range(300)],
        'validation': [f'dev number {i}'.encode() for i in range(300)],
    }
    assert 'tensorflow' not in sys.modules


def test_one_of_several_texts_is_named(corpus):
    with pytest.raises(ConfigError, match="data.feature=None .* valid: 'title', 'body'"):
        corpus('qkattn_texts')
    with pytest.raises(ConfigError, match="data.feature='author' .* valid: 'title', 'body'"):
        corpus('qkattn_texts', feature='author')
    found = corpus('qkattn_texts', feature='body')
    assert found.name == 'tfds-qkattn_texts-body'
    assert list(found.documents(None)['test'])[7] == b'Nummer 7'


@pytest.mark.parametrize('name', ['qkattn_pairs/second.1', 'qkattn_inner'])
def test_translation_set_in_the_direction_asked_for(corpus, name):
    found = corpus(name, languages='fr-en')
    assert found.name == f'tfds-{name.replace("/", "-")}-fr-en'
    assert found.languages == ('fr', 'en')
    assert found.splits == ('train', 'validation', 'test')
    for language in found.languages:
        assert list(found.documents(language)['validation']) == [
            sentence[language].encode() for sentence in SENTENCES
        ]


def test_languages_have_to_fit(corpus):
    with pytest.raises(ConfigError, match="languages='en-es' are not in .*valid: 'de', 'en', 'fr'"):
        corpus('qkattn_inner', languages='en-es')
    with pytest.raises(ConfigError, match='languages=None.*is a translation set; .*two of'):
        corpus('qkattn_inner')
    with pytest.raises(ConfigError, match='valid: none, it is not a translation set'):
        corpus('qkattn_text', languages='en-de')
    with pytest.raises(ConfigError, match="data.feature='title' is for text in one"):
        corpus('qkattn_inner', languages='en-de', feature='title')
    with pytest.raises(ConfigError, match='languages vary from example to example'):
        corpus('qkattn_varying')


def test_sets_that_are_no_use_are_refused(corpus):
    with pytest.raises(ConfigError, match='valid: none, it has no text feature'):
        corpus('qkattn_numbers')
    with pytest.raises(ConfigError, match="has no validation split, only 'train', 'test'"):
        corpus('qkattn_no_validation')


def test_prepared_set_is_not_prepared_again(corpus, monkeypatch):
    corpus('qkattn_text')
    monkeypatch.setattr(QkattnText, '_split_generators', None)
    assert len(list(corpus('qkattn_text').documents(None)['train'])) == 300


class QkattnElsewhere(QkattnPairs, skip_registration=True):
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name='first')]


def test_copied_set_needs_no_code(tmp_path):
    config = DataConfig(
        name='tfds:qkattn_elsewhere/first', data_dir=str(tmp_path / 'data'), languages='de-en'
    )
    with pytest.raises(ConfigError, match="has no 'qkattn_elsewhere' and there is none in"):
        find(config)
    elsewhere = QkattnElsewhere(config='first', data_dir=tmp_path / 'made')
    elsewhere.download_and_prepare(file_format='array_record')
    shutil.move(tmp_path / 'made', tmp_path / 'data')
    assert list(find(config).documents('de')['test'])[0] == b'Nummer 0'
    assert not (tmp_path / 'data' / 'qkattn_elsewhere.lock').exists()


def test_names_are_checked_first(corpus):
    for name in ('', 'a/b/c', 'wmt14_translate/de-en:1.0.0', 'huggingface:squad', '../x'):
        with pytest.raises(ConfigError, match="is not of the form 'tfds:NAME' or"):
            corpus(name)
    with pytest.raises(ConfigError, match="no 'wmt14_translat' .*did you mean 'wmt14_translate'"):
        corpus('wmt14_translat/de-en', languages='de-en')
    with pytest.raises(ConfigError, match="has no config 'de-es'; valid: .*de-en"):
        corpus('wmt14_translate/de-es', languages='de-es')
    with pytest.raises(
        ConfigError, match="name one, as in 'tfds:wmt14_translate/cs-en'; valid: cs"
    ):
        corpus('wmt14_translate', languages='de-en')
    with pytest.raises(ConfigError, match="'qkattn_text' has no config 'x'; valid: none"):
        corpus('qkattn_text/x')


@pytest.mark.parametrize(
    ('name', 'languages'),
    [
        ('wmt14_translate/de-en', 'de-en'),
        ('ted_hrlr_translate/pt_to_en', 'en-pt'),
        ('imdb_reviews/plain_text', None),
    ],
)
def test_without_network_the_sentence_says_what_to_do(
    corpus, tmp_path, monkeypatch, name, languages
):
    unplug(monkeypatch)
    directory = tmp_path / 'data' / name.partition('/')[0]
    with pytest.raises(ConfigError, match=rf"http\S+ cannot be .*copy '{directory}' from there\.$"):
        corpus(name, languages=languages)
    assert not list(directory.rglob('dataset_info.json'))


@pytest.mark.parametrize(
    ('name', 'package'),
    [
        ('lm1b', 'tensorflow'),
        ('tiny_shakespeare', 'tensorflow'),
        ('wiki40b/en', 'apache-beam'),
        ('wikipedia/20230601.en', 'apache-beam'),
        ('c4/en', 'apache-beam'),
    ],
)
def test_missing_packages_are_said_before_the_download(corpus, monkeypatch, name, package):
    looked_for = []

    def missing(module):
        looked_for.append(module)

    monkeypatch.setattr(tfds_catalogue.importlib.util, 'find_spec', missing)
    asked = unplug(monkeypatch)
    with pytest.raises(ConfigError, match=f'needs {package}: pip install {package}, or prepare it'):
        corpus(name)
    assert not asked and looked_for


def test_files_to_be_fetched_by_hand_are_described(corpus, tmp_path):
    with pytest.raises(ConfigError, match=r'data.manual_dir=None: .* by hand: Ask the authors\.'):
        corpus('qkattn_by_hand')
    (tmp_path / 'x').write_text('')
    assert corpus('qkattn_by_hand', manual_dir=str(tmp_path)).splits == ('train', 'validation')


def test_what_a_killed_preparation_left_is_removed(corpus, tmp_path):
    data = tmp_path / 'data'
    for left in ('qkattn_text/incomplete.ABC_2.1.0', 'downloads/qkattn_text/somewhere.tmp.123'):
        (data / left).mkdir(parents=True)
        (data / left / 'part').write_bytes(bytes(100))
    corpus('qkattn_text')
    assert not [p for p in data.rglob('*') if 'incomplete' in p.name or '.tmp.' in p.name]
    with tfds.core.utils.incomplete_dir(str(tmp_path / '1.0.0')) as path:
        assert list(tmp_path.glob('incomplete.*')) == [Path(path)]


def test_a_failed_preparation_is_one_sentence_and_leaves_nothing(corpus, tmp_path, monkeypatch):
    def failing(self, dl_manager):
        raise ValueError('Artifact http://x has wrong checksum.\n\nTo debug, ...')

    monkeypatch.setattr(QkattnText, '_split_generators', failing)
    with pytest.raises(ConfigError, match=r'Error: .* wrong checksum\.\); prepare it') as said:
        corpus('qkattn_text')
    assert '\n' not in str(said.value)
    assert not [p for p in (tmp_path / 'data').rglob('*') if p.name == '2.1.0']


def test_missing_package_is_named(corpus, monkeypatch):
    def needing(self, dl_manager):
        import apache_beam  # noqa: F401

    monkeypatch.setattr(QkattnText, '_split_generators', needing)
    monkeypatch.setitem(sys.modules, 'apache_beam', None)
    with pytest.raises(ConfigError, match='needs apache-beam: pip install apache-beam, or prepare'):
        corpus('qkattn_text')
    inner = ModuleNotFoundError("No module named 'tensorflow'", name='tensorflow')
    outer = ImportError('Failed to construct it')
    outer.__cause__ = inner
    needs = tfds_prepare.needs_package
    assert 'pip install tensorflow' in needs('x', outer, 'do this')
    assert 'broken binary' in needs('x', ImportError('broken binary'), 'do this')


def test_files_that_cannot_be_read_are_named(corpus, tmp_path):
    texts = corpus('qkattn_text').documents(None)
    directory = tmp_path / 'data' / 'qkattn_text' / '2.1.0'
    info = directory / 'dataset_info.json'
    values = json.loads(info.read_text())
    assert values['fileFormat'] == 'array_record'
    (path,) = directory.glob('*-train.array_record*')
    path.write_bytes(path.read_bytes()[:1000])
    with pytest.raises(RuntimeError, match=f'{directory}.*delete that directory'):
        list(texts['train'])
    info.write_text(json.dumps(values | {'fileFormat': 'tfrecord'}))
    with pytest.raises(ConfigError, match='was prepared as tfrecord; delete that directory'):
        list(corpus('qkattn_text').documents(None)['train'])
    info.unlink()
    with pytest.raises(ConfigError, match=r'qkattn_text/2.1.0.*holds no dataset.*delete it'):
        corpus('qkattn_text')
