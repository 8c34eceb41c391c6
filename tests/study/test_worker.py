"""Workers share a study: every run once, whatever the others do."""

import dataclasses
import math
import shutil
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
from jax.errors import JaxRuntimeError

from qkattn.config import ControlsConfig, DataConfig, Study, TuningConfig, fingerprint
from qkattn.config.setting import setting
from qkattn.errors import CheckpointError, ConfigError, DiskError, InUseError, Lost, Stopped
from qkattn.model.sites import validate
from qkattn.storage import leases, ledger
from qkattn.storage.records import read_json, write_json
from qkattn.study import declaration, local_workers, plan, stored, worker
from qkattn.study.arms import build_arms
from qkattn.verdict import Decision, load_findings
from tests import studies
from tests.refusals import refused
from tests.studies import read_lines, result_record, write_lines
from tests.study.test_plan import STUDY, study_with

OPTIMA = {'learning_rate': 4e-3, 'weight_decay': 0.3, 'score_scale': 1.25}


class TrainedNames(list):
    """The names of the directories that were trained in, in order."""

    def before_training(self, config, workdir):
        """Does nothing. It is called before each training, and tests replace it."""


def loss_of_trial(config, trial):
    """A loss that is least at OPTIMA, and higher by about 0.03 for variants other than qk."""
    settings = trial | {'score_scale': config.model.score_scale}
    loss = 2 + 0.01 * trial['seed']
    for knob, optimum in OPTIMA.items():
        loss += 0.1 * math.log(settings[knob] / optimum) ** 2
    if config.model.score != 'qk':
        loss += 0.03 + 0.001 * (-1) ** trial['seed']
    return loss


def replace_training(patch):
    """Replaces training by a function that writes made-up results, without reading data.

    `loss_of_trial` gives the loss of a trial.

    Args:
        patch: A MonkeyPatch, which undoes the replacement.

    Returns:
        The names of the directories that are trained in, in order. The list is empty at first.
    """
    trained = TrainedNames()

    def train(config, workdir, *, lost, **_):
        """Writes what training would leave in `workdir`, with made-up losses."""
        # A test may replace `before_training` by a function that raises an error.
        trained.before_training(config, workdir)
        # `lost` tells whether the worker has lost its lease on the run.
        assert not lost()

        # As in real training, a run that has a result is not trained again.
        if (workdir / 'result.json').exists():
            return

        results = []
        for trial in config.trials.trials():
            loss = loss_of_trial(config, trial)
            result = result_record(
                trial=trial,
                val_loss=loss,
                test_loss=loss,
                config_hash=fingerprint(config),
                num_steps=config.train.num_steps,
            )
            results.append(result)

        # result.json, metrics.jsonl and documents.json.
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / 'result.json', results)
        studies.write_metrics(workdir, results, num_evals=4)
        studies.write_documents(workdir, results)

        trained.append(workdir.name)

    patch.setattr(worker, 'train', train)
    # No data are read.
    patch.setattr(worker, 'rows_of', lambda config: None)
    patch.setattr(worker, 'check_documents', lambda rows, data: None)
    return trained


@pytest.fixture
def trained(monkeypatch):
    """Replaces training. Returns the names of the directories that were trained in."""
    return replace_training(monkeypatch)


class FinishedStudy(NamedTuple):
    path: Path
    events_before_runs: list  # the events of its ledger before each run


@pytest.fixture(scope='module')
def finished_once(tmp_path_factory):
    """STUDY after one worker, for tests that only read."""
    path = tmp_path_factory.mktemp('once') / 'out'
    events_before_runs = []
    with pytest.MonkeyPatch.context() as patch:
        trained = replace_training(patch)
        trained.before_training = lambda config, workdir: events_before_runs.append(events(path))
        worker.run(STUDY, path)
    return FinishedStudy(path, events_before_runs)


@pytest.fixture
def finished(finished_once, tmp_path):
    """A copy of the directory of the finished study."""
    return shutil.copytree(finished_once.path, tmp_path / 'out')


def events(path):
    return [entry['event'] for entry in ledger.read(path / 'ledger.jsonl').entries]


