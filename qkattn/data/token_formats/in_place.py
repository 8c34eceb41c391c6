"""Opens token files of other tools without copying them.

The ids are checked and counted the first time. The counts are cached in
`<data_dir>/tokens/in_place/` until a file or a setting changes.
"""

import dataclasses
import functools
import hashlib
import itertools
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from qkattn.config import DataConfig
from qkattn.data.cache import DamagedData, data_root, read_or_prepare
from qkattn.data.corpora.corpus import CARVED_FRACTION, SPLITS
from qkattn.data.corpora.split_files import files_by_split
from qkattn.data.token_formats.documents import Documents, parse_documents_rule
from qkattn.data.token_formats.headerless import Headerless
from qkattn.data.token_formats.llm_c import LlmC
from qkattn.data.token_formats.megatron import Megatron
from qkattn.data.token_formats.shards import Shard, Shards, TokenFormat
from qkattn.data.tokenizers import vocabulary
from qkattn.data.tokenizers.subwords import MAX_SIZE
from qkattn.data.tokenizers.tokenizer import IdTokenizer, Tokenizer
from qkattn.data.tokens import SplitInfo, TokenDataset, blocks, entropy
from qkattn.errors import ConfigError
from qkattn.storage.files import version_of, write_atomic
from qkattn.storage.records import parse_file, read_dataclass

# The formats of token files. A file has the first format whose `reads` returns True.
FORMATS: tuple[type[TokenFormat], ...] = (Megatron, LlmC, Headerless)
SUFFIX = '.bin'

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """Statistics of token files, cached as JSON."""

    vocab_size: int  # of the tokenizer; if this is unknown, the largest id plus one
    splits: Mapping[str, SplitInfo]


def token_files(path: Path) -> dict[str, list[Path]]:
    """Finds token files.

    Args:
        path: A directory whose file names tell their split, or one file for 'train'. '/data/a'
            finds '/data/a.bin', too.

    Returns:
        The paths of each split; {} if there are no token files.
    """
    if path.is_dir():
        return files_by_split(path, [SUFFIX])
    path_with_suffix = path.with_name(path.name + SUFFIX)
    for file in (path, path_with_suffix):
        if file.is_file():
            return {'train': [file]}
    return {}


def open_in_place(config: DataConfig, files: Mapping[str, list[Path]]) -> TokenDataset:
    """Opens token files as a dataset, with memory-mapped ids.

    Args:
        config: The settings of the data.
        files: The paths of each split.

    Raises:
        ConfigError: The files are damaged, or do not fit each other or the settings.
    """
    if config.lowercase:
        raise ConfigError('data.lowercase=True has no effect on tokens; leave it at False')
    tokenizer = _requested_tokenizer(config)
    token_format = _find_format(files)
    if token_format is Headerless and config.token_dtype is None:
        _refuse_lost_index(files)

    shards_of_split = _open_shards(files, token_format, config.token_dtype)
    first_shard = shards_of_split['train'].shards[0]
    documents = parse_documents_rule(
        config.documents,
        separator=tokenizer.separator if tokenizer else None,
        indexed=first_shard.document_ends is not None,
    )
    if not config.cross_documents and tokenizer:
        _refuse_other_separator(config, documents, tokenizer)

    # Carve splits without files from train.
    carved = _missing_splits(tuple(files), config.carve_test)
    if carved:
        shards_of_split |= _carve(shards_of_split['train'], documents, carved)
    splits = [split for split in SPLITS if split in shards_of_split]

    @functools.cache
    def document_ends(split: str) -> np.ndarray:
        return documents.ends(shards_of_split[split])

    def count() -> Counts:
        log.info('Reading the tokens of %s once for their counts', config.path)
        shards = {split: shards_of_split[split] for split in splits}
        return _count_splits(shards, document_ends, tokenizer)

    # The cache key holds everything that the counts depend on.
    settings = [
        token_format.name,
        first_shard.ids.dtype.name,
        documents.name,
        carved,
        tokenizer.name if tokenizer else None,
    ]
    cache_key = [settings, _versions(files)]
    counts = _read_or_count(config, cache_key, count)

    if tokenizer is None:
        # Only SeparatedDocuments have a separator.
        separator = getattr(documents, 'separator', None)
        tokenizer = IdTokenizer(counts.vocab_size, separator)
    fingerprints = [counts.splits[split].fingerprint for split in splits]
    digest = hashlib.sha256(' '.join(fingerprints).encode()).hexdigest()[:16]
    return TokenDataset(
        name=f'tokens-{token_format.name}',
        version=f'sha256-{digest}-{documents.name}',
        tokenizer=tokenizer,
        infos={split: counts.splits[split] for split in splits},
        tokens=shards_of_split,
        carved=dict.fromkeys(carved, CARVED_FRACTION),
        document_ends=document_ends,
    )


