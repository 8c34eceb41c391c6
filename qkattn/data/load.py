"""From settings to token datasets: the corpus, its tokenizer, and the shards of its tokens.

The cache holds a corpus in the format of `qkattn prepare_data`, a shard per split, in the directory
`<data_dir>/tokens/<name>/<version>/<tokenizer>`.
"""

import dataclasses
import functools
import itertools
import logging
import os
from collections.abc import Iterator

import numpy as np

from qkattn.config import DataConfig
from qkattn.data.cache import DamagedData, data_root, prepared_once
from qkattn.data.corpora.corpus import Corpus
from qkattn.data.corpora.corpus_registry import find
from qkattn.data.open_shards import (
    INDEX,
    Index,
    finished_index,
    indexed,
    open_shards,
    planned,
    problems,
    read_index,
)
from qkattn.data.shard_files import files_at
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import open_tokenizer
from qkattn.data.tokens import PairDataset, TokenDataset
from qkattn.data.write_shards import write_shards
from qkattn.errors import ConfigError
from qkattn.storage.files import expanded
from qkattn.storage.leases import locked

log = logging.getLogger(__name__)


def load(config: DataConfig) -> TokenDataset | PairDataset:
    """Opens the dataset, preparing it under its data directory the first time.

    Raises:
      ConfigError: a dataset that is unknown, cannot be fetched, or cannot be tokenized as set.
    """
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
    return open_tokenizer(
        data_root(config.data_dir),
        kind=config.tokenizer,
        size=config.tokenizer_size,
        name=corpus.name,
        version=corpus.version,
        texts=lambda: itertools.chain.from_iterable(corpus.documents(x)['train'] for x in sides),
    )


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
    # One shard, however many tokens it has, is memory-mapped whole.
    plan = planned(config.tokenizer, corpus, tokenizer, dtype=dtype, shard_tokens=2**62)
    root = data_root(config.data_dir)
    directory = root / 'tokens' / plan.name / plan.version / tokenizer.name

    def opened() -> TokenDataset:
        # os.path, because Path.exists raises where a directory may not be entered.
        if not os.path.exists(directory / INDEX):
            raise FileNotFoundError(directory)
        files = files_at(str(directory))
        index = read_index(files)
        for field, stored, expected in index.differences(plan):
            raise DamagedData(f'{directory} has {field}={stored!r}, not {expected!r}')
        if not index.complete:
            raise FileNotFoundError(directory)
        for problem in problems(files, index, tokens=True):
            raise DamagedData(problem)
        return indexed(files, index, tokenizer)

    def write() -> None:
        log.info('Writing tokens of %s %s to %s', plan.name, plan.version, directory)
        for split, share in corpus.carved.items():
            percent = 100 * share
            log.info('%s has no %s split: %.0f %% of train are carved', plan.name, split, percent)
        write_shards(directory, plan, corpus, tokenizer)

    return prepared_once(directory / 'lock', opened, write)


def prepare(config: DataConfig, out: str, *, workers: int, shard_tokens: int) -> Index:
    """Tokenizes all splits of a dataset into shards below `out`, or goes on with that.

    Args:
      workers: processes that tokenize.
      shard_tokens: a shard is closed behind the document that reaches so many.

    Raises:
      ConfigError: a dataset that cannot be read, is a translation set, or lacks text; a directory
        that cannot be written, holds other shards, or is being prepared by another process.
    """
    if '://' in out:
        raise ConfigError(
            f'--out={out} is a URL; prepare the shards in a local directory and copy it, for '
            f'example with gcloud storage cp -r DIRECTORY {out}'
        )
    for flag, value in (('workers', workers), ('shard_tokens', shard_tokens)):
        if value < 1:
            raise ConfigError(f'--{flag}={value} must be at least 1')
    if config.languages:
        raise ConfigError(
            f'data.languages={config.languages!r} is a translation set; shards hold text in one '
            'language'
        )
    try:
        corpus = find(config)
        tokenizer = _tokenizer(config, corpus)
    except ConfigError:
        raise
    except ValueError as error:  # a tokenizer that cannot be learned from the text
        raise ConfigError(f'data.name={config.name!r} cannot be tokenized: {error}') from error
    dtype = 'uint16' if tokenizer.vocab_size <= 2**16 else 'uint32'  # those that llm.c reads
    plan = planned(config.tokenizer, corpus, tokenizer, dtype=dtype, shard_tokens=shard_tokens)
    directory = expanded(out)
    try:
        with locked(directory / 'lock', wait=False):
            files = files_at(str(directory))
            if INDEX in files.sizes():
                index = read_index(files)
                for field, stored, expected in index.differences(plan):
                    raise ConfigError(
                        f'--out={directory} holds shards with {field}={stored!r}, not '
                        f'{expected!r}; give another directory'
                    )
                if index.complete and not any(problems(files, index, tokens=True)):
                    log.info('%s is complete', directory)
                    return index
            return write_shards(directory, plan, corpus, tokenizer, workers=workers)
    except DamagedData as error:
        raise ConfigError(f'{error}; copy it again, or give another directory') from error
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
    yield from problems(files, finished_index(files), tokens=True)
