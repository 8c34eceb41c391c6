import itertools
import random

import numpy as np
import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import Corpus, capped, carved, largest_size, parse_languages
from qkattn.data.corpora.corpus_registry import CORPORA, SETTINGS, Source, find
from tests.data.datasets import documents
from tests.refusals import refused

TEXTS = [f'document {number}\n'.encode() for number in range(200)]


def made(texts=TEXTS, names=None, languages=(), **others) -> Corpus:
    splits = {'train': texts, **others}

    def read(language):
        prefix = (language or '').encode()
        return {split: iter([prefix + text for text in values]) for split, values in splits.items()}

    fields = {'languages': languages, 'documents': read, 'names': names}
    return Corpus(name='fox', version='1', splits=tuple(splits), **fields)


def test_a_tenth_of_the_documents_each_whatever_their_order():
    both = carved(made(), test=False)
    assert both.carved == {'validation': 0.1, 'test': 0.1}
    assert both.version == '1-carved-validation-test'
    splits = documents(both)
    assert [*map(len, splits.values())] == [160, 20, 20]
    assert sorted(sum(splits.values(), [])) == sorted(TEXTS)
    assert splits['train'] == [text for text in TEXTS if text in splits['train']]
    # Written down, so that published splits stay what they are.
    assert splits['test'][:2] == [b'document 9\n', b'document 11\n']
    mixed = documents(carved(made(random.Random(0).sample(TEXTS, 200)), test=False))
    assert all(set(mixed[split]) == set(texts) for split, texts in splits.items())
    # A carved split is the same where the other one came with the corpus, and stays.
    for test, split, other in ((False, 'validation', 'test'), (True, 'test', 'validation')):
        given = carved(made(**{other: [b'x\n']}), test)
        assert (given.version, given.carved) == (f'1-carved-{split}', {split: 0.1})
        assert documents(given)[other] == [b'x\n'] and documents(given)[split] == splits[split]
    assert carved(made(validation=[b'x\n']), test=False).splits == ('train', 'validation')


def test_equal_documents_are_in_one_split_and_names_go_with_their_documents():
    # 28.5 of 285 documents would be a tenth, which is not a multiple of 3.
    splits = documents(carved(made([text for text in TEXTS[:95] for _ in range(3)]), test=False))
    assert len(splits['test']) == 30 and not set(splits['train']) & set(splits['test'])

    def names(split):
        return [text.decode() for text in (TEXTS if split == 'train' else [b'x'])]

    for others in ({}, {'test': [b'x']}):
        result = carved(made(names=names, **others), test=False)
        for split, texts in documents(result).items():
            assert result.names(split) == [text.decode() for text in texts]

    # Both sides of a translation are carved alike, whichever is the source.
    corpora = [carved(made(languages=sides), test=False) for sides in (('en', 'de'), ('de', 'en'))]
    english, german = documents(corpora[0], 'en'), documents(corpora[0], 'de')
    for split, texts in german.items():
        assert [text[2:] for text in english[split]] == [text[2:] for text in texts]
    assert len(english['test']) == 20 and documents(corpora[1], 'en') == english


def test_few_documents_are_cut_at_line_ends():
    lines = [b'%03d\n' % number for number in range(100)]
    for others, bounds in (({}, [0, 81, 91, 100]), ({'test': [b'x']}, [0, 91, 100])):
        parts = documents(carved(made([b''.join(lines)] * 2, **others), test=False))
        cut = [[b''.join(lines[a:b])] * 2 for a, b in itertools.pairwise(bounds)]
        assert parts == dict(zip(('train', 'validation', 'test'), cut, strict=False)) | others
    assert carved(made([b'x'], names=lambda split: ['a']), test=False).names('test') == ['a']
    with refused('fox has too few lines'):
        list(documents(carved(made([b'a\nb\n']), test=False))['test'])


def test_no_evaluation_document_is_more_than_5_percent_of_its_split():
    rng = np.random.default_rng(0)
    for number in (20, 50):
        sizes = (10 ** rng.uniform(1, 6, number)).astype(int)
        limit = largest_size(sizes.tolist())
        cut, more = np.minimum(sizes, limit), np.minimum(sizes, limit + 2)
        # As little as possible is cut.
        assert cut.max() <= 0.05 * cut.sum() and more.max() > 0.05 * more.sum()
    assert largest_size([7] * 20) is largest_size([9] * 19) is None
    # Only evaluation splits, here to 180 / 19 = 9.47 bytes, and no character is cut in two.
    long, texts = 'ä'.encode() * 100, [b'b' * 9] * 20
    result = capped(made([long, *texts], validation=[long, *texts]))
    expected = {'train': [long, *texts], 'validation': ['ä'.encode() * 4, *texts]}
    assert documents(result) == expected


def test_lower_case_shows_in_the_version(monkeypatch):
    corpus = made(['Ärger, ΣΑΣ\n'.encode()], validation=[], test=[])
    monkeypatch.setitem(CORPORA, 'stdlib', Source(lambda config: corpus))
    lower = find(DataConfig(lowercase=True))
    assert (lower.version, documents(lower)['train']) == ('1-lower', ['ärger, σας\n'.encode()])


@pytest.mark.parametrize('name', CORPORA)
def test_settings_that_are_needed_and_those_without_effect_are_named(name):
    source, given = CORPORA[name], dict.fromkeys(CORPORA[name].required, 'x-y')
    for field in {*SETTINGS} - {*source.optional}:
        required = field in source.required
        with refused(f'needs data.{field}' if required else f"data.{field}='' has no effect"):
            find(DataConfig(name=name, **given | {field: ''}))


def test_languages_are_two_names():
    assert parse_languages(DataConfig(languages='en-pt_BR')) == ('en', 'pt_BR')
    for languages in ('en', 'en-de-fr', 'en-', 'en - de', '../x-de', 'en-d\u00e9', 'en-en'):
        with refused(f"data.languages='{languages}' must be two languages"):
            parse_languages(DataConfig(languages=languages))
