"""Jobs of several processes train the runs that one process trains."""

import dataclasses
import json
import re
import shutil

import jax
import numpy as np
import pytest

from qkattn.config import TuningConfig, to_json
from qkattn.storage import leases
from qkattn.storage.records import read_json
from qkattn.study import worker
from qkattn.train.exported import load_stack
from qkattn.train.loop import train
from tests.compiled_programs import FLAGS
from tests.processes import start_job, wait_for_results
from tests.runs import SMALL, assert_close, results_of
from tests.study.test_plan import STUDY

# The program of each process of a job. Each line of a file names a run to train, or a study to work
# on. Process 1 reads runs1.jsonl if this file exists. Otherwise, processes read runs.jsonl. Results
# are written to a file, because Gloo writes to the standard output. Calls of `lost` are counted
# over all runs. From call LOST_AFTER on, they return True. Only process 0 calls `lost`.
TRAIN_LINES = """
    import itertools, json, os, sys
    from pathlib import Path
    from qkattn.config import Config, Study, from_json
    from qkattn.errors import ConfigError, Lost
    from qkattn.jobs import bootstrap, signals
    from qkattn.study import worker
    from qkattn.train import loop

    loop.SEEN_WITHIN = 1.0
    lost_after = int(os.environ['LOST_AFTER'])
    calls = itertools.count(1)

    def call(kind, settings, path):
        if kind == 'Study':
            return str(worker.run(from_json(Study, settings), path))
        lost = lambda: next(calls) >= lost_after
        return loop.train(from_json(Config, settings), path, lost=lost)

    @signals.exit_on_signal()
    @bootstrap.in_job
    def main():
        job = Path(sys.argv[1])
        rank = bootstrap.start().process_id
        own = job / f'runs{rank}.jsonl'
        got = []
        for line in (own if own.exists() else job / 'runs.jsonl').read_text().splitlines():
            try:
                got.append(call(*json.loads(line)))
            except (ConfigError, Lost) as error:
                got.append(str(error))
        (job / f'got{rank}.json').write_text(json.dumps(got))

    main()
"""


def start_training_job(
    directory, runs, *, runs_of_process_1=None, count=2, devices=4, lost_after=10**9
):
    """Starts a job of `count` processes that trains `runs` one after another.

    Returns the processes without waiting for them. `results_of_job` waits until they end.

    Args:
        directory: The directory of the job.
        runs: Pairs (config, directory) or (study, directory).
        runs_of_process_1: The runs of process 1. By default, they are `runs`.
        count: The number of processes, by default 2.
        devices: The number of devices of each process, by default 4.
        lost_after: From this call on, `lost` says that another job has taken over the run. Calls
            are counted over all runs. By default, no run is ever lost.
    """
    directory.mkdir(exist_ok=True)
    write_runs(directory / 'runs.jsonl', runs)
    if runs_of_process_1 is not None:
        write_runs(directory / 'runs1.jsonl', runs_of_process_1)
    flags = FLAGS.replace('device_count=8', f'device_count={devices}')
    return start_job(TRAIN_LINES, count, directory, XLA_FLAGS=flags, LOST_AFTER=str(lost_after))


def write_runs(file, runs):
    lines = []
    for settings, path in runs:
        kind = type(settings).__name__  # Config or Study
        lines.append(json.dumps([kind, to_json(settings), str(path)]) + '\n')
    file.write_text(''.join(lines))


def results_of_job(directory, job):
    """Waits for a job. Returns a list that holds, for each run, its results or its error.

    Asserts that all processes have the same results.

    Args:
        directory: The directory of the job.
        job: The processes, as `start_training_job` returns them.
    """
    for exit_code, _, errors in wait_for_results(job, timeout=900):
        assert exit_code == 0, errors
    results_by_rank = []
    for rank in range(len(job)):
        results_by_rank.append(json.loads((directory / f'got{rank}.json').read_text()))
    results_of_process_0 = results_by_rank[0]
    for results_of_other in results_by_rank[1:]:
        assert results_of_other == results_of_process_0
    return results_of_process_0


def train_in_job(directory, config, path, **options):
    """Trains one run in a job of its own; see `start_training_job`."""
    job = start_training_job(directory, [(config, path)], **options)
    results_of_job(directory, job)


@pytest.fixture
def small(tiny):
    """A function that makes a config of two trials on a mesh, quick to compile."""

    def make(mesh={}, train={}, model={}, **sections):  # noqa: B006 (never changed)
        train = {'num_steps': 8, 'batch_size': 16} | train
        return tiny(model=SMALL | model, train=train, mesh=mesh, **sections)

    return make


