"""The texts that there are: `find` turns the settings of `DataConfig` into a `Corpus`."""

import dataclasses
import difflib
import importlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping

from qkattn.config import DataConfig
from qkattn.errors import ConfigError

# What each dataset must (True) or may (False) be told. Everything else is refused, because a
# setting without effect would still stand in the record of a run.
SETTINGS = {
    'stdlib': {},
    'tiny_shakespeare': {'manual_dir': False},
    'text': {'path': True},
    'multi30k': {'languages': True, 'manual_dir': False},
    'cldr': {'languages': True},
    'parallel': {'path': True, 'languages': True},
    'tfds': {'languages': False, 'feature': False, 'manual_dir': False},
}
MEANING = {
    'path': 'the file or directory of your texts',
    'languages': "source and target, as in 'en-de'",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Corpus:
    """Texts of a dataset, not tokenised.

    Attributes:
      name: part of cache paths and of every result, e.g. 'multi30k-en-de'.
      version: changes whenever the text can.
      languages: () for text; source and target for parallel text.
      splits: 'train', 'validation' and, where there is one, 'test'.
      documents: `documents(language)` maps each split to its UTF-8 texts in a fixed order; language
        is None for text. Document i of the one language translates document i of the other.
        Prepares the dataset where that has not been done.
    """

    name: str
    version: str
    languages: tuple[str, ...]
    splits: tuple[str, ...]
    documents: Callable[[str | None], Mapping[str, Iterable[bytes]]]


def check(config: DataConfig) -> str:
    """The key in SETTINGS of the dataset that `config` names, its settings checked.

    Raises:
      ConfigError: an unknown dataset, a setting that it needs or does not take.
    """
    kind = 'tfds' if config.name.startswith('tfds:') else config.name
    if kind not in SETTINGS or config.name == 'tfds':
        names = [*(name for name in SETTINGS if name != 'tfds'), 'tfds:NAME', 'tfds:NAME/CONFIG']
        close = difflib.get_close_matches(config.name, names, 1)
        hint = f' (did you mean {close[0]!r}?)' if close else ''
        raise ConfigError(
            f'data.name={config.name!r} is not a known dataset{hint}; valid: '
            f'{", ".join(map(repr, names))}.'
        )
    for field in ('path', 'languages', 'feature', 'manual_dir'):
        value = getattr(config, field)
        if value is not None and field not in SETTINGS[kind]:
            raise ConfigError(
                f'data.{field}={value!r} has no effect on data.name={config.name!r}; leave it None.'
            )
    for field, needed in SETTINGS[kind].items():
        value = getattr(config, field)
        if needed and not value:
            raise ConfigError(
                f'data.{field}={value!r}: data.name={config.name!r} needs {MEANING[field]}.'
            )
    return kind


def find(config: DataConfig) -> Corpus:
    """The corpus that `config` names.

    Nothing is downloaded before its `documents` are read, except for 'tfds:...': which splits such
    a set has is known only once it is prepared.

    Raises:
      ConfigError: as `check`; a setting that the dataset cannot use.
    """
    corpus = _corpus(check(config), config)
    return _lowered(corpus) if config.lowercase else corpus


def _corpus(kind: str, config: DataConfig) -> Corpus:
    # Imported when asked for: a user of one dataset needs no packages of another.
    if kind in ('stdlib', 'tiny_shakespeare'):
        module = 'stdlib_text' if kind == 'stdlib' else kind
        return importlib.import_module(f'qkattn.data.corpora.{module}').corpus(config)
    if kind in ('text', 'parallel'):
        own_files = importlib.import_module('qkattn.data.corpora.own_files')
        if kind == 'text':
            return own_files.text(config)
        return own_files.parallel(parse_languages(config.languages), config)
    if kind == 'tfds':
        catalogue = importlib.import_module('qkattn.data.corpora.tfds_catalogue')
        languages = parse_languages(config.languages) if config.languages else ()
        return catalogue.corpus(languages, config)
    module = importlib.import_module(f'qkattn.data.corpora.{kind}')
    return module.corpus(parse_languages(config.languages), config)


def parse_languages(languages: str) -> tuple[str, str]:
    """Source and target: 'en-de' -> ('en', 'de').

    Raises:
      ConfigError: unless they are two different names of letters, digits and underscores.
    """
    parts = tuple(languages.split('-'))
    if len(parts) != 2 or not all(re.fullmatch(r'[A-Za-z0-9_]+', part) for part in parts):
        raise ConfigError(
            f'data.languages={languages!r} is not a pair; write source and target with a hyphen '
            "between, as in 'en-de'."
        )
    if parts[0] == parts[1]:
        raise ConfigError(
            f'data.languages={languages!r} names one language twice; source and target must differ.'
        )
    return parts


def _lowered(corpus: Corpus) -> Corpus:
    def lowered(texts: Iterable[bytes]) -> Iterator[bytes]:
        for text in texts:
            yield text.decode().lower().encode()

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        return {split: lowered(texts) for split, texts in corpus.documents(language).items()}

    return dataclasses.replace(corpus, version=f'{corpus.version}-lower', documents=documents)
