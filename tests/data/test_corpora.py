"""Corpora: splits, files of one's own, downloads, catalogues, translations of CLDR, Python."""

import collections
import dataclasses
import gzip
import hashlib
import itertools
import json
import platform
import random
import sys

import babel
import numpy as np
import pytest
import requests
import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.data.corpora import catalogues, cldr, downloads, python_text
from qkattn.data.corpora.corpus import (
    Corpus,
    cap_documents,
    carve_missing_splits,
    largest_size,
    split_of,
)
from qkattn.data.corpora.corpus_registry import CORPORA, SETTINGS, Source, find
from tests.data.datasets import documents
from tests.refusals import refused

TEXTS = [f'document {number}\n'.encode() for number in range(200)]


def corpus_of(texts=TEXTS, names=None, languages=(), **others) -> Corpus:
    """A corpus of these training texts and other splits.

    With languages ('en', 'de'), each side has all texts, which begin with its language.
    """
    splits = {'train': texts, **others}

    def texts_of(language):
        prefix = (language or '').encode()
        return {split: iter([prefix + text for text in values]) for split, values in splits.items()}

    fields = {'languages': languages, 'documents': texts_of, 'names': names}
    return Corpus(name='fox', version='1', splits=tuple(splits), **fields)


def test_a_tenth_of_the_documents_is_carved_for_each_split_in_any_order():
    # A corpus without validation and test split gets both.
    both = carve_missing_splits(corpus_of(), test=False)
    assert both.carved == {'validation': 0.1, 'test': 0.1}
    assert both.version == '1-carved2-validation-test'
    splits = documents(both)
    assert [*map(len, splits.values())] == [160, 20, 20]
    assert sorted(sum(splits.values(), [])) == sorted(TEXTS)
    assert splits['train'] == [text for text in TEXTS if text in splits['train']]
    # Written down, so that published splits stay what they are.
    assert splits['test'][:2] == [b'document 9\n', b'document 11\n']

    # In another order, the same documents are carved.
    mixed = documents(
        carve_missing_splits(corpus_of(random.Random(0).sample(TEXTS, 200)), test=False)
    )
    assert all(set(mixed[split]) == set(texts) for split, texts in splits.items())

    # Where the corpus comes with one of the two, that one stays and the other is carved as before.
    for test, split, other in ((False, 'validation', 'test'), (True, 'test', 'validation')):
        result = carve_missing_splits(corpus_of(**{other: [b'x\n']}), test)
        assert (result.version, result.carved) == (f'1-carved2-{split}', {split: 0.1})
        assert documents(result)[other] == [b'x\n']
        assert documents(result)[split] == splits[split]
    assert carve_missing_splits(corpus_of(validation=[b'x\n']), test=False).splits == (
        'train',
        'validation',
    )


def test_equal_documents_are_in_one_split():
    # 28.5 of 285 documents would be a tenth, which is not a multiple of 3.
    splits = documents(
        carve_missing_splits(corpus_of([text for text in TEXTS[:95] for _ in range(3)]), test=False)
    )
    assert len(splits['test']) == 30
    assert not set(splits['train']) & set(splits['test'])
    copies = corpus_of(TEXTS + TEXTS, names=lambda split: [str(number) for number in range(400)])
    splits = documents(carve_missing_splits(copies, test=False))
    assert len(splits['test']) == 40
    assert not set(splits['train']) & set(splits['test'])


def test_carving_keeps_the_names_of_documents():
    def names(split):
        return [text.decode() for text in (TEXTS if split == 'train' else [b'x'])]

    for others in ({}, {'test': [b'x']}):
        result = carve_missing_splits(corpus_of(names=names, **others), test=False)
        for split, texts in documents(result).items():
            assert result.names(split) == [text.decode() for text in texts]


def test_both_sides_of_a_translation_are_carved_alike_whichever_is_the_source():
    corpora = [
        carve_missing_splits(corpus_of(languages=sides), test=False)
        for sides in (('en', 'de'), ('de', 'en'))
    ]
    # Texts begin with their language, and pairs are equal behind it.
    english = documents(corpora[0], 'en')
    german = documents(corpora[0], 'de')
    for split, texts in german.items():
        assert [text[2:] for text in english[split]] == [text[2:] for text in texts]
    assert len(english['test']) == 20
    assert documents(corpora[1], 'en') == english


