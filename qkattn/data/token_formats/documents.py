"""Rules for where the documents end in token files of other tools."""

import math
import re
from typing import Protocol

import numpy as np

from qkattn.data.token_formats.shards import Shards
from qkattn.data.tokens import blocks
from qkattn.errors import ConfigError

# The tokens of a document if nothing says where documents end.
BLOCK_TOKENS = 8192
# A value of data.documents, such as 'id=50256' or 'tokens=1024'.
RULE = re.compile(r'(id|tokens)=(\d{1,9})')


class Documents(Protocol):
    """A rule that divides ids into documents."""

    name: str  # part of the version of the dataset

    def ends(self, ids: Shards) -> np.ndarray:
        """Returns the position after each document, ascending. The last one is `len(ids)`."""

    def next_end(self, ids: Shards, position: int) -> int:
        """Returns the first end of a document at `position` or later."""


class SeparatedDocuments(Documents):
    """A separator stands at the end of each document, or at the beginning of each.

    If the very first id is the separator, separators begin documents. Otherwise they end them.
    """

    def __init__(self, separator: int):
        self.separator = separator
        self.name = f'id{separator}'

    def ends(self, ids: Shards) -> np.ndarray:
        """Returns the position after each document; see `Documents.ends`.

        With the separator 0, the ids 5 6 0 7 are the documents 5 6 0 and 7, which end at 3 and 4.
        The ids 0 5 6 0 7 are the documents 0 5 6 and 0 7, which end at 3 and 5.
        """
        # A document ends at each separator, or after it.
        offset = self._offset(ids)
        parts = []
        num_read = 0
        for block in blocks(ids):
            separators = num_read + np.flatnonzero(block == self.separator)
            parts.append(separators + offset)
            num_read += len(block)
        ends = np.concatenate(parts)

        # But no document ends at the separator that begins the first document.
        ends = ends[ends > 0]
        # The last document ends with the ids. If a separator has given this end already, `unique`
        # drops the second one.
        return np.unique(np.append(ends, len(ids)))

    def next_end(self, ids: Shards, position: int) -> int:
        # A document ends `offset` ids after its separator.
        offset = self._offset(ids)
        start = max(position - offset, 0)
        for block in blocks(ids, start):
            separators = np.flatnonzero(block == self.separator)
            if len(separators):
                return start + int(separators[0]) + offset
            start += len(block)
        return len(ids)

    def _offset(self, ids: Shards) -> int:
        """Returns 1 if documents end after a separator, and 0 if they end at a separator.

        They end after it if separators are the last ids of documents, and at it if separators are
        the first ids of documents.
        """
        begins_documents = ids[:1][0] == self.separator
        return 0 if begins_documents else 1


class Blocks(Documents):
    """Every `size` ids are a document, because the real documents are unknown.

    Evaluation treats the rows of a document as dependent on each other, so blocks serve as its
    clusters.
    """

    def __init__(self, size: int):
        self.size = size
        self.name = f'tokens{size}'

    def ends(self, ids: Shards) -> np.ndarray:
        """Returns the position after each block: 4, 8 and 10 for 10 ids in blocks of 4."""
        return np.append(np.arange(self.size, len(ids), self.size), len(ids))

    def next_end(self, ids: Shards, position: int) -> int:
        num_blocks = math.ceil(position / self.size)
        return min(num_blocks * self.size, len(ids))


class IndexedDocuments(Documents):
    """The documents of the files' own index, `Shard.document_ends`."""

    name = 'index'

    def ends(self, ids: Shards) -> np.ndarray:
        return np.concatenate(
            [first + shard.document_ends for first, shard in ids.shards_with_start()]
        )

    def next_end(self, ids: Shards, position: int) -> int:
        ends = self.ends(ids)
        return int(ends[np.searchsorted(ends, position)])


def parse_documents_rule(rule: str | None, separator: int | None, *, indexed: bool) -> Documents:
    """Returns the rule that `rule`, the value of data.documents, names.

    For example, 'id=50256' gives `SeparatedDocuments(50256)`, and 'tokens=1024' gives
    `Blocks(1024)`. If `rule` is None, it is the first of these that is available: the index of the
    files, the separator of the tokenizer, blocks of BLOCK_TOKENS.

    Args:
      rule: the value of data.documents.
      separator: the id that the tokenizer puts between documents; None if this is unknown.
      indexed: whether the files have an index of their documents.

    Raises:
      ConfigError: `rule` has another form.
    """
    if rule is None:
        if indexed:
            return IndexedDocuments()
        if separator is not None:
            return SeparatedDocuments(separator)
        return Blocks(BLOCK_TOKENS)

    match = RULE.fullmatch(rule)
    if match is None or match[0] == 'tokens=0':
        raise ConfigError(
            f"data.documents={rule!r} must be 'id=N', the id that separates documents, or "
            "'tokens=N', the tokens of a block, for data.name='tokens'"
        )
    kind, digits = match.groups()
    number = int(digits)
    if kind == 'id':
        return SeparatedDocuments(number)
    return Blocks(number)
