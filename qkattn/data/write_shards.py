"""Writes token shards.

A shard appears under its name when it is whole, and then in the index, so a preparation that was
killed goes on behind the last one. What is written follows from text, tokenizer and `shard_tokens`.
"""

import dataclasses
import hashlib
import itertools
import logging
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from qkattn.data.cache import DamagedData
from qkattn.data.corpora.corpus import Corpus, readable
from qkattn.data.shards import (
    HEADER_BYTES,
    INDEX,
    MAGIC,
    MODEL,
    Index,
    map_shard,
    model_of,
    read_index,
)
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokens import Shard, ShardTokens, SplitInfo
from qkattn.errors import ConfigError
from qkattn.storage.files import replacing, write_atomic

RESTORE, ERRORS = 'restore the source', (RuntimeError, UnicodeError)
Document = tuple[np.ndarray, int]  # ids with the separator, and the bytes of the text

log = logging.getLogger(__name__)


def write_shards(directory: Path, plan: Index, corpus: Corpus, tokenizer: Tokenizer) -> Index:
    """Tokenizes all splits of a corpus; the caller holds a lock on the directory.

    Shards of an index that agrees with the plan (which has no splits) are kept, up to the first
    that is damaged. ConfigError for text that cannot be read or encoded, or a split without a
    document.
    """
    try:
        before = read_index(directory)
        kept = {} if before.difference(plan) else before.splits
    except DamagedData:
        kept = {}
    if (model := model_of(tokenizer)) is not None:
        write_atomic(directory / MODEL, model)
    with readable(corpus.name, RESTORE, *ERRORS):
        documents = corpus.documents(None)
    splits: dict[str, SplitInfo] = {}
    for split in corpus.splits:
        shards = list(_whole(directory, plan, kept[split].shards if split in kept else ()))
        skip = sum(shard.num_documents for shard in shards)
        source = f'split {split!r} of {plan.name}'
        encoded = _encoded(documents[split], source, tokenizer, plan.dtype, skip)
        named = corpus.names is not None and split != 'train'
        names = tuple(corpus.names(split)) if named else None
        written = _write(directory, plan, split, encoded, len(shards))
        for splits[split] in _infos(directory, plan, itertools.chain(shards, written), names):
            write_atomic(directory / INDEX, dataclasses.replace(plan, splits=splits).text())
        if split not in splits:
            raise ConfigError(f'{source} has no document; give it text')
    index = dataclasses.replace(plan, complete=True, splits=splits)
    write_atomic(directory / INDEX, index.text())
    return index


def _whole(directory: Path, plan: Index, shards: Iterable[Shard]) -> Iterator[Shard]:
    """The shards up to the first that is damaged."""
    for shard in shards:
        try:
            map_shard(directory, plan, shard, compare=True)
        except DamagedData as error:
            log.warning('%s; it is written again', error)
            return
        yield shard


def _encoded(
    texts: Iterable[bytes], source: str, tokenizer: Tokenizer, dtype: str, skip: int
) -> Iterator[Document]:
    """The documents behind the first `skip`."""
    with readable(source, RESTORE, *ERRORS):
        for number, text in enumerate(itertools.islice(texts, skip, None), start=skip + 1):
            try:
                ids = np.append(tokenizer.encode(text), tokenizer.separator)
            except ValueError as error:
                raise ConfigError(
                    f'document {number} of {source} cannot be encoded: {error}'
                ) from error
            yield ids.astype(dtype), tokenizer.num_bytes(ids)


def _write(
    directory: Path, plan: Index, split: str, documents: Iterator[Document], number: int
) -> Iterator[Shard]:
    """Writes shards from a number on, each up to the document that reaches `shard_tokens`."""
    for first in documents:
        path = directory / f'{split}_{number:06d}.bin'
        digest, num_tokens, num_documents, num_bytes = hashlib.sha256(), 0, 0, 0
        with replacing(path) as temporary, temporary.open('wb') as file:
            file.write(bytes(HEADER_BYTES))
            for ids, size in itertools.chain([first], documents):
                file.write(ids.tobytes())
                digest.update(ids.tobytes())
                num_tokens, num_documents = num_tokens + len(ids), num_documents + 1
                num_bytes += size
                if num_tokens >= plan.shard_tokens:
                    break
            file.seek(0)
            file.write(np.array([*MAGIC[plan.dtype], num_tokens % 2**32], '<u4').tobytes())
        log.info('%s: %s tokens', path, f'{num_tokens:,}')
        yield Shard(
            num_tokens=num_tokens,
            num_documents=num_documents,
            num_bytes=num_bytes,
            sha256=digest.hexdigest(),
            file=path.name,
        )
        number += 1


def _infos(
    directory: Path, plan: Index, shards: Iterable[Shard], names: tuple[str, ...] | None
) -> Iterator[SplitInfo]:
    """The split after each of its shards."""
    digest, counts_V = hashlib.sha256(), np.zeros(plan.vocab_size, np.int64)
    listed: list[Shard] = []
    for shard in shards:
        for ids in ShardTokens([map_shard(directory, plan, shard, compare=False)]).blocks():
            digest.update(ids.data)
            counts_V += np.bincount(ids, minlength=plan.vocab_size)
        listed.append(shard)
        yield SplitInfo(
            num_documents=sum(shard.num_documents for shard in listed),
            document_names=names,
            num_tokens=sum(shard.num_tokens for shard in listed),
            num_bytes=sum(shard.num_bytes for shard in listed),
            unigram_nats_per_token=_entropy(counts_V),
            fingerprint=digest.hexdigest(),
            shards=tuple(listed),
        )


def _entropy(counts_V: np.ndarray) -> float:
    """Entropy of the frequencies of ids, in nats per token."""
    frequencies = counts_V[counts_V > 0] / counts_V.sum()
    return -float(np.sum(frequencies * np.log(frequencies)))
