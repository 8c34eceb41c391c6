"""Corpora from prepared sets of the tfds catalogue, and from sets of Hugging Face `datasets`.

Each example of a set is a document. If a set has no validation split, one is carved from its train
split. Examples of Hugging Face sets without text are left out.
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


class _Features(NamedTuple):
    """The features of a set that hold text."""

    # The names of the features that are one text.
    texts: list[str]
    # By name, the features that map languages to sentences, with their languages.
    translations: dict[str, list[str]]


def tfds_set(config: DataConfig) -> Corpus:
    """Opens the corpus 'tfds:NAME' or 'tfds:NAME/CONFIG'.

    The newest version in the data directory is opened. Raises NotPrepared if there is none.
    """
    (name,) = _match_name(config, r'tfds:([^\W\d]\w*(?:/[\w.+-]+)?)')
    directory = _newest_version(config, name)
    builder = tfds.builder_from_directory(directory)

    features = _Features([], {})
    for feature_name, feature in builder.info.features.items():
        if isinstance(feature, tfds.features.Text):
            features.texts.append(feature_name)
        elif isinstance(feature, tfds.features.Translation):
            features.translations[feature_name] = list(feature.keys())

    def examples(split: str, columns: list[str]) -> Iterator[Any]:
        """Yields the examples of a split with all their features, not only those of `columns`."""
        advice = 'delete it and prepare it again as array_record'
        with explain_read_errors(str(directory), advice, NotImplementedError, RuntimeError):
            source = builder.as_data_source(split)
            for start in range(0, len(source), READ_TOGETHER):
                end = min(start + READ_TOGETHER, len(source))
                # `__getitems__` is the method of tfds that reads several examples at once.
                yield from source.__getitems__(range(start, end))

    return _make_corpus(config, str(builder.version), builder.info.splits, features, examples)


def _newest_version(config: DataConfig, name: str) -> Path:
    """Returns the directory of the newest version of a prepared set of tfds.

    It is <root>/<name>/<version>, such as ag_news_subset/1.0.0. Raises NotPrepared if there is no
    version.
    """
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
    return max(directories, key=lambda path: version(path.name))


def hugging_face(config: DataConfig) -> Corpus:
    """Opens the corpus 'hf:OWNER/NAME' or 'hf:OWNER/NAME/CONFIG'.

    The library reads it from its cache ($HF_HOME), or downloads it.
    """
    name, set_config = _match_name(config, r'hf:([\w.-]+(?:/[\w.-]+)?)(?:/([\w.-]+))?')
    _require_published(config.name, name)
    library = load_extra('datasets', 'datasets')
    require_preparing(config.name)  # the library may download it
    with explain_read_errors(f'data.name={config.name!r}', 'check name and network', Exception):
        if set_config is None:
            set_of_split = library.load_dataset(name)
        else:
            set_of_split = library.load_dataset(name, set_config)

    # The sets of all splits have the same features and the same revision. The library names the
    # directory of their files by the revision.
    first_set = list(set_of_split.values())[0]
    first_file = Path(first_set.cache_files[0]['filename'])
    revision = first_file.parent.name
    version = f'{first_set.info.version}-{revision}'

    features = _Features([], {})
    for feature_name, feature in first_set.features.items():
        if getattr(feature, 'dtype', None) in ('string', 'large_string'):
            features.texts.append(feature_name)
        # Sentences in several languages are a mapping by language. In older versions of the
        # library, they are a feature `Translation` with the attribute `languages`.
        elif isinstance(feature, Mapping):
            features.translations[feature_name] = list(feature)
        elif isinstance(getattr(feature, 'languages', None), list | tuple):
            features.translations[feature_name] = list(feature.languages)

    def examples(split: str, columns: list[str]) -> Iterator[Any]:
        return iter(set_of_split[split].select_columns(columns))

    return _make_corpus(config, version, set_of_split, features, examples)


def _require_published(data_name: str, name: str) -> None:
    """Raises ConfigError for a set that the library would not get from the Hub of Hugging Face.

    For 'csv', for example, it would read the CSV files of the working directory. `name` is what the
    library gets, 'csv', and `data_name` is the value of data.name, 'hf:csv'.
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
    """Matches data.name with a pattern and returns the groups; ConfigError if it does not match."""
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
    available: Iterable[str],
    features: _Features,
    examples: Callable[[str, list[str]], Iterator[Any]],
) -> Corpus:
    """Makes a corpus from a set of a catalogue.

    Args:
      config: the settings; `feature` and `languages` choose among the features of the set.
      version: the version of the set.
      available: the splits of the set.
      features: the features of the set.
      examples: the function (split, columns) that reads the examples of a split as dictionaries
        with the features `columns`, and perhaps others.
    """
    languages: tuple[str, ...] = ()
    if config.languages:
        languages = parse_languages(config)
    columns = _choose_columns(config, languages, features)
    # The name that the set has for each split of a corpus.
    name_of_split = {}
    for split, names in SPLIT_NAMES.items():
        present = [name for name in names if name in available]
        if present:
            name_of_split[split] = present[0]

    def read(split: str, language: str | None) -> Iterator[bytes]:
        """Yields the texts of a split; of parallel text those in `language`."""
        examples_of_split = examples(name_of_split[split], list(columns))
        side = languages.index(language) if language else 0
        yield from _texts(examples_of_split, columns, languages, side)

    name = '-'.join((config.name, *(languages or columns)))
    return Corpus(
        name=re.sub(r'[^\w.-]', '-', name),
        version=re.sub(r'[^\w.-]', '-', version),
        languages=languages,
        splits=tuple(name_of_split),
        documents=lambda language: {split: read(split, language) for split in name_of_split},
    )


