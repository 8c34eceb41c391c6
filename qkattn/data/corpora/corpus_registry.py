"""The datasets that `data.name` can name. `find` opens the corpus that the settings describe."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from qkattn.config import DataConfig
from qkattn.config.calls import accepts_arguments, call_with_config_errors, resolve
from qkattn.config.imports import source_digest
from qkattn.data.corpora import catalogues, cldr, downloads, own_files, python_text
from qkattn.data.corpora.corpus import (
    LOWER_CASE,
    SPLITS,
    Corpus,
    cap_documents,
    carve_missing_splits,
)
from qkattn.data.corpora.divided import divide_texts
from qkattn.errors import ConfigError


class Source(NamedTuple):
    """A dataset: the function that opens it, and the settings that it takes."""

    # Opens the corpus.
    corpus: Callable[[DataConfig], Corpus]
    # Names in SETTINGS that must be set.
    required: tuple[str, ...] = ()
    # Names in SETTINGS that may be set.
    optional: tuple[str, ...] = ()


def _tokens(config: DataConfig) -> Corpus:
    """Raises ConfigError, because token files have no text. They are read without a corpus."""
    raise ConfigError("data.name='tokens' is already tokenized; name the text")


# Datasets by the value of data.name.
CORPORA = {
    'stdlib': Source(python_text.stdlib),
    'tiny_shakespeare': Source(downloads.tiny_shakespeare, optional=('manual_dir', 'documents')),
    'text': Source(own_files.text, required=('path',), optional=('feature', 'documents')),
    'multi30k': Source(downloads.multi30k, required=('languages',), optional=('manual_dir',)),
    'cldr': Source(cldr.corpus, required=('languages',)),
    'tokens': Source(_tokens, required=('path',), optional=('documents', 'token_dtype')),
    'parallel': Source(own_files.parallel, required=('path', 'languages')),
    # All names that begin with 'tfds:' or 'hf:'.
    'tfds:NAME': Source(catalogues.tfds_set, optional=('languages', 'feature')),
    'hf:NAME': Source(catalogues.hugging_face, optional=('languages', 'feature')),
}
# Settings that only some datasets take.
SETTINGS = ('path', 'languages', 'feature', 'documents', 'token_dtype', 'manual_dir')
# Datasets that are not downloaded.
LOCAL = ('stdlib', 'cldr', 'text', 'parallel')
# Datasets without required settings.
NAMED_ALONE = tuple(
    name for name, source in CORPORA.items() if not source.required and ':' not in name
)


def is_local(config: DataConfig) -> bool:
    """Whether the text is already on this machine, so that nothing is downloaded."""
    return config.name in LOCAL or config.manual_dir is not None


def in_catalogue(name: str) -> bool:
    """Whether `name` is of the form 'tfds:NAME' or 'hf:NAME'."""
    return name.startswith(('tfds:', 'hf:'))


def check(config: DataConfig, other_names: Iterable[str] = ()) -> Source:
    """Checks the settings of a dataset and returns its source.

    Args:
        config: The settings.
        other_names: Names of data without a corpus, such as probes. The error for an unknown name
            lists them, too.

    Raises:
        ConfigError: The name is unknown, a required setting is missing, or a setting has no effect.
    """
    source = _find_source(config.name, other_names)
    used_settings = (*source.required, *source.optional)
    unused_settings = [field for field in SETTINGS if field not in used_settings]
    refuse_unused(config, unused_settings)
    if config.tokenizer != 'bpe':
        target = f'data.tokenizer={config.tokenizer!r}'
        refuse_unused(config, ['tokenizer_size'], target)
    for field in source.required:
        if not getattr(config, field):
            raise ConfigError(f'data.name={config.name!r} needs data.{field}.')
    return source


def _find_source(name: str, other_names: Iterable[str]) -> Source:
    """Returns the source for a value of data.name.

    `name` is a name in CORPORA, a catalogue name such as 'hf:OWNER/NAME', or the import path of the
    user's function, such as 'my_file:my_corpus(size=9)'. Raises ConfigError for other names.
    """
    if in_catalogue(name):
        catalogue, _, _ = name.partition(':')  # 'hf:OWNER/NAME' -> 'hf'
        return CORPORA[f'{catalogue}:NAME']

    def function_with_options(source_or_function: Any) -> Callable[..., Corpus]:
        is_source = hasattr(source_or_function, 'corpus')  # of the package
        return source_or_function.corpus if is_source else source_or_function

    # The message for an unknown name lists all of these.
    known = {**CORPORA, **dict.fromkeys(other_names)}
    # Look up a name in `known`, or import the user's function.
    source_or_function, options = resolve(
        name,
        known,
        field='data.name',
        needs='a function (config, *, options) that returns a Corpus',
        is_valid=accepts_arguments('config'),
        call=function_with_options,
    )
    if isinstance(source_or_function, Source):
        return source_or_function
    open_corpus = functools.partial(_open_from_outside, source_or_function, options)
    # The user's function may use any setting.
    return Source(open_corpus, optional=SETTINGS)


def refuse_unused(config: DataConfig, fields: Iterable[str], target: str | None = None) -> None:
    """Raises ConfigError if a setting that has no effect is not at its default.

    Args:
        config: The settings.
        fields: The settings without effect.
        target: What ignores the settings, for the message, such as 'a decoder'. By default, it is
            the dataset.
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
    """Opens the corpus that the settings describe.

    Hugging Face datasets are downloaded at once, other datasets when their documents are read.

    Raises:
        ConfigError: The settings are invalid; see `check`.
    """
    source = check(config)
    corpus = source.corpus(config)

    # Lowercase before splits are carved, so that copies that differ in case are in the same split.
    if config.lowercase:
        corpus = dataclasses.replace(
            corpus,
            version=f'{corpus.version}{LOWER_CASE}',  # ends in '-lower'
            documents=functools.partial(_lowercase_documents, corpus),
        )

    if config.documents is not None:
        corpus = divide_texts(corpus, rule=config.documents)
    corpus = carve_missing_splits(corpus, test=config.carve_test)

    # Sentences of parallel text are not cut, so that they stay translations of each other.
    if corpus.languages:
        return corpus
    return cap_documents(corpus)


