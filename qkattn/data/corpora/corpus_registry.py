"""Every dataset that `data.name` can name; `find` turns the settings into a `Corpus`."""

import dataclasses
import functools
import re
from collections.abc import Callable

from qkattn.config import DataConfig
from qkattn.config.calls import called, digest, resolve, takes
from qkattn.data.corpora import catalogues, cldr, downloads, own_files, python_text
from qkattn.data.corpora.corpus import Corpus, capped, carved, lowered
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


def _shards(config: DataConfig) -> Corpus:
    raise ConfigError("data.name='shards' is tokenized already; name the text")


CORPORA = {
    'stdlib': Source(python_text.stdlib),
    'packages': Source(python_text.packages),
    'tiny_shakespeare': Source(downloads.tiny_shakespeare, optional=('manual_dir',)),
    'text': Source(own_files.text, required=('path',)),
    'multi30k': Source(downloads.multi30k, required=('languages',), optional=('manual_dir',)),
    'cldr': Source(cldr.corpus, required=('languages',)),
    'shards': Source(_shards, required=('path',)),
    'parallel': Source(own_files.parallel, required=('path', 'languages')),
    'hf': Source(catalogues.saved, required=('path',), optional=('languages', 'feature')),
    # Of any name that begins like this.
    'tfds:NAME': Source(catalogues.tfds_set, optional=('languages', 'feature')),
    'hf:NAME': Source(catalogues.published, optional=('languages', 'feature')),
}
SETTINGS = {
    'path': 'the file or directory of your texts or shards',
    'languages': "source and target, as in 'en-de'",
    'feature': 'the name of a text feature or column',
    'manual_dir': 'a directory of files fetched by hand',
}


def in_catalogue(name: str) -> bool:
    """Whether `name` is of the form 'tfds:NAME' or 'hf:NAME'."""
    return name.startswith(('tfds:', 'hf:'))


def check(config: DataConfig) -> Source:
    """The source that `config` names; reads no data.

    Raises:
      ConfigError: an unknown dataset; a setting that it requires or does not take.
    """
    if in_catalogue(config.name):
        source = CORPORA[f'{config.name.partition(":")[0]}:NAME']
    else:
        source, options = resolve(
            config.name,
            CORPORA,
            'data.name',
            needs='a function (config, *, options) that returns a Corpus',
            fits=takes('config'),
            call=lambda target: getattr(target, 'corpus', target),
        )
        if not isinstance(source, Source):
            corpus = functools.partial(_from_outside, functools.partial(source, **options))
            source = Source(corpus, optional=tuple(SETTINGS))
    for setting, meaning in SETTINGS.items():
        value = getattr(config, setting)
        if value is not None and setting not in source.required + source.optional:
            raise ConfigError(
                f'data.{setting}={value!r} has no effect on data.name={config.name!r}; leave it '
                'None.'
            )
        if not value and setting in source.required:
            raise ConfigError(
                f'data.{setting}={value!r}: data.name={config.name!r} needs {meaning}.'
            )
    return source


def find(config: DataConfig) -> Corpus:
    """The corpus that `config` names, with a validation split, carved from train if need be.

    Nothing is downloaded before its `documents` are read, except for 'hf:...': which splits such a
    set has is known only once it is there.

    Raises:
      ConfigError: as `check`; a setting that the dataset cannot use.
    """
    corpus = check(config).corpus(config)
    corpus = carved(corpus, config.carve_test)
    if config.lowercase:
        corpus = lowered(corpus)
    return corpus if corpus.languages else capped(corpus)


def _from_outside(function: Callable[[DataConfig], Corpus], config: DataConfig) -> Corpus:
    """The corpus of an import path; its version includes a digest of options and source."""
    corpus = called('data.name', config.name, lambda: function(config))
    if not isinstance(corpus, Corpus):
        raise ConfigError(f'data.name={config.name!r} must return a Corpus, not {corpus!r}')
    for field in ('name', 'version'):
        if not re.fullmatch(r'[\w.-]*\w[\w.-]*', str(getattr(corpus, field))):
            raise ConfigError(
                f'data.name={config.name!r}: the {field} {getattr(corpus, field)!r} of its corpus '
                'must consist of letters, digits, points, hyphens and underscores'
            )
    return dataclasses.replace(corpus, version=f'{corpus.version}-{digest(config.name)}')
