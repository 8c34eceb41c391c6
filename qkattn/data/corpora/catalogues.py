"""Corpora from TensorFlow Datasets (tfds) and Hugging Face `datasets`.

Each example of a dataset is a document. Examples without text are left out, but the empty texts of
tfds are kept.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import tensorflow_datasets as tfds

from qkattn.config import DataConfig
from qkattn.config.imports import load_extra
from qkattn.data.cache import NotPrepared, data_root, require_preparing
from qkattn.data.corpora.corpus import Corpus, explain_read_errors, parse_languages
from qkattn.errors import ConfigError

# Examples of a tfds dataset per read. Reading one by one takes four times as long. Larger reads
# would take much memory, because an example may be a book.
READ_TOGETHER = 128
# Names that Hugging Face `datasets` reserves for its loaders. For example, 'csv' loads the CSV
# files in the working directory.
# fmt: off
LOADERS = (
    'arrow', 'audiofolder', 'cache', 'conll', 'csv', 'eval', 'fasta', 'fastq', 'genbank',
    'generator', 'harbor', 'hdf5', 'iceberg', 'imagefolder', 'json', 'lance', 'meshfolder',
    'mmcif', 'niftifolder', 'pandas', 'parquet', 'pdb', 'pdffolder', 'spark', 'sql', 'text',
    'tsfile', 'videofolder', 'vortex', 'webdataset', 'xml',
)
# fmt: on
# Names in the datasets for each of our splits, in order of preference.
SPLIT_NAMES = {'train': ['train'], 'validation': ['validation', 'dev', 'valid'], 'test': ['test']}


class _Features(NamedTuple):
    """The features of a dataset that hold text."""

    # Names of the features that are a string, such as ['title', 'text'].
    texts: list[str]
    # Languages of the features that map languages to sentences: {'translation': ['de', 'en']}.
    translations: dict[str, list[str]]


def tfds_set(config: DataConfig) -> Corpus:
    """Opens the corpus 'tfds:NAME' or 'tfds:NAME/CONFIG'.

    The newest prepared version in the data directory is opened.

    Raises:
        NotPrepared: No version is prepared.
        ConfigError: The name is malformed, or the settings choose no feature with text.
    """
    # The name is all that follows 'tfds:', such as 'lm1b' or 'wmt14_translate/de-en'.
    (name,) = _match_name(config, r'tfds:([^\W\d]\w*(?:/[\w.+-]+)?)')
    directory = _newest_version(config, name)
    builder = tfds.builder_from_directory(directory)

    def read_examples(split: str, columns: list[str]) -> Iterator[Any]:
        """Yields the examples of a split with all features. `columns` is not used."""
        advice = 'delete it and prepare it again as array_record'
        # Raise ConfigError with this advice for files that tfds cannot read.
        with explain_read_errors(str(directory), advice, NotImplementedError, RuntimeError):
            source = builder.as_data_source(split)
            for start in range(0, len(source), READ_TOGETHER):
                end = min(start + READ_TOGETHER, len(source))
                # `__getitems__` of tfds reads several examples at once.
                yield from source.__getitems__(range(start, end))

    return _make_corpus(
        config,
        version=str(builder.version),
        splits_of_dataset=builder.info.splits,
        features=_features_of_tfds(builder.info.features),
        read_examples=read_examples,
    )


def _features_of_tfds(features: Mapping[str, Any]) -> _Features:
    """Returns the features of a tfds dataset that hold text."""
    with_text = _Features(texts=[], translations={})
    for name, feature in features.items():
        if isinstance(feature, tfds.features.Text):
            with_text.texts.append(name)
        elif isinstance(feature, tfds.features.Translation):
            with_text.translations[name] = list(feature.keys())
    return with_text


def _newest_version(config: DataConfig, name: str) -> Path:
    """Returns the directory <root>/<name>/<version> of a tfds dataset's newest version.

    Raises NotPrepared if there is no version.
    """
    root = data_root(config.data_dir)
    version_directories = []
    for info_file in (root / name).glob('*/dataset_info.json'):
        directory = info_file.parent
        if tfds.core.Version.is_valid(directory.name):
            version_directories.append(directory)
    if not version_directories:
        raise NotPrepared(
            f'data.name={config.name!r} is not prepared; copy it, or where TensorFlow is '
            f'installed run `tfds build {name} --data_dir={root} --file_format=array_record`.'
        )
    return max(version_directories, key=lambda directory: tfds.core.Version(directory.name))


def hugging_face(config: DataConfig) -> Corpus:
    """Opens the corpus 'hf:OWNER/NAME' or 'hf:OWNER/NAME/CONFIG'.

    The library `datasets` downloads the dataset, or reads its cache in $HF_HOME.

    Raises:
        NotPrepared: Downloads are not allowed, as in a dry run.
        ConfigError: The dataset cannot be loaded, or the settings choose no feature with text.
    """
    # 'hf:wmt/wmt14/de-en' has the name 'wmt/wmt14' and the configuration 'de-en'.
    name, config_name = _match_name(config, r'hf:([\w.-]+(?:/[\w.-]+)?)(?:/([\w.-]+))?')
    _require_published(config.name, name)
    datasets = load_extra('datasets', extra='datasets')
    require_preparing(config.name)  # raises NotPrepared in a dry run
    with explain_read_errors(f'data.name={config.name!r}', 'check name and network', Exception):
        if config_name is None:
            dataset_of_split = datasets.load_dataset(name)
        else:
            dataset_of_split = datasets.load_dataset(name, config_name)

    # All splits have the same features, and the same cache directory. Its name is the revision.
    any_dataset = list(dataset_of_split.values())[0]
    cache_file = Path(any_dataset.cache_files[0]['filename'])
    revision = cache_file.parent.name
    version = f'{any_dataset.info.version}-{revision}'

    def read_examples(split: str, columns: list[str]) -> Iterator[Any]:
        return iter(dataset_of_split[split].select_columns(columns))

    return _make_corpus(
        config,
        version=version,
        splits_of_dataset=dataset_of_split,
        features=_features_of_hugging_face(any_dataset.features),
        read_examples=read_examples,
    )


def _features_of_hugging_face(features: Mapping[str, Any]) -> _Features:
    """Returns the features of a Hugging Face dataset that hold text."""
    with_text = _Features(texts=[], translations={})
    for name, feature in features.items():
        if getattr(feature, 'dtype', None) in ('string', 'large_string'):
            with_text.texts.append(name)
        elif isinstance(feature, Mapping):  # from languages to sentences
            with_text.translations[name] = list(feature)
        # Older versions of `datasets` have a feature `Translation` instead of a mapping.
        elif isinstance(getattr(feature, 'languages', None), list | tuple):
            with_text.translations[name] = list(feature.languages)
    return with_text


def _require_published(data_name: str, name: str) -> None:
    """Raises ConfigError for a name that would load local files instead of a published dataset.

    Args:
        data_name: The value of data.name, such as 'hf:csv'.
        name: The name for the Hugging Face library, such as 'csv'.
    """
    advice = (
        "give a set of the Hub, 'hf:OWNER/NAME', or text of your own with data.name='text' and "
        'data.path'
    )
    if name in LOADERS:
        raise ConfigError(
            f'data.name={data_name!r} names a loader, which reads whatever lies in the working '
            f'directory; {advice}'
        )
    if Path(name).exists():
        raise ConfigError(
            f'data.name={data_name!r} would read {name!r} of the working directory; {advice}'
        )


def _match_name(config: DataConfig, pattern: str) -> tuple[Any, ...]:
    """Returns the groups of a pattern that matches data.name, or raises ConfigError."""
    match = re.fullmatch(pattern, config.name)
    if match is None:
        raise ConfigError(
            f"data.name={config.name!r} must be written 'tfds:NAME', 'tfds:NAME/CONFIG', "
            "'hf:OWNER/NAME' or 'hf:OWNER/NAME/CONFIG'."
        )
    return match.groups()


def _make_corpus(
    config: DataConfig,
    version: str,
    splits_of_dataset: Iterable[str],
    features: _Features,
    read_examples: Callable[[str, list[str]], Iterator[Any]],
) -> Corpus:
    """Makes a corpus from a dataset of tfds or Hugging Face.

    Args:
        config: The settings. `feature` and `languages` choose the text of an example.
        version: The version of the dataset.
        splits_of_dataset: The dataset's names for its splits.
        features: The features of the dataset that hold text.
        read_examples: A function (split, columns) that yields the examples of a split. They are
            dictionaries with at least the features `columns`.
    """
    languages: tuple[str, ...] = ()
    if config.languages:
        languages = parse_languages(config)
    columns = _choose_columns(config, languages, features)
    name_in_dataset = _names_of_splits(splits_of_dataset)

    def read_texts(split: str, language: str | None) -> Iterator[bytes]:
        examples = read_examples(name_in_dataset[split], list(columns))
        language_index = languages.index(language) if language else 0
        yield from _texts(examples, columns, languages, language_index)

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        return {split: read_texts(split, language) for split in name_in_dataset}

    parts_of_name = [config.name, *(languages or columns)]  # such as 'tfds:lm1b', 'text'
    return Corpus(
        name=_as_file_name('-'.join(parts_of_name)),
        version=_as_file_name(version),
        languages=languages,
        splits=tuple(name_in_dataset),
        documents=documents,
    )


def _names_of_splits(splits_of_dataset: Iterable[str]) -> dict[str, str]:
    """Returns a dataset's name for each of our splits: {'train': 'train', 'validation': 'dev'}."""
    name_in_dataset = {}
    for split, possible_names in SPLIT_NAMES.items():
        names = [name for name in possible_names if name in splits_of_dataset]
        if names:
            name_in_dataset[split] = names[0]
    return name_in_dataset


