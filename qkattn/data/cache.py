"""The directory that holds prepared data."""

import os
from pathlib import Path

from qkattn.errors import ConfigError


def data_root(data_dir: str | os.PathLike[str] | None = None) -> Path:
    """The directory for prepared data: `data_dir`, else $QKATTN_DATA, else ~/.cache/qkattn.

    Raises:
      ConfigError: for a bucket URL; token files are memory-mapped and have to be local.
    """
    chosen = os.fspath(data_dir) if data_dir is not None else os.environ.get('QKATTN_DATA')
    if chosen and '://' in chosen:
        raise ConfigError(
            f'data_dir={chosen!r} is a URL, but token files are memory-mapped; name a local or '
            'mounted directory.'
        )
    return Path(chosen or '~/.cache/qkattn').expanduser().absolute()
