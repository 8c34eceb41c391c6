"""Tokens on disk: a directory of `SPLIT.bin`, `tokens.json` and, maybe, `tokenizer.json`.

`SPLIT.bin` holds the ids of a split in the narrowest unsigned type, a separator after each
document, without a header. `tokenizer.json` is a vocabulary that is learned or read from a file.
"""

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Literal

import numpy as np

from qkattn.config import DataConfig
from qkattn.config.paths import open_regular, require_regular
from qkattn.data.cache import DamagedData, local_directory, require_preparing
from qkattn.data.corpora.corpus import SPLITS, Corpus, readable
from qkattn.data.encoding import Encoded, Result, encoder
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import as_recorded, is_import_path, restored
from qkattn.data.tokens import BLOCK, SplitInfo, TokenDataset, TokenIds, entropy
from qkattn.errors import ConfigError
from qkattn.storage.files import read_whole, replacing, write_atomic
from qkattn.storage.records import parse_file, read

INDEX = 'tokens.json'
MODEL = 'tokenizer.json'
# The advice where a corpus cannot be read, and what its libraries raise then besides OSError.
RESTORE = 'restore the source'
READ_ERRORS = (RuntimeError, UnicodeError)
# Seconds between two lines of progress.
SECONDS_PER_LOG = 10

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """What `tokens.json` holds; it is written last, so its directory is whole."""

    name: str
    version: str
    carved: Mapping[str, float]
    tokenizer: str  # as in data.tokenizer; of a file without its directory
    tokenizer_name: str
    dtype: Literal['uint8', 'uint16', 'uint32']  # of an id
    splits: Mapping[str, SplitInfo]


def write_tokens(
    directory: Path, kind: str, corpus: Corpus, tokenizer: Tokenizer, workers: int = 1
) -> None:
    """Tokenizes all splits of a corpus; the caller holds a lock on the directory.

    `kind` is what data.tokenizer names, and `workers` the number of processes that tokenize, on
    which the files do not depend. ConfigError for text that cannot be read or encoded, or a
    split without a document.
    """
    log.info('Writing tokens of %s %s to %s', corpus.name, corpus.version, directory)
    for split, share in corpus.carved.items():
        log.info('%s has no %s split; carving %.0f %% of train', corpus.name, split, 100 * share)
    if hasattr(tokenizer, 'model'):
        write_atomic(directory / MODEL, tokenizer.model())
    with readable(corpus.name, RESTORE, *READ_ERRORS):
        documents = corpus.documents(None)
    splits = {}
    with encoder(kind, tokenizer, workers) as encode:
        for split in corpus.splits:
            source = f'split {split!r} of {corpus.name}'
            names = None
            if corpus.names and split != 'train':
                names = tuple(corpus.names(split))
            results = _successes(encode(documents[split]), source)
            info = _write_split(directory / f'{split}.bin', results, tokenizer, names)
            if not info.num_documents:
                raise ConfigError(f'{source} has no document; it must hold text')
            splits[split] = info
    index = Index(
        name=corpus.name,
        version=corpus.version,
        carved=dict(corpus.carved),
        tokenizer=_without_directory(kind),
        tokenizer_name=tokenizer.name,
        dtype=_dtype(tokenizer).name,  # type: ignore[arg-type]
        splits=splits,
    )
    write_atomic(directory / INDEX, json.dumps(dataclasses.asdict(index), indent=1) + '\n')


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    """The narrowest unsigned type that holds all ids."""
    return np.min_scalar_type(tokenizer.vocab_size - 1)


def _without_directory(kind: str) -> str:
    """What data.tokenizer names, of a file its name alone: 'a.json' for '/data/a.json'."""
    return kind.rpartition('/')[2] if kind.endswith('.json') else kind


def _successes(results: Iterable[Result], source: str) -> Iterator[Encoded]:
    """The documents of `source` that are encoded.

    ConfigError, which names the number of the document, for the first that cannot be.
    """
    with readable(source, RESTORE, *READ_ERRORS):
        for number, result in enumerate(results, start=1):
            if isinstance(result, ValueError):
                raise ConfigError(
                    f'document {number} of {source} cannot be encoded: {result}'
                ) from result
            yield result


