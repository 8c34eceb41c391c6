"""A directory from elsewhere may have links and pipes, which must do no harm.

The tables WRITERS and READERS have all functions of the package that write or read files. None of
them may follow a link out of the directory, or wait for a pipe.
"""

import contextlib
import dataclasses
import json
import os
from pathlib import Path
from unittest.mock import Mock

import pytest

from experiments.benchmark import record
from qkattn.config import Config, DataConfig, ModelConfig
from qkattn.convert.published import load_gpt2
from qkattn.data.cache import read_or_prepare
from qkattn.data.corpora.downloads import CAPTIONS, fetch_file
from qkattn.data.corpora.own_files import text
from qkattn.data.tokenizers.subwords import FileTokenizer
from qkattn.errors import ConfigError, RunDirectoryError, UnsuitableFileError
from qkattn.report.figures.drawing import write_plots
from qkattn.report.printed_numbers import check_numbers
from qkattn.report.verify import check_page
from qkattn.storage import leases, ledger, records
from qkattn.storage.files import local_copy, remove_tree, replacing
from qkattn.storage.metrics_log import MetricsFile, read_metrics
from qkattn.storage.run_directory import RunDirectory
from qkattn.study import declaration, worker, yardsticks
from qkattn.study.worker import _Worker
from qkattn.train import program_cache
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.loop import train
from qkattn.verdict.runs import parse_run
from tests.processes import time_limit
from tests.refusals import refused


def contents(directory: Path) -> dict[str, str]:
    """Every path below a directory, with the content and the time of change of each file."""
    found = {}
    for path in directory.rglob('*'):
        if path.is_file():
            found[str(path)] = f'{path.read_bytes()!r} {path.stat().st_mtime_ns}'
        else:
            found[str(path)] = ''
    return found


def begin_run(path):
    RunDirectory(path, Config()).close()


def open_checkpoints(path):
    Checkpoints(path).close()


def supersede(path):
    """Opens checkpoints, replaces their trash by a link, then lets them delete old checkpoints."""
    link = path.parent / 'link'
    (path / 'trash').rename(link)
    checkpoints = Checkpoints(path)
    link.rename(path / 'trash')
    checkpoints.wait()


def acquire(path):
    leases.acquire(path / 'leases', 'run')


def plan_study(path):
    _Worker(Mock(), path, [], Mock())


def train_planned(path):
    """Trains the run 'runs/x' of a study in `path`, as a worker of the study does.

    A worker only notes why a run has failed. The reason that it notes is raised here.
    """
    reason_by_run = {}
    run = {
        'run': 'x',
        'directory': 'runs/x',
        'config': {},
        'label': 'x',
        'left': {'runs': 0, 'share': 0.0},
    }
    # A worker holds a lease, a lock, while it trains a run. This lease is never lost.
    lease = contextlib.nullcontext(Mock(lost=False))
    worker._train(path, run, Mock(lease=lease), reason_by_run)
    raise RunDirectoryError(reason_by_run['x'])


def draw(path):
    write_plots(path / 'plots', [], ['png'])


def prepare(path):
    file = path / 'tokens/text/1.0.0/tokens.json'
    read_or_prepare(file, Mock(), lambda: file.write_text('{}'), root=path)


def trace(path):
    train(Config(), path / 'run', profile=str(path))


def hold_lock(path):
    with leases.locked(path / 'lock', wait=False):
        pass


# The place of a link, and a function that would write or delete through the link.
WRITERS = [
    ('lock', hold_lock),
    ('lock', begin_run),
    ('metrics.jsonl', begin_run),
    ('checkpoints', begin_run),
    ('checkpoints/trash', begin_run),
    ('checkpoints/4', begin_run),
    ('tensorboard', begin_run),
    ('wandb', begin_run),
    ('trash', open_checkpoints),
    ('trash', supersede),
    ('leases', acquire),
    ('lock', plan_study),
    ('leases', plan_study),
    ('runs', plan_study),
    ('plots', plan_study),
    ('runs', train_planned),
    ('runs/x', train_planned),
    ('plots', draw),
    ('tokens', prepare),
    ('tokens/text', prepare),
    ('tokens/text/1.0.0', prepare),
    ('plugins', trace),
    ('plugins/profile', trace),
]


