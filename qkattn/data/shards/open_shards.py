"""Opens token shards: those of `qkattn prepare_data`, of nanoGPT and of llm.c.

Opening reads the index, or the head of each file, and compares sizes; the tokens are read where a
row needs them.
"""

import dataclasses
import fnmatch
import hashlib
import logging
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from qkattn.config import DataConfig
from qkattn.data.corpora.corpus import SHARE, SPLITS, Corpus
from qkattn.data.shards.shard_dataset import ShardDataset, documents_of
from qkattn.data.shards.shard_files import Files, ShardTokens, check_size, files_at, shard_of
from qkattn.data.shards.shard_index import (
    INDEX,
    check_settings,
    read_index,
    stored_tokenizer,
)
from qkattn.data.tokenizers.subwords import FileTokenizer
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import restored
from qkattn.data.tokens import SplitInfo
from qkattn.errors import ConfigError

# Of the files without an index, which go into their fingerprint.
HEAD = 1 << 16
# The name of a set in that of a file, the word that says its split, and the number of the shard.
NAMED = re.compile(r'(?:(.*)[_.-])?(train|validation|valid|val|dev|test)(?:[_.-]?(\d+))?\.bin')
ALIASES = dict.fromkeys(('val', 'valid', 'dev'), 'validation')
# Vocabulary and separator of shards that others made: GPT-2's, and Llama 3's.
VOCABULARIES = {'uint16': 'ids', 'uint32': 'ids(vocab_size=128256, separator=128000)'}
# How far from its place a split that is carved looks for the end of a document.
REACH = 1 << 20

log = logging.getLogger(__name__)


def corpus(config: DataConfig) -> Corpus:
    """The texts that the shards at `config.path` decode to.

    Raises:
      ConfigError: as `open_shards`; while texts are read, a tokenizer that has none.
    """
    dataset = open_shards(config)

    def texts(split: str) -> Iterator[bytes]:
        for ids in documents_of(dataset, split):
            yield dataset.tokenizer.decode(ids[ids != dataset.tokenizer.separator]).encode()

    def documents(language: str | None) -> dict[str, Iterable[bytes]]:
        return {split: texts(split) for split in dataset.splits}

    return Corpus(
        name=dataset.name,
        version=dataset.version,
        splits=dataset.splits,
        documents=documents,
        names=dataset.document_names,
        carved=dataset.carved,
    )


def open_shards(config: DataConfig) -> ShardDataset:
    """Opens the shards at `config.path`: a directory, or `DIRECTORY/PATTERN`, or either as a URL.

    Raises:
      ConfigError: files that are missing, damaged or of an unknown layout; settings that fit
        neither the shards nor their index.
    """
    path, pattern = config.path.rstrip('/'), '*.bin'
    if re.search(r'[*?[]', path):
        path, _, pattern = path.rpartition('/')
    files = files_at(path or '.')
    sizes = files.sizes()
    if INDEX in sizes and pattern == '*.bin':
        dataset = _indexed(config, files, sizes)
    else:
        dataset = _without_index(config, files, fnmatch.filter(sorted(sizes), pattern), sizes)
    return _carved(dataset, config)


def _indexed(config: DataConfig, files: Files, sizes: Mapping[str, int]) -> ShardDataset:
    index = read_index(files)
    again = 'copy it again, or repeat the command that made the shards'
    if not index.complete:
        raise ConfigError(
            f'{files.where} is not finished; repeat the command qkattn prepare_data --out='
            f'{files.where}, which goes on'
        )
    check_settings(config, index)
    splits = {}
    for split, found in index.splits.items():
        shards = index.shards(split)
        for shard in shards:
            check_size(shard, sizes.get(shard.file), files.where, again)
        info = SplitInfo(
            dataset=index.name,
            version=index.version,
            tokenizer=index.tokenizer_name,
            split=split,
            dtype=index.dtype,
            **{
                field.name: getattr(found, field.name)
                for field in dataclasses.fields(found)
                if field.name != 'shards'
            },
        )
        splits[split] = (ShardTokens(files, shards), info)
    tokenizer = stored_tokenizer(files, index)
    return ShardDataset(index.name, index.version, tokenizer, splits, index.carved)


def _without_index(
    config: DataConfig, files: Files, names: list[str], sizes: Mapping[str, int]
) -> ShardDataset:
    check_settings(config, None)
    name, by_split = _splits_of(config, names)
    heads = dict(zip(names, files.heads(names, HEAD), strict=True))
    shards = {
        split: [shard_of(file, sizes[file], heads[file], files.where) for file in of_split]
        for split, of_split in by_split.items()
    }
    dtypes = sorted({shard.dtype for of_split in shards.values() for shard in of_split})
    if len(dtypes) > 1:
        raise ConfigError(
            f'data.path={config.path!r} holds shards of {" and ".join(dtypes)}, which have '
            'different vocabularies; name those of one with DIRECTORY/PATTERN.'
        )
    tokenizer = _tokenizer(config, dtypes[0])
    splits = {}
    for split, of_split in shards.items():
        digest = hashlib.sha256()
        for shard in of_split:
            head = hashlib.sha256(heads[shard.file]).hexdigest()
            digest.update(f'{shard.file} {shard.size} {head}\n'.encode())
        tokens = ShardTokens(files, of_split)
        splits[split] = (
            tokens,
            _unknown(name, tokenizer, split, dtypes[0], tokens, digest.hexdigest()),
        )
        log.info(
            '%s: %s of %d shard%s, %s tokens',
            name,
            split,
            len(of_split),
            's' * (len(of_split) > 1),
            f'{len(tokens):,}',
        )
    log.info('%s has no index: its ids are taken for those of %s', name, tokenizer.name)
    return ShardDataset(name, 'bin', tokenizer, splits)