def test_every_arm_is_trained_from_screening_to_its_verdict(finished_once):
    """Screening runs tune the learning rate of an arm. Then a verdict run trains fresh seeds."""
    planned = read_lines(finished_once.path / 'plan.jsonl')

    # The first screening has the rates 1e-3, 2e-3 and 4e-3. The best rate is 4e-3, at the edge, so
    # a second screening adds 8e-3.
    runs = [(line['variant'], line['stage']) for line in planned]
    assert runs == [
        ('qk/vo', 'screening'),
        ('qk/vo', 'screening'),
        ('qk/vo', 'verdict'),
        ('shared_qk/vo', 'screening'),
        ('shared_qk/vo', 'screening'),
        ('shared_qk/vo', 'verdict'),
    ]

    # Nothing else was trained.
    directories = [finished_once.path / line['directory'] for line in planned]
    assert sorted(finished_once.path.glob('runs/*')) == sorted(directories)


def test_every_trial_of_the_plan_has_its_result(finished_once):
    expected = []
    for line in read_lines(finished_once.path / 'plan.jsonl'):
        expected += [line['run']] * line['trials']

    results = read_lines(finished_once.path / 'results.jsonl')

    assert [result['run'] for result in results] == expected


def test_the_ledger_is_begun_before_the_first_run(finished_once):
    assert finished_once.events_before_runs == [['declared']] * 6

    first_entry = ledger.read(finished_once.path / 'ledger.jsonl').entries[0]
    declared = read_json(finished_once.path / 'study.json', {})
    assert first_entry['declaration'] == ledger.declaration_digest(declared)


def test_a_worker_that_ends_holds_no_lease(finished_once):
    assert not leases.holders(finished_once.path / 'leases')


def test_a_finished_study_may_ask_another_question_without_training(trained, finished):
    worker.run(dataclasses.replace(STUDY, question='Which?'), finished)
    assert not trained
    assert events(finished) == ['declared', 'declared']


GROWN = study_with(variants=(*STUDY.variants, 'qk/k_is_v'))


def test_a_study_grows_though_a_worker_died_after_writing_its_ledger(trained, finished):
    before = (finished / 'study.json').read_bytes()
    worker.run(GROWN, finished)
    (finished / 'study.json').write_bytes(before)
    worker.run(GROWN, finished)
    assert len(trained) == 3
    assert events(finished) == ['declared', 'arms_added']


def test_an_added_arm_may_set_what_is_not_tuned(trained, finished):
    """The new variant sets score_scale, and comes before the variants that the study began with."""
    ledger.record_look(finished)
    grown = study_with(variants=('qk/o_is_v?score_scale=0.5', *STUDY.variants))

    worker.run(grown, finished)

    assert len(trained) == 3
    assert events(finished) == ['declared', 'looked', 'arms_added']


def test_a_study_is_trained_from_its_plan_to_the_verdict(trained, tmp_path):
    """A study that tunes three settings finds the best values, and then decides on its arm.

    The made-up losses are lowest at OPTIMA: a rate of 4e-3, a weight decay of 0.3 and a score scale
    of 1.25.
    """
    tuning = dataclasses.replace(STUDY.tuning, score_scales=(0.5, 1.0, 2.0))
    study = study_with(trials={'weight_decays': (0.05, 0.1, 0.2)}, tuning=tuning)

    path = worker.run(study, tmp_path / 'out')

    # Verdicts need yardsticks, the losses of n-grams that the baseline has to beat.
    studies.write_yardsticks(path, read_lines(path / 'results.jsonl'))
    findings = load_findings(path)
    assert not findings.blocks

    # shared_qk/vo is worse by 0.03 + 0.001 * (-1) ** seed, for the seeds 0, 1 and 2.
    _, shared_qk = findings.arms
    assert shared_qk.difference.mean == pytest.approx(0.03 + 0.001 / 3)
    assert shared_qk.verdict.decision is Decision.WORSE

    for arm in findings.arms:
        assert arm.blocks == ()
        assert arm.not_bracketed == ()
        chosen = {knob: sweep.chosen for knob, sweep in arm.sweeps.items()}
        assert list(chosen) == ['learning_rate', 'weight_decay', 'score_scale']
        expected = {'learning_rate': 4e-3, 'weight_decay': 0.3, 'score_scale': 1.25}
        assert chosen == pytest.approx(expected, rel=1e-2)
        assert chosen['learning_rate'] == 4e-3
        # The grid up to 0.2 grows by factors of 2. The loss at 0.8 is above the loss at 0.4, so the
        # grid ends there.
        assert arm.sweeps['weight_decay'].values == (0.05, 0.1, 0.2, 0.4, 0.8)