def _lowercase_documents(corpus: Corpus, language: str | None) -> dict[str, Iterable[bytes]]:
    """Returns the documents of each split in lower case."""

    def lowercase(text: bytes) -> bytes:
        return text.decode().lower().encode()

    documents_of_split = corpus.documents(language)
    return {split: map(lowercase, documents) for split, documents in documents_of_split.items()}


def _open_from_outside(
    function: Callable[..., Corpus], options: dict[str, Any], config: DataConfig
) -> Corpus:
    """Opens the corpus that a user's function returns, and checks it.

    Raises ConfigError if the function fails or the corpus is invalid.
    """

    def open_corpus() -> Corpus:
        corpus = function(config, **options)
        _check_corpus(corpus, config)
        digest = source_digest(config.name)  # of the function's options and source code
        return dataclasses.replace(
            corpus,
            # The first split is trained on, whatever order the function names them in.
            splits=tuple(split for split in SPLITS if split in corpus.splits),
            version=f'{corpus.version}-{digest}',
            documents=functools.partial(_checked_documents, corpus, config.name),
        )

    return call_with_config_errors('data.name', config.name, open_corpus)


def _check_corpus(corpus: Any, config: DataConfig) -> None:
    """Raises ConfigError if the return value of a user's function is not a valid corpus."""
    name = config.name
    if not isinstance(corpus, Corpus):
        raise ConfigError(f'data.name={name!r} must return a Corpus, not {corpus!r:.80}')

    is_parallel = bool(corpus.languages)
    needs_parallel = bool(config.languages)
    if is_parallel != needs_parallel:
        returned = f'of {"-".join(corpus.languages)}' if is_parallel else 'in one language'
        raise ConfigError(
            f'data.languages={config.languages!r}, but {name!r} returns text {returned}'
        )

    if not isinstance(corpus.splits, tuple | list):
        raise ConfigError(f'data.name={name!r}: splits must be a tuple, not {corpus.splits!r:.80}')
    # Otherwise a misnamed split, such as 'valid', would be ignored.
    for split in corpus.splits:
        if split not in SPLITS:
            valid = ', '.join(SPLITS)
            raise ConfigError(f'data.name={name!r}: split {split!r} is none of {valid}')


def _checked_documents(
    corpus: Corpus, name: str, language: str | None
) -> dict[str, Iterable[bytes]]:
    """Returns the documents of each split of a user's corpus, with checks.

    Raises ConfigError if a split is missing or `corpus.documents` fails. While the documents are
    read, also raises it if there are none or one is not bytes. `name` is the value of data.name.
    """
    # Exceptions in the user's function become ConfigErrors that name the setting.
    documents_of_split = call_with_config_errors(
        'data.name', name, lambda: corpus.documents(language)
    )
    if not isinstance(documents_of_split, Mapping):
        raise ConfigError(
            f'data.name={name!r}: documents must return a dict of documents by split, not '
            f'{documents_of_split!r:.80}'
        )
    for split in corpus.splits:
        if split not in documents_of_split:
            returned_splits = ', '.join(map(str, documents_of_split))
            returned = f'has only {returned_splits}' if returned_splits else 'has no split'
            raise ConfigError(
                f'data.name={name!r}: splits names {split!r}, but documents {returned}'
            )

    checked: dict[str, Iterable[bytes]] = {}
    for split, documents in documents_of_split.items():
        checked[split] = _require_documents(documents, split, name)
    return checked


def _require_documents(documents: Iterable[bytes], split: str, name: str) -> Iterator[bytes]:
    """Yields the documents of a split of a user's corpus.

    Raises ConfigError if there are none or one is not bytes. `name` is the value of data.name.
    """
    is_empty = True
    for document in documents:
        is_empty = False
        if not isinstance(document, bytes):
            raise ConfigError(f'data.name={name!r}: a document must be bytes, not {document!r:.40}')
        yield document
    if is_empty:
        raise ConfigError(
            f'data.name={name!r}: split {split!r} has no document; if documents returns a '
            'generator, it was used up before: make a fresh one in each call, for each split'
        )
