"""Tokenized corpora on disk. A directory of tokens holds these files:

- `SPLIT.bin` for each split: the ids, with a separator after each document. They have the narrowest
  unsigned type, and there is no header.
- `tokens.json`: the `Index`, which describes the other files.
- `tokenizer.json`: the vocabulary, if the tokenizer has one.
"""

import dataclasses
import hashlib
import json
import logging
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

import numpy as np

from qkattn.config import DataConfig
from qkattn.config.paths import open_regular
from qkattn.data.cache import DamagedData, local_directory, require_preparing
from qkattn.data.corpora.corpus import SPLITS, Corpus, explain_read_errors, is_lower_case
from qkattn.data.encoding import Encoded, Result, encoder
from qkattn.data.mapped import map_ids
from qkattn.data.tokenizers.tiktoken_encodings import PREFIX
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import (
    is_import_path,
    restore_tokenizer,
    use_recorded_tokenizers,
)
from qkattn.data.tokens import BLOCK, SplitInfo, TokenDataset, TokenIds, entropy
from qkattn.errors import ConfigError
from qkattn.storage.files import read_whole, replacing, write_atomic
from qkattn.storage.records import parse_file, read_dataclass

INDEX = 'tokens.json'
MODEL = 'tokenizer.json'
# The advice in errors if a corpus cannot be read.
RESTORE = 'restore the source'
# Errors, besides OSError, that libraries raise if a corpus cannot be read.
READ_ERRORS = (RuntimeError, UnicodeError)
# Seconds between two lines of progress.
SECONDS_PER_LOG = 10

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """The content of `tokens.json`, which is written after all other files."""

    name: str  # name and version of the corpus
    version: str
    carved: Mapping[str, float]  # splits carved from train, as fractions of train: {'test': 0.1}
    tokenizer: str  # data.tokenizer; a file is without its directory
    tokenizer_name: str  # `Tokenizer.name`, e.g. 'byte-bpe4096-0123456789ab'
    dtype: Literal['uint8', 'uint16', 'uint32']  # of an id
    splits: Mapping[str, SplitInfo]


def write_tokens(
    directory: Path, kind: str, corpus: Corpus, tokenizer: Tokenizer, workers: int = 1
) -> None:
    """Tokenizes a corpus and writes its directory of tokens, on which the caller holds a lock.

    Args:
        directory: Where the files go.
        kind: The value of data.tokenizer.
        corpus: A text in one language.
        tokenizer: The tokenizer of this kind.
        workers: Number of processes that tokenize. The files are the same for any number.

    Raises:
        ConfigError: The text cannot be read or encoded, or a split has no document.
    """
    log.info('Writing tokens of %s %s to %s', corpus.name, corpus.version, directory)
    for split, share in corpus.carved.items():
        log.info('%s has no %s split; carving %.0f %% of train', corpus.name, split, 100 * share)
    _write_vocabulary(directory / MODEL, tokenizer)
    # Errors become ConfigErrors with the advice to restore the source.
    with explain_read_errors(corpus.name, RESTORE, *READ_ERRORS):
        documents_of_split = corpus.documents(None)  # `corpus` is not parallel text

    infos = {}
    with encoder(kind, tokenizer, workers) as encode:
        for split in corpus.splits:
            source = f'split {split!r} of {corpus.name}'
            names = None
            if corpus.names and split != 'train':
                names = tuple(corpus.names(split))
            results = encode(documents_of_split[split])
            documents = _require_encoded(results, source)
            info = _write_split(directory / f'{split}.bin', documents, tokenizer, names)
            if not info.num_documents:
                raise ConfigError(f'{source} has no document; it must hold text')
            infos[split] = info

    index = Index(
        name=corpus.name,
        version=corpus.version,
        carved=dict(corpus.carved),
        tokenizer=_without_directory(kind),
        tokenizer_name=tokenizer.name,
        dtype=_dtype(tokenizer).name,  # type: ignore[arg-type]
        splits=infos,
    )
    index_json = json.dumps(dataclasses.asdict(index), indent=1)
    write_atomic(directory / INDEX, index_json + '\n')


