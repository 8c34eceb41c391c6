"""What the five launchers share: command lines, and sentences about those that are wrong."""

import os
import shutil
import subprocess

import pytest

from tests.launch.launchers import STUDY, TRAIN, WHERE, environment_with, launch_here, write_program
from tests.processes import ROOT

KUBERNETES = ('--name=qk', '--image=r/qkattn:1')
V6E = '--accelerator=v6e-16'
GPUS = ('--processes=2', '--gpus_per_process=2')
# Flags that each launcher accepts.
RIGHT_FLAGS = {
    'local': (),
    'slurm': (),
    'tpu': ('run', *WHERE),
    'sky': ('--accelerators=H100:8',),
    'kubernetes': (*KUBERNETES, '--accelerator=v6e-8'),
}
# The program that each launcher calls.
TOOLS = {'slurm': 'sbatch', 'tpu': 'gcloud', 'kubernetes': 'kubectl', 'sky': 'sky'}
TRAIN_SMALL = ('--', *TRAIN)
# Arguments that every launcher refuses, since they share a parser, and words of the sentence.
WRONG_FOR_ALL = [
    (('--retries=many', *TRAIN_SMALL), '--retries many'),
    (('--retries=-1', *TRAIN_SMALL), '--retries -1 at least 0'),
    (('--retries', *TRAIN_SMALL), '--retries expected one'),
    (TRAIN, 'unrecognized train'),
    (('--',), 'missing train ablate'),
    (('--', 'sh', '--workdir=x'), "'sh' train ablate"),
    (('--', 'train', '--config=small'), '--workdir=DIRECTORY'),
    (('--workers=2', *TRAIN_SMALL), '--workers=2 train'),
]
FROB = ('--frob', *TRAIN_SMALL)
# The launcher, its arguments, and words of the sentence that refuses them.
WRONG = [
    *(('slurm', flags, words) for flags, words in WRONG_FOR_ALL),
    *((name, (*RIGHT_FLAGS[name], *FROB), 'unrecognized --frob --help') for name in RIGHT_FLAGS),
    ('local', TRAIN_SMALL, '/v/bin/python missing QKATTN_VENV'),
    ('local', (*GPUS, '--dry_run', *TRAIN_SMALL), 'CUDA_VISIBLE_DEVICES=4,5,6 has no 4'),
    (
        'local',
        ('--gpus_per_process=1', '--devices_per_process=2', '--dry_run', *TRAIN_SMALL),
        '--devices_per_process --gpus_per_process',
    ),
    ('slurm', TRAIN_SMALL, '/v has no bin/python launch/venv.sh'),
    ('tpu', ('frob', *WHERE), 'frob create setup run status logs stop delete watch'),
    ('tpu', ('create', *WHERE), '--accelerator v6e-16'),
    ('tpu', ('create', *WHERE, '--accelerator=h100-8'), 'h100-8 v5litepod-N v6e-N'),
    ('tpu', ('create', *WHERE, V6E, '--spot', '--reserved'), '--reserved --spot'),
    ('tpu', ('run', *WHERE, '--env=a b', *TRAIN_SMALL), '--env NAME=VALUE'),
    ('tpu', ('stop', *WHERE, *TRAIN_SMALL), 'stop takes no'),
    ('kubernetes', ('--name=qk', V6E, *TRAIN_SMALL), '--image'),
    ('kubernetes', (*KUBERNETES, '--accelerator=v6e-12', *TRAIN_SMALL), 'v6e-12 16 256'),
    ('kubernetes', (*KUBERNETES, '--accelerator=a3-0x8', *TRAIN_SMALL), 'a3-0x8'),
    ('kubernetes', (*KUBERNETES, V6E, '--workers=2', '--', *STUDY), '--workers v6e-16 4'),
    ('kubernetes', ('--name=a: b', '--image=i', V6E, *TRAIN_SMALL), '--name a:'),
    ('sky', TRAIN_SMALL, '--accelerators'),
    ('sky', ('--accelerators=8 GPUs', *TRAIN_SMALL), '8 H100:8'),
    (
        'sky',
        (*RIGHT_FLAGS['sky'], '--workers=2', '--nodes=2', '--', *STUDY),
        '--workers=2 --nodes=2',
    ),
]


