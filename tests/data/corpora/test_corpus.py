import numpy as np
import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import Corpus, capped, largest_size, parse_languages
from qkattn.data.corpora.corpus_registry import find
from tests.data.refusals import refused

EXAMPLES = {'path': 'x', 'languages': 'en-de', 'feature': 'text', 'manual_dir': '/files'}


@pytest.mark.parametrize(
    ('name', 'says'),
    [
        *(
            (name, '.* tfds:NAME, hf:NAME, or an')
            for name in ('stdlob', 'tfds', 'tiny_speare', '', '9')
        ),
        ('multi30', ", did you mean 'multi30k'"),
    ],
)
def test_unknown_names_are_refused_with_the_known(name, says):
    with refused(f"unknown data.name '{name}'{says}"):
        find(DataConfig(name=name))
    with refused("data.name='lm1b' is not a dataset of qkattn but of .*; write 'tfds:lm1b'"):
        find(DataConfig(name='lm1b'))


@pytest.mark.parametrize(
    ('name', 'needed', 'optional'),
    [
        ('stdlib', (), ()),
        ('packages', (), ()),
        ('tiny_shakespeare', (), ('manual_dir',)),
        ('text', ('path',), ()),
        ('multi30k', ('languages',), ('manual_dir',)),
        ('cldr', ('languages',), ()),
        ('parallel', ('path', 'languages'), ()),
        ('tfds:imdb_reviews/plain_text', (), ('languages', 'feature', 'manual_dir')),
    ],
)
def test_settings_that_are_needed_and_those_without_effect_are_named(name, needed, optional):
    given = {field: EXAMPLES[field] for field in needed}
    for field in needed:
        for value in (None, ''):
            with refused(f"data.{field}={value!r}: data.name='{name}' needs"):
                find(DataConfig(name=name, **given | {field: value}))
    for field in EXAMPLES.keys() - {*needed, *optional}:
        with refused(f"data.{field}='{EXAMPLES[field]}' has no effect on .*{name}"):
            find(DataConfig(name=name, **given, **{field: EXAMPLES[field]}))


def test_languages_are_two_names():
    assert parse_languages(DataConfig(languages='en-pt_BR')) == ('en', 'pt_BR')
    for languages in ('en', 'en-de-fr', 'en-', '-', 'en - de', 'en/de', '../x-de', 'en-d\u00e9'):
        with refused(f"data.languages='{languages}' is not a pair"):
            parse_languages(DataConfig(languages=languages))
    with refused("'en-en' names one language twice"):
        parse_languages(DataConfig(languages='en-en'))


def test_lower_case_shows_in_the_version(tmp_path):
    for name in ('train', 'validation'):
        (tmp_path / f'{name}.txt').write_text(f'Ärger, {name.upper()}\nΣΑΣ\n')
    plain = find(DataConfig(name='text', path=str(tmp_path)))
    lower = find(DataConfig(name='text', path=str(tmp_path), lowercase=True))
    assert lower.version == f'{plain.version}-lower'
    assert list(lower.documents(None)['train']) == ['ärger, train\nσας\n'.encode()]
    assert list(plain.documents(None)['train']) == ['Ärger, TRAIN\nΣΑΣ\n'.encode()]


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


def test_only_evaluation_splits_are_cut_and_no_character_is():
    long, texts = 'ä'.encode() * 100, [b'b' * 9] * 20
    corpus = Corpus(
        name='letters',
        version='1',
        languages=(),
        splits=('train', 'validation'),
        documents=lambda language: {'train': iter([long]), 'validation': iter([long, *texts])},
    )
    found = capped(corpus).documents(None)
    assert list(found['train']) == [long]
    # A limit of 180 / 19 = 9.47 bytes.
    assert list(found['validation']) == ['ä'.encode() * 4, *texts]
