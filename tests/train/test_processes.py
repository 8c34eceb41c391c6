"""A run as one job of several processes: the run of one process with as many devices."""

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

# Trains a run, or works on a study, per line of a file; a rank with lines of its own takes them.
# The results go to a file, since Gloo prints. Process 0 loses a run when it asks for the time
# LOST_AFTER.
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
    questions = itertools.count(1)

    def call(kind, settings, path):
        if kind == 'Study':
            return str(worker.run(from_json(Study, settings), path))
        lost = lambda: next(questions) >= lost_after
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


def start_training_job(directory, runs, count=2, devices=4, lost_after=10**9, **by_rank):
    """Starts a job that trains `runs`: pairs of a config or a study, and its directory.

    `runs1` are those of process 1, if it is to differ from process 0.
    """
    directory.mkdir(exist_ok=True)
    for name, pairs in {'runs': runs, **by_rank}.items():
        lines = [json.dumps([type(c).__name__, to_json(c), str(p)]) + '\n' for c, p in pairs]
        (directory / f'{name}.jsonl').write_text(''.join(lines))
    flags = FLAGS.replace('device_count=8', f'device_count={devices}')
    return start_job(TRAIN_LINES, count, directory, XLA_FLAGS=flags, LOST_AFTER=str(lost_after))


def results_of_job(directory, job):
    """Waits for a job; returns what `train` returned, or its error, for each run.

    It is the same in every process.
    """
    for code, _, errors in wait_for_results(job, timeout=900):
        assert code == 0, errors
    first, *others = [json.loads((directory / f'got{r}.json').read_text()) for r in range(len(job))]
    assert all(other == first for other in others)
    return first


@pytest.fixture
def small(tiny):
    """A run of two trials on a mesh, quick to compile."""

    def make(mesh={}, train={}, model={}, **sections):  # noqa: B006 (never changed)
        train = {'num_steps': 8, 'batch_size': 16} | train
        return tiny(model=SMALL | model, train=train, mesh=mesh, **sections)

    return make


@pytest.mark.slow
def test_two_processes_train_as_one_device_and_refuse_settings_that_differ(small, tmp_path):
    short = {'accumulation': 1, 'num_steps': 4}
    config = small({'data': 2, 'tensor': 2}, short)
    # A mesh of 2 of the 4 devices is refused.
    too_small = small({'data': 2}), tmp_path / 'idle'
    # Process 0 trains `runs` in turn and process 1 `other`: the same run twice, then one with
    # other settings, then one with another directory.
    runs = [(config, tmp_path / name) for name in ('two', 'two', 'differs', 'mine')]
    other = [*runs[:2], (small(train={'num_steps': 9}), runs[2][1]), (config, tmp_path / 'other')]
    job = start_training_job(
        tmp_path / 'job', [*runs, too_small], devices=2, runs1=[*other, too_small]
    )

    # The same run on one device.
    train(small({}, short), tmp_path / 'one')
    first, again, differs, apart, refused = results_of_job(tmp_path / 'job', job)
    assert_close(tmp_path / 'two', tmp_path / 'one')
    assert first == again == results_of(tmp_path / 'two')
    assert 'uses 2 of the 4 devices of 2 processes; it must use all of them' in refused
    assert 'process 1 has other settings than process 0 (' in differs
    assert 'train.num_steps: 4 -> 9' in differs
    assert f'workdir={tmp_path / "other"} of process 1 is not {tmp_path / "mine"} of' in apart
    assert not (tmp_path / 'idle').exists() and not (tmp_path / 'differs').exists()
    begun = json.loads((tmp_path / 'two/provenance.json').read_text())['starts'][0]
    assert begun['devices'] == {'platform': 'cpu', 'kind': 'cpu', 'count': 4, 'processes': 2}


