"""TPU VMs: command lines, what hosts execute, and the real gcloud against an API on loopback."""

import importlib
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.cloud_api import PLACE, CloudApi, Hosts, cloud_api, environment
from tests.launch.launchers import (
    AWKWARD,
    LAUNCH,
    PROGRAM,
    TRAIN,
    WHERE,
    gcloud_commands,
    kill_processes,
    launch,
    remote,
    stand_in,
    started,
    state_of,
    until,
)

KIND = '--accelerator=v6e-16'
needs_gcloud = pytest.mark.skipif(not shutil.which('gcloud'), reason='gcloud is not installed')


def test_a_dry_run_prints_each_command():
    queued = ['gcloud', 'compute', 'tpus', 'queued-resources']
    ((*words, project),) = gcloud_commands('create', *WHERE, KIND, '--spot', '--project=p')
    assert words[:5] == [*queued, 'create'] and project == '--project=p'
    assert {'--runtime-version=v2-alpha-tpuv6e', '--node-id=qk', '--spot'} <= set(words)
    assert gcloud_commands('delete', *WHERE)[0][:7] == [*queued, 'delete', 'qk', '--force']
    copy, install = gcloud_commands('setup', *WHERE)
    assert copy[3:7] == ['tpu-vm', 'scp', 'qkattn.bundle', 'qk:qkattn.bundle']
    assert remote(install).endswith('qkattn/launch/host.sh setup tpu,gcs')
    assert 'host.sh stop 40' in remote(gcloud_commands('stop', *WHERE, '--grace=40')[0])
    assert '--worker=3' in gcloud_commands('logs', *WHERE, '--worker=3')[0]
    watched = gcloud_commands('watch', *WHERE, KIND, command=TRAIN)
    assert [words[4] for words in watched] == ['create', 'scp', 'ssh', 'ssh', 'list', 'ssh']


# watch


@pytest.fixture
def module(monkeypatch):
    """launch/tpu.py as a module."""
    monkeypatch.syspath_prepend(str(LAUNCH))
    yield importlib.import_module('tpu')
    for name in ('tpu', 'arguments'):
        sys.modules.pop(name)


@pytest.mark.parametrize(
    'states, code',
    [
        (['exit 0', 'exit 0'], 0),
        (['exit 0', 'running'], None),
        (['exit 2', 'new'], None),
        ([], None),
        (['exit 1', 'exit 2', 'exit 75'], 2),
        (['exit 75', 'exit 139', 'exit 0'], 139),
        (['exit 75', 'exit 0'], 75),
    ],
)
def test_the_hosts_decide_the_exit_code(module, states, code):
    assert module.finished(states) == code


@pytest.mark.parametrize(
    'seen, verbs, code',
    [
        # Preempted while it runs, then done; None: gcloud or a host does not answer.
        (
            ['', 'PROVISIONING', 'new new', None, 'running running', 'SUSPENDING', 'SUSPENDED']
            + ['new new', 'running exit0', 'exit0 exit0'],
            'create setup run delete create setup run',
            0,
        ),
        (['ready ready', 'exit75 exit75'], 'run', 75),
        (['running running', 'exit2 exit2'], '', 2),
        (['running lost', 'running running', 'exit1 exit1'], 'run', 1),
        # A command of before has ended: the same command goes on from its checkpoint.
        (['exit75 exit75', 'running running', 'exit0 exit0'], 'run', 0),
        (['FAILED'], '', 1),
    ],
)
def test_what_watch_does_next(module, monkeypatch, seen, verbs, code):
    given, done = iter(seen), []
    hosts = ''

    def output_of(command: list[str]) -> str | None:
        nonlocal hosts
        if command[3] == 'tpu-vm':
            return hosts
        state = next(given)
        if state is None or state.isupper() or not state:
            return state
        hosts = ''.join(f'qkattn h {one.replace("exit", "exit ")}\n' for one in state.split())
        return 'ACTIVE\n'

    monkeypatch.setattr(module, 'output_of', output_of)
    monkeypatch.setattr(module, 'do', lambda _, verb: done.append(verb))
    options = module.read_options(['watch', *WHERE, KIND, '--poll=0', '--', *TRAIN])
    try:
        ended = module.watch(options)
    except SystemExit as end:
        ended = end.code
    assert (' '.join(done), ended, list(given)) == (verbs, code, [])


def test_watch_gives_up_on_a_verb_that_keeps_failing(module, monkeypatch, capsys):
    states = {'tpu-vm': 'qkattn h new\n', 'queued-resources': 'ACTIVE\n'}
    monkeypatch.setattr(module, 'output_of', lambda command: states[command[3]])
    monkeypatch.setattr(module, 'do', lambda _, verb: 1)
    flags = ('--poll=0', '--retries=1')
    options = module.read_options(['watch', *WHERE, KIND, *flags, '--', *TRAIN])
    with pytest.raises(SystemExit) as ended:
        module.watch(options)
    assert ended.value.code == 1
    assert capsys.readouterr().err == 'setup failed 2 times; the reason is above\n'


# gcloud


@pytest.fixture
def cloud(tmp_path):
    with cloud_api(hosts=2) as api:
        hosts = Hosts(tmp_path, sys.executable)
        yield api, hosts, environment(tmp_path, api.server_port, hosts)
    for home in hosts.folder.glob('*'):
        if (home / 'qkattn').exists() and state_of(home) == 'running':
            kill_processes(home)


