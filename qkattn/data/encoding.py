"""Documents to token ids, in this process or in several."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import as_recorded, restored
from qkattn.errors import ConfigError
from qkattn.jobs.children import end_with_parent

# Documents that a worker is given at a time: so many, or fewer of so many bytes in all.
BATCH_DOCUMENTS = 256
BATCH_BYTES = 2**20
# Batches that are given out, for each worker; the texts of no more are in memory.
BATCHES_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The ids of a document, with the separator after it, and the bytes that they stand for."""

    ids: np.ndarray
    num_bytes: int


# A ValueError says why a document cannot be encoded.
Result = Encoded | ValueError
Encode = Callable[[Iterable[bytes]], Iterator[Result]]


@contextlib.contextmanager
def encoder(kind: str, tokenizer: Tokenizer, workers: int) -> Iterator[Encode]:
    """Yields a function from documents to their results, in the order of the documents.

    `kind` is what data.tokenizer names, from which each of several workers makes the tokenizer
    again. The results do not depend on their number; one is this process itself.
    """
    if workers == 1:
        yield functools.partial(map, functools.partial(_encode, tokenizer))
        return
    model = None
    if hasattr(tokenizer, 'model'):
        model = tokenizer.model()
    pool = concurrent.futures.ProcessPoolExecutor(
        workers,
        # Not forked: threads of libraries may hold locks.
        mp_context=multiprocessing.get_context('spawn'),
        initializer=_begin,
        initargs=(os.getpid(), kind, model, tokenizer.name),
    )
    # Leaving waits for the batches that are begun.
    with pool:
        yield functools.partial(_encoded_by, pool, BATCHES_AHEAD * workers)


def _encode(tokenizer: Tokenizer, text: bytes) -> Result:
    """The result of one document; an error also where the tokenizer gives invalid ids."""
    try:
        ids = np.append(tokenizer.encode(text), tokenizer.separator)
        if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
            raise ValueError(f'it has ids outside of 0 .. {tokenizer.vocab_size - 1}')
        if np.count_nonzero(ids == tokenizer.separator) > 1:
            raise ValueError(f'its ids hold the separator, {tokenizer.separator}')
        return Encoded(ids, tokenizer.num_bytes(ids))
    except ValueError as error:
        return ValueError(str(error))


def _encoded_by(
    pool: concurrent.futures.Executor, num_ahead: int, texts: Iterable[bytes]
) -> Iterator[Result]:
    """The results of texts by the workers of a pool, at most `num_ahead` batches of them ahead."""
    pending: collections.deque[concurrent.futures.Future] = collections.deque()
    try:
        for batch in _batches(texts):
            pending.append(pool.submit(_encode_batch, batch))
            if len(pending) >= num_ahead:
                yield from pending.popleft().result()
        while pending:
            yield from pending.popleft().result()
    except concurrent.futures.BrokenExecutor as error:
        raise ConfigError(
            'a process that tokenizes was killed, perhaps for want of memory; give fewer --workers'
        ) from error


def _batches(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    """The texts in lists of BATCH_DOCUMENTS or about BATCH_BYTES."""
    batch: list[bytes] = []
    num_bytes = 0
    for text in texts:
        batch.append(text)
        num_bytes += len(text)
        if len(batch) == BATCH_DOCUMENTS or num_bytes >= BATCH_BYTES:
            yield batch
            batch = []
            num_bytes = 0
    if batch:
        yield batch


# Of a worker; set when it begins.
_tokenizer: Tokenizer | None = None


def _begin(parent: int, kind: str, model: bytes | None, name: str) -> None:
    """Called in a worker before its first batch: makes the tokenizer, whose name is known."""
    global _tokenizer
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with as_recorded(name):
        _tokenizer = restored(kind, model)
    assert _tokenizer.name == name, f'the tokenizer is {_tokenizer.name} in a worker, not {name}'


def _encode_batch(texts: list[bytes]) -> list[Result]:
    return [_encode(_tokenizer, text) for text in texts]
