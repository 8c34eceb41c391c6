"""From settings to token datasets: the corpus, its tokenizer, and its tokens.

Cached in `<data_dir>/tokens/<name>/<version>/<tokenizer>`.
"""

import dataclasses
import functools
import itertools
from pathlib import Path

from qkattn.config import DataConfig
from qkattn.data.cache import DamagedData, data_root, local_directory, prepared_once
from qkattn.data.corpora.corpus import Corpus
from qkattn.data.corpora.corpus_registry import find
from qkattn.data.token_files import INDEX, open_index, open_prepared, read_index, write_tokens
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import as_recorded, open_tokenizer
from qkattn.data.tokens import PairDataset, TokenDataset
from qkattn.errors import ConfigError


def load(config: DataConfig) -> TokenDataset | PairDataset:
    """The dataset, prepared the first time; ConfigError if it is unknown or cannot be prepared."""
    return load_pairs(config) if config.languages else load_text(config)


def load_text(config: DataConfig) -> TokenDataset:
    """Opens text in one language; see `load`."""
    return open_prepared(config) if config.name == 'tokens' else _sides(config)[0]


def load_pairs(config: DataConfig) -> PairDataset:
    """Opens parallel text; see `load`."""
    return PairDataset(*_sides(config))


def tokenizer_of(config: DataConfig) -> Tokenizer:
    """The dataset's tokenizer, learned from its training split the first time."""
    if config.name == 'tokens':
        return open_prepared(config).tokenizer
    return _tokenizer(config, find(config))


def _tokenizer(config: DataConfig, corpus: Corpus) -> Tokenizer:
    sides = corpus.languages or (None,)
    try:
        return open_tokenizer(
            data_root(config.data_dir),
            f'{corpus.name}/{corpus.version}',
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
    root = data_root(config.data_dir)
    tokenizer = _tokenizer(config, corpus)
    sides = [_side(corpus, language) for language in corpus.languages] or [corpus]
    places = [root / 'tokens' / side.name / side.version / tokenizer.name for side in sides]
    opened = functools.partial(_written_once, kind=config.tokenizer, tokenizer=tokenizer, root=root)
    return list(map(opened, places, sides))


def _side(corpus: Corpus, language: str) -> Corpus:
    """One language of parallel text as text."""
    documents = functools.partial(corpus.documents, language)
    name = f'{corpus.name}/{language}'
    return dataclasses.replace(corpus, name=name, languages=(), documents=lambda _: documents())


def _written_once(
    directory: Path, corpus: Corpus, kind: str, tokenizer: Tokenizer, root: Path
) -> TokenDataset:
    """The tokens of a corpus, which are written where they are missing or damaged.

    `root` is the directory that the user has named, `directory` itself or above it.
    """

    def opened() -> TokenDataset:
        index = read_index(directory)
        stored = (index.name, index.version, index.tokenizer_name)
        if stored != (corpus.name, corpus.version, tokenizer.name):
            raise ConfigError(
                f'{directory} holds tokens of {" ".join(stored)}; give another directory'
            )
        return open_index(directory, index, tokenizer, compare=True)

    write = functools.partial(write_tokens, directory, kind, corpus, tokenizer)
    return prepared_once(directory / INDEX, opened, write, root=root)


def prepare(config: DataConfig, out: str) -> TokenDataset:
    """Tokenizes all splits of a dataset into the directory `out`, unless they are there.

    ConfigError if the dataset cannot be read, is a translation set, or lacks text; if the directory
    cannot be written or holds other tokens or files.
    """
    directory = local_directory(out, '--out')
    held = {path.name for path in directory.iterdir()} if directory.is_dir() else set()
    # Without its index a preparation that was killed has the lock, as a run has.
    if held and (held.isdisjoint({'lock', INDEX}) or held & {'config.json', 'study.json'}):
        raise ConfigError(f'--out={out} holds files that are no tokens; give another directory')
    if config.languages:
        raise ConfigError(
            f'data.languages={config.languages!r} is a translation set; prepare_data takes text in '
            'one language'
        )
    corpus = find(config)
    with as_recorded(*_stored_tokenizer(directory)):
        tokenizer = _tokenizer(config, corpus)
    return _written_once(directory, corpus, config.tokenizer, tokenizer, root=directory)


def _stored_tokenizer(directory: Path) -> list[str]:
    """The name of the tokenizer of the tokens in a directory; [] where none can be read."""
    try:
        return [read_index(directory).tokenizer_name]
    except DamagedData:
        return []
