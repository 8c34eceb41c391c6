"""Every script ends quietly where nobody reads what it prints, as in `... | head`."""

import subprocess
import sys

import pytest

from qkattn.jobs.output import EXIT_UNREAD
from tests.experiments.conftest import ROOT
from tests.experiments.test_help import SCRIPTS
from tests.lanes import only


@pytest.mark.parametrize('name', only(['train', 'report'], SCRIPTS))
def test_help_ends_quietly(name, script_here, unread, monkeypatch):
    monkeypatch.setattr(sys, 'stdout', unread)
    done = script_here(name, '--help')
    assert (done.returncode, done.stderr) == (EXIT_UNREAD, '')


QUICK = ['experiments.report --help', 'qkattn --help']


@pytest.mark.parametrize('command', only(QUICK, ['experiments.variants --markdown', *QUICK]))
def test_a_process_ends_quietly(command, unread):
    line = [sys.executable, '-m', *command.split()]
    done = subprocess.run(line, cwd=ROOT, stdout=unread, stderr=subprocess.PIPE)
    # Shown where imports take seconds.
    said = [x for x in done.stderr.splitlines() if not x.startswith(b'qkattn: starting')]
    assert (done.returncode, said) == (EXIT_UNREAD, [])