def test_screened_weight_decays_are_valid_settings(trained, tmp_path):
    """A grid of weight decays grows only to values that a config may have.

    A config with decay='independent' must have a weight decay below 0.1. The made-up losses are
    lowest at 0.3. Without this rule, the grid would go on from 0.05 to 0.1.
    """

    def check_config(config, workdir):
        """Raises an error if the config is invalid, as it is with a weight decay of 0.1."""
        validate(config)

    # The fixture replaces training by a function that first calls `trained.before_training`.
    trained.before_training = check_config
    study = study_with(
        trials={'weight_decays': (0.0125, 0.025, 0.05)},
        optimizer={'decay': 'independent'},
        variants=('qk/vo',),
    )

    path = worker.run(study, tmp_path / 'out')

    # The grid ends at 0.05, and the study still trains a verdict run.
    (arm,) = load_findings(path).arms
    assert arm.chosen
    assert arm.sweeps['weight_decay'].values[-1] == 0.05
    # The best value lies at the end of the grid, where a better one may follow. So a remark on
    # the weight decay withholds the verdict. `arm.blocks` has the remarks that do so.
    (blocking_remark,) = arm.blocks
    assert blocking_remark.data['knob'] == 'weight_decay'


@pytest.mark.parametrize('max_workers', [1, 2])
def test_the_directory_of_a_run_is_refused_before_anything_is_written(tmp_path, max_workers):
    (tmp_path / 'config.json').write_text('{}')
    with pytest.raises(ConfigError, match=f'workdir={tmp_path} holds a run, not a study; give a'):
        local_workers.run(STUDY, tmp_path, build_arms(STUDY), max_workers)
    assert [path.name for path in tmp_path.iterdir()] == ['config.json']


def test_data_of_too_few_documents_are_refused_before_anything_is_written(tmp_path):
    """A verdict includes the error over documents, so a study needs many documents.

    A text file is a single document.
    """
    text = tmp_path / 'book.txt'
    text.write_text('line of text\n' * 4000)
    data = DataConfig(name='text', path=str(text), data_dir=str(tmp_path / 'data'))
    study = study_with(data=vars(data))

    with pytest.raises(ConfigError, match=r"1 of 1 documents .* of data.name='text', .*book.txt'"):
        worker.run(study, tmp_path / 'out')

    assert not (tmp_path / 'out').exists()


def test_yardsticks_of_another_form_are_refused_before_anything_is_written(tmp_path, outside):
    """A task from outside whose yardsticks are a dict would fail only after training."""
    source = (outside / 'ahead.py').read_text()
    method = "\n    def yardsticks(self, config):\n        return {'val': {'chance': 5.0}}\n"
    (outside / 'unmeasured.py').write_text(source + method)
    data = {'name': 'fables:fables(count=2000)', 'task': 'unmeasured:Ahead'}
    study = study_with(data=data | {'data_dir': str(tmp_path / 'data')})

    with refused("data.task='unmeasured:Ahead' must return Yardsticks, not {'val'"):
        worker.run(study, tmp_path / 'out')

    assert not (tmp_path / 'out').exists()


