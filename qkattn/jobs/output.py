"""Text of and for others: what terminals show, readers that are gone, what other programs print."""

import contextlib
import errno
import io
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, TextIO, cast

# Nobody reads standard output: what a shell reports of a command that SIGPIPE ended.
EXIT_UNREAD = 128 + signal.SIGPIPE
# What a terminal obeys instead of showing it: control codes and changes of the reading direction.
_OBEYED = re.compile(r'[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]')


def escape_unencodable() -> None:
    """Makes every text printable: characters that the encoding of the terminal lacks are escaped.

    Python does so on standard error alone.
    """
    cast(io.TextIOWrapper, sys.stdout).reconfigure(errors='backslashreplace')


def visible(text: str) -> str:
    """`text` on one line, with an escape such as \\x1b for each character that a terminal obeys."""
    return _OBEYED.sub(lambda match: match[0].encode('unicode_escape').decode(), text)


def short(text: str, limit: int) -> str:
    """`text`, its middle left out where it is longer than `limit`."""
    if len(text) <= limit:
        return text
    half = max(0, limit - 1) // 2
    return f'{text[: limit - 1 - half]}…{text[len(text) - half :]}'


def text_table(titles: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]]) -> str:
    """Aligned plain text, a line per row; what a terminal obeys is escaped.

    `titles` are (title, whether its column is flush left); after a '|' a title has a second line.
    """
    first_lines = []
    second_lines = []
    for title, _ in titles:
        first, _, second = title.partition('|')
        first_lines.append(first)
        second_lines.append(second)
    head = [line for line in (first_lines, second_lines) if any(line)]
    body = [[visible(cell) for cell in row] for row in rows]
    body = [row for row in body if any(row)]
    widths = [max(len(cell) for cell in column) for column in zip(*head, *body, strict=True)]
    rule = ['-' * width for width in widths]
    lines = []
    for row in (*head, rule, *body):
        cells = []
        for cell, width, (_, is_flush_left) in zip(row, widths, titles, strict=True):
            cells.append(cell.ljust(width) if is_flush_left else cell.rjust(width))
        lines.append('  '.join(cells).rstrip())
    return '\n'.join(lines)


def say(text: str, stream: TextIO) -> None:
    """Writes a message of a run, which goes on without its reader: the text is then dropped."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno not in (errno.EPIPE, errno.EIO):
            raise
        discard(stream)


@contextlib.contextmanager
def ending_unread() -> Iterator[None]:
    """A block that prints results: without a reader the process ends, quietly, with EXIT_UNREAD."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard(sys.stdout)
        sys.exit(EXIT_UNREAD)


def run_program(command: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    """`subprocess.run` of another program, whose output is text in whatever encoding.

    A file name in it, for example, may be any bytes: those that are not UTF-8 are replaced.
    """
    return subprocess.run(command, encoding='utf-8', errors='replace', **settings)


def discard(stream: TextIO) -> None:
    """Sends what is buffered, and all that follows, nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
