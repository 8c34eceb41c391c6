"""The launchers, stand-ins for the programs that they start, and hosts on this machine."""

import json
import os
import shlex
import subprocess
import sys
import time
from pathlib import Path

from tests.processes import ROOT

LAUNCH = ROOT / 'launch'
WHERE = ('--name=qk', '--zone=us-central2-b')
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
PROGRAM = f"""#!{sys.executable}
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


def launch(name: str, *arguments: str, folder: Path = LAUNCH, **kwargs):
    """Runs a launcher to its end."""
    command = [sys.executable, str(folder / f'{name}.py'), *arguments]
    return subprocess.run(command, capture_output=True, text=True, **kwargs)


def dry_run(name: str, *flags: str, command: tuple[str, ...] = (), **variables: str) -> str:
    """What the dry run of a launcher prints."""
    behind = ('--', *command) if command else ()
    done = launch(name, *flags, '--dry_run', *behind, env={**os.environ, **variables})
    assert done.returncode == 0, done.stderr
    return done.stdout


def stand_in(path: Path, text: str) -> Path:
    """Writes an executable file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


def before_path(folder: Path) -> dict[str, str]:
    """The environment in which the programs of a folder come first."""
    return {**os.environ, 'PATH': f'{folder}:{os.environ["PATH"]}'}


def gcloud_commands(*flags: str, command: tuple[str, ...] = ()) -> list[list[str]]:
    """The gcloud commands of a dry run of launch/tpu.py."""
    words = shlex.split(dry_run('tpu', *flags, command=command))
    starts = [k for k, word in enumerate(words) if word == 'gcloud'] + [len(words)]
    return [words[a:b] for a, b in zip(starts, starts[1:], strict=False)]


def remote(command: list[str]) -> str:
    """What a gcloud command runs on hosts."""
    (text,) = [word for word in command if word.startswith('--command=')]
    return text.removeprefix('--command=')


def until(holds, seconds: float = 30, why=lambda: 'it did not happen') -> None:
    end = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < end, why()
        time.sleep(0.05)


def on_host(host: Path, command: str) -> subprocess.CompletedProcess:
    """What sshd does with a command."""
    environment = {**os.environ, 'HOME': str(host)}
    line = ['bash', '-c', command]
    return subprocess.run(line, cwd=host, env=environment, capture_output=True, text=True)


def started(home: Path) -> list:
    """(TOKEN, arguments) of every start of the stand-in."""
    path = home / 'arguments'
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def state_of(host: Path) -> str:
    return on_host(host, 'qkattn/launch/host.sh status').stdout.split(maxsplit=2)[2].strip()
