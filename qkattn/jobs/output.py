"""Plain-text tables, escapes for terminals, closed output pipes, and output of programs."""

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

# The exit code after a broken pipe, as a shell reports it for SIGPIPE.
EXIT_UNREAD = 128 + signal.SIGPIPE
# Control codes such as '\x1b', line separators, and changes of the reading direction.
_CONTROL = re.compile(r'[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069]')


def escape_unencodable() -> None:
    """Makes standard output escape characters that its encoding does not have."""
    cast(io.TextIOWrapper, sys.stdout).reconfigure(errors='backslashreplace')


def escape_control_characters(text: str) -> str:
    """Escapes control characters, for example as \\x1b; the result is one line."""

    def escape(match: re.Match[str]) -> str:
        return match[0].encode('unicode_escape').decode()

    return _CONTROL.sub(escape, text)


def short(text: str, limit: int) -> str:
    """Cuts text to `limit` characters, with '…' in place of its middle."""
    if len(text) <= limit:
        return text
    end_length = max(0, limit - 1) // 2
    start_length = limit - 1 - end_length
    start = text[:start_length]
    end = text[len(text) - end_length :]
    return f'{start}…{end}'


def text_table(titles: Sequence[tuple[str, bool]], rows: Sequence[Sequence[str]]) -> str:
    """Formats a table as aligned plain text, and escapes control characters in its cells.

    For example, the titles ('variant', True) and ('loss|nats/token', False) with the row
    ('qk/vo', '3.1000') give

        variant        loss
                 nats/token
        -------  ----------
        qk/vo        3.1000

    Args:
        titles: Pairs (title, is_left_aligned), one for each column. A '|' splits a title into two
            lines.
        rows: The cells of each row. Rows without text are left out.
    """
    upper_cells = []
    lower_cells = []
    for title, _ in titles:
        upper, _, lower = title.partition('|')
        upper_cells.append(upper)
        lower_cells.append(lower)
    head = [cells for cells in (upper_cells, lower_cells) if any(cells)]

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
        aligned_cells = []
        for cell, width, (_, is_left_aligned) in zip(cells, widths, titles, strict=True):
            aligned_cells.append(cell.ljust(width) if is_left_aligned else cell.rjust(width))
        lines.append('  '.join(aligned_cells).rstrip())
    return '\n'.join(lines)


def say(text: str, stream: TextIO) -> None:
    """Writes text to a stream; drops this text and all later text if the reader is gone."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        is_reader_gone = error.errno in (errno.EPIPE, errno.EIO)
        if not is_reader_gone:
            raise
        discard_output(stream)


@contextlib.contextmanager
def exit_if_reader_gone() -> Iterator[None]:
    """A block that prints results; a broken pipe ends the process with EXIT_UNREAD."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        discard_output(sys.stdout)
        sys.exit(EXIT_UNREAD)


def run_program(command: Sequence[str], **settings: Any) -> subprocess.CompletedProcess[str]:
    """Calls `subprocess.run`, and replaces bytes of the output that are not UTF-8."""
    return subprocess.run(command, encoding='utf-8', errors='replace', **settings)


def discard_output(stream: TextIO) -> None:
    """Drops the buffered text of a stream, and all later text."""
    devnull = os.open(os.devnull, os.O_WRONLY)
    os.dup2(devnull, stream.fileno())
    os.close(devnull)