def test_every_model_is_checked_before_anything_is_written(trained, tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(worker, 'require_memory', checked.append)
    study = study_with(variants=('qk/vo',), sizes=('d_model=32', 'd_model=64'))

    worker.run(study, tmp_path / 'out')

    assert sorted(config.model.d_model for config in checked) == [32, 64]


def test_the_longest_runs_are_taken_first(tmp_path):
    study = study_with(variants=('qk/vo',), sizes=('d_model=32', 'd_model=64'))
    left = worker.runs_without_result(study, build_arms(study), tmp_path)
    assert [run.arm.key.size for run in left] == ['d_model=64', 'd_model=32']


def test_a_run_is_trained_once_another_worker_has_released_its_lease(
    trained, tmp_path, monkeypatch
):
    """A lease is a file lock on a run, held by the worker that trains it.

    A worker first trains all runs that are free. Then it waits for the runs that others hold.
    """
    # Another worker holds the first run of the baseline.
    held_run = plan.runs(STUDY, build_arms(STUDY), lambda run: None)[0]
    lease = leases.acquire(tmp_path / 'out/leases', held_run.id)

    def wait(*_):
        """Replaces the wait of this worker: the other worker gives up its run at once."""
        lease.release()
        return {}

    monkeypatch.setattr(worker._Worker, '_wait', wait)

    worker.run(STUDY, tmp_path / 'out')

    # The three runs of shared_qk/vo were trained before the three of the baseline.
    assert len(trained) == 6
    assert all(name.startswith('shared_qk') for name in trained[:3])
    assert not any(name.startswith('shared_qk') for name in trained[3:])


def test_the_time_left_of_a_study_counts_the_workers_that_train(trained, tmp_path, monkeypatch):
    """A worker counts the runs that are left, and the workers that share them.

    Another worker holds the longest of three runs. It gives up this run, untrained, while this
    worker trains its first run.
    """
    # An untuned study has one run of each size. The run of d_model=64 is the longest.
    sizes = ('d_model=32', 'd_model=64', 'd_model=48')
    study = study_with(tuning=TuningConfig(), variants=('qk/vo',), sizes=sizes)
    longest = worker.runs_without_result(study, build_arms(study), tmp_path)[0]
    lease = leases.acquire(tmp_path / 'out/leases', longest.id)
    replaced_train = worker.train
    times_left = []  # two for each run of this worker

    def train(config, workdir, *, study, **settings):
        """Replaces training, and notes what is left of the study.

        `study()` returns what is left. It is noted before and after the other worker gives up its
        run.
        """
        times_left.append(study())
        lease.release()
        times_left.append(study())
        return replaced_train(config, workdir, **settings)

    monkeypatch.setattr(worker, 'train', train)

    worker.run(study, tmp_path / 'out')

    # `runs` counts the other runs without a result. `workers` counts the workers that hold a run.
    assert [(left.runs, left.workers) for left in times_left] == [
        (2, 2),  # this worker trains d_model=48, and the other worker holds d_model=64
        (2, 1),  # the other worker has given up d_model=64
        (1, 1),  # this worker trains d_model=64
        (1, 1),
        (0, 1),  # this worker trains d_model=32
        (0, 1),
    ]

    # `waiting_work` is the work of runs that no worker holds, in units of the run that this worker
    # trains. The run of d_model=64 adds more than one unit once it is given up.
    shared = times_left[0].waiting_work
    alone = times_left[1].waiting_work
    assert 0 < shared < alone - 1
    assert times_left[-1].waiting_work == 0


class RaisesForBaseline:
    """Raises an error before each run of the baseline. With `once`, it is raised only once."""

    def __init__(self, error, once=False):
        self.error = error
        self.once = once
        self.refused = []  # names of the directories of the runs that were not trained

    def __call__(self, config, workdir):
        is_baseline = config.model.score == 'qk'
        is_over = self.once and len(self.refused) == 1
        if is_baseline and not is_over:
            self.refused.append(workdir.name)
            raise self.error


@pytest.mark.parametrize('error', [InUseError('in use'), Lost('taken over')], ids=repr)
def test_a_run_in_use_or_lost_is_tried_again_last(trained, tmp_path, monkeypatch, error):
    trained.before_training = RaisesForBaseline(error, once=True)
    monkeypatch.setattr(worker._Worker, '_wait', lambda *_: None)

    worker.run(STUDY, tmp_path / 'out')

    assert len(trained) == 6
    assert len(set(trained)) == 6
    # The refused run is trained later, not first.
    refused = trained.before_training.refused[0]
    assert refused in trained[1:]


@pytest.mark.parametrize(
    ('error', 'message'),
    [
        (CheckpointError('every checkpoint is damaged'), 'every checkpoint is damaged'),
        (JaxRuntimeError('RESOURCE_EXHAUSTED: no room'), 'no room'),
    ],
    ids=repr,
)
def test_a_run_that_cannot_be_trained_does_not_stop_the_others(trained, tmp_path, error, message):
    trained.before_training = RaisesForBaseline(error)

    with pytest.raises(ConfigError, match=f'^1 run could not be trained: .*{message}'):
        worker.run(STUDY, tmp_path / 'out')

    # The three runs of the other arm were trained.
    assert len(trained) == 3
    assert len(set(trained)) == 3
    assert not leases.holders(tmp_path / 'out/leases')


@pytest.mark.parametrize(
    'error', [JaxRuntimeError('INTERNAL: a bug'), DiskError('the disk is full')], ids=repr
)
def test_a_bug_or_a_full_disk_ends_the_worker(trained, tmp_path, error):
    trained.before_training = RaisesForBaseline(error)
    with pytest.raises(type(error), match=str(error)):
        worker.run(STUDY, tmp_path / 'out')
    assert not trained
    assert not leases.holders(tmp_path / 'out/leases')


@pytest.fixture
def run_waited_for(trained, tmp_path, monkeypatch, caplog):
    """The only run of a study. A worker waited for it until SIGTERM stopped the worker.

    Another worker held the run all the time.
    """
    caplog.set_level('INFO')
    path = tmp_path / 'out'
    study = study_with(tuning=TuningConfig(), variants=('qk/vo',))
    (run,) = plan.runs(study, build_arms(study), lambda run: None)

    def sleep(seconds):
        """Replaces a pause of the wait by SIGTERM."""
        signal.raise_signal(signal.SIGTERM)

    # Only the module `worker` gets this clock, because other threads may call time.sleep too.
    clock = SimpleNamespace(monotonic=time.monotonic, sleep=sleep)
    monkeypatch.setattr(worker, 'time', clock)
    with leases.acquire(path / 'leases', run.id), pytest.raises(Stopped):
        worker.run(study, path)
    return run


def test_a_worker_that_waits_ends_on_request(run_waited_for, trained):
    assert not trained


def test_a_worker_that_waits_names_the_run_that_another_holds(run_waited_for, caplog):
    messages = [record.getMessage() for record in caplog.get_records('setup')]
    expected = f'waiting for {run_waited_for.directory}, held by process'
    assert any(expected in message for message in messages)


def test_a_plan_is_made_again_where_another_worker_has_finished_a_run(
    trained, tmp_path, monkeypatch
):
    """Another worker finishes each screening just after this worker has planned it.

    So this worker finds no screening to train. It has to plan again, because the results of a
    screening lead to further runs.
    """
    path = tmp_path / 'out'
    plan_runs = plan.runs

    def plan_runs_then_finish_screening(*args):
        runs = plan_runs(*args)
        # Other workers take part only after the study is declared.
        is_declared = (path / 'study.json').exists()
        if is_declared:
            for run in runs:
                if run.stage == 'screening':
                    # The fixture `trained` replaces `train`, which writes the result at once.
                    worker.train(run.config, path / run.directory, lost=lambda: False)
        return runs

    monkeypatch.setattr(plan, 'runs', plan_runs_then_finish_screening)
    study_of_baseline_alone = dataclasses.replace(STUDY, variants=('qk/vo',))

    worker.run(study_of_baseline_alone, path)

    # The first screening finds the best rate at the end of the grid, 4e-3.
    # So the second screening adds the rate 8e-3. The verdict run comes last.
    stages = [line['stage'] for line in read_lines(path / 'plan.jsonl')]
    assert stages == ['screening', 'screening', 'verdict']


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaterStudy(Study):
    """The study of a later version, which has one field more."""

    correction: str = setting('holm', 'For several comparisons.')


# The settings of STUDY by name.
FIELDS_OF_STUDY = {field.name: getattr(STUDY, field.name) for field in dataclasses.fields(Study)}


def json_files(path):
    """The bytes of each JSON and JSONL file below a directory."""
    return {file: file.read_bytes() for file in path.rglob('*.json*')}


@pytest.mark.parametrize(
    ('study', 'message'),
    [
        pytest.param(
            study_with(margin=0.01),
            r'settings:\n  margin: 0.005 -> 0.01\nSet them back or give',
            id='another margin',
        ),
        pytest.param(
            study_with(data={'eval_sequences': 64}),
            r'\n  base.data.eval_sequences: null -> 64\n',
            id='other data',
        ),
        pytest.param(study_with(tuning=TuningConfig()), r'\n  tuning.*-> null', id='no tuning'),
        pytest.param(
            study_with(trials={'seeds': (0, 1, 2, 3)}),
            r'seeds: \[0, 1, 2\] -> \[0, 1, 2, 3\]',
            id='other seeds',
        ),
        pytest.param(
            study_with(variants=('qk/vo', 'qk/k_is_v')),
            r"\n  variants: 'shared_qk/vo' is left",
            id='a variant is left out',
        ),
        pytest.param(
            LaterStudy(**FIELDS_OF_STUDY, correction='none'),
            r'correction: "holm" -> "none"\n',
            id='a setting of a later version',
        ),
    ],
)
def test_a_directory_keeps_the_study_that_it_began_with(trained, finished, study, message):
    before = json_files(finished)
    with pytest.raises(ConfigError, match=message):
        worker.run(study, finished)
    assert json_files(finished) == before
    assert not trained


def change_study_json(path, **changes):
    declared = read_json(path / 'study.json', {})
    write_json(path / 'study.json', declared | changes)


def remove_study_json(path):
    (path / 'study.json').unlink()


def change_margin(path):
    change_study_json(path, margin=0.05)


def add_an_unknown_field(path):
    change_study_json(path, history={})


def damage_variants(path):
    change_study_json(path, variants='qk/vo')


def change_the_last_planned_run(path):
    """As if an earlier version had matched the arm in another way."""
    planned = read_lines(path / 'plan.jsonl')
    planned[-1]['run'] = '0'
    write_lines(path / 'plan.jsonl', planned)


@pytest.mark.parametrize(
    ('change_files', 'study', 'message'),
    [
        (remove_study_json, study_with(margin=1.0), 'study.json is missing'),
        (change_margin, study_with(margin=0.05), 'is not what .*declares'),
        (add_an_unknown_field, STUDY, r'history: \{\} -> absent\nSet them back'),
        (damage_variants, STUDY, "damaged .field 'variants' is"),
        (
            change_the_last_planned_run,
            STUDY,
            'would train runs/shared_qk-vo.* of workdir=.* again; use the version',
        ),
    ],
)
def test_a_directory_whose_files_were_changed_is_refused(
    trained, finished, change_files, study, message
):
    change_files(finished)
    before = json_files(finished)
    with pytest.raises(ConfigError, match=message):
        worker.run(study, finished)
    assert json_files(finished) == before
    assert not trained


def test_a_dry_run_refuses_a_study_without_its_ledger(finished):
    """A dry run makes the checks of the start, which needs the declaration in the ledger."""
    (finished / ledger.NAME).unlink()
    with pytest.raises(ConfigError, match='ledger.jsonl does not exist, or declares no study'):
        declaration.check(finished, STUDY, build_arms(STUDY))


def test_results_that_two_arms_exchanged_are_refused(trained, finished):
    """The file result.json names the hash of its run's config, so it fits no other run."""
    planned = read_lines(finished / 'plan.jsonl')
    verdicts = [line['directory'] for line in planned if line['stage'] == 'verdict']
    assert len(verdicts) == 2
    first_file = finished / verdicts[0] / 'result.json'
    second_file = finished / verdicts[1] / 'result.json'

    results_of_first = first_file.read_bytes()
    results_of_second = second_file.read_bytes()
    first_file.write_bytes(results_of_second)
    second_file.write_bytes(results_of_first)
    before = json_files(finished)

    message = r"result.json is damaged .*'config_hash' is '\w+', expected"
    with pytest.raises(ConfigError, match=message):
        worker.run(STUDY, finished)

    # Nothing is trained again or written.
    assert not trained
    assert json_files(finished) == before


def test_settings_of_the_machine_train_nothing_again(trained, finished):
    """A finished study trains nothing again if a worker has other settings of its machine.

    Such settings, for example directories, do not belong to the study. plan.jsonl has the settings
    of the last worker.
    """
    # A look records the hashes of the files in the ledger.
    ledger.record_look(finished)
    before = json_files(finished)
    on_other_machine = study_with(
        data={'data_dir': '/other'},
        mesh={'trial': 1, 'data': 1},
        train={'sinks': ('tensorboard',)},
    )

    worker.run(on_other_machine, finished)
    # This worker writes plan.jsonl again, with the first settings.
    worker.run(STUDY, finished)

    assert not trained
    assert json_files(finished) == before
    # A second look is not recorded, because the files are the same.
    assert not ledger.record_look(finished)


def test_a_field_that_a_later_version_adds_trains_nothing_again(trained, finished):
    ledger.record_look(finished)
    before = json_files(finished)

    worker.run(LaterStudy(**FIELDS_OF_STUDY), finished)

    assert not trained
    assert json_files(finished) == before
    assert not ledger.record_look(finished)  # the same files


def test_a_worker_does_not_overwrite_the_plan_of_one_that_adds_arms(trained, tmp_path):
    """A worker of a smaller study stops writing plan.jsonl once another worker adds an arm.

    STUDY has two arms with three runs each. GROWN has a third arm, qk/k_is_v.
    """
    path = tmp_path / 'out'

    def add_an_arm(config, workdir):
        """Declares GROWN in the directory before the third run is trained."""
        if len(trained) == 2:
            declaration.declare(path, GROWN, build_arms(GROWN))

    # The worker of STUDY trains its six runs.
    trained.before_training = add_an_arm
    worker.run(STUDY, path)
    assert len(trained) == 6

    # plan.jsonl still has the plan from before the third run: two screenings of each arm.
    assert len(read_lines(path / 'plan.jsonl')) == 4

    # A worker of GROWN trains the three runs of the third arm. It writes the plan of nine runs.
    worker.run(GROWN, path)
    assert len(trained) == 9
    assert len(read_lines(path / 'plan.jsonl')) == 9


def test_longer_runs_that_leave_the_plan_keep_their_results(trained, tmp_path):
    """A longer run that a look has seen stays in both files, though it is no longer planned.

    An arm is decided once all arms of its size are trained. So an added arm leaves it undecided for
    a while, and undecided arms are not trained longer.
    """
    study = study_with(controls=ControlsConfig(equal_shape=False, longer=4))
    path = tmp_path / 'out'
    worker.run(study, path)
    planned = read_lines(path / 'plan.jsonl')
    results = read_lines(path / 'results.jsonl')
    assert 'longer' in [line['control'] for line in planned]
    assert ledger.record_look(path)

    def stop(config, workdir):
        """Stops the worker before it trains the first run of the added arm."""
        raise Stopped('stopped')

    trained.before_training = stop
    with pytest.raises(Stopped):
        worker.run(dataclasses.replace(study, variants=(*study.variants, 'qk/k_is_v')), path)

    lines_left = [line for line in read_lines(path / 'plan.jsonl') if line in planned]
    assert lines_left == planned
    assert read_lines(path / 'results.jsonl') == results
    assert not load_findings(path).study.altered


def test_a_stored_study_trains_a_run_without_results_from_the_start(trained, finished, tmp_path):
    """A stored study has no checkpoints, so a run without results cannot be resumed.

    The run is trained again, and its old log is left out.
    """
    # Take the results of the last run away, but leave its log.
    results = read_lines(finished / 'results.jsonl')
    last_run = results[-1]['run']
    results_of_others = [result for result in results if result['run'] != last_run]
    write_lines(finished / 'results.jsonl', results_of_others)
    stored_study = tmp_path / 'stored'
    stored.pack(finished, stored_study)

    logs_before_training = []  # for each trained run, whether it had a log
    trained.before_training = lambda config, workdir: logs_before_training.append(
        (workdir / 'metrics.jsonl').exists()
    )

    worker.run(STUDY, stored_study)

    assert len(trained) == 1
    assert trained[0].endswith(last_run)
    assert logs_before_training == [False]
    assert read_lines(stored_study / 'results.jsonl') == results


def test_a_stored_study_that_is_refused_stays_stored(trained, finished, tmp_path):
    stored_study = tmp_path / 'stored'
    stored.pack(finished, stored_study)

    with pytest.raises(ConfigError, match='margin: 0.005 -> 0.01'):
        worker.run(study_with(margin=0.01), stored_study)

    assert (stored_study / 'logs.zip').exists()
    assert not (stored_study / 'runs').exists()
    assert not trained