def test_few_documents_are_cut_at_line_ends():
    lines = [b'%03d\n' % number for number in range(100)]
    # Other splits of the corpus, and the lines at which both documents are cut.
    for others, bounds in (({}, [0, 81, 91, 100]), ({'test': [b'x']}, [0, 91, 100])):
        parts = documents(
            carve_missing_splits(corpus_of([b''.join(lines)] * 2, **others), test=False)
        )
        cut = [[b''.join(lines[a:b])] * 2 for a, b in itertools.pairwise(bounds)]
        assert parts == dict(zip(('train', 'validation', 'test'), cut, strict=False)) | others
    assert carve_missing_splits(corpus_of([b'x'], names=lambda split: ['a']), test=False).names(
        'test'
    ) == ['a']
    with refused('fox has too few lines'):
        list(documents(carve_missing_splits(corpus_of([b'a\nb\n']), test=False))['test'])


def test_no_evaluation_document_is_more_than_5_percent_of_its_split():
    rng = np.random.default_rng(0)
    for number in (20, 50):
        sizes = (10 ** rng.uniform(1, 6, number)).astype(int)
        limit = largest_size(sizes.tolist())
        cut = np.minimum(sizes, limit)
        assert cut.max() <= 0.05 * cut.sum()
        # As little as possible is cut: two bytes more would be too many.
        more = np.minimum(sizes, limit + 2)
        assert more.max() > 0.05 * more.sum()
    # Nothing can or need be cut where 20 documents or fewer have equal sizes.
    assert largest_size([7] * 20) is None
    assert largest_size([9] * 19 + [0] * 9) is None

    # Evaluation splits alone are cut, here to 180 / 19 = 9.47 bytes, between characters.
    long = 'ä'.encode() * 100
    texts = [b'b' * 9] * 20
    result = cap_documents(corpus_of([long, *texts], validation=[long, *texts]))
    expected = {'train': [long, *texts], 'validation': ['ä'.encode() * 4, *texts]}
    assert documents(result) == expected


def test_lower_case_shows_in_the_version(monkeypatch):
    corpus = corpus_of(['Ärger, ΣΑΣ\n'.encode()], validation=[], test=[])
    monkeypatch.setitem(CORPORA, 'stdlib', Source(lambda config: corpus))
    lower = find(DataConfig(lowercase=True))
    assert (lower.version, documents(lower)['train']) == ('1-lower', ['ärger, σας\n'.encode()])
    # Documents that become equal are in one split.
    corpus = corpus_of([text for one in TEXTS[:95] for text in (one, one.upper())])
    splits = documents(find(DataConfig(lowercase=True)))
    assert sum(len({*texts}) for texts in splits.values()) == 95
    assert all(splits.values())


def test_settings_that_do_not_fit_a_dataset_are_refused():
    for name, source in CORPORA.items():
        # Every setting that a dataset neither needs nor reads, and every one that it needs and
        # lacks.
        required = dict.fromkeys(source.required, 'x-y')
        for field in {*SETTINGS} - {*source.optional}:
            message = f"data.{field}='' has no effect"
            if field in required:
                message = f'needs data.{field}'
            with refused(message):
                find(DataConfig(name=name, **required | {field: ''}))


PAIRS = {'train.en': 'one\ntwo\n', 'train.de': 'eins\nzwei\n'}
PAIRS |= {'validation.en': 'three\n', 'validation.de': 'drei\n'}


def written_corpus(directory, files, name='text', **settings):
    """The corpus of a directory into which these texts or bytes are written."""
    for file, content in files.items():
        path = directory / file
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return find(DataConfig(name=name, **{'path': str(directory)} | settings))


def test_a_text_file_is_cut_at_line_ends_into_90_5_and_5_percent(tmp_path):
    lines = [f'line {i:03d}\n'.encode() for i in range(200)]
    corpus = written_corpus(tmp_path, {'a.txt': b''.join(lines)[:-1]}, path=str(tmp_path / 'a.txt'))
    parts = [b''.join(lines[:180]), b''.join(lines[180:190]), b''.join(lines[190:])[:-1]]
    assert list(documents(corpus).values()) == [[part] for part in parts]


