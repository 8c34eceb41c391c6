"""Opens the tokenizer that data.tokenizer names. A learned tokenizer is trained once and kept.

Its file is `<data_dir>/tokenizers/<name>/<version>/<kind>/tokenizer.json`, in which the kind 'bpe'
is `byte-bpe-<size>`.

A tokenizer from outside the package is a class with the attributes of `Tokenizer` and keyword-only
options. If it is learned, it also has `train(texts, *, options)`, `load(model)` and `model()`.
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

# The tokenizers of the package, by the value of data.tokenizer.
KINDS: dict[str, Any] = {
    'bytes': ByteTokenizer,
    'characters': CharacterTokenizer,
    'bpe': BPETokenizer,
    'PATH.json': FileTokenizer,
    'tiktoken:NAME': TiktokenTokenizer,
}
# The methods that a class from outside the package must have to be a tokenizer.
METHODS = ('encode', 'decode', 'num_bytes')

# The names that `use_recorded_tokenizers` sets.
_RECORDED: contextvars.ContextVar[Collection[str]] = contextvars.ContextVar('recorded', default=())

log = logging.getLogger(__name__)


def check(kind: str) -> tuple[Any, dict[str, Any]]:
    """Returns the class and the options that `kind`, the value of data.tokenizer, names.

    For example, 'my_file:MyTokenizer(size=9)' gives (MyTokenizer, {'size': 9}). Raises ConfigError
    if there is no such tokenizer, or if it does not take the options.
    """
    if kind.endswith('.json'):
        return FileTokenizer, {}
    if kind.startswith(PREFIX):
        return TiktokenTokenizer, {}

    def is_tokenizer(target: Any) -> bool:
        return inspect.isclass(target) and all(hasattr(target, method) for method in METHODS)

    def function_with_options(cls: Any) -> Any:
        """Returns the function that takes the options: `train` of a learned tokenizer, or `cls`."""
        return cls.train if hasattr(cls, 'train') else cls

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
    """Opens the tokenizer of a corpus. A learned tokenizer is trained the first time, and kept.

    Args:
      root: the directory of prepared data, in which a learned tokenizer is kept.
      corpus: the name and version of the corpus, as in 'stdlib/1.0.0'.
      kind: the value of data.tokenizer.
      size: the number of ids of a 'bpe' vocabulary; other kinds ignore it.
      texts: returns the texts to train on, the same in each call. It is called only to train.
    """
    cls, options = check(kind)
    is_learned = hasattr(cls, 'train')
    if not is_learned:
        return restore_tokenizer(kind, None)

    if kind == 'bpe':
        options = {'size': size}
    path = root / 'tokenizers' / corpus / _folder(kind, size) / 'tokenizer.json'

    def read() -> Tokenizer:
        try:
            return restore_tokenizer(kind, read_whole(path))
        except Exception as error:  # the library of sub-words raises a plain Exception
            raise DamagedData(f'{path} is damaged: {error}') from error

    def train() -> None:
        log.info('Training the %s tokenizer in %s', kind, path.parent)
        tokenizer = cls.train(texts(), **options)
        write_atomic(path, tokenizer.model())

    return read_or_prepare(path, read, train, root=root)


def _folder(kind: str, size: int) -> str:
    """Returns the folder name of a learned tokenizer.

    For example, 'my_file:MyTokenizer(size=9)' gives 'my_file.MyTokenizer-0123456789ab'. The suffix
    is a digest of the options and the source code.
    """
    if kind == 'bpe':
        return f'byte-bpe-{size}'
    if is_import_path(kind):
        import_path, _, _ = kind.partition('(')
        module_and_class = import_path.replace(':', '.')
        return f'{module_and_class}-{source_digest(kind)}'
    return kind  # 'characters'


def is_import_path(kind: str) -> bool:
    """Whether a value of data.tokenizer names a class from outside the package.

    'my_file:MyTokenizer' does. 'C:/tokenizer.json' does not, because it is the path of a file, and
    neither does 'tiktoken:gpt2'.
    """
    is_file = kind.endswith('.json')
    is_encoding = kind.startswith(PREFIX)  # of tiktoken
    return ':' in kind and not is_file and not is_encoding


@contextlib.contextmanager
def use_recorded_tokenizers(*names: str) -> Iterator[None]:
    """A `with` block in which a tokenizer.json is opened with the separator that it had before.

    A tokenizer.json can be opened in two ways, which differ in the separator between documents.
    Results, checkpoints and tokens record the name of their tokenizer, which tells which way it was
    opened:

    - 'file-0123456789ab-end2': the separator is the end-of-text token of the file, here id 2. A
      file that has such a token is opened in this way by default.
    - 'file-0123456789ab': the separator is an additional id after those of the file. In the block,
      a file is opened in this way if `names` contains this name.

    `names` are recorded names. They do not matter for other tokenizers.
    """
    token = _RECORDED.set(names)
    try:
        yield
    finally:
        _RECORDED.reset(token)


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
    """Makes the tokenizer that `kind`, the value of data.tokenizer, names.

    Args:
      kind: the value of data.tokenizer, such as 'bytes', 'tiktoken:gpt2' or 'my_file:MyTokenizer'.
      model: the vocabulary of the tokenizer, as its method `model` has returned it. None for a
        tokenizer that `kind` describes completely.
    """
    cls, options = check(kind)
    if model is not None:
        tokenizer = cls.load(model)
    elif cls in (FileTokenizer, TiktokenTokenizer):
        tokenizer = cls.open(kind)  # a path, or the name of an encoding
    else:
        # Exceptions of a class from outside become a ConfigError.
        tokenizer = call_with_config_errors('data.tokenizer', kind, lambda: cls(**options))

    # The name of a tokenizer from outside the package gets a digest of its options and its source.
    if is_import_path(kind):
        tokenizer.name = f'{tokenizer.name}-{source_digest(kind)}'
    # Open a file as it was opened before; see `use_recorded_tokenizers`.
    if cls is FileTokenizer and tokenizer.name_with_added_separator in _RECORDED.get():
        tokenizer = tokenizer.with_added_separator()
    return tokenizer
