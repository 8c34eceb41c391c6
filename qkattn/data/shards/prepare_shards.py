"""Makes token shards: `SPLIT_NUMBER.bin` of whole documents, and their index.

A shard appears under its name when it is whole, so a preparation that was killed goes on behind the
last one. What is written follows from text, tokenizer and `shard_tokens` alone.
"""

import dataclasses
import hashlib
import itertools
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import tqdm

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import Corpus
from qkattn.data.corpora.corpus_registry import find
from qkattn.data.load import tokenizer_of
from qkattn.data.shards.encoding import Encoded, Encoder, chunks, encoder
from qkattn.data.shards.shard_files import (
    HEADER_BYTES,
    Counts,
    Files,
    Shard,
    ShardTokens,
    counts_of,
    files_at,
    header,
    sha256_of_tokens,
)
from qkattn.data.shards.shard_index import (
    INDEX,
    MODEL,
    SCHEMA,
    Index,
    IndexedShard,
    IndexedSplit,
    kind_of,
    read_index,
)
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokens import entropy
from qkattn.errors import ConfigError
from qkattn.storage.files import expanded, replacing, write_atomic
from qkattn.storage.leases import locked

SHARD_TOKENS = 100_000_000

log = logging.getLogger(__name__)


def prepare(config: DataConfig, out: str, *, workers: int, shard_tokens: int) -> Index:
    """Tokenizes all splits of a dataset into shards below `out`, or goes on with that.

    Args:
      workers: processes that tokenize.
      shard_tokens: a shard is closed behind the document that reaches so many.

    Raises:
      ConfigError: a dataset that cannot be read, is a translation set, or lacks text; a directory
        that cannot be written, holds other shards, or is being prepared by another process.
    """
    _check(config, out, workers, shard_tokens)
    try:
        corpus, tokenizer = find(config), tokenizer_of(config)
    except ConfigError:
        raise
    except ValueError as error:  # a tokenizer that cannot be learned from the text
        raise ConfigError(f'data.name={config.name!r} cannot be tokenized: {error}') from error
    directory = expanded(out)
    try:
        with locked(directory / 'lock', wait=False):
            for left in directory.glob('.*.tmp'):  # of a killed `write_atomic`
                left.unlink()
            return _prepared(config, corpus, tokenizer, directory, workers, shard_tokens)
    except BlockingIOError as error:
        raise ConfigError(
            f'--out={out} is being prepared by another process; wait until it has finished'
        ) from error


def verify(out: str) -> Iterator[str]:
    """Reads all shards; yields a sentence for each that is missing or damaged.

    Raises:
      ConfigError: the index cannot be read, or is not complete.
    """
    files = files_at(out)
    sizes = files.sizes()
    index = read_index(files)
    if not index.complete:
        raise ConfigError(f'--out={out} is not finished; the same command without --verify goes on')
    for split, found in index.splits.items():
        for shard, indexed in zip(index.shards(split), found.shards, strict=True):
            if sizes.get(shard.file) is None:
                yield f'{out}/{shard.file} is missing'
            elif sizes[shard.file] != shard.size:
                yield f'{out}/{shard.file} is damaged: {sizes[shard.file]:,} bytes'
            elif sha256_of_tokens(files, shard) != indexed.sha256:
                yield f'{out}/{shard.file} is damaged: its sha256 is not that in {INDEX}'


def _check(config: DataConfig, out: str, workers: int, shard_tokens: int) -> None:
    if '://' in out:
        raise ConfigError(
            f'--out={out} is a URL; prepare the shards in a local directory and copy it, for '
            f'example with gcloud storage cp -r DIRECTORY {out}'
        )
    for flag, value in (('workers', workers), ('shard_tokens', shard_tokens)):
        if value < 1:
            raise ConfigError(f'--{flag}={value} must be at least 1')
    if config.name == 'shards':
        raise ConfigError("data.name='shards' is tokenized already; name the text")
    if config.languages:
        raise ConfigError(
            f'data.languages={config.languages!r} is a translation set; shards hold text in one '
            'language'
        )


def _prepared(
    config: DataConfig,
    corpus: Corpus,
    tokenizer: Tokenizer,
    directory: Path,
    workers: int,
    shard_tokens: int,
) -> Index:
    model = tokenizer.model() if hasattr(tokenizer, 'model') else None
    plan = Index(
        schema=SCHEMA,
        name=corpus.name,
        version=corpus.version,
        carved=dict(corpus.carved),
        tokenizer=kind_of(config),
        tokenizer_name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        separator=tokenizer.separator,
        model_sha256=None if model is None else hashlib.sha256(model).hexdigest(),
        dtype='uint16' if tokenizer.vocab_size <= 2**16 else 'uint32',
        shard_tokens=shard_tokens,
        complete=False,
        splits={},
    )
    files = files_at(str(directory))
    sizes = files.sizes()
    if INDEX in sizes:
        found = read_index(files)
        _check_same(plan, found, directory)
        if found.complete and all(
            sizes.get(shard.file) == shard.size
            for split in found.splits
            for shard in found.shards(split)
        ):
            log.info('%s is complete', directory)
            return found
    if model is not None:
        write_atomic(directory / MODEL, model)
    write_atomic(directory / INDEX, plan.text())
    with encoder(workers, config.tokenizer, model, plan.dtype) as encoded:
        splits = {
            split: _split(plan, corpus, split, files, directory, encoded) for split in corpus.splits
        }
    index = dataclasses.replace(plan, complete=True, splits=splits)
    write_atomic(directory / INDEX, index.text())
    return index


