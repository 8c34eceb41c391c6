"""What launch/tpu.py starts on a host: arguments, restarts, stops."""

import os
import shlex
import shutil
import signal

import pytest

from tests.launch.launchers import (
    AWKWARD,
    LAUNCH,
    PROGRAM,
    TRAIN,
    WHERE,
    gcloud_commands,
    on_host,
    remote,
    stand_in,
    started,
    state_of,
    until,
)


@pytest.fixture
def host(tmp_path):
    """A home directory like that of a host: the launchers' copy, and a stand-in for qkattn."""
    if not shutil.which('flock') or not shutil.which('setsid'):
        pytest.skip('flock and setsid of Linux are not installed')
    launch = tmp_path / 'qkattn' / 'launch'
    launch.mkdir(parents=True)
    for name in ('host.sh', 'supervise.sh'):
        shutil.copy(LAUNCH / name, launch)
    stand_in(tmp_path / 'qkattn/.venv/bin/python', PROGRAM)
    yield tmp_path
    if state_of(tmp_path) == 'running':  # left by a test that failed
        os.killpg(int((tmp_path / 'qkattn-run' / 'pid').read_text()), signal.SIGKILL)


def test_arguments_arrive_unchanged(host):
    (command,) = gcloud_commands('run', *WHERE, "--env=TOKEN=a 'b' $c", command=('train', *AWKWARD))
    assert '--worker=all' in command
    done = on_host(host, remote(command))
    assert done.returncode == 0, done.stderr
    until(lambda: state_of(host) == 'exit 0')
    assert started(host) == [["a 'b' $c", ['-m', 'qkattn', 'train', *AWKWARD]]]


@pytest.mark.parametrize(
    'codes, retries, starts, ended',
    [
        ('0', 3, 1, 0),
        ('2', 3, 1, 2),
        ('75 75 75 75 75 0', 1, 6, 0),
        ('1 75 1 0', 2, 4, 0),
        ('1 1 1 1', 2, 3, 1),
        ('1 2', 2, 2, 2),
        ('139', 0, 1, 139),
    ],
)
def test_what_is_started_again(host, codes, retries, starts, ended):
    (host / 'codes').write_text(codes)
    launch, program = host / 'qkattn' / 'launch', host / 'qkattn' / '.venv' / 'bin' / 'python'
    flags = [f'--retries={retries}', '--delay=0', '--', str(program), *AWKWARD]
    done = on_host(host, shlex.join([str(launch / 'supervise.sh'), *flags]))
    assert (done.returncode, len(started(host))) == (ended, starts), done.stderr
    assert {tuple(arguments) for _, arguments in started(host)} == {AWKWARD}


def test_a_host_is_stopped_with_its_checkpoint_and_started_once(host):
    assert state_of(host) == 'new'
    (host / 'codes').write_text('wait wait')
    (run,) = gcloud_commands('run', *WHERE, command=TRAIN)
    on_host(host, remote(run))
    assert state_of(host) == 'running'
    until((host / 'waiting').exists)
    assert on_host(host, remote(run)).stdout == 'running already\n'
    (stop,) = gcloud_commands('stop', *WHERE, '--grace=30')
    assert on_host(host, remote(stop)).stdout == 'ended with exit code 75\n'
    assert state_of(host) == 'exit 75' and len(started(host)) == 1
    assert on_host(host, remote(stop)).stdout == 'not running\n'
    # A host that went down has a process id of before, and nobody holds its lock.
    (host / 'qkattn-run' / 'exit').unlink()
    assert state_of(host) == 'lost'


def test_setup_updates_no_packages_of_a_job_and_a_stop_that_is_too_slow_is_reported(host):
    update = ['-m', 'pip', 'install', '--quiet', '-r', 'requirements.txt']
    stand_in(host / 'qkattn/launch/venv.sh', '#!/bin/sh\n')
    (host / 'qkattn' / '.venv' / 'qkattn-stamp').touch()
    assert on_host(host, 'qkattn/launch/host.sh setup').returncode == 0
    assert [words for _, words in started(host)][0] == update and len(started(host)) == 2
    (host / 'codes').write_text('wait')
    on_host(host, remote(gcloud_commands('run', *WHERE, command=TRAIN)[0]))
    until((host / 'waiting').exists)
    assert on_host(host, 'qkattn/launch/host.sh setup').returncode == 0
    assert [words for _, words in started(host)].count(update) == 1 and len(started(host)) == 4
    done = on_host(host, 'qkattn/launch/host.sh stop 0.05')
    assert (done.returncode, done.stderr) == (1, 'still saving after 0.05 s\n')
    until(lambda: state_of(host) == 'exit 75')
