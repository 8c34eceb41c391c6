"""Signals before the main function of a script runs."""

import os
import signal
import subprocess
import sys

import pytest

from qkattn.jobs import signals
from tests.experiments.conftest import ROOT
from tests.processes import ended, start_python

# An import takes a minute.
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
        ('qkattn ablate', 'jax', signal.SIGTERM, 75, 'same command'),
        ('experiments.verify', 'numpy', signal.SIGINT, -2, 'interrupted'),
    ],
)
def test_a_signal_ends_slow_imports_in_one_line(tmp_path, command, module, stop, code, words):
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
        while not (line := process.stderr.readline()).startswith('importing'):
            assert line
        process.send_signal(stop)
        errors = process.communicate(timeout=60)[1]
    assert process.returncode == code, errors
    (line,) = [x for x in errors.splitlines() if not x.startswith('importing')]
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
