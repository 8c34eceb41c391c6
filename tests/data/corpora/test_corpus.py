import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora import stdlib_text
from qkattn.data.corpora.corpus import parse_languages
from qkattn.data.corpora.corpus_registry import find
from qkattn.errors import ConfigError


def test_stdlib_is_the_corpus_of_its_module(tmp_path):
    corpus = find(DataConfig(data_dir=str(tmp_path / 'data')))
    assert (corpus.name, corpus.version) == (
        'stdlib',
        f'{stdlib_text.PYTHON}-{stdlib_text.VERSION}',
    )
    assert (corpus.languages, corpus.splits) == ((), stdlib_text.SPLITS)
    assert not (tmp_path / 'data').exists()
    assert b'import' in next(iter(corpus.documents(None)['test']))


@pytest.mark.parametrize('name', ['stdlob', 'tfds', 'tiny shakespeare', ''])
def test_unknown_names_are_refused_with_the_known(name):
    with pytest.raises(
        ConfigError, match=f"data.name='{name}' is not a known .*'tfds:NAME/CONFIG'"
    ):
        find(DataConfig(name=name))


def test_close_name_is_proposed():
    with pytest.raises(ConfigError, match="did you mean 'multi30k'"):
        find(DataConfig(name='multi30'))


@pytest.mark.parametrize(
    ('name', 'field', 'value'),
    [
        ('stdlib', 'path', 'x.txt'),
        ('stdlib', 'manual_dir', '/files'),
        ('tiny_shakespeare', 'languages', 'en-de'),
        ('multi30k', 'path', 'x'),
        ('text', 'languages', 'en-de'),
        ('text', 'manual_dir', '/files'),
        ('cldr', 'feature', 'text'),
        ('parallel', 'feature', 'text'),
        ('tfds:imdb_reviews/plain_text', 'path', 'x'),
    ],
)
def test_settings_without_effect_are_refused(name, field, value):
    with pytest.raises(ConfigError, match=f"data.{field}='{value}' has no effect on .*{name}"):
        find(DataConfig(name=name, **{field: value}))


@pytest.mark.parametrize(
    ('name', 'field'),
    [
        ('text', 'path'),
        ('parallel', 'path'),
        ('parallel', 'languages'),
        ('multi30k', 'languages'),
        ('cldr', 'languages'),
    ],
)
@pytest.mark.parametrize('value', [None, ''])
def test_settings_that_are_needed_are_named(name, field, value):
    given = {'path': 'x', 'languages': 'en-de'} if name == 'parallel' else {}
    with pytest.raises(ConfigError, match=f'data.{field}={value!r}: data.name={name!r} needs'):
        find(DataConfig(name=name, **(given | {field: value})))


def test_languages_are_two_names():
    assert parse_languages(DataConfig(languages='en-pt_BR')) == ('en', 'pt_BR')
    for languages in ('en', 'en-de-fr', 'en-', '-', 'en - de', 'en/de', '../x-de', 'en-d\u00e9'):
        with pytest.raises(ConfigError, match=f"data.languages='{languages}' is not a pair"):
            parse_languages(DataConfig(languages=languages))
    with pytest.raises(ConfigError, match="'en-en' names one language twice"):
        parse_languages(DataConfig(languages='en-en'))


def test_lower_case_shows_in_the_version(tmp_path):
    for name in ('train', 'validation'):
        (tmp_path / f'{name}.txt').write_text(f'Ärger, {name.upper()}\nΣΑΣ\n')
    plain = find(DataConfig(name='text', path=str(tmp_path)))
    lower = find(DataConfig(name='text', path=str(tmp_path), lowercase=True))
    assert lower.version == f'{plain.version}-lower'
    assert list(lower.documents(None)['train']) == ['ärger, train\nσας\n'.encode()]
    assert list(plain.documents(None)['train']) == ['Ärger, TRAIN\nΣΑΣ\n'.encode()]
