"""TPU VMs: command lines, what `watch` does with the states of a slice, and what runs on a host."""

import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.launch.launchers import (
    AWKWARD,
    LAUNCH,
    PROGRAM,
    TRAIN,
    WHERE,
    dry_run,
    starts_of,
    write_program,
)
from tests.processes import wait_until

KIND = '--accelerator=v6e-16'


def gcloud_commands(*flags: str, command: tuple[str, ...] = ()) -> list[list[str]]:
    """The gcloud commands of a dry run."""
    before, *texts = dry_run('tpu', *flags, command=command).split('gcloud ')
    assert before == ''
    return [['gcloud', *shlex.split(text)] for text in texts]


def gcloud_command(*flags: str, command: tuple[str, ...] = ()) -> list[str]:
    """The only gcloud command of a dry run."""
    commands = gcloud_commands(*flags, command=command)
    assert len(commands) == 1
    return commands[0]


def command_on_hosts(gcloud_command: list[str]) -> str:
    """The shell command that a gcloud command runs on hosts."""
    flags = [word for word in gcloud_command if word.startswith('--command=')]
    assert len(flags) == 1
    return flags[0].removeprefix('--command=')


QUEUED_RESOURCES = ['gcloud', 'compute', 'tpus', 'queued-resources']


def test_create_requests_a_slice():
    command = gcloud_command('create', *WHERE, KIND, '--spot', '--project=p')

    assert command[:5] == [*QUEUED_RESOURCES, 'create']
    assert command[-1] == '--project=p'
    assert '--runtime-version=v2-alpha-tpuv6e' in command
    assert '--node-id=qk' in command
    assert '--spot' in command


def test_delete_deletes_the_request_and_the_slice():
    command = gcloud_commands('delete', *WHERE)[0]

    assert command[:7] == [*QUEUED_RESOURCES, 'delete', 'qk', '--force']


def test_setup_copies_the_code_to_the_hosts_and_installs_it():
    copy, install = gcloud_commands('setup', *WHERE)

    assert copy[3:7] == ['tpu-vm', 'scp', 'qkattn.bundle', 'qk:qkattn.bundle']
    assert command_on_hosts(install).endswith('qkattn/launch/host.sh setup tpu,gcs')


def test_stop_and_logs_pass_on_their_flags():
    stop = gcloud_commands('stop', *WHERE, '--grace=40')[0]
    logs = gcloud_commands('logs', *WHERE, '--worker=3')[0]

    assert 'host.sh stop 40' in command_on_hosts(stop)
    assert '--worker=3' in logs


def test_watch_creates_sets_up_starts_and_observes():
    commands = gcloud_commands('watch', *WHERE, KIND, command=TRAIN)

    verbs = [command[4] for command in commands]
    assert verbs == ['create', 'scp', 'ssh', 'ssh', 'list', 'ssh']


class Watched(NamedTuple):
    verbs: list[str]  # the verbs that `watch` ran, such as ['create', 'setup']
    exit_code: int
    states_left: list[str | None]  # the states that `watch` did not ask for


@pytest.fixture
def watch(monkeypatch):
    """watch(states) runs `launch/tpu.py watch` on a slice that goes through these states.

    A slice is a group of hosts with TPUs. A state in capitals, such as 'PROVISIONING', is a state
    of the slice. Words in small letters, such as 'running exit75', are the states of the hosts of
    an active slice. The state is '' if there is no slice, and None if gcloud does not answer.
    """
    monkeypatch.syspath_prepend(str(LAUNCH))
    tpu = importlib.import_module('tpu')

    def run_watch(states: list[str | None], *flags: str, verbs_fail: bool = False) -> Watched:
        """Runs `watch`. Its verbs, such as 'create', are recorded instead of executed."""
        states_left = list(states)
        verbs = []
        host_lines = ''  # what the hosts of the current state print

        def output_of(command: list[str]) -> str | None:
            """Replaces gcloud.

            A question about the slice takes the next state. A question about its hosts, `gcloud
            compute tpus tpu-vm ssh`, is answered from the same state.
            """
            nonlocal host_lines
            group = command[3]
            if group == 'tpu-vm':
                return host_lines
            state = states_left.pop(0)
            host_lines = ''
            is_of_slice = not state or state.isupper()
            if is_of_slice:
                return state
            # A host prints its name and its state, such as 'qkattn h exit 75'.
            for host_state in state.split():
                host_state = host_state.replace('exit', 'exit ')
                host_lines += f'qkattn h {host_state}\n'
            return 'ACTIVE\n'

        def execute(options, verb: str) -> bool:
            """Replaces the commands of a verb, and returns whether they fail."""
            verbs.append(verb)
            return verbs_fail

        monkeypatch.setattr(tpu, 'output_of', output_of)
        monkeypatch.setattr(tpu, 'execute', execute)
        options = tpu.read_options(['watch', *WHERE, KIND, '--poll=0', *flags, '--', *TRAIN])
        try:
            exit_code = tpu.watch(options)
        except SystemExit as end:
            exit_code = end.code
        return Watched(verbs, exit_code, states_left)

    yield run_watch
    sys.modules.pop('tpu')
    sys.modules.pop('arguments')


