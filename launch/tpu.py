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
import subprocess
import sys
import tempfile
import time
from argparse import Namespace
from pathlib import Path

from arguments import (
    DRY_RUN,
    ENV,
    check_kept,
    flag,
    label,
    leave,
    need,
    read,
    require_command,
    run_program,
    switch,
    whole,
)

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
FLAGS = {
    'verb': flag(', '.join(VERBS), metavar='VERB'),
    '--name': flag('name of the queued resource and its node', label, required=True),
    '--zone': flag('e.g. us-east5-b', required=True),
    '--project': flag("default: gcloud's"),
    '--accelerator': flag('type and number, e.g. v6e-16 (create, watch)'),
    '--runtime_version': flag('default: by type'),
    '--spot': switch('cheaper, preemptible'),
    '--reserved': switch('on reserved capacity'),
    '--extras': flag('extras to install (setup, watch)', default='tpu,gcs'),
    '--env': ENV,
    '--retries': flag('restarts after a crash (run, watch)', whole(0), 3),
    '--grace': flag('seconds to save in (stop)', whole(1), 300),
    '--worker': flag('host whose log is printed (logs)', default='0'),
    '--poll': flag('seconds between polls (watch)', whole(0), 60),
    '--dry_run': DRY_RUN,
}
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


def state(options: Namespace) -> list[str]:
    """Prints the state of the queued resource; nothing if there is none."""
    only = [f'--filter=name~/{options.name}$', '--format=value(state.state)']
    return gcloud(options, 'list', *only, group='queued-resources')


def steps(options: Namespace, verb: str) -> list[list[str]]:
    """The gcloud commands of a verb."""
    if verb == 'create':
        kind = options.accelerator
        version = options.runtime_version or RUNTIMES[kind.split('-')[0]]
        flags = [f'--node-id={options.name}', f'--accelerator-type={kind}']
        flags += [f'--runtime-version={version}']
        flags += [f'--{tier}' for tier in ('spot', 'reserved') if getattr(options, tier)]
        return [gcloud(options, 'create', options.name, *flags, group='queued-resources')]
    if verb == 'setup':  # this commit with its history, so that provenance names it
        copy = ['scp', options.bundle, f'{options.name}:qkattn.bundle', '--worker=all']
        install = shlex.join([HOST, 'setup', options.extras])
        return [gcloud(options, *copy), ssh(options, UNPACK + install)]
    if verb == 'run':
        command = [HOST, 'start', f'--retries={options.retries}', '--', *options.command]
        environment = ['env', *options.env] if options.env else []
        return [ssh(options, shlex.join([*environment, *command]))]
    if verb == 'status':
        return [state(options), ssh(options, STATUS)]
    if verb == 'logs':
        return [ssh(options, f'{HOST} logs', worker=options.worker)]
    if verb == 'stop':
        return [ssh(options, f'{HOST} stop {options.grace}')]
    return [gcloud(options, 'delete', options.name, '--force', group='queued-resources')]


def output_of(command: list[str]) -> str | None:
    """What a command prints; None if it fails, which is then on standard error."""
    done = run_program(command, stdout=subprocess.PIPE)
    return done.stdout if done.returncode == 0 else None


def do(options: Namespace, verb: str) -> int:
    """Runs the commands of a verb up to the first that fails; its exit code."""
    for command in steps(options, verb):
        if code := subprocess.run(command).returncode:
            return code
    return 0


def finished(states: list[str]) -> int | None:
    """The exit code of the job from the states of its hosts; None while one is running.

    2 on any host decides; then 0 if all ended so; then a crash before 75 (stopped).
    """
    codes = [int(text.split()[1]) for text in states if text.startswith('exit')]
    if len(codes) < len(states) or not codes:
        return None
    crashes = [code for code in codes if code not in (0, 75)]
    return 2 if 2 in codes else (crashes or [max(codes)])[0]


def watch(options: Namespace) -> int:
    """Keeps the slice and the command on it running until the command is done."""
    started, failures = False, 0
    while True:
        queued = output_of(state(options))
        slice_state = 'UNKNOWN' if queued is None else queued.strip() or 'ABSENT'
        verbs = {'ABSENT': ['create'], 'SUSPENDED': ['delete', 'create']}.get(slice_state, [])
        hosts: list[str] = []
        if slice_state == 'ACTIVE':
            hosts = re.findall(r'^qkattn \S+ (.+)$', output_of(ssh(options, STATUS)) or '', re.M)
            code = finished(hosts)
            if started and code is not None:
                return code
            if 'new' in hosts:
                verbs = ['setup', 'run']
            elif code is not None or {'ready', 'lost'} & set(hosts):
                verbs = ['run']
            started = started or 'running' in hosts
        elif slice_state == 'FAILED':
            leave(f'the request {options.name} failed; delete it and see the quota of the zone', 1)
        print(
            f'watch: {options.name} is {slice_state.lower()}', *hosts, *verbs, sep=', ', flush=True
        )
        failed = next((verb for verb in verbs if do(options, verb)), None)
        started = started or ('run' in verbs and not failed)
        failures = failures + 1 if failed else 0
        if failures > options.retries:
            leave(f'{failed} failed {failures} times; the reason is above', 1)
        time.sleep(options.poll)


def read_options(argv: list[str]) -> Namespace:
    """The command line, checked; a mistake ends the launcher with one sentence."""
    options = read(__doc__, FLAGS, argv)
    verb, kind = options.verb, options.accelerator
    if verb not in VERBS:
        leave(f'unknown verb {verb!r}; known: {", ".join(VERBS)}')
    if options.spot and options.reserved:
        leave('argument --reserved: not allowed with argument --spot')
    if verb in ('create', 'watch'):
        if kind is None:
            leave(f'{verb} needs --accelerator=TYPE, e.g. --accelerator=v6e-16')
        if not re.fullmatch(f'({"|".join(RUNTIMES)})-[1-9][0-9]*', kind):
            valid = ', '.join(f'{name}-N' for name in RUNTIMES)
            leave(f'--accelerator={kind} is not a TPU VM type; valid: {valid}')
    if verb in ('run', 'watch'):
        require_command(options)
    elif options.command:
        leave(f'{verb} takes no command after --')
    check_kept(options, 'a gs:// directory', 'hosts')
    return options


def main() -> int:
    options = read_options(sys.argv[1:])
    if options.dry_run:
        options.bundle = 'qkattn.bundle'
        verbs = ('create', 'setup', 'run', 'status') if options.verb == 'watch' else [options.verb]
        for command in (command for verb in verbs for command in steps(options, verb)):
            print(shlex.join(command))
        return 0
    need('gcloud', 'https://cloud.google.com/sdk/docs/install says how')
    with tempfile.TemporaryDirectory() as folder:
        options.bundle = f'{folder}/qkattn.bundle'
        if options.verb in ('setup', 'watch'):
            bundle = ['git', '-C', str(ROOT), 'bundle', 'create', '--quiet', options.bundle, 'HEAD']
            if subprocess.run(bundle).returncode:
                leave(f'{ROOT} has no commit of git; setup copies one')
        return watch(options) if options.verb == 'watch' else do(options, options.verb)


if __name__ == '__main__':
    sys.exit(main())
