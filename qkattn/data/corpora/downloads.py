"""The files that a dataset is made of: downloaded or copied once, and checked."""

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import requests

from qkattn.config import DataConfig
from qkattn.data.cache import check_sha256, data_root, prepared_once, sha256_of
from qkattn.errors import ConfigError
from qkattn.storage.files import expanded, replacing

# Seconds to connect, and of silence while reading, after which a download counts as failed.
TIMEOUT = (10, 60)


class SourceFile(NamedTuple):
    """A file of a dataset: where it is published, and its sha256."""

    url: str
    sha256: str

    @property
    def name(self) -> str:
        return self.url.rpartition('/')[2]


def fetch(dataset: str, files: Iterable[SourceFile], config: DataConfig) -> list[Path]:
    """The paths of the files under the data directory; fetches them where they are missing.

    They are copied from `config.manual_dir` where that is given, and downloaded otherwise.

    Raises:
      ConfigError: a file that is missing, cannot be downloaded or has another sha256.
    """
    files = list(files)
    directory = data_root(config.data_dir) / 'downloads' / dataset
    by_hand = 'fetch the files by hand and set data.manual_dir to the directory that holds ' + (
        ', '.join(file.name for file in files)
    )

    def fetched(file: SourceFile) -> Path:
        path = directory / file.name

        def opened() -> Path:
            if not path.exists():
                raise FileNotFoundError(path)
            check_sha256(path, file.sha256)
            return path

        def get() -> None:
            with replacing(path) as temporary:
                if config.manual_dir is None:
                    origin, advice = file.url, by_hand
                    _download(file, temporary, advice)
                else:
                    source = expanded(config.manual_dir) / file.name
                    origin = f'data.manual_dir={config.manual_dir!r}: {str(source)!r}'
                    advice = f'put the file {file.url} there, unchanged'
                    _copy(source, temporary, origin, advice)
                if (sha256 := sha256_of(temporary)) != file.sha256:
                    raise ConfigError(f'{origin} has sha256 {sha256}, not {file.sha256}; {advice}.')

        return prepared_once(directory / 'lock', opened, get)

    return [fetched(file) for file in files]


def _download(file: SourceFile, path: Path, advice: str) -> None:
    try:
        with requests.get(file.url, stream=True, timeout=TIMEOUT) as response:
            response.raise_for_status()
            with path.open('wb') as opened:
                for block in response.iter_content(1 << 20):
                    opened.write(block)
    except requests.RequestException as error:
        raise ConfigError(
            f'{file.url} cannot be downloaded ({reason(error)}); {advice}.'
        ) from error


def _copy(source: Path, path: Path, origin: str, advice: str) -> None:
    try:
        shutil.copyfile(source, path)
    except OSError as error:
        raise ConfigError(f'{origin} cannot be read ({error.strerror}); {advice}.') from error


def reason(error: requests.RequestException) -> str:
    """What went wrong, without the two layers of urllib3 that repeat the address."""
    cause = getattr(error.args[0], 'reason', error) if error.args else error
    return str(cause).split('): ', 1)[-1]
