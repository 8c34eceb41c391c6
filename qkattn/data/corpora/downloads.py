"""Datasets that are downloaded once, checked by sha256: Tiny Shakespeare and Multi30k."""

import gzip
import hashlib

import requests

from qkattn.config import DataConfig
from qkattn.data.cache import DamagedData, data_root, read_or_prepare
from qkattn.data.corpora.corpus import Corpus, explain_read_errors, parse_languages
from qkattn.errors import ConfigError
from qkattn.storage.files import as_path, read_whole, write_atomic

# Seconds without a connection and without data after which a download fails.
TIMEOUT = (10, 60)
PLAYS = 'https://raw.githubusercontent.com/karpathy/char-rnn/master/data/tinyshakespeare/input.txt'
CAPTIONS = 'https://raw.githubusercontent.com/multi30k/dataset/master/data/task1/raw'
# The split names in the names of Multi30k's files.
CAPTION_PARTS = {'train': 'train', 'validation': 'val', 'test': 'test_2016_flickr'}
# The sha256 of each file by name.
SHA256 = {
    'input.txt': '86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed',
    'train.de.gz': '726e39b2fa9eb9ffb6dc763fb35a179f80fae06ffc5d28b6ace5faa883de28a6',
    'train.en.gz': 'd79cfa999dd4c51d2cb42499b6796d5a882c3a8a961923c25a898c90f8bbd56f',
    'train.fr.gz': '622e75069e9f4c577425c4f277116ce66e63a2401c0a2312d90073cb12379a3c',
    'val.de.gz': 'f0cba2f995189cf5770f29a8a9a537a3ad3f51657ad873405082ff6863a5e75a',
    'val.en.gz': '14f7d25ddd868909a9213e361768460edcacdd6ab9d1e77b92560dc10c10dc28',
    'val.fr.gz': 'ca3106f1a72390591d25f6c45cb4cd39dec4cd3f123e099748a3ce5256c160e9',
    'test_2016_flickr.de.gz': '9204244e408ccb38d2a55cfcd344df15005fc42a07a6e55ca6c52b6ababb8cc8',
    'test_2016_flickr.en.gz': '611d361c6334bc7246101d48097c13cf5c4413c5befc793cc629934359d532d9',
    'test_2016_flickr.fr.gz': '6d326e188d259fb1d04ac19eae3af956559b3a0b93d7635e56c90987c40c8b90',
}


def tiny_shakespeare(config: DataConfig) -> Corpus:
    """Opens Tiny Shakespeare, 1.1 MB of plays.

    As in nanoGPT, the first 90 % of the characters are for training and the rest for validation.

    Source: Karpathy, "The Unreasonable Effectiveness of Recurrent Neural Networks" (2015).
    """

    def documents(language: str | None) -> dict[str, list[bytes]]:
        text = fetch_file('tiny_shakespeare', PLAYS, config).decode()
        cut = int(0.9 * len(text))
        train = text[:cut]
        validation = text[cut:]
        return {'train': [train.encode()], 'validation': [validation.encode()]}

    return Corpus(
        name='tiny_shakespeare',
        version='1.0.0',
        splits=('train', 'validation'),
        documents=documents,
    )


def multi30k(config: DataConfig) -> Corpus:
    """Opens Multi30k: image captions in English, German and French.

    The captions are the raw sentences of task 1, 29,000 of them in train. The test split is
    test_2016_flickr.

    Source: Elliott et al. 2016, https://aclanthology.org/W16-3210. For French: Elliott et al. 2017,
    https://aclanthology.org/W17-4718.

    Raises:
        ConfigError: `config.languages` is not two of de, en and fr.
    """
    languages = parse_languages(config)
    if not set(languages) <= {'de', 'en', 'fr'}:
        raise ConfigError(f'data.languages={config.languages!r} must be two of de, en and fr.')

    def documents(language: str | None) -> dict[str, list[bytes]]:
        captions_of_split = {}
        for split, file_prefix in CAPTION_PARTS.items():
            url = f'{CAPTIONS}/{file_prefix}.{language}.gz'
            compressed = fetch_file('multi30k', url, config)
            text = gzip.decompress(compressed).removesuffix(b'\n')
            # `splitlines` would also split at other characters.
            captions_of_split[split] = text.split(b'\n')
        return captions_of_split

    return Corpus(
        name='-'.join(('multi30k', *languages)),
        version='1.0.0',
        languages=languages,
        splits=tuple(CAPTION_PARTS),
        documents=documents,
    )


def fetch_file(dataset: str, url: str, config: DataConfig) -> bytes:
    """Returns the content of a file, which is downloaded once and cached.

    Args:
        dataset: The name of the cache directory.
        url: The URL of the file.
        config: The settings. If `manual_dir` is set, the file is copied from there instead.

    Raises:
        ConfigError: The file cannot be read, or has a wrong sha256.
    """
    root = data_root(config.data_dir)
    cached_file = root / 'downloads' / dataset / _file_name(url)

    def read() -> bytes:
        content = read_whole(cached_file)
        _check_sha256(content, source=str(cached_file), url=url)
        return content

    def prepare() -> None:
        write_atomic(cached_file, _download_or_copy(url, config))

    return read_or_prepare(cached_file, read=read, prepare=prepare, root=root)


def _file_name(url: str) -> str:
    """Returns the file name at the end of a URL."""
    return url.rpartition('/')[2]


def _download_or_copy(url: str, config: DataConfig) -> bytes:
    """Downloads a file, or reads it from `config.manual_dir` if that is set.

    Raises ConfigError if this fails, or if the file has a wrong sha256.
    """
    if config.manual_dir is None:
        source = url
        content = _download(url, _advice(url))
    else:
        file = as_path(config.manual_dir) / _file_name(url)
        source = str(file)
        with explain_read_errors(source, _advice(url)):
            content = read_whole(file)
    _check_sha256(content, source, url)
    return content


def _check_sha256(content: bytes, source: str, url: str) -> None:
    """Raises DamagedData, which names `source`, if the file of a URL has a wrong sha256."""
    sha256 = hashlib.sha256(content).hexdigest()
    expected_sha256 = SHA256[_file_name(url)]
    if sha256 != expected_sha256:
        raise DamagedData(f'{source} has sha256 {sha256}, not {expected_sha256}; {_advice(url)}')


def _advice(url: str) -> str:
    """Returns advice for a file that cannot be downloaded or is damaged."""
    return f'put {url}, unchanged, into a directory and name it in data.manual_dir'


def _download(url: str, advice: str) -> bytes:
    """Downloads a file. Raises ConfigError, which ends with `advice`, if this fails."""
    with explain_read_errors(url, advice):  # the errors of requests are subclasses of OSError
        response = requests.get(url, timeout=TIMEOUT)
        response.raise_for_status()
        return response.content
