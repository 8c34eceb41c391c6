"""Long texts that are cut into documents, as data.documents says."""

import dataclasses
import hashlib
import itertools
import re
from collections.abc import Iterable, Iterator
from typing import Protocol

from qkattn.data.corpora.corpus import Corpus
from qkattn.errors import ConfigError

BLANK_LINE = 'blank_line'
# Blank lines after a line: the last two ends of lines in 'a\n\n \nb'.
AFTER_BLANK_LINES = re.compile(rb'(?<=\n)(?:[ \t\r]*\n)+')
# As in 'kB=16'.
BLOCK = re.compile(r'kB=(\d{1,6})')
KILOBYTE = 1000


class Cuts(Protocol):
    """Finds where documents begin in a text."""

    def __call__(self, text: bytes) -> Iterator[int]:
        """The bytes at which documents begin, ascending, with or without 0."""


def divided(corpus: Corpus, rule: str) -> Corpus:
    """The corpus with each of its texts cut into documents, which together are the text.

    `rule` is data.documents: 'blank_line' cuts after blank lines, 'kB=16' at the first end of a
    line after so many kilobytes, and any other text is a regular expression, at whose matches
    documents begin ('^ACT ', with ^ at the beginning of each line). ConfigError where it is none.
    """
    cuts = _cuts_of(rule)

    def documents(language: str | None) -> dict[str, Iterator[bytes]]:
        texts = corpus.documents(language)
        return {split: _documents(texts[split], cuts) for split in texts}

    digest = hashlib.sha256(rule.encode()).hexdigest()[:8]
    return dataclasses.replace(
        corpus,
        version=f'{corpus.version}-documents-{digest}',
        documents=documents,
        names=None,
    )


def _documents(texts: Iterable[bytes], cuts: Cuts) -> Iterator[bytes]:
    """The documents of texts; those of white space alone belong to the one before."""
    for text in texts:
        bounds = [0]
        for start in cuts(text):
            if text[bounds[-1] : start].strip():
                bounds.append(start)
        # What is left at the end, if it is white space, too.
        if len(bounds) > 1 and not text[bounds[-1] :].strip():
            bounds.pop()
        bounds.append(len(text))
        for start, end in itertools.pairwise(bounds):
            yield text[start:end]


def _cuts_of(rule: str) -> Cuts:
    """The cuts that data.documents names; ConfigError where it names none."""
    block = BLOCK.fullmatch(rule)
    if block is not None and int(block[1]):
        return _Blocks(int(block[1]) * KILOBYTE)
    if rule == BLANK_LINE:
        return _after_blank_lines
    if block is not None or rule.startswith(('id=', 'tokens=')):
        raise ConfigError(
            f"data.documents={rule!r} must be 'blank_line', 'kB=N' with N at least 1, or a regular "
            'expression for a text'
        )
    try:
        pattern = re.compile(rule, re.MULTILINE)
    except re.error as error:
        raise ConfigError(
            f'data.documents={rule!r} is no regular expression ({error}); valid are those of '
            "Python's module re, 'blank_line' and 'kB=16'"
        ) from error
    return _Matches(pattern)


def _after_blank_lines(text: bytes) -> Iterator[int]:
    for match in AFTER_BLANK_LINES.finditer(text):
        yield match.end()


@dataclasses.dataclass(frozen=True)
class _Blocks(Cuts):
    """Cuts at the first end of a line that is at least `size` bytes after the last cut."""

    size: int

    def __call__(self, text: bytes) -> Iterator[int]:
        position = self.size
        while position < len(text):
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
        num_bytes = 0
        last = 0
        for match in self.pattern.finditer(characters):
            num_bytes += len(characters[last : match.start()].encode())
            last = match.start()
            yield num_bytes
