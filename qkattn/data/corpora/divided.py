"""Cuts long texts into documents, as the setting data.documents says."""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Protocol

from qkattn.data.corpora.corpus import Corpus
from qkattn.errors import ConfigError

BLANK_LINE = 'blank_line'
# One or more blank lines that follow a line: '\n \n' in 'a\n\n \nb'.
AFTER_BLANK_LINES = re.compile(rb'(?<=\n)(?:[ \t\r]*\n)+')
# Blocks of so many kilobytes, as in 'kB=16'.
BLOCK = re.compile(r'kB=(\d{1,6})')
KILOBYTE = 1000


class Cuts(Protocol):
    """A function that finds where documents begin in a text."""

    def __call__(self, text: bytes) -> Iterator[int]:
        """Yields the positions, in bytes, at which documents begin, in ascending order.

        The first document begins at 0, whether or not 0 is yielded.
        """


def divide_texts(corpus: Corpus, rule: str) -> Corpus:
    """Returns a corpus in which each text is cut into documents, without any loss of text.

    Args:
      corpus: the corpus with whole texts.
      rule: the value of data.documents, which says where documents begin.

        - 'blank_line': after blank lines.
        - 'kB=16': at the first line that begins 16 kilobytes or more after the last cut.
        - A regular expression: where it matches. '^ACT ', for example, matches at the beginning of
          any line.

    Raises:
      ConfigError: the rule is none of these.
    """
    find_cuts = _cuts_by(rule)

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        texts_of_split = corpus.documents(language)
        return {split: _documents(texts, find_cuts) for split, texts in texts_of_split.items()}

    digest = hashlib.sha256(rule.encode()).hexdigest()[:8]
    return dataclasses.replace(
        corpus,
        version=f'{corpus.version}-documents-{digest}',
        documents=documents,
        names=None,
    )


def _documents(texts: Iterable[bytes], find_cuts: Cuts) -> Iterator[bytes]:
    """Cuts each text into documents, and yields them.

    A cut is left out if the document before or after it would be only white space.
    """
    for text in texts:
        starts = [0]  # where the documents of the text begin
        for cut in find_cuts(text):
            document_before = text[starts[-1] : cut]
            if document_before.strip():
                starts.append(cut)
        # White space at the end of the text belongs to the document before it.
        last_document = text[starts[-1] :]
        if len(starts) > 1 and not last_document.strip():
            starts.pop()
        for start, end in itertools.pairwise([*starts, len(text)]):
            yield text[start:end]


def _cuts_by(rule: str) -> Cuts:
    """Returns the function that finds where documents begin; `divide_texts` describes the rules.

    Raises ConfigError for a rule that is none of them.
    """
    if rule == BLANK_LINE:
        return _after_blank_lines

    block = BLOCK.fullmatch(rule)  # such as 'kB=16'
    is_empty_block = block is not None and int(block[1]) == 0
    is_rule_for_tokens = rule.startswith(('id=', 'tokens='))
    if is_empty_block or is_rule_for_tokens:
        raise ConfigError(
            f"data.documents={rule!r} must be 'blank_line', 'kB=N' with N at least 1, or a regular "
            'expression for a text'
        )
    if block is not None:
        return _Blocks(int(block[1]) * KILOBYTE)

    try:
        pattern = re.compile(rule, re.MULTILINE)
    except re.error as error:
        raise ConfigError(
            f'data.documents={rule!r} is no regular expression ({error}); valid are those of '
            "Python's module re, 'blank_line' and 'kB=16'"
        ) from error
    return _Matches(pattern)


def _after_blank_lines(text: bytes) -> Iterator[int]:
    """Yields the ends of blank lines."""
    for match in AFTER_BLANK_LINES.finditer(text):
        yield match.end()


@dataclasses.dataclass(frozen=True)
class _Blocks(Cuts):
    """Cuts before the first line that begins `size` bytes or more after the last cut."""

    size: int

    def __call__(self, text: bytes) -> Iterator[int]:
        position = self.size
        while position < len(text):
            # A line that begins at `position` has the newline of the last line before it.
            line_end = text.find(b'\n', position - 1)
            if line_end < 0:
                return
            yield line_end + 1
            position = line_end + 1 + self.size


@dataclasses.dataclass(frozen=True)
class _Matches(Cuts):
    """Cuts where a regular expression matches."""

    pattern: re.Pattern[str]

    def __call__(self, text: bytes) -> Iterator[int]:
        characters = text.decode()
        # A match has its position in characters, and a cut in bytes.
        last_start = 0
        num_bytes = 0
        for match in self.pattern.finditer(characters):
            start = match.start()
            num_bytes += len(characters[last_start:start].encode())
            last_start = start
            yield num_bytes
