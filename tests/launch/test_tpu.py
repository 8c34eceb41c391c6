"""TPU VMs: command lines, and what `watch` does with the states of a slice."""

import importlib
import sys

import pytest

from tests.launch.launchers import LAUNCH, TRAIN, WHERE, gcloud_commands, remote

KIND = '--accelerator=v6e-16'


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
