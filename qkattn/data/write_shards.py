"""Writes token shards: `SPLIT_NUMBER.bin` of whole documents, and their index.

A shard appears under its name when it is whole, so a preparation that was killed goes on behind the
last one. What is written follows from text, tokenizer and `shard_tokens` alone.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import hashlib
import itertools
import logging
import multiprocessing
import multiprocessing.connection
import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from qkattn.data.cache import DamagedData
from qkattn.data.corpora.corpus import Corpus
from qkattn.data.open_shards import INDEX, MODEL, Index, model_of, read_index
from qkattn.data.shard_files import HEADER_BYTES, Shard, ShardTokens, files_at, shard_of
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import restored
from qkattn.data.tokens import SplitInfo, entropy
from qkattn.errors import ConfigError
from qkattn.storage.files import replacing, write_atomic

# What is tokenized at a time: bytes of text, or documents.
CHUNK_BYTES, CHUNK_DOCUMENTS = 1 << 20, 4096
# Seconds between two lines that say how far a shard is.
REPORT_SECONDS = 10.0

Chunk = tuple[str, int, list[bytes]]  # the source, number of the first document, texts
# Ids of documents one after another, the end of each, and its bytes of text, with one for its
# separator, the last id of each.
Encoded = tuple[np.ndarray, np.ndarray, np.ndarray]

log = logging.getLogger(__name__)


def write_shards(
    directory: Path, plan: Index, corpus: Corpus, tokenizer: Tokenizer, workers: int = 1
) -> Index:
    """Tokenizes all splits of a corpus; the caller holds a lock on the directory.

    Shards of an index that agrees with the plan are kept, up to the first that is damaged.

    Args:
      plan: an index without splits.
      workers: processes that tokenize.

    Raises:
      ConfigError: text that cannot be read or encoded, a split without a document.
    """
    for left in directory.glob('.*.tmp'):  # of a killed `write_atomic`
        left.unlink()
    try:
        keep = not any(read_index(files_at(str(directory))).differences(plan))
    except DamagedData:
        keep = False
    if (model := model_of(tokenizer)) is not None:
        write_atomic(directory / MODEL, model)
    write_atomic(directory / INDEX, plan.text())
    with _reading(corpus.name):
        documents = corpus.documents(None)
    splits = {}
    with _encoder(tokenizer, plan, workers) as encode:
        for split in corpus.splits:
            named = corpus.names is not None and split != 'train'
            names = tuple(corpus.names(split)) if named else None
            writer = _SplitWriter(directory, plan, split)
            splits[split] = writer.write(documents[split], encode, names, keep)
    index = dataclasses.replace(plan, complete=True, splits=splits)
    write_atomic(directory / INDEX, index.text())
    return index


class _SplitWriter:
    """Writes the shards of one split, and counts what is in them."""

    def __init__(self, directory: Path, plan: Index, split: str):
        self._files, self._directory, self._plan = files_at(str(directory)), directory, plan
        self._split, self._source = split, f'split {split!r} of {plan.name}'
        self._shards: list[Shard] = []
        self._digest, self._counts_V = hashlib.sha256(), np.zeros(plan.vocab_size, np.int64)

    def write(
        self,
        texts: Iterable[bytes],
        encode: Callable[[Iterable[Chunk]], Iterable[Encoded]],
        names: tuple[str, ...] | None,
        keep: bool,
    ) -> SplitInfo:
        """Writes the documents behind those of the shards that are kept."""
        if keep:
            self._keep()
        encoded = encode(_chunks(texts, self._source, self._total('num_documents')))
        documents = (
            (ids[begin:end], int(size))
            for ids, ends, num_bytes in encoded
            for begin, end, size in zip([0, *ends[:-1]], ends, num_bytes, strict=True)
        )
        for first in documents:
            self._write_shard(itertools.chain([first], documents))
        if not self._shards:
            raise ConfigError(f'{self._source} has no document; give it text')
        return SplitInfo(
            num_documents=self._total('num_documents'),
            document_names=names,
            num_tokens=self._total('num_tokens'),
            num_bytes=self._total('num_bytes'),
            unigram_nats_per_token=entropy(self._counts_V),
            fingerprint=self._digest.hexdigest(),
            shards=tuple(self._shards),
        )

    def _total(self, field: str) -> int:
        return sum(getattr(shard, field) for shard in self._shards)

    def _next_file(self) -> str:
        return f'{self._split}_{len(self._shards):06d}.bin'

    def _add(self, shard: Shard) -> None:
        # Mapped anew: a damaged file of the same header may have been there before.
        for ids in ShardTokens(files_at(str(self._directory)), [shard]).blocks():
            self._digest.update(ids.tobytes())
            self._counts_V += np.bincount(ids, minlength=self._plan.vocab_size)
        self._shards.append(shard)

    def _keep(self) -> None:
        sizes, where = self._files.sizes(), self._files.where
        while (file := self._next_file()) in sizes:
            (head,) = self._files.read([file], HEADER_BYTES)
            try:
                shard = shard_of(file, sizes[file], head, where)
                damaged = ShardTokens(self._files, [shard]).sha256() != shard.sha256
            except ConfigError:
                damaged = True
            if damaged:
                log.warning('%s/%s is damaged and written again', where, file)
                break
            self._add(shard)
        if self._shards:
            there = f'{self._total("num_tokens"):,}'
            log.info('%s: %s tokens of %s are there', where, there, self._split)

    def _write_shard(self, documents: Iterable[tuple[np.ndarray, int]]) -> None:
        """Writes documents up to the one that reaches `shard_tokens`."""
        digest, num_tokens, num_documents, num_bytes = hashlib.sha256(), 0, 0, 0
        path = self._directory / self._next_file()
        start = reported = time.monotonic()
        with replacing(path) as temporary, temporary.open('wb') as file:
            file.write(bytes(HEADER_BYTES))
            for ids, size in documents:
                data = ids.tobytes()
                file.write(data)
                digest.update(data)
                num_tokens, num_documents = num_tokens + len(ids), num_documents + 1
                num_bytes += size
                if (now := time.monotonic()) - reported > REPORT_SECONDS:
                    count, rate = f'{num_tokens:,}', f'{num_tokens / (now - start):,.0f}'
                    log.info('%s: %s tokens, %s tokens/s', path, count, rate)
                    reported = now
                if num_tokens >= self._plan.shard_tokens:
                    break
            shard = Shard(
                num_tokens=num_tokens,
                num_documents=num_documents,
                num_bytes=num_bytes,
                sha256=digest.hexdigest(),
                file=path.name,
                dtype=self._plan.dtype,
            )
            file.seek(0)
            file.write(shard.header())
        self._add(shard)


def _chunks(documents: Iterable[bytes], source: str, skip: int = 0) -> Iterator[Chunk]:
    """The documents behind the first `skip`, a few at a time."""
    texts: list[bytes] = []
    size, first = 0, skip
    with _reading(source):
        for text in itertools.islice(documents, skip, None):
            texts.append(text)
            size += len(text)
            if size >= CHUNK_BYTES or len(texts) >= CHUNK_DOCUMENTS:
                yield source, first, texts
                first, texts, size = first + len(texts), [], 0
    if texts:
        yield source, first, texts


@contextlib.contextmanager
def _reading(source: str) -> Iterator[None]:
    """A block that reads text; ConfigError where it cannot."""
    try:
        yield
    except ConfigError:
        raise
    except (OSError, RuntimeError, UnicodeError) as error:
        reason = ' '.join(str(error).split())
        raise ConfigError(f'{source} cannot be read ({reason}); restore the source') from error


def _encoded(tokenizer: Tokenizer, dtype: str, chunk: Chunk) -> Encoded:
    source, first, texts = chunk
    parts, num_bytes = [], []
    for number, text in enumerate(texts, start=first + 1):
        try:
            ids = np.append(tokenizer.encode(text), tokenizer.separator)
        except ValueError as error:
            raise ConfigError(
                f'document {number} of {source} cannot be encoded: {error}'
            ) from error
        parts.append(ids.astype(dtype))
        num_bytes.append(tokenizer.num_bytes(ids))
    return np.concatenate(parts), np.cumsum([len(ids) for ids in parts]), np.array(num_bytes)


@contextlib.contextmanager
def _encoder(
    tokenizer: Tokenizer, plan: Index, workers: int
) -> Iterator[Callable[[Iterable[Chunk]], Iterable[Encoded]]]:
    """Yields a lazy map over chunks, in their order, in several processes or in this one.

    A worker ends when this process does, however it does.
    """
    if workers == 1:
        yield functools.partial(map, functools.partial(_encoded, tokenizer, plan.dtype))
        return
    pool = concurrent.futures.ProcessPoolExecutor(
        workers,
        # Not forked: the tokenizers' own threads do not survive a fork.
        multiprocessing.get_context('spawn'),
        initializer=_start_worker,
        initargs=(plan.tokenizer, model_of(tokenizer), plan.dtype),
    )

    def encode(chunks: Iterable[Chunk]) -> Iterator[Encoded]:
        pending: collections.deque[concurrent.futures.Future] = collections.deque()
        for chunk in chunks:
            pending.append(pool.submit(_encoded_in_worker, chunk))
            if len(pending) > 2 * workers:
                yield pending.popleft().result()
        while pending:
            yield pending.popleft().result()

    try:
        yield encode
    finally:
        pool.shutdown(cancel_futures=True)


def _start_worker(kind: str, model: bytes | None, dtype: str) -> None:
    global _worker
    # One thread per process: the processes share out the cores.
    os.environ['TOKENIZERS_PARALLELISM'] = 'false'
    # Ctrl-C goes to all processes; the one that writes decides.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    threading.Thread(target=_leave_with_parent, daemon=True).start()
    _worker = functools.partial(_encoded, restored(kind, model), dtype)


def _leave_with_parent() -> None:
    # The queues of a pool stay open in its other workers when the parent is killed.
    multiprocessing.connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


_worker: Callable[[Chunk], Encoded]


def _encoded_in_worker(chunk: Chunk) -> Encoded:
    return _worker(chunk)