class _Progress:
    """Logs from time to time how many tokens of a split are written, and how fast."""

    def __init__(self, split: str):
        self._split = split
        self._start = time.monotonic()
        self._next = self._start + SECONDS_PER_LOG

    def log(self, num_tokens: int) -> None:
        seconds = time.monotonic()
        if seconds >= self._next:
            rate = num_tokens / (seconds - self._start)
            log.info('%s: %s tokens, %s tokens/s', self._split, f'{num_tokens:,}', f'{rate:,.0f}')
            self._next = seconds + SECONDS_PER_LOG


def _write_split(
    path: Path, documents: Iterator[Encoded], tokenizer: Tokenizer, names: tuple[str, ...] | None
) -> SplitInfo:
    """Writes the ids of a split document by document, and counts them.

    `names` are those of the documents, if they have any.
    """
    dtype = _dtype(tokenizer)
    digest = hashlib.sha256()
    counts_V = np.zeros(tokenizer.vocab_size, np.int64)
    num_documents = 0
    num_tokens = 0
    num_bytes = 0
    progress = _Progress(path.stem)
    with replacing(path) as temporary:
        with temporary.open('wb') as file:
            for document in documents:
                file.write(document.ids.astype(dtype).tobytes())
                num_documents += 1
                num_tokens += len(document.ids)
                num_bytes += document.num_bytes
                progress.log(num_tokens)
        # In blocks: counting document by document takes time for the whole vocabulary each. They
        # are not mapped, since pages of a mapped file count as memory of this process.
        with temporary.open('rb') as file:
            while len(ids := np.fromfile(file, dtype, BLOCK)):
                digest.update(ids.data)
                counts_V += np.bincount(ids, minlength=len(counts_V))
    return SplitInfo(
        num_documents=num_documents,
        document_names=names,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        unigram_nats_per_token=entropy(counts_V),
        fingerprint=digest.hexdigest(),
    )


def read_index(directory: Path) -> Index:
    """The index of a directory; DamagedData if it cannot be read, or describes no tokens."""
    try:
        record = parse_file(directory / INDEX, {'splits': {}})
        _check_splits(record['splits'])
        splits = {split: read(SplitInfo, entry) for split, entry in record['splits'].items()}
        for split, info in splits.items():
            _check_counts(split, info)
        return read(Index, record, splits=splits)
    except ValueError as error:
        raise DamagedData(f'{directory / INDEX} cannot be read ({error})') from error


def _check_splits(names: Iterable[str]) -> None:
    """Raises ValueError unless these are splits of a corpus: each becomes the name of a file."""
    for name in names:
        if name not in SPLITS:
            raise ValueError(f'split {name!r:.80} is none of {", ".join(SPLITS)}')
    if 'train' not in names:
        raise ValueError('it has no train split')


def _check_counts(split: str, info: SplitInfo) -> None:
    """Raises ValueError for counts of documents, bytes and names that no tokens have.

    Whoever lists the documents of a split takes memory for as many as are counted. The count of
    tokens is compared with the size of the file when that is opened.
    """
    documents = info.num_documents
    if not 1 <= documents <= info.num_tokens:
        raise ValueError(f'{split} has {documents} documents in {info.num_tokens} tokens')
    if info.num_bytes is None or info.num_bytes < 1:
        raise ValueError(f'{split} has {info.num_bytes} bytes')
    names = info.document_names
    if names is not None and len(names) != documents:
        raise ValueError(f'{split} has {len(names)} document_names of {documents} documents')


