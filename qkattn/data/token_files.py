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
from qkattn.data.corpora.corpus import SPLITS, Corpus, explain_read_errors
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
# What an error advises if a corpus cannot be read.
RESTORE = 'restore the source'
# What libraries raise, besides OSError, if they cannot read a corpus.
READ_ERRORS = (RuntimeError, UnicodeError)
# Seconds between two lines of progress.
SECONDS_PER_LOG = 10

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """The content of `tokens.json`. It is written last, so its directory is complete."""

    name: str  # name and version of the corpus
    version: str
    carved: Mapping[str, float]  # each split that was carved from train: its fraction of train
    tokenizer: str  # data.tokenizer; if this is a file, without its directory
    tokenizer_name: str  # `Tokenizer.name`, e.g. 'byte-bpe4096-0123456789ab'
    dtype: Literal['uint8', 'uint16', 'uint32']  # of an id
    splits: Mapping[str, SplitInfo]


def write_tokens(
    directory: Path, kind: str, corpus: Corpus, tokenizer: Tokenizer, workers: int = 1
) -> None:
    """Tokenizes all splits of a corpus, and writes the files of a directory of tokens.

    The caller holds a lock on the directory.

    Args:
      directory: where the files go.
      kind: the value of data.tokenizer.
      corpus: the corpus to tokenize.
      tokenizer: the tokenizer of this kind.
      workers: the number of processes that tokenize. The files are the same for any number.

    Raises:
      ConfigError: the text cannot be read or encoded, or a split has no document.
    """
    log.info('Writing tokens of %s %s to %s', corpus.name, corpus.version, directory)
    for split, share in corpus.carved.items():
        log.info('%s has no %s split; carving %.0f %% of train', corpus.name, split, 100 * share)
    if hasattr(tokenizer, 'model'):
        write_atomic(directory / MODEL, tokenizer.model())
    with explain_read_errors(corpus.name, RESTORE, *READ_ERRORS):
        # By split. One side of parallel text is a corpus by itself, so the language is None, too.
        documents = corpus.documents(None)

    splits = {}
    with encoder(kind, tokenizer, workers) as encode:
        for split in corpus.splits:
            source = f'split {split!r} of {corpus.name}'
            names = None
            if corpus.names and split != 'train':
                names = tuple(corpus.names(split))
            results = _require_encoded(encode(documents[split]), source)
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
    """Returns the narrowest unsigned type that holds all ids."""
    return np.min_scalar_type(tokenizer.vocab_size - 1)


def _without_directory(kind: str) -> str:
    """Removes the directory from a value of data.tokenizer: '/data/a.json' gives 'a.json'."""
    return kind.rpartition('/')[2] if kind.endswith('.json') else kind


def _require_encoded(results: Iterable[Result], source: str) -> Iterator[Encoded]:
    """Yields the encoded documents of `source`, which is named in errors.

    A result is an encoded document, or the ValueError with which encoding failed. The first such
    error raises ConfigError with the number of the document.
    """
    with explain_read_errors(source, RESTORE, *READ_ERRORS):
        for number, result in enumerate(results, start=1):
            if isinstance(result, ValueError):
                raise ConfigError(
                    f'document {number} of {source} cannot be encoded: {result}'
                ) from result
            yield result


class _Progress:
    """Logs every SECONDS_PER_LOG how many tokens of a split are written, and how fast."""

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
    """Writes the ids of a split to a file, and returns the counts of the split.

    `names` holds the names of the documents; None if they have no names.
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
        # Ids are counted afterwards, in large blocks of the file: bincount fills an array of the
        # whole vocabulary, which takes too long for each document. The file is not memory-mapped,
        # because its pages would count as memory of this process.
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


def read_index(directory: Path, required: Sequence[str] = ('train',)) -> Index:
    """Reads and checks the index of a directory of tokens.

    Raises DamagedData if it cannot be read, if its values cannot be true, or if it lacks one of the
    splits `required`.
    """
    try:
        record = parse_file(directory / INDEX, {'splits': {}})  # requires an object `splits`
        _check_splits(record['splits'], required)
        splits = {
            split: read_dataclass(SplitInfo, entry) for split, entry in record['splits'].items()
        }
        for split, info in splits.items():
            _check_counts(split, info)
        return read_dataclass(Index, record, splits=splits)
    except ValueError as error:
        raise DamagedData(f'{directory / INDEX} cannot be read ({error})') from error


def _check_splits(names: Iterable[str], required: Sequence[str]) -> None:
    """Raises ValueError unless these are names of splits, the required ones among them.

    Paths of files are made from the names, so a name such as '../other' must not pass.
    """
    for name in names:
        if name not in SPLITS:
            raise ValueError(f'split {name!r:.80} is none of {", ".join(SPLITS)}')
    for name in required:
        if name not in names:
            raise ValueError(f'it has no {name} split')


def _check_counts(split: str, info: SplitInfo) -> None:
    """Raises ValueError if the counts of a split cannot be true.

    Without this check, a damaged number of documents could fill the memory, because other code
    makes lists of this length. The number of tokens is checked by `open_index`, which knows the
    size of the file.
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
    """Opens the dataset in a directory of tokens. The ids are memory-mapped.

    The sizes of the files are compared with the index. With `compare`, all ids are read, and their
    sha256 is compared as well. Raises DamagedData if a file is missing or does not match the index.
    """
    tokens: dict[str, TokenIds] = {}
    for split, info in index.splits.items():
        path = directory / f'{split}.bin'
        try:
            ids = map_ids(path, index.dtype)
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
    """Whether a directory of tokens is one that prepare_data has written, or has begun to write."""
    return (directory / INDEX).exists() or (directory / 'lock').exists()


