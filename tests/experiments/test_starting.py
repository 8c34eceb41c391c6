"""What is on the screen before the main function of a script runs."""

import importlib
import os
import subprocess
import sys
import threading

import pytest

import experiments
from qkattn.run import memory, starting
from qkattn.run.progress import Progress
from qkattn.study import catalogue
from tests.lanes import only

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(__file__)))


@pytest.mark.parametrize(
    'command', only(['qkattn report'], ['experiments.verify', 'qkattn report'])
)
def test_slow_imports_are_named(tmp_path, command):
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
        [sys.executable, '-m', *command.split(), '--unknown'],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
    )
    first, *_ = done.stderr.splitlines()
    assert first.startswith('qkattn: starting ... ') and done.returncode == 2, done.stderr


def test_the_main_function_runs_without_the_display(script_here, monkeypatch):
    shown = []

    def text():
        shown.append(Progress._shown)
        return 'a catalogue'

    monkeypatch.setattr(catalogue, 'text', text)
    before = {*threading.enumerate()}
    starting.begin()
    (display,) = {*threading.enumerate()} - before
    assert Progress._shown is not None
    assert script_here('variants').stdout == 'a catalogue\n' and shown == [None]
    display.join(timeout=60)
    assert not display.is_alive()


def test_memory_is_kept_before_the_display_starts_a_thread(monkeypatch):
    order = []
    monkeypatch.setattr(sys, 'argv', ['-m'])
    monkeypatch.setattr(memory, 'keep_freed_memory', lambda: order.append('memory'))
    monkeypatch.setattr(starting, 'begin', lambda: order.append('display'))
    importlib.reload(experiments)
    assert order == ['memory', 'display']
