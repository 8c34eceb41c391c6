"""Token shards: a directory of `SPLIT_NUMBER.bin`, `index.json` and, maybe, `tokenizer.json`.

A shard holds whole documents in the layout of llm.c: 256 int32 of header, which begin with a magic
number, a version and the number of tokens; then the ids. `tokenizer.json` is a vocabulary that is
learned or read from a file.
"""

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np

from qkattn.config import DataConfig
from qkattn.data.cache import DamagedData, check_sha256, local_directory
from qkattn.data.corpora.corpus import Corpus
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import restored
from qkattn.data.tokens import Shard, ShardTokens, SplitInfo, TokenDataset
from qkattn.errors import ConfigError
from qkattn.storage.records import check, parse_file, read

INDEX, MODEL = 'index.json', 'tokenizer.json'
# (magic, version) by dtype of the ids: of llm.c, of its Llama 3, and for bytes one of our own.
MAGIC = {'uint8': (20240520, 8), 'uint16': (20240520, 1), 'uint32': (20240801, 7)}
HEADER_BYTES = 1024


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """What `index.json` holds: corpus, tokenizer, layout, and the shards that are written."""

    schema: Literal[1] = 1  # changes whenever a stored index would be read differently
    name: str
    version: str
    carved: Mapping[str, float]
    tokenizer: str  # as in data.tokenizer; of a file without its directory
    tokenizer_name: str
    vocab_size: int
    separator: int
    model_sha256: str | None  # of `tokenizer.json`, where there is one
    dtype: Literal['uint8', 'uint16', 'uint32']  # of an id
    shard_tokens: int  # at which a shard is closed, behind the document that reaches them
    complete: bool = False  # whether all shards of all splits are written
    splits: Mapping[str, SplitInfo] = dataclasses.field(default_factory=dict)

    def text(self) -> str:
        """The content of the file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + '\n'

    def difference(self, plan: 'Index') -> str | None:
        """The first setting of text, tokenizer or layout that is not that of the plan."""
        for field in dataclasses.fields(self):
            stored, expected = getattr(self, field.name), getattr(plan, field.name)
            if field.name not in ('complete', 'splits') and stored != expected:
                return f'{field.name}={stored!r}, not {expected!r}'
        return None


def planned(kind: str, corpus: Corpus, tokenizer: Tokenizer, **layout: Any) -> Index:
    """The index of text to write, without splits; `layout` is its dtype and shard_tokens."""
    model = model_of(tokenizer)
    return Index(
        name=corpus.name,
        version=corpus.version,
        carved=dict(corpus.carved),
        tokenizer=_without_directory(kind),
        tokenizer_name=tokenizer.name,
        vocab_size=tokenizer.vocab_size,
        separator=tokenizer.separator,
        model_sha256=None if model is None else hashlib.sha256(model).hexdigest(),
        **layout,
    )


def model_of(tokenizer: Tokenizer) -> bytes | None:
    """The vocabulary of a tokenizer that is learned or read from a file."""
    return tokenizer.model() if hasattr(tokenizer, 'model') else None


def _without_directory(kind: str) -> str:
    return kind.rpartition('/')[2] if kind.endswith('.json') else kind


def read_index(directory: Path) -> Index:
    """The index of a directory, complete or not; DamagedData if it cannot be read."""
    try:
        record = parse_file(directory / INDEX, {'splits': {}})
        splits = {}
        for split, entry in record['splits'].items():
            check(entry, {'shards': list})
            shards = tuple(read(Shard, shard) for shard in entry['shards'])
            splits[split] = read(SplitInfo, entry, shards=shards)
        return read(Index, record, splits=splits)
    except ValueError as error:
        raise DamagedData(f'{directory / INDEX} cannot be read ({error})') from error


def map_shard(directory: Path, index: Index, shard: Shard, *, compare: bool) -> np.ndarray:
    """The ids of a shard, memory-mapped; `compare` reads all of them for their sha256.

    DamagedData if the shard is missing or too short, or its sha256 is another one.
    """
    path = directory / shard.file
    try:
        ids = np.memmap(path, index.dtype, 'r', HEADER_BYTES, (shard.num_tokens,))
        whole = not compare or hashlib.sha256(ids.data).hexdigest() == shard.sha256
    except (OSError, ValueError):
        whole = False
    if not whole:
        raise DamagedData(f'{path} is missing, or not the shard that {INDEX} describes')
    return np.asarray(ids)  # slices of a memmap take several times as long


def open_index(
    directory: Path, index: Index, tokenizer: Tokenizer, *, compare: bool
) -> TokenDataset:
    """The dataset in the shards of an index; raises as `map_shard`."""
    tokens = {
        split: ShardTokens([map_shard(directory, index, s, compare=compare) for s in info.shards])
        for split, info in index.splits.items()
    }
    return TokenDataset(index.name, index.version, tokenizer, index.splits, tokens, index.carved)


def open_shards(config: DataConfig) -> TokenDataset:
    """The dataset in `config.path`; ConfigError if it is damaged, or settings do not fit it."""
    directory = local_directory(config.path, 'data.path')
    try:
        index = read_index(directory)
        if not index.complete:
            raise DamagedData(f'{directory} is not finished')
        if index.model_sha256 is not None:
            check_sha256(directory / MODEL, index.model_sha256)
            tokenizer = restored(index.tokenizer, (directory / MODEL).read_bytes())
        else:
            tokenizer = restored(index.tokenizer, None)
        dataset = open_index(directory, index, tokenizer, compare=False)
    except DamagedData as error:
        raise ConfigError(
            f'{error}; copy it again, or repeat prepare_data, which goes on'
        ) from error
    if tokenizer.name != index.tokenizer_name:
        raise ConfigError(
            f'{directory} was tokenized with {index.tokenizer_name}, but tokenizer='
            f'{index.tokenizer!r} is {tokenizer.name}; restore its source'
        )
    for field, fits in (
        ('lowercase', not config.lowercase),
        ('carve_test', not config.carve_test or 'test' in dataset.splits),
        (
            'tokenizer',
            _without_directory(config.tokenizer) in (DataConfig.tokenizer, index.tokenizer),
        ),
    ):
        if not fits:
            raise ConfigError(
                f'data.{field}={getattr(config, field)!r} has no effect on shards, which were made '
                f'with {index.tokenizer_name} of {index.version}; set it where prepare_data makes '
                'them'
            )
    return dataset