def open_prepared(config: DataConfig) -> TokenDataset:
    """Opens the dataset in `config.path`, which prepare_data has written.

    Raises ConfigError if the files are damaged, or if settings do not fit them.
    """
    directory = local_directory(config.path, 'data.path')
    if not (directory / INDEX).exists():
        require_preparing(f'{directory / INDEX}')  # raises NotPrepared in a dry run
    advice = 'copy it or prepare_data again'
    try:
        index = read_index(directory)
        # A tokenizer.json can be used with either of two separators between documents. The name of
        # the tokenizer in the index tells which one these tokens have.
        with use_recorded_tokenizers(index.tokenizer_name):
            tokenizer = _tokenizer_beside(directory, index, config.tokenizer, advice)
        # The sha256 of the files are not compared: that would read all of them at each start.
        dataset = open_index(directory, index, tokenizer, compare=False)
    except DamagedData as error:
        raise ConfigError(f'{error}; {advice}') from error
    if tokenizer.name != index.tokenizer_name:  # its source code, for example, has changed
        raise ConfigError(
            f'{directory} was tokenized with {index.tokenizer_name}, but tokenizer='
            f'{index.tokenizer!r} is {tokenizer.name}; restore its source'
        )
    _refuse_settings_without_effect(config, index)
    return dataset


def _tokenizer_beside(directory: Path, index: Index, requested: str, advice: str) -> Tokenizer:
    """Opens the tokenizer with which the tokens in a directory were made.

    A vocabulary is read only from this directory. The directory may come from someone else, so its
    index must not decide which code is imported: a tokenizer with an import path, such as
    'module:Class', is imported only if the user requests the same one.

    Args:
      directory: a directory of tokens.
      index: its index, which names the tokenizer.
      requested: the value of data.tokenizer.
      advice: what an error advises if the vocabulary cannot be read.

    Raises:
      ConfigError: the tokenizer has an import path that the user does not request, or the
        vocabulary cannot be read.
      DamagedData: the vocabulary is missing.
    """
    kind = index.tokenizer
    if is_import_path(kind) and kind != requested:
        raise ConfigError(
            f'{directory / INDEX} names the tokenizer {kind!r:.200}, which is code, and '
            f'data.tokenizer={requested!r} does not; set data.tokenizer={kind:.200} to import it'
        )
    model = directory / MODEL
    if model.exists():
        # The library of sub-words raises a plain Exception.
        with explain_read_errors(str(model), advice, Exception):
            return restore_tokenizer(kind, read_whole(model))

    # The name alone is enough for bytes and for encodings of tiktoken. A tokenizer with an import
    # path has a vocabulary only if it is learned.
    is_whole_by_name = kind == 'bytes' or kind.startswith(PREFIX) or is_import_path(kind)
    if not is_whole_by_name:
        raise DamagedData(f'{model}, the vocabulary of {kind!r:.200}, is missing')
    return restore_tokenizer(kind, None)


def _refuse_settings_without_effect(config: DataConfig, index: Index) -> None:
    """Raises ConfigError for a setting that would have to change tokens that exist already.

    For example, data.lowercase=True has no effect, because the text is not tokenized again.
    """
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
    """Whether data.tokenizer agrees with the tokenizer that made the tokens of an index.

    It agrees if it has its default value, or the value in the index. The index names a file without
    its directory, so the file is opened, and must hold the same vocabulary.
    """
    if requested == DataConfig.tokenizer:
        return True
    if _without_directory(requested) != index.tokenizer:
        return False
    is_file = requested.endswith('.json')
    if not is_file:
        return True
    with use_recorded_tokenizers(index.tokenizer_name):
        tokenizer = restore_tokenizer(requested, None)
    return tokenizer.name == index.tokenizer_name
