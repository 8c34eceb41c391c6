"""From settings to token datasets: the corpus, its tokenizer, and its tokens.

Cached in `<data_dir>/tokens/<name>/<version>/<tokenizer>`.
"""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

from qkattn.config import DataConfig
from qkattn.data.cache import DamagedData, data_root, local_directory, prepared_once
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
from qkattn.data.tokenizers.vocabulary import as_recorded, open_tokenizer
from qkattn.data.tokens import PairDataset, TokenDataset
from qkattn.errors import ConfigError


def load(config: DataConfig) -> TokenDataset | PairDataset:
    """The dataset, prepared the first time; ConfigError if it is unknown or cannot be prepared."""
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


def load_pairs(config: DataConfig) -> PairDataset:
    """Opens parallel text; see `load`."""
    source, target = _load_sides(config)
    return PairDataset(source, target)


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """The dataset's tokenizer, learned from its training split the first time."""
    if config.name == 'tokens':
        return open_tokens(config).tokenizer
    return _tokenizer_of_corpus(config, find(config))


def _tokenizer_of_corpus(config: DataConfig, corpus: Corpus) -> Tokenizer:
    """The tokenizer of a corpus, of parallel text one for both languages."""

    def training_texts() -> Iterator[bytes]:
        for language in corpus.languages or (None,):
            yield from corpus.documents(language)['train']

    try:
        return open_tokenizer(
            data_root(config.data_dir),
            f'{corpus.name}/{corpus.version}',
            config.tokenizer,
            config.tokenizer_size,
            training_texts,
        )
    except ConfigError:
        raise
    except ValueError as error:  # text that is not valid UTF-8
        raise ConfigError(f'data.name={config.name!r} cannot be tokenized: {error}') from error


def _load_sides(config: DataConfig) -> list[TokenDataset]:
    """The tokens of source and target of parallel text; of other text the one dataset."""
    corpus = find(config)
    root = data_root(config.data_dir)
    tokenizer = _tokenizer_of_corpus(config, corpus)
    sides = [corpus]
    if corpus.languages:
        sides = [_side(corpus, language) for language in corpus.languages]
    datasets = []
    for side in sides:
        directory = root / 'tokens' / side.name / side.version / tokenizer.name
        datasets.append(_written_once(directory, side, config.tokenizer, tokenizer, root=root))
    return datasets


def _side(corpus: Corpus, language: str) -> Corpus:
    """One language of parallel text as a corpus of its own."""
    return dataclasses.replace(
        corpus,
        name=f'{corpus.name}/{language}',
        languages=(),
        documents=lambda _: corpus.documents(language),
    )


def _written_once(
    directory: Path,
    corpus: Corpus,
    kind: str,
    tokenizer: Tokenizer,
    root: Path,
    workers: int = 1,
) -> TokenDataset:
    """The tokens of a corpus, which are written where they are missing or damaged.

    `kind` is data.tokenizer, and `root` the directory that the user has named: `directory` itself
    or one above it. ConfigError where the directory holds tokens of another corpus or tokenizer.
    """

    def read() -> TokenDataset:
        index = read_index(directory)
        stored = (index.name, index.version, index.tokenizer_name)
        if stored != (corpus.name, corpus.version, tokenizer.name):
            raise ConfigError(
                f'{directory} holds tokens of {" ".join(stored)}; give another directory'
            )
        return open_index(directory, index, tokenizer, compare=True)

    def write() -> None:
        write_tokens(directory, kind, corpus, tokenizer, workers)

    return prepared_once(directory / INDEX, read, write, root=root)


def prepare(config: DataConfig, out: str, workers: int = 1) -> TokenDataset:
    """Tokenizes all splits of a dataset into the directory `out`, unless they are there.

    `workers` processes do it; the files do not depend on their number.

    ConfigError if the dataset cannot be read, is a translation set, or lacks text; if the directory
    cannot be written or holds other tokens or files.
    """
    directory = local_directory(out, '--out')
    if directory.is_dir():
        file_names = {path.name for path in directory.iterdir()}
        # A preparation that was killed has left the lock and no index.
        is_of_preparation = 'lock' in file_names or INDEX in file_names
        # Runs and studies have a lock, too.
        is_of_run = 'config.json' in file_names or 'study.json' in file_names
        if file_names and (not is_of_preparation or is_of_run):
            raise ConfigError(f'--out={out} holds files that are no tokens; give another directory')
    if config.languages:
        raise ConfigError(
            f'data.languages={config.languages!r} is a translation set; prepare_data takes text in '
            'one language'
        )
    corpus = find(config)
    with as_recorded(*_stored_tokenizer(directory)):
        tokenizer = _tokenizer_of_corpus(config, corpus)
    return _written_once(directory, corpus, config.tokenizer, tokenizer, directory, workers)


def _stored_tokenizer(directory: Path) -> list[str]:
    """The name of the tokenizer of the tokens in a directory; [] where none can be read."""
    try:
        return [read_index(directory).tokenizer_name]
    except DamagedData:
        return []
