"""What is on the screen before the main function of a script runs."""

import importlib
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import experiments
from qkattn.jobs import display, machine, signals
from qkattn.jobs.display import Progress

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


def test_slow_imports_are_named(tmp_path):
    """An import takes seconds, of a clock that goes 20 times as fast."""
    (tmp_path / 'sitecustomize.py').write_text(
        'import time\n'
        'monotonic, slept = time.monotonic, time.sleep\n'
        'time.monotonic = lambda: 20 * monotonic()\n'
        'class Slow:\n'
        '    def find_spec(self, name, *_):\n'
        "        if name == 'qkattn.report': slept(1.6)\n"
        'import sys; sys.meta_path.insert(0, Slow())\n'
    )
    env = {**os.environ, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'}
    done = subprocess.run(
        [sys.executable, '-m', 'qkattn', 'report', '--unknown'],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    first, *_ = done.stderr.splitlines()
    assert first.startswith('qkattn: starting ... ') and done.returncode == 2, done.stderr


def test_the_main_function_runs_without_the_display(script_here, monkeypatch):
    shown = []

    def text(catalogue):
        shown.append(Progress._shown)
        return 'a catalogue'

    monkeypatch.setattr('qkattn.study.variant_tables.text', text)
    before = {*threading.enumerate()}
    display.show_starting()
    (thread,) = {*threading.enumerate()} - before
    assert Progress._shown is not None
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


WAITING = """
import signal, sys, time
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


@pytest.mark.parametrize(
    ('command', 'module', 'stop', 'code', 'words'),
    [
        ('experiments.ablate', 'jax', signal.SIGTERM, signals.EXIT_REQUEUE, 'the same command'),
        ('qkattn train', 'absl', signal.SIGINT, signals.EXIT_REQUEUE, 'the same command'),
        ('experiments.verify', 'rich', signal.SIGINT, -signal.SIGINT, 'interrupted'),
    ],
)
def test_a_signal_ends_the_imports_in_one_line(tmp_path, command, module, stop, code, words):
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
        assert process.stderr.readline() == 'importing\n'
        process.send_signal(stop)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == code, errors
    lines = [line for line in errors.splitlines() if not line.startswith('qkattn: starting')]
    assert len(lines) == 1 and words in lines[0], errors


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
    done = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGINT, 'cleaned up\n')
    assert done.stderr == 'interrupted\n'


def test_resumable_scripts_are_those_that_leave_at_once():
    sources = {path.stem: path.read_text() for path in Path(ROOT, 'experiments').glob('*.py')}
    exiting = [
        n for n, text in sources.items() if re.search('^@signals.exit_on_signal', text, re.M)
    ]
    assert sorted(exiting) == sorted(signals.RESUMABLE)