# A byte order mark is no text.
SPLITS = {'train.txt': '\ufeffa\n', 'validation/b.txt': 'b\n', 'validation/a.txt': b'a\n'}


def test_a_split_is_a_file_or_a_folder(tmp_path):
    corpus = written_corpus(
        tmp_path, SPLITS | {'validation/c.md': 'c', 'validation/sub/d.txt': 'd\n'}
    )
    assert documents(corpus) == {'train': [b'a\n'], 'validation': [b'a\n', b'b\n', b'd\n']}
    names = ['validation/a.txt', 'validation/b.txt', 'validation/sub/d.txt']
    assert (corpus.names('train'), corpus.names('validation')) == (['train'], names)
    with refused("test' holds no .txt file"):
        written_corpus(tmp_path, {'test/a.text': 'a\n'})
    with refused('holds both validation and validation.txt; keep one'):
        written_corpus(tmp_path, {'validation.txt': 'e\n'})


def test_the_version_of_a_text_is_that_of_its_content(tmp_path):
    """Each change of a text, a further split and another order of files give another version."""
    versions = [written_corpus(tmp_path, SPLITS).version]
    for name, content in (('train.txt', 'b\n'), ('validation/b.txt', 'B\n'), ('test.txt', 'e\n')):
        versions.append(written_corpus(tmp_path, {name: content}).version)
    (tmp_path / 'validation/b.txt').rename(tmp_path / 'validation/0.txt')
    versions.append(written_corpus(tmp_path, {}).version)
    assert len({*versions}) == 5


def test_text_in_a_bucket_is_a_file_per_split(tmp_path, bucket):
    for name in ('files/train.txt', 'folder/train/a.txt'):
        bucket.put('runs', name, b'a\n')
    assert written_corpus(tmp_path, {}, path='gs://runs/files').names('train') == ['train']
    with refused("folder/train' cannot be read .* give its text as a file"):
        written_corpus(tmp_path, {}, path='gs://runs/folder')


def test_lines_of_parallel_files_are_documents(tmp_path):
    # Only line feeds end lines; pairs with a blank side are left out.
    source = '\ufeffa\u2028b\x85\x0cc\rd\r\n\ntwo\n \nblank\n'
    target = '\ufeffeins\n\r\nzwei\n\u3000\n\u3000'
    files = PAIRS | {'train.en': source, 'train.de': target}
    corpus = written_corpus(tmp_path, files, 'parallel', languages='de-en')
    english = {'train': ['a\u2028b\x85\x0cc\rd'.encode(), b'two'], 'validation': [b'three']}
    assert documents(corpus, 'en') == english
    assert corpus.name == 'parallel-de-en'
    assert documents(corpus, 'de') == {'train': [b'eins', b'zwei'], 'validation': [b'drei']}


def test_missing_empty_or_unequal_files_are_named(tmp_path):
    parallel = {'name': 'parallel', 'languages': 'en-de'}
    # Settings, files that are written, a part of the refusal.
    cases = (
        ({'path': f'{tmp_path}/x'}, {}, "x' does not exist; give a file"),
        ({}, {'validation.txt': 'x'}, r'holds neither train.txt nor train/\*.txt'),
        ({}, {'train.txt': ''}, "data.path: .*train.txt' is empty"),
        ({}, {'train.txt': b'a\nb\n' * 20 + b'\xc3'}, 'cannot be read .*0xc3 in position 80'),
        (parallel, PAIRS | {'validation.de': 'd\nv\nf'}, 'equal numbers of lines, not 1 and 3'),
        (parallel, PAIRS | {'test.en': 'x'}, "test.de' does not exist; "),
        (parallel | {'languages': '../x-de'}, {}, "data.languages='../x-de' must be two lang"),
        (parallel | {'languages': 'en-en'}, {}, "data.languages='en-en' must be two languages"),
    )
    for number, (settings, files, says) in enumerate(cases):
        with refused(says):
            documents(written_corpus(tmp_path / str(number), files, **settings), 'en')


LINES = b'{"text": "one"}\n' * 40