@pytest.mark.parametrize(
    ('states', 'verbs', 'exit_code'),
    [
        pytest.param(
            [
                '',  # there is no slice: create it
                'PROVISIONING',
                'new new',  # two hosts without the code: set up, and run the command
                None,  # gcloud does not answer: wait
                'running running',
                'SUSPENDING',
                'SUSPENDED',  # preempted: delete the slice, and create it again
                'new new',
                'running exit0',
                'ACTIVE',  # the hosts do not answer
                'exit0 exit0',
            ],
            ['create', 'setup', 'run', 'delete', 'create', 'setup', 'run'],
            0,
            id='preempted',
        ),
        pytest.param(['ready ready', 'exit75 exit0'], ['run'], 75, id='stopped'),
        pytest.param(
            ['running running running', 'exit75 exit139 exit0'], [], 139, id='one host crashes'
        ),
        pytest.param(
            ['running running', 'exit2 new', 'exit1 exit2'],
            ['setup', 'run'],
            2,
            id='one host is new',
        ),
        pytest.param(
            ['running lost', 'running running', 'exit1 exit1'], ['run'], 1, id='one host restarts'
        ),
        pytest.param(
            ['exit75 exit75', 'running running', 'exit0 exit0'], ['run'], 0, id='stopped before'
        ),
        pytest.param(['FAILED'], [], 1, id='slice failed'),
    ],
)
def test_watch_does_what_the_states_of_a_slice_need(watch, states, verbs, exit_code):
    """`watch` creates the slice, sets up its hosts, and runs the command until it has ended.

    Words in small letters are the states of hosts, such as 'running exit75'. If the exit codes of
    hosts differ, 2 (a wrong setting) has priority, then a crash, then 75 (stopped).
    """
    watched = watch(states)

    assert watched.verbs == verbs
    assert watched.exit_code == exit_code
    assert watched.states_left == []


def test_watch_gives_up_on_a_verb_that_keeps_failing(watch, capsys):
    watched = watch(['new', 'new'], '--retries=1', verbs_fail=True)

    assert watched.verbs == ['setup', 'setup']
    assert watched.exit_code == 1
    assert watched.states_left == []
    assert capsys.readouterr().err == 'setup failed 2 times; the reason is above\n'


# On a host: arguments, restarts, stops


def on_host(host: Path, command: str) -> subprocess.CompletedProcess:
    """Runs a shell command in the home directory `host`, as sshd does."""
    env = {**os.environ, 'HOME': str(host)}
    return subprocess.run(
        ['bash', '-c', command], cwd=host, env=env, capture_output=True, text=True
    )


def state_of(host: Path) -> str:
    """The state that a host reports, such as 'running' or 'exit 75'."""
    output = on_host(host, 'qkattn/launch/host.sh status').stdout
    _, _, state = output.split(maxsplit=2)  # 'qkattn HOSTNAME STATE'
    return state.strip()


@pytest.fixture
def host(tmp_path):
    """The home directory of a host, with the launcher's scripts and a stand-in for qkattn.

    Line n of the file `plan` says what the stand-in does at start n. Without it, it ends with 0.
    """
    if not shutil.which('flock') or not shutil.which('setsid'):
        pytest.skip('flock and setsid of Linux are not installed')
    for name in ('host.sh', 'supervise.sh'):
        write_program(tmp_path / 'qkattn/launch' / name, (LAUNCH / name).read_text())
    write_program(tmp_path / 'qkattn/.venv/bin/python', PROGRAM)
    yield tmp_path
    # A test that failed may leave the job running.
    if state_of(tmp_path) == 'running':
        process_group = int((tmp_path / 'qkattn-run/pid').read_text())
        os.killpg(process_group, signal.SIGKILL)


def run_training(host: Path) -> subprocess.CompletedProcess:
    run = gcloud_command('run', *WHERE, command=TRAIN)
    return on_host(host, command_on_hosts(run))


