"""Corpora from prepared sets of the tfds catalogue, and from sets of Hugging Face `datasets`.

A document is an example of the set. If a set has no validation split, one is carved from its train
split. Examples of Hugging Face sets whose text is missing or empty are left out.
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

# How many examples of a tfds set are read together. One by one takes four times as long. More would
# take much memory, because an example may be a book.
READ_TOGETHER = 128
# Names without an owner by which the Hugging Face library loads local files of a format.
# fmt: off
LOADERS = (
    'arrow', 'audiofolder', 'cache', 'conll', 'csv', 'eval', 'fasta', 'fastq', 'genbank',
    'generator', 'harbor', 'hdf5', 'iceberg', 'imagefolder', 'json', 'lance', 'meshfolder',
    'mmcif', 'niftifolder', 'pandas', 'parquet', 'pdb', 'pdffolder', 'spark', 'sql', 'text',
    'tsfile', 'videofolder', 'vortex', 'webdataset', 'xml',
)
# fmt: on
# The names that sets have for the splits of a corpus.
SPLIT_NAMES = {'train': ['train'], 'validation': ['validation', 'dev', 'valid'], 'test': ['test']}


def tfds_set(config: DataConfig) -> Corpus:
    """Opens the corpus 'tfds:NAME' or 'tfds:NAME/CONFIG'.

    It is the newest version below the data directory. Raises NotPrepared if there is none.
    """
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
        """The examples of a split, with all their columns."""
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
    """Opens the corpus 'hf:OWNER/NAME' or 'hf:OWNER/NAME/CONFIG'.

    The library reads it from its cache ($HF_HOME), or downloads it.
    """
    name, set_config = _matched(config, r'hf:([\w.-]+(?:/[\w.-]+)?)(?:/([\w.-]+))?')
    _require_published(config.name, name)
    library = load_extra('datasets', 'datasets')
    require_preparing(config.name)  # the library may download it
    with readable(f'data.name={config.name!r}', 'check name and network', Exception):
        if set_config is None:
            sets = library.load_dataset(name)
        else:
            sets = library.load_dataset(name, set_config)
    # All splits have the same features and revision, so the first one stands for all.
    first_set = list(sets.values())[0]
    # The library names the directory of a published set by its revision.
    first_file = Path(first_set.cache_files[0]['filename'])
    revision = first_file.parent.name

    texts = []
    translations = {}
    for feature_name, feature in first_set.features.items():
        if getattr(feature, 'dtype', None) in ('string', 'large_string'):
            texts.append(feature_name)
        # A translation is a mapping from languages to texts. In older versions of the library it
        # is a feature `Translation` with the attribute `languages`.
        languages = getattr(feature, 'languages', feature)
        if isinstance(languages, Mapping | list | tuple):
            translations[feature_name] = list(languages)

    def examples(split: str, columns: list[str]) -> Iterator[Any]:
        return iter(sets[split].select_columns(columns))

    version = f'{first_set.info.version}-{revision}'
    return _corpus(config, version, sets, texts, translations, examples)


def _require_published(field: str, name: str) -> None:
    """Raises ConfigError for a name that the library would read from the working directory.

    `field` is the value of data.name, `name` the part of it that the library gets.
    """
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
    """Matches data.name with a pattern and returns the groups; ConfigError if it does not match."""
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
    """Makes a corpus of the text, or the translation, of a set that the settings name.

    Args:
      config: the settings; `feature` and `languages` choose among the features of the set.
      version: the version of the set.
      available: the splits of the set.
      texts: the names of its features that are text.
      translations: the languages of each of its features that holds sentences by language.
      examples: reads the examples of a split. The second argument names the features to read;
        there may be others.
    """
    languages: tuple[str, ...] = ()
    if config.languages:
        languages = parse_languages(config)
    columns = _columns(config, languages, texts, translations)
    # The name that the set has for each split of a corpus.
    name_of_split = {}
    for split, names in SPLIT_NAMES.items():
        present = [name for name in names if name in available]
        if present:
            name_of_split[split] = present[0]

    def read(split: str, language: str | None) -> Iterator[bytes]:
        """Yields the texts of a split; if it is a translation, those in `language`."""
        has_feature_per_language = columns == languages
        side = languages.index(language) if language else 0
        for example in examples(name_of_split[split], list(columns)):
            if not languages:
                sentences = [example[columns[0]]]
            else:
                by_language = example if has_feature_per_language else example[columns[0]]
                by_language = by_language or {}
                sentences = [by_language.get(code) for code in languages]

            # Examples in which a text is missing or empty are left out. Empty texts of tfds, which
            # are bytes, stay.
            if None in sentences or '' in sentences:
                continue
            text = sentences[side]
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
    """Returns the names of the features that hold the text.

    This is one feature, or one feature for each language. The arguments are those of `_corpus`.
    Raises ConfigError unless the settings fit exactly one choice.
    """
    # Features that fit: a text, a translation, or a text for each language.
    choices: list[tuple[str, ...]] = []
    if not languages:
        choices = [(name,) for name in texts]
    else:
        for name, languages_of_feature in translations.items():
            if set(languages) <= set(languages_of_feature):
                choices.append((name,))
    if config.feature is not None:
        choices = [columns for columns in choices if columns == (config.feature,)]
    elif languages and set(languages) <= set(texts):
        choices = [languages]
    if len(choices) == 1:
        return choices[0]

    described = []
    for name, languages_of_feature in translations.items():
        described.append(f'{name} ({", ".join(sorted(languages_of_feature))})')
    raise ConfigError(
        f'data.feature={config.feature!r} and data.languages={config.languages!r} do not name '
        f'one text of {config.name}; its texts are {", ".join(sorted(texts)) or "none"}, its '
        f'translations {", ".join(described) or "none"}.'
    )
