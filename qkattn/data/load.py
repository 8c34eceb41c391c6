"""Opens token datasets from settings.

Tokens are cached in `<data_dir>/tokens/<name>/<version>/<tokenizer>`.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from qkattn.config import DataConfig
from qkattn.data.cache import DamagedData, data_root, local_directory, read_or_prepare
from qkattn.data.corpora.corpus import Corpus
from qkattn.data.corpora.corpus_registry import find
from qkattn.data.token_files import (
    INDEX,
    is_prepared,
    open_index,
    open_prepared,
    read_index,
    write_tokens,
)
from qkattn.data.token_formats.in_place import open_in_place, token_files
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import open_tokenizer, use_recorded_tokenizers
from qkattn.data.tokens import PairDataset, TokenDataset
from qkattn.errors import ConfigError


def load(config: DataConfig) -> TokenDataset | PairDataset:
    """Opens a dataset, and prepares it the first time.

    Raises:
        ConfigError: The dataset is unknown or cannot be prepared.
    """
    if config.languages:
        return load_pairs(config)
    return load_text(config)


def load_text(config: DataConfig) -> TokenDataset:
    """Opens text in one language; see `load`."""
    if config.name == 'tokens':
        return open_tokens(config)
    (dataset,) = _load_sides(config)  # only parallel text has two sides
    return dataset


def open_tokens(config: DataConfig) -> TokenDataset:
    """Opens the tokens at `config.path`, made by prepare_data or another tool."""
    path = local_directory(config.path, 'data.path')
    if not is_prepared(path):
        files_of_split = token_files(path)  # of another tool
        if files_of_split:
            return open_in_place(config, files_of_split)
    return open_prepared(config)


def load_split(config: DataConfig, split: str, tokenizer: Tokenizer) -> TokenDataset:
    """Opens one split of a text, tokenized with a given tokenizer.

    Args:
        config: The settings of the text.
        split: The only split that is tokenized and opened.
        tokenizer: A tokenizer of the kind `config.tokenizer`, even one trained on another text.

    Raises:
        ConfigError: The text has no such split or cannot be prepared.
    """
    corpus = find(config)
    if split not in corpus.splits:
        raise ConfigError(
            f'{corpus.name} has no split {split!r}; valid: {", ".join(corpus.splits)}'
        )
    root = data_root(config.data_dir)
    directory = root / 'tokens' / corpus.name / corpus.version / tokenizer.name / split
    # A split that is cut off train has an entry in `carved`, such as {'test': 0.1}.
    carved = {}
    if split in corpus.carved:
        carved[split] = corpus.carved[split]
    corpus_of_split = dataclasses.replace(corpus, splits=(split,), carved=carved)
    return _open_or_write_tokens(directory, corpus_of_split, config.tokenizer, tokenizer, root)


def load_pairs(config: DataConfig) -> PairDataset:
    """Opens parallel text; see `load`."""
    source, target = _load_sides(config)
    return PairDataset(source, target)


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """Returns the tokenizer of a dataset, and trains it the first time if it is learned."""
    if config.name == 'tokens':
        return open_tokens(config).tokenizer
    return _tokenizer_of_corpus(config, find(config))


def _tokenizer_of_corpus(config: DataConfig, corpus: Corpus) -> Tokenizer:
    """Opens the tokenizer of a corpus, and trains it the first time if it is learned."""

    def training_texts() -> Iterator[bytes]:
        # The languages of parallel text share one tokenizer.
        languages = corpus.languages or (None,)
        for language in languages:
            yield from corpus.documents(language)['train']

    try:
        return open_tokenizer(
            root=data_root(config.data_dir),
            corpus=f'{corpus.name}/{corpus.version}',
            kind=config.tokenizer,
            size=config.tokenizer_size,
            texts=training_texts,
        )
    except ConfigError:  # has a message of its own
        raise
    except ValueError as error:  # text that is not valid UTF-8
        raise ConfigError(f'data.name={config.name!r} cannot be tokenized: {error}') from error


def _load_sides(config: DataConfig) -> list[TokenDataset]:
    """Opens source and target datasets of parallel text, or the one dataset of other text."""
    corpus = find(config)
    root = data_root(config.data_dir)
    tokenizer = _tokenizer_of_corpus(config, corpus)
    if corpus.languages:
        sides = [_one_language(corpus, language) for language in corpus.languages]
    else:
        sides = [corpus]
    datasets = []
    for side in sides:
        directory = root / 'tokens' / side.name / side.version / tokenizer.name
        dataset = _open_or_write_tokens(directory, side, config.tokenizer, tokenizer, root)
        datasets.append(dataset)
    return datasets


def _one_language(corpus: Corpus, language: str) -> Corpus:
    """Returns one language of parallel text as a corpus of its own."""
    return dataclasses.replace(
        corpus,
        name=f'{corpus.name}/{language}',
        languages=(),
        documents=lambda _: corpus.documents(language),
    )


def _open_or_write_tokens(
    directory: Path,
    corpus: Corpus,
    kind: str,
    tokenizer: Tokenizer,
    root: Path,
    workers: int = 1,
) -> TokenDataset:
    """Opens the tokens of a corpus, writing them first if they are missing or damaged.

    Args:
        directory: The directory of the tokens.
        corpus: A text in one language.
        kind: The value of data.tokenizer.
        tokenizer: The tokenizer of this kind.
        root: The directory named by the user, `directory` or a parent.
        workers: Number of processes that tokenize.

    Raises:
        ConfigError: The directory holds tokens of another corpus or tokenizer.
    """

    def read() -> TokenDataset:
        required_splits = corpus.splits[:1]  # 'train', unless the corpus has only another split
        index = read_index(directory, required_splits)
        expected = (corpus.name, corpus.version, tokenizer.name)
        stored = (index.name, index.version, index.tokenizer_name)
        if stored != expected:
            raise ConfigError(
                f'{directory} holds tokens of {" ".join(stored)}; give another directory'
            )
        return open_index(directory, index, tokenizer, compare=True)

    def write() -> None:
        write_tokens(directory, kind, corpus, tokenizer, workers)

    return read_or_prepare(directory / INDEX, read=read, prepare=write, root=root)


def prepare(config: DataConfig, out: str, workers: int = 1) -> TokenDataset:
    """Tokenizes all splits of a dataset into a directory, unless this was done before.

    Args:
        config: Names the dataset and its tokenizer.
        out: The directory: new, empty, or from an earlier call that may have been killed.
        workers: Number of processes that tokenize. The result is the same for any number.

    Raises:
        ConfigError: The dataset cannot be read, is a translation set, or has no text; or the
            directory is not writable, or holds other tokens or files.
    """
    directory = local_directory(out, '--out')
    if not _may_hold_tokens(directory):
        raise ConfigError(f'--out={out} holds files that are no tokens; give another directory')
    if config.languages:
        raise ConfigError(
            f'data.languages={config.languages!r} is a translation set; prepare_data takes text in '
            'one language'
        )
    corpus = find(config)
    # A tokenizer.json allows two separators between documents. Use that of existing tokens, which
    # is part of their tokenizer's name.
    stored_names = _stored_tokenizer_names(directory)
    with use_recorded_tokenizers(*stored_names):
        tokenizer = _tokenizer_of_corpus(config, corpus)
    return _open_or_write_tokens(directory, corpus, config.tokenizer, tokenizer, directory, workers)


def _may_hold_tokens(directory: Path) -> bool:
    """Whether a directory is missing, empty, or written by `prepare`."""
    if not directory.is_dir():
        return True
    file_names = {path.name for path in directory.iterdir()}
    if not file_names:
        return True
    is_run_or_study = 'config.json' in file_names or 'study.json' in file_names
    if is_run_or_study:  # has a file `lock`, too
        return False
    # A killed `prepare` has left `lock`, but no index.
    return INDEX in file_names or 'lock' in file_names


def _stored_tokenizer_names(directory: Path) -> list[str]:
    """Returns the tokenizer name of the tokens in a directory, in a list; [] without tokens."""
    try:
        return [read_index(directory).tokenizer_name]
    except DamagedData:
        return []
