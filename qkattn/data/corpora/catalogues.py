"""Corpora from prepared sets of the tfds catalogue, and from sets of Hugging Face `datasets`.

Each example of a set is a document. If a set has no validation split, one is carved from its train
split. Examples of Hugging Face sets without text are left out.
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
# Names without an owner for which the Hugging Face library does not download a set: 'csv', for
# example, loads the CSV files of the working directory.
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

    The newest version in the data directory is opened. Raises NotPrepared if there is none.
    """
    (name,) = _matched(config, r'tfds:([^\W\d]\w*(?:/[\w.+-]+)?)')

    # A prepared set is the directory <root>/<name>/<version>, such as ag_news_subset/1.0.0.
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
        """Yields the examples of a split with all their features, not only those of `columns`."""
        advice = 'delete it and prepare it again as array_record'
        with readable(str(directory), advice, NotImplementedError, RuntimeError):
            source = builder.as_data_source(split)
            for start in range(0, len(source), READ_TOGETHER):
                end = min(start + READ_TOGETHER, len(source))
                # `__getitems__` is the method of tfds that reads several examples at once.
                yield from source.__getitems__(range(start, end))

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

    # `sets` has a set for each split. All have the same features and the same revision, so the
    # first one stands for all. The library names the directory of its files by the revision.
    first_set = list(sets.values())[0]
    first_file = Path(first_set.cache_files[0]['filename'])
    revision = first_file.parent.name

    texts = []
    translations = {}
    for feature_name, feature in first_set.features.items():
        if getattr(feature, 'dtype', None) in ('string', 'large_string'):
            texts.append(feature_name)
        # A translation is a mapping from languages to texts. In older versions of the library it
        # is a feature `Translation` with the attribute `languages`.
        elif isinstance(feature, Mapping):
            translations[feature_name] = list(feature)
        elif isinstance(getattr(feature, 'languages', None), list | tuple):
            translations[feature_name] = list(feature.languages)

    def examples(split: str, columns: list[str]) -> Iterator[Any]:
        return iter(sets[split].select_columns(columns))

    version = f'{first_set.info.version}-{revision}'
    return _corpus(config, version, sets, texts, translations, examples)


def _require_published(field: str, name: str) -> None:
    """Raises ConfigError for a name that the library would read from the working directory.

    `field` is the value of data.name, such as 'hf:csv'. `name` is what the library gets, 'csv'.
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
    """Makes a corpus from a set of a catalogue.

    Args:
      config: the settings; `feature` and `languages` choose among the features of the set.
      version: the version of the set.
      available: the splits of the set.
      texts: the names of the features that are text.
      translations: by name, the features that map languages to sentences, with their languages.
      examples: the function (split, columns) that reads the examples of a split as dictionaries
        with the features `columns`, and perhaps others.
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
        """Yields the text of each example of a split. For a translation, `language` chooses it."""
        side = languages.index(language) if language else 0
        for example in examples(name_of_split[split], list(columns)):
            sentences = _sentences(example, columns, languages)
            # An example is left out if any sentence is missing or an empty str. Texts of tfds are
            # bytes; empty ones stay.
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
    """Chooses the features of a set that hold the text, and returns their names.

    - Without languages, it is a feature of text: ('text',).
    - With languages, it is a feature of text for each of them, ('en', 'de'), if the set has such
      features. Otherwise it is a feature that maps languages to sentences: ('translation',).

    Args:
      config: the settings. If `feature` is set, only the feature with this name fits.
      languages: the source and the target language, or ().
      texts: the names of the features that are text.
      translations: by name, the features that map languages to sentences, with their languages.

    Raises:
      ConfigError: no feature fits, or more than one.
    """
    if config.feature is None and languages and set(languages) <= set(texts):
        return languages

    fitting = texts
    if languages:
        fitting = []
        for name, languages_of_feature in translations.items():
            if set(languages) <= set(languages_of_feature):
                fitting.append(name)
    if config.feature is not None:
        fitting = [name for name in fitting if name == config.feature]
    if len(fitting) == 1:
        return (fitting[0],)

    # Say what the set has, as in 'translation (de, en)'.
    listed_texts = ', '.join(sorted(texts)) or 'none'
    described = []
    for name, languages_of_feature in translations.items():
        described.append(f'{name} ({", ".join(sorted(languages_of_feature))})')
    listed_translations = ', '.join(described) or 'none'
    raise ConfigError(
        f'data.feature={config.feature!r} and data.languages={config.languages!r} do not name '
        f'one text of {config.name}; its texts are {listed_texts}, its translations '
        f'{listed_translations}.'
    )


def _sentences(
    example: Mapping[str, Any], columns: tuple[str, ...], languages: tuple[str, ...]
) -> list[Any]:
    """Returns the text of an example, or its sentence in each language; None for a missing one.

    `columns` are the names that `_columns` has chosen.
    """
    if not languages:
        return [example[columns[0]]]
    sentence_of_language = example
    if columns != languages:  # the sentences are in one feature
        sentence_of_language = example[columns[0]] or {}
    return [sentence_of_language.get(language) for language in languages]