def _write_vocabulary(path: Path, tokenizer: Tokenizer) -> None:
    """Writes the vocabulary of a tokenizer, or removes the file if the tokenizer has none."""
    if hasattr(tokenizer, 'model'):  # a learned vocabulary
        write_atomic(path, tokenizer.model())
    else:
        # A killed preparation with another tokenizer may have left its vocabulary.
        path.unlink(missing_ok=True)


def _dtype(tokenizer: Tokenizer) -> np.dtype:
    """Returns the narrowest unsigned type that holds all ids."""
    return np.min_scalar_type(tokenizer.vocab_size - 1)


def _without_directory(kind: str) -> str:
    """Removes the directory from a file in data.tokenizer: '/data/a.json' gives 'a.json'."""
    is_file = kind.endswith('.json')
    if is_file:
        return kind.split('/')[-1]
    return kind


def _require_encoded(results: Iterable[Result], source: str) -> Iterator[Encoded]:
    """Yields encoded documents, or raises ConfigError for the first one that cannot be encoded.

    Args:
        results: For each document, its encoding or the ValueError that encoding raised.
        source: The name of the text, for error messages.
    """
    # Documents are read here. Errors become ConfigErrors with the advice to restore the source.
    with explain_read_errors(source, RESTORE, *READ_ERRORS):
        for number, result in enumerate(results, start=1):
            if isinstance(result, ValueError):
                raise ConfigError(
                    f'document {number} of {source} cannot be encoded: {result}'
                ) from result
            yield result


class _Progress:
    """Logs the progress of a split, at most every SECONDS_PER_LOG seconds."""

    def __init__(self, split: str):
        self._split = split
        self._start_time = time.monotonic()
        self._next_time = self._start_time + SECONDS_PER_LOG

    def log(self, num_tokens: int) -> None:
        now = time.monotonic()
        if now >= self._next_time:
            rate = num_tokens / (now - self._start_time)
            log.info('%s: %s tokens, %s tokens/s', self._split, f'{num_tokens:,}', f'{rate:,.0f}')
            self._next_time = now + SECONDS_PER_LOG


def _write_split(
    path: Path, documents: Iterator[Encoded], tokenizer: Tokenizer, names: tuple[str, ...] | None
) -> SplitInfo:
    """Writes the token ids of a split to a file.

    Args:
        path: The file.
        documents: The encoded documents.
        tokenizer: The tokenizer of the documents.
        names: The document names, or None.

    Returns:
        The statistics of the split.
    """
    dtype = _dtype(tokenizer)
    num_documents = 0
    num_tokens = 0
    num_bytes = 0
    progress = _Progress(path.stem)
    with replacing(path) as temporary:  # the temporary file becomes `path` after the block
        with temporary.open('wb') as file:
            for document in documents:
                file.write(document.ids.astype(dtype).tobytes())
                num_documents += 1
                num_tokens += len(document.ids)
                num_bytes += document.num_bytes
                progress.log(num_tokens)
        # Ids are not counted above, because `np.bincount` is slow on many short documents.
        counts_V, sha256 = _count_ids(temporary, dtype, tokenizer.vocab_size)
    return SplitInfo(
        num_documents=num_documents,
        document_names=names,
        num_tokens=num_tokens,
        num_bytes=num_bytes,
        unigram_nats_per_token=entropy(counts_V),
        fingerprint=sha256,
    )


def _count_ids(path: Path, dtype: np.dtype, vocab_size: int) -> tuple[np.ndarray, str]:
    """Returns how often each id in [0, vocab_size) is in a file of ids, and the file's sha256."""
    digest = hashlib.sha256()
    counts_V = np.zeros(vocab_size, np.int64)
    # Read blocks, because a memory-mapped file would count as memory of this process.
    with path.open('rb') as file:
        while len(ids := np.fromfile(file, dtype, count=BLOCK)):
            digest.update(ids.data)
            counts_V += np.bincount(ids, minlength=vocab_size)
    return counts_V, digest.hexdigest()


def read_index(directory: Path, required: Sequence[str] = ('train',)) -> Index:
    """Reads and checks the index of a directory of tokens.

    Args:
        directory: The directory of tokens.
        required: Splits that the index must have.

    Raises:
        DamagedData: The index cannot be read, is invalid, or lacks a required split.
    """
    try:
        record = parse_file(directory / INDEX, {'splits': {}})  # requires an object `splits`
        _check_splits(record['splits'], required)
        infos = {}
        for split, entry in record['splits'].items():
            infos[split] = read_dataclass(SplitInfo, entry)
        for split, info in infos.items():
            _check_counts(split, info)
        return read_dataclass(Index, record, splits=infos)
    except ValueError as error:
        raise DamagedData(f'{directory / INDEX} cannot be read ({error})') from error