@pytest.mark.slow
def test_two_processes_train_as_one_device_and_refuse_different_settings(small, tmp_path):
    """Two processes train a run together if both have the same settings and directory.

    The job has five runs. The first is trained, and the second reads its results again. The other
    three are refused.
    """
    short = {'accumulation': 1, 'num_steps': 4}
    config = small({'data': 2, 'tensor': 2}, short)
    other_steps = small(train={'num_steps': 9})
    two_devices = small({'data': 2})  # the job has 2 processes of 2 devices

    job = start_training_job(
        tmp_path / 'job',
        runs=[
            (config, tmp_path / 'two'),
            (config, tmp_path / 'two'),
            (config, tmp_path / 'differs'),
            (config, tmp_path / 'mine'),
            (two_devices, tmp_path / 'idle'),
        ],
        runs_of_process_1=[
            (config, tmp_path / 'two'),
            (config, tmp_path / 'two'),
            (other_steps, tmp_path / 'differs'),
            (config, tmp_path / 'other'),
            (two_devices, tmp_path / 'idle'),
        ],
        devices=2,
    )
    # While the job trains, this process trains the same run on one device.
    train(small({}, short), tmp_path / 'one')
    results = results_of_job(tmp_path / 'job', job)
    first, again, other_settings_error, other_directory_error, idle_devices_error = results

    # Two processes have the same losses as one device, up to rounding.
    assert_close(tmp_path / 'two', tmp_path / 'one')
    assert first == results_of(tmp_path / 'two')
    assert again == first

    # provenance.json describes the devices of each start. Two processes of 2 devices have 4.
    provenance = json.loads((tmp_path / 'two/provenance.json').read_text())
    first_start = provenance['starts'][0]
    assert first_start['devices'] == {'platform': 'cpu', 'kind': 'cpu', 'count': 4, 'processes': 2}

    # Process 0 has 4 steps in the third run, and process 1 has 9.
    assert 'process 1 has other settings than process 0 (' in other_settings_error
    assert 'train.num_steps: 4 -> 9' in other_settings_error
    assert not (tmp_path / 'differs').exists()

    # Process 1 has another directory for the fourth run.
    other = tmp_path / 'other'
    mine = tmp_path / 'mine'
    assert f'workdir={other} of process 1 is not {mine} of' in other_directory_error

    # The mesh of the fifth run would leave two devices idle.
    assert 'uses 2 of the 4 devices of 2 processes; it must use all of them' in idle_devices_error
    assert not (tmp_path / 'idle').exists()


@pytest.mark.slow
def test_two_processes_train_as_one_on_every_mesh(small, task, tmp_path):
    """Two processes of 4 devices have the same metrics as one process of 8 devices.

    The configs split a run over 8 devices in different ways. In one run, trials diverge. Another
    run is a translation.
    """
    config_by_name = {
        'data': small(mesh={'data': 8}, model={'dropout': 0.1}),
        'fsdp': small(mesh={'fsdp': 4, 'tensor': 2}, train={'lifting': 'vmap'}),
        'trial': small(
            mesh={'trial': 2, 'data': 2, 'fsdp': 2},
            train={'steps_per_dispatch': 2, 'log_every': 2},  # two steps share a dispatch
            model={'dropout': 0.1},
        ),
        # Two seeds at each of these learning rates. With 1e30, trials diverge.
        'diverges': small(mesh={'trial': 2, 'data': 4}, trials={'learning_rates': (1e-2, 1e30)}),
        'translates': task(
            'translation',
            mesh={'trial': 2, 'data': 4},
            train={'accumulation': 1, 'num_steps': 4, 'batch_size': 16},
        ),
    }

    # The job trains all runs one after another. Meanwhile, this process trains them, too.
    runs = [(config, tmp_path / 'two' / name) for name, config in config_by_name.items()]
    job = start_training_job(tmp_path / 'job', runs)
    for name, config in config_by_name.items():
        train(config, tmp_path / 'one' / name)
    results_of_job(tmp_path / 'job', job)

    for name in config_by_name:
        assert_close(tmp_path / 'two' / name, tmp_path / 'one' / name)
    statuses = [result['status'] for result in results_of(tmp_path / 'two/diverges')]
    assert statuses.count('diverged') == 2


@pytest.mark.slow
def test_two_processes_use_the_lifting_that_is_faster_in_process_0(small, tmp_path):
    """The lifting 'vmap' computes trials side by side, and 'map' one after another.

    'auto' measures both and takes the faster one, which depends on the machine.
    """
    config = small(mesh={'trial': 2, 'data': 2, 'tensor': 2}, train={'lifting': 'auto'})

    job = start_training_job(tmp_path / 'job', [(config, tmp_path / 'auto')])
    (results_of_run,) = results_of_job(tmp_path / 'job', job)  # equal in both processes

    # Process 0 writes its measurements to lifting.json.
    choice = read_json(tmp_path / 'auto/lifting.json', {})
    seconds_per_step = choice['seconds_per_step']
    fastest = min(seconds_per_step, key=seconds_per_step.get)
    assert choice['lifting'] == fastest
    for result in results_of_run:
        assert result['lifting'] == fastest