@pytest.mark.parametrize(
    ('name', 'content', 'says'),
    [
        *(
            (
                f'a{suffix}',
                LINES,
                f'is a .{suffix.rpartition(".")[2]} file, which is not read; give plain text',
            )
            for suffix in ('.json', '.npy', '.bin', '.gz', '.zst', '.tar.gz', '.CSV')
        ),
        (
            'a.txt',
            b'one\n' * 40 + b'\0',
            'a.txt. holds byte 0 at byte 160, so it is not text; give',
        ),
        ('a', b'\x1f\x8b\x08\x00' * 40, 'a. cannot be read .*; give a file of UTF-8'),
    ],
)
def test_files_that_hold_no_plain_text_are_not_trained_on(tmp_path, name, content, says):
    with refused(says):
        written_corpus(tmp_path, {name: content}, path=str(tmp_path / name))


def test_any_language_may_end_the_name_of_a_parallel_file(tmp_path):
    files = {name.replace('.de', '.pt'): content for name, content in PAIRS.items()}
    corpus = written_corpus(tmp_path, files, 'parallel', languages='en-pt')
    assert documents(corpus, 'pt')['train'] == [b'eins', b'zwei']
    with refused('train.pt. holds byte 0 at byte 1'):
        written_corpus(tmp_path, {'train.pt': b'a\0\nb'}, 'parallel', languages='en-pt')


TEXT = b'one\ntwo\n'
URL = 'https://files.example.org/lines.txt'


def test_a_download_has_the_declared_digest_or_is_refused(tmp_path, monkeypatch, warnings):
    served = {}  # (status, content) by URL; without any, there is no network

    def get(url, timeout):
        if not served:
            raise requests.ConnectionError('Name or service not known')
        response = requests.Response()
        response.status_code, response._content = served[url]
        return response

    def fetch(**settings):
        return downloads.fetch_file('lines', URL, DataConfig(data_dir=str(tmp_path), **settings))

    monkeypatch.setattr(requests, 'get', get)
    monkeypatch.setitem(downloads.SHA256, 'lines.txt', hashlib.sha256(TEXT).hexdigest())
    manual = tmp_path / 'lines.txt'
    path = tmp_path / 'downloads' / 'lines' / 'lines.txt'
    by_hand = {'manual_dir': str(tmp_path)}
    # The file in manual_dir, the answer of the server, settings, a part of the refusal.
    for manual_content, answer, settings, message in (
        (None, None, {}, f'^{URL} cannot be read .*; put {URL}, .* name it in data.manual_dir'),
        (None, None, by_hand, f'^{manual} does not exist; put {URL}'),
        (b'ten\n', None, by_hand, 'has sha256 .*, not'),
        (None, (200, b'ten\n'), {}, 'has sha256 .*, not'),
        (None, (404, TEXT), {}, '404'),
    ):
        if answer:
            served[URL] = answer
        if manual_content:
            manual.write_bytes(manual_content)
        with refused(message):
            fetch(**settings)
    assert [file.name for file in path.parent.iterdir()] == ['lock']

    # What has the digest is kept; a damaged copy is downloaded again.
    served[URL] = 200, TEXT
    assert fetch() == path.read_bytes() == TEXT
    path.write_bytes(b'one\n')
    assert fetch() == path.read_bytes() == TEXT
    (warning,) = warnings
    assert f'{path} has sha256 ' in warning

    # A sound copy is read without network and lock, so that it may be on a read-only disk.
    (path.parent / 'lock').unlink()
    served.clear()
    assert fetch() == TEXT
    assert not (path.parent / 'lock').exists()
    path.unlink()
    manual.write_bytes(TEXT)
    assert fetch(**by_hand) == TEXT


@pytest.fixture
def by_hand(tmp_path, monkeypatch):
    """by_hand(name, content) puts a file into the manual_dir of the settings that it returns."""

    def stored(name, content):
        (tmp_path / name).write_bytes(content)
        monkeypatch.setitem(downloads.SHA256, name, hashlib.sha256(content).hexdigest())
        return {'data_dir': str(tmp_path / 'data'), 'manual_dir': str(tmp_path)}

    return stored


