"""Every dataset that `data.name` can name; `find` turns the settings into a `Corpus`."""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator

from qkattn.config import DataConfig
from qkattn.data.corpora import (
    cldr,
    multi30k,
    own_files,
    packages_text,
    stdlib_text,
    tfds_catalogue,
    tiny_shakespeare,
)
from qkattn.data.corpora.corpus import Corpus, capped
from qkattn.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Source:
    """Opens a corpus.

    Attributes:
      required, optional: the settings among SETTINGS that it takes. Others are refused, because a
        setting without effect would still stand in the record of a run.
    """

    corpus: Callable[[DataConfig], Corpus]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


CORPORA = {
    'stdlib': Source(stdlib_text.corpus),
    'packages': Source(packages_text.corpus),
    'tiny_shakespeare': Source(tiny_shakespeare.corpus, optional=('manual_dir',)),
    'text': Source(own_files.text, required=('path',)),
    'multi30k': Source(multi30k.corpus, required=('languages',), optional=('manual_dir',)),
    'cldr': Source(cldr.corpus, required=('languages',)),
    'parallel': Source(own_files.parallel, required=('path', 'languages')),
    # Of any name that begins with 'tfds:'.
    'tfds': Source(tfds_catalogue.corpus, optional=('languages', 'feature', 'manual_dir')),
}
SETTINGS = {
    'path': 'the file or directory of your texts',
    'languages': "source and target, as in 'en-de'",
    'feature': 'the name of a text feature',
    'manual_dir': 'a directory of files fetched by hand',
}


def check(config: DataConfig) -> Source:
    """The source that `config` names; reads no data.

    Raises:
      ConfigError: an unknown dataset; a setting that it requires or does not take.
    """
    name = 'tfds' if config.name.startswith('tfds:') else config.name
    if name not in CORPORA or config.name == 'tfds':
        names = [*(name for name in CORPORA if name != 'tfds'), 'tfds:NAME', 'tfds:NAME/CONFIG']
        close = difflib.get_close_matches(config.name, names, 1)
        hint = f' (did you mean {close[0]!r}?)' if close else ''
        raise ConfigError(
            f'data.name={config.name!r} is not a known dataset{hint}; valid: '
            f'{", ".join(map(repr, names))}.'
        )
    source = CORPORA[name]
    for setting in SETTINGS:
        value = getattr(config, setting)
        if value is not None and setting not in source.required + source.optional:
            raise ConfigError(
                f'data.{setting}={value!r} has no effect on data.name={config.name!r}; leave it '
                'None.'
            )
    for setting in source.required:
        if not (value := getattr(config, setting)):
            raise ConfigError(
                f'data.{setting}={value!r}: data.name={config.name!r} needs {SETTINGS[setting]}.'
            )
    return source


def find(config: DataConfig) -> Corpus:
    """The corpus that `config` names.

    Nothing is downloaded before its `documents` are read, except for 'tfds:...': which splits such
    a set has is known only once it is prepared.

    Raises:
      ConfigError: as `check`; a setting that the dataset cannot use.
    """
    corpus = check(config).corpus(config)
    if config.lowercase:
        corpus = _lowered(corpus)
    return corpus if corpus.languages else capped(corpus)


def _lowered(corpus: Corpus) -> Corpus:
    def lowered(texts: Iterable[bytes]) -> Iterator[bytes]:
        for text in texts:
            yield text.decode().lower().encode()

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        return {split: lowered(texts) for split, texts in corpus.documents(language).items()}

    return dataclasses.replace(corpus, version=f'{corpus.version}-lower', documents=documents)