def copy_at_step_4(path, to):
    """Copies a finished run without its results and checkpoint 8, so that it resumes at step 4."""
    return shutil.copytree(path, to, ignore=shutil.ignore_patterns('result.json', '8'))


@pytest.mark.slow
def test_other_jobs_restore_checkpoints_on_other_meshes(small, tmp_path):
    """A run may resume in a job of other processes on another mesh.

    Each run has 8 steps, and saves checkpoints at the steps 4 and 8.
    """
    mesh = {'data': 2, 'fsdp': 2, 'tensor': 2}
    config = small(mesh)
    two = tmp_path / 'two'
    one = tmp_path / 'one'

    # Two processes train a run, and then a second run that is lost after step 7. A run is lost when
    # another job takes it over. The first run calls `lost` 8 + 2 + 1 + 1 = 12 times: after 8 steps,
    # before 2 checkpoints, after the last step, before the results. The second run calls `lost`
    # 4 + 1 + 3 = 8 times: after 4 steps, before a checkpoint, after 3 steps.
    runs = [(config, two), (config, tmp_path / 'lost')]
    job = start_training_job(tmp_path / 'job', runs, lost_after=12 + 8)
    train(config, one)
    _, error_of_lost_run = results_of_job(tmp_path / 'job', job)
    # Process 1 may notice this only one step later.
    assert re.fullmatch(f'{tmp_path}/lost was taken over at step [78]', error_of_lost_run)
    assert [path.name for path in (tmp_path / 'lost/checkpoints').iterdir()] == ['4']

    # Two processes train the same parameters as one process.
    _, _, state = load_stack(two)
    _, _, expected_state = load_stack(one)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), state, expected_state)

    # One process resumes the run of two processes on any mesh.
    for i, other_mesh in enumerate([{'trial': 2, 'fsdp': 4}, {'data': 4}, {}]):
        path = copy_at_step_4(two, tmp_path / f'two-{i}')
        train(small(other_mesh), path)
        assert_close(path, two)

    # Checkpoint 8 lacks the files that process 1 wrote, so two processes resume from checkpoint 4.
    result_file = shutil.ignore_patterns('result.json')
    damaged = shutil.copytree(two, tmp_path / 'damaged', ignore=result_file)
    for file in (damaged / 'checkpoints/8/state/ocdbt.process_1/d').iterdir():
        file.unlink()
    train_in_job(tmp_path / 'job', config, damaged)
    assert_close(damaged, two)

    # Two processes resume the run of one process.
    resumed_by_two = copy_at_step_4(one, tmp_path / 'resumed-by-two')
    train_in_job(tmp_path / 'job', config, resumed_by_two)
    assert_close(resumed_by_two, one)

    # Four processes of two devices resume the run of two processes.
    resumed_by_four = copy_at_step_4(two, tmp_path / 'resumed-by-four')
    other_config = small({'trial': 2, 'tensor': 2, 'data': 2})
    train_in_job(tmp_path / 'job', other_config, resumed_by_four, count=4, devices=2)
    assert_close(resumed_by_four, two)


@pytest.mark.slow
def test_two_processes_complete_a_study_as_one_process_does(small, tmp_path):
    """A job of two processes plans and trains the same runs for a study as one process.

    The study compares two variants of attention, with one run for each variant.
    """
    base = small({'data': 2, 'fsdp': 2, 'tensor': 2})
    study = dataclasses.replace(STUDY, base=base, tolerance=0.1, tuning=TuningConfig())
    two = tmp_path / 'two'
    one = tmp_path / 'one'

    # The job works on the study twice. The second time, the study is already complete.
    job = start_training_job(tmp_path / 'job', [(study, two), (study, two)])
    worker.run(study, one)
    returned_paths = results_of_job(tmp_path / 'job', job)

    # Each time, the job returns the directory of the study. Both studies have the same plan.
    assert returned_paths == [str(two), str(two)]
    plan = (two / 'plan.jsonl').read_text()
    assert plan == (one / 'plan.jsonl').read_text()

    # The plan has a line for each run. Both studies have the same metrics, up to rounding.
    runs = [json.loads(line) for line in plan.splitlines()]
    num_variants = 2
    assert len(runs) == num_variants
    for run in runs:
        assert_close(two / run['directory'], one / run['directory'])

    # A run has two trials, each with a line in the results.
    num_results = len((two / 'results.jsonl').read_text().splitlines())
    num_trials = 2
    assert num_results == len(runs) * num_trials

    # A lease is a lock on a run, which keeps other workers away. Each run had one. None is held.
    assert len(list((two / 'leases').iterdir())) == len(runs)
    assert not leases.holders(two / 'leases')