def test_documents_of_multi30k_are_lines(tmp_path, by_hand):
    for part, language in itertools.product(downloads.CAPTION_PARTS.values(), ('de', 'fr')):
        # U+2028, a line separator of Unicode, ends no line.
        text = ''.join(f'{part}.{language}\u2028{i}\n' for i in range(3))
        settings = by_hand(f'{part}.{language}.gz', gzip.compress(text.encode()))
    corpus = find(DataConfig(name='multi30k', languages='fr-de', **settings))
    assert corpus.name == 'multi30k-fr-de'
    assert not (tmp_path / 'data').exists()
    captions = [f'val.fr\u2028{i}'.encode() for i in range(3)]
    assert documents(corpus, 'fr')['validation'] == captions
    with refused("'en-es' must be two of de, en and fr"):
        find(DataConfig(name='multi30k', languages='en-es', **settings))


def test_the_play_is_cut_by_characters(by_hand):
    # 101 characters in 202 bytes.
    settings = by_hand('input.txt', ('ä' * 90 + 'ö' * 11).encode())
    parts = {'train': [('ä' * 90).encode()], 'validation': [('ö' * 11).encode()]}
    assert documents(find(DataConfig(name='tiny_shakespeare', **settings))) == parts


SENTENCES = [{'en': f'number {i}', 'de': f'Nummer {i}', 'fr': f'le {i}'} for i in range(40)]
VALUES = {language: [sentence[language] for sentence in SENTENCES] for language in SENTENCES[0]}
VALUES |= {'n': list(range(40)), 'sentences': SENTENCES}
# Sets of 40 rows: the features of each, of `VALUES`, and its splits.
FEATURES_AND_SPLITS = {
    'own': (('en', 'n'), ('train', 'dev')),
    'texts': (('en', 'de'), ('train', 'test')),
    'inner': (('fr', 'sentences'), ('train', 'test')),
    'sides': (('de', 'en', 'fr'), ('train', 'validation', 'test')),
    'no_train': (('en',), ('validation', 'test')),
}


class BuilderWithoutTensorFlow(tfds.dataset_builders.AdhocBuilder, skip_registration=True):
    def _split_generators(self, dl_manager):  # without TensorFlow
        return {split: enumerate(examples) for split, examples in self._split_datasets.items()}


def write_tfds_set(directory, name, version='2.1.0', config=None):
    """Prepares a set as `tfds build` does, without TensorFlow; returns its settings."""
    names, splits = FEATURES_AND_SPLITS[name]
    pairs = tfds.features.Translation(languages=['de', 'en', 'fr'])
    kinds = {'n': tfds.features.Scalar(np.int64), 'sentences': pairs}
    features = {feature: kinds.get(feature, tfds.features.Text()) for feature in names}
    examples = [{feature: VALUES[feature][number] for feature in names} for number in range(40)]
    BuilderWithoutTensorFlow(
        name=name,
        version=version,
        config=config,
        features=pairs if name == 'sides' else tfds.features.FeaturesDict(features),
        split_datasets=dict.fromkeys(splits, examples),
        data_dir=directory,
        disable_shuffling=True,
    ).download_and_prepare(file_format='array_record')
    return DataConfig(name=f'tfds:{name}', data_dir=str(directory))


def write_hf_set(directory, name, **changes):
    """Saves a set of Hugging Face, which `load_from_directory` finds; returns its settings."""
    library = pytest.importorskip('datasets', reason="pip install 'qkattn[datasets]' to run it")
    library.disable_progress_bars()
    features, splits = FEATURES_AND_SPLITS[name]
    rows = library.Dataset.from_dict({name: (VALUES | changes)[name] for name in features})
    library.DatasetDict(dict.fromkeys(splits, rows)).save_to_disk(directory / name)
    return DataConfig(name=f'hf:{name}')


def load_from_directory(patch, directory):
    """Puts the sets that `write_hf_set` has saved in a directory in the place of the Hub."""
    library = pytest.importorskip('datasets')
    patch.setattr(library, 'load_dataset', lambda name: library.load_from_disk(directory / name))


@pytest.fixture(scope='module', params=[write_tfds_set, write_hf_set])
def config(request, tmp_path_factory):
    """config('own', feature='n'): the settings of a written set of TensorFlow or Hugging Face."""
    directory = tmp_path_factory.mktemp('sets')
    configs = {name: request.param(directory, name) for name in FEATURES_AND_SPLITS}
    with pytest.MonkeyPatch.context() as patch:
        if request.param is write_hf_set:
            load_from_directory(patch, directory)
        yield lambda name, **fields: dataclasses.replace(configs[name], **fields)


