"""Rules that divide token files of other tools into documents."""

import math
import re
from typing import Protocol

import numpy as np

from qkattn.data.token_formats.shards import Shards
from qkattn.data.tokens import blocks
from qkattn.errors import ConfigError

# The tokens in a block, which serves as a document if the real documents are unknown.
BLOCK_TOKENS = 8192
# A value of data.documents, such as 'id=50256' or 'tokens=1024'.
RULE = re.compile(r'(id|tokens)=(\d{1,9})')


class Documents(Protocol):
    """A rule that divides ids into documents."""

    name: str  # part of the version of the dataset

    def ends(self, ids: Shards) -> np.ndarray:
        """Returns the position after each document, ascending. The last position is len(ids)."""

    def next_end(self, ids: Shards, position: int) -> int:
        """Returns the first end of a document at `position` or later."""


class SeparatedDocuments(Documents):
    """Documents that end with a separator, or begin with one if the first id is a separator."""

    def __init__(self, separator: int):
        self.separator = separator
        self.name = f'id{separator}'

    def ends(self, ids: Shards) -> np.ndarray:
        """Returns the position after each document, ascending.

        With the separator 0, the ids 5 6 0 7 are the documents 5 6 0 and 7, which end at 3 and 4.
        The ids 0 5 6 0 7 are the documents 0 5 6 and 0 7, which end at 3 and 5.
        """
        offset = self._end_offset(ids)
        ends_of_blocks = []
        block_begin = 0
        for block in blocks(ids):
            separator_positions = block_begin + np.flatnonzero(block == self.separator)
            ends_of_blocks.append(separator_positions + offset)
            block_begin += len(block)
        ends = np.concatenate(ends_of_blocks)

        ends = ends[ends > 0]  # a separator at 0 ends no document
        ends = np.append(ends, len(ids))
        return np.unique(ends)

    def next_end(self, ids: Shards, position: int) -> int:
        offset = self._end_offset(ids)
        # The separator of a document that ends at `position` is at position - offset.
        block_begin = max(position - offset, 0)
        for block in blocks(ids, block_begin):
            separators_in_block = np.flatnonzero(block == self.separator)
            if len(separators_in_block):
                return block_begin + int(separators_in_block[0]) + offset
            block_begin += len(block)
        return len(ids)

    def _end_offset(self, ids: Shards) -> int:
        """Returns the distance from a separator to the end of its document, 0 or 1."""
        first_id = ids[:1][0]
        separators_begin_documents = first_id == self.separator
        return 0 if separators_begin_documents else 1


class Blocks(Documents):
    """Blocks of `size` ids in place of documents, if the real documents are unknown."""

    def __init__(self, size: int):
        self.size = size
        self.name = f'tokens{size}'

    def ends(self, ids: Shards) -> np.ndarray:
        """Returns the position after each block: 4, 8 and 10 for 10 ids in blocks of 4."""
        inner_ends = np.arange(self.size, len(ids), self.size)
        return np.append(inner_ends, len(ids))

    def next_end(self, ids: Shards, position: int) -> int:
        num_blocks = math.ceil(position / self.size)
        return min(num_blocks * self.size, len(ids))


class IndexedDocuments(Documents):
    """The documents in an index of the files, `Shard.document_ends`."""

    name = 'index'

    def ends(self, ids: Shards) -> np.ndarray:
        # A shard counts positions from its own start.
        ends_of_shards = [start + shard.document_ends for start, shard in ids.shards_with_start()]
        return np.concatenate(ends_of_shards)

    def next_end(self, ids: Shards, position: int) -> int:
        ends = self.ends(ids)
        index = np.searchsorted(ends, position)  # of the first end at `position` or later
        return int(ends[index])


def parse_documents_rule(rule: str | None, separator: int | None, *, indexed: bool) -> Documents:
    """Parses the value of data.documents.

    For example, 'id=50256' gives SeparatedDocuments(50256), and 'tokens=1024' gives Blocks(1024).

    Args:
        rule: The value of data.documents. None chooses the index of the files, else the separator
            of the tokenizer, else blocks.
        separator: The id that the tokenizer puts between documents, or None if unknown.
        indexed: Whether the files have an index of their documents.

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