def _as_file_name(text: str) -> str:
    """Replaces characters that a file name should not have: 'tfds:lm1b' -> 'tfds-lm1b'."""
    return re.sub(r'[^\w.-]', '-', text)


def _choose_columns(
    config: DataConfig, languages: tuple[str, ...], features: _Features
) -> tuple[str, ...]:
    """Returns the names of the features to read.

    The result has one of three forms:

    - ('text',): a string, if `languages` is empty.
    - ('en', 'de'): a string per language. Only without `config.feature`.
    - ('translation',): a mapping from languages to sentences.

    Args:
        config: The settings. `feature` names the feature if the dataset has several.
        languages: The source and the target language, or ().
        features: The features of the dataset that hold text.

    Raises:
        ConfigError: No feature fits, or several do.
    """
    has_string_per_language = set(languages) <= set(features.texts)
    if languages and has_string_per_language and config.feature is None:
        return languages

    candidates = features.texts
    if languages:
        candidates = []
        for name, languages_of_feature in features.translations.items():
            if set(languages) <= set(languages_of_feature):
                candidates.append(name)
    if config.feature is not None:
        candidates = [name for name in candidates if name == config.feature]
    if len(candidates) != 1:
        raise ConfigError(
            f'data.feature={config.feature!r} and data.languages={config.languages!r} do not name '
            f'one text of {config.name}; {_list_features(features)}.'
        )
    return (candidates[0],)