def _requested_tokenizer(config: DataConfig) -> Tokenizer | None:
    """Returns the tokenizer that data.tokenizer names, or None at the default.

    Raises ConfigError for a tokenizer that is learned from text, such as 'bpe'.
    """
    if config.tokenizer == DataConfig.tokenizer:
        return None
    cls, _ = vocabulary.check(config.tokenizer)
    is_learned = hasattr(cls, 'train')
    if is_learned:
        raise ConfigError(
            f'data.tokenizer={config.tokenizer!r} is learned from text, which tokens have not; '
            'name the tokenizer.json that they were made with, or leave it unset'
        )
    return vocabulary.restore_tokenizer(config.tokenizer, model=None)


def _find_format(files: Mapping[str, list[Path]]) -> type[TokenFormat]:
    """Returns the format of all files; raises ConfigError if they have several formats."""
    first_file_of_format: dict[type[TokenFormat], Path] = {}
    paths_of_all_splits = itertools.chain(*files.values())
    for path in paths_of_all_splits:
        # Try every format, because `reads` raises errors of unreadable files.
        formats_of_file = [token_format for token_format in FORMATS if token_format.reads(path)]
        if not formats_of_file:
            raise ConfigError(f'data.path: {path} is no token file; its name must end in {SUFFIX}')
        first_file_of_format.setdefault(formats_of_file[0], path)

    if len(first_file_of_format) > 1:
        described = [
            f'{path} ({token_format.name})' for token_format, path in first_file_of_format.items()
        ]
        raise ConfigError(f'data.path has files of several formats: {", ".join(described)}')
    (only_format,) = first_file_of_format
    return only_format


def _refuse_lost_index(files: Mapping[str, list[Path]]) -> None:
    """Raises ConfigError if the files are probably from prepare_data, without their index."""
    # Most other tools write 'val.bin'.
    for path in files.get('validation', []):
        if path.name == 'validation.bin':
            raise ConfigError(
                f'data.path: {path} is named as prepare_data names its files, but no tokens.json '
                "is beside it; copy that too, or set data.token_dtype, as in 'uint16'"
            )


def _refuse_other_separator(config: DataConfig, documents: Documents, tokenizer: Tokenizer) -> None:
    """Raises ConfigError if documents end at another id than the tokenizer's separator."""
    # Attention is cut at the separator of the tokenizer. Blocks of ids have no separator.
    separator = getattr(documents, 'separator', tokenizer.separator)
    if separator != tokenizer.separator:
        raise ConfigError(
            f'data.documents={config.documents!r} separates documents, but data.tokenizer='
            f'{config.tokenizer!r} has the separator {tokenizer.separator}; with '
            'data.cross_documents=False, set only one of the two'
        )


def _open_shards(
    files: Mapping[str, list[Path]], token_format: type[TokenFormat], dtype: str | None
) -> dict[str, Shards]:
    """Opens the shards of each split.

    Args:
        files: The paths of each split.
        token_format: The format of all files.
        dtype: The value of data.token_dtype.

    Raises:
        ConfigError: A file is damaged, or the ids have several types.
    """
    shards_of_split = {}
    first_shard_of_dtype: dict[str, Shard] = {}
    for split, paths in files.items():
        shards = [token_format.open(path, dtype) for path in paths]
        for shard in shards:
            first_shard_of_dtype.setdefault(shard.ids.dtype.name, shard)
        shards_of_split[split] = Shards(shards)
    if len(first_shard_of_dtype) > 1:
        described = [f'{shard.path} ({name})' for name, shard in first_shard_of_dtype.items()]
        raise ConfigError(f'data.path has ids of several types: {", ".join(described)}')
    return shards_of_split


def _missing_splits(splits: tuple[str, ...], carve_test: bool) -> list[str]:
    """Returns the splits to carve from train, as `corpus.carve_missing_splits` would."""
    missing = [split for split in SPLITS if split not in splits]
    only_test_is_missing = missing == ['test']
    if only_test_is_missing and not carve_test:
        return []
    return missing


def _carve(train: Shards, documents: Documents, missing: list[str]) -> dict[str, Shards]:
    """Cuts train into a smaller train and the missing splits, at ends of documents.

    Each missing split gets about a tenth of the ids. For example, two missing splits cut train
    after about 80 % and 90 %. Raises ConfigError if there are too few documents.
    """
    kept_fraction = 1 - CARVED_FRACTION * len(missing)
    cuts = []
    for index in range(len(missing)):
        fraction_before_cut = kept_fraction + CARVED_FRACTION * index
        position = int(len(train) * fraction_before_cut)
        cuts.append(documents.next_end(train, position))

    bounds = [0, *cuts, len(train)]
    has_empty_split = any(start >= end for start, end in itertools.pairwise(bounds))
    if has_empty_split:
        raise ConfigError(
            f'data.path: {train.shards[0].path} has too few documents for the splits '
            f'{" and ".join(missing)} to be carved at their ends; give a file for each split, or '
            "other documents, as in data.documents='tokens=1024'"
        )
    parts = train.cut(cuts)
    return dict(zip(('train', *missing), parts, strict=True))


