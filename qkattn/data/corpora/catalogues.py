"""Sets of the tfds catalogue that are prepared, and sets of Hugging Face `datasets`.

A document is an example; a set without a validation split has one carved. Examples of Hugging Face
sets whose text is missing or empty are left out.
"""

import functools
import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.config.calls import load_extra
from qkattn.data.cache import data_root, sha256_of
from qkattn.data.corpora.corpus import Corpus, parse_languages
from qkattn.errors import ConfigError
from qkattn.storage.files import expanded

# Examples that are read at a time: one by one takes four times as long, but one may be a book.
READ_TOGETHER = 128
# Names under which sets have the splits of a corpus.
SPLIT_NAMES = {'train': ['train'], 'validation': ['validation', 'dev', 'valid'], 'test': ['test']}


def tfds_set(config: DataConfig) -> Corpus:
    """The corpus 'tfds:NAME' or 'tfds:NAME/CONFIG': the newest version under `config.data_dir`.

    Raises:
      ConfigError: a set that is not prepared, or has no train split; a language or feature that it
        does not have; while documents are read, files that are damaged or of another format.
    """
    match = re.fullmatch(r'tfds:([^\W\d]\w*(?:/[\w.+-]+)?)', config.name)
    if match is None:
        raise ConfigError(
            f"data.name={config.name!r} is not of the form 'tfds:NAME' or 'tfds:NAME/CONFIG'."
        )
    version, root = tfds.core.Version, data_root(config.data_dir)
    prepared = [path.parent for path in (root / match[1]).glob('*/dataset_info.json')]
    prepared = [path for path in prepared if version.is_valid(path.name)]
    if not prepared:
        raise ConfigError(
            f'data.name={config.name!r} is not prepared; run `tfds build {match[1]} '
            f'--data_dir={root} --file_format=array_record`, which needs TensorFlow, or copy the '
            'set from a machine that has it.'
        )
    builder = tfds.builder_from_directory(max(prepared, key=lambda path: version(path.name)))

    def examples(split: str, columns: list[str]) -> Iterator[Any]:
        try:
            source = builder.as_data_source(split)
            for start in range(0, len(source), READ_TOGETHER):
                yield from source.__getitems__(
                    range(start, min(start + READ_TOGETHER, len(source)))
                )
        except (NotImplementedError, RuntimeError) as error:
            raise ConfigError(
                f'The prepared set at {str(builder.data_dir)!r} cannot be read: it is damaged, or '
                f'not in the format array_record ({_line(error)}); delete that directory and '
                'prepare it again.'
            ) from error

    features = dict(builder.info.features.items())
    texts = [name for name, feature in features.items() if isinstance(feature, tfds.features.Text)]
    languages = {
        name: list(feature.keys())
        for name, feature in features.items()
        if isinstance(feature, tfds.features.Translation)
    }
    splits = builder.info.splits
    return _corpus(config, 'name', str(builder.version), splits, texts, languages, examples)


