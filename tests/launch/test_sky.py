"""SkyPilot: the YAML by its own parser, what runs on a host, wrong flags."""

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from qkattn.jobs.detection import TRIPLE
from tests.launch import launchers
from tests.launch.launchers import AWKWARD, STUDY, TRAIN, dry_run, launch, starts_of, write_program

PYTHON = os.environ.get('QKATTN_TEST_SKY_PYTHON')
GPUS = '--accelerators=H100:8'
# Loads tasks with SkyPilot's parser, and prints what it understood.
LOAD_TASKS = """
import json, sys
import sky
tasks = []
for text in json.load(sys.stdin):
    with open('task.yaml', 'w') as file:
        file.write(text)
    task = sky.Task.from_yaml('task.yaml')
    (resources,) = task.resources
    tasks.append([task.num_nodes, task.envs, task.run, resources.accelerators,
                  resources.use_spot, resources.job_recovery])
print(json.dumps(tasks))
"""


def yaml_and_commands(*flags: str, command=TRAIN) -> tuple[str, list[list[str]]]:
    """The task as YAML, and the `sky` commands, of a dry run."""
    output = dry_run('sky', *flags, command=command)
    task, _, rest = output.partition('\n\nsky ')
    commands = [shlex.split(line) for line in f'sky {rest}'.splitlines()]
    return task, commands


@pytest.mark.skipif(not PYTHON, reason='QKATTN_TEST_SKY_PYTHON names no Python with skypilot')
def test_skypilot_reads_the_tasks(tmp_path):
    """SkyPilot's parser reads two files of the repository, and two tasks of the launcher."""
    train_file = (launchers.LAUNCH / 'sky/train.yaml').read_text()
    study_file = (launchers.LAUNCH / 'sky/study.yaml').read_text()
    train, _ = yaml_and_commands(GPUS, command=('train', *AWKWARD))
    study, _ = yaml_and_commands(GPUS, '--workers=2', command=('ablate', *AWKWARD))
    texts = [train_file, study_file, train, study]
    # Tasks of the launcher have the GPUs of the two files. The flag GPUS is passed to `sky`.
    accelerators_of_tasks = [{'H100': 8}, {'H100': 1}, {'H100': 8}, {'H100': 1}]

    output = subprocess.check_output(
        [PYTHON, '-c', LOAD_TASKS],
        input=json.dumps(texts),
        cwd=tmp_path,
        env={'HOME': str(tmp_path), 'PATH': os.environ['PATH']},
        text=True,
    )

    tasks = json.loads(output.splitlines()[-1])
    for task, text, expected_accelerators in zip(tasks, texts, accelerators_of_tasks, strict=True):
        num_nodes, envs, script, accelerators, use_spot, recovery = task
        assert num_nodes == 1
        assert envs['RETRIES'] == '3'
        assert script == yaml.safe_load(text)['run']
        assert accelerators == expected_accelerators
        assert use_spot is True
        # SkyPilot restarts a task only after exit code 75.
        assert recovery['recover_on_exit_codes'] == [75]
        assert recovery['max_restarts_on_errors'] == 0


def start_on_node(home: Path, task: str, *, has_gpus: bool = True, **variables: str) -> dict:
    """Runs the script of a task as a node of SkyPilot does, with a stand-in for qkattn.

    The node has the home directory `home`, and SkyPilot sets `variables`. A node with GPUs has the
    program nvidia-smi.

    Returns:
        How the stand-in was started: a dictionary with its 'arguments' and its variables, 'env'.
    """
    write_program(home / 'launch/supervise.sh', (launchers.LAUNCH / 'supervise.sh').read_text())
    write_program(home / '.venv/bin/python', launchers.PROGRAM)
    write_program(home / 'gpus/nvidia-smi', '#!/bin/sh\n')
    path = os.environ['PATH']
    if has_gpus:
        path = f'{home}/gpus:{path}'
    env = {'PATH': path, 'HOME': str(home), 'RETRIES': '3', **variables}
    script = yaml.safe_load(task)['run']

    finished = subprocess.run(['bash', '-c', script], cwd=home, env=env)

    assert finished.returncode == 0
    return starts_of(home)[-1]


TRAIN_ARGUMENTS = ['train', *AWKWARD, 'a\r\x07\tb']
SECOND_NODE = {'SKYPILOT_NODE_IPS': '10.0.0.7\n10.0.0.8', 'SKYPILOT_NODE_RANK': '1'}


