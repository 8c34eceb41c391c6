"""Output: text for terminals, readers that have gone, and what other programs print."""

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

# The exit code if nobody reads standard output: a shell reports it for a command that SIGPIPE ends.
EXIT_UNREAD = 128 + signal.SIGPIPE
# Characters that a terminal obeys instead of showing them: control codes, line separators and
# changes of the reading direction. '\x1b' begins a code that, for example, moves the cursor.
_OBEYED = re.compile(r'[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]')


def escape_unencodable() -> None:
    """Makes standard output escape the characters that the terminal's encoding does not have.

    Python does this by default, but only for standard error.
    """
    cast(io.TextIOWrapper, sys.stdout).reconfigure(errors='backslashreplace')


def escape_control_characters(text: str) -> str:
    """Escapes characters that a terminal obeys, for example as \\x1b; the result is one line."""

    def escape(match: re.Match[str]) -> str:
        return match[0].encode('unicode_escape').decode()

    return _OBEYED.sub(escape, text)


def short(text: str, limit: int) -> str:
    """Cuts text of more than `limit` characters, by putting '…' in place of its middle."""
    if len(text) <= limit:
        return text
    end_length = max(0, limit - 1) // 2
    start_length = limit - 1 - end_length
    start = text[:start_length]
    end = text[len(text) - end_length :]
    return f'{start}…{end}'


def text_table(titles: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]]) -> str:
    """Formats a table as aligned plain text. Control characters in cells are escaped.

    For example, the titles ('variant', True) and ('loss|nats/token', False) with a row of 'qk/vo'
    and '3.1000' give

        variant        loss
                 nats/token
        -------  ----------
        qk/vo        3.1000

    Args:
      titles: pairs (title, is_flush_left), one for each column. '|' separates two lines of a title.
      rows: the cells of each row. Rows of empty cells are left out.
    """
    first_lines = []
    second_lines = []
    for title, _ in titles:
        first_line, _, second_line = title.partition('|')
        first_lines.append(first_line)
        second_lines.append(second_line)
    head = [line for line in (first_lines, second_lines) if any(line)]  # one line or two

    body = []
    for row in rows:
        cells = [escape_control_characters(cell) for cell in row]
        if any(cells):
            body.append(cells)

    widths = []
    for column in zip(*head, *body, strict=True):
        widths.append(max(len(cell) for cell in column))
    rule = ['-' * width for width in widths]

    lines = []
    for cells in (*head, rule, *body):
        padded = []
        for cell, width, (_, is_flush_left) in zip(cells, widths, titles, strict=True):
            padded.append(cell.ljust(width) if is_flush_left else cell.rjust(width))
        lines.append('  '.join(padded).rstrip())
    return '\n'.join(lines)


def say(text: str, stream: TextIO) -> None:
    """Writes a message of a run.

    If the reader of the stream has gone, this text and all later text is dropped, and the run goes
    on.
    """
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        has_reader_gone = error.errno in (errno.EPIPE, errno.EIO)
        if not has_reader_gone:
            raise
        discard_output(stream)


@contextlib.contextmanager
def exit_if_reader_gone() -> Iterator[None]:
    """A block that prints results: if their reader has gone, the process ends with EXIT_UNREAD."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output(sys.stdout)
        sys.exit(EXIT_UNREAD)


def run_program(command: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    """Calls `subprocess.run` for a program whose output may not be UTF-8.

    A file name in the output, for example, may have any bytes. Bytes that are not UTF-8 are
    replaced.
    """
    return subprocess.run(command, encoding='utf-8', errors='replace', **settings)


def discard_output(stream: TextIO) -> None:
    """Drops the text that the stream has buffered, and all later text."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
