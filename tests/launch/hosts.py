"""Hosts on this machine: home directories, a stand-in for qkattn, and what sshd would do."""

import json
import os
import shlex
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.launch.cloud_api import ZONE

ROOT = Path(__file__).resolve().parents[2]
TPU = ROOT / 'launch' / 'tpu.py'
WHERE = ('--name=qk', f'--zone={ZONE}')
STUDY = ('ablate', '--config=quickstart', '--workdir=gs://b/quickstart')
TRAIN = ('train', '--config=small', '--workdir=gs://b/small')
# Arguments on which a shell, or Kubernetes, could act.
AWKWARD = (
    '--workdir=gs://b/r',
    '--a=b c\'d"e',
    '--x=$HOME $(id) `id` \\',
    '--y=one\ntwo',
    '',
    '*',
    '--z=$(NAME) $$ é;&|',
)

# Stands for `.venv/bin/python -m qkattn`: writes its arguments, then ends with the next code of a
# file; 'wait' ends with 75 on SIGTERM.
PROGRAM = """#!{python}
import json, os, signal, sys, time
state = os.environ['HOME']
with open(state + '/arguments', 'a') as file:
    file.write(json.dumps([os.environ.get('TOKEN'), sys.argv[1:]]) + '\\n')
codes = open(state + '/codes').read().split() if os.path.exists(state + '/codes') else ['0']
open(state + '/codes', 'w').write(' '.join(codes[1:] or ['0']))
if codes[0] == 'wait':
    signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.3), sys.exit(75)))
    open(state + '/waiting', 'w').close()
    while True:
        time.sleep(0.05)
sys.exit(int(codes[0]))
"""


def tpu(*arguments: str, launcher: Path = TPU, **kwargs) -> subprocess.CompletedProcess:
    command = [sys.executable, str(launcher), *arguments]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


def commands(*arguments: str) -> list[list[str]]:
    """The gcloud commands of a dry run."""
    done = tpu(*arguments, '--dry_run') if '--' not in arguments else tpu('--dry_run', *arguments)
    assert done.returncode == 0, done.stderr
    words = shlex.split(done.stdout)
    starts = [k for k, word in enumerate(words) if word == 'gcloud'] + [len(words)]
    return [words[a:b] for a, b in zip(starts, starts[1:], strict=False)]


def until(holds, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, 'it did not happen'
        time.sleep(0.05)


def kill_processes(home: Path) -> None:
    """Kills a host's command and its supervisor."""
    os.killpg(int((home / 'qkattn-run' / 'pid').read_text()), signal.SIGKILL)


def on_host(host: Path, command: str) -> subprocess.CompletedProcess:
    """What sshd does with a command."""
    return subprocess.run(
        ['bash', '-c', command],
        cwd=host,
        env={**os.environ, 'HOME': str(host)},
        capture_output=True,
        text=True,
    )


def remote(command: list[str]) -> str:
    (text,) = [word for word in command if word.startswith('--command=')]
    return text.removeprefix('--command=')


def started(home: Path) -> list:
    """(TOKEN, arguments) of every start of the stand-in."""
    path = home / 'arguments'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def state_of(host: Path) -> str:
    return on_host(host, 'qkattn/launch/host.sh status').stdout.split(maxsplit=2)[2].strip()