@pytest.mark.parametrize(
    ('place', 'write'), WRITERS, ids=lambda value: getattr(value, '__name__', value)
)
def test_nothing_is_written_or_deleted_through_a_link(tmp_path, place, write):
    """Each writer, such as `begin_run`, refuses a link at a place that it would write to.

    A directory from elsewhere may have links to any files of the user.
    """
    # `outside` has what writers may look for: a checkpoint of step 4, and a run named x.
    outside = tmp_path / 'outside'
    for folder in ('4', 'x'):
        (outside / folder).mkdir(parents=True)
        (outside / folder / 'kept').write_text('kept')
    contents_before = contents(outside)

    # If the writer expects a file, the link leads to a file, or else to a directory.
    is_file = place in ('lock', 'metrics.jsonl')
    target = outside / '4/kept' if is_file else outside
    received = tmp_path / 'received'
    link = received / place
    link.parent.mkdir(parents=True)
    link.symlink_to(target)

    with time_limit(20), refused('is a link', RunDirectoryError):
        write(received)

    assert contents(outside) == contents_before
    # The received directory has only the link and the folders that lead to it.
    names = {path.name for path in received.rglob('*')}
    assert names == set(Path(place).parts)


def test_no_program_is_deleted_through_a_link(tmp_path, monkeypatch):
    """Old compiled programs are deleted, except in a folder that is a link.

    The cache has a folder of programs for each number of cores, such as 1-cores.
    """
    largest_size_in_bytes = 0  # all programs have to be deleted
    monkeypatch.setattr(program_cache, 'LIMIT', largest_size_in_bytes)
    cache = tmp_path / 'compiled'
    program = cache / '1-cores/old-cache'
    program.parent.mkdir(parents=True)
    program.write_text('old')

    # The folder 2-cores is a link to a directory outside of the cache.
    file_outside = tmp_path / 'outside/kept-cache'
    file_outside.parent.mkdir()
    file_outside.write_text('kept')
    (cache / '2-cores').symlink_to(file_outside.parent)

    program_cache._delete_oldest(cache)

    assert file_outside.exists()
    assert not program.exists()


@pytest.mark.parametrize('write', [begin_run, open_checkpoints, hold_lock, acquire, draw])
def test_the_directory_that_a_user_names_may_be_a_link(tmp_path, write):
    (tmp_path / 'elsewhere').mkdir()
    named = tmp_path / 'named'
    named.symlink_to(tmp_path / 'elsewhere')
    write(named)
    assert named.is_symlink()


@pytest.fixture
def untouched(tmp_path):
    """A directory with the file `kept`. If a test changes the directory or the file, it fails."""
    directory = tmp_path / 'outside'
    directory.mkdir()
    (directory / 'kept').write_text('kept')
    before = contents(directory)
    yield directory
    assert contents(directory) == before


def test_replacing_a_file_does_not_write_through_a_link(tmp_path, untouched):
    temporary = tmp_path / 'file.tmp'
    temporary.symlink_to(untouched / 'kept')
    with replacing(tmp_path / 'file') as path:
        path.write_text('whole')
    assert not (tmp_path / 'file').is_symlink()


def test_a_lease_that_is_a_link_does_not_change_its_target(tmp_path, untouched):
    (tmp_path / 'run.0').symlink_to(untouched / 'kept')
    lease = leases._File(tmp_path, 'run')
    lease.renew()
    lease.free()


def test_removing_a_tree_that_is_a_link_removes_the_link_alone(tmp_path, untouched):
    link = tmp_path / 'tree'
    link.symlink_to(untouched)
    remove_tree(link)
    assert not link.is_symlink()


def open_local(path):
    with local_copy(path):
        pass


def read_download(path):
    path.rename(path.with_name('train.de.gz'))
    config = DataConfig(manual_dir=str(path.parent), data_dir=str(path.parent / 'data'))
    fetch_file('multi30k', f'{CAPTIONS}/train.de.gz', config)