def _unknown(
    name: str,
    tokenizer: Tokenizer,
    split: str,
    dtype: str,
    tokens: ShardTokens,
    fingerprint: str,
) -> SplitInfo:
    return SplitInfo(
        dataset=name,
        version='bin',
        tokenizer=tokenizer.name,
        split=split,
        dtype=dtype,
        num_documents=None,
        document_names=None,
        num_tokens=len(tokens),
        num_bytes=None,
        unigram_nats_per_token=None,
        fingerprint=fingerprint,
    )


def _splits_of(config: DataConfig, names: list[str]) -> tuple[str, dict[str, list[str]]]:
    """The name of the set, and its files by split, in the order of their names."""
    found: dict[str, list[str]] = {}
    numbers: dict[str, set[int]] = {}
    prefixes = set()
    for file in names:
        if match := NAMED.fullmatch(file):
            prefixes.add(match[1] or '')
            split = ALIASES.get(match[2], match[2])
            found.setdefault(split, []).append(file)
            numbers.setdefault(split, set()).add(int(match[3] or 0))
    if 'train' not in found:
        raise ConfigError(
            f'data.path={config.path!r} holds no train shards; their names have to be like '
            f'train.bin, fineweb_train_000001.bin or fineweb_val_000000.bin'
            f'{", not " + names[0] if names else ""}.'
        )
    if len(prefixes) > 1:
        raise ConfigError(
            f'data.path={config.path!r} holds shards of {" and ".join(sorted(map(repr, prefixes)))}'
            '; name those of one set with DIRECTORY/PATTERN.'
        )
    for split, present in numbers.items():
        if absent := sorted(set(range(min(present), max(present))) - present):
            text = ', '.join(map(str, absent[:5])) + ', ...' * (len(absent) > 5)
            log.warning('%s: %s has no shards with the numbers %s', config.path, split, text)
    directory = re.sub(r'[^\w.-]', '-', config.path.rstrip('/').rsplit('/', 2)[-1])
    return prefixes.pop() or directory, {s: found[s] for s in SPLITS if s in found}


def _tokenizer(config: DataConfig, dtype: str) -> Tokenizer:
    if config.tokenizer == DataConfig.tokenizer:
        return restored(VOCABULARIES[dtype], None)
    if config.tokenizer.endswith('.json'):
        return FileTokenizer.of_shards(config.tokenizer)
    if config.tokenizer.partition('(')[0] == 'ids' or ':' in config.tokenizer:
        return restored(config.tokenizer, None)
    raise ConfigError(
        f'data.tokenizer={config.tokenizer!r} cannot be that of shards without an index; set '
        "'ids(vocab_size=N, separator=ID)' or the tokenizer.json that they were made with."
    )


def _carved(dataset: ShardDataset, config: DataConfig) -> ShardDataset:
    """The dataset with a validation split, carved from the end of train as those of a corpus are.

    Raises:
      ConfigError: train is too short.
    """
    missing = [split for split in ('validation', 'test') if split not in dataset.splits]
    if not missing or (missing == ['test'] and not config.carve_test):
        return dataset
    tokens, info = dataset.split('train'), dataset.info('train')
    share = 1 - SHARE * np.arange(len(missing), -1, -1)
    bounds = [_document_end(dataset, round(part * len(tokens))) for part in share]
    bounds = [0, *bounds]
    splits = {split: (dataset.split(split), dataset.info(split)) for split in dataset.splits}
    for split, low, high in zip(('train', *missing), bounds[:-1], bounds[1:], strict=True):
        if low >= high:
            raise ConfigError(
                f'data.path={config.path!r} has no {missing[0]} shards, and too few tokens in '
                f'train, {len(tokens):,}, to carve one from; give it one.'
            )
        digest = hashlib.sha256(f'{info.fingerprint} {low} {high}'.encode()).hexdigest()
        part = tokens.part(low, high)
        splits[split] = (
            part,
            _unknown(dataset.name, dataset.tokenizer, split, info.dtype, part, digest),
        )
        if split != 'train':
            log.info(
                '%s has no %s split: %.0f %% of train are carved', dataset.name, split, 100 * SHARE
            )
    version = '-'.join((dataset.version, 'carved', *missing))
    ordered = {split: splits[split] for split in SPLITS if split in splits}
    carved = {**dataset.carved, **dict.fromkeys(missing, SHARE)}
    return ShardDataset(dataset.name, version, dataset.tokenizer, ordered, carved)


def _document_end(dataset: ShardDataset, place: int) -> int:
    """The first end of a document at or behind `place`, or `place` if that is far."""
    tokens, before = dataset.split('train'), max(place - 1, 0)
    near = tokens.windows(np.array([before]), min(REACH, len(tokens) - before))[0]
    found = np.flatnonzero(near == dataset.tokenizer.separator)
    return before + int(found[0]) + 1 if found.size else place
