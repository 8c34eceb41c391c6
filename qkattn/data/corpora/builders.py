"""tfds datasets prepared once, by one process at a time, from checked files, without TensorFlow."""

import contextlib
import functools
import hashlib
import io
import logging
import shutil
import sys
import urllib.error
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import requests
import tensorflow_datasets as tfds
from tensorflow_datasets.core.download import checksums, download_manager, downloader

from qkattn.errors import ConfigError
from qkattn.run.files import locked

# Seconds to connect, and of silence while reading, after which a download counts as failed.
TIMEOUT = (10, 60)
# Examples; a few, because an example may be a book.
READ_TOGETHER = 128

log = logging.getLogger(__name__)


class SourceFile(NamedTuple):
    """A file that a dataset is made of: where it comes from and what it must be."""

    url: str
    sha256: str
    size: int

    @property
    def name(self) -> str:
        return self.url.rpartition('/')[2]


def url_infos(files: Iterable[SourceFile]) -> dict[str, checksums.UrlInfo]:
    """What tfds checks downloads by; for the `url_infos` of a builder."""
    return {
        file.url: checksums.UrlInfo(
            size=tfds.core.utils.Size(file.size), checksum=file.sha256, filename=file.name
        )
        for file in files
    }


def check_manual(files: Iterable[SourceFile], manual_dir: str) -> None:
    """Raises ConfigError for the first of `files` that is not in `manual_dir` as it should be."""
    for file in files:
        path = Path(manual_dir).expanduser() / file.name
        where = f'data.manual_dir={manual_dir!r}: {str(path)!r}'
        try:
            with path.open('rb') as opened:
                sha256 = hashlib.file_digest(opened, 'sha256').hexdigest()
        except OSError as error:
            raise ConfigError(
                f'{where} cannot be read ({error.strerror}); put the file {file.url} there.'
            ) from error
        if sha256 != file.sha256:
            raise ConfigError(
                f'{where} has sha256 {sha256}, not {file.sha256}; put the file {file.url} there, '
                'unchanged.'
            )


def by_hand(files: Iterable[SourceFile]) -> str:
    """What to do where files cannot be downloaded."""
    names = ', '.join(file.name for file in files)
    return f'fetch the files by hand and set data.manual_dir to the directory that holds {names}'


def is_prepared(builder: tfds.core.DatasetBuilder) -> bool:
    """Whether the dataset is on disk, whole."""
    # tfds warns of a directory without a dataset, which is no news where there is no directory.
    return builder.data_path.exists() and builder.is_prepared()


def prepare(
    create: Callable[[], tfds.core.DatasetBuilder],
    *,
    data_dir: Path,
    files: Iterable[SourceFile] = (),
    manual_dir: str | None = None,
    advice: str = 'try again',
    progress: bool = False,
) -> tfds.core.DatasetBuilder:
    """A builder whose dataset is prepared under `data_dir`; call it from any number of processes.

    One process at a time prepares a dataset and the others wait for it. The directory of a dataset
    appears when it is complete; what a failed or killed attempt leaves is removed.

    Args:
      create: makes the builder, with `data_dir` as its directory.
      files: what `manual_dir`, where given, has to hold.
      manual_dir: files are read from here instead of downloaded.
      advice: ends the sentence about a download that failed.
      progress: shows bars on standard error, if that is a terminal.

    Raises:
      ConfigError: if the dataset cannot be prepared: a file that is missing, cannot be downloaded
        or is not what it should be, a package that is not installed, an unwritable `data_dir`.
    """
    builder = create()
    # Without the lock first, so that a prepared dataset may be on a read-only disk.
    if is_prepared(builder):
        return builder
    with locked(data_dir / f'{builder.name}.lock'):
        # Created again: a builder remembers what was on disk when it was created.
        builder = create()
        if not is_prepared(builder):
            if manual_dir is not None:
                check_manual(files, manual_dir)
            log.info('Preparing %s in %s', builder.info.full_name, builder.data_dir)
            try:
                _prepare(builder, manual_dir, advice, progress)
            finally:
                _remove_leftovers(builder, data_dir)
    return builder