def _versions(files: Mapping[str, list[Path]]) -> list[list]:
    """Returns the split, path, size and modification time of each file and index."""
    versions = []
    for split, paths in files.items():
        for path in paths:
            versions.append([split, str(path.absolute()), *version_of(path)])
            index = path.with_suffix('.idx')  # of Megatron; decides where documents end
            if index.exists():
                versions.append([split, str(index.absolute()), *version_of(index)])
    return versions


def _count_splits(
    shards_of_split: Mapping[str, Shards],
    document_ends: Callable[[str], np.ndarray],
    tokenizer: Tokenizer | None,
) -> Counts:
    """Computes the statistics of each split; reads all ids."""
    infos = {}
    vocab_size = tokenizer.vocab_size if tokenizer else 0
    for split, shards in shards_of_split.items():
        ends = document_ends(split)
        info, largest_id = _count(shards, len(ends), tokenizer)
        if tokenizer and split != 'train':
            # Bits per byte are reported only for evaluation splits. Decoding train would take long.
            info = dataclasses.replace(info, num_bytes=_num_bytes(shards, ends, tokenizer))
        infos[split] = info
        vocab_size = max(vocab_size, largest_id + 1)
    return Counts(vocab_size=vocab_size, splits=infos)


def _count(ids: Shards, num_documents: int, tokenizer: Tokenizer | None) -> tuple[SplitInfo, int]:
    """Computes the statistics of a split, without bytes of text, and its largest id.

    Raises ConfigError for an id outside the vocabulary.
    """
    max_vocab_size = tokenizer.vocab_size if tokenizer else MAX_SIZE
    digest = hashlib.sha256()
    counts_V = np.zeros(max_vocab_size, np.int64)
    for shard in ids.shards:
        block_begin = 0
        for block in blocks(shard.ids):
            if block.min() < 0 or block.max() >= max_vocab_size:
                raise _invalid_id(block, block_begin, shard.path, max_vocab_size, tokenizer)
            digest.update(block.data)
            counts_V += np.bincount(block, minlength=max_vocab_size)
            block_begin += len(block)
    info = SplitInfo(
        num_documents=num_documents,
        num_tokens=len(ids),
        num_bytes=None,
        unigram_nats_per_token=entropy(counts_V),
        fingerprint=digest.hexdigest(),
    )
    ids_that_occur = np.flatnonzero(counts_V)
    largest_id = int(ids_that_occur[-1])
    return info, largest_id


def _invalid_id(
    block: np.ndarray,
    block_begin: int,
    path: Path,
    vocab_size: int,
    tokenizer: Tokenizer | None,
) -> ConfigError:
    """Returns the error for the first id of a block that is not in [0, vocab_size).

    `block_begin` is the position of the block in the file.
    """
    is_invalid = (block < 0) | (block >= vocab_size)
    index = int(np.flatnonzero(is_invalid)[0])
    requirement = 'valid are'
    if tokenizer:
        requirement = f'data.tokenizer={tokenizer.name!r} has'
    return ConfigError(
        f'data.path: {path} holds id {block[index]} at token {block_begin + index:,}, but '
        f'{requirement} ids from 0 to {vocab_size - 1:,}'
    )


def _num_bytes(ids: Shards, ends: np.ndarray, tokenizer: Tokenizer) -> int:
    """Returns the bytes of text in documents; `ends` are the positions after them."""
    num_bytes = 0
    start = 0
    for end in ends.tolist():
        num_bytes += tokenizer.num_bytes(ids[start:end])
        start = end
    return num_bytes


def _read_or_count(config: DataConfig, key: list, count: Callable[[], Counts]) -> Counts:
    """Reads counts from the cache, or calls `count` and caches the result.

    Args:
        config: Names the cache directory.
        key: JSON of everything that the counts depend on.
        count: Computes the counts.
    """
    root = data_root(config.data_dir)
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    path = root / 'tokens' / 'in_place' / digest / 'counts.json'

    def read_counts() -> Counts:
        try:
            record = parse_file(path, {'splits': {}})  # requires an object `splits`
            infos = {}
            for split, info in record['splits'].items():
                infos[split] = read_dataclass(SplitInfo, info)
            return read_dataclass(Counts, record, splits=infos)
        except ValueError as error:
            raise DamagedData(f'{path} cannot be read ({error})') from error

    def write_counts() -> None:
        text = json.dumps(dataclasses.asdict(count()), indent=1)
        write_atomic(path, text + '\n')

    return read_or_prepare(path, read=read_counts, prepare=write_counts, root=root)
