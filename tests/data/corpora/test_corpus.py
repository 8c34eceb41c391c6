"""Which settings a dataset takes, and what is done to any corpus: carving, cutting, lower case."""

import random

import numpy as np
import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora import corpus_registry
from qkattn.data.corpora.corpus import Corpus, capped, carved, largest_size, parse_languages
from qkattn.data.corpora.corpus_registry import CORPORA, SETTINGS, find
from tests.data.refusals import refused

TEXTS = [f'document {number}\n'.encode() for number in range(200)]


def made(texts=TEXTS, names=None, languages=(), **others) -> Corpus:
    splits = {'train': texts, **others}

    def documents(language):
        prefix = (language or '').encode()
        return {split: iter([prefix + text for text in values]) for split, values in splits.items()}

    return Corpus(
        name='fox',
        version='1',
        languages=languages,
        splits=tuple(splits),
        documents=documents,
        names=names,
    )


def read(corpus, language=None):
    return {split: list(texts) for split, texts in corpus.documents(language).items()}


def test_a_tenth_of_the_documents_each_whatever_their_order():
    both = carved(made(), test=False)
    assert both.splits == ('train', 'validation', 'test')
    assert both.carved == {'validation': 0.1, 'test': 0.1}
    assert both.version == '1-carved-validation-test'
    splits = read(both)
    assert [len(texts) for texts in splits.values()] == [160, 20, 20]
    assert sorted(sum(splits.values(), [])) == sorted(TEXTS)
    assert splits['train'] == [text for text in TEXTS if text in splits['train']]
    # Written down, so that published splits stay what they are.
    assert splits['test'][:2] == [b'document 9\n', b'document 11\n']
    mixed = read(carved(made(random.Random(0).sample(TEXTS, 200)), test=False))
    assert all(set(mixed[split]) == set(texts) for split, texts in splits.items())
    # The validation split is the same where a test split came with the corpus.
    given = carved(made(test=[b'x\n']), test=False)
    assert (given.version, given.carved) == ('1-carved-validation', {'validation': 0.1})
    assert read(given)['validation'] == splits['validation'] and read(given)['test'] == [b'x\n']


def test_equal_documents_are_in_one_split_and_names_go_with_their_documents():
    # 28.5 of 285 documents would be a tenth, which is not a multiple of 3.
    splits = read(carved(made([text for text in TEXTS[:95] for _ in range(3)]), test=False))
    assert len(splits['test']) == 30
    assert not set(splits['train']) & set(splits['test'] + splits['validation'])

    def names(split):
        return [text.decode() for text in (TEXTS if split == 'train' else [b'x'])]

    for others in ({}, {'test': [b'x']}):
        result = carved(made(names=names, **others), test=False)
        for split, texts in read(result).items():
            assert result.names(split) == [text.decode() for text in texts]


def test_both_sides_of_a_translation_are_carved_alike():
    result = carved(made(languages=('en', 'de')), test=False)
    english, german = read(result, 'en'), read(result, 'de')
    for split in result.splits:
        assert [text[2:] for text in english[split]] == [text[2:] for text in german[split]]
    assert len(english['test']) == 20
    assert read(carved(made(languages=('de', 'en')), test=False), 'en') == english


def test_few_documents_are_cut_at_line_ends():
    lines = [b'%03d\n' % number for number in range(100)]
    for others, bounds in (({}, [0, 81, 91, 100]), ({'test': [b'x']}, [0, 91, 100])):
        parts = read(carved(made([b''.join(lines)] * 2, **others), test=False))
        for split, low, high in zip(parts, bounds[:-1], bounds[1:], strict=False):
            if split not in others:
                assert parts[split] == [b''.join(lines[low:high])] * 2
    assert carved(made([b'x'], names=lambda split: ['a']), test=False).names('test') == ['a']
    with refused('fox has too few lines'):
        list(read(carved(made([b'a\nb\n']), test=False))['test'])


def test_a_validation_split_stays_and_a_test_split_is_carved_when_asked_for():
    given = {'validation': [b'v\n']}
    assert carved(made(**given), test=False).splits == ('train', 'validation')
    result = carved(made(**given), test=True)
    assert result.carved == {'test': 0.1} and result.version == '1-carved-test'
    assert read(result)['validation'] == [b'v\n'] and len(read(result)['test']) == 20
    whole = made(validation=[b'v'], test=[b't'])
    assert carved(whole, test=True) is whole


def test_no_evaluation_document_is_more_than_5_percent_of_its_split():
    rng = np.random.default_rng(0)
    for number in (20, 21, 50, 100):
        sizes = (10 ** rng.uniform(1, 6, number)).astype(int).tolist()
        limit = largest_size(sizes)
        cut = [min(size, limit) for size in sizes]
        assert max(cut) <= 0.05 * sum(cut)
        # As little as possible is cut.
        more = [min(size, limit + 2) for size in sizes]
        assert max(more) > 0.05 * sum(more)
    assert largest_size([7] * 20) is largest_size([9] * 19) is largest_size([]) is None
    # Only evaluation splits, here to 180 / 19 = 9.47 bytes, and no character is cut in two.
    long, texts = 'ä'.encode() * 100, [b'b' * 9] * 20
    result = capped(made([long, *texts], validation=[long, *texts]))
    assert read(result) == {'train': [long, *texts], 'validation': ['ä'.encode() * 4, *texts]}


def test_lower_case_shows_in_the_version(monkeypatch):
    corpus = made(['Ärger, ΣΑΣ\n'.encode()], validation=[], test=[])
    source = corpus_registry.Source(lambda config: corpus)
    monkeypatch.setitem(CORPORA, 'stdlib', source)
    lower = find(DataConfig(lowercase=True))
    assert (lower.version, read(lower)['train']) == ('1-lower', ['ärger, σας\n'.encode()])


@pytest.mark.parametrize('name', CORPORA)
def test_settings_that_are_needed_and_those_without_effect_are_named(name):
    source, given = CORPORA[name], dict.fromkeys(CORPORA[name].required, 'x-y')
    for field in source.required:
        for value in (None, ''):
            with refused(f"data.name='{name}' needs data.{field}"):
                find(DataConfig(name=name, **given | {field: value}))
    for field in {*SETTINGS} - {*source.required, *source.optional}:
        for value in ('z', ''):
            with refused(f"data.{field}='{value}' has no effect on data.name='{name}'"):
                find(DataConfig(name=name, **given, **{field: value}))


def test_languages_are_two_names():
    assert parse_languages(DataConfig(languages='en-pt_BR')) == ('en', 'pt_BR')
    for languages in ('en', 'en-de-fr', 'en-', 'en - de', '../x-de', 'en-d\u00e9', 'en-en'):
        with refused(f"data.languages='{languages}' must be two languages"):
            parse_languages(DataConfig(languages=languages))
