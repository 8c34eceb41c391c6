"""Tokenizes documents in worker processes, in the order in which they come."""

import collections
import concurrent.futures
import contextlib
import dataclasses
import itertools
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import restored
from qkattn.errors import ConfigError

# What a worker gets at a time: bytes of text, or documents.
CHUNK_BYTES, CHUNK_DOCUMENTS = 1 << 20, 4096

Chunk = tuple[int, list[bytes]]  # the number of the first document, and texts


@dataclasses.dataclass(frozen=True)
class Encoded:
    """Documents one after another, a separator after each.

    Attributes:
      ids: of all of them, in the dtype of the shards.
      ends: the position after each document's separator.
      num_bytes: of text, of each document, one for its separator.
    """

    ids: np.ndarray
    ends: np.ndarray
    num_bytes: np.ndarray


Encode = Callable[[Chunk], Encoded]
# Maps chunks to what they encode to, lazily and in their order.
Encoder = Callable[[Iterable[Chunk]], Iterator[Encoded]]


def chunks(documents: Iterable[bytes], skip: int = 0) -> Iterator[Chunk]:
    """The documents behind the first `skip`, a few at a time."""
    texts: list[bytes] = []
    size, first = 0, skip
    for text in itertools.islice(documents, skip, None):
        texts.append(text)
        size += len(text)
        if size >= CHUNK_BYTES or len(texts) >= CHUNK_DOCUMENTS:
            yield first, texts
            first, texts, size = first + len(texts), [], 0
    if texts:
        yield first, texts


def encode(tokenizer: Tokenizer, dtype: str, chunk: Chunk) -> Encoded:
    """Tokenizes a chunk.

    Raises:
      ConfigError: a document that the tokenizer refuses.
    """
    first, texts = chunk
    parts, num_bytes = [], []
    for number, text in enumerate(texts, start=first + 1):
        try:
            ids = np.append(tokenizer.encode(text), tokenizer.separator)
        except ValueError as error:
            raise ConfigError(f'document {number} cannot be encoded: {error}') from error
        parts.append(ids.astype(dtype))
        num_bytes.append(tokenizer.num_bytes(ids))
    ends = np.cumsum([len(ids) for ids in parts])
    return Encoded(np.concatenate(parts), ends, np.array(num_bytes))


@contextlib.contextmanager
def encoder(workers: int, kind: str, model: bytes | None, dtype: str) -> Iterator[Encoder]:
    """Yields an encoder in this many processes; of one, in this process.

    A worker ends when this process does, however it does.

    Args:
      kind, model: as of `vocabulary.restored`.
      dtype: of the ids.
    """
    if workers == 1:
        tokenizer = restored(kind, model)
        yield lambda chunks: (encode(tokenizer, dtype, chunk) for chunk in chunks)
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        workers,
        # Not forked: the tokenizers' own threads do not survive a fork.
        multiprocessing.get_context('spawn'),
        initializer=_start,
        initargs=(kind, model, dtype),
    )

    def encoded(chunks: Iterable[Chunk]) -> Iterator[Encoded]:
        pending: collections.deque[concurrent.futures.Future] = collections.deque()
        for chunk in chunks:
            pending.append(pool.submit(_encode, chunk))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    try:
        yield encoded
    finally:
        pool.shutdown(cancel_futures=True)


def _start(kind: str, model: bytes | None, dtype: str) -> None:
    """Prepares a worker process."""
    global _worker
    # One thread per process: the processes share out the cores.
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'
    # Ctrl-C goes to all processes; the one that writes decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    tokenizer = restored(kind, model)
    _worker = lambda chunk: encode(tokenizer, dtype, chunk)  # noqa: E731


def _leave_with_parent() -> None:
    # The queues of a pool stay open in its other workers when the parent is killed.
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


_worker: Encode


def _encode(chunk: Chunk) -> Encoded:
    return _worker(chunk)
