"""Output that nobody reads ends a command quietly, and stops no run."""

import logging
import os
import sys

import pytest

from qkattn.jobs import cli, readers
from qkattn.jobs.crew_display import CrewDisplay
from qkattn.jobs.progress import LogHandler, Progress


def goes_nowhere(stream) -> bool:
    return os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


def test_messages_of_a_run_are_dropped_and_the_run_goes_on(unread, monkeypatch):
    readers.say('a', unread)
    print('b' * 100_000, file=unread, flush=True)  # by anybody else
    assert goes_nowhere(unread)


@pytest.mark.parametrize('terminal', [False, True])
@pytest.mark.parametrize('kind', ['progress', 'crew', 'log'])
def test_no_display_needs_a_reader(kind, terminal, unread, monkeypatch):
    monkeypatch.setattr(unread, 'isatty', lambda: terminal, raising=False)
    monkeypatch.setattr(sys, 'stderr', unread)
    if kind == 'log':
        LogHandler().emit(logging.LogRecord('qkattn', logging.INFO, '', 1, 'resuming', (), None))
    elif kind == 'crew':
        crew = CrewDisplay(size=os.terminal_size((80, 24)))
        crew.feed(0, b'step 1\nstep')
        crew.status('1 run left')
        crew.draw()
        crew.close()
    else:
        with Progress('run', 10, columns=80) as progress:
            progress.update(1, 2.5)
            progress.print('a line')
            progress.tick()
    assert goes_nowhere(unread)


def test_a_full_disk_is_an_error():
    with open('/dev/full', 'w') as full:
        with pytest.raises(OSError, match='No space left'):
            readers.say('a', full)
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # so that it can be closed


@pytest.mark.parametrize('size', [10, 100_000], ids=['buffered', 'written at once'])
def test_results_without_a_reader_end_the_process_quietly(size, unread, monkeypatch):
    monkeypatch.setattr(sys, 'stdout', unread)
    with pytest.raises(SystemExit) as ended, readers.ending_unread():
        print('x' * size)
    assert ended.value.code == readers.EXIT_UNREAD == 141 and goes_nowhere(unread)


def test_another_broken_pipe_is_an_error():
    with pytest.raises(BrokenPipeError), readers.ending_unread():
        raise BrokenPipeError


def test_a_wrong_setting_keeps_its_exit_code(unread, monkeypatch):
    monkeypatch.setattr(sys, 'stdout', unread)
    print('buffered')
    with pytest.raises(SystemExit) as ended:
        cli.exit_with('d_model=0 must be at least 1')
    assert ended.value.code == 2 and goes_nowhere(unread)