def _choose_columns(
    config: DataConfig, languages: tuple[str, ...], features: _Features
) -> tuple[str, ...]:
    """Chooses the features of a set that hold the text, and returns their names.

    - Without languages, it is a feature of text: ('text',).
    - With languages, it is a feature of text for each of them, ('en', 'de'), if the set has such
      features and `config.feature` is not set.
    - With languages, it is otherwise a feature that maps languages to sentences: ('translation',).

    Args:
      config: the settings. If `feature` is set, only the feature with this name fits.
      languages: the source and the target language, or ().
      features: the features of the set.

    Raises:
      ConfigError: no feature fits, or more than one.
    """
    has_text_of_each = set(languages) <= set(features.texts)
    if languages and has_text_of_each and config.feature is None:
        return languages

    fitting = features.texts
    if languages:
        fitting = []
        for name, languages_of_feature in features.translations.items():
            if set(languages) <= set(languages_of_feature):
                fitting.append(name)
    if config.feature is not None:
        fitting = [name for name in fitting if name == config.feature]
    if len(fitting) == 1:
        return (fitting[0],)

    # Say what the set has, as in 'translation (de, en)'.
    texts = ', '.join(sorted(features.texts)) or 'none'
    described = []
    for name, languages_of_feature in features.translations.items():
        described.append(f'{name} ({", ".join(sorted(languages_of_feature))})')
    translations = ', '.join(described) or 'none'
    raise ConfigError(
        f'data.feature={config.feature!r} and data.languages={config.languages!r} do not name '
        f'one text of {config.name}; its texts are {texts}, its translations {translations}.'
    )


def _texts(
    examples: Iterable[Mapping[str, Any]],
    columns: tuple[str, ...],
    languages: tuple[str, ...],
    side: int,
) -> Iterator[bytes]:
    """Yields the text of each example; of parallel text the source (side 0) or target (side 1).

    An example without text is left out. So is an example of parallel text that lacks one of its
    sentences, on both sides, so that the sentences of source and target stay aligned.
    """
    for example in examples:
        sentences = _sentences(example, columns, languages)
        # Texts of tfds are bytes. An empty one, b'', is kept.
        if None in sentences or '' in sentences:
            continue
        text = sentences[side]
        yield text.encode() if isinstance(text, str) else text


def _sentences(
    example: Mapping[str, Any], columns: tuple[str, ...], languages: tuple[str, ...]
) -> list[Any]:
    """Returns the text of an example, or its sentence in each language; None for a missing one.

    `columns` are the fields of the example that hold the text. There are three forms:

    - The example {'text': 'a'} with the columns ('text',) gives ['a'].
    - {'en': 'a', 'de': 'b'} with ('en', 'de') gives ['a', 'b'].
    - {'translation': {'en': 'a', 'de': 'b'}} with ('translation',) gives ['a', 'b'].
    """
    if not languages:
        return [example[columns[0]]]
    if columns == languages:
        return [example.get(language) for language in languages]
    sentence_of_language = example[columns[0]] or {}
    return [sentence_of_language.get(language) for language in languages]
