import collections
import hashlib
import itertools
import json

import babel
import pytest

from qkattn.config import DataConfig
from qkattn.data.corpora import cldr
from qkattn.data.corpora.corpus import split_of
from qkattn.data.corpora.corpus_registry import find
from tests.data.datasets import documents
from tests.refusals import refused


@pytest.fixture(scope='module')
def pairs():
    return list(cldr.pairs('en', 'de'))


def test_texts_of_every_category_are_distinct_short_and_tidy(pairs):
    sizes = collections.Counter(category for category, _, _ in pairs)
    assert set(sizes) == set(cldr.CATEGORIES) and min(sizes.values()) > 800
    translations = {source: target for _, source, target in pairs}
    assert 40_000 < len(pairs) == len(translations) < 65_000
    assert not any(source == target for source, target in translations.items())
    for text in (*translations, *translations.values()):
        # One kind of space, and no empty items.
        assert 0 < len(text.encode()) <= 120 and text == ' '.join(text.split())
    if babel.__version__ == '2.18.0':
        # Written down, so that texts do not change under the same version.
        digest = hashlib.sha256(json.dumps(pairs).encode()).hexdigest()
        assert digest == 'cfc420ea1d450ea950bfbf583cf003794b80a2008a6af4197871c769c3096796'


def test_languages_of_which_little_is_known_have_a_corpus_too(monkeypatch):
    few = {
        name: lambda *args, phrases=phrases: itertools.islice(phrases(*args), 0, None, 29)
        for name, phrases in cldr.CATEGORIES.items()
    }
    monkeypatch.setattr(cldr, 'CATEGORIES', few)
    for languages in (('fr', 'ja'), ('en', 'root'), ('en', 'cic'), ('en', 'agq')):
        assert len(list(cldr.pairs(*languages))) > 200


def test_corpus_is_the_pairs_by_split_in_an_order_that_mixes_them(pairs, monkeypatch):
    monkeypatch.setattr(cldr, 'pairs', lambda *languages: iter(pairs))
    cldr._ordered.cache_clear()
    corpus = find(DataConfig(name='cldr', languages='en-de'))
    assert (corpus.name, corpus.version) == ('cldr-en-de', f'babel{babel.__version__}-1.0.0')
    sides = [documents(corpus, language) for language in corpus.languages]
    categories = {source: category for category, source, _ in pairs}
    for split, share in (('train', 0.9), ('validation', 0.05), ('test', 0.05)):
        texts = [[text.decode() for text in side[split]] for side in sides]
        expected = {(s, t) for _, s, t in pairs if split_of(s, 90, 5) == split}
        assert len(texts[0]) == len(expected) == pytest.approx(share * len(pairs), rel=0.2)
        assert set(zip(*texts, strict=True)) == expected
        assert {categories[source] for source in texts[0][:150]} == set(categories.values())


def test_a_language_has_one_name():
    assert find(DataConfig(name='cldr', languages='EN-zh_CN')).name == 'cldr-en-zh_Hans_CN'
    for languages in ('en-xx', 'english-de', 'en-EN'):
        with refused(f"data.languages='{languages}'"):
            find(DataConfig(name='cldr', languages=languages))
