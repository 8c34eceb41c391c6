"""Multi30k: captions of pictures in English with translations, 29,000 sentences to train on.

Source: Elliott et al. 2016, https://aclanthology.org/W16-3210; French: Elliott et al. 2017,
https://aclanthology.org/W17-4718. Task 1, raw (not tokenized); the test split is
test_2016_flickr.
"""

import gzip
from collections.abc import Iterator
from pathlib import Path

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import Corpus, parse_languages
from qkattn.data.corpora.downloads import SourceFile, fetch
from qkattn.errors import ConfigError

VERSION = '1.0.0'
LANGUAGES = ('de', 'en', 'fr')
PARTS = {'train': 'train', 'validation': 'val', 'test': 'test_2016_flickr'}
URL = 'https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw'
SOURCES = (
    ('train', 'de', '726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6'),
    ('train', 'en', 'd79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f'),
    ('train', 'fr', '622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c'),
    ('validation', 'de', 'f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a'),
    ('validation', 'en', '14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28'),
    ('validation', 'fr', 'ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9'),
    ('test', 'de', '9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8'),
    ('test', 'en', '611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9'),
    ('test', 'fr', '6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90'),
)
FILES = {
    (split, language): SourceFile(f'{URL}/{PARTS[split]}.{language}.gz', sha256)
    for split, language, sha256 in SOURCES
}


def corpus(config: DataConfig) -> Corpus:
    """The corpus of a pair of languages, source first; its files are fetched when it is read.

    Raises:
      ConfigError: for a language that Multi30k does not have.
    """
    languages = parse_languages(config)
    for language in languages:
        if language not in LANGUAGES:
            raise ConfigError(
                f'data.languages={config.languages!r}: multi30k has no {language!r}; valid: two of '
                f'{", ".join(map(repr, LANGUAGES))}.'
            )

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        keys = [(split, side) for split in PARTS for side in sorted(languages)]
        paths = dict(zip(keys, fetch('multi30k', map(FILES.get, keys), config), strict=True))
        return {split: _lines(paths[split, language]) for split in PARTS}

    return Corpus(
        name='multi30k-' + '-'.join(languages),
        version=VERSION,
        languages=languages,
        splits=tuple(PARTS),
        documents=documents,
    )


def _lines(path: Path) -> Iterator[bytes]:
    # Not splitlines, which would also cut at other characters than the end of a line.
    yield from gzip.decompress(path.read_bytes()).removesuffix(b'\n').split(b'\n')