def _check_splits(names: Iterable[str], required: Sequence[str]) -> None:
    """Raises ValueError for an unknown or a missing split name."""
    # The names become file names, so '../other' must not pass.
    for name in names:
        if name not in SPLITS:
            raise ValueError(f'split {name!r:.80} is none of {", ".join(SPLITS)}')
    for name in required:
        if name not in names:
            raise ValueError(f'it has no {name} split')


def _check_counts(split: str, info: SplitInfo) -> None:
    """Raises ValueError for impossible counts, such as more documents than tokens."""
    num_documents = info.num_documents
    if not 1 <= num_documents <= info.num_tokens:
        raise ValueError(f'{split} has {num_documents} documents in {info.num_tokens} tokens')
    if info.num_bytes is None or info.num_bytes < 1:
        raise ValueError(f'{split} has {info.num_bytes} bytes')
    names = info.document_names
    if names is not None and len(names) != num_documents:
        raise ValueError(f'{split} has {len(names)} document_names of {num_documents} documents')


def open_index(
    directory: Path, index: Index, tokenizer: Tokenizer, *, compare: bool
) -> TokenDataset:
    """Opens the dataset in a directory of tokens, with memory-mapped ids.

    Args:
        directory: The directory of tokens.
        index: The index of the directory.
        tokenizer: The tokenizer of the ids.
        compare: Whether to read all ids and compare their sha256 with the index.

    Raises:
        DamagedData: A file is missing, or its size or sha256 differs from the index.
    """
    tokens: dict[str, TokenIds] = {}
    for split, info in index.splits.items():
        path = directory / f'{split}.bin'
        ids = _map_if_intact(path, index.dtype, info, compare)
        if ids is None:
            raise DamagedData(f'{path} is missing, or does not hold what {INDEX} describes')
        tokens[split] = ids
    return TokenDataset(
        name=index.name,
        version=index.version,
        tokenizer=tokenizer,
        infos=index.splits,
        tokens=tokens,
        carved=index.carved,
    )


def _map_if_intact(path: Path, dtype: str, info: SplitInfo, compare: bool) -> np.ndarray | None:
    """Memory-maps the ids of a split; returns None if the file is missing or damaged.

    Args:
        path: The file.
        dtype: The type of an id.
        info: The expected number and sha256 of the ids.
        compare: Whether to read all ids and compare their sha256.
    """
    try:
        ids = map_ids(path, dtype)
        if len(ids) != info.num_tokens:
            return None
        if compare:
            with open_regular(path) as file:
                digest = hashlib.file_digest(file, 'sha256')  # type: ignore[arg-type]
            if digest.hexdigest() != info.fingerprint:
                return None
    except (OSError, ValueError):
        return None
    return ids


def is_prepared(directory: Path) -> bool:
    """Whether prepare_data has written, or begun to write, a directory of tokens."""
    return (directory / INDEX).exists() or (directory / 'lock').exists()


def open_prepared(config: DataConfig) -> TokenDataset:
    """Opens the dataset that prepare_data has written to `config.path`.

    Raises:
        ConfigError: The files are damaged, or do not fit the settings.
    """
    directory = local_directory(config.path, 'data.path')
    if not (directory / INDEX).exists():
        require_preparing(f'{directory / INDEX}')  # raises NotPrepared in a dry run
    advice = 'copy it or prepare_data again'
    try:
        index = read_index(directory)
        # A tokenizer.json allows two separators between documents. Use that of these tokens, which
        # is part of their tokenizer's name.
        with use_recorded_tokenizers(index.tokenizer_name):
            tokenizer = _open_stored_tokenizer(directory, index, config.tokenizer, advice)
        # Comparing sha256 would read all tokens at each start.
        dataset = open_index(directory, index, tokenizer, compare=False)
    except DamagedData as error:
        raise ConfigError(f'{error}; {advice}') from error
    if tokenizer.name != index.tokenizer_name:  # for example, its source code has changed
        raise ConfigError(
            f'{directory} was tokenized with {index.tokenizer_name}, but tokenizer='
            f'{index.tokenizer!r} is {tokenizer.name}; restore its source'
        )
    _refuse_settings_without_effect(config, index, dataset.vocab_size)
    _require_last_separators(dataset, directory)
    return dataset


