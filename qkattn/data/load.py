"""From settings to token datasets: the corpus, its tokenizer, and the shards of its tokens.

Cached, one shard per split, in `<data_dir>/tokens/<name>/<version>/<tokenizer>`.
"""

import dataclasses
import functools
import itertools
import logging
import os
from pathlib import Path

import numpy as np

from qkattn.config import DataConfig
from qkattn.data.cache import DamagedData, data_root, local_directory, prepared_once
from qkattn.data.corpora.corpus import Corpus
from qkattn.data.corpora.corpus_registry import find
from qkattn.data.shards import (
    INDEX,
    Index,
    map_shard,
    open_index,
    open_shards,
    planned,
    read_index,
)
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import open_tokenizer
from qkattn.data.tokens import PairDataset, TokenDataset
from qkattn.data.write_shards import write_shards
from qkattn.errors import ConfigError
from qkattn.storage.leases import locked

log = logging.getLogger(__name__)


def load(config: DataConfig) -> TokenDataset | PairDataset:
    """The dataset, prepared the first time; ConfigError if it is unknown or cannot be prepared."""
    return load_pairs(config) if config.languages else load_text(config)


def load_text(config: DataConfig) -> TokenDataset:
    """Opens text in one language; see `load`."""
    return open_shards(config) if config.name == 'shards' else _sides(config)[0]


def load_pairs(config: DataConfig) -> PairDataset:
    """Opens parallel text; see `load`."""
    return PairDataset(*_sides(config))


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """The dataset's tokenizer, learned from its training split the first time."""
    if config.name == 'shards':
        return open_shards(config).tokenizer
    return _tokenizer(config, find(config))


def _tokenizer(config: DataConfig, corpus: Corpus) -> Tokenizer:
    sides = corpus.languages or (None,)
    try:
        return open_tokenizer(
            data_root(config.data_dir) / 'tokenizers' / corpus.name / corpus.version,
            config.tokenizer,
            config.tokenizer_size,
            lambda: itertools.chain.from_iterable(corpus.documents(x)['train'] for x in sides),
        )
    except ConfigError:
        raise
    except ValueError as error:  # text that is not valid UTF-8
        raise ConfigError(f'data.name={config.name!r} cannot be tokenized: {error}') from error


def _sides(config: DataConfig) -> list[TokenDataset]:
    corpus = find(config)
    tokenizer = _tokenizer(config, corpus)
    sides = [_side(corpus, language) for language in corpus.languages] or [corpus]
    return [_cached(config, side, tokenizer) for side in sides]


def _side(corpus: Corpus, language: str) -> Corpus:
    """One language of parallel text as text."""
    documents = functools.partial(corpus.documents, language)
    name = f'{corpus.name}/{language}'
    return dataclasses.replace(corpus, name=name, languages=(), documents=lambda _: documents())


def _cached(config: DataConfig, corpus: Corpus, tokenizer: Tokenizer) -> TokenDataset:
    """The tokens of a corpus in the cache, which are written where they are missing or damaged."""
    dtype = str(np.min_scalar_type(tokenizer.vocab_size - 1))
    # One shard, however many tokens it has.
    plan = planned(config.tokenizer, corpus, tokenizer, dtype=dtype, shard_tokens=2**62)
    root = data_root(config.data_dir)
    directory = root / 'tokens' / plan.name / plan.version / tokenizer.name

    def opened() -> TokenDataset:
        # os.path, because Path.exists raises where a directory may not be entered.
        if not os.path.exists(directory / INDEX):
            raise FileNotFoundError(directory)
        index = read_index(directory)
        if difference := index.difference(plan):
            raise DamagedData(f'{directory} has {difference}')
        if not index.complete:
            raise FileNotFoundError(directory)
        return open_index(directory, index, tokenizer, compare=True)

    def write() -> None:
        log.info('Writing tokens of %s %s to %s', plan.name, plan.version, directory)
        for split, share in corpus.carved.items():
            percent = 100 * share
            log.info('%s has no %s split: %.0f %% of train are carved', plan.name, split, percent)
        write_shards(directory, plan, corpus, tokenizer)

    return prepared_once(directory / 'lock', opened, write)


def prepare(config: DataConfig, out: str, *, shard_tokens: int) -> Index:
    """Tokenizes all splits of a dataset into shards in the directory `out`, or goes on with that.

    A shard is closed behind the document that reaches `shard_tokens`. ConfigError if the dataset
    cannot be read, is a translation set, or lacks text; if the directory cannot be written, holds
    other shards, or is being prepared by another process.
    """
    directory = local_directory(out, '--out')
    if config.languages:
        raise ConfigError(
            f'data.languages={config.languages!r} is a translation set; shards hold text in one '
            'language'
        )
    corpus = find(config)
    tokenizer = _tokenizer(config, corpus)
    dtype = 'uint16' if tokenizer.vocab_size <= 2**16 else 'uint32'  # those that llm.c reads
    plan = planned(config.tokenizer, corpus, tokenizer, dtype=dtype, shard_tokens=shard_tokens)
    try:
        with locked(directory / 'lock', wait=False):
            if (directory / INDEX).exists():
                index = read_index(directory)
                if difference := index.difference(plan):
                    raise ConfigError(
                        f'--out={out} holds shards with {difference}; give another directory'
                    )
                if not verify(out):
                    log.info('%s is complete', out)
                    return index
            return write_shards(directory, plan, corpus, tokenizer)
    except BlockingIOError as error:
        raise ConfigError(
            f'--out={out} is being prepared by another process; wait until it has finished'
        ) from error


def verify(out: str | Path) -> list[str]:
    """The problems of shards, compared by sha256; ConfigError if the index cannot be read."""
    directory = local_directory(out, '--out')
    index, problems = read_index(directory), []
    for info in index.splits.values():
        for shard in info.shards:
            try:
                map_shard(directory, index, shard, compare=True)
            except DamagedData as error:
                problems.append(str(error))
    return problems if index.complete else [*problems, f'{directory} is not finished']
