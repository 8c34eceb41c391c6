"""The display of several processes: a line for each and one for all, or plain lines."""

import codecs
import os
import shutil
import sys
from typing import TextIO

from qkattn.jobs.readers import say
from qkattn.jobs.shown import short

_DECODER = codecs.getincrementaldecoder('utf-8')
_ERASE_LINE, _ERASE_BELOW = '\x1b[K', '\x1b[J'


class CrewDisplay:
    """Shows what processes print, without mixing up two lines.

    On a terminal each process has a line that it overwrites with a carriage return, as `Progress`
    does, and the last line is `status`; whole lines move up above these. Elsewhere only whole lines
    are printed, and `status` where it has changed.
    """

    def __init__(self, stream: TextIO | None = None, size: os.terminal_size | None = None):
        """`size`: of the terminal; None: as large as it is, whenever something is drawn."""
        self._stream = sys.stderr if stream is None else stream
        self._terminal = self._stream.isatty()
        self._size = size
        self._decoders: dict[int, codecs.IncrementalDecoder] = {}
        self._unfinished: dict[int, str] = {}
        self._status = ''
        self._drawn = 0  # lines

    @property
    def columns(self) -> int | None:
        """What a process may fill of its line; None where there is no terminal."""
        return self._terminal_size().columns - len(_label(0)) if self._terminal else None

    def feed(self, number: int, printed: bytes) -> None:
        """Takes what process `number` has printed."""
        decoder = self._decoders.setdefault(
            number, codecs.getincrementaldecoder('utf-8')('replace')
        )
        *lines, rest = (self._unfinished.get(number, '') + decoder.decode(printed)).split('\n')
        self._unfinished[number] = rest
        if self._terminal:
            self._unfinished[number] = '\r' + _last(rest)
        for line in lines:
            if text := _last(line):
                self.print(_label(number) + text)

    def remove(self, number: int) -> None:
        """The process has ended; an unfinished line of its is kept."""
        if text := _last(self._unfinished.pop(number, '')):
            self.print(_label(number) + text)

    def status(self, text: str, plain: bool = True) -> None:
        """Sets the line of all; `plain`: whether it is printed where there is no terminal."""
        if not self._terminal and plain and text != self._status:
            self.print(text)
        self._status = text

    def print(self, text: str) -> None:
        """Writes a line of its own."""
        self._erase()
        say(f'{text}\n', self._stream)

    def draw(self) -> None:
        """Draws the lines of a terminal; of processes as many as there is room for."""
        if not self._terminal:
            return
        columns, rows = self._terminal_size()
        lines = [_label(k) + _last(text) for k, text in sorted(self._unfinished.items())]
        lines = [*lines[: max(0, rows - 2)], self._status]
        self._erase()
        shown = [short(line, columns - 1) + _ERASE_LINE for line in lines]
        say('\r' + '\n'.join(shown), self._stream)
        self._drawn = len(lines)

    def close(self) -> None:
        """Leaves the lines that were finished; may be called twice."""
        self._erase()

    def _erase(self) -> None:
        if self._drawn:
            up = f'\x1b[{self._drawn - 1}A' if self._drawn > 1 else ''
            say(f'\r{up}{_ERASE_BELOW}', self._stream)
            self._drawn = 0

    def _terminal_size(self) -> os.terminal_size:
        if self._size is not None:
            return self._size
        try:
            return os.get_terminal_size(self._stream.fileno())
        except (OSError, ValueError):
            return shutil.get_terminal_size()


def _label(number: int) -> str:
    return f'[{number}] '


def _last(line: str) -> str:
    """What a terminal shows of a line that was overwritten."""
    return line.rstrip('\r').rpartition('\r')[2].replace(_ERASE_LINE, '')
