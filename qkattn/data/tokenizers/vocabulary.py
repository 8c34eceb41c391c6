"""Opens tokenizers by their kind; those that are learned are trained once and cached.

The cache is `<data_dir>/tokenizers/<name>/<version>/<kind>/tokenizer.json`, in which the kind 'bpe'
is `byte-bpe-<size>`. A tokenizer from outside the package is a class with the attributes of
`Tokenizer` and keyword-only options. If it is learned, it also has `train(texts, *, options)`,
`load(model)` and `model()`.
"""

import contextlib
import contextvars
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from qkattn.config.calls import called, resolve
from qkattn.config.imports import digest
from qkattn.data.cache import DamagedData, prepared_once
from qkattn.data.tokenizers.subwords import BPETokenizer, FileTokenizer
from qkattn.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer, Tokenizer
from qkattn.storage.files import read_whole, write_atomic

KINDS: dict[str, Any] = {
    'bytes': ByteTokenizer,
    'characters': CharacterTokenizer,
    'bpe': BPETokenizer,
    'PATH.json': FileTokenizer,
}
METHODS = ('encode', 'decode', 'num_bytes')

# The names that `as_recorded` sets.
_RECORDED: contextvars.ContextVar[Collection[str]] = contextvars.ContextVar('recorded', default=())

log = logging.getLogger(__name__)


def check(kind: str) -> tuple[Any, dict[str, Any]]:
    """Returns the class and the options that `data.tokenizer` names.

    Raises ConfigError if there is no such tokenizer.
    """
    if kind.endswith('.json'):
        return FileTokenizer, {}

    def is_tokenizer(target: Any) -> bool:
        return inspect.isclass(target) and all(hasattr(target, method) for method in METHODS)

    def takes_options(cls: Any) -> Any:
        """The function that gets the options: the method `train` of a learned tokenizer."""
        return getattr(cls, 'train', cls)

    methods = ', '.join(METHODS)
    return resolve(
        kind,
        KINDS,
        'data.tokenizer',
        needs=f'a class with {methods}, as qkattn.data.tokenizers.tokenizer.Tokenizer',
        fits=is_tokenizer,
        call=takes_options,
    )


def open_tokenizer(
    root: Path, corpus: str, kind: str, size: int, texts: Callable[[], Iterable[bytes]]
) -> Tokenizer:
    """Opens the tokenizer of a corpus, and trains it the first time if it is a learned one.

    Args:
      root: the directory of prepared data, in which a learned tokenizer is kept.
      corpus: the name and version of the corpus, as in 'stdlib/1.0.0'.
      kind: the value of data.tokenizer.
      size: the number of ids of a 'bpe' vocabulary; other kinds ignore it.
      texts: returns the texts to train on, the same in each call. It is called only to train.
    """
    cls, options = check(kind)
    if not hasattr(cls, 'train'):
        return restored(kind, None)

    folder = kind
    if kind == 'bpe':
        folder = f'byte-bpe-{size}'
        options = {'size': size}
    elif is_import_path(kind):
        import_path, _, _ = kind.partition('(')
        folder = f'{import_path.replace(":", ".")}-{digest(kind)}'
    path = root / 'tokenizers' / corpus / folder / 'tokenizer.json'

    def read() -> Tokenizer:
        try:
            return restored(kind, read_whole(path))
        except Exception as error:  # the library of sub-words raises a plain Exception
            raise DamagedData(f'{path} is damaged: {error}') from error

    def train() -> None:
        log.info('Training the %s tokenizer in %s', kind, path.parent)
        tokenizer = cls.train(texts(), **options)
        write_atomic(path, tokenizer.model())

    return prepared_once(path, read, train, root=root)


def is_import_path(kind: str) -> bool:
    """Whether `data.tokenizer` names a class from outside the package, not a file."""
    return ':' in kind and not kind.endswith('.json')


@contextlib.contextmanager
def as_recorded(*names: str) -> Iterator[None]:
    """Inside of this context, tokenizers get the separators that the recorded names state.

    `names` are names of tokenizers that results, checkpoints or tokens have recorded. They matter
    only for a vocabulary of a file (`FileTokenizer`), which may have either of two separators:

    - If a name states that the separator is an additional id, it is an additional id.
    - Otherwise it is the end-of-text id of the file, if the file has one.
    """
    token = _RECORDED.set(names)
    try:
        yield
    finally:
        _RECORDED.reset(token)


def names_in(data: Any) -> list[str]:
    """Returns the names of the tokenizers in a recorded identity of data.

    Results and checkpoints record this identity. Parallel text has one name for the source and one
    for the target. `data` was read from a file, so it may have any form.
    """
    if not isinstance(data, dict):
        return []
    names = []
    for side in (data, data.get('source'), data.get('target')):
        if isinstance(side, dict) and isinstance(side.get('tokenizer'), str):
            names.append(side['tokenizer'])
    return names


def restored(kind: str, model: bytes | None) -> Tokenizer:
    """Makes the tokenizer that `data.tokenizer` names.

    `model` is what the method `model` of a learned tokenizer has returned; None for a tokenizer
    that is not learned. The name of a tokenizer from outside the package gets a digest of its
    options and its source.
    """
    cls, options = check(kind)
    if model is not None:
        tokenizer = cls.load(model)
    elif cls is FileTokenizer:
        tokenizer = cls.open(kind)
    else:
        tokenizer = called('data.tokenizer', kind, lambda: cls(**options))
    if is_import_path(kind):
        tokenizer.name = f'{tokenizer.name}-{digest(kind)}'
    if cls is FileTokenizer and tokenizer.name_with_added_separator in _RECORDED.get():
        # The recorded tokenizer did not have the file's own separator; see `as_recorded`.
        tokenizer = tokenizer.with_added_separator()
    return tokenizer