def open_index(
    directory: Path, index: Index, tokenizer: Tokenizer, *, compare: bool
) -> TokenDataset:
    """The dataset in a directory, memory-mapped; `compare` reads all ids for their sha256.

    DamagedData if a file is missing or of another size, or its sha256 is another one.
    """
    tokens: dict[str, TokenIds] = {}
    for split, info in index.splits.items():
        path = directory / f'{split}.bin'
        try:
            require_regular(path, most=None)
            # Slices of a memmap take several times as long as those of its array.
            ids = np.asarray(np.memmap(path, index.dtype, 'r'))
            is_whole = len(ids) == info.num_tokens
            if is_whole and compare:
                with open_regular(path) as file:
                    digest = hashlib.file_digest(file, 'sha256')  # type: ignore[arg-type]
                is_whole = digest.hexdigest() == info.fingerprint
        except (OSError, ValueError):
            is_whole = False
        if not is_whole:
            raise DamagedData(f'{path} is missing, or does not hold what {INDEX} describes')
        tokens[split] = ids
    return TokenDataset(index.name, index.version, tokenizer, index.splits, tokens, index.carved)


def is_prepared(directory: Path) -> bool:
    """Whether prepare_data has written a directory, or has begun to, and no other tool."""
    return (directory / INDEX).exists() or (directory / 'lock').exists()


def open_prepared(config: DataConfig) -> TokenDataset:
    """The tokens in `config.path`; ConfigError if they are damaged, or settings do not fit them."""
    directory = local_directory(config.path, 'data.path')
    if not (directory / INDEX).exists():
        require_preparing(f'{directory / INDEX}')
    advice = 'copy it or prepare_data again'
    try:
        index = read_index(directory)
        with as_recorded(index.tokenizer_name):
            tokenizer = _tokenizer_beside(directory, index, config.tokenizer, advice)
        dataset = open_index(directory, index, tokenizer, compare=False)
    except DamagedData as error:
        raise ConfigError(f'{error}; {advice}') from error
    if tokenizer.name != index.tokenizer_name:
        raise ConfigError(
            f'{directory} was tokenized with {index.tokenizer_name}, but tokenizer='
            f'{index.tokenizer!r} is {tokenizer.name}; restore its source'
        )
    _refuse_settings_of_text(config, index)
    return dataset


def _tokenizer_beside(directory: Path, index: Index, requested: str, advice: str) -> Tokenizer:
    """The tokenizer that the tokens in a directory were made with.

    `requested` is data.tokenizer. What tokens.json names is data: an import path in it is imported
    only where data.tokenizer names the same, and a file is read only from this directory.
    ConfigError otherwise; DamagedData where the vocabulary is missing.
    """
    kind = index.tokenizer
    if is_import_path(kind) and kind != requested:
        raise ConfigError(
            f'{directory / INDEX} names the tokenizer {kind!r:.200}, which is code, and '
            f'data.tokenizer={requested!r} does not; set data.tokenizer={kind:.200} to import it'
        )
    model = directory / MODEL
    if not model.exists():
        has_no_vocabulary = is_import_path(kind) or kind == 'bytes'
        if not has_no_vocabulary:
            raise DamagedData(f'{model}, the vocabulary of {kind!r:.200}, is missing')
        return restored(kind, None)
    with readable(str(model), advice, Exception):  # of the library of subwords
        return restored(kind, read_whole(model))


def _refuse_settings_of_text(config: DataConfig, index: Index) -> None:
    """Raises ConfigError for a setting of text other than the one that tokens were made with."""
    if config.lowercase:
        field = 'lowercase'
    elif config.carve_test and 'test' not in index.splits:
        field = 'carve_test'
    elif config.documents is not None:
        field = 'documents'
    elif config.token_dtype is not None:
        field = 'token_dtype'
    elif not _is_same_tokenizer(config.tokenizer, index):
        field = 'tokenizer'
    else:
        return
    raise ConfigError(
        f'data.{field}={getattr(config, field)!r} has no effect on tokens, which were made '
        f'with {index.tokenizer_name} of {index.version}; set it when prepare_data makes them'
    )


def _is_same_tokenizer(requested: str, index: Index) -> bool:
    """Whether data.tokenizer is unset, or names the tokenizer that the tokens were made with."""
    if requested == DataConfig.tokenizer:
        return True
    if _without_directory(requested) != index.tokenizer:
        return False
    if not requested.endswith('.json'):
        return True
    with as_recorded(index.tokenizer_name):
        return restored(requested, None).name == index.tokenizer_name
