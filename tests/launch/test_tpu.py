"""TPU VMs: command lines, what `watch` does with the states of a slice, and what runs on a host."""

import importlib
import os
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path

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
    head, *texts = dry_run('tpu', *flags, command=command).split('gcloud ')
    assert not head
    return [['gcloud', *shlex.split(text)] for text in texts]


def command_on_hosts(command: list[str]) -> str:
    """What a gcloud command runs on hosts."""
    (text,) = [word for word in command if word.startswith('--command=')]
    return text.removeprefix('--command=')


def test_a_dry_run_prints_each_command():
    queued = ['gcloud', 'compute', 'tpus', 'queued-resources']
    ((*words, project),) = gcloud_commands('create', *WHERE, KIND, '--spot', '--project=p')
    assert words[:5] == [*queued, 'create']
    assert project == '--project=p'
    assert {'--runtime-version=v2-alpha-tpuv6e', '--node-id=qk', '--spot'} <= set(words)
    assert gcloud_commands('delete', *WHERE)[0][:7] == [*queued, 'delete', 'qk', '--force']
    # The code is copied to the hosts, and installed there.
    copy, install = gcloud_commands('setup', *WHERE)
    assert copy[3:7] == ['tpu-vm', 'scp', 'qkattn.bundle', 'qk:qkattn.bundle']
    assert command_on_hosts(install).endswith('qkattn/launch/host.sh setup tpu,gcs')
    assert 'host.sh stop 40' in command_on_hosts(gcloud_commands('stop', *WHERE, '--grace=40')[0])
    assert '--worker=3' in gcloud_commands('logs', *WHERE, '--worker=3')[0]
    # A watched job is created, set up, started and observed.
    watched = gcloud_commands('watch', *WHERE, KIND, command=TRAIN)
    assert [words[4] for words in watched] == ['create', 'scp', 'ssh', 'ssh', 'list', 'ssh']


@pytest.fixture
def watch(monkeypatch):
    """watch(states) -> the verbs that `watch` runs, its exit code, and the states not looked at.

    A state is that of the slice, 'ACTIVE', or what its hosts report, as in 'running exit75'.
    """
    monkeypatch.syspath_prepend(str(LAUNCH))
    tpu = importlib.import_module('tpu')
    hosts = ''
    done = []

    def call(states: list[str | None], *flags: str, fails: bool = False):
        given = iter(states)

        def output_of(command: list[str]) -> str | None:
            nonlocal hosts
            if command[3] == 'tpu-vm':
                return hosts
            state = next(given)
            hosts = ''
            if not state or state.isupper():
                return state
            hosts = ''.join(f'qkattn h {one.replace("exit", "exit ")}\n' for one in state.split())
            return 'ACTIVE\n'

        monkeypatch.setattr(tpu, 'output_of', output_of)
        monkeypatch.setattr(tpu, 'execute', lambda _, verb: done.append(verb) or fails)
        options = tpu.read_options(['watch', *WHERE, KIND, '--poll=0', *flags, '--', *TRAIN])
        try:
            code = tpu.watch(options)
        except SystemExit as end:
            code = end.code
        return ' '.join(done), code, list(given)

    yield call
    for name in ('tpu', 'arguments'):
        sys.modules.pop(name)


@pytest.mark.parametrize(
    'states, verbs, code',
    [
        # Preempted while it runs, then done; None: gcloud or a host does not answer.
        (
            ['', 'PROVISIONING', 'new new', None, 'running running', 'SUSPENDING', 'SUSPENDED']
            + ['new new', 'running exit0', 'ACTIVE', 'exit0 exit0'],
            'create setup run delete create setup run',
            0,
        ),
        (['ready ready', 'exit75 exit0'], 'run', 75),
        (['running running running', 'exit75 exit139 exit0'], '', 139),
        (['running running', 'exit2 new', 'exit1 exit2'], 'setup run', 2),
        (['running lost', 'running running', 'exit1 exit1'], 'run', 1),
        # A command of before has ended: the same command goes on from its checkpoint.
        (['exit75 exit75', 'running running', 'exit0 exit0'], 'run', 0),
        (['FAILED'], '', 1),
    ],
)
def test_watch_does_what_the_states_of_a_slice_need(watch, states, verbs, code):
    assert watch(states) == (verbs, code, [])


def test_watch_gives_up_on_a_verb_that_keeps_failing(watch, capsys):
    assert watch(['new', 'new'], '--retries=1', fails=True) == ('setup setup', 1, [])
    assert capsys.readouterr().err == 'setup failed 2 times; the reason is above\n'


# On a host: arguments, restarts, stops


def on_host(host: Path, command: str) -> subprocess.CompletedProcess:
    """What sshd does with a command."""
    options = {'env': {**os.environ, 'HOME': str(host)}, 'capture_output': True, 'text': True}
    return subprocess.run(['bash', '-c', command], cwd=host, **options)


