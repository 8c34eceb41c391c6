"""Every dataset that `data.name` can name; `find` turns the settings into a `Corpus`."""

import dataclasses
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

from qkattn.config import DataConfig
from qkattn.config.calls import accepts_arguments, call_with_config_errors, resolve
from qkattn.config.imports import source_digest
from qkattn.data.corpora import catalogues, cldr, downloads, own_files, python_text
from qkattn.data.corpora.corpus import SPLITS, Corpus, cap_documents, carve_missing_splits
from qkattn.data.corpora.divided import divide_texts
from qkattn.errors import ConfigError


class Source(NamedTuple):
    """How a dataset is opened, and which of SETTINGS it takes."""

    corpus: Callable[[DataConfig], Corpus]
    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


def _tokens(config: DataConfig) -> Corpus:
    """Raises ConfigError, because tokens have no text; `load` opens them without a corpus."""
    raise ConfigError("data.name='tokens' is already tokenized; name the text")


# The datasets of the package, by the value of data.name.
CORPORA = {
    'stdlib': Source(python_text.stdlib),
    'tiny_shakespeare': Source(downloads.tiny_shakespeare, optional=('manual_dir', 'documents')),
    'text': Source(own_files.text, required=('path',), optional=('feature', 'documents')),
    'multi30k': Source(downloads.multi30k, required=('languages',), optional=('manual_dir',)),
    'cldr': Source(cldr.corpus, required=('languages',)),
    'tokens': Source(_tokens, required=('path',), optional=('documents', 'token_dtype')),
    'parallel': Source(own_files.parallel, required=('path', 'languages')),
    # These two stand for all names that begin with 'tfds:' or 'hf:'.
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
    """Returns the source that data.name names, and checks the settings of the data.

    Args:
      config: the settings.
      others: further names, such as those of probes, that the message on an unknown name lists.

    Raises:
      ConfigError: the name is unknown, a required setting is missing, or a setting has no effect.
    """
    source = _find_source(config.name, others)
    used = (*source.required, *source.optional)
    unused = [field for field in SETTINGS if field not in used]
    refuse_unused(config, unused)
    if config.tokenizer != 'bpe':
        refuse_unused(config, ['tokenizer_size'], f'data.tokenizer={config.tokenizer!r}')
    for field in source.required:
        if not getattr(config, field):
            raise ConfigError(f'data.name={config.name!r} needs data.{field}.')
    return source


def _find_source(name: str, others: Iterable[str]) -> Source:
    """Returns the source that a value of data.name stands for: how its corpus is opened.

    - 'stdlib' and other names in CORPORA have the source there.
    - 'tfds:NAME' and 'hf:OWNER/NAME' name a set of a catalogue. All sets of one catalogue have the
      same source.
    - 'my_file:my_corpus(size=9)' is the import path of a function from outside the package.

    Raises ConfigError for another name. The message lists `others`, too.
    """
    if in_catalogue(name):
        catalogue, _, _ = name.partition(':')  # 'hf:OWNER/NAME' -> 'hf'
        return CORPORA[f'{catalogue}:NAME']

    def function_with_options(target: Any) -> Callable[..., Corpus]:
        """Returns the function that takes the options: `corpus` of a Source, or `target` itself."""
        return getattr(target, 'corpus', target)

    known = {**CORPORA, **dict.fromkeys(others)}
    source_or_function, options = resolve(
        name,
        known,
        'data.name',
        needs='a function (config, *, options) that returns a Corpus',
        is_valid=accepts_arguments('config'),
        call=function_with_options,
    )
    if isinstance(source_or_function, Source):
        return source_or_function
    # A function from outside the package may use any of the optional settings.
    open_corpus = functools.partial(_open_from_outside, source_or_function, options)
    return Source(open_corpus, optional=SETTINGS)


def refuse_unused(config: DataConfig, fields: Iterable[str], target: str | None = None) -> None:
    """Raises ConfigError if one of these settings of the data is set although it has no effect.

    Without the error, the record of a run would show the setting as if it had an effect.

    Args:
      config: the settings.
      fields: the names of the settings without an effect.
      target: what they have no effect on, in words for the message, as in 'a decoder'. By default
        it is the dataset.
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
    """Opens the corpus that data.name names, and prepares its text as the settings say.

    Sets of Hugging Face, 'hf:...', are downloaded here, others only when their documents are read.
    Raises ConfigError as `check` does.
    """
    source = check(config)
    corpus = source.corpus(config)

    # Put the text in lower case. This comes before splits are carved, so that documents that differ
    # only in case are in one split.
    if config.lowercase:
        corpus = dataclasses.replace(
            corpus,
            version=f'{corpus.version}-lower',
            documents=functools.partial(_lowercase_documents, corpus),
        )

    # Cut the text into documents, and carve splits that are missing from train.
    if config.documents is not None:
        corpus = divide_texts(corpus, config.documents)
    corpus = carve_missing_splits(corpus, config.carve_test)

    # Shorten long documents of the evaluation splits. Sentences of parallel text are not shortened,
    # so that they stay translations of each other.
    if corpus.languages:
        return corpus
    return cap_documents(corpus)


def _lowercase_documents(corpus: Corpus, language: str | None) -> dict[str, Iterable[bytes]]:
    """Returns the documents of a corpus by split, in lower case."""

    def lowercase(text: bytes) -> bytes:
        return text.decode().lower().encode()

    documents = corpus.documents(language)
    return {split: map(lowercase, texts) for split, texts in documents.items()}


def _open_from_outside(
    function: Callable[..., Corpus], options: dict[str, Any], config: DataConfig
) -> Corpus:
    """Opens the corpus of a function from outside the package.

    Raises ConfigError if the function fails or returns something unusable.
    """

    def open_corpus() -> Corpus:
        corpus = function(config, **options)
        _check_corpus(corpus, config)
        # The version depends on the options and on the source code of the function.
        return dataclasses.replace(
            corpus,
            version=f'{corpus.version}-{source_digest(config.name)}',
            documents=functools.partial(_checked_documents, corpus, config.name),
        )

    # Exceptions of the function become a ConfigError.
    return call_with_config_errors('data.name', config.name, open_corpus)


def _check_corpus(corpus: Any, config: DataConfig) -> None:
    """Raises ConfigError if what a function from outside has returned is no usable corpus."""
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

    # Other names are refused. Without that, a split 'valid' would be ignored, and the validation
    # split would be carved from train.
    for split in corpus.splits:
        if split not in SPLITS:
            valid = ', '.join(SPLITS)
            raise ConfigError(f'data.name={name!r}: split {split!r} is none of {valid}')


def _checked_documents(
    corpus: Corpus, name: str, language: str | None
) -> dict[str, Iterable[bytes]]:
    """Returns the documents of a corpus by split, each of which is checked when it is read.

    Raises ConfigError if `documents` of the corpus fails or lacks a split; a document that is not
    bytes raises it when it is read. `name` is the value of data.name, for the messages.
    """

    def check_text(text: bytes) -> bytes:
        if not isinstance(text, bytes):
            raise ConfigError(f'data.name={name!r}: a document must be bytes, not {text!r:.40}')
        return text

    documents = call_with_config_errors('data.name', name, lambda: corpus.documents(language))
    for split in corpus.splits:
        if split not in documents:
            raise ConfigError(
                f'data.name={name!r}: splits names {split!r}, but documents has only '
                f'{", ".join(documents)}'
            )
    return {split: map(check_text, texts) for split, texts in documents.items()}