def _require_last_separators(dataset: TokenDataset, directory: Path) -> None:
    """Raises ConfigError if a split does not end with a separator.

    Its last ids would belong to no document. Another program may have put a separator before each
    document, not after it.
    """
    separator = dataset.tokenizer.separator
    for split in dataset.splits:
        (last_id,) = dataset.split(split)[-1:]  # ids can only be sliced
        if last_id != separator:
            raise ConfigError(
                f'{directory / split}.bin ends with the id {last_id}; each document must end with '
                f'the separator {separator}'
            )


def _open_stored_tokenizer(directory: Path, index: Index, requested: str, advice: str) -> Tokenizer:
    """Opens the tokenizer of the tokens in a directory, whose vocabulary is stored there, too.

    Args:
        directory: The directory of tokens.
        index: The index of the directory, which names the tokenizer.
        requested: The value of data.tokenizer.
        advice: The advice in the error if the vocabulary cannot be read.

    Raises:
        ConfigError: The vocabulary cannot be read, or the tokenizer is code that the user has not
            requested.
        DamagedData: The vocabulary is missing.
    """
    kind = index.tokenizer
    # The directory may come from someone else, who must not decide which code is imported.
    if is_import_path(kind) and kind != requested:
        raise ConfigError(
            f'{directory / INDEX} names the tokenizer {kind!r:.200}, which is code, and '
            f'data.tokenizer={requested!r} does not; set data.tokenizer={kind:.200} to import it'
        )
    model = directory / MODEL
    if model.exists():
        # The `tokenizers` library raises a plain Exception.
        with explain_read_errors(str(model), advice, Exception):
            return restore_tokenizer(kind, read_whole(model))

    # 'bytes' and 'tiktoken:NAME' have no vocabulary, and a class with an import path need not.
    needs_no_vocabulary = kind == 'bytes' or kind.startswith(PREFIX) or is_import_path(kind)
    if not needs_no_vocabulary:
        raise DamagedData(f'{model}, the vocabulary of {kind!r:.200}, is missing')
    return restore_tokenizer(kind, model=None)


def _refuse_settings_without_effect(config: DataConfig, index: Index, vocab_size: int) -> None:
    """Raises ConfigError for settings that cannot change existing tokens, such as lowercase."""
    harmless_sizes = (DataConfig.tokenizer_size, vocab_size)  # the default and the actual size
    if config.lowercase and not is_lower_case(index.version):
        field = 'lowercase'
    elif config.carve_test and 'test' not in index.splits:
        field = 'carve_test'
    elif config.documents is not None:
        field = 'documents'
    elif config.token_dtype is not None:
        field = 'token_dtype'
    elif not _is_same_tokenizer(config.tokenizer, index):
        field = 'tokenizer'
    elif config.tokenizer_size not in harmless_sizes:
        field = 'tokenizer_size'
    else:
        return
    raise ConfigError(
        f'data.{field}={getattr(config, field)!r} has no effect on tokens, which were made '
        f'with {index.tokenizer_name} of {index.version}; set it when prepare_data makes them'
    )


def _is_same_tokenizer(requested: str, index: Index) -> bool:
    """Whether data.tokenizer has its default value, or is the tokenizer of the index.

    For a file, `index.tokenizer` is a file name such as 'a.json', and `index.tokenizer_name`
    identifies the content, such as 'file-0123456789ab'.
    """
    default = DataConfig.tokenizer
    if requested == default:
        return True
    if _without_directory(requested) != index.tokenizer:
        return False
    is_file = requested.endswith('.json')
    if not is_file:
        return True
    # Files in two directories may have the same name, so compare the content. The context opens the
    # file with the document separator of the index.
    with use_recorded_tokenizers(index.tokenizer_name):
        tokenizer = restore_tokenizer(requested, model=None)
    return tokenizer.name == index.tokenizer_name
