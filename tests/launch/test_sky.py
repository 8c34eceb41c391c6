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
# Loads tasks with SkyPilot's parser; prints what it understood.
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
    """The YAML and the `sky` commands of a dry run."""
    text, _, tail = dry_run('sky', *flags, command=command).partition('\n\nsky ')
    return text, [shlex.split(line) for line in f'sky {tail}'.splitlines()]


@pytest.mark.skipif(not PYTHON, reason='QKATTN_TEST_SKY_PYTHON names no Python with skypilot')
def test_skypilot_reads_the_tasks(tmp_path):
    # Two tasks as they lie in launch/sky, and two that sky.py writes for awkward arguments.
    files = [(launchers.LAUNCH / f'sky/{name}.yaml').read_text() for name in ('train', 'study')]
    filled = [yaml_and_commands(GPUS, command=('train', *AWKWARD))[0]]
    filled += [yaml_and_commands(GPUS, '--workers=2', command=('ablate', *AWKWARD))[0]]

    # Each is loaded by skypilot, in a Python of its own.
    given = json.dumps(files + filled)
    env = {'HOME': str(tmp_path), 'PATH': os.environ['PATH']}
    command = [PYTHON, '-c', LOAD_TASKS]
    output = subprocess.check_output(command, input=given, cwd=tmp_path, env=env, text=True)
    tasks = json.loads(output.splitlines()[-1])

    # Each is a preemptible task of one node that starts again after exit code 75 alone.
    for nodes, envs, _, _, spot, recovery in tasks:
        assert (nodes, spot, envs['RETRIES']) == (1, True, '3')
        assert recovery['recover_on_exit_codes'] == [75]
        assert recovery['max_restarts_on_errors'] == 0
    assert [task[3] for task in tasks] == [{'H100': 8}, {'H100': 1}] * 2
    texts = [yaml.safe_load(text)['run'] for text in files + filled]
    assert [task[2] for task in tasks] == texts


def triple_on_node(folder: Path, text: str, **variables: str) -> dict[str, str | None]:
    """Executes the `run` of a task as a node does; returns the `TRIPLE` that the program got."""
    write_program(folder / 'launch/supervise.sh', (launchers.LAUNCH / 'supervise.sh').read_text())
    write_program(folder / '.venv/bin/python', launchers.PROGRAM)
    write_program(folder / 'gpus/nvidia-smi', '#!/bin/sh\n')
    environment = {'PATH': os.environ['PATH'], 'HOME': str(folder), 'RETRIES': '3', **variables}
    script = yaml.safe_load(text)['run']
    done = subprocess.run(['bash', '-c', script], cwd=folder, env=environment)
    assert done.returncode == 0
    return {name: starts_of(folder)[-1]['env'].get(name) for name in TRIPLE}


def test_a_task_starts_its_command_on_every_node(tmp_path):
    text, _ = yaml_and_commands(GPUS, '--nodes=2', command=('train', *AWKWARD, 'a\r\x07\tb'))
    node = {'SKYPILOT_NODE_IPS': '10.0.0.7\n10.0.0.8', 'SKYPILOT_NODE_RANK': '1'}
    node['PATH'] = f'{tmp_path}/gpus:{os.environ["PATH"]}'
    triple = dict(zip(TRIPLE, ('10.0.0.7:8476', '2', '1'), strict=True))
    assert triple_on_node(tmp_path, text, SKYPILOT_NUM_NODES='2', **node) == triple
    # One node, or the hosts of a TPU slice, which know each other.
    assert not any(triple_on_node(tmp_path, text, SKYPILOT_NUM_NODES='1', **node).values())
    node['PATH'] = os.environ['PATH']
    assert not any(triple_on_node(tmp_path, text, SKYPILOT_NUM_NODES='2', **node).values())
    study, _ = yaml_and_commands(GPUS, '--workers=1', command=('ablate', *AWKWARD))
    assert not any(triple_on_node(tmp_path, study).values())
    arguments = [start['arguments'][2:] for start in starts_of(tmp_path)]
    assert arguments == [['train', *AWKWARD, 'a\r\x07\tb']] * 3 + [['ablate', *AWKWARD]]


def test_each_worker_of_a_study_is_a_job_of_skypilot(tmp_path):
    flags = ['--accelerators=tpu-v6e-8', '--workers=2', '--infra=gcp', '--env=A=b c', '--on_demand']
    _, commands = yaml_and_commands(*flags, command=STUDY)
    script = f'printf "%s\\n" "$@" "$PWD" >>{tmp_path}/words; cp "${{@: -1}}" {tmp_path}/yaml\n'
    write_program(tmp_path / 'sky', f'#!/usr/bin/env bash\n{script}')
    assert (
        launch('sky', *flags, '--', *STUDY, env=launchers.environment_with(tmp_path)).returncode
        == 0
    )
    words = (tmp_path / 'words').read_text().splitlines()
    number_of_words = len(words) // 2
    for k, (given, command) in enumerate(
        zip((words[:number_of_words], words[number_of_words:]), commands, strict=True)
    ):
        *given, path, where = given
        assert (path[-9:], where) == ('/job.yaml', str(launchers.ROOT))
        assert ['sky', *given] == command[:-1]
        assert command[3:5] == ['--name', f'qkattn-{k}']
        assert {'--no-use-spot', 'A=b c', 'EXTRAS=tpu,gcs', 'RETRIES=3'} <= set(command)
    assert yaml.safe_load((tmp_path / 'yaml').read_text())['num_nodes'] == 1
