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
from tests.data.refusals import refused
from tests.data.web import unplug

SENTENCES = [{'en': f'number {i}', 'de': f'Nummer {i}', 'fr': f'le {i}'} for i in range(300)]
TEXT, NUMBER = tfds.features.Text(), tfds.features.Scalar(np.int64)
PAIRS = tfds.features.Translation(languages=['de', 'en', 'fr'])


class Local(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Splits of SENTENCES, with the names and FEATURES of a subclass."""

    VERSION = tfds.core.Version('2.1.0')
    SPLITS = ('train', 'validation', 'test')
    FEATURES = PAIRS

    def _info(self):
        return tfds.core.DatasetInfo(builder=self, features=self.FEATURES, disable_shuffling=True)

    def _split_generators(self, dl_manager):
        return {split: self._generate_examples(split) for split in self.SPLITS}

    def _generate_examples(self, split):
        for number, sentence in enumerate(SENTENCES):
            values = {'title': sentence['en'], 'body': sentence['de'], 'n': 1, **sentence}
            values |= {'text': f'{split} {sentence["en"]}', 'sentences': sentence}
            yield number, {feature: values[feature] for feature in self.FEATURES}


def registered(name, splits=Local.SPLITS, **features):
    """A subclass of Local, which tfds knows by its name in snake case."""
    values = {'FEATURES': tfds.features.FeaturesDict(features), 'SPLITS': splits}
    return type(Local)(name, (Local,), {'__module__': __name__, **values})


QkattnText = registered('QkattnText', ('train', 'dev'), text=TEXT, n=NUMBER)
registered('QkattnTexts', title=TEXT, body=TEXT)
registered('QkattnInner', title=TEXT, sentences=PAIRS)
registered('QkattnNumbers', n=NUMBER)
registered('QkattnNoTrain', ('validation', 'test'), text=TEXT)
registered('QkattnVarying', all=tfds.features.TranslationVariableLanguages())


class QkattnPairs(Local):
    BUILDER_CONFIGS = [tfds.core.BuilderConfig(name=name) for name in ('first', 'second.1')]


class QkattnElsewhere(QkattnPairs, skip_registration=True):
    BUILDER_CONFIGS = QkattnPairs.BUILDER_CONFIGS[:1]


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


def test_text_set_with_another_name_of_its_validation_split_is_prepared_once(
    corpus, monkeypatch, capsys
):
    for _ in range(2):
        found = corpus('qkattn_text')
        assert (found.name, found.version) == ('tfds-qkattn_text-text', '2.1.0')
        assert (found.languages, found.splits) == ((), ('train', 'validation'))
        assert {split: list(texts) for split, texts in found.documents(None).items()} == {
            'train': [f'train number {i}'.encode() for i in range(300)],
            'validation': [f'dev number {i}'.encode() for i in range(300)],
        }
        monkeypatch.setattr(QkattnText, '_split_generators', None)
    assert 'tensorflow' not in sys.modules
    assert not capsys.readouterr().out


def test_text_of_a_named_feature_and_files_fetched_by_hand(corpus, tmp_path):
    found = corpus('qkattn_texts', feature='body')
    assert found.name == 'tfds-qkattn_texts-body'
    assert list(found.documents(None)['test'])[7] == b'Nummer 7'
    (tmp_path / 'x').write_text('')
    assert corpus('qkattn_by_hand', manual_dir=str(tmp_path)).splits == ('train', 'validation')


@pytest.mark.parametrize('name', ['qkattn_pairs/second.1', 'qkattn_inner'])
def test_translation_set_in_the_direction_asked_for(corpus, name):
    found = corpus(name, languages='fr-en')
    assert found.name == f'tfds-{name.replace("/", "-")}-fr-en'
    assert (found.languages, found.splits) == (('fr', 'en'), Local.SPLITS)
    for language in found.languages:
        expected = [sentence[language].encode() for sentence in SENTENCES]
        assert list(found.documents(language)['validation']) == expected


FORM = "is not of the form 'tfds:NAME' or"
WMT14 = 'wmt14_translate'


@pytest.mark.parametrize(
    ('name', 'options', 'says'),
    [
        *(
            (name, {}, FORM)
            for name in ('', 'a/b/c', f'{WMT14}/de-en:1.0.0', 'x:squad', '../x', '9')
        ),
        ('wmt14_translat/de-en', {}, f"no 'wmt14_translat' .*did you mean '{WMT14}'"),
        (f'{WMT14}/de-es', {}, "has no config 'de-es'; valid: .*de-en"),
        (WMT14, {}, f"name one, as in 'tfds:{WMT14}/cs-en'; valid: cs"),
        ('qkattn_text/x', {}, "'qkattn_text' has no config 'x'; valid: none"),
        ('qkattn_texts', {}, "data.feature=None .* valid: 'title', 'body'"),
        ('qkattn_texts', {'feature': 'author'}, "feature='author' .* valid: 'title', 'body'"),
        ('qkattn_inner', {'languages': 'en-es'}, "'en-es' are not in .*valid: 'de', 'en', 'fr'"),
        ('qkattn_inner', {}, 'languages=None.*is a translation set; .*two of'),
        ('qkattn_text', {'languages': 'en-de'}, 'valid: none, it is not a translation set'),
        ('qkattn_inner', {'languages': 'en-de', 'feature': 'title'}, "feature='title' is for text"),
        ('qkattn_varying', {}, 'languages vary from example to example'),
        ('qkattn_numbers', {}, 'valid: none, it has no text feature'),
        ('qkattn_no_train', {}, "qkattn_no_train' has no train split, only 'validation', 'test'"),
        ('qkattn_by_hand', {}, r'data.manual_dir=None: .* by hand: Ask the authors\.'),
    ],
)
def test_settings_that_do_not_fit_the_set_are_one_sentence(corpus, name, options, says):
    with refused(says):
        corpus(name, **options)


def test_copied_set_needs_no_code(corpus, tmp_path):
    with refused("has no 'qkattn_elsewhere' and there is none in"):
        corpus('qkattn_elsewhere/first', languages='de-en')
    elsewhere = QkattnElsewhere(config='first', data_dir=tmp_path / 'made')
    elsewhere.download_and_prepare(file_format='array_record')
    shutil.move(tmp_path / 'made', tmp_path / 'data')
    found = corpus('qkattn_elsewhere/first', languages='de-en')
    assert list(found.documents('de')['test'])[0] == b'Nummer 0'
    assert not (tmp_path / 'data' / 'qkattn_elsewhere.lock').exists()


@pytest.mark.parametrize(
    ('name', 'languages', 'needs'),
    [
        ('wmt14_translate/de-en', 'de-en', None),
        ('ted_hrlr_translate/pt_to_en', 'en-pt', None),
        ('imdb_reviews/plain_text', None, None),
        # Packages are named before anything is downloaded.
        ('pg19', None, 'tensorflow'),
        ('lm1b', None, None),
        ('tiny_shakespeare', None, None),
        ('wiki40b/en', None, 'apache-beam'),
        ('wikipedia/20230601.en', None, 'apache-beam'),
        ('c4/en', None, 'apache-beam'),
    ],
)
def test_without_network_or_packages_the_sentence_says_what_to_do(
    corpus, tmp_path, monkeypatch, name, languages, needs
):
    asked = unplug(monkeypatch)
    monkeypatch.setattr(tfds_catalogue.importlib.util, 'find_spec', lambda package: None)
    directory = tmp_path / 'data' / name.partition('/')[0]
    what = f'needs {needs}: pip install {needs}, or' if needs else r'http\S+ cannot be .*;'
    with refused(rf"{what} prepare it .*copy '{directory}' from there\.$"):
        corpus(name, languages=languages)
    assert not list(directory.rglob('dataset_info.json'))
    assert bool(asked) == (needs is None)


def downloaded(monkeypatch, path):
    """Downloads of tfds are this file, or extracted this directory."""
    monkeypatch.setattr(tfds_catalogue.importlib.util, 'find_spec', lambda package: None)
    monkeypatch.setattr(tfds_prepare, '_check_reachable', lambda builder, advice: None)
    for method in ('download', 'download_and_extract'):
        monkeypatch.setattr(tfds.download.DownloadManager, method, lambda self, url: str(path))


def test_tiny_shakespeare_is_prepared_without_tensorflow(corpus, tmp_path, monkeypatch):
    play = ''.join(f'line {n}: naïve\n' for n in range(100))
    (tmp_path / 'input.txt').write_text(play, encoding='utf-8')
    downloaded(monkeypatch, tmp_path / 'input.txt')
    found = corpus('tiny_shakespeare')
    texts = {split: b''.join(texts) for split, texts in found.documents(None).items()}
    assert found.splits == ('train', 'validation', 'test') and not found.carved
    assert b''.join(texts.values()).decode() == play
    assert len(texts['train'].decode()) == int(0.9 * len(play))


def test_lm1b_is_prepared_without_tensorflow_and_its_validation_split_is_carved(
    corpus, tmp_path, monkeypatch
):
    root = tmp_path / '1-billion-word-language-modeling-benchmark-r13output'
    for folder, names in (
        ('training-monolingual.tokenized.shuffled', ['news.en-00001', 'news.en-00002']),
        ('heldout-monolingual.tokenized.shuffled', ['news.en.heldout-00000']),
    ):
        (root / folder).mkdir(parents=True)
        for name in names:
            lines = ''.join(f'{name} , line {n} .\n' for n in range(50))
            (root / folder / name).write_text(lines)
    downloaded(monkeypatch, tmp_path)
    found = corpus('lm1b')
    assert found.splits == ('train', 'validation', 'test') and found.carved == {'validation': 0.1}
    texts = {split: list(texts) for split, texts in found.documents(None).items()}
    assert [len(texts[split]) for split in found.splits] == [90, 10, 50]
    assert sorted(texts['train'] + texts['validation'])[0] == b'news.en-00001 , line 0 .'
    assert 'tensorflow' not in sys.modules


CHAINED = ImportError('Failed to construct it')
CHAINED.__cause__ = ModuleNotFoundError(name='tensorflow')


@pytest.mark.parametrize(
    ('error', 'says'),
    [
        (ValueError('Its checksum is\n wrong.\n\nTo debug, ...'), r'is wrong\.\); prepare it'),
        (ModuleNotFoundError(name='apache_beam'), 'pip install apache-beam, or prepare'),
        (CHAINED, 'needs tensorflow: pip install tensorflow, or prepare'),
        (ImportError('broken binary'), r'import what it needs \(broken binary\); prepare'),
    ],
)
def test_a_failed_preparation_is_one_sentence(corpus, tmp_path, monkeypatch, error, says):
    def failing(self, dl_manager):
        raise error

    monkeypatch.setattr(QkattnText, '_split_generators', failing)
    with refused(says):
        corpus('qkattn_text')
    assert not [p for p in (tmp_path / 'data').rglob('*') if p.name == '2.1.0']


def test_what_a_killed_preparation_left_is_removed(corpus, tmp_path):
    data = tmp_path / 'data'
    for left in ('qkattn_text/incomplete.ABC_2.1.0', 'downloads/qkattn_text/somewhere.tmp.123'):
        (data / left).mkdir(parents=True)
        (data / left / 'part').write_bytes(bytes(100))
    corpus('qkattn_text')
    assert not [p for p in data.rglob('*') if 'incomplete' in p.name or '.tmp.' in p.name]
    # The name that tfds gives to what it has not completed.
    with tfds.core.utils.incomplete_dir(str(tmp_path / '1.0.0')) as path:
        assert list(tmp_path.glob('incomplete.*')) == [Path(path)]


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
    with refused('was prepared as tfrecord; delete that directory'):
        list(corpus('qkattn_text').documents(None)['train'])
    info.unlink()
    with refused(r'qkattn_text/2.1.0.*holds no dataset.*delete it'):
        corpus('qkattn_text')