@pytest.mark.slow
def test_two_processes_train_as_one_on_every_mesh(small, task, tmp_path):
    """Runs with dropout, both liftings, steps that share a dispatch, a divergence, translations."""
    trial_mesh = {'trial': 2, 'data': 4}
    shared = {'steps_per_dispatch': 2, 'log_every': 2}
    short = {'accumulation': 1, 'num_steps': 4, 'batch_size': 16}
    configs = {
        'data': small({'data': 8}, model={'dropout': 0.1}),
        'fsdp': small({'fsdp': 4, 'tensor': 2}, {'lifting': 'vmap'}),
        'trial': small({'trial': 2, 'data': 2, 'fsdp': 2}, shared, {'dropout': 0.1}),
        'diverges': small(trial_mesh, trials={'learning_rates': (1e-2, 1e30)}),
        'translates': task('translation', mesh=trial_mesh, train=short),
    }
    measured = small({'trial': 2, 'data': 2, 'tensor': 2}, train={'lifting': 'auto'})
    runs = [(config, tmp_path / 'two' / name) for name, config in configs.items()]
    job = start_training_job(tmp_path / 'job', [*runs, (measured, tmp_path / 'measured')])
    for name, config in configs.items():
        train(config, tmp_path / 'one' / name)
    *_, of_measured = results_of_job(tmp_path / 'job', job)
    for name in configs:
        assert_close(tmp_path / 'two' / name, tmp_path / 'one' / name)
    assert [r['status'] for r in results_of(tmp_path / 'two/diverges')].count('diverged') == 2
    # The lifting that process 0 has measured as the faster.
    lifting, seconds = read_json(tmp_path / 'measured/lifting.json', {}).values()
    assert {r['lifting'] for r in of_measured} == {lifting} == {min(seconds, key=seconds.get)}


def copy_at_step_4(path, to):
    """A copy of a finished run as it was at step 4."""
    return shutil.copytree(path, to, ignore=shutil.ignore_patterns('result.json', '8'))


@pytest.mark.slow
def test_checkpoints_are_restored_by_other_jobs_on_other_meshes(small, tmp_path):
    mesh = {'data': 2, 'fsdp': 2, 'tensor': 2}
    runs = [(small(mesh), tmp_path / name) for name in ('two', 'lost')]
    # The first run asks 12 times: after each of 8 steps, before each of 2 checkpoints, after the
    # last step and before the results. The second asks the 8th time, the 20th in all, in step 7.
    job = start_training_job(tmp_path / 'job', runs, lost_after=20)
    train(small(mesh), tmp_path / 'one')
    _, lost = results_of_job(tmp_path / 'job', job)
    assert re.fullmatch(f'{tmp_path}/lost was taken over at step [78]', lost)  # once both know
    assert sorted(p.name for p in (tmp_path / 'lost/checkpoints').iterdir()) == ['4']
    states = [load_stack(tmp_path / name)[2] for name in ('two', 'one')]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, atol=1e-4), *states)
    for i, other in enumerate([{'trial': 2, 'fsdp': 4}, {'data': 4}, {}]):
        path = copy_at_step_4(tmp_path / 'two', tmp_path / f'two-{i}')
        train(small(other), path)
        assert_close(path, tmp_path / 'two')
    # A file of the newest checkpoint that process 1 has written, and process 0 does not read.
    no_result = shutil.ignore_patterns('result.json')
    damaged = shutil.copytree(tmp_path / 'two', tmp_path / 'damaged', ignore=no_result)
    for file in (damaged / 'checkpoints/8/state/ocdbt.process_1/d').iterdir():
        file.unlink()
    results_of_job(tmp_path / 'job', start_training_job(tmp_path / 'job', [(small(mesh), damaged)]))
    assert_close(damaged, tmp_path / 'two')
    # Back, and to more processes: of one to two and of two to four.
    back = copy_at_step_4(tmp_path / 'one', tmp_path / 'back')
    results_of_job(tmp_path / 'job', start_training_job(tmp_path / 'job', [(small(mesh), back)]))
    assert_close(back, tmp_path / 'one')
    four = copy_at_step_4(tmp_path / 'two', tmp_path / 'four')
    job = start_training_job(
        tmp_path / 'job', [(small({'trial': 2, 'tensor': 2, 'data': 2}), four)], 4, 2
    )
    results_of_job(tmp_path / 'job', job)
    assert_close(four, tmp_path / 'two')


@pytest.mark.slow
def test_a_worker_of_two_processes_ends_a_study_as_one_process_does(small, tmp_path):
    base = small({'data': 2, 'fsdp': 2, 'tensor': 2})
    study = dataclasses.replace(STUDY, base=base, tolerance=0.1, tuning=TuningConfig())
    two = tmp_path / 'two'
    one = tmp_path / 'one'
    job = start_training_job(tmp_path / 'job', [(study, two), (study, two)])
    worker.run(study, one)
    assert results_of_job(tmp_path / 'job', job) == [str(two)] * 2
    plans = [(path / 'plan.jsonl').read_text() for path in (two, one)]
    assert plans[0] == plans[1] and len(plans[0].splitlines()) == 2
    for line in map(json.loads, plans[0].splitlines()):
        assert_close(two / line['directory'], one / line['directory'])
    assert len((two / 'results.jsonl').read_text().splitlines()) == 4
    assert not leases.holders(two / 'leases') and len(list((two / 'leases').iterdir())) == 2
