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
from qkattn.config.extras import load_extra
from qkattn.data.cache import sha256_of
from qkattn.data.corpora.corpus import Corpus, find_splits, parse_languages
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
    if match is None:
        raise ConfigError(
            f"data.name={config.name!r} is not of the form 'hf:OWNER/NAME' or "
            "'hf:OWNER/NAME/CONFIG'."
        )
    where = f'data.name={config.name!r}'
    library = load_extra('datasets', 'datasets')
    try:
        sets = library.load_dataset(*(part for part in match.groups() if part))
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
        for file in rows.cache_files:
            stat = Path(file['filename']).stat()
            digest.update(
                f'{split} {_sha256(file["filename"], stat.st_size, stat.st_mtime_ns)}\n'.encode()
            )
    return _corpus(sets, where, config, f'sha256-{digest.hexdigest()[:16]}')


def _corpus(sets: Mapping[str, Any], where: str, config: DataConfig, version: str) -> Corpus:
    languages = parse_languages(config) if config.languages else ()
    splits = find_splits(sets, where)
    features = sets[splits['train']].features
    column = _column(features, languages, where, config.feature)

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        wanted = languages.index(language) if language else 0
        return {
            split: _texts(sets[name], column, languages, wanted) for split, name in splits.items()
        }

    name = config.name.replace(':', '-') if config.path is None else 'hf'
    return Corpus(
        name=re.sub(r'[^\w.-]', '-', '-'.join((name, *(languages or (str(column),))))),
        version=re.sub(r'[^\w.-]', '-', version),
        languages=languages,
        splits=tuple(splits),
        documents=documents,
    )


def _column(
    features: Mapping[str, Any], languages: tuple[str, ...], where: str, wanted: str | None
) -> str | None:
    """The column of the text, or of the sentences by language; None: a column per language."""
    texts = [name for name, feature in features.items() if _is_text(feature)]
    both = {name: getattr(f, 'languages', f) for name, f in features.items() if not _is_text(f)}
    both = {name: list(f) for name, f in both.items() if isinstance(f, Mapping | list | tuple)}
    if languages:
        fitting = [name for name, known in both.items() if set(languages) <= set(known)]
        if wanted is None and set(languages) <= set(texts):
            return None
        if wanted in fitting or (wanted is None and len(fitting) == 1):
            return wanted or fitting[0]
        raise ConfigError(
            f'{where} has no one column of sentences in {" and ".join(map(repr, languages))}, but '
            f'{", ".join(map(repr, features))}; set data.languages or data.feature to those it has.'
        )
    if wanted in texts or (wanted is None and len(texts) == 1):
        return wanted or texts[0]
    raise ConfigError(
        f'data.feature={wanted!r} does not name one column of text in {where}; valid: '
        f'{", ".join(map(repr, texts)) or "none, it has no column of text"}.'
    )


def _is_text(feature: Any) -> bool:
    return getattr(feature, 'dtype', None) in ('string', 'large_string')


def _texts(
    rows: Any, column: str | None, languages: tuple[str, ...], wanted: int
) -> Iterator[bytes]:
    columns = list(languages) if column is None else [column]
    for batch in rows.select_columns(columns).iter(READ_TOGETHER):
        for values in zip(*(batch[name] for name in columns), strict=True):
            pair = (
                (values[0] or {})
                if languages and column
                else dict(zip(languages, values, strict=False))
            )
            sides = [pair.get(language) for language in languages] or values
            if all(sides):
                yield sides[wanted].encode()


# A run opens its corpus more than once.
@functools.lru_cache
def _sha256(path: str, size: int, mtime_ns: int) -> str:
    return sha256_of(Path(path))


def _reason(error: Exception) -> str:
    return f'{type(error).__name__}: {" ".join(str(error).split())}'.rstrip('.')
