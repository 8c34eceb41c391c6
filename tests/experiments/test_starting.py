"""What is on the screen before the main function of a script runs."""

import importlib
import os
import signal
import subprocess
import sys
import threading

import pytest

import experiments
from qkattn.jobs import display, machine, signals
from qkattn.jobs.display import Progress
from tests.experiments.conftest import ROOT
from tests.processes import ended, start_python


def test_the_main_function_runs_without_the_display(script_here, monkeypatch):
    shown = []

    def text(catalogue):
        shown.append(Progress._open)
        return 'a catalogue'

    monkeypatch.setattr('qkattn.study.variant_tables.text', text)
    before = {*threading.enumerate()}
    display.show_starting()
    (thread,) = {*threading.enumerate()} - before
    assert Progress._open is not None
    assert script_here('variants').stdout == 'a catalogue\n' and shown == [None]
    thread.join(timeout=60)
    assert not thread.is_alive()


def test_memory_is_kept_before_the_display_starts_a_thread(monkeypatch):
    order = []
    monkeypatch.setattr(sys, 'argv', ['-m'])
    monkeypatch.setattr(signals, 'exit_while_starting', lambda script: order.append('signals'))
    monkeypatch.setattr(machine, 'keep_freed_memory', lambda: order.append('memory'))
    monkeypatch.setattr(display, 'show_starting', lambda: order.append('display'))
    importlib.reload(experiments)
    assert order == ['signals', 'memory', 'display']


# An import takes seconds, of a clock that goes 20 times as fast.
WAITING = """
import signal, sys, time
monotonic = time.monotonic
time.monotonic = lambda: 20 * monotonic()
class Waiting:
    def find_spec(self, name, *_):
        if name == {module!r}:
            print('importing', file=sys.stderr, flush=True)
            try:
                time.sleep(60)
            except BaseException:
                pass  # as extension modules do
signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest may run with it ignored
sys.meta_path.insert(0, Waiting())
"""


SHOWN = 'qkattn: starting ... '


@pytest.mark.parametrize(
    ('command', 'module', 'awaited', 'stop', 'code', 'words'),
    [
        ('qkattn ablate', 'jax', SHOWN, signal.SIGTERM, 75, 'same command'),
        ('experiments.verify', 'numpy', 'importing', signal.SIGINT, -2, 'interrupted'),
    ],
)
def test_slow_imports_are_named_and_a_signal_ends_them_in_one_line(
    tmp_path, command, module, awaited, stop, code, words
):
    """Also where an import swallows the interrupt."""
    (tmp_path / 'sitecustomize.py').write_text(WAITING.format(module=module))
    process = subprocess.Popen(
        [sys.executable, '-m', *command.split()],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        while not (line := process.stderr.readline()).startswith(awaited):
            assert line
        process.send_signal(stop)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == code, errors
    (line,) = [x for x in errors.splitlines() if not x.startswith((SHOWN, 'importing'))]
    assert words in line


def test_an_interrupt_behind_the_imports_has_no_traceback():
    program = """import signal
signal.signal(signal.SIGINT, signal.default_int_handler)
from qkattn.jobs import signals
signals.exit_while_starting('verify')
signals.started()
try:
    signal.raise_signal(signal.SIGINT)
finally:
    print('cleaned up')
"""
    (result,) = ended([start_python(program)])
    assert result == (-signal.SIGINT, 'cleaned up\n', 'interrupted\n')


def test_resumable_scripts_are_those_that_leave_at_once():
    sources = {path.stem: path.read_text() for path in ROOT.glob('experiments/*.py')}
    leaving = {name for name, text in sources.items() if '\n@signals.exit_on_signal' in text}
    assert leaving == {*signals.RESUMABLE}
