#!/usr/bin/env python3
"""Runs qkattn on a Cloud TPU VM slice through gcloud's queued resources.

  launch/tpu.py create --name=N --zone=Z --accelerator=v6e-16 [--spot | --reserved]
  launch/tpu.py setup  --name=N --zone=Z           copies this commit to all hosts and installs it
  launch/tpu.py run    --name=N --zone=Z -- train --config=CONFIG --workdir=gs://BUCKET/RUN
  launch/tpu.py status|logs|stop|delete --name=N --zone=Z
  launch/tpu.py watch  --name=N --zone=Z --accelerator=v6e-16 --spot -- train ...

`run` starts the command on every host, detached: it goes on when this computer is switched off. A
host starts it again after exit code 75 and, --retries times, after a crash; never after 2.
`stop` sends TERM and waits for the checkpoint. `watch` creates the slice, sets it up and runs the
command, and does so again after each preemption; it ends with the exit code of the command.
--dry_run prints the gcloud commands and does nothing. Standard library only; needs gcloud.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from arguments import Parser, label, leave, require, split, variable, whole

ROOT = Path(__file__).resolve().parent.parent
VERBS = ('create', 'setup', 'run', 'status', 'logs', 'stop', 'delete', 'watch')
# Types of the queued resources API, the runtime version of each, and cores (v2 to v5p) or chips.
RUNTIMES = {
    'v2': 'tpu-ubuntu2204-base',
    'v3': 'tpu-ubuntu2204-base',
    'v4': 'tpu-ubuntu2204-base',
    'v5litepod': 'v2-alpha-tpuv5-lite',
    'v5p': 'v2-alpha-tpuv5',
    'v6e': 'v2-alpha-tpuv6e',
}

HOST = 'qkattn/launch/host.sh'  # on every host, in the copy of the repository
UNPACK = """set -e
git init -q qkattn
git -C qkattn fetch -q ~/qkattn.bundle HEAD
git -C qkattn checkout -q --force --detach FETCH_HEAD
"""
STATUS = f'if [ -e {HOST} ]; then {HOST} status; else echo "qkattn $(hostname) new"; fi'


def gcloud(options: Namespace, *arguments: str, group: str = 'tpu-vm') -> list[str]:
    """One gcloud command on the slice."""
    flags = [f'--zone={options.zone}', '--quiet']
    flags += [f'--project={options.project}'] if options.project else []
    verb, *rest = arguments
    return ['gcloud', 'compute', 'tpus', group, verb, *rest, *flags]


def ssh(options: Namespace, script: str, worker: str = 'all') -> list[str]:
    """Executes a script on one host, or on all at once."""
    where = [options.name, f'--worker={worker}']
    return gcloud(options, 'ssh', *where, f'--command={script}')


def create(options: Namespace) -> list[list[str]]:
    kind = options.accelerator.split('-')[0]
    flags = [f'--node-id={options.name}', f'--accelerator-type={options.accelerator}']
    flags += [f'--runtime-version={options.runtime_version or RUNTIMES[kind]}']
    flags += [flag for flag in ('--spot', '--reserved') if getattr(options, flag[2:])]
    return [gcloud(options, 'create', options.name, *flags, group='queued-resources')]


def setup(options: Namespace) -> list[list[str]]:
    """Copies the current commit with its history, so that provenance names it, and installs it."""
    copy = ['scp', options.bundle, f'{options.name}:qkattn.bundle', '--worker=all']
    install = shlex.join([HOST, 'setup', options.extras])
    return [gcloud(options, *copy), ssh(options, UNPACK + install)]


def start(options: Namespace) -> list[list[str]]:
    command = [HOST, 'start', f'--retries={options.retries}', '--', *options.command]
    environment = ['env', *options.env] if options.env else []
    return [ssh(options, shlex.join([*environment, *command]))]


def status(options: Namespace) -> list[list[str]]:
    return [state(options), ssh(options, STATUS)]


def logs(options: Namespace) -> list[list[str]]:
    return [ssh(options, f'{HOST} logs', worker=options.worker)]


def stop(options: Namespace) -> list[list[str]]:
    return [ssh(options, f'{HOST} stop {options.grace}')]


def delete(options: Namespace) -> list[list[str]]:
    return [gcloud(options, 'delete', options.name, '--force', group='queued-resources')]


def state(options: Namespace) -> list[str]:
    """Prints the state of the queued resource; nothing if there is none."""
    only = [f'--filter=name~/{options.name}$', '--format=value(state.state)']
    return gcloud(options, 'list', *only, group='queued-resources')


STEPS = {
    **{'create': create, 'setup': setup, 'run': start, 'status': status},
    **{'logs': logs, 'stop': stop, 'delete': delete},
}


def output_of(command: list[str]) -> str | None:
    """What a command prints; None if it fails, which is then on standard error."""
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    return done.stdout if done.returncode == 0 else None


def do(options: Namespace, verb: str) -> int:
    """Runs the commands of a verb up to the first that fails; its exit code."""
    for command in STEPS[verb](options):
        code = subprocess.run(command).returncode
        if code:
            return code
    return 0


def finished(states: list[str]) -> int | None:
    """The exit code of the job from the states of its hosts; None while one is running.

    2 on any host decides; then 0 if all ended so; then a crash before 75 (stopped).
    """
    codes = [int(one.split()[1]) for one in states if one.startswith('exit')]
    if len(codes) < len(states) or not codes:
        return None
    crashes = [code for code in codes if code not in (0, 75)]
    return 2 if 2 in codes else (crashes or [max(codes)])[0]


def watch(options: Namespace) -> int:
    """Keeps the slice and the command on it running until the command is done."""
    started, failures = False, 0
    while True:
        queued = output_of(state(options))
        word = 'UNKNOWN' if queued is None else queued.strip() or 'ABSENT'
        verbs = {'ABSENT': ['create'], 'SUSPENDED': ['delete', 'create']}.get(word, [])
        found: list[str] = []
        if word == 'ACTIVE':
            found = re.findall(r'^qkattn \S+ (.+)$', output_of(ssh(options, STATUS)) or '', re.M)
            code = finished(found)
            if started and code is not None:
                return code
            if 'new' in found:
                verbs = ['setup', 'run']
            elif code is not None or {'ready', 'lost'} & set(found):
                verbs = ['run']
            started = started or 'running' in found
        elif word == 'FAILED':
            leave(f'the request {options.name} failed; delete it and see the quota of the zone', 1)
        print(f'watch: {options.name} is {word.lower()}', *found, *verbs, sep=', ', flush=True)
        failed = next((verb for verb in verbs if do(options, verb)), None)
        started = started or ('run' in verbs and not failed)
        failures = failures + 1 if failed else 0
        if failures > options.retries:
            leave(f'{failed} failed {failures} times; the reason is above', 1)
        time.sleep(options.poll)


def read_options(argv: list[str]) -> Namespace:
    """The command line, checked; a mistake ends the launcher with one sentence."""
    flags, command = split(argv)
    parser = Parser(__doc__)
    parser.add_argument('verb', metavar='VERB', help=', '.join(VERBS))
    parser.add_argument(
        '--name', type=label, required=True, help='of the queued resource and its node'
    )
    parser.add_argument('--zone', required=True, help='e.g. us-east5-b')
    parser.add_argument('--project', help="default: gcloud's")
    parser.add_argument('--accelerator', help='type and number, e.g. v6e-16 (create, watch)')
    parser.add_argument('--runtime_version', help='default: by type')
    tier = parser.add_mutually_exclusive_group()
    tier.add_argument('--spot', action='store_true', help='cheaper, preemptible')
    tier.add_argument('--reserved', action='store_true', help='on reserved capacity')
    parser.add_argument('--extras', default='tpu,gcs', help='extras to install (setup, watch)')
    parser.add_argument(
        '--env', type=variable, action='append', default=[], help='NAME=VALUE (run, watch)'
    )
    parser.add_argument('--retries', type=whole(0), default=3, help='after a crash (run, watch)')
    parser.add_argument('--grace', type=whole(1), default=300, help='seconds to save in (stop)')
    parser.add_argument('--worker', default='0', help='whose log (logs)')
    parser.add_argument('--poll', type=float, default=60, help='seconds (watch)')
    parser.add_argument('--dry_run', action='store_true', help='print, do nothing')
    options = parser.parse_args(flags)
    options.command = command
    check(options)
    return options


def check(options: Namespace) -> None:
    verb, kind = options.verb, options.accelerator
    if verb not in VERBS:
        leave(f'unknown verb {verb!r}; known are {", ".join(VERBS)}')
    if verb in ('create', 'watch'):
        if kind is None:
            leave(f'{verb} needs --accelerator=TYPE, e.g. --accelerator=v6e-16')
        if not re.fullmatch(f'({"|".join(RUNTIMES)})-[1-9][0-9]*', kind):
            valid = ', '.join(f'{name}-N' for name in RUNTIMES)
            leave(f'--accelerator={kind} is not a TPU VM type; valid are {valid}')
    if verb in ('run', 'watch'):
        require(options.command)
    elif options.command:
        leave(f'{verb} takes no command behind --')
    if options.command and not any('gs://' in one for one in options.command):
        print('note: without a gs:// directory, results end with the hosts', file=sys.stderr)


def main() -> int:
    options = read_options(sys.argv[1:])
    if options.dry_run:
        options.bundle = 'qkattn.bundle'
        verbs = ('create', 'setup', 'run', 'status') if options.verb == 'watch' else [options.verb]
        for command in (one for verb in verbs for one in STEPS[verb](options)):
            print(shlex.join(command))
        return 0
    if not shutil.which('gcloud'):
        leave('gcloud is not installed; https://cloud.google.com/sdk/docs/install says how')
    with tempfile.TemporaryDirectory() as folder:
        options.bundle = f'{folder}/qkattn.bundle'
        if options.verb in ('setup', 'watch'):
            bundle = ['git', '-C', str(ROOT), 'bundle', 'create', '--quiet', options.bundle, 'HEAD']
            subprocess.run(bundle, check=True)
        return watch(options) if options.verb == 'watch' else do(options, options.verb)


if __name__ == '__main__':
    sys.exit(main())
