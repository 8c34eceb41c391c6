"""Cuts long texts into documents, as the setting data.documents says."""

import dataclasses
import difflib
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Protocol

from qkattn.data.corpora.corpus import Corpus
from qkattn.errors import ConfigError

BLANK_LINE = 'blank_line'
# One or more blank lines, such as '\n \n' in 'a\n\n \nb'.
AFTER_BLANK_LINES = re.compile(rb'(?<=\n)(?:[ \t\r]*\n)+')
# The size of blocks in kilobytes, as in 'kB=16'.
BLOCK = re.compile(r'kB=(\d{1,6})')
KILOBYTE = 1000


class Cuts(Protocol):
    """A function that finds where documents begin in a text."""

    def __call__(self, text: bytes) -> Iterator[int]:
        """Yields the byte positions of document starts in ascending order; 0 is optional."""


def divide_texts(corpus: Corpus, rule: str) -> Corpus:
    """Returns a corpus in which each text is cut into documents.

    Args:
        corpus: The corpus with whole texts.
        rule: Where documents begin.

            - 'blank_line': after blank lines.
            - 'kB=16': at the first line start at least 16 kilobytes after the last cut.
            - A regular expression: at each match. For example, '^ACT ' matches at line starts.

    Raises:
        ConfigError: The rule is invalid.
    """
    find_cuts = _cuts_by(rule)

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        texts_of_split = corpus.documents(language)
        return {split: _cut_texts(texts, find_cuts) for split, texts in texts_of_split.items()}

    digest = hashlib.sha256(rule.encode()).hexdigest()[:8]
    return dataclasses.replace(
        corpus,
        version=f'{corpus.version}-documents-{digest}',
        documents=documents,
        names=None,
    )


def _cut_texts(texts: Iterable[bytes], find_cuts: Cuts) -> Iterator[bytes]:
    """Cuts each text into documents and yields them.

    No document is only white space, unless the whole text is.
    """
    for text in texts:
        starts = [0]  # of documents
        for cut in find_cuts(text):
            document_before_cut = text[starts[-1] : cut]
            if document_before_cut.strip():
                starts.append(cut)
        # White space at the end of the text stays in the document before it.
        last_document = text[starts[-1] :]
        if len(starts) > 1 and not last_document.strip():
            starts.pop()
        for start, end in itertools.pairwise([*starts, len(text)]):
            yield text[start:end]


def _cuts_by(rule: str) -> Cuts:
    """Returns the function that finds document starts by a rule of `divide_texts`."""
    if rule == BLANK_LINE:
        return _after_blank_lines

    block_match = BLOCK.fullmatch(rule)
    num_kilobytes = int(block_match[1]) if block_match else None  # 16 for 'kB=16'
    is_rule_for_tokens = rule.startswith(('id=', 'tokens='))
    if num_kilobytes == 0 or is_rule_for_tokens:
        raise ConfigError(
            f"data.documents={rule!r} must be 'blank_line', 'kB=N' with N at least 1, or a regular "
            'expression for a text'
        )
    # As a pattern, a misspelled 'blank_line' would match nowhere, and each text be one document.
    is_misspelled = bool(difflib.get_close_matches(rule, [BLANK_LINE], cutoff=0.8))
    if is_misspelled:
        raise ConfigError(f'data.documents={rule!r} is no rule; did you mean {BLANK_LINE!r}?')
    if num_kilobytes is not None:
        return _Blocks(size=num_kilobytes * KILOBYTE)

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
    """Cuts at the first line start at least `size` bytes after the last cut."""

    size: int

    def __call__(self, text: bytes) -> Iterator[int]:
        earliest_cut = self.size
        while earliest_cut < len(text):
            # A line starts after a newline.
            newline = text.find(b'\n', earliest_cut - 1)
            if newline < 0:
                return
            cut = newline + 1
            yield cut
            earliest_cut = cut + self.size


@dataclasses.dataclass(frozen=True)
class _Matches(Cuts):
    """Cuts where a regular expression matches."""

    pattern: re.Pattern[str]

    def __call__(self, text: bytes) -> Iterator[int]:
        characters = text.decode()
        # Matches have positions in characters, but cuts have positions in bytes.
        last_start = 0
        cut = 0
        for match in self.pattern.finditer(characters):
            start = match.start()
            cut += len(characters[last_start:start].encode())
            last_start = start
            yield cut
