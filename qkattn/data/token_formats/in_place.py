"""Tokens that another tool wrote, read where they are.

They are read through once, for the counts of each split, its sha256 and the largest id; the counts
are kept in `<data_dir>/tokens/in_place/` until a file changes.
"""

import dataclasses
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from qkattn.config import DataConfig
from qkattn.data.cache import DamagedData, data_root, prepared_once
from qkattn.data.corpora.corpus import CARVED_FRACTION, SPLITS
from qkattn.data.corpora.split_files import files_by_split
from qkattn.data.token_formats.documents import Documents, documents_of
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
from qkattn.storage.records import parse_file, read

# The first that reads a file opens it.
FORMATS: tuple[type[TokenFormat], ...] = (Megatron, LlmC, Headerless)
SUFFIX = '.bin'

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Counts:
    """What is known of the tokens once they are read through."""

    vocab_size: int  # that of the tokenizer, or else the largest id and one more
    splits: Mapping[str, SplitInfo]


def token_files(path: Path) -> dict[str, list[Path]]:
    """The token files at data.path by split: one file, NAME of NAME.bin, or those in a directory.

    Empty where there are none.
    """
    if path.is_dir():
        return files_by_split(path, [SUFFIX])
    for file in (path, path.with_name(path.name + SUFFIX)):
        if file.is_file():
            return {'train': [file]}
    return {}


def open_in_place(config: DataConfig, files: Mapping[str, list[Path]]) -> TokenDataset:
    """The dataset of these token files, memory-mapped.

    Headers are checked first, then all ids, unless the same files were opened before. ConfigError
    for files that are damaged, that do not fit one another, or that the settings do not fit.
    """
    if config.lowercase:
        raise ConfigError('data.lowercase=True has no effect on tokens; leave it at False')
    tokenizer = _named_tokenizer(config)
    token_format = _format_of(files)
    if token_format is Headerless and config.token_dtype is None:
        _refuse_lost_index(files)
    shards_of_split = _opened(files, token_format, config.token_dtype)
    first_shard = shards_of_split['train'].shards[0]
    documents = documents_of(
        config.documents,
        tokenizer.separator if tokenizer else None,
        indexed=first_shard.document_ends is not None,
    )
    carved = _missing_splits(tuple(files), config.carve_test)
    if carved:
        shards_of_split |= _carved(shards_of_split['train'], documents, carved)
    splits = [split for split in SPLITS if split in shards_of_split]

    @functools.cache
    def document_ends(split: str) -> np.ndarray:
        return documents.ends(shards_of_split[split])

    def count() -> Counts:
        log.info('Reading the tokens of %s once for their counts', config.path)
        infos = {}
        vocab_size = tokenizer.vocab_size if tokenizer else 0
        for split in splits:
            ends = document_ends(split)
            info, largest = _count(shards_of_split[split], len(ends), tokenizer)
            if tokenizer and split != 'train':
                num_bytes = _num_bytes(shards_of_split[split], ends, tokenizer)
                info = dataclasses.replace(info, num_bytes=num_bytes)
            infos[split] = info
            vocab_size = max(vocab_size, largest + 1)
        return Counts(vocab_size=vocab_size, splits=infos)

    versions = []
    for split, paths in files.items():
        for path in paths:
            versions.append([split, str(path.absolute()), *version_of(path)])
    settings = [
        token_format.name,
        first_shard.ids.dtype.name,
        documents.name,
        carved,
        tokenizer.name if tokenizer else None,
    ]
    counts = _counted_once(config, [settings, versions], count)
    if tokenizer is None:
        separator = getattr(documents, 'separator', None)
        tokenizer = IdTokenizer(counts.vocab_size, separator)
    fingerprints = [counts.splits[split].fingerprint for split in splits]
    digest = hashlib.sha256(' '.join(fingerprints).encode()).hexdigest()[:16]
    return TokenDataset(
        f'tokens-{token_format.name}',
        f'sha256-{digest}-{documents.name}',
        tokenizer,
        {split: counts.splits[split] for split in splits},
        shards_of_split,
        dict.fromkeys(carved, CARVED_FRACTION),
        document_ends,
    )


def _named_tokenizer(config: DataConfig) -> Tokenizer | None:
    """The tokenizer that data.tokenizer names; None where it is unset.

    ConfigError for a kind that would have to be learned.
    """
    if config.tokenizer == DataConfig.tokenizer:
        return None
    cls, _ = vocabulary.check(config.tokenizer)
    if hasattr(cls, 'train'):
        raise ConfigError(
            f'data.tokenizer={config.tokenizer!r} is learned from text, which tokens have not; '
            'name the tokenizer.json that they were made with, or leave it unset'
        )
    return vocabulary.restored(config.tokenizer, None)


def _format_of(files: Mapping[str, list[Path]]) -> type[TokenFormat]:
    """The one format of all files; ConfigError where they are of several."""
    file_by_format: dict[type[TokenFormat], Path] = {}
    for paths in files.values():
        for path in paths:
            matching = [token_format for token_format in FORMATS if token_format.reads(path)]
            if not matching:
                raise ConfigError(
                    f'data.path: {path} is no token file; its name must end in {SUFFIX}'
                )
            file_by_format.setdefault(matching[0], path)
    if len(file_by_format) > 1:
        described = [f'{path} ({kind.name})' for kind, path in file_by_format.items()]
        raise ConfigError(f'data.path has files of several formats: {", ".join(described)}')
    (token_format,) = file_by_format
    return token_format


