"""The launchers, stand-ins for the programs that they start, and hosts on this machine."""

import contextlib
import io
import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import ROOT

LAUNCH = ROOT / 'launch'
WHERE = ('--name=qk', '--zone=us-central2-b')
STUDY = ('ablate', '--config=quickstart', '--workdir=gs://b/quickstart')
TRAIN = ('train', '--config=small', '--workdir=gs://b/small')
# Arguments on which a shell, or Kubernetes, could act.
AWKWARD = ('--workdir=gs://b/r', '--a=b c\'d"e', '--x=$HOME $(id) `id` \\', '--y=one\ntwo')
AWKWARD += ('', '*', '--z=$(NAME) $$ é;&|')

# Replaces `.venv/bin/python -m qkattn`. Line n of ~/plan says what start n does, with a word for
# each process of the job:
#   2        ends with this exit code (0 if the plan has no such line)
#   2-late   ends with it half a second later
#   leaves   ends with 0 and leaves a child process behind
#   saves    waits; on SIGTERM prints 'saved' and ends with 75
#   ignores  waits, and ignores SIGTERM
#   dies     waits, and dies of SIGTERM
# Once it is ready for signals, a process adds a line of JSON to ~/starts.
PROGRAM = f"""#!{sys.executable} -S
import json, os, signal, subprocess, sys, time

def save(*_):
    time.sleep(0.3)
    print('saved', flush=True)
    os._exit(75)

home, rank = os.environ['HOME'], int(os.environ.get('JAX_PROCESS_ID') or 0)
plan = open(home + '/plan').read().splitlines() if os.path.exists(home + '/plan') else []
with open(home + '/starts', 'a+') as file:
    file.seek(0)
    number = sum(json.loads(line)['rank'] == rank for line in file)
    does = plan[number].split()[rank] if number < len(plan) else '0'
    if does in ('saves', 'ignores'):
        signal.signal(signal.SIGTERM, save if does == 'saves' else signal.SIG_IGN)
    pids = [os.getpid(), *([subprocess.Popen(['sleep', '60']).pid] if does == 'leaves' else [])]
    start = {{'rank': rank, 'pids': pids, 'env': {{**os.environ}}, 'arguments': sys.argv[1:]}}
    print(json.dumps(start), file=file)
print('arguments', *sys.argv[2:], flush=True)
print('error', file=sys.stderr, flush=True)
code, _, late = does.partition('-')
time.sleep(0.5 if late else 60 if code in ('saves', 'ignores', 'dies') else 0)
os._exit(0 if code == 'leaves' else int(code))
"""


def launch(name: str, *arguments: str, **kwargs) -> subprocess.CompletedProcess:
    """Runs a launcher in a process of its own."""
    command = [sys.executable, str(LAUNCH / f'{name}.py'), *arguments]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


def launch_here(name: str, *arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess:
    """Runs launch/NAME.py with these arguments in this process, which is faster than in its own.

    `env` replaces all environment variables. The launcher must not start other programs.
    """
    launcher = str(LAUNCH / f'{name}.py')
    exit_code = 0
    stdout = io.StringIO()
    stderr = io.StringIO()
    # The launcher is the main program, so its directory is the first on the path.
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        patch.setattr(sys, 'argv', [launcher, *arguments])
        patch.setattr(sys, 'path', [str(LAUNCH), *sys.path])
        patch.setattr(os, 'environ', env)
        try:
            runpy.run_path(launcher, run_name='__main__')
        except SystemExit as stopped:
            exit_code = stopped.code or 0
    return subprocess.CompletedProcess(arguments, exit_code, stdout.getvalue(), stderr.getvalue())


def dry_run(name: str, *flags: str, command: tuple[str, ...], **variables: str) -> str:
    """The output of `launch/NAME.py FLAGS --dry_run -- COMMAND`."""
    arguments = [*flags, '--dry_run']
    if command:
        arguments += ['--', *command]
    finished = launch_here(name, *arguments, env={**os.environ, **variables})
    assert finished.returncode == 0, finished.stderr
    return finished.stdout


def write_program(path: Path, text: str) -> Path:
    """Writes an executable file and returns its path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def environment_with(folder: Path) -> dict[str, str]:
    """The environment, with a folder of programs in front of PATH."""
    return {**os.environ, 'PATH': f'{folder}:{os.environ["PATH"]}'}


def starts_of(home: Path) -> list[dict]:
    """The starts of PROGRAM with this HOME: dicts of rank, pids, env and arguments."""
    file = home / 'starts'
    if not file.exists():
        return []
    return [json.loads(line) for line in file.read_text().splitlines()]
