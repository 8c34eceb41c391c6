"""The index of a directory of shards: what was tokenized how, and the shards of each split.

`index.json` is written twice: first as a plan, without splits, then with all of them. A learned or
read vocabulary lies beside it, `tokenizer.json`.
"""

import dataclasses
import hashlib
import json
from typing import Any

from qkattn.config import DataConfig
from qkattn.data.shards.shard_files import Counts, Files, Shard
from qkattn.data.tokenizers.tokenizer import Tokenizer
from qkattn.data.tokenizers.vocabulary import restored
from qkattn.errors import ConfigError
from qkattn.storage.records import check, parse_json

INDEX = 'index.json'
MODEL = 'tokenizer.json'
# Changes whenever an index that is stored would be read differently.
SCHEMA = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexedShard(Counts):
    """A shard and its counts."""

    file: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class IndexedSplit:
    """A split: counts and statistics as of `SplitInfo`; `fingerprint` is the sha256 of all tokens.

    The fingerprint does not depend on how the tokens are cut into shards.
    """

    num_documents: int
    document_names: list[str] | None
    num_tokens: int
    num_bytes: int
    unigram_nats_per_token: float
    fingerprint: str
    shards: list[IndexedShard]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Index:
    """What `index.json` holds.

    Attributes:
      name, version, carved: of the corpus.
      tokenizer: as in data.tokenizer; of a file without its directory.
      tokenizer_name, vocab_size, separator: of the tokenizer.
      model_sha256: of `tokenizer.json`; None where there is none.
      dtype: of an id, uint16 or uint32.
      shard_tokens: tokens at which a shard is closed, behind the document that reaches them.
      complete: whether all splits are there.
    """

    schema: int
    name: str
    version: str
    carved: dict[str, float]
    tokenizer: str
    tokenizer_name: str
    vocab_size: int
    separator: int
    model_sha256: str | None
    dtype: str
    shard_tokens: int
    complete: bool
    splits: dict[str, IndexedSplit]

    def text(self) -> str:
        """The file."""
        return json.dumps(dataclasses.asdict(self), indent=1) + '\n'

    def shards(self, split: str) -> list[Shard]:
        """The files of a split."""
        return [
            Shard(file=shard.file, num_tokens=shard.num_tokens, dtype=self.dtype)
            for shard in self.splits[split].shards
        ]


def read_index(files: Files) -> Index:
    """The index of a directory that has one; its splits may be missing.

    Raises:
      ConfigError: it is damaged, or of another schema.
    """
    where = f'{files.where}/{INDEX}'
    try:
        record = parse_json(files.content(INDEX))
        check(record, {'schema': int})
        if record['schema'] != SCHEMA:
            raise ConfigError(
                f'{where} has schema {record["schema"]}, but this version of qkattn reads schema '
                f'{SCHEMA}; use the version that wrote it, or prepare the shards again elsewhere'
            )
        check(record, _schema(Index) | {'carved': {}, 'splits': {}})
        splits = {split: _split(found) for split, found in record['splits'].items()}
        return Index(**{**record, 'splits': splits})
    except ConfigError:
        raise
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f'{where} is damaged ({error}); copy it again, or prepare the shards again'
        ) from error


def _schema(cls: Any) -> dict[str, Any]:
    return {field.name: field.type for field in dataclasses.fields(cls)}


def _split(record: Any) -> IndexedSplit:
    check(record, _schema(IndexedSplit) | {'document_names': list | None, 'shards': list})
    for shard in record['shards']:
        check(shard, _schema(IndexedShard))
    shards = [IndexedShard(**shard) for shard in record['shards']]
    return IndexedSplit(**{**record, 'shards': shards})


def stored_tokenizer(files: Files, index: Index) -> Tokenizer:
    """The tokenizer of the shards, from the file beside the index.

    Raises:
      ConfigError: the file is damaged; an import path that gives another tokenizer today.
    """
    model = None
    if index.model_sha256 is not None:
        model = files.content(MODEL)
        if hashlib.sha256(model).hexdigest() != index.model_sha256:
            raise ConfigError(
                f'{files.where}/{MODEL} is damaged: its sha256 is not that in {INDEX}; copy it '
                'again'
            )
    tokenizer = restored(index.tokenizer, model)
    if tokenizer.name != index.tokenizer_name:
        raise ConfigError(
            f'{files.where} was tokenized with {index.tokenizer_name}, but tokenizer='
            f'{index.tokenizer!r} is {tokenizer.name}; restore its source'
        )
    return tokenizer


def kind_of(config: DataConfig) -> str:
    """data.tokenizer, of a file without its directory."""
    kind = config.tokenizer
    return kind.rpartition('/')[2] if kind.endswith('.json') else kind


def check_settings(config: DataConfig, index: Index | None) -> None:
    """Refuses settings that say how text is tokenized, which it is already.

    Raises:
      ConfigError: one of them is not at its default and says something else.
    """
    default = DataConfig()
    same = index is None or kind_of(config) in (default.tokenizer, index.tokenizer)
    for name in ('lowercase', *(() if same else ('tokenizer',))):
        if (value := getattr(config, name)) != getattr(default, name):
            made = '' if index is None else f', which were made with {index.tokenizer_name}'
            raise ConfigError(
                f"data.{name}={value!r} has no effect on data.name='shards'{made}; leave it "
                f'{getattr(default, name)!r}.'
            )