def published(config: DataConfig) -> Corpus:
    """The corpus 'hf:OWNER/NAME' or 'hf:OWNER/NAME/CONFIG'; fetched the first time.

    The library keeps it in a cache of its own ($HF_HOME).

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
    library = load_extra('datasets', 'datasets')
    try:
        sets = library.load_dataset(*filter(None, match.groups()))
    except Exception as error:
        raise ConfigError(
            f'data.name={config.name!r} cannot be opened ({_line(error)}); check its name and the '
            "network, or save it elsewhere with save_to_disk and set data.name='hf' and data.path."
        ) from error
    first = next(iter(sets.values()))
    # The directory of a published set is named by its revision.
    revision = Path(first.cache_files[0]['filename']).parent.name
    return _hugging_face(sets, config, 'name', f'{first.info.version}-{revision}')


def saved(config: DataConfig) -> Corpus:
    """The corpus 'hf': the directory `config.path`, which `save_to_disk` wrote.

    Raises:
      ConfigError: as `published`; a directory of something else.
    """
    library = load_extra('datasets', 'datasets')
    try:
        sets = library.load_from_disk(str(expanded(config.path)))
    except Exception as error:
        raise ConfigError(
            f'data.path={config.path!r} cannot be opened ({_line(error)}); it must be a directory '
            'that save_to_disk wrote.'
        ) from error
    sets = sets if isinstance(sets, Mapping) else {'train': sets}
    digest = hashlib.sha256()
    for split, rows in sets.items():
        for path in (Path(file['filename']) for file in rows.cache_files):
            digest.update(f'{split} {_sha256(path, path.stat().st_mtime_ns)}\n'.encode())
    return _hugging_face(sets, config, 'path', f'sha256-{digest.hexdigest()[:16]}')


def _hugging_face(sets: Mapping[str, Any], config: DataConfig, field: str, version: str) -> Corpus:
    features = next(iter(sets.values())).features
    strings = ('string', 'large_string')
    texts = [name for name, f in features.items() if getattr(f, 'dtype', None) in strings]
    # Older versions of the library have a feature `Translation` for what is a mapping.
    nested = {name: getattr(f, 'languages', f) for name, f in features.items()}
    nested = {name: list(f) for name, f in nested.items() if isinstance(f, Mapping | list | tuple)}

    def examples(split: str, columns: list[str]) -> Iterator[dict[str, Any]]:
        for batch in sets[split].select_columns(columns).iter(READ_TOGETHER):
            for values in zip(*map(batch.get, columns), strict=True):
                yield dict(zip(columns, values, strict=True))

    return _corpus(config, field, version, sets, texts, nested, examples)


def _corpus(
    config: DataConfig,
    field: str,
    version: str,
    available: Iterable[str],
    texts: list[str],
    translations: Mapping[str, list[str]],
    examples: Callable[[str, list[str]], Iterator[Any]],
) -> Corpus:
    """The corpus of the one text, or the one translation, that the settings name.

    Args:
      field: the setting that holds the name of the set.
      available: its splits.
      texts: its features that are text.
      translations: the languages of each of its features that holds sentences by language.
      examples: the examples of a split, with these features at least.
    """
    where = f'data.{field}={getattr(config, field)!r}'
    splits = {
        split: next(name for name in names if name in available)
        for split, names in SPLIT_NAMES.items()
        if any(name in available for name in names)
    }
    if 'train' not in splits:
        raise ConfigError(
            f'{where} has no train split, only {", ".join(map(repr, available))}; choose a set '
            'that has one.'
        )
    languages = parse_languages(config) if config.languages else ()
    fitting: list[tuple[str, ...]] = [(name,) for name in texts]
    if languages:
        fitting = [(key,) for key, known in translations.items() if set(languages) <= set(known)]
    if config.feature is not None:
        fitting = [columns for columns in fitting if columns == (config.feature,)]
    elif languages and set(languages) <= set(texts):
        fitting = [languages]  # a feature for each language
    if len(fitting) != 1:
        known = [f'{name} ({", ".join(sorted(sides))})' for name, sides in translations.items()]
        raise ConfigError(
            f'data.feature={config.feature!r} and data.languages={config.languages!r} do not name '
            f'one text of {where}; its texts are {", ".join(sorted(texts)) or "none"}, its '
            f'translations {", ".join(known) or "none"}.'
        )
    (columns,) = fitting

    def read(split: str, language: str | None) -> Iterator[bytes]:
        for example in examples(split, list(columns)):
            value = example if columns == languages else example[columns[0]]
            sides = [(value or {}).get(side) for side in languages] if languages else [value]
            # Only strings: the bytes of tfds may be empty.
            if None not in sides and '' not in sides:
                text = sides[languages.index(language) if language else 0]
                yield text.encode() if isinstance(text, str) else text

    return Corpus(
        name=re.sub(r'[^\w.-]', '-', '-'.join((config.name, *(languages or columns)))),
        version=re.sub(r'[^\w.-]', '-', version),
        languages=languages,
        splits=tuple(splits),
        documents=lambda language: {split: read(name, language) for split, name in splits.items()},
    )


# A run opens its corpus more than once.
@functools.lru_cache
def _sha256(path: Path, mtime_ns: int) -> str:
    return sha256_of(path)


def _line(error: Exception) -> str:
    return f'{type(error).__name__}: {" ".join(str(error).split())}'.rstrip('.')
