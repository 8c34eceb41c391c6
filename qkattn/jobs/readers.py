"""Output whose reader may be gone, as in `... | head` or on a terminal that was closed."""

import contextlib
import errno
import os
import select
import signal
import sys
from collections.abc import Iterator
from typing import TextIO

EXIT_UNREAD = 128 + signal.SIGPIPE
"""Nobody reads standard output any more: what a shell reports of a command that SIGPIPE ended."""

_GONE = (errno.EPIPE, errno.EIO)


def say(text: str, stream: TextIO) -> None:
    """Writes a message of a run, which goes on without its reader: the text is then dropped."""
    try:
        stream.write(text)
        stream.flush()
    except OSError as error:
        if error.errno not in _GONE:
            raise
        _discard(stream)


@contextlib.contextmanager
def ending_unread() -> Iterator[None]:
    """A block that prints results: without a reader the process ends, quietly, with EXIT_UNREAD."""
    try:
        yield
        sys.stdout.flush()
    except BrokenPipeError:
        if not _unread(sys.stdout):  # another pipe
            raise
        _discard(sys.stdout)
        sys.exit(EXIT_UNREAD)


def _unread(stream: TextIO) -> bool:
    poll = select.poll()
    poll.register(stream.fileno(), 0)
    return bool(poll.poll(0))


def _discard(stream: TextIO) -> None:
    """What is buffered and all that follows, whoever writes it, goes nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, stream.fileno())
    os.close(nowhere)
