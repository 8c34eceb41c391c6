import collections
import hashlib
import itertools
import json
import os
import re
import subprocess
import sys
from unittest import mock

import babel
import pytest
from babel import localedata

from qkattn.config import DataConfig
from qkattn.data.corpora import cldr
from qkattn.data.corpora.corpus_registry import find
from tests.data.refusals import refused
from tests.processes import ROOT


@pytest.fixture(scope='module')
def pairs():
    return list(cldr.pairs('en', 'de'))


@pytest.fixture(scope='module')
def translations(pairs):
    return {source: target for _, source, target in pairs}


def few_pairs(*languages):
    """Of a few phrases of each category, enough to see that nothing fails."""
    few = {
        name: lambda *args, phrases=phrases: itertools.islice(phrases(*args), 0, None, 29)
        for name, phrases in cldr.CATEGORIES.items()
    }
    with mock.patch.object(cldr, 'CATEGORIES', few):
        return list(cldr.pairs(*languages))


def digest(pairs):
    return hashlib.sha256(json.dumps(pairs).encode()).hexdigest()


def test_texts_of_every_category_are_distinct_short_and_tidy_and_split_90_5_5(pairs, translations):
    sizes = collections.Counter(category for category, _, _ in pairs)
    assert set(sizes) == set(cldr.CATEGORIES)
    assert min(sizes.values()) > 800
    assert 40_000 < len(pairs) == len(translations) < 65_000
    sizes = collections.Counter(cldr.place(source)[0] for source in translations)
    assert 0.88 < sizes['train'] / len(pairs) < 0.92
    assert 0.04 < sizes['validation'] / len(pairs) < 0.06
    # The same in every version of the package, or published results lose meaning.
    places = {'Germany': 'train', '2 days': 'validation', '10 days': 'test'}
    assert {source: cldr.place(source)[0] for source in places} == places
    for source, target in translations.items():
        assert source != target
        for text in (source, target):
            assert 0 < len(text.encode()) <= 120
            # One kind of space, and no empty items.
            assert text == ' '.join(text.split())
            assert not re.search(r'[\s][^\S ]|[^\S ]', text)


def test_translations_are_right(translations):
    # Written down from CLDR, one or two of each category; they hold whatever is drawn.
    known = {
        'Germany': 'Deutschland',
        'US Dollar': 'US-Dollar',
        'Austrian German': 'Österreichisches Deutsch',
        'Central European Standard Time': 'Mitteleuropäische Normalzeit',
        '1 kilometer': '1 Kilometer',
        'in 5 months': 'in 5 Monaten',
        '5 months': '5 Monate',
        '1 second ago': 'vor 1 Sekunde',
        '1 Swiss franc': '1 Schweizer Franken',
    }
    assert {source: translations.get(source) for source in known} == known


FRESH = """
from tests.data.corpora.test_cldr import digest, few_pairs
print(digest(few_pairs('en', 'de')))
"""


def test_neither_machine_nor_process_decide_what_is_drawn(pairs):
    environment = {'TZ': 'Asia/Tokyo', 'LC_ALL': 'fr_FR.UTF-8', 'LANGUAGE': 'fr'}
    fresh = subprocess.run(
        [sys.executable, '-c', FRESH],
        env=os.environ | environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    assert fresh.stdout.strip() == digest(few_pairs('en', 'de'))
    if babel.__version__ == '2.18.0':
        # Written down, so that texts do not change under the same version.
        assert digest(pairs) == 'cfc420ea1d450ea950bfbf583cf003794b80a2008a6af4197871c769c3096796'


RARE = ('root', 'cic', 'ltg', 'nus', 'agq', 'la', 'ar', 'my')


@pytest.mark.parametrize(
    ('languages', 'least'),
    [
        *((languages, 600) for languages in (('de', 'en'), ('fr', 'ja'), ('zh_Hans', 'pt_BR'))),
        # Languages of which little is known.
        *((('en', language), 200) for language in RARE),
    ],
)
def test_other_languages_have_a_corpus_too(languages, least):
    assert all(map(localedata.exists, languages))
    assert len(few_pairs(*languages)) > least


def test_corpus_is_the_pairs_by_split_in_an_order_that_mixes_them(pairs, tmp_path, monkeypatch):
    monkeypatch.setattr(cldr, 'pairs', lambda *languages: iter(pairs))
    cldr._placed.cache_clear()
    corpus = find(DataConfig(name='cldr', languages='en-de', data_dir=str(tmp_path)))
    assert (corpus.name, corpus.languages) == ('cldr-en-de', ('en', 'de'))
    assert corpus.version == f'babel{babel.__version__}-{cldr.VERSION}'
    assert corpus.splits == ('train', 'validation', 'test')
    sides = [corpus.documents(language) for language in corpus.languages]
    categories = {source: category for category, source, _ in pairs}
    for split in corpus.splits:
        texts = [[text.decode() for text in side[split]] for side in sides]
        expected = {(s, t) for _, s, t in pairs if cldr.place(s)[0] == split}
        assert len(texts[0]) == len(expected)
        assert set(zip(*texts, strict=True)) == expected
        assert {categories[source] for source in texts[0][:150]} == set(categories.values())
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ('languages', 'says'),
    [
        ('en-xx', "CLDR has no 'xx'; valid: .* 'en', 'de', 'fr'"),
        ('english-de', "CLDR has no 'english'"),
        ('en-EN', "data.languages='en-EN' names one language twice"),
    ],
)
def test_languages_that_cannot_be_are_one_sentence(languages, says):
    with refused(says):
        find(DataConfig(name='cldr', languages=languages))
    # A language has one name.
    corpus = find(DataConfig(name='cldr', languages='EN-zh_CN'))
    assert corpus.languages == ('en', 'zh_Hans_CN')
    assert corpus.name == 'cldr-en-zh_Hans_CN'
