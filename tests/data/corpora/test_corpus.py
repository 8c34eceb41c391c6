import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import parse_languages
from qkattn.data.corpora.corpus_registry import find
from tests.data.refusals import refused

EXAMPLES = {'path': 'x', 'languages': 'en-de', 'feature': 'text', 'manual_dir': '/files'}


@pytest.mark.parametrize(
    ('name', 'says'),
    [
        *((name, ".*'tfds:NAME/CONFIG'") for name in ('stdlob', 'tfds', 'tiny shakespeare', '')),
        ('multi30', r" dataset \(did you mean 'multi30k'"),
    ],
)
def test_unknown_names_are_refused_with_the_known(name, says):
    with refused(f"data.name='{name}' is not a known{says}"):
        find(DataConfig(name=name))


@pytest.mark.parametrize(
    ('name', 'needed', 'optional'),
    [
        ('stdlib', (), ()),
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