def _refuse_lost_index(files: Mapping[str, list[Path]]) -> None:
    """Raises ConfigError for files named as prepare_data names them, whose index is not there."""
    for path in files.get('validation', []):
        if path.name == 'validation.bin':
            raise ConfigError(
                f'data.path: {path} is named as prepare_data names its files, but no tokens.json '
                "is beside it; copy that too, or set data.token_dtype, as in 'uint16'"
            )


def _opened(
    files: Mapping[str, list[Path]], token_format: type[TokenFormat], dtype: str | None
) -> dict[str, Shards]:
    """The shards of each split; ConfigError where their ids are of several types."""
    shards_of_split = {}
    shard_by_dtype: dict[str, Shard] = {}
    for split, paths in files.items():
        shards = [token_format.open(path, dtype) for path in paths]
        for shard in shards:
            shard_by_dtype.setdefault(shard.ids.dtype.name, shard)
        shards_of_split[split] = Shards(shards)
    if len(shard_by_dtype) > 1:
        described = [f'{shard.path} ({name})' for name, shard in shard_by_dtype.items()]
        raise ConfigError(f'data.path has ids of several types: {", ".join(described)}')
    return shards_of_split


def _missing_splits(splits: tuple[str, ...], carve_test: bool) -> list[str]:
    """The splits to carve from train: as `corpora.corpus.carved`, test alone only if asked for."""
    missing = [split for split in SPLITS if split not in splits]
    if missing == ['test'] and not carve_test:
        return []
    return missing


def _carved(train: Shards, documents: Documents, missing: list[str]) -> dict[str, Shards]:
    """Train without its last documents, which are the missing splits, a tenth of the ids each."""
    num_kept = 1 - CARVED_FRACTION * len(missing)
    cuts = []
    for number in range(len(missing)):
        position = int(len(train) * (num_kept + CARVED_FRACTION * number))
        cuts.append(documents.next_end(train, position))
    bounds = [0, *cuts, len(train)]
    if sorted(set(bounds)) != bounds:
        raise ConfigError(
            f'data.path: {train.shards[0].path} has too few documents for the splits '
            f'{" and ".join(missing)} to be carved at their ends; give a file for each split, or '
            "other documents, as in data.documents='tokens=1024'"
        )
    return dict(zip(('train', *missing), train.cut(cuts), strict=True))


def _count(ids: Shards, num_documents: int, tokenizer: Tokenizer | None) -> tuple[SplitInfo, int]:
    """Counts of a split, and its largest id.

    ConfigError, with file and position, for an id that the tokenizer does not have.
    """
    end = tokenizer.vocab_size if tokenizer else MAX_SIZE
    digest = hashlib.sha256()
    counts_V = np.zeros(end, np.int64)
    for shard in ids.shards:
        num_read = 0
        for block in blocks(shard.ids):
            if block.min() < 0 or block.max() >= end:
                position = int(np.flatnonzero((block < 0) | (block >= end))[0])
                owner = f'data.tokenizer={tokenizer.name!r} has' if tokenizer else 'valid are'
                raise ConfigError(
                    f'data.path: {shard.path} holds id {block[position]} at token '
                    f'{num_read + position:,}, but {owner} ids from 0 to {end - 1:,}'
                )
            digest.update(block.data)
            counts_V += np.bincount(block, minlength=end)
            num_read += len(block)
    info = SplitInfo(
        num_documents=num_documents,
        num_tokens=len(ids),
        num_bytes=None,
        unigram_nats_per_token=entropy(counts_V),
        fingerprint=digest.hexdigest(),
    )
    return info, int(np.flatnonzero(counts_V)[-1])


def _num_bytes(ids: Shards, ends: np.ndarray, tokenizer: Tokenizer) -> int:
    """The bytes of text that ids stand for, decoded document by document."""
    num_bytes = 0
    start = 0
    for end in ends.tolist():
        num_bytes += tokenizer.num_bytes(ids[start:end])
        start = end
    return num_bytes


def _counted_once(config: DataConfig, key: list, count: Callable[[], Counts]) -> Counts:
    """The counts of the files and settings that `key` describes, counted the first time."""
    root = data_root(config.data_dir)
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    path = root / 'tokens' / 'in_place' / digest / 'counts.json'

    def read_counts() -> Counts:
        try:
            record = parse_file(path, {'splits': {}})
            splits = {split: read(SplitInfo, info) for split, info in record['splits'].items()}
            return read(Counts, record, splits=splits)
        except ValueError as error:
            raise DamagedData(f'{path} cannot be read ({error})') from error

    def write_counts() -> None:
        write_atomic(path, json.dumps(dataclasses.asdict(count()), indent=1) + '\n')

    return prepared_once(path, read_counts, write_counts, root=root)
