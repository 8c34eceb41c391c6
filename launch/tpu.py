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
    at_least,
    check_workdir_lasts,
    exit_with,
    flag,
    label,
    read_command_line,
    require_command,
    require_program,
    run_program,
    switch,
)

ROOT = Path(__file__).resolve().parent.parent
VERBS = ('create', 'setup', 'run', 'status', 'logs', 'stop', 'delete', 'watch')
# The runtime version of each type of TPU VM.
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
    '--retries': flag('restarts after a crash (run, watch)', at_least(0), 3),
    '--grace': flag('seconds to save in (stop)', at_least(1), 300),
    '--worker': flag('host whose log is printed (logs)', default='0'),
    '--poll': flag('seconds between polls (watch)', at_least(0), 60),
    '--dry_run': DRY_RUN,
}
UNPACK = """set -e
git init -q qkattn
git -C qkattn fetch -q ~/qkattn.bundle HEAD
git -C qkattn checkout -q --force --detach FETCH_HEAD
"""
STATUS = f'if [ -e {HOST} ]; then {HOST} status; else echo "qkattn $(hostname) new"; fi'


def gcloud(options: Namespace, *arguments: str, group: str = 'tpu-vm') -> list[str]:
    """Returns a gcloud command on the slice: `gcloud compute tpus GROUP ARGUMENTS`."""
    flags = [f'--zone={options.zone}', '--quiet']
    if options.project:
        flags.append(f'--project={options.project}')
    return ['gcloud', 'compute', 'tpus', group, *arguments, *flags]


def ssh(options: Namespace, script: str, worker: str = 'all') -> list[str]:
    """Returns the command that executes a script on one host, or on all at once."""
    return gcloud(options, 'ssh', options.name, f'--worker={worker}', f'--command={script}')


def print_state(options: Namespace) -> list[str]:
    """Returns the command that prints the state of the queued resource, if it exists."""
    flags = [f'--filter=name~/{options.name}$', '--format=value(state.state)']
    return gcloud(options, 'list', *flags, group='queued-resources')


def gcloud_commands(options: Namespace, verb: str) -> list[list[str]]:
    """Returns the gcloud commands that execute a verb of the launcher, such as 'create'."""
    match verb:
        case 'create':
            tpu_type, _, _ = options.accelerator.partition('-')  # 'v6e' of 'v6e-16'
            runtime_version = options.runtime_version or RUNTIMES[tpu_type]
            flags = [
                f'--node-id={options.name}',
                f'--accelerator-type={options.accelerator}',
                f'--runtime-version={runtime_version}',
            ]
            if options.spot:
                flags.append('--spot')
            if options.reserved:
                flags.append('--reserved')
            return [gcloud(options, 'create', options.name, *flags, group='queued-resources')]
        case 'setup':
            # A git bundle keeps the commit, which is recorded in results.
            destination = f'{options.name}:qkattn.bundle'
            copy = gcloud(options, 'scp', options.bundle, destination, '--worker=all')
            install = shlex.join([HOST, 'setup', options.extras])
            unpack_and_install = UNPACK + install  # a script of several lines
            return [copy, ssh(options, unpack_and_install)]
        case 'run':
            command = [HOST, 'start', f'--retries={options.retries}', '--', *options.command]
            if options.env:
                command = ['env', *options.env, *command]
            return [ssh(options, shlex.join(command))]
        case 'status':
            return [print_state(options), ssh(options, STATUS)]
        case 'logs':
            return [ssh(options, f'{HOST} logs', worker=options.worker)]
        case 'stop':
            return [ssh(options, f'{HOST} stop {options.grace}')]
        case 'delete':
            return [gcloud(options, 'delete', options.name, '--force', group='queued-resources')]
    raise ValueError(f'{verb} has no commands')


def output_of(command: list[str]) -> str | None:
    """Returns the standard output of a command; None if it fails."""
    process = run_program(command, stdout=subprocess.PIPE)
    return process.stdout if process.returncode == 0 else None


def execute(options: Namespace, verb: str) -> int:
    """Runs the commands of a verb until one fails; returns the exit code of the last command."""
    for command in gcloud_commands(options, verb):
        code = subprocess.run(command).returncode
        if code:
            return code
    return 0


def exit_code_of(hosts: list[str]) -> int | None:
    """Returns the exit code of the job from the states of its hosts; None if any has not ended.

    ['exit 0', 'running'] gives None. Of different codes, the order of precedence is 2 (a wrong
    setting), the first crash, 75 (stopped) and 0.
    """
    codes = [int(state.split()[1]) for state in hosts if state.startswith('exit')]  # 'exit 75'
    if not codes or len(codes) < len(hosts):
        return None
    if 2 in codes:
        return 2
    crashes = [code for code in codes if code not in (0, 75)]
    return crashes[0] if crashes else max(codes)