def state_of(host: Path) -> str:
    return on_host(host, 'qkattn/launch/host.sh status').stdout.split(maxsplit=2)[2].strip()


@pytest.fixture
def host(tmp_path):
    """A home directory like that of a host: the launchers' copy, and a stand-in for qkattn."""
    if not shutil.which('flock') or not shutil.which('setsid'):
        pytest.skip('flock and setsid of Linux are not installed')
    for name in ('host.sh', 'supervise.sh'):
        write_program(tmp_path / 'qkattn/launch' / name, (LAUNCH / name).read_text())
    write_program(tmp_path / 'qkattn/.venv/bin/python', PROGRAM)
    yield tmp_path
    if state_of(tmp_path) == 'running':  # left by a test that failed
        os.killpg(int((tmp_path / 'qkattn-run' / 'pid').read_text()), signal.SIGKILL)


def test_arguments_arrive_on_a_host_unchanged(host):
    (command,) = gcloud_commands('run', *WHERE, "--env=TOKEN=a 'b' $c", command=('train', *AWKWARD))
    assert '--worker=all' in command
    done = on_host(host, command_on_hosts(command))
    assert done.returncode == 0, done.stderr
    wait_until(lambda: state_of(host) == 'exit 0')
    ((token, arguments),) = [
        (start['env']['TOKEN'], start['arguments']) for start in starts_of(host)
    ]
    assert (token, arguments) == ("a 'b' $c", ['-m', 'qkattn', 'train', *AWKWARD])


@pytest.mark.parametrize(
    'codes, retries, num_starts, final_code',
    [
        ('2', 3, 1, 2),  # a wrong setting
        ('75 75 1 75 0', 1, 5, 0),  # stops do not count as retries
        ('1 139 1', 1, 2, 139),
    ],
)
def test_a_program_is_started_again_by_its_exit_code(host, codes, retries, num_starts, final_code):
    (host / 'plan').write_text(codes.replace(' ', '\n'))
    launch = host / 'qkattn' / 'launch'
    program = host / 'qkattn' / '.venv' / 'bin' / 'python'
    flags = [f'--retries={retries}', '--delay=0', '--', str(program), *AWKWARD]
    done = on_host(host, shlex.join([str(launch / 'supervise.sh'), *flags]))
    assert done.returncode == final_code, done.stderr
    assert len(starts_of(host)) == num_starts
    assert {tuple(start['arguments']) for start in starts_of(host)} == {AWKWARD}


def test_a_host_runs_once_until_it_is_stopped(host):
    assert state_of(host) == 'new'
    (host / 'plan').write_text('saves\nsaves')
    (run,) = gcloud_commands('run', *WHERE, command=TRAIN)
    on_host(host, command_on_hosts(run))
    assert state_of(host) == 'running'
    wait_until(lambda: starts_of(host))
    assert on_host(host, command_on_hosts(run)).stdout == 'running already\n'
    (stop,) = gcloud_commands('stop', *WHERE, '--grace=30')
    assert on_host(host, command_on_hosts(stop)).stdout == 'ended with exit code 75\n'
    assert state_of(host) == 'exit 75'
    assert len(starts_of(host)) == 1
    assert on_host(host, command_on_hosts(stop)).stdout == 'not running\n'
    # A host that went down has a process id of before, and nobody holds its lock.
    (host / 'qkattn-run' / 'exit').unlink()
    assert state_of(host) == 'lost'


def test_setup_updates_no_packages_under_a_job(host):
    (host / 'plan').write_text('0\n0\nsaves')
    write_program(host / 'qkattn/launch/venv.sh', '#!/bin/sh\n')
    (host / 'qkattn' / '.venv' / 'qkattn-stamp').touch()
    assert on_host(host, 'qkattn/launch/host.sh setup').returncode == 0
    update = ['-m', 'pip', 'install', '--quiet', '-r', 'requirements.txt']
    assert starts_of(host)[0]['arguments'] == update
    assert len(starts_of(host)) == 2
    on_host(host, command_on_hosts(gcloud_commands('run', *WHERE, command=TRAIN)[0]))
    wait_until(lambda: len(starts_of(host)) == 3)
    assert on_host(host, 'qkattn/launch/host.sh setup').returncode == 0
    assert len(starts_of(host)) == 4
    assert starts_of(host)[3]['arguments'] != update
    assert on_host(host, 'qkattn/launch/host.sh stop 30').returncode == 0


def test_a_stop_that_is_too_slow_is_reported(host):
    (host / 'plan').write_text('saves')
    on_host(host, command_on_hosts(gcloud_commands('run', *WHERE, command=TRAIN)[0]))
    wait_until(lambda: starts_of(host))
    done = on_host(host, 'qkattn/launch/host.sh stop 0.05')
    assert (done.returncode, done.stderr) == (1, 'still saving after 0.05 s\n')
    wait_until(lambda: state_of(host) == 'exit 75')
