"""Tokenizers by kind: trained on a corpus the first time, and cached.

A trained one is `<data_dir>/tokenizers/<name>/<version>/<kind>/tokenizer.json` (bpe:
`byte-bpe-<size>`). A tokenizer from outside is a class that has the attributes of `Tokenizer`, with
keyword-only options. One that is learned has `train(texts, *, options)`, `load(model)` and
`model()` besides.
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

# The names given to `as_recorded`.
_RECORDED: contextvars.ContextVar[Collection[str]] = contextvars.ContextVar('recorded', default=())

log = logging.getLogger(__name__)


def check(kind: str) -> tuple[Any, dict[str, Any]]:
    """The class and the options that `data.tokenizer` names; ConfigError for an unknown one."""
    if kind.endswith('.json'):
        return FileTokenizer, {}
    return resolve(
        kind,
        KINDS,
        'data.tokenizer',
        needs=f'a class with {", ".join(METHODS)}, as qkattn.data.tokenizers.tokenizer.Tokenizer',
        fits=lambda cls: inspect.isclass(cls) and all(hasattr(cls, method) for method in METHODS),
        call=lambda cls: getattr(cls, 'train', cls),
    )


def open_tokenizer(
    root: Path, corpus: str, kind: str, size: int, texts: Callable[[], Iterable[bytes]]
) -> Tokenizer:
    """The tokenizer of a kind; trained the first time, in the prepared data below `root`.

    Args:
      root: the directory of prepared data.
      corpus: its name and version, as in 'stdlib/1.0.0', by which its tokenizers are kept.
      kind: what data.tokenizer names.
      size: the ids of a 'bpe' vocabulary; others have none.
      texts: the texts to train on, always the same; called only to train.
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
        except Exception as error:  # the class that the library of subwords raises
            raise DamagedData(f'{path} is damaged: {error}') from error

    def train() -> None:
        log.info('Training the %s tokenizer in %s', kind, path.parent)
        tokenizer = cls.train(texts(), **options)
        write_atomic(path, tokenizer.model())

    return prepared_once(path, read, train, root=root)


def is_import_path(kind: str) -> bool:
    """Whether `data.tokenizer` names a class from outside, and no file."""
    return ':' in kind and not kind.endswith('.json')


@contextlib.contextmanager
def as_recorded(*names: str) -> Iterator[None]:
    """Inside, tokenizers are opened as they were when results or tokens recorded these names.

    That matters for the separator of a file's vocabulary: it is the one that the names state, one
    more id than the file has or an id of the file; without names the file's own, where it has one.
    """
    token = _RECORDED.set(names)
    try:
        yield
    finally:
        _RECORDED.reset(token)


def names_in(data: Any) -> list[str]:
    """The names of the tokenizers in the identity of data, as results and checkpoints have it.

    `data` is read from a file and may be of any form; parallel text has a source and a target.
    """
    if not isinstance(data, dict):
        return []
    names = []
    for side in (data, data.get('source'), data.get('target')):
        if isinstance(side, dict) and isinstance(side.get('tokenizer'), str):
            names.append(side['tokenizer'])
    return names


def restored(kind: str, model: bytes | None) -> Tokenizer:
    """The tokenizer of a kind, as in `check`.

    `model` is what its method `model` returned; None for one that is not learned. The name of one
    from outside includes a digest of its options and source.
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
        # The results or tokens that are opened again had another separator than the file's.
        tokenizer = tokenizer.with_added_separator()
    return tokenizer