def next_verbs(slice_state: str, hosts: list[str]) -> list[str]:
    """Returns the verbs that `watch` runs next, from the states of the slice and its hosts."""
    if slice_state == 'ABSENT':
        return ['create']
    if slice_state == 'SUSPENDED':
        # The slice was preempted and will not come back.
        return ['delete', 'create']
    if 'new' in hosts:
        return ['setup', 'run']
    if 'ready' in hosts or 'lost' in hosts or exit_code_of(hosts) is not None:
        return ['run']
    return []


def watch(options: Namespace) -> int:
    """Keeps the slice and its command running until the command is done; returns its exit code."""
    has_run = False  # without a run of this watch, an exit code is from an earlier start
    failures = 0  # consecutive failed verbs
    while True:
        slice_state = state_of_slice(options)
        if slice_state == 'FAILED':
            exit_with(
                f'the request {options.name} failed; delete it and see the quota of the zone',
                code=1,
            )
        hosts = states_of_hosts(options) if slice_state == 'ACTIVE' else []
        code = exit_code_of(hosts)
        if has_run and code is not None:
            return code

        verbs = next_verbs(slice_state, hosts)  # such as ['setup', 'run']
        print(
            f'watch: {options.name} is {slice_state.lower()}', *hosts, *verbs, sep=', ', flush=True
        )
        failed_verb = None
        for verb in verbs:
            if execute(options, verb) != 0:
                failed_verb = verb
                break
        has_started = 'run' in verbs and failed_verb is None
        if has_started or 'running' in hosts:
            has_run = True
        failures = failures + 1 if failed_verb else 0
        if failures > options.retries:
            exit_with(f'{failed_verb} failed {failures} times; the reason is above', code=1)
        time.sleep(options.poll)


def state_of_slice(options: Namespace) -> str:
    """Returns the state of the slice, such as 'ACTIVE'.

    'ABSENT' if it does not exist, 'UNKNOWN' if gcloud fails.
    """
    output = output_of(print_state(options))
    if output is None:
        return 'UNKNOWN'
    return output.strip() or 'ABSENT'


def states_of_hosts(options: Namespace) -> list[str]:
    """Returns the states of the hosts: 'new', 'ready', 'running', 'lost' or 'exit CODE'."""
    status = output_of(ssh(options, STATUS)) or ''
    # The line of a host is 'qkattn HOSTNAME STATE'.
    return re.findall(r'^qkattn \S+ (.+)$', status, re.M)


def read_options(argv: list[str]) -> Namespace:
    """Reads and checks the command line. A mistake ends the launcher."""
    options = read_command_line(__doc__, FLAGS, argv)
    verb = options.verb
    kind = options.accelerator
    if verb not in VERBS:
        exit_with(f'unknown verb {verb!r}; known: {", ".join(VERBS)}')
    if options.spot and options.reserved:
        exit_with('argument --reserved: not allowed with argument --spot')
    if verb in ('create', 'watch'):
        if kind is None:
            exit_with(f'{verb} needs --accelerator=TYPE, e.g. --accelerator=v6e-16')
        if not re.fullmatch(f'({"|".join(RUNTIMES)})-[1-9][0-9]*', kind):
            valid = ', '.join(f'{name}-N' for name in RUNTIMES)
            exit_with(f'--accelerator={kind} is not a TPU VM type; valid: {valid}')
    if verb in ('run', 'watch'):
        require_command(options)
    elif options.command:
        exit_with(f'{verb} takes no command after --')
    check_workdir_lasts(options, storage='a gs:// directory', machines='hosts')
    return options


def main() -> int:
    options = read_options(sys.argv[1:])
    if options.dry_run:
        options.bundle = 'qkattn.bundle'
        verbs = [options.verb]
        if options.verb == 'watch':
            # As if the slice did not exist yet.
            verbs = ['create', 'setup', 'run', 'status']
        for verb in verbs:
            for command in gcloud_commands(options, verb):
                print(shlex.join(command))
        return 0
    require_program('gcloud', 'https://cloud.google.com/sdk/docs/install says how')
    with tempfile.TemporaryDirectory() as folder:
        options.bundle = f'{folder}/qkattn.bundle'  # the current commit, for all hosts
        if options.verb in ('setup', 'watch'):
            make_bundle = ['git', '-C', str(ROOT), 'bundle', 'create', '--quiet']
            process = subprocess.run([*make_bundle, options.bundle, 'HEAD'])
            if process.returncode != 0:
                exit_with(f'{ROOT} has no commit of git; setup copies one')
        if options.verb == 'watch':
            return watch(options)
        return execute(options, options.verb)


if __name__ == '__main__':
    sys.exit(main())