@pytest.mark.parametrize(('name', 'arguments', 'words'), WRONG, ids=lambda x: str(x)[-60:])
def test_a_wrong_command_line_is_refused_before_anything_is_called(
    name, arguments, words, tmp_path
):
    """The launcher ends with exit code 2, and prints one sentence that has each of `words`."""
    # Stand-ins for sbatch, gcloud, kubectl and sky leave the file 'called' if they are called.
    for tool in TOOLS.values():
        write_program(tmp_path / tool, f'#!/bin/sh\ntouch {tmp_path}/called\n')
    # There is no virtual environment /v, and three GPUs are visible.
    env = environment_with(tmp_path) | {'QKATTN_VENV': '/v', 'CUDA_VISIBLE_DEVICES': '4,5,6'}

    finished = launch_here(name, *arguments, env=env)

    assert finished.returncode == 2, finished.stderr
    assert finished.stdout == ''
    assert len(finished.stderr.splitlines()) == 1, finished.stderr
    for word in words.split(' '):
        assert word in finished.stderr
    assert not (tmp_path / 'called').exists()


@pytest.mark.parametrize('name', TOOLS)
def test_a_missing_tool_is_named(name, tmp_path):
    # PATH has a program python, and not the tool of the launcher.
    write_program(tmp_path / 'bin/python', '')
    env = {'PATH': str(tmp_path / 'bin'), 'QKATTN_VENV': str(tmp_path)}

    finished = launch_here(name, *RIGHT_FLAGS[name], *TRAIN_SMALL, env=env)

    assert finished.returncode == 2
    assert len(finished.stderr.splitlines()) == 1
    assert finished.stderr.startswith(f'{TOOLS[name]} is not installed; ')


def dry_run_errors(name, *flags, command):
    """The standard error of a dry run that succeeds."""
    arguments = [*RIGHT_FLAGS[name], *flags, '--dry_run', '--', *command]
    finished = launch_here(name, *arguments, env={**os.environ})
    assert finished.returncode == 0
    return finished.stderr


WARNING = 'results end with'


@pytest.mark.parametrize('name', ['tpu', 'kubernetes', 'sky'])
def test_a_directory_that_is_lost_with_the_hosts_is_warned_of(name):
    # The run only reads init_from, so its location does not matter.
    init_from = '--config.train.init_from=gs://b/x'
    to_bucket = dry_run_errors(name, command=('train', '--workdir=gs://b/w', init_from))
    to_host = dry_run_errors(name, command=('train', '--workdir=runs/w', init_from))

    assert WARNING not in to_bucket
    assert WARNING in to_host


def test_a_directory_on_a_mounted_volume_is_not_warned_of():
    # The volume is mounted at /runs.
    to_volume = dry_run_errors(
        'kubernetes', '--volume=claim', command=('train', '--workdir=/runs/w')
    )
    to_mount_itself = dry_run_errors(
        'kubernetes', '--volume=claim', command=('train', '--workdir=/runs')
    )
    to_host = dry_run_errors('kubernetes', '--volume=claim', command=('train', '--workdir=runs/w'))
    # /runs2 begins like /runs, but is not below it.
    beside_volume = dry_run_errors(
        'kubernetes', '--volume=claim', command=('train', '--workdir=/runs2/w')
    )

    assert WARNING not in to_volume
    assert WARNING not in to_mount_itself
    assert WARNING in to_host
    assert WARNING in beside_volume


@pytest.mark.parametrize('name', ['kubernetes', 'sky'])
def test_workers_without_a_common_directory_are_refused(name):
    arguments = (*RIGHT_FLAGS[name], '--workers=2', '--dry_run', '--', 'ablate', '--workdir=runs/w')

    finished = launch_here(name, *arguments, env={**os.environ})

    assert finished.returncode == 2
    assert finished.stdout == ''
    assert finished.stderr.endswith(', --workers=2 share no study\n')


@pytest.mark.skipif(shutil.which('shellcheck') is None, reason='shellcheck is not installed')
def test_shellcheck_finds_nothing():
    scripts = [*ROOT.glob('launch/*.sh'), *ROOT.glob('launch/*.sbatch'), ROOT / '.ci/run']
    # Versions differ on SC2317: whether a function that only a trap calls is reachable.
    command = ['shellcheck', '--exclude=SC2317', *scripts]

    finished = subprocess.run(command, capture_output=True, text=True)

    assert finished.returncode == 0, finished.stdout