def read_lease(path):
    path.rename(path.with_name('run.0'))
    leases.acquire(path.parent, 'run')


def read_state(path):
    """Reads a checkpoint where `path` is the file of arrays, and raises what is wrong with it."""
    step = 4
    checkpoints = Checkpoints(path.parent, read_only=True)
    state = path.parent / f'{step}/state'
    state.mkdir(parents=True)
    path.rename(state / 'manifest.ocdbt')
    target = {'a': Mock(sharding=None)}
    _, damage = checkpoints._read_state(step, target)
    raise RunDirectoryError(damage)


# Functions that read a file, which a user or a directory names.
READERS = {
    'an object': lambda path: records.read_json(path, {}),
    'lines': lambda path: records.read_lines(path, {}),
    'metrics': read_metrics,
    'metrics to append to': MetricsFile,
    'a locked file': lambda path: leases.locked(path).__enter__(),
    'a lease': read_lease,
    'a checkpoint': read_state,
    'safetensors': open_local,
    'a published model': load_gpt2,
    'a tokenizer': lambda path: FileTokenizer.open(str(path)),
    'a text': lambda path: text(DataConfig(name='text', path=str(path))),
    'a download': read_download,
    'a page': check_page,
    'numbers.toml': check_numbers,
}


@pytest.mark.parametrize('read', READERS.values(), ids=READERS)
def test_a_pipe_is_refused_at_once(tmp_path, read):
    os.mkfifo(tmp_path / 'pipe')
    errors = (ConfigError, UnsuitableFileError)
    with time_limit(10), refused('is a pipe|no regular file|no file', errors):
        read(tmp_path / 'pipe')


@pytest.mark.parametrize('name', ['plan.jsonl', 'results.jsonl', 'ledger.jsonl', 'study.json'])
def test_a_ledger_does_not_wait_for_a_pipe_among_its_files(tmp_path, name):
    os.mkfifo(tmp_path / name)
    with time_limit(10):
        ledger.file_digests(tmp_path)
        ledger.run_digests(tmp_path)


def test_a_pipe_in_the_place_of_a_benchmark_is_refused(tmp_path):
    os.mkfifo(tmp_path / record.FILE)
    with time_limit(10), pytest.raises(ConfigError, match='is a pipe'):
        record.read(tmp_path)


# A line of plan.jsonl without its directory.
LINE = {
    'run': 'x',
    'trials': 1,
    'stage': 'verdict',
    'variant': 'qk/vo',
    'size': 's',
    'corpus': 'c',
    'control': None,
    'config': {
        'model': dataclasses.asdict(ModelConfig()),
        'optimizer': {'schedule': 'linear', 'final_fraction': 0.0},
        'train': {'num_steps': 1},
        'trials': {'seeds': [0]},
    },
}


@pytest.mark.parametrize(
    'directory',
    ['/etc', '../x', '..', '', 'runs/..', 'runs/../../x', 'runs/', 'runs//x', 'runs/.'],
)
def test_a_planned_run_outside_its_study_is_refused(tmp_path, monkeypatch, directory):
    """plan.jsonl must name a directory below the study for each run, such as 'runs/x'."""
    line = LINE | {'directory': directory}
    (tmp_path / 'plan.jsonl').write_text(json.dumps(line) + '\n')
    (tmp_path / 'results.jsonl').touch()
    (tmp_path / 'study.json').write_text('{"baseline": "qk/vo"}')
    # A worker plans again and compares the plan with the file. Here its plan has no runs.
    monkeypatch.setattr(declaration.plan, 'runs', Mock(return_value=[]))
    contents_before = contents(tmp_path)

    # Reports, workers and yardsticks refuse the run.
    refusal = 'expected one or two components below the study'
    with refused(refusal, ValueError):
        parse_run(line)
    with refused(refusal, ValueError):
        declaration._check_runs(tmp_path, Mock(), [])
    with refused(refusal, ValueError):
        yardsticks.record(tmp_path)

    # The ledger hashes the logs of all runs, but leaves out this run.
    assert list(ledger._hash_logs(tmp_path)) == []

    assert contents(tmp_path) == contents_before