def _list_features(features: _Features) -> str:
    """Lists features: 'its texts are title, its translations translation (de, en)'."""
    texts = ', '.join(sorted(features.texts)) or 'none'
    descriptions = []  # such as 'translation (de, en)'
    for name, languages in features.translations.items():
        descriptions.append(f'{name} ({", ".join(sorted(languages))})')
    translations = ', '.join(descriptions) or 'none'
    return f'its texts are {texts}, its translations {translations}'


def _texts(
    examples: Iterable[Mapping[str, Any]],
    columns: tuple[str, ...],
    languages: tuple[str, ...],
    language_index: int,
) -> Iterator[bytes]:
    """Yields the text of each example in `languages[language_index]`, or its only text.

    Examples that lack a text in any of the languages are left out, which keeps source and target
    aligned.
    """
    for example in examples:
        texts = _texts_of_example(example, columns, languages)
        # Texts of tfds are bytes. Empty bytes, b'', are kept.
        if None in texts or '' in texts:
            continue
        text = texts[language_index]
        yield text.encode() if isinstance(text, str) else text


def _texts_of_example(
    example: Mapping[str, Any], columns: tuple[str, ...], languages: tuple[str, ...]
) -> list[Any]:
    """Returns an example's text, or its text in each language. Missing texts are None.

    example                                  columns             result
    {'text': 'a'}                            ('text',)           ['a']
    {'en': 'a', 'de': 'b'}                   ('en', 'de')        ['a', 'b']
    {'translation': {'en': 'a', 'de': 'b'}}  ('translation',)    ['a', 'b']
    """
    if not languages:
        (column,) = columns
        return [example[column]]
    if columns == languages:
        return [example.get(language) for language in languages]
    (column,) = columns
    text_of_language = example[column] or {}
    return [text_of_language.get(language) for language in languages]
