"""Encodes documents as token ids, in this process or in several."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import multiprocessing
import os
import signal
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import restore_tokenizer, use_recorded_tokenizers
from qkattn.errors import ConfigError
from qkattn.jobs.children import end_with_parent

# A worker encodes a batch of documents at a time, which ends at either limit.
BATCH_DOCUMENTS = 256
BATCH_BYTES = 2**20
# Batches per worker that are waiting or being encoded.
BATCHES_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Encoded:
    """A document as token ids."""

    ids: np.ndarray  # ends with the separator
    num_bytes: int  # of text


# The result for one document; the ValueError if encoding failed.
Result = Encoded | ValueError
# A function from documents to their results, in order.
Encode = Callable[[Iterable[bytes]], Iterator[Result]]


@contextlib.contextmanager
def encoder(kind: str, tokenizer: Tokenizer, workers: int) -> Iterator[Encode]:
    """Context manager that yields a function to encode documents.

    Args:
        kind: The value of data.tokenizer.
        tokenizer: The tokenizer of this kind. Each worker process makes its own copy.
        workers: The number of worker processes; 1 encodes in this process, with equal results.
    """
    if workers == 1:

        def encode_here(texts: Iterable[bytes]) -> Iterator[Result]:
            for text in texts:
                yield _encode(tokenizer, text)

        yield encode_here
        return

    # Tokenizers that `kind` describes completely have no `model`.
    vocabulary = tokenizer.model() if hasattr(tokenizer, 'model') else None
    parent_pid = os.getpid()  # workers exit when this process ends
    pool = concurrent.futures.ProcessPoolExecutor(
        max_workers=workers,
        # A fork could copy locks that threads of libraries hold.
        mp_context=multiprocessing.get_context('spawn'),
        initializer=_begin_worker,
        initargs=(parent_pid, kind, vocabulary, tokenizer.name),
    )

    def encode_by_workers(texts: Iterable[bytes]) -> Iterator[Result]:
        return _encode_in_pool(pool, num_ahead=BATCHES_AHEAD * workers, texts=texts)

    with pool:
        yield encode_by_workers


def _encode(tokenizer: Tokenizer, text: bytes) -> Result:
    """Encodes one document, or returns a ValueError if encoding fails or gives invalid ids."""
    try:
        ids_of_text = np.asarray(tokenizer.encode(text))
        has_ids = ids_of_text.size > 0  # an empty list becomes an array of floats
        if has_ids and not np.issubdtype(ids_of_text.dtype, np.integer):
            raise ValueError(f'its ids are {ids_of_text.dtype}; they must be of an integer type')
        ids = np.append(ids_of_text, tokenizer.separator)
        if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
            raise ValueError(f'it has ids outside of 0 .. {tokenizer.vocab_size - 1}')
        num_separators = np.count_nonzero(ids == tokenizer.separator)
        if num_separators > 1:
            raise ValueError(f'its ids hold the separator, {tokenizer.separator}')
        return Encoded(ids, num_bytes=tokenizer.num_bytes(ids))
    except ValueError as error:
        # Worker processes pickle results, and a subclass of ValueError may not be picklable.
        return ValueError(str(error))


def _encode_in_pool(
    pool: concurrent.futures.Executor, num_ahead: int, texts: Iterable[bytes]
) -> Iterator[Result]:
    """Encodes texts in a pool of workers, and yields the results in order.

    Args:
        pool: The workers.
        num_ahead: The most batches that are waiting or being encoded.
        texts: The documents.

    Raises:
        ConfigError: A worker was killed.
    """
    pending: collections.deque[concurrent.futures.Future] = collections.deque()
    try:
        for batch in _batches(texts):
            pending.append(pool.submit(_encode_batch, batch))
            if len(pending) >= num_ahead:
                oldest = pending.popleft()
                yield from oldest.result()
        while pending:
            oldest = pending.popleft()
            yield from oldest.result()
    except concurrent.futures.BrokenExecutor as error:
        raise ConfigError(
            'a process that tokenizes was killed, perhaps for want of memory; give fewer --workers'
        ) from error


def _batches(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    """Groups texts into lists, each ending at BATCH_DOCUMENTS texts or BATCH_BYTES bytes."""
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


# In a worker process, its tokenizer.
_tokenizer: Tokenizer | None = None


def _begin_worker(parent_pid: int, kind: str, vocabulary: bytes | None, name: str) -> None:
    """Initializes a worker process with its copy of the tokenizer.

    Args:
        parent_pid: The process ID of the parent. The worker exits with the parent.
        kind: The value of data.tokenizer.
        vocabulary: The vocabulary of a learned tokenizer, else None.
        name: The tokenizer's name in the parent. The copy must have the same name.
    """
    global _tokenizer
    end_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    # A tokenizer.json allows two separators between documents. The name tells which one.
    with use_recorded_tokenizers(name):
        _tokenizer = restore_tokenizer(kind, vocabulary)
    assert _tokenizer.name == name, f'the tokenizer is {_tokenizer.name} in a worker, not {name}'


def _encode_batch(texts: list[bytes]) -> list[Result]:
    """Encodes a batch of documents with the tokenizer of this worker process."""
    return [_encode(_tokenizer, text) for text in texts]