def _prepare(
    builder: tfds.core.DatasetBuilder, manual_dir: str | None, advice: str, progress: bool
) -> None:
    if builder.data_path.exists():
        raise ConfigError(
            f'The directory {builder.data_dir!r} holds no dataset that tfds knows; delete it and '
            'the dataset is prepared again.'
        )
    shown = progress and sys.stderr.isatty()
    (tfds.enable_progress_bar if shown else tfds.disable_progress_bar)()
    name = builder.info.full_name
    try:
        # Standard output belongs to the program's results.
        with _impatient_downloads(), contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare(
                file_format='array_record',
                download_config=tfds.download.DownloadConfig(
                    manual_dir=manual_dir, try_download_gcs=False
                ),
            )
    except (requests.RequestException, tfds.download.DownloadError, urllib.error.URLError) as error:
        raise ConfigError(f'{name}: {_failed(error)}; {advice}.') from error
    except download_manager.NonMatchingChecksumError as error:
        said = ' '.join(str(error).partition('To debug')[0].split())
        raise ConfigError(f'{name}: {said}; {advice}.') from error
    except AssertionError as error:
        # How tfds says that files of its catalogue have to be fetched by hand.
        if manual_dir is not None or builder.MANUAL_DOWNLOAD_INSTRUCTIONS is None:
            raise
        said = ' '.join(builder.MANUAL_DOWNLOAD_INSTRUCTIONS.split())
        raise ConfigError(
            f'data.manual_dir=None: {name} is made of files that are fetched by hand: {said}'
        ) from error
    except ImportError as error:
        raise ConfigError(needs_package(name, error, advice)) from error


def needs_package(name: str, missing: str | BaseException | None, advice: str) -> str:
    """The sentence about a package that only the preparation of a dataset needs.

    Args:
      missing: the package, or the error of its import.
    """
    # tfds raises such an error again as one of its own, without the name.
    while isinstance(missing, ImportError) and missing.name is None and missing.__cause__:
        missing = missing.__cause__
    module = missing if isinstance(missing, str) else getattr(missing, 'name', None)
    if module is None:
        return f'Preparing {name} failed to import what it needs ({missing}); {advice}.'
    package = {'apache_beam': 'apache-beam'}.get(module, module)
    return f'Preparing {name} needs {package}: pip install {package}, or {advice}.'


def _failed(error: Exception) -> str:
    if not isinstance(error, requests.RequestException) or error.request is None:
        return f'the download failed ({error})'
    # urllib3 wraps the reason into two layers that repeat the address.
    cause = getattr(error.args[0], 'reason', error) if error.args else error
    reason = str(cause).split('): ', 1)[-1]
    return f'{error.request.url} cannot be downloaded ({reason})'


@contextlib.contextmanager
def _impatient_downloads() -> Iterator[None]:
    """Makes downloads of tfds fail at once; it retries for minutes and knows no timeout."""
    saved = downloader.MAX_RETRIES, downloader._open_url
    downloader.MAX_RETRIES = 0
    downloader._open_url = functools.partial(downloader._open_url, timeout=TIMEOUT)
    try:
        yield
    finally:
        downloader.MAX_RETRIES, downloader._open_url = saved


def _remove_leftovers(builder: tfds.core.DatasetBuilder, data_dir: Path) -> None:
    for path in (
        *(data_dir / 'downloads' / builder.name).rglob('*.tmp.*'),
        *Path(builder.data_dir).parent.glob('incomplete.*'),
    ):
        shutil.rmtree(path, ignore_errors=True)


def texts(builder: tfds.core.DatasetBuilder, split: str, *path: str) -> Iterator[bytes]:
    """The text at `path` in the features of every example of a split, in the order on disk.

    Raises:
      ConfigError: while iterating, if the dataset was prepared in a format without random access.
      RuntimeError: while iterating, if the prepared files are damaged.
    """
    try:
        source = builder.as_data_source(split)
        for start in range(0, len(source), READ_TOGETHER):
            # One by one takes four times as long.
            for example in source.__getitems__(
                range(start, min(start + READ_TOGETHER, len(source)))
            ):
                yield functools.reduce(lambda features, key: features[key], path, example)
    except NotImplementedError as error:
        raise ConfigError(
            f'The dataset at {str(builder.data_dir)!r} was prepared as '
            f'{builder.info.file_format.value}; delete that directory and it is prepared again, or '
            'prepare it with file_format=array_record.'
        ) from error
    except RuntimeError as error:
        raise RuntimeError(
            f'The prepared dataset at {str(builder.data_dir)!r} cannot be read ({error}); '
            'delete that directory and it is prepared again.'
        ) from error
