"""Sets read with the Hugging Face `datasets` library: published ones, and saved directories.

It keeps published sets in its own cache ($HF_HOME). Rows whose text is missing or empty are left
out.
"""

import functools
import hashlib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from qkattn.config import DataConfig
from qkattn.config.calls import load_extra
from qkattn.data.cache import sha256_of
from qkattn.data.corpora.corpus import Corpus, find_feature, find_splits, parse_languages
from qkattn.errors import ConfigError
from qkattn.storage.files import expanded

# Rows that are read at a time.
READ_TOGETHER = 1000


def published(config: DataConfig) -> Corpus:
    """The corpus 'hf:OWNER/NAME' or 'hf:OWNER/NAME/CONFIG'; fetched the first time.

    Raises:
      ConfigError: a set that cannot be opened, or that has no train split; a language or a column
        that it does not have; `datasets` is not installed.
    """
    match = re.fullmatch(r'hf:([\w.-]+(?:/[\w.-]+)?)(?:/([\w.-]+))?', config.name)
    where = f'data.name={config.name!r}'
    if match is None:
        raise ConfigError(f"{where} is not of the form 'hf:OWNER/NAME' or 'hf:OWNER/NAME/CONFIG'.")
    library = load_extra('datasets', 'datasets')
    try:
        sets = library.load_dataset(*filter(None, match.groups()))
    except Exception as error:
        raise ConfigError(
            f'{where} cannot be opened ({_reason(error)}); check its name and the network, or save '
            "it elsewhere with save_to_disk and set data.name='hf' and data.path."
        ) from error
    first = next(iter(sets.values()))
    # The directory of a published set is named by its revision.
    revision = Path(first.cache_files[0]['filename']).parent.name
    return _corpus(sets, where, config, f'{first.info.version}-{revision}')


def saved(config: DataConfig) -> Corpus:
    """The corpus 'hf': the directory `config.path`, which `save_to_disk` wrote.

    Raises:
      ConfigError: as `published`; a directory of something else.
    """
    where = f'data.path={config.path!r}'
    library = load_extra('datasets', 'datasets')
    try:
        sets = library.load_from_disk(str(expanded(config.path)))
    except Exception as error:
        raise ConfigError(
            f'{where} cannot be opened ({_reason(error)}); it must be a directory that '
            'save_to_disk wrote.'
        ) from error
    sets = sets if isinstance(sets, Mapping) else {'train': sets}
    digest = hashlib.sha256()
    for split, rows in sets.items():
        for file in map(Path, (file['filename'] for file in rows.cache_files)):
            digest.update(f'{split} {_sha256(file, file.stat().st_mtime_ns)}\n'.encode())
    return _corpus(sets, where, config, f'sha256-{digest.hexdigest()[:16]}')


def _corpus(sets: Mapping[str, Any], where: str, config: DataConfig, version: str) -> Corpus:
    languages = parse_languages(config) if config.languages else ()
    splits = find_splits(sets, where)
    features = sets[splits['train']].features
    strings = ('string', 'large_string')
    texts = [key for key, f in features.items() if getattr(f, 'dtype', None) in strings]
    # Older versions of the library have a feature `Translation` for what is a mapping.
    nested = {key: getattr(f, 'languages', f) for key, f in features.items() if key not in texts}
    translations = {
        key: list(f) for key, f in nested.items() if isinstance(f, Mapping | list | tuple)
    }
    column = find_feature(texts, translations, languages, config, where)

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        return {split: _texts(sets[s], column, languages, language) for split, s in splits.items()}

    name = config.name.replace(':', '-') if config.path is None else 'hf'
    return Corpus(
        name=re.sub(r'[^\w.-]', '-', '-'.join((name, *(languages or (str(column),))))),
        version=re.sub(r'[^\w.-]', '-', version),
        languages=languages,
        splits=tuple(splits),
        documents=documents,
    )


def _texts(
    rows: Any, column: str | None, languages: tuple[str, ...], language: str | None
) -> Iterator[bytes]:
    """The text of each row; of rows that have it in all languages, in one of them."""
    columns = [column] if column else list(languages)
    wanted = languages.index(language) if languages else 0
    for batch in rows.select_columns(columns).iter(READ_TOGETHER):
        if languages and column:
            batch = {name: [(row or {}).get(name) for row in batch[column]] for name in languages}
        sides = zip(*(batch[name] for name in languages or columns), strict=True)
        yield from (texts[wanted].encode() for texts in sides if all(texts))


# A run opens its corpus more than once.
@functools.lru_cache
def _sha256(path: Path, mtime_ns: int) -> str:
    return sha256_of(path)


def _reason(error: Exception) -> str:
    return f'{type(error).__name__}: {" ".join(str(error).split())}'.rstrip('.')
