"""Every dataset that `data.name` can name; `find` turns the settings into a `Corpus`."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from qkattn.config import DataConfig
from qkattn.config.calls import called, resolve, takes
from qkattn.config.imports import digest
from qkattn.data.corpora import catalogues, cldr, downloads, own_files, python_text
from qkattn.data.corpora.corpus import SPLITS, Corpus, capped, carved
from qkattn.data.corpora.divided import divided
from qkattn.errors import ConfigError


class Source(NamedTuple):
    """How a dataset is opened, and which of SETTINGS it takes."""

    corpus: Callable[[DataConfig], Corpus]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def _tokens(config: DataConfig) -> Corpus:
    """Raises ConfigError, because tokens have no text; `load` opens them without a corpus."""
    raise ConfigError("data.name='tokens' is already tokenized; name the text")


CORPORA = {
    'stdlib': Source(python_text.stdlib),
    'tiny_shakespeare': Source(downloads.tiny_shakespeare, optional=('manual_dir', 'documents')),
    'text': Source(own_files.text, required=('path',), optional=('feature', 'documents')),
    'multi30k': Source(downloads.multi30k, required=('languages',), optional=('manual_dir',)),
    'cldr': Source(cldr.corpus, required=('languages',)),
    'tokens': Source(_tokens, required=('path',), optional=('documents', 'token_dtype')),
    'parallel': Source(own_files.parallel, required=('path', 'languages')),
    # Of any name that begins like this.
    'tfds:NAME': Source(catalogues.tfds_set, optional=('languages', 'feature')),
    'hf:NAME': Source(catalogues.hugging_face, optional=('languages', 'feature')),
}
# Settings that some datasets take and others do not.
SETTINGS = ('path', 'languages', 'feature', 'documents', 'token_dtype', 'manual_dir')
# Datasets whose text comes with the interpreter, or is in files that the settings name.
LOCAL = ('stdlib', 'cldr', 'text', 'parallel')
# Datasets that a name alone opens.
NAMED_ALONE = tuple(
    name for name, source in CORPORA.items() if not source.required and ':' not in name
)


def is_local(config: DataConfig) -> bool:
    """Whether the text is on this machine: it comes with Python, or is a file of the user's."""
    return config.name in LOCAL or config.manual_dir is not None


def in_catalogue(name: str) -> bool:
    """Whether `name` is of the form 'tfds:NAME' or 'hf:NAME'."""
    return name.startswith(('tfds:', 'hf:'))


def check(config: DataConfig, others: Iterable[str] = ()) -> Source:
    """Returns the source that `config` names, after checking the settings that it takes.

    Raises ConfigError if the name is unknown, a required setting is missing, or a setting has no
    effect. `others` are further valid names, which the message on an unknown name lists.
    """
    if in_catalogue(config.name):
        catalogue, _, _ = config.name.partition(':')
        source = CORPORA[f'{catalogue}:NAME']
    else:
        source, options = resolve(
            config.name,
            {**CORPORA, **dict.fromkeys(others)},
            'data.name',
            needs='a function (config, *, options) that returns a Corpus',
            fits=takes('config'),
            call=lambda target: getattr(target, 'corpus', target),
        )
        if not isinstance(source, Source):  # a function from outside, named by its import path
            source = Source(functools.partial(_from_outside, source, options), optional=SETTINGS)
    taken = (*source.required, *source.optional)
    not_taken = [field for field in SETTINGS if field not in taken]
    refuse_unused(config, not_taken)
    if config.tokenizer != 'bpe':
        refuse_unused(config, ['tokenizer_size'], f'data.tokenizer={config.tokenizer!r}')
    for field in source.required:
        if not getattr(config, field):
            raise ConfigError(f'data.name={config.name!r} needs data.{field}.')
    return source


def refuse_unused(config: DataConfig, fields: Iterable[str], target: str | None = None) -> None:
    """Raises ConfigError for a field that is set but has no effect on `target`, e.g. 'a decoder'.

    Without the error, the record of a run would show the setting as if it had an effect. By default
    the target is the dataset.
    """
    if target is None:
        target = f'data.name={config.name!r}'
    for field in fields:
        value = getattr(config, field)
        default = getattr(DataConfig, field)
        if value != default:
            raise ConfigError(
                f'data.{field}={value!r} has no effect on {target}; leave it at {default!r}.'
            )


def find(config: DataConfig) -> Corpus:
    """Returns the corpus that `config` names, with a validation split.

    A missing validation split is carved from train. Only sets of 'hf:...' are downloaded at once;
    others are downloaded when `documents` are read. Raises ConfigError as `check` does.
    """
    source = check(config)
    corpus = source.corpus(config)
    if config.lowercase:
        # This comes before carving, so that documents that differ only in case are in one split.
        corpus = dataclasses.replace(
            corpus,
            version=f'{corpus.version}-lower',
            documents=functools.partial(_lowercased, corpus),
        )
    if config.documents is not None:
        corpus = divided(corpus, config.documents)
    corpus = carved(corpus, config.carve_test)
    if corpus.languages:
        return corpus
    return capped(corpus)


def _lowercased(corpus: Corpus, language: str | None) -> dict[str, Iterable[bytes]]:
    """Returns the documents of a corpus by split, in lower case."""

    def lowercased(text: bytes) -> bytes:
        return text.decode().lower().encode()

    documents = corpus.documents(language)
    return {split: map(lowercased, texts) for split, texts in documents.items()}


def _from_outside(
    function: Callable[..., Corpus], options: dict[str, Any], config: DataConfig
) -> Corpus:
    """Calls a function from outside the package and checks the corpus that it returns.

    The version of the corpus gets a digest of the options and of the source code of the function.
    Raises ConfigError if the function fails or returns something unusable.
    """

    def checked() -> Corpus:
        corpus = function(config, **options)
        if not isinstance(corpus, Corpus):
            raise ConfigError(f'data.name={config.name!r} must return a Corpus, not {corpus!r:.80}')

        is_parallel_wanted = bool(config.languages)
        is_parallel = bool(corpus.languages)
        if is_parallel != is_parallel_wanted:
            returned = 'in one language'
            if is_parallel:
                returned = f'of {"-".join(corpus.languages)}'
            raise ConfigError(
                f'data.languages={config.languages!r}, but {config.name!r} returns text {returned}'
            )

        # A misspelled validation split would not be used; another one would be carved from train.
        for split in corpus.splits:
            if split not in SPLITS:
                valid = ', '.join(SPLITS)
                raise ConfigError(f'data.name={config.name!r}: split {split!r} is none of {valid}')

        return dataclasses.replace(
            corpus,
            version=f'{corpus.version}-{digest(config.name)}',
            documents=functools.partial(_checked_documents, corpus, config.name),
        )

    return called('data.name', config.name, checked)


def _checked_documents(
    corpus: Corpus, name: str, language: str | None
) -> dict[str, Iterable[bytes]]:
    """Returns the documents of a corpus by split; reading one that is not bytes raises ConfigError.

    `name` is the value of data.name, for the message.
    """

    def checked(text: bytes) -> bytes:
        if not isinstance(text, bytes):
            raise ConfigError(f'data.name={name!r}: a document must be bytes, not {text!r:.40}')
        return text

    documents = corpus.documents(language)
    return {split: map(checked, texts) for split, texts in documents.items()}