def _check_same(plan: Index, found: Index, directory: Path) -> None:
    for field in dataclasses.fields(Index):
        old, new = getattr(found, field.name), getattr(plan, field.name)
        if field.name not in ('complete', 'splits') and old != new:
            raise ConfigError(
                f'--out={directory} holds shards with {field.name}={old!r}, not {new!r}; give '
                'another directory'
            )


class _Totals:
    """What is known of a split so far."""

    def __init__(self, vocab_size: int):
        self.shards: list[IndexedShard] = []
        self.digest = hashlib.sha256()
        self.counts_V = np.zeros(vocab_size, np.int64)
        self.start, self.written = time.monotonic(), 0

    def sum(self, field: str) -> int:
        return sum(getattr(shard, field) for shard in self.shards)


def _split(
    plan: Index, corpus: Corpus, split: str, files: Files, directory: Path, encoded: Encoder
) -> IndexedSplit:
    """Writes the shards of a split behind those that are there."""
    totals = _Totals(plan.vocab_size)
    while _kept(plan, totals, files, f'{split}_{len(totals.shards):06d}.bin'):
        pass
    if totals.shards:
        num_tokens = f'{totals.sum("num_tokens"):,}'
        log.info('%s: %s tokens of %s are there', directory, num_tokens, split)
    left = chunks(_texts(corpus, split), totals.sum('num_documents'))
    pieces = _cut(encoded(left), plan.shard_tokens)
    with tqdm.tqdm(desc=split, unit=' tokens', unit_scale=True, disable=None) as bar:
        for piece in pieces:
            _write(plan, totals, split, directory, itertools.chain([piece], pieces), bar)
    if not totals.shards:
        raise ConfigError(f'{corpus.name} has no document in split {split!r}; give it text')
    named = corpus.names is not None and split != 'train'
    return IndexedSplit(
        num_documents=totals.sum('num_documents'),
        document_names=corpus.names(split) if named else None,
        num_tokens=totals.sum('num_tokens'),
        num_bytes=totals.sum('num_bytes'),
        unigram_nats_per_token=entropy(totals.counts_V),
        fingerprint=totals.digest.hexdigest(),
        shards=totals.shards,
    )


def _texts(corpus: Corpus, split: str) -> Iterator[bytes]:
    """The documents of a split; ConfigError where they cannot be read."""
    try:
        yield from corpus.documents(None)[split]
    except ConfigError:
        raise
    except (OSError, RuntimeError, UnicodeError) as error:
        reason = ' '.join(str(error).split())
        raise ConfigError(
            f'split {split!r} of {corpus.name} cannot be read ({reason}); restore the source'
        ) from error


def _kept(plan: Index, totals: _Totals, files: Files, file: str) -> bool:
    """Adds a shard to the totals if it is there, whole and undamaged."""
    size = files.sizes().get(file)
    if size is None:
        return False
    counts = counts_of(files.heads([file], HEADER_BYTES)[0].ljust(HEADER_BYTES, b'\0'))
    shard = Shard(file=file, num_tokens=counts.num_tokens, dtype=plan.dtype)
    if size != shard.size or sha256_of_tokens(files, shard) != counts.sha256:
        log.warning('%s/%s is damaged and written again', files.where, file)
        return False
    tokens = ShardTokens(files, [shard])
    for ids in tokens.blocks():
        totals.digest.update(ids.astype(plan.dtype).tobytes())
        totals.counts_V += np.bincount(ids, minlength=plan.vocab_size)
    totals.shards.append(IndexedShard(file=file, **dataclasses.asdict(counts)))
    return True


class _Piece(NamedTuple):
    """Documents of one shard, the last ones if it `closes`."""

    ids: np.ndarray
    num_documents: int
    num_bytes: int
    closes: bool


def _cut(encoded: Iterator[Encoded], shard_tokens: int) -> Iterator[_Piece]:
    """The documents in pieces that each lie in one shard."""
    filled = 0
    for part in encoded:
        low, count = 0, len(part.ends)  # documents
        while low < count:
            begin = int(part.ends[low - 1]) if low else 0
            high = int(np.searchsorted(part.ends, begin + shard_tokens - filled)) + 1
            closes, high = high <= count, min(high, count)
            ids = part.ids[begin : part.ends[high - 1]]
            yield _Piece(ids, high - low, int(part.num_bytes[low:high].sum()), closes)
            filled = 0 if closes else filled + len(ids)
            low = high


def _write(
    plan: Index,
    totals: _Totals,
    split: str,
    directory: Path,
    pieces: Iterator[_Piece],
    bar: tqdm.tqdm,
) -> None:
    """Writes the next shard."""
    file = f'{split}_{len(totals.shards):06d}.bin'
    own, num_tokens, num_documents, num_bytes = hashlib.sha256(), 0, 0, 0
    with replacing(directory / file) as path, path.open('wb') as out:
        out.write(bytes(HEADER_BYTES))
        for piece in pieces:
            data = piece.ids.tobytes()
            out.write(data)
            own.update(data)
            totals.digest.update(data)
            totals.counts_V += np.bincount(piece.ids, minlength=plan.vocab_size)
            num_tokens += len(piece.ids)
            num_documents += piece.num_documents
            num_bytes += piece.num_bytes
            bar.update(len(piece.ids))
            if piece.closes:
                break
        counts = Counts(
            num_tokens=num_tokens,
            num_documents=num_documents,
            num_bytes=num_bytes,
            sha256=own.hexdigest(),
        )
        out.seek(0)
        out.write(header(plan.dtype, counts))
    totals.shards.append(IndexedShard(file=file, **dataclasses.asdict(counts)))
    totals.written += num_tokens
    rate = totals.written / max(time.monotonic() - totals.start, 1e-9)
    bar.clear()
    log.info('%s: %s tokens, %s tokens/s', directory / file, f'{num_tokens:,}', f'{rate:,.0f}')
    bar.refresh()
