"""tfds datasets: prepared once, as array_record files, without TensorFlow."""

import contextlib
import functools
import io
import logging
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from urllib.parse import urlsplit

import requests
import tensorflow_datasets as tfds

from qkattn.data.cache import prepared_once
from qkattn.data.corpora.downloads import TIMEOUT, reason
from qkattn.errors import ConfigError

# Examples; a few, because an example may be a book.
READ_TOGETHER = 128
# Servers of a dataset that are tried before it counts as out of reach.
HOSTS = 3

log = logging.getLogger(__name__)


def is_prepared(builder: tfds.core.DatasetBuilder) -> bool:
    """Whether the dataset is on disk, whole."""
    # tfds warns of a directory without a dataset, which is no news where there is no directory.
    return builder.data_path.exists() and builder.is_prepared()


def prepare(
    create: Callable[[], tfds.core.DatasetBuilder],
    *,
    data_dir: Path,
    manual_dir: str | None = None,
    advice: str = 'try again',
) -> tfds.core.DatasetBuilder:
    """A builder whose dataset is prepared under `data_dir`; call it from any number of processes.

    The directory of a dataset appears when it is complete; what a failed or killed attempt leaves
    is removed.

    Args:
      create: makes the builder, with `data_dir` as its directory.
      manual_dir: files are read from here instead of downloaded.
      advice: ends the sentence about a preparation that failed.

    Raises:
      ConfigError: if the dataset cannot be prepared: a file that is missing, cannot be downloaded
        or is not what it should be, a package that is not installed, an unwritable `data_dir`.
    """

    def opened() -> tfds.core.DatasetBuilder:
        # Created again each time: a builder remembers what was on disk when it was created.
        builder = create()
        if not is_prepared(builder):
            raise FileNotFoundError(builder.data_dir)
        return builder

    def prepare_it() -> None:
        builder = create()
        log.info('Preparing %s in %s', builder.info.full_name, builder.data_dir)
        try:
            _prepare(builder, manual_dir, advice)
        finally:
            _remove_leftovers(builder, data_dir)

    return prepared_once(data_dir / f'{create().name}.lock', opened, prepare_it)


def _prepare(builder: tfds.core.DatasetBuilder, manual_dir: str | None, advice: str) -> None:
    if builder.data_path.exists():
        raise ConfigError(
            f'The directory {builder.data_dir!r} holds no dataset that tfds knows; delete it and '
            'the dataset is prepared again.'
        )
    (tfds.enable_progress_bar if sys.stderr.isatty() else tfds.disable_progress_bar)()
    name = builder.info.full_name
    if manual_dir is None:
        _check_reachable(builder, advice)
    try:
        # Standard output belongs to the program's results.
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare(
                file_format='array_record',
                download_config=tfds.download.DownloadConfig(
                    manual_dir=manual_dir, try_download_gcs=False
                ),
            )
    except ImportError as error:
        raise ConfigError(needs_package(name, error, advice)) from error
    except Exception as error:
        by_hand = builder.MANUAL_DOWNLOAD_INSTRUCTIONS
        if isinstance(error, AssertionError) and manual_dir is None and by_hand:
            raise ConfigError(
                f'data.manual_dir=None: {name} is made of files that are fetched by hand: '
                f'{" ".join(by_hand.split())}'
            ) from error
        first = ' '.join(str(error).split('\n\n')[0].split())
        raise ConfigError(
            f'{name} cannot be prepared ({type(error).__name__}: {first}); {advice}.'
        ) from error


def _check_reachable(builder: tfds.core.DatasetBuilder, advice: str) -> None:
    """Raises ConfigError if no server of the dataset answers; tfds would retry for minutes."""
    known = [url for url in builder.url_infos or () if url.startswith('http')]
    urls = {urlsplit(url).netloc: url for url in known}
    for url in list(urls.values())[:HOSTS]:
        try:
            requests.head(url, timeout=TIMEOUT).close()
            return
        except requests.RequestException as error:
            failed = error
    if urls:
        raise ConfigError(
            f'{builder.info.full_name}: {url} cannot be downloaded ({reason(failed)}); {advice}.'
        ) from failed


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
