"""Opens the tokenizer that data.tokenizer names.

A learned tokenizer is trained once and cached in a file such as
`<data_dir>/tokenizers/stdlib/1.0.0/byte-bpe-8192/tokenizer.json`.

A tokenizer from outside the package is a class like `Tokenizer`, with keyword-only options. If it
is learned, it also has `train(texts, *, options)`, `load(model)` and `model()`.
"""

import contextlib
import contextvars
import inspect
import logging
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from qkattn.config.calls import call_with_config_errors, resolve
from qkattn.config.imports import source_digest
from qkattn.data.cache import DamagedData, read_or_prepare
from qkattn.data.tokenizers.subwords import BPETokenizer, FileTokenizer
from qkattn.data.tokenizers.tiktoken_encodings import PREFIX, TiktokenTokenizer
from qkattn.data.tokenizers.tokenizer import ByteTokenizer, CharacterTokenizer, Tokenizer
from qkattn.storage.files import read_whole, write_atomic

# The tokenizers of the package, by their names in data.tokenizer.
KINDS: dict[str, Any] = {
    'bytes': ByteTokenizer,
    'characters': CharacterTokenizer,
    'bpe': BPETokenizer,
    'PATH.json': FileTokenizer,
    'tiktoken:NAME': TiktokenTokenizer,
}
# The methods of a tokenizer class.
METHODS = ('encode', 'decode', 'num_bytes')

# The names that `use_recorded_tokenizers` sets.
_RECORDED: contextvars.ContextVar[Collection[str]] = contextvars.ContextVar('recorded', default=())

log = logging.getLogger(__name__)


def check(kind: str) -> tuple[Any, dict[str, Any]]:
    """Returns a tokenizer's class and options.

    For example, 'my_file:MyTokenizer(size=9)' gives (MyTokenizer, {'size': 9}).

    Args:
        kind: The value of data.tokenizer.

    Raises:
        ConfigError: There is no such tokenizer, or it does not take the options.
    """
    if kind.endswith('.json'):
        return FileTokenizer, {}
    if kind.startswith(PREFIX):  # 'tiktoken:'
        return TiktokenTokenizer, {}

    def is_tokenizer(target: Any) -> bool:
        return inspect.isclass(target) and all(hasattr(target, method) for method in METHODS)

    def function_with_options(cls: Any) -> Any:
        is_learned = hasattr(cls, 'train')
        return cls.train if is_learned else cls

    methods = ', '.join(METHODS)
    return resolve(
        kind,
        KINDS,
        'data.tokenizer',
        needs=f'a class with {methods}, as qkattn.data.tokenizers.tokenizer.Tokenizer',
        is_valid=is_tokenizer,
        call=function_with_options,
    )


def open_tokenizer(
    root: Path, corpus: str, kind: str, size: int, texts: Callable[[], Iterable[bytes]]
) -> Tokenizer:
    """Opens the tokenizer of a corpus.

    A learned tokenizer is trained at the first call, and read from a file afterwards.

    Args:
        root: The directory of prepared data, with the files of learned tokenizers.
        corpus: The name and version of the corpus, such as 'stdlib/1.0.0'.
        kind: The value of data.tokenizer.
        size: The vocabulary size of 'bpe'.
        texts: Returns the texts to train on; called only for training.
    """
    tokenizer_class, options_in_kind = check(kind)
    is_learned = hasattr(tokenizer_class, 'train')
    if not is_learned:
        return restore_tokenizer(kind, model=None)

    train_options = {'size': size} if kind == 'bpe' else options_in_kind
    path = root / 'tokenizers' / corpus / _folder(kind, size) / 'tokenizer.json'

    def read() -> Tokenizer:
        try:
            return restore_tokenizer(kind, read_whole(path))
        except Exception as error:  # the library of sub-words raises a plain Exception
            raise DamagedData(f'{path} is damaged: {error}') from error

    def train() -> None:
        log.info('Training the %s tokenizer in %s', kind, path.parent)
        tokenizer = tokenizer_class.train(texts(), **train_options)
        write_atomic(path, tokenizer.model())

    # Call `train` first if the file is missing or damaged.
    return read_or_prepare(path, read=read, prepare=train, root=root)


def _folder(kind: str, size: int) -> str:
    """Returns the folder name of a learned tokenizer."""
    if kind == 'bpe':
        return f'byte-bpe-{size}'
    if is_import_path(kind):
        # 'my_file:MyTokenizer(size=9)' -> 'my_file.MyTokenizer-0123456789ab'
        import_path, _, _ = kind.partition('(')
        module_and_class = import_path.replace(':', '.')
        return f'{module_and_class}-{source_digest(kind)}'
    return kind  # 'characters'


def is_import_path(kind: str) -> bool:
    """Returns whether a value of data.tokenizer is an import path, such as 'my_file:MyTokenizer'.

    Paths such as 'C:/tokenizer.json' and encodings such as 'tiktoken:gpt2' are not.
    """
    is_file = kind.endswith('.json')
    is_encoding = kind.startswith(PREFIX)
    return ':' in kind and not is_file and not is_encoding


@contextlib.contextmanager
def use_recorded_tokenizers(*names: str) -> Iterator[None]:
    """A context in which a tokenizer.json has the separator that a result or checkpoint recorded.

    The recorded name of the tokenizer tells the separator:

    - 'file-0123456789ab-end2': the end-of-text id of the file, here 2, as by default;
    - 'file-0123456789ab': an additional id after the ids of the file.

    Args:
        *names: The recorded names.
    """
    earlier_names = _RECORDED.set(names)  # read by `restore_tokenizer`
    try:
        yield
    finally:
        _RECORDED.reset(earlier_names)


def names_in(data: Any) -> list[str]:
    """Returns the tokenizer names recorded in the `data` field of a result or checkpoint.

    Text: {'tokenizer': 'A'} gives ['A'].
    Parallel text: {'source': {'tokenizer': 'A'}, 'target': {'tokenizer': 'B'}} gives ['A', 'B'].
    Malformed parts are skipped.
    """
    if not isinstance(data, dict):
        return []
    names = []
    for part in (data, data.get('source'), data.get('target')):
        if isinstance(part, dict) and isinstance(part.get('tokenizer'), str):
            names.append(part['tokenizer'])
    return names


def restore_tokenizer(kind: str, model: bytes | None) -> Tokenizer:
    """Builds a tokenizer.

    Args:
        kind: The value of data.tokenizer, such as 'bytes', 'tiktoken:gpt2' or
            'my_file:MyTokenizer'.
        model: The vocabulary of a learned tokenizer, as returned by its method `model`; else None.
    """
    cls, options = check(kind)
    if model is not None:
        tokenizer = cls.load(model)
    elif cls in (FileTokenizer, TiktokenTokenizer):
        tokenizer = cls.open(kind)
    else:
        # A class from outside the package may raise any exception.
        tokenizer = call_with_config_errors('data.tokenizer', kind, lambda: cls(**options))

    if is_import_path(kind):
        # The same class with other options or another source file has another name.
        tokenizer.name = f'{tokenizer.name}-{source_digest(kind)}'
    if cls is FileTokenizer:
        names_in_results = _RECORDED.get()  # set by `use_recorded_tokenizers`
        was_separator_added = tokenizer.name_with_added_separator in names_in_results
        if was_separator_added:
            tokenizer = tokenizer.with_added_separator()
    return tokenizer