def texts_of(corpus, language=None):
    sides = documents(corpus, language)
    return {split: [text.decode() for text in texts] for split, texts in sides.items()}


def test_settings_name_the_features_of_a_catalogue_that_are_read(config):
    # A set with a single text needs no setting.
    assert texts_of(find(config('own'))) == dict.fromkeys(('train', 'validation'), VALUES['en'])

    # Of several texts, the named one is read, and without a validation split one is carved.
    corpus = find(config('texts', feature='de'))
    assert corpus.name in ('tfds-texts-de', 'hf-texts-de')
    assert corpus.carved == {'validation': 0.1}
    assert texts_of(corpus)['test'] == VALUES['de']

    # Of translations, the two named languages are read.
    for name in ('sides', 'inner'):
        corpus = find(config(name, languages='fr-en'))
        assert corpus.name in (f'tfds-{name}-fr-en', f'hf-{name}-fr-en')
        for language in corpus.languages:
            assert texts_of(corpus, language)['test'] == VALUES[language]

    # Name of the set, settings, and what the refusal says.
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
    with refused('run `tfds build own --data_dir=/'):
        find(DataConfig(name='tfds:own', data_dir=str(tmp_path)))

    # Version 11 is not complete; of 9 and 10, the greater number is newer.
    directory = tmp_path / 'own' / 'small.1'
    for version in ('11.0.0', '10.0.0', '9.0.0'):
        write_tfds_set(tmp_path, 'own', version, config='small.1')
    (directory / '11.0.0').rename(directory / 'incomplete.A_11.0.0')
    config = DataConfig(name='tfds:own/small.1', data_dir=str(tmp_path))
    assert (find(config).name, find(config).version) == ('tfds-own-small.1-en', '10.0.0')

    # A file of version 10 is cut.
    (path,) = (directory / '10.0.0').glob('*-train.array_record*')
    path.write_bytes(path.read_bytes()[:100])
    with refused(f'{path.parent} cannot be read .*; delete it and prepare it again'):
        texts_of(find(config))


def test_rows_of_hugging_face_without_text_are_left_out(tmp_path, monkeypatch):
    load_from_directory(monkeypatch, tmp_path)
    corpus = find(write_hf_set(tmp_path, 'own', en=[None, '', *VALUES['en'][2:]]))
    assert texts_of(corpus)['train'] == VALUES['en'][2:]

    # A pair is left out if either side is missing.
    empty = [{'en': '', 'de': 'a'}, {'en': None, 'de': 'b'}, *SENTENCES[2:]]
    config = dataclasses.replace(
        write_hf_set(tmp_path, 'inner', sentences=empty), languages='en-de'
    )
    assert texts_of(find(config), 'de')['test'] == VALUES['de'][2:]


def test_a_name_of_a_published_set_reads_nothing_in_the_working_directory(tmp_path, monkeypatch):
    library = pytest.importorskip('datasets')
    monkeypatch.setattr(library, 'load_dataset', lambda *names: pytest.fail(f'{names} is loaded'))
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'owner/set').mkdir(parents=True)
    (tmp_path / 'a.jsonl').write_bytes(LINES)

    # Names of loaders, then names of what lies in the working directory.
    for name in ('json', 'parquet', 'text', 'csv'):
        with refused(
            f"data.name='hf:{name}' names a loader, which reads whatever lies in the work"
        ):
            find(DataConfig(name=f'hf:{name}'))
    for name in ('owner/set', 'owner/set/config', 'a.jsonl', 'owner'):
        with refused(f"data.name='hf:{name}' would read '.*' of the working directory; give a set"):
            find(DataConfig(name=f'hf:{name}'))

    # All loaders of the library are known to be such.
    known = library.packaged_modules._PACKAGED_DATASETS_MODULES
    assert known.keys() <= set(catalogues.LOADERS)


