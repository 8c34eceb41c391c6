"""Sets of the tfds catalogue that are prepared, and sets of Hugging Face `datasets`.

A document is an example; a set without a validation split has one carved. Examples of Hugging Face
sets whose text is missing or empty are left out.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.config.imports import load_extra
from qkattn.data.cache import NotPrepared, data_root, require_preparing
from qkattn.data.corpora.corpus import Corpus, parse_languages, readable
from qkattn.errors import ConfigError

READ_TOGETHER = 128  # one by one takes four times as long, but an example may be a book
# Names without an owner by which the library loads files of a format.
# fmt: off
LOADERS = (
    'arrow', 'audiofolder', 'cache', 'conll', 'csv', 'eval', 'fasta', 'fastq', 'genbank',
    'generator', 'harbor', 'hdf5', 'iceberg', 'imagefolder', 'json', 'lance', 'meshfolder',
    'mmcif', 'niftifolder', 'pandas', 'parquet', 'pdb', 'pdffolder', 'spark', 'sql', 'text',
    'tsfile', 'videofolder', 'vortex', 'webdataset', 'xml',
)
# fmt: on
# Names under which sets have the splits of a corpus.
SPLIT_NAMES = {'train': ['train'], 'validation': ['validation', 'dev', 'valid'], 'test': ['test']}


def tfds_set(config: DataConfig) -> Corpus:
    """The corpus 'tfds:NAME' or 'tfds:NAME/CONFIG': the newest version under `config.data_dir`."""
    (name,) = _matched(config, r'tfds:([^\W\d]\w*(?:/[\w.+-]+)?)')
    version = tfds.core.Version
    root = data_root(config.data_dir)
    prepared = [path.parent for path in (root / name).glob('*/dataset_info.json')]
    prepared = [path for path in prepared if version.is_valid(path.name)]
    if not prepared:
        raise NotPrepared(
            f'data.name={config.name!r} is not prepared; copy it, or where TensorFlow is '
            f'installed run `tfds build {name} --data_dir={root} --file_format=array_record`.'
        )
    directory = max(prepared, key=lambda path: version(path.name))
    builder = tfds.builder_from_directory(directory)

    def examples(split: str, columns: list[str]) -> Iterator[Any]:
        advice = 'delete it and prepare it again as array_record'
        with readable(str(directory), advice, NotImplementedError, RuntimeError):
            source = builder.as_data_source(split)
            for start in range(0, len(source), READ_TOGETHER):
                numbers = range(len(source))[start : start + READ_TOGETHER]
                yield from source.__getitems__(numbers)

    features = dict(builder.info.features.items())
    kinds = tfds.features
    texts = [name for name, feature in features.items() if isinstance(feature, kinds.Text)]
    pairs = {n: list(f.keys()) for n, f in features.items() if isinstance(f, kinds.Translation)}
    return _corpus(config, str(builder.version), builder.info.splits, texts, pairs, examples)


def hugging_face(config: DataConfig) -> Corpus:
    """The corpus 'hf:OWNER/NAME' or 'hf:OWNER/NAME/CONFIG', from the library's cache ($HF_HOME)."""
    names = _matched(config, r'hf:([\w.-]+(?:/[\w.-]+)?)(?:/([\w.-]+))?')
    _require_published(config.name, names[0])
    library = load_extra('datasets', 'datasets')
    advice = 'check name and network'
    require_preparing(config.name)  # the library may download it
    with readable(f'data.name={config.name!r}', advice, Exception):
        sets = library.load_dataset(*filter(None, names))
    first = next(iter(sets.values()))
    # The directory of a published set is named by its revision.
    revision = Path(first.cache_files[0]['filename']).parent.name
    strings = ('string', 'large_string')
    texts = [name for name, f in first.features.items() if getattr(f, 'dtype', None) in strings]
    # Older versions of the library have a feature `Translation` for what is a mapping.
    nested = {name: getattr(f, 'languages', f) for name, f in first.features.items()}
    nested = {name: list(f) for name, f in nested.items() if isinstance(f, Mapping | list | tuple)}

    def examples(split: str, columns: list[str]) -> Iterator[Any]:
        return iter(sets[split].select_columns(columns))

    return _corpus(config, f'{first.info.version}-{revision}', sets, texts, nested, examples)


def _require_published(field: str, name: str) -> None:
    """Raises ConfigError for a name that the library looks for in the working directory."""
    remedy = (
        "give a set of the Hub, 'hf:OWNER/NAME', or text of your own with data.name='text' and "
        'data.path'
    )
    if name in LOADERS:
        raise ConfigError(
            f'data.name={field!r} names a loader, which reads whatever lies in the working '
            f'directory; {remedy}'
        )
    if Path(name).exists():
        raise ConfigError(
            f'data.name={field!r} would read {name!r} of the working directory; {remedy}'
        )


def _matched(config: DataConfig, pattern: str) -> tuple[str, ...]:
    match = re.fullmatch(pattern, config.name)
    if match is None:
        raise ConfigError(
            f"data.name={config.name!r} must be written 'tfds:NAME', 'tfds:NAME/CONFIG', "
            "'hf:OWNER/NAME' or 'hf:OWNER/NAME/CONFIG'."
        )
    return match.groups()


def _corpus(
    config: DataConfig,
    version: str,
    available: Iterable[str],
    texts: list[str],
    translations: Mapping[str, list[str]],
    examples: Callable[[str, list[str]], Iterator[Any]],
) -> Corpus:
    """The corpus of the one text, or the one translation, that the settings name.

    `available` are the splits of the set, `texts` its features that are text, `translations` the
    languages of each feature that holds sentences by language. `examples` are those of a split,
    with these features at least.
    """
    splits = {
        split: name
        for split, names in SPLIT_NAMES.items()
        if (name := next((name for name in names if name in available), None))
    }
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
            f'one text of {config.name}; its texts are {", ".join(sorted(texts)) or "none"}, its '
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
