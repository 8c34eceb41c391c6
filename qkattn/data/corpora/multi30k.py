"""Multi30k: captions of pictures in English with translations, 29,000 sentences to train on.

Source: Elliott et al. 2016, https://aclanthology.org/W16-3210; French: Elliott et al. 2017,
https://aclanthology.org/W17-4718. Task 1, raw (not tokenised); the test split is
test_2016_flickr.
"""

import gzip
import itertools
from collections.abc import Iterator
from pathlib import Path

import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.data.cache import data_root
from qkattn.data.corpora import builders
from qkattn.data.corpora.corpus import Corpus
from qkattn.errors import ConfigError

LANGUAGES = ('de', 'en', 'fr')
PARTS = {'train': 'train', 'validation': 'val', 'test': 'test_2016_flickr'}
URL = 'https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw'
SOURCES = (
    ('train', 'de', 637044, '726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6'),
    ('train', 'en', 568929, 'd79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f'),
    ('train', 'fr', 604242, '622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c'),
    ('validation', 'de', 24681, 'f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a'),
    ('validation', 'en', 21650, '14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28'),
    ('validation', 'fr', 23001, 'ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9'),
    ('test', 'de', 22890, '9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8'),
    ('test', 'en', 21077, '611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9'),
    ('test', 'fr', 22310, '6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90'),
)
FILES = {
    (split, language): builders.SourceFile(f'{URL}/{PARTS[split]}.{language}.gz', sha256, size)
    for split, language, size, sha256 in SOURCES
}


class Multi30k(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Sentence pairs, one config per pair of languages: {'de': ..., 'en': ...}."""

    VERSION = tfds.core.Version('1.0.0')
    RELEASE_NOTES = {'1.0.0': 'Task 1, raw; test_2016_flickr is the test split.'}
    BUILDER_CONFIGS = [
        tfds.core.BuilderConfig(name=f'{first}-{second}')
        for first, second in itertools.combinations(LANGUAGES, 2)
    ]

    @property
    def languages(self) -> list[str]:
        return self.builder_config.name.split('-')

    @property
    def url_infos(self) -> dict[str, object]:
        return builders.url_infos(FILES.values())

    def _info(self) -> tfds.core.DatasetInfo:
        return tfds.core.DatasetInfo(
            builder=self,
            description=self.__doc__,
            features=tfds.features.Translation(languages=self.languages),
            disable_shuffling=True,
        )

    def _split_generators(
        self, dl_manager: tfds.download.DownloadManager
    ) -> dict[str, Iterator[tuple[int, dict[str, str]]]]:
        paths = dl_manager.download(
            {
                split: {language: FILES[split, language].url for language in self.languages}
                for split in PARTS
            }
        )
        return {split: self._generate_examples(paths[split]) for split in PARTS}

    def _generate_examples(self, paths: dict[str, Path]) -> Iterator[tuple[int, dict[str, str]]]:
        sides = [
            gzip.decompress(Path(paths[language]).read_bytes()).decode().removesuffix('\n')
            for language in self.languages
        ]
        # Not splitlines, which would also cut at other characters than the end of a line.
        pairs = zip(*(side.split('\n') for side in sides), strict=True)
        for number, pair in enumerate(pairs):
            yield number, dict(zip(self.languages, pair, strict=True))


def corpus(languages: tuple[str, str], config: DataConfig) -> Corpus:
    """The corpus of a pair of languages, source first; prepared when documents are asked for.

    Raises:
      ConfigError: for a language that Multi30k does not have.
    """
    for language in languages:
        if language not in LANGUAGES:
            raise ConfigError(
                f'data.languages={config.languages!r}: multi30k has no {language!r}; valid: two of '
                f'{", ".join(map(repr, LANGUAGES))}.'
            )

    pair = sorted(languages)
    files = [FILES[split, language] for split in PARTS for language in pair]

    def documents(language: str) -> dict[str, Iterator[bytes]]:
        data_dir = data_root(config.data_dir)
        builder = builders.prepare(
            lambda: Multi30k(config='-'.join(pair), data_dir=data_dir),
            data_dir=data_dir,
            files=files,
            manual_dir=config.manual_dir,
            advice=builders.by_hand(files),
        )
        return {split: builders.texts(builder, split, language) for split in PARTS}

    return Corpus(
        name='multi30k-' + '-'.join(languages),
        version=str(Multi30k.VERSION),
        languages=languages,
        splits=tuple(PARTS),
        documents=documents,
    )