def test_a_published_set_is_asked_for_by_its_full_name(tmp_path, monkeypatch):
    datasets = pytest.importorskip('datasets')
    write_hf_set(tmp_path, 'own')

    def load_dataset(*names):
        if names != ('owner/set', 'config'):
            raise ConnectionError("Couldn't reach it\non the Hub.")
        return datasets.load_from_disk(str(tmp_path / 'own'))

    monkeypatch.setattr(datasets, 'load_dataset', load_dataset)
    corpus = find(DataConfig(name='hf:owner/set/config'))
    # The files of a published set are in a directory that its revision names.
    assert (corpus.name, corpus.version) == ('hf-owner-set-config-en', 'None-train')
    with refused(r"hf:squad' cannot be read \(ConnectionError: .*on the Hub\); check name"):
        find(DataConfig(name='hf:squad'))
    monkeypatch.setitem(sys.modules, 'datasets', None)
    with refused(r"datasets needs the package datasets: pip install -e '.\[datasets\]'"):
        find(DataConfig(name='hf:owner/set'))


@pytest.fixture(scope='module')
def pairs():
    return list(cldr.pairs('en', 'de'))


def test_texts_of_cldr_are_short_unique_and_without_extra_spaces(pairs):
    sizes = collections.Counter(category for category, _, _ in pairs)
    assert set(sizes) == set(cldr.CATEGORIES)
    assert min(sizes.values()) > 800
    translations = {source: target for _, source, target in pairs}
    assert 40_000 < len(pairs) == len(translations) < 65_000
    assert not any(source == target for source, target in translations.items())
    for text in (*translations, *translations.values()):
        # One kind of space, and no empty items.
        assert 0 < len(text.encode()) <= 120
        assert text == ' '.join(text.split())
    if babel.__version__ == '2.18.0':
        # Written down, so that texts do not change under the same version.
        digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
        assert digest == 'cfc420ea1d450ea950bfbf583cf003794b80a2008a6af4197871c769c3096796'


def test_the_cldr_corpus_has_all_pairs_by_split_in_a_mixed_order(pairs, monkeypatch):
    monkeypatch.setattr(cldr, 'pairs', lambda *languages: iter(pairs))
    cldr._pairs_by_split.cache_clear()
    corpus = find(DataConfig(name='cldr', languages='EN-de'))
    assert (corpus.name, corpus.version) == ('cldr-en-de', f'babel{babel.__version__}-1.0.0')
    assert find(DataConfig(name='cldr', languages='en-zh_CN')).name == 'cldr-en-zh_Hans_CN'

    # Names that are not two different languages are refused.
    for languages in ('en-xx', 'english-de', 'en-EN', 'en-de-fr', 'en - de', '../x-de'):
        with refused(f"data.languages='{languages}'"):
            find(DataConfig(name='cldr', languages=languages))

    # A pair is in the split that the hash of its source text gives, 90 %, 5 % and 5 %, on both
    # sides at the same place; and texts of all categories are among the first 150.
    sides = [documents(corpus, language) for language in corpus.languages]
    categories = {source: category for category, source, _ in pairs}
    for split, share in (('train', 0.9), ('validation', 0.05), ('test', 0.05)):
        texts = [[text.decode() for text in side[split]] for side in sides]
        expected = {(s, t) for _, s, t in pairs if split_of(s, 90, 5) == split}
        assert len(texts[0]) == len(expected) == pytest.approx(share * len(pairs), rel=0.2)
        assert set(zip(*texts, strict=True)) == expected
        assert {categories[source] for source in texts[0][:150]} == set(categories.values())


def test_stdlib_is_the_library_without_its_tests():
    paths = list(python_text.modules())
    corpus = find(DataConfig())
    assert paths == sorted(paths)
    assert len(paths) > 200
    assert not [path for path in paths if {'test', 'encodings'} & set(path.split('/'))]
    assert corpus.version == f'py{platform.python_version()}-2.0.0'
    # Written down: other splits would make published results incomparable.
    splits = ' '.join(split_of(f'package.module_{i}', 40, 30) for i in range(4000))
    assert hashlib.sha256(splits.encode()).hexdigest()[:12] == '144b30107758'
    places = {'json/decoder.py': 'train', 'argparse.py': 'validation', 'json/tool.py': 'test'}
    for path, split in (places | {'json/__init__.py': split_of('json', 40, 30)}).items():
        assert path in corpus.names(split)
