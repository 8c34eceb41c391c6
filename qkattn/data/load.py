"""From settings to datasets: the corpus, its tokenizer and its token files."""

import itertools
from collections.abc import Iterable
from pathlib import Path

from qkattn.config import DataConfig
from qkattn.data.cache import data_root
from qkattn.data.corpora.corpus import Corpus
from qkattn.data.corpora.corpus_registry import find
from qkattn.data.parallel import PairDataset
from qkattn.data.shards.open_shards import open_shards
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import open_tokenizer
from qkattn.data.tokens import TokenDataset, open_dataset


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
    return _tokenizer(config, find(config), data_root(config.data_dir))


def _sides(config: DataConfig) -> list[TokenDataset]:
    corpus, root = find(config), data_root(config.data_dir)
    tokenizer = _tokenizer(config, corpus, root)
    return [_tokens(corpus, tokenizer, root, language) for language in corpus.languages or (None,)]


def _tokenizer(config: DataConfig, corpus: Corpus, root: Path) -> Tokenizer:
    def training_texts() -> Iterable[bytes]:
        languages = corpus.languages or (None,)
        return itertools.chain.from_iterable(corpus.documents(x)['train'] for x in languages)

    return open_tokenizer(
        root,
        kind=config.tokenizer,
        size=config.tokenizer_size,
        name=corpus.name,
        version=corpus.version,
        texts=training_texts,
    )


def _tokens(corpus: Corpus, tokenizer: Tokenizer, root: Path, language: str | None) -> TokenDataset:
    return open_dataset(
        root,
        name=corpus.name if language is None else f'{corpus.name}/{language}',
        version=corpus.version,
        tokenizer=tokenizer,
        documents=lambda: corpus.documents(language),
        splits=corpus.splits,
        names=corpus.names,
        carved=corpus.carved,
    )
