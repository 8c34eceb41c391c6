"""Validation and test splits that are carved from train."""

import random

import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora.carved import carved
from qkattn.data.corpora.corpus import Corpus
from qkattn.data.load import load
from tests.data.refusals import refused

TEXTS = [f'document {number}\n'.encode() for number in range(200)]


def corpus(texts=TEXTS, names=None, languages=(), **others) -> Corpus:
    splits = {'train': texts, **others}

    def documents(language):
        prefix = (language or '').encode()
        return {split: iter([prefix + text for text in own]) for split, own in splits.items()}

    return Corpus(
        name='own',
        version='1',
        languages=languages,
        splits=tuple(splits),
        documents=documents,
        names=names,
    )


def read(corpus, language=None):
    return {split: list(texts) for split, texts in corpus.documents(language).items()}


def test_a_tenth_of_the_documents_each_whatever_their_order():
    found = carved(corpus(), test=False)
    assert found.splits == ('train', 'validation', 'test')
    assert found.version == '1-carved-validation-test'
    assert found.carved == {'validation': 0.1, 'test': 0.1}
    splits = read(found)
    assert {split: len(texts) for split, texts in splits.items()} == {
        'train': 160,
        'validation': 20,
        'test': 20,
    }
    assert sorted(sum(splits.values(), [])) == sorted(TEXTS)
    assert splits['train'] == [text for text in TEXTS if text in splits['train']]
    mixed = read(carved(corpus(random.Random(0).sample(TEXTS, 200)), test=False))
    assert {split: set(texts) for split, texts in mixed.items()} == {
        split: set(texts) for split, texts in splits.items()
    }
    # The validation split is the same where a test split came with the corpus.
    given = carved(corpus(test=[b'x\n']), test=False)
    assert given.splits == found.splits and given.carved == {'validation': 0.1}
    assert given.version == '1-carved-validation'
    assert read(given)['validation'] == splits['validation'] and read(given)['test'] == [b'x\n']


def test_equal_documents_are_in_one_split_and_names_go_with_their_documents():
    # 28.5 of 285 documents would be a tenth, which is not a multiple of 3.
    splits = read(carved(corpus([text for text in TEXTS[:95] for _ in range(3)]), test=False))
    assert len(splits['test']) == 30
    assert not set(splits['train']) & set(splits['test'] + splits['validation'])

    def names(split):
        return [text.decode() for text in (TEXTS if split == 'train' else [b'x'])]

    for others in ({}, {'test': [b'x']}):
        found = carved(corpus(names=names, **others), test=False)
        assert all(
            found.names(split) == [text.decode() for text in texts]
            for split, texts in read(found).items()
        )


def test_both_sides_of_a_translation_are_carved_alike():
    found = carved(corpus(languages=('en', 'de')), test=False)
    english, german = read(found, 'en'), read(found, 'de')
    for split in found.splits:
        assert [text[2:] for text in english[split]] == [text[2:] for text in german[split]]
    assert len(english['test']) == 20
    other = read(carved(corpus(languages=('de', 'en')), test=False), 'en')
    assert other == english
    with refused('own has no validation split, and fewer than 20 sentence pairs to carve'):
        read(carved(corpus(TEXTS[:19], languages=('en', 'de')), test=False), 'en')


def test_few_documents_are_cut_at_line_ends():
    lines = [b'%03d\n' % number for number in range(100)]
    found = carved(corpus([b''.join(lines)] * 2), test=False)
    assert read(found) == {
        'train': [b''.join(lines[:81])] * 2,
        'validation': [b''.join(lines[81:91])] * 2,
        'test': [b''.join(lines[91:])] * 2,
    }
    assert carved(corpus([b'x'], names=lambda split: ['a']), test=False).names('test') == ['a']
    with refused(r'own is too small to be cut at line ends .*\(4 bytes\)'):
        read(carved(corpus([b'a\nb\n']), test=False))['test']


def test_a_validation_split_stays_and_a_test_split_is_carved_when_asked_for():
    both = {'validation': [b'v\n']}
    assert carved(corpus(**both), test=False).splits == ('train', 'validation')
    found = carved(corpus(**both), test=True)
    assert found.carved == {'test': 0.1} and found.version == '1-carved-test'
    assert read(found)['validation'] == [b'v\n'] and len(read(found)['test']) == 20
    whole = corpus(validation=[b'v'], test=[b't'])
    assert carved(whole, test=True) is whole
    with refused("own has no train split, only 'test'"):
        without = corpus(test=[b't'])
        carved(Corpus(**vars(without) | {'splits': ('test',)}), test=False)


@pytest.mark.parametrize('carve_test', [False, True])
def test_results_say_what_was_carved(tmp_path, carve_test):
    (tmp_path / 'train.txt').write_text(''.join(f'line {n}\n' for n in range(100)))
    config = DataConfig(name='text', path=str(tmp_path), data_dir=str(tmp_path / 'cache'))
    assert load(config).identity()['carved'] == {'validation': 0.1, 'test': 0.1}
    (tmp_path / 'validation.txt').write_text('line\n')
    config = DataConfig(**vars(config) | {'carve_test': carve_test})
    identity = load(config).identity()
    assert identity.get('carved') == ({'test': 0.1} if carve_test else None)
    assert sorted(identity['fingerprints']) == [*['test'] * carve_test, 'train', 'validation']
