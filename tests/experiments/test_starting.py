"""Signals before the main function of a script runs."""

import os
import signal
import subprocess
import sys
from unittest.mock import Mock

from qkattn.jobs import signals
from tests.experiments.conftest import ROOT

# An import takes a minute.
WAITING = """
import sys, time
class Waiting:
    def find_spec(self, name, *_):
        if name == 'jax':
            print('importing', file=sys.stderr, flush=True)
            try:
                time.sleep(60)
            except BaseException:
                pass  # as extension modules do
sys.meta_path.insert(0, Waiting())
"""


def test_a_signal_ends_the_imports_of_a_resumable_script_in_one_line(tmp_path):
    """Also where an import swallows the interrupt."""
    (tmp_path / 'sitecustomize.py').write_text(WAITING)
    process = subprocess.Popen(
        [sys.executable, '-m', 'qkattn', 'ablate'],
        cwd=ROOT,
        env={**os.environ, 'PYTHONPATH': f'{tmp_path}{os.pathsep}{ROOT}'},
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        while not (line := process.stderr.readline()).startswith('importing'):
            assert line
        process.send_signal(signal.SIGTERM)
        errors = process.communicate(timeout=60)[1]
    assert (process.returncode, errors) == (
        75,
        'stopped with nothing to save; the same command resumes\n',
    )


def test_an_interrupt_of_another_script_has_no_traceback(script_here, monkeypatch):
    monkeypatch.setattr('qkattn.study.variant_tables.text', Mock(side_effect=KeyboardInterrupt))
    done = script_here('variants')
    assert (done.returncode, done.stderr) == (130, 'interrupted\n')


def test_resumable_scripts_are_those_that_leave_at_once():
    sources = {path.stem: path.read_text() for path in ROOT.glob('experiments/*.py')}
    leaving = {name for name, text in sources.items() if '\n@signals.exit_on_signal' in text}
    assert leaving == {*signals.RESUMABLE}