def test_arguments_arrive_on_a_host_unchanged(host):
    """Arguments and variables have quotes and dollar signs, which a shell could interpret."""
    run = gcloud_command('run', *WHERE, "--env=TOKEN=a 'b' $c", command=('train', *AWKWARD))

    finished = on_host(host, command_on_hosts(run))

    assert finished.returncode == 0, finished.stderr
    assert '--worker=all' in run
    # The command runs in the background. The stand-in for qkattn ends with 0.
    wait_until(lambda: state_of(host) == 'exit 0')
    starts = starts_of(host)
    assert len(starts) == 1
    assert starts[0]['env']['TOKEN'] == "a 'b' $c"
    assert starts[0]['arguments'] == ['-m', 'qkattn', 'train', *AWKWARD]


@pytest.mark.parametrize(
    ('exit_codes', 'retries', 'num_starts', 'final_exit_code'),
    [
        pytest.param([2], 3, 1, 2, id='a wrong setting'),
        pytest.param([75, 75, 1, 75, 0], 1, 5, 0, id='stops are no retries'),
        pytest.param([1, 139, 1], 1, 2, 139, id='crashes'),
    ],
)
def test_a_program_is_started_again_by_its_exit_code(
    host, exit_codes, retries, num_starts, final_exit_code
):
    """A program is started again after 75 (stopped), and at most `retries` times after a crash.

    It is not started again after 0, or after 2 (a wrong setting).
    """
    # Line n of the plan is the exit code of start n.
    (host / 'plan').write_text('\n'.join(str(code) for code in exit_codes))
    supervise = str(host / 'qkattn/launch/supervise.sh')
    program = str(host / 'qkattn/.venv/bin/python')
    command = [supervise, f'--retries={retries}', '--delay=0', '--', program, *AWKWARD]

    finished = on_host(host, shlex.join(command))

    assert finished.returncode == final_exit_code, finished.stderr
    assert len(starts_of(host)) == num_starts
    for start in starts_of(host):
        assert start['arguments'] == list(AWKWARD)


def test_a_host_runs_once_until_it_is_stopped(host):
    """No second run starts while the first one runs. A second stop finds nothing to stop."""
    stop = command_on_hosts(gcloud_command('stop', *WHERE, '--grace=30'))
    # Each start waits for SIGTERM, saves, and ends with 75.
    (host / 'plan').write_text('saves\nsaves')
    assert state_of(host) == 'new'

    # Two runs.
    run_training(host)
    assert state_of(host) == 'running'
    wait_until(lambda: starts_of(host))
    assert run_training(host).stdout == 'running already\n'

    # Two stops. `stop` sends SIGTERM, and waits for the end.
    assert on_host(host, stop).stdout == 'ended with exit code 75\n'
    assert state_of(host) == 'exit 75'
    assert len(starts_of(host)) == 1
    assert on_host(host, stop).stdout == 'not running\n'

    # After a host has gone down, there is no exit code, and no process holds the lock.
    (host / 'qkattn-run/exit').unlink()
    assert state_of(host) == 'lost'


def test_setup_updates_no_packages_under_a_job(host):
    """Packages that a running job has loaded must not change, so `setup` looks for a job first.

    `starts_of` has every start of Python, by pip or by the job. The first setup starts Python
    twice, the job once, and the second setup once.
    """
    # The first two starts end with 0. The third waits for SIGTERM, saves, and ends with 75.
    (host / 'plan').write_text('0\n0\nsaves')
    # The virtual environment exists already, so `venv.sh` does nothing.
    write_program(host / 'qkattn/launch/venv.sh', '#!/bin/sh\n')
    (host / 'qkattn/.venv/qkattn-stamp').touch()
    update_packages = ['-m', 'pip', 'install', '--quiet', '-r', 'requirements.txt']

    # Without a job, setup updates packages, and then installs qkattn.
    assert on_host(host, 'qkattn/launch/host.sh setup').returncode == 0
    assert len(starts_of(host)) == 2
    assert starts_of(host)[0]['arguments'] == update_packages

    run_training(host)
    wait_until(lambda: len(starts_of(host)) == 3)

    # While the job runs, setup only installs qkattn.
    assert on_host(host, 'qkattn/launch/host.sh setup').returncode == 0
    assert len(starts_of(host)) == 4
    assert starts_of(host)[3]['arguments'] != update_packages
    assert on_host(host, 'qkattn/launch/host.sh stop 30').returncode == 0


def test_a_stop_that_is_too_slow_is_reported(host):
    (host / 'plan').write_text('saves')
    run_training(host)
    wait_until(lambda: starts_of(host))

    # The stand-in saves for 0.3 s, and `stop` waits for 0.05 s.
    finished = on_host(host, 'qkattn/launch/host.sh stop 0.05')

    assert finished.returncode == 1
    assert finished.stderr == 'still saving after 0.05 s\n'
    wait_until(lambda: state_of(host) == 'exit 75')