def assert_starts_without_addresses(start: dict, arguments: list[str]) -> None:
    assert start['arguments'] == ['-m', 'qkattn', *arguments]
    for name in TRIPLE:
        assert not start['env'].get(name)


def test_nodes_with_gpus_get_the_address_of_the_first_node(tmp_path):
    task, _ = yaml_and_commands(GPUS, '--nodes=2', command=TRAIN_ARGUMENTS)

    start = start_on_node(tmp_path, task, SKYPILOT_NUM_NODES='2', **SECOND_NODE)

    # SECOND_NODE has rank 1. The first node, 10.0.0.7, is the coordinator.
    address, num_processes, process_id = TRIPLE
    assert start['arguments'] == ['-m', 'qkattn', *TRAIN_ARGUMENTS]
    assert start['env'][address] == '10.0.0.7:8476'
    assert start['env'][num_processes] == '2'
    assert start['env'][process_id] == '1'


def test_a_single_node_needs_no_addresses(tmp_path):
    task, _ = yaml_and_commands(GPUS, '--nodes=2', command=TRAIN_ARGUMENTS)

    start = start_on_node(tmp_path, task, SKYPILOT_NUM_NODES='1', **SECOND_NODE)

    assert_starts_without_addresses(start, TRAIN_ARGUMENTS)


def test_hosts_of_a_tpu_slice_need_no_addresses(tmp_path):
    task, _ = yaml_and_commands(GPUS, '--nodes=2', command=TRAIN_ARGUMENTS)

    start = start_on_node(tmp_path, task, has_gpus=False, SKYPILOT_NUM_NODES='2', **SECOND_NODE)

    assert_starts_without_addresses(start, TRAIN_ARGUMENTS)


def test_a_worker_of_a_study_needs_no_addresses(tmp_path):
    study, _ = yaml_and_commands(GPUS, '--workers=1', command=('ablate', *AWKWARD))

    start = start_on_node(tmp_path, study, has_gpus=False)

    assert_starts_without_addresses(start, ['ablate', *AWKWARD])


def test_tpus_in_capitals_get_the_extras_of_tpus():
    # SkyPilot takes the names of TPUs in capitals, too.
    _, [command] = yaml_and_commands('--accelerators=TPU-v6e-8')

    assert 'EXTRAS=tpu,gcs' in command


def test_each_worker_of_a_study_is_a_job_of_skypilot(tmp_path):
    """For two workers, `sky` is called twice, with the commands that a dry run prints."""
    flags = ['--accelerators=tpu-v6e-8', '--workers=2', '--infra=gcp', '--env=A=b c', '--on_demand']
    _, dry_commands = yaml_and_commands(*flags, command=STUDY)
    # The stand-in for sky appends its arguments and its directory to 'calls', one per line.
    # Its last argument is the file of the task, which it copies to 'yaml'.
    script = f'printf "%s\\n" "$@" "$PWD" >>{tmp_path}/calls; cp "${{@: -1}}" {tmp_path}/yaml\n'
    write_program(tmp_path / 'sky', f'#!/usr/bin/env bash\n{script}')

    finished = launch('sky', *flags, '--', *STUDY, env=launchers.environment_with(tmp_path))

    assert finished.returncode == 0
    lines = (tmp_path / 'calls').read_text().splitlines()
    # Both calls have the same number of arguments.
    lines_per_call = len(lines) // 2
    calls = [lines[:lines_per_call], lines[lines_per_call:]]
    for worker, (call, dry_command) in enumerate(zip(calls, dry_commands, strict=True)):
        *arguments, task_file, directory = call
        # The file of the task lies in a temporary directory, so its path is not compared.
        assert ['sky', *arguments] == dry_command[:-1]
        assert task_file.endswith('/job.yaml')
        assert directory == str(launchers.ROOT)
        # The first flag after `sky jobs launch` is the name.
        assert dry_command[3:5] == ['--name', f'qkattn-{worker}']
        # --on_demand adds --no-use-spot, TPUs need EXTRAS=tpu,gcs, and 3 retries are the default.
        for argument in ('--no-use-spot', 'A=b c', 'EXTRAS=tpu,gcs', 'RETRIES=3'):
            assert argument in dry_command
    assert yaml.safe_load((tmp_path / 'yaml').read_text())['num_nodes'] == 1
