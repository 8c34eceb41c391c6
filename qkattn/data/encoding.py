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

# A worker encodes a batch of documents at a time. It ends after this many documents or bytes.
BATCH_DOCUMENTS = 256
BATCH_BYTES = 2**20
# How many batches per worker are in memory at a time.
BATCHES_AHEAD = 2


@dataclasses.dataclass(frozen=True)
class Encoded:
    """The ids of a document, with the separator at the end, and how many bytes they stand for."""

    ids: np.ndarray
    num_bytes: int


# The result for one document. A ValueError says why it cannot be encoded.
Result = Encoded | ValueError
# A function that takes documents and yields the result for each of them, in their order.
Encode = Callable[[Iterable[bytes]], Iterator[Result]]


@contextlib.contextmanager
def encoder(kind: str, tokenizer: Tokenizer, workers: int) -> Iterator[Encode]:
    """Context manager that yields a function to encode documents.

    Args:
      kind: the value of data.tokenizer.
      tokenizer: the tokenizer of this kind. Each worker process makes its own copy.
      workers: the number of worker processes; 1 encodes in this process. Results are the same.
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
    """Encodes one document.

    If the text cannot be encoded, or the tokenizer gives invalid ids, a ValueError is returned and
    not raised. The caller raises it with the number of the document, which it knows.
    """
    try:
        ids = np.append(tokenizer.encode(text), tokenizer.separator)
        if ids.min() < 0 or ids.max() >= tokenizer.vocab_size:
            raise ValueError(f'it has ids outside of 0 .. {tokenizer.vocab_size - 1}')
        if np.count_nonzero(ids == tokenizer.separator) > 1:
            raise ValueError(f'its ids hold the separator, {tokenizer.separator}')
        return Encoded(ids, tokenizer.num_bytes(ids))
    except ValueError as error:
        return ValueError(str(error))


def _encode_in_pool(
    pool: concurrent.futures.Executor, num_ahead: int, texts: Iterable[bytes]
) -> Iterator[Result]:
    """Encodes texts with the workers of a pool, and yields the results in the order of the texts.

    At most `num_ahead` batches are waiting or being encoded at a time. Raises ConfigError if a
    worker was killed.
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
    """Groups texts into lists of BATCH_DOCUMENTS texts, or fewer if they reach BATCH_BYTES."""
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


# The tokenizer of this process, if it is a worker. `_begin_worker` sets it.
_tokenizer: Tokenizer | None = None


def _begin_worker(parent: int, kind: str, model: bytes | None, name: str) -> None:
    """Makes the tokenizer of a worker, before its first batch.

    Args:
      parent: the id of the process that started the worker. The worker ends with it.
      kind: the value of data.tokenizer.
      model: what the method `model` of a learned tokenizer has returned; None for others.
      name: the name of the tokenizer in the parent, which the one of the worker must have.
    """
    global _tokenizer
    end_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    with use_recorded_tokenizers(name):
        _tokenizer = restore_tokenizer(kind, model)
    assert _tokenizer.name == name, f'the tokenizer is {_tokenizer.name} in a worker, not {name}'


def _encode_batch(texts: list[bytes]) -> list[Result]:
    """Encodes a batch of documents in a worker."""
    return [_encode(_tokenizer, text) for text in texts]
