"""Makes token datasets from settings: opens the corpus, its tokenizer, and its tokens.

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

    Raises ConfigError if it is unknown or cannot be prepared.
    """
    return load_pairs(config) if config.languages else load_text(config)


def load_text(config: DataConfig) -> TokenDataset:
    """Opens text in one language; see `load`."""
    if config.name == 'tokens':
        return open_tokens(config)
    (dataset,) = _load_sides(config)
    return dataset


def open_tokens(config: DataConfig) -> TokenDataset:
    """Opens the tokens at `config.path`, of prepare_data or of another tool; see `load`."""
    path = local_directory(config.path, 'data.path')
    if not is_prepared(path):
        files = token_files(path)
        if files:
            return open_in_place(config, files)
    return open_prepared(config)


def load_split(config: DataConfig, split: str, tokenizer: Tokenizer) -> TokenDataset:
    """Opens one split of a text in the ids of a tokenizer; see `load`.

    The tokenizer is of the kind `config.tokenizer`, but may be learned from another text. Only this
    split is tokenized, into a directory of its own. Raises ConfigError if the text does not have
    the split.
    """
    corpus = find(config)
    if split not in corpus.splits:
        raise ConfigError(
            f'{corpus.name} has no split {split!r}; valid: {", ".join(corpus.splits)}'
        )
    root = data_root(config.data_dir)
    directory = root / 'tokens' / corpus.name / corpus.version / tokenizer.name / split
    carved = {}
    if split in corpus.carved:
        carved[split] = corpus.carved[split]
    only_split = dataclasses.replace(corpus, splits=(split,), carved=carved)
    return _open_or_write_tokens(directory, only_split, config.tokenizer, tokenizer, root=root)


def load_pairs(config: DataConfig) -> PairDataset:
    """Opens parallel text; see `load`."""
    source, target = _load_sides(config)
    return PairDataset(source, target)


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """Returns the tokenizer of a dataset, which is learned from its train split the first time."""
    if config.name == 'tokens':
        return open_tokens(config).tokenizer
    return _tokenizer_of_corpus(config, find(config))


def _tokenizer_of_corpus(config: DataConfig, corpus: Corpus) -> Tokenizer:
    """Opens the tokenizer of a corpus, and trains it the first time if it is a learned one.

    Both languages of parallel text share one tokenizer.
    """

    def training_texts() -> Iterator[bytes]:
        for language in corpus.languages or (None,):
            yield from corpus.documents(language)['train']

    try:
        return open_tokenizer(
            root=data_root(config.data_dir),
            corpus=f'{corpus.name}/{corpus.version}',
            kind=config.tokenizer,
            size=config.tokenizer_size,
            texts=training_texts,
        )
    except ConfigError:
        raise
    except ValueError as error:  # text that is not valid UTF-8
        raise ConfigError(f'data.name={config.name!r} cannot be tokenized: {error}') from error


def _load_sides(config: DataConfig) -> list[TokenDataset]:
    """Opens the tokens of a corpus: two datasets for parallel text, source and target, else one."""
    corpus = find(config)
    root = data_root(config.data_dir)
    tokenizer = _tokenizer_of_corpus(config, corpus)
    # Each language of parallel text is tokenized as a corpus of its own.
    sides = [corpus]
    if corpus.languages:
        sides = [_one_language(corpus, language) for language in corpus.languages]
    datasets = []
    for side in sides:
        directory = root / 'tokens' / side.name / side.version / tokenizer.name
        dataset = _open_or_write_tokens(directory, side, config.tokenizer, tokenizer, root=root)
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
    """Opens the tokens of a corpus, and writes them first if they are missing or damaged.

    Args:
      directory: the directory of the tokens.
      corpus: the text in one language.
      kind: the value of data.tokenizer, which is stored beside the tokens.
      tokenizer: the tokenizer of this kind.
      root: the directory that the user has named: `directory` itself or a parent of it.
      workers: the number of processes that tokenize.

    Raises:
      ConfigError: the directory holds tokens of another corpus or tokenizer.
    """

    def read() -> TokenDataset:
        """Opens the tokens; raises DamagedData if they have to be written again."""
        index = read_index(directory, corpus.splits[:1])
        expected = (corpus.name, corpus.version, tokenizer.name)
        stored = (index.name, index.version, index.tokenizer_name)
        if stored != expected:
            raise ConfigError(
                f'{directory} holds tokens of {" ".join(stored)}; give another directory'
            )
        return open_index(directory, index, tokenizer, compare=True)

    def write() -> None:
        write_tokens(directory, kind, corpus, tokenizer, workers)

    return read_or_prepare(directory / INDEX, read, write, root=root)


def prepare(config: DataConfig, out: str, workers: int = 1) -> TokenDataset:
    """Tokenizes all splits of a dataset into a directory, unless they are there already.

    Args:
      config: names the dataset and its tokenizer.
      out: the directory. It may be new, empty, or hold the tokens of an earlier call, even of one
        that was killed.
      workers: the number of processes that tokenize. The files do not depend on it.

    Raises:
      ConfigError: the dataset cannot be read, is a translation set, or has no text; or the
        directory cannot be written to, or holds other tokens or other files.
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
    # A tokenizer.json can be used with either of two separators between documents. If the directory
    # has tokens already, the name of their tokenizer tells which one they have.
    with use_recorded_tokenizers(*_stored_tokenizer(directory)):
        tokenizer = _tokenizer_of_corpus(config, corpus)
    return _open_or_write_tokens(directory, corpus, config.tokenizer, tokenizer, directory, workers)


def _may_hold_tokens(directory: Path) -> bool:
    """Whether a directory is missing, empty, or one into which `prepare` has written."""
    if not directory.is_dir():
        return True
    file_names = {path.name for path in directory.iterdir()}
    if not file_names:
        return True
    # The directory of a run or a study has a file `lock`, too.
    if 'config.json' in file_names or 'study.json' in file_names:
        return False
    # If `prepare` was killed, it has left `lock`, but no index.
    return INDEX in file_names or 'lock' in file_names


def _stored_tokenizer(directory: Path) -> list[str]:
    """Returns the name of the tokenizer of the tokens in a directory; [] if it cannot be read."""
    try:
        return [read_index(directory).tokenizer_name]
    except DamagedData:
        return []
