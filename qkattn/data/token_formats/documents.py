"""Where documents of tokens end: by an id, after so many tokens, or as an index says."""

import re
from typing import Protocol

import numpy as np

from qkattn.data.token_formats.shards import Shards
from qkattn.data.tokens import blocks
from qkattn.errors import ConfigError

BLOCK_TOKENS = 8192  # of a document where nothing says where documents end
RULE = re.compile(r'(id|tokens)=(\d{1,9})')  # as 'id=50256'


class Documents(Protocol):
    """A rule by which ids are cut into documents."""

    name: str  # part of the version of the tokens

    def ends(self, ids: Shards) -> np.ndarray:
        """The position after each document, ascending; the last is the number of ids."""

    def next_end(self, ids: Shards, position: int) -> int:
        """The first end of a document that is at `position` or later."""


class SeparatedDocuments(Documents):
    """An id is the end of each document, or its beginning where the first id of all is this one."""

    def __init__(self, separator: int):
        self.separator = separator
        self.name = f'id{separator}'

    def ends(self, ids: Shards) -> np.ndarray:
        offset = self._offset(ids)
        parts = []
        num_read = 0
        for block in blocks(ids):
            separators = num_read + np.flatnonzero(block == self.separator)
            parts.append(separators + offset)
            num_read += len(block)
        # The last document may have no separator after it.
        ends = np.concatenate([*parts, [len(ids)]])
        return np.unique(ends[ends > 0])

    def next_end(self, ids: Shards, position: int) -> int:
        offset = self._offset(ids)
        start = max(position - offset, 0)
        for block in blocks(ids, start):
            separators = np.flatnonzero(block == self.separator)
            if len(separators):
                return start + int(separators[0]) + offset
            start += len(block)
        return len(ids)

    def _offset(self, ids: Shards) -> int:
        """From a separator to the end of a document: 0 where separators begin documents."""
        begins_documents = ids[:1][0] == self.separator
        return 0 if begins_documents else 1


class Blocks(Documents):
    """Blocks of so many ids, whose rows count as dependent: evaluation clusters, not texts."""

    def __init__(self, size: int):
        self.size = size
        self.name = f'tokens{size}'

    def ends(self, ids: Shards) -> np.ndarray:
        return np.append(np.arange(self.size, len(ids), self.size), len(ids))

    def next_end(self, ids: Shards, position: int) -> int:
        return min(-(-position // self.size) * self.size, len(ids))


class IndexedDocuments(Documents):
    """The documents that the files themselves name."""

    name = 'index'

    def ends(self, ids: Shards) -> np.ndarray:
        return np.concatenate([first + shard.document_ends for first, shard in ids.starts()])

    def next_end(self, ids: Shards, position: int) -> int:
        ends = self.ends(ids)
        return int(ends[np.searchsorted(ends, position)])


def documents_of(rule: str | None, separator: int | None, *, indexed: bool) -> Documents:
    """The rule that data.documents names; ConfigError where it names none.

    By default it is the index of the files, or else the separator of the tokenizer, or else blocks
    of BLOCK_TOKENS.
    """
    if rule is None:
        if indexed:
            return IndexedDocuments()
        return Blocks(BLOCK_TOKENS) if separator is None else SeparatedDocuments(separator)
    match = RULE.fullmatch(rule)
    if match is None or match[0] == 'tokens=0':
        raise ConfigError(
            f"data.documents={rule!r} must be 'id=N', the id that separates documents, or "
            "'tokens=N', the tokens of a block, for data.name='tokens'"
        )
    number = int(match[2])
    return SeparatedDocuments(number) if match[1] == 'id' else Blocks(number)
