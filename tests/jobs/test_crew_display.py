"""Several processes on one screen: a line each, and never two lines mixed up."""

import io
import os
import re

import pytest

from qkattn.jobs.crew_display import CrewDisplay


class Screen(io.StringIO):
    """A terminal, as far as the display uses it."""

    def isatty(self) -> bool:
        return True

    def lines(self) -> list[str]:
        """What stands on it."""
        rows, row, column = [''], 0, 0
        for part in re.findall(r'\x1b\[\d*[AKJ]|\r|\n|[^\x1b\r\n]+', self.getvalue()):
            if part == '\r':
                column = 0
            elif part == '\n':
                row, column = row + 1, 0
                rows += [''] * (row + 1 - len(rows))
            elif part[0] != '\x1b':
                rows[row] = (
                    rows[row][:column].ljust(column) + part + rows[row][column + len(part) :]
                )
                column += len(part)
            elif part[-1] == 'A':
                row -= int(part[2:-1])
            else:
                rows[row] = rows[row][:column]
                rows = rows[: row + 1] if part[-1] == 'J' else rows
        return rows


@pytest.fixture
def screen():
    return Screen()


@pytest.fixture
def display(screen):
    return CrewDisplay(screen, os.terminal_size((40, 6)))


def test_a_terminal_has_a_line_for_each_process_and_one_for_all(display, screen):
    display.feed(0, b'\rone: 10%\x1b[K')
    display.feed(1, b'\rtwo: 20%\x1b[K')
    display.status('study: 0 of 8 runs done')
    display.draw()
    assert screen.lines() == ['[0] one: 10%', '[1] two: 20%', 'study: 0 of 8 runs done']
    display.feed(0, b'\rone: 30%\x1b[K')
    display.draw()
    assert screen.lines() == ['[0] one: 30%', '[1] two: 20%', 'study: 0 of 8 runs done']
    # A message erases its process's line first, and moves up above the lines of all.
    display.feed(1, b'\r\x1b[Kresuming at step 5\n')
    display.draw()
    assert screen.lines() == [
        *('[1] resuming at step 5', '[0] one: 30%', '[1] ', 'study: 0 of 8 runs done')
    ]
    display.feed(0, b'\rone: 100%\x1b[K\n')
    display.remove(0)
    display.draw()
    assert screen.lines()[1:] == ['[0] one: 100%', '[1] ', 'study: 0 of 8 runs done']
    display.close()
    assert screen.lines()[:2] == ['[1] resuming at step 5', '[0] one: 100%']
    assert not any(screen.lines()[2:])


def test_lines_that_arrive_in_pieces_stay_whole(screen):
    plain = io.StringIO()
    for display in (CrewDisplay(screen, os.terminal_size((40, 6))), CrewDisplay(plain)):
        for number, part in enumerate(('é: step 1'.encode()[:1], 'è:'.encode()[:1])):
            display.feed(number, part)
        display.feed(0, 'é: step 1\n'.encode()[1:])
        display.draw()
        display.feed(1, 'è: step 2\nrest'.encode()[1:])
        display.remove(1)
        display.close()
    printed = ['[0] é: step 1', '[1] è: step 2', '[1] rest']
    assert plain.getvalue().splitlines() == printed
    assert [line for line in screen.lines() if line] == printed


def test_elsewhere_the_state_of_all_is_printed_where_it_is_asked_for():
    plain = io.StringIO()
    display = CrewDisplay(plain)
    assert display.columns is None
    for text, also in (('0 done', True), ('0 done, 9 s left', False), ('1 done', True)):
        display.status(text, also)
        display.draw()
    assert plain.getvalue() == '0 done\n1 done\n'


def test_a_small_terminal_shows_whom_it_has_room_for(display, screen):
    for number in range(9):
        display.feed(number, b'\r' + b'x' * 100)
    display.status('all')
    display.draw()
    lines = screen.lines()
    assert len(lines) == 5 and lines[-1] == 'all' and lines[3].startswith('[3] xxx')
    assert max(map(len, lines)) == 39 and display.columns == 36
