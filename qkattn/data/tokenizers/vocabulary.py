"""Tokenizers by kind: trained on a corpus the first time, cached, checked whenever opened.

On disk, `<data_dir>/tokenizers/<name>/<version>/<kind>/` (bpe: `byte-bpe-<size>`) holds the trained
`tokenizer.json` and `about.json`, which describes it, with its sha256.

A tokenizer from outside is a class that has the attributes of `Tokenizer`, with keyword-only
options. One that is learned has `train(texts, *, options)`, `load(model)` and `model()` besides.
"""

import contextlib
import dataclasses
import hashlib
import inspect
import json
import logging
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import tokenizers

from qkattn.config.calls import called, digest, resolve
from qkattn.data.cache import DamagedData, check_sha256, prepared_once, read_description
from qkattn.data.tokenizers.subwords import BPETokenizer, FileTokenizer
from qkattn.data.tokenizers.tokenizer import (
    ByteTokenizer,
    CharacterTokenizer,
    IdTokenizer,
    Tokenizer,
)
from qkattn.errors import ConfigError
from qkattn.storage.files import write_atomic

KINDS: dict[str, Any] = {
    'bytes': ByteTokenizer,
    'characters': CharacterTokenizer,
    'bpe': BPETokenizer,
    'PATH.json': FileTokenizer,
    'ids': IdTokenizer,
}
METHODS = ('encode', 'decode', 'num_bytes')

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class About:
    """Where a cached vocabulary is from; size is None where the text alone decides it."""

    kind: str
    size: int | None
    text_sha256: str
    model_sha256: str
    trained_by: str


def check(kind: str) -> tuple[Any, dict[str, Any]]:
    """The class and the options that `data.tokenizer` names; that of a file is not opened.

    Raises:
      ConfigError: an unknown name or option, or an import path of something else.
    """
    if kind.endswith('.json'):
        return FileTokenizer, {'path': kind}
    return resolve(
        kind,
        KINDS,
        'data.tokenizer',
        needs=f'a class with {", ".join(METHODS)}, as qkattn.data.tokenizers.tokenizer.Tokenizer',
        fits=lambda cls: inspect.isclass(cls) and all(hasattr(cls, method) for method in METHODS),
        call=lambda cls: getattr(cls, 'train', cls),
    )


def open_tokenizer(
    data_dir: Path,
    *,
    kind: str,
    size: int,
    name: str,
    version: str,
    texts: Callable[[], Iterable[bytes]],
) -> Tokenizer:
    """The tokenizer of a corpus; trains it under `data_dir` the first time.

    A damaged cache is logged as a warning and trained again. Any number of processes may call this
    at the same time; one of them trains.

    Args:
      kind: as in `check`. Those without `train` need no training and no cache.
      size: ids, of 'bpe' only.
      name, version: of the corpus.
      texts: the training texts, always the same; called only to train.

    Raises:
      ConfigError: for an unknown kind; for a size that the text cannot fill; if there is something
        to train and `data_dir` cannot be written; if a damaged cache cannot be restored as it was.
      ValueError: if a training text is not valid UTF-8.
    """
    cls, options = check(kind)
    if not hasattr(cls, 'train'):
        return restored(kind, None)
    expected: dict[str, Any] = {'kind': kind, 'size': None}
    folder, trained_by = kind, 'qkattn'
    if kind == 'bpe':
        options, expected['size'] = {'size': size}, size
        folder, trained_by = f'byte-bpe-{size}', f'tokenizers {tokenizers.__version__}'
    elif ':' in kind:
        folder = f'{kind.partition("(")[0].replace(":", ".")}-{digest(kind)}'
    directory = data_dir / 'tokenizers' / name / version / folder
    model_path, about_path = directory / 'tokenizer.json', directory / 'about.json'

    def opened() -> Tokenizer:
        # os.path, because Path.exists raises where a directory may not be entered.
        if not os.path.exists(about_path) and not os.path.exists(model_path):
            raise FileNotFoundError(about_path)
        about = read_description(about_path, About, expected)
        check_sha256(model_path, about.model_sha256)
        return restored(kind, model_path.read_bytes())

    def train() -> None:
        log.info('Training the %s tokenizer of %s %s to %s', kind, name, version, directory)
        text_sha256 = hashlib.sha256()

        def hashed() -> Iterator[bytes]:
            for text in texts():
                # With its length, so that where one text ends and the next begins counts too.
                text_sha256.update(len(text).to_bytes(8))
                text_sha256.update(text)
                yield text

        model = cls.train(hashed(), **options).model()
        about = About(
            **expected,
            text_sha256=text_sha256.hexdigest(),
            model_sha256=hashlib.sha256(model).hexdigest(),
            trained_by=trained_by,
        )
        with contextlib.suppress(DamagedData):
            before = read_description(about_path, About, expected)
            if before.model_sha256 != about.model_sha256:
                # Ids would mean something else than in the results and models that exist.
                same = about.text_sha256 == before.text_sha256
                learned = f'{trained_by} learns another one from the same text than'
                changed = 'the training text has changed'
                reason = f'{learned} {before.trained_by}' if same else changed
                raise ConfigError(
                    f'data.tokenizer={kind!r}: the damaged vocabulary in {str(directory)!r} cannot '
                    f'be restored, because {reason}; delete that directory to train another one.'
                )
        write_atomic(model_path, model)
        # Last, because a description stands for a finished model.
        write_atomic(about_path, json.dumps(dataclasses.asdict(about), indent=2) + '\n')

    return prepared_once(directory / 'lock', opened, train)


def restored(kind: str, model: bytes | None) -> Tokenizer:
    """The tokenizer of a kind, as in `check`, from the bytes that its `model` returned, if any.

    The name of one from outside includes a digest of its options and source.

    Raises:
      ConfigError: for an unknown kind, or one whose class fails.
    """
    cls, options = check(kind)
    if model is None:
        tokenizer = called('data.tokenizer', kind, lambda: cls(**options))
    else:
        tokenizer = cls.load(model)
    if ':' in kind and not isinstance(tokenizer, FileTokenizer):
        tokenizer.name = f'{tokenizer.name}-{digest(kind)}'
    return tokenizer