@needs_gcloud
def test_gcloud_requests_the_slice(cloud):
    api, _, env = cloud
    done = launch('tpu', 'create', *WHERE, KIND, '--spot', env=env)
    assert done.returncode == 0, done.stderr
    ((method, path, body),) = api.calls
    assert (method, path) == ('POST', f'/v2/{PLACE}/queuedResources')
    (spec,) = body['tpu']['nodeSpec']
    assert body['spot'] == {} and spec['nodeId'] == 'qk' and spec['parent'] == PLACE
    assert spec['node']['acceleratorType'] == 'v6e-16'
    assert spec['node']['runtimeVersion'] == 'v2-alpha-tpuv6e'


@pytest.fixture
def folder(tmp_path) -> Path:
    """The launchers in a repository of its own, whose venv.sh makes a stand-in."""
    folder = tmp_path / 'repository' / 'launch'
    folder.mkdir(parents=True)
    for name in ('tpu.py', 'arguments.py', 'host.sh', 'supervise.sh'):
        shutil.copy(LAUNCH / name, folder)
    stand_in(folder / 'program.py', PROGRAM)
    skip_pip = '#!/bin/sh\ncase "$2" in pip) echo "$@" >>"$HOME/pip"; exit 0;; esac\n'
    stand_in(
        folder / 'venv.sh',
        '#!/usr/bin/env bash\nmkdir -p .venv/bin\n'
        f'printf %s {shlex.quote(skip_pip)} >.venv/bin/python\n'
        'echo "exec $PWD/launch/program.py \\"\\$@\\"" >>.venv/bin/python\n'
        'chmod +x .venv/bin/python\n',
    )
    identity = ('-c', 'user.name=t', '-c', 'user.email=t@t')
    for words in (['init', '-q'], ['add', '.'], [*identity, 'commit', '-qm', 'x']):
        subprocess.run(['git', '-C', str(folder.parent), *words], check=True)
    return folder


@needs_gcloud
@pytest.mark.slow
def test_gcloud_runs_the_command_on_all_hosts(cloud, folder):
    api, hosts, env = cloud
    homes = [hosts.folder / f'127.0.0.{k}' for k in (1, 2)]

    def succeed(*arguments: str) -> str:
        done = launch('tpu', *arguments, folder=folder, env=env)
        assert done.returncode == 0, done.stderr
        return done.stdout

    succeed('create', *WHERE, KIND, '--reserved')
    assert api.calls[0][2]['reservationName'].endswith('/reservations/-')
    succeed('setup', *WHERE)
    assert all((home / 'pip').read_text().endswith('-e .[tpu,gcs]\n') for home in homes)
    for home in homes:
        (home / 'codes').write_text('wait')
    before = len(hosts.commands())
    succeed('run', *WHERE, '--', 'train', *AWKWARD)
    assert [ip for ip, _ in hosts.commands()].count('127.0.0.2') == len(hosts.commands()) / 2
    assert len(hosts.commands()) == before + 2
    until(lambda: all((home / 'waiting').exists() for home in homes))
    assert started(homes[1]) == [[None, ['-m', 'qkattn', 'train', *AWKWARD]]]
    text = succeed('status', *WHERE)
    assert text.count(' running') == 2 and 'ACTIVE' in text
    assert succeed('stop', *WHERE).count('ended with exit code 75') == 2
    assert succeed('status', *WHERE).count(' exit 75') == 2
    succeed('delete', *WHERE)
    assert (api.queued, api.calls[-1][0]) == ({}, 'DELETE')


def preempt(api: CloudApi, homes: list[Path]) -> None:
    """Ends the hosts' processes as a power cut does, and takes their disks."""
    api.queued['qk']['state'] = {'state': 'SUSPENDED'}
    for home in homes:
        kill_processes(home)
        shutil.rmtree(home)


@needs_gcloud
@pytest.mark.slow
def test_watch_creates_the_slice_again_after_a_preemption(cloud, folder, tmp_path):
    api, hosts, env = cloud
    homes = [hosts.folder / f'127.0.0.{k}' for k in (1, 2)]
    for home in homes:
        home.mkdir(parents=True)
        (home / 'codes').write_text('wait')
    arguments = ['watch', *WHERE, KIND, '--spot', '--poll=0.2', '--', *TRAIN]
    with (tmp_path / 'watch').open('w') as output:
        watching = subprocess.Popen(
            [sys.executable, str(folder / 'tpu.py'), *arguments],
            env=env,
            stdout=output,
            stderr=subprocess.STDOUT,
        )
    try:
        until(lambda: all((home / 'waiting').exists() for home in homes), 600)
        preempt(api, homes)
        assert watching.wait(600) == 0, (tmp_path / 'watch').read_text()
    finally:
        watching.kill()
    changes = [method for method, path, _ in api.calls if '/queuedResources' in path]
    assert changes == ['POST', 'DELETE', 'POST']
    assert [started(home) for home in homes] == [[[None, ['-m', 'qkattn', *TRAIN]]]] * 2
    assert 'qk is suspended, delete, create' in (tmp_path / 'watch').read_text()
