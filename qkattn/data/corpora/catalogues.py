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
    root = data_root(config.data_dir)
    version = tfds.core.Version
    directories = []
    for info in (root / name).glob('*/dataset_info.json'):
        if version.is_valid(info.parent.name):
            directories.append(info.parent)
    if not directories:
        raise NotPrepared(
            f'data.name={config.name!r} is not prepared; copy it, or where TensorFlow is '
            f'installed run `tfds build {name} --data_dir={root} --file_format=array_record`.'
        )
    directory = max(directories, key=lambda path: version(path.name))
    builder = tfds.builder_from_directory(directory)

    def examples(split: str, columns: list[str]) -> Iterator[Any]:
        advice = 'delete it and prepare it again as array_record'
        with readable(str(directory), advice, NotImplementedError, RuntimeError):
            source = builder.as_data_source(split)
            for start in range(0, len(source), READ_TOGETHER):
                numbers = range(len(source))[start : start + READ_TOGETHER]
                yield from source.__getitems__(numbers)

    texts = []
    translations = {}
    for feature_name, feature in builder.info.features.items():
        if isinstance(feature, tfds.features.Text):
            texts.append(feature_name)
        elif isinstance(feature, tfds.features.Translation):
            translations[feature_name] = list(feature.keys())
    return _corpus(config, str(builder.version), builder.info.splits, texts, translations, examples)


def hugging_face(config: DataConfig) -> Corpus:
    """The corpus 'hf:OWNER/NAME' or 'hf:OWNER/NAME/CONFIG', from the library's cache ($HF_HOME)."""
    name, set_config = _matched(config, r'hf:([\w.-]+(?:/[\w.-]+)?)(?:/([\w.-]+))?')
    _require_published(config.name, name)
    library = load_extra('datasets', 'datasets')
    require_preparing(config.name)  # the library may download it
    with readable(f'data.name={config.name!r}', 'check name and network', Exception):
        if set_config is None:
            sets = library.load_dataset(name)
        else:
            sets = library.load_dataset(name, set_config)
    first_set = next(iter(sets.values()))  # all splits have the same features and revision
    # The directory of a published set is named by its revision.
    revision = Path(first_set.cache_files[0]['filename']).parent.name
    texts = []
    translations = {}
    for feature_name, feature in first_set.features.items():
        if getattr(feature, 'dtype', None) in ('string', 'large_string'):
            texts.append(feature_name)
        # Older versions of the library have a feature `Translation` for what is a mapping.
        languages = getattr(feature, 'languages', feature)
        if isinstance(languages, Mapping | list | tuple):
            translations[feature_name] = list(languages)

    def examples(split: str, columns: list[str]) -> Iterator[Any]:
        return iter(sets[split].select_columns(columns))

    version = f'{first_set.info.version}-{revision}'
    return _corpus(config, version, sets, texts, translations, examples)


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


def _matched(config: DataConfig, pattern: str) -> tuple[Any, ...]:
    """The groups of a pattern that data.name has to match; ConfigError where it does not."""
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

    Args:
      config: the settings; `feature` and `languages` choose among the features.
      version: of the set.
      available: its splits.
      texts: its features that are text.
      translations: the languages of each feature that holds sentences by language.
      examples: reads the examples of a split, with the named features at least.
    """
    languages: tuple[str, ...] = ()
    if config.languages:
        languages = parse_languages(config)
    columns = _columns(config, languages, texts, translations)
    # Under which of its names the set has each split of a corpus.
    name_of_split = {}
    for split, names in SPLIT_NAMES.items():
        present = [name for name in names if name in available]
        if present:
            name_of_split[split] = present[0]

    def read(split: str, language: str | None) -> Iterator[bytes]:
        """The texts of a split, of a translation those in `language`."""
        has_feature_per_language = columns == languages
        for example in examples(name_of_split[split], list(columns)):
            if not languages:
                sentences = [example[columns[0]]]
            else:
                by_language = example if has_feature_per_language else example[columns[0]]
                sentences = [(by_language or {}).get(side) for side in languages]
            # Pairs of which a side is missing are left out. Only strings: tfds has bytes, which may
            # be empty.
            if None in sentences or '' in sentences:
                continue
            text = sentences[languages.index(language) if language else 0]
            yield text.encode() if isinstance(text, str) else text

    name = '-'.join((config.name, *(languages or columns)))
    return Corpus(
        name=re.sub(r'[^\w.-]', '-', name),
        version=re.sub(r'[^\w.-]', '-', version),
        languages=languages,
        splits=tuple(name_of_split),
        documents=lambda language: {split: read(split, language) for split in name_of_split},
    )


def _columns(
    config: DataConfig,
    languages: tuple[str, ...],
    texts: list[str],
    translations: Mapping[str, list[str]],
) -> tuple[str, ...]:
    """The features that hold the text: one, or a text for each language.

    Arguments are those of `_corpus`. ConfigError unless the settings fit exactly one choice.
    """
    choices: list[tuple[str, ...]] = [(name,) for name in texts]
    if languages:
        choices = []
        for name, known in translations.items():
            if set(languages) <= set(known):
                choices.append((name,))
    if config.feature is not None:
        choices = [columns for columns in choices if columns == (config.feature,)]
    elif languages and set(languages) <= set(texts):
        choices = [languages]
    if len(choices) == 1:
        return choices[0]
    described = [f'{name} ({", ".join(sorted(known))})' for name, known in translations.items()]
    raise ConfigError(
        f'data.feature={config.feature!r} and data.languages={config.languages!r} do not name '
        f'one text of {config.name}; its texts are {", ".join(sorted(texts)) or "none"}, its '
        f'translations {", ".join(described) or "none"}.'
    )
