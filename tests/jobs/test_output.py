"""Output that nobody reads ends a command quietly, and stops no run."""

import logging
import os
import sys

import pytest

from qkattn.jobs import cli, output
from qkattn.jobs.display import LogHandler, Progress, Screen


def goes_nowhere(stream) -> bool:
    return os.path.samestat(os.fstat(stream.fileno()), os.stat(os.devnull))


@pytest.mark.parametrize('terminal', [False, True])
@pytest.mark.parametrize('kind', ['progress', 'log'])
def test_no_display_needs_a_reader(kind, terminal, unread, monkeypatch):
    monkeypatch.setenv('TERM', 'xterm')
    monkeypatch.setattr(unread, 'isatty', lambda: terminal, raising=False)
    monkeypatch.setattr(sys, 'stderr', unread)
    if kind == 'log':
        LogHandler().emit(logging.LogRecord('qkattn', logging.INFO, '', 1, 'resuming', (), None))
    else:
        with Progress('run', 10, screen=Screen(columns=80)) as progress:
            progress.update(1, 2.5)
            progress.print('a line')
            progress.tick()
    print('b' * 100_000, file=unread, flush=True)  # by anybody else
    assert goes_nowhere(unread)


def test_a_full_disk_is_an_error():
    with pytest.raises(OSError, match='No space left'), open('/dev/full', 'w') as full:
        output.say('a', full)


@pytest.mark.parametrize('size', [10, 100_000], ids=['buffered', 'written at once'])
def test_results_without_a_reader_end_the_process_quietly(size, unread, monkeypatch):
    monkeypatch.setattr(sys, 'stdout', unread)
    with pytest.raises(SystemExit) as ended, output.ending_unread():
        print('x' * size)
    assert ended.value.code == output.EXIT_UNREAD == 141 and goes_nowhere(unread)


def test_a_wrong_setting_keeps_its_exit_code(unread, monkeypatch):
    monkeypatch.setattr(sys, 'stdout', unread)
    print('buffered')
    with pytest.raises(SystemExit) as ended:
        cli.exit_with('d_model=0 must be at least 1')
    assert ended.value.code == 2 and goes_nowhere(unread)


def test_text_on_a_terminal_is_short_and_obeys_nothing():
    assert output.short('qk/vo', 5) == 'qk/vo' and output.short('shared_qk/vo', 7) == 'sha…/vo'
    assert output.visible('a\x1b[2J\u202e é') == 'a\\x1b[2J\\u202e é'
