"""Datasets that are downloaded once, checked by sha256: Tiny Shakespeare and Multi30k."""

import gzip
import hashlib
from typing import NamedTuple

import requests

from qkattn.config import DataConfig
from qkattn.data.cache import check_sha256, data_root, prepared_once
from qkattn.data.corpora.corpus import Corpus, parse_languages
from qkattn.errors import ConfigError
from qkattn.storage.files import expanded, write_atomic

# Seconds to connect, and of silence while reading, after which a download counts as failed.
TIMEOUT = (10, 60)


class SourceFile(NamedTuple):
    """A file of a dataset: where it is published, and its sha256."""

    url: str
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition('/')[2]


PLAYS = SourceFile(
    'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt',
    '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed',
)
CAPTIONS_URL = 'https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw'
CAPTIONS = {
    name: SourceFile(f'{CAPTIONS_URL}/{name}.gz', sha256)
    for name, sha256 in (
        ('train.de', '726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6'),
        ('train.en', 'd79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f'),
        ('train.fr', '622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c'),
        ('val.de', 'f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a'),
        ('val.en', '14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28'),
        ('val.fr', 'ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9'),
        ('test_2016_flickr.de', '9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8'),
        ('test_2016_flickr.en', '611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9'),
        ('test_2016_flickr.fr', '6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90'),
    )
}
CAPTION_PARTS = {'train': 'train', 'validation': 'val', 'test': 'test_2016_flickr'}


def tiny_shakespeare(config: DataConfig) -> Corpus:
    """1.1 MB of plays in one file, the usual first text of a language model.

    Split as in nanoGPT: the first 90 % of the characters train, the rest validate. Source:
    Karpathy, "The Unreasonable Effectiveness of Recurrent Neural Networks" (2015).
    """

    def documents(language: str | None) -> dict[str, list[bytes]]:
        text = fetched('tiny_shakespeare', PLAYS, config).decode()
        cut = int(0.9 * len(text))
        return {'train': [text[:cut].encode()], 'validation': [text[cut:].encode()]}

    return Corpus(
        name='tiny_shakespeare',
        version='1.0.0',
        splits=('train', 'validation'),
        documents=documents,
    )


def multi30k(config: DataConfig) -> Corpus:
    """Captions of pictures in English with translations, 29,000 sentences to train on.

    Task 1, raw (not tokenized); the test split is test_2016_flickr. Source: Elliott et al. 2016,
    https://aclanthology.org/W16-3210; French: Elliott et al. 2017,
    https://aclanthology.org/W17-4718.

    Raises:
      ConfigError: a language that Multi30k does not have.
    """
    languages = parse_languages(config)
    for language in languages:
        if f'train.{language}' not in CAPTIONS:
            raise ConfigError(
                f'data.languages={config.languages!r}: multi30k has no {language!r}; valid: two of '
                "'de', 'en', 'fr'."
            )

    def documents(language: str | None) -> dict[str, list[bytes]]:
        files = {split: CAPTIONS[f'{part}.{language}'] for split, part in CAPTION_PARTS.items()}
        texts = {split: fetched('multi30k', file, config) for split, file in files.items()}
        # Not splitlines, which would also cut at other characters than the end of a line.
        return {
            split: gzip.decompress(text).removesuffix(b'\n').split(b'\n')
            for split, text in texts.items()
        }

    return Corpus(
        name='multi30k-' + '-'.join(languages),
        version='1.0.0',
        languages=languages,
        splits=tuple(CAPTION_PARTS),
        documents=documents,
    )


def fetched(dataset: str, file: SourceFile, config: DataConfig) -> bytes:
    """The content of a file, which is kept under the data directory once it is there.

    It is copied from `config.manual_dir` where that is given, and downloaded otherwise.

    Raises:
      ConfigError: a file that is missing, cannot be downloaded or has another sha256.
    """
    directory = data_root(config.data_dir) / 'downloads' / dataset
    path = directory / file.name

    def opened() -> bytes:
        content = path.read_bytes()
        check_sha256(path, file.sha256)
        return content

    def get() -> None:
        origin = file.url
        advice = 'fetch it by hand and set data.manual_dir to the directory that holds it'
        try:
            if config.manual_dir is not None:
                source = expanded(config.manual_dir) / file.name
                origin = f'data.manual_dir={config.manual_dir!r}: {str(source)!r}'
                advice = f'put the file {file.url} there, unchanged'
                content = source.read_bytes()
            else:
                response = requests.get(file.url, timeout=TIMEOUT)
                response.raise_for_status()
                content = response.content
        except OSError as error:  # which requests' errors are
            # Without the two layers of urllib3 that repeat the address.
            cause = getattr(error.args[0], 'reason', error) if error.args else error
            reason = error.strerror or str(cause).split('): ', 1)[-1]
            raise ConfigError(f'{origin} cannot be read ({reason}); {advice}.') from error
        if (sha256 := hashlib.sha256(content).hexdigest()) != file.sha256:
            raise ConfigError(f'{origin} has sha256 {sha256}, not {file.sha256}; {advice}.')
        write_atomic(path, content)

    return prepared_once(directory / 'lock', opened, get)
