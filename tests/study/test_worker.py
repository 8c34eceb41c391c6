"""Workers share a study: every run once, whatever the others do."""

import dataclasses
import itertools
import math
import shutil
import signal
import time
from types import SimpleNamespace

import pytest
from jax.errors import JaxRuntimeError

from qkattn.config import DataConfig, Study, TuningConfig, fingerprint
from qkattn.config.setting import setting
from qkattn.errors import CheckpointError, ConfigError, DiskError, InUseError, Lost, Stopped
from qkattn.model.sites import validate
from qkattn.storage import leases, ledger
from qkattn.storage.records import read_json, write_json
from qkattn.study import declaration, local_workers, plan, stored, worker
from qkattn.study.arms import build_arms
from qkattn.verdict import Decision, load_findings
from tests import studies
from tests.studies import read_lines, result_record, write_lines
from tests.study.test_plan import STUDY, study_with

OPTIMA = {'learning_rate': 4e-3, 'weight_decay': 0.3, 'score_scale': 1.25}


class Trained(list):
    """The names of the directories that were trained in, in order."""

    def before(self, config, workdir):
        """Called before each training; tests replace it."""


def replace_training(patch):
    """Replaces training by one that is best at OPTIMA; returns what it has trained."""
    done = Trained()

    def train(config, workdir, *, lost, **_):
        done.before(config, workdir)
        assert not lost()
        if (workdir / 'result.json').exists():
            return
        results = []
        for trial in config.trials.trials():
            settings = trial | {'score_scale': config.model.score_scale}
            distances = [math.log(settings[knob] / best) for knob, best in OPTIMA.items()]
            loss = 2 + 0.01 * trial['seed'] + 0.1 * sum(x**2 for x in distances)
            if config.model.score != 'qk':
                loss += 0.03 + 0.001 * (-1) ** trial['seed']
            result = result_record(
                trial=trial,
                val_loss=loss,
                test_loss=loss,
                config_hash=fingerprint(config),
                num_steps=config.train.num_steps,
            )
            results.append(result)
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / 'result.json', results)
        studies.write_metrics(workdir, results, 4)
        studies.write_documents(workdir, results)
        done.append(workdir.name)

    patch.setattr(worker, 'train', train)
    patch.setattr(worker, 'rows_of', lambda config: None)
    patch.setattr(worker, 'check_documents', lambda rows, data: None)
    return done


@pytest.fixture
def trained(monkeypatch):
    return replace_training(monkeypatch)


@pytest.fixture(scope='module')
def finished_once(tmp_path_factory):
    """STUDY after one worker: its directory, and the events of its ledger before each run."""
    path = tmp_path_factory.mktemp('once') / 'out'
    events_before_runs = []
    with pytest.MonkeyPatch.context() as patch:
        replace_training(patch).before = lambda *_: events_before_runs.append(events(path))
        worker.run(STUDY, path)
    return path, events_before_runs


@pytest.fixture
def finished(finished_once, tmp_path):
    """A copy of the directory of the finished study."""
    return shutil.copytree(finished_once[0], tmp_path / 'out')


def events(path):
    return [entry['event'] for entry in ledger.read(path / 'ledger.jsonl').entries]


def test_every_arm_is_trained_from_screening_to_its_verdict(finished_once):
    path, _ = finished_once
    planned = read_lines(path / 'plan.jsonl')
    stages = ('screening', 'screening', 'verdict')
    expected = list(itertools.product(STUDY.variants, stages))
    assert [(line['variant'], line['stage']) for line in planned] == expected
    assert sorted(path.glob('runs/*')) == sorted(path / line['directory'] for line in planned)


def test_every_trial_of_the_plan_has_its_result(finished_once):
    path, _ = finished_once
    expected = []
    for line in read_lines(path / 'plan.jsonl'):
        expected += [line['run']] * line['trials']
    assert [result['run'] for result in read_lines(path / 'results.jsonl')] == expected


def test_the_ledger_is_begun_before_the_first_run(finished_once):
    path, events_before_runs = finished_once
    assert events_before_runs == [['declared']] * 6
    entry = ledger.read(path / 'ledger.jsonl').entries[0]
    assert entry['declaration'] == ledger.declaration_digest(read_json(path / 'study.json', {}))


def test_a_worker_that_ends_holds_no_lease(finished_once):
    assert not leases.holders(finished_once[0] / 'leases')


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
    """It stands before the others: the order of variants does not matter."""
    ledger.record_look(finished)
    worker.run(study_with(variants=('qk/o_is_v?score_scale=0.5', *STUDY.variants)), finished)
    assert len(trained) == 3
    assert events(finished) == ['declared', 'looked', 'arms_added']


def test_a_study_is_trained_from_its_plan_to_the_verdict(trained, tmp_path):
    """A rate on the grid is chosen, so that one trial belongs to the sweeps of two knobs."""
    tuning = dataclasses.replace(STUDY.tuning, score_scales=(0.5, 1.0, 2.0))
    study = study_with(trials={'weight_decays': (0.05, 0.1, 0.2)}, tuning=tuning)
    path = worker.run(study, tmp_path / 'out')
    studies.write_yardsticks(path, read_lines(path / 'results.jsonl'))
    findings = load_findings(path)
    _, arm = findings.arms
    assert arm.difference.mean == pytest.approx(0.03 + 0.001 / 3)
    assert arm.verdict.decision is Decision.WORSE
    assert not findings.blocks
    for tuned_arm in findings.arms:
        assert tuned_arm.blocks == tuned_arm.not_bracketed == ()
        chosen = {knob: sweep.chosen for knob, sweep in tuned_arm.sweeps.items()}
        assert list(chosen) == list(OPTIMA)
        assert chosen == pytest.approx(OPTIMA, rel=1e-2)
        assert chosen['learning_rate'] == 4e-3
        assert tuned_arm.sweeps['weight_decay'].values == (0.05, 0.1, 0.2, 0.4, 0.8)


def test_no_weight_decay_is_screened_that_no_run_may_have(trained, tmp_path):
    """The best one may lie beyond; the study ends all the same."""
    trained.before = lambda config, _: validate(config)
    fields = {'optimizer': {'decay': 'independent'}, 'variants': ('qk/vo',)}
    study = study_with(trials={'weight_decays': (0.0125, 0.025, 0.05)}, **fields)
    (arm,) = load_findings(worker.run(study, tmp_path / 'out')).arms
    assert arm.chosen
    assert arm.sweeps['weight_decay'].values[-1] == 0.05
    assert [remark.data.get('knob') for remark in arm.blocks] == ['weight_decay']


@pytest.mark.parametrize('workers', [1, 2])
def test_the_directory_of_a_run_is_refused_before_anything_is_written(tmp_path, workers):
    (tmp_path / 'config.json').write_text('{}')
    with pytest.raises(ConfigError, match=f'workdir={tmp_path} holds a run, not a study; give a'):
        local_workers.run(STUDY, tmp_path, build_arms(STUDY), workers)
    assert [path.name for path in tmp_path.iterdir()] == ['config.json']


def test_data_of_too_few_documents_are_refused_before_anything_is_written(tmp_path):
    """A tuned study needs an error over documents, which a single one does not give."""
    text = tmp_path / 'book.txt'
    text.write_text('line of text\n' * 4000)
    data = DataConfig(name='text', path=str(text), data_dir=str(tmp_path / 'data'))
    study = study_with(data=vars(data))
    with pytest.raises(ConfigError, match=r"1 of 1 documents .* of data.name='text', .*book.txt'"):
        worker.run(study, tmp_path / 'out')
    assert not (tmp_path / 'out').exists()


def test_every_model_is_checked_before_anything_is_written(trained, tmp_path, monkeypatch):
    checked = []
    monkeypatch.setattr(worker, 'require_memory', checked.append)
    sizes = ('d_model=32', 'd_model=64')
    worker.run(study_with(variants=('qk/vo',), sizes=sizes), tmp_path / 'out')
    assert sorted(config.model.d_model for config in checked) == [32, 64]


def test_the_longest_runs_are_taken_first(tmp_path):
    study = study_with(variants=('qk/vo',), sizes=('d_model=32', 'd_model=64'))
    left = worker.runs_without_result(study, build_arms(study), tmp_path)
    assert [run.arm.key.size for run in left] == ['d_model=64', 'd_model=32']


def test_a_run_is_trained_once_another_worker_has_released_its_lease(
    trained, tmp_path, monkeypatch
):
    first = plan.runs(STUDY, build_arms(STUDY), lambda run: None)[0]
    held = leases.acquire(tmp_path / 'out/leases', first.id)
    monkeypatch.setattr(worker._Worker, '_wait', lambda *_: held.release() or {})
    worker.run(STUDY, tmp_path / 'out')
    # The other arm came first, to its end; then one look at the run that was given up sufficed.
    assert [name.startswith('shared_qk') for name in trained] == [True] * 3 + [False] * 3


def test_the_time_left_of_a_study_counts_the_workers_that_train(trained, tmp_path, monkeypatch):
    """Three runs of one length, of which another worker trains one and then gives it up."""
    study = study_with(
        tuning=TuningConfig(), variants=('qk/vo',), sizes=('d_model=32', 'd_model=64', 'd_model=48')
    )
    longest = worker.runs_without_result(study, build_arms(study), tmp_path)[0]
    held = leases.acquire(tmp_path / 'out/leases', longest.id)
    train = worker.train
    lefts = []  # before and after the other worker gives up its run, for each run of this one

    def displayed(config, workdir, *, study, **settings):
        lefts.append(study())
        held.release()
        lefts.append(study())
        return train(config, workdir, **settings)

    monkeypatch.setattr(worker, 'train', displayed)
    worker.run(study, tmp_path / 'out')
    assert [(left.runs, left.workers) for left in lefts[:2]] == [(2, 2), (2, 1)]
    assert [(left.runs, left.workers) for left in lefts[2:]] == [(1, 1)] * 2 + [(0, 1)] * 2
    # Without the other worker, its run, the longest one, waits as well.
    shared, alone = lefts[:2]
    assert 0 < shared.waiting_work < alone.waiting_work - 1
    assert lefts[-1].waiting_work == 0


class RaisesForBaseline:
    """Raises an error before runs of the baseline: every time, or once."""

    def __init__(self, error, once=False):
        self.error = error
        self.once = once
        self.refused = []  # names of directories

    def __call__(self, config, workdir):
        if config.model.score == 'qk' and not (self.once and self.refused):
            self.refused.append(workdir.name)
            raise self.error


@pytest.mark.parametrize('error', [InUseError('in use'), Lost('taken over')], ids=repr)
def test_a_run_that_is_in_use_or_lost_is_tried_again_after_the_others(
    trained, tmp_path, monkeypatch, error
):
    # The first run of the baseline fails once.
    trained.before = RaisesForBaseline(error, once=True)
    monkeypatch.setattr(worker._Worker, '_wait', lambda *_: None)
    worker.run(STUDY, tmp_path / 'out')
    assert len(trained) == len(set(trained)) == 6
    assert trained.before.refused[0] in trained[1:]


@pytest.mark.parametrize(
    ('error', 'message'),
    [
        (CheckpointError('every checkpoint is damaged'), 'every checkpoint is damaged'),
        (JaxRuntimeError('RESOURCE_EXHAUSTED: no room'), 'no room'),
    ],
    ids=repr,
)
def test_a_run_that_cannot_be_trained_does_not_stop_the_others(trained, tmp_path, error, message):
    trained.before = RaisesForBaseline(error)
    with pytest.raises(ConfigError, match=f'^1 run could not be trained: .*{message}'):
        worker.run(STUDY, tmp_path / 'out')
    assert len(trained) == len(set(trained)) == 3
    assert not leases.holders(tmp_path / 'out/leases')


@pytest.mark.parametrize(
    'error', [JaxRuntimeError('INTERNAL: a bug'), DiskError('the disk is full')], ids=repr
)
def test_a_bug_or_a_full_disk_ends_the_worker(trained, tmp_path, error):
    trained.before = RaisesForBaseline(error)
    with pytest.raises(type(error), match=str(error)):
        worker.run(STUDY, tmp_path / 'out')
    assert not trained
    assert not leases.holders(tmp_path / 'out/leases')


@pytest.fixture
def waited(trained, tmp_path, monkeypatch, caplog):
    """The run that another worker held while this one waited, until it was asked to stop."""
    caplog.set_level('INFO')
    path = tmp_path / 'out'
    single = study_with(tuning=TuningConfig(), variants=('qk/vo',))
    (run,) = plan.runs(single, build_arms(single), lambda run: None)
    # The worker's alone: other threads may sleep too, while nobody handles the signal.
    clock = SimpleNamespace(
        monotonic=time.monotonic, sleep=lambda _: signal.raise_signal(signal.SIGTERM)
    )
    monkeypatch.setattr(worker, 'time', clock)
    with leases.acquire(path / 'leases', run.id), pytest.raises(Stopped):
        worker.run(single, path)
    return run


def test_a_worker_that_waits_ends_on_request(waited, trained):
    assert not trained


def test_a_worker_that_waits_names_the_run_that_another_holds(waited, caplog):
    messages = [record.getMessage() for record in caplog.get_records('setup')]
    assert f'waiting for {waited.directory}, held by process' in ' '.join(messages)


def test_a_plan_is_made_again_where_another_worker_has_finished_a_run(
    trained, tmp_path, monkeypatch
):
    """Another worker ends the last open run just after the plan was made without it."""
    path = tmp_path / 'out'
    planned = plan.runs

    def others_are_quick(*args):
        runs = planned(*args)
        if (path / 'study.json').exists():
            for run in runs:
                if run.stage == 'screening':
                    worker.train(run.config, path / run.directory, lost=lambda: False)
        return runs

    monkeypatch.setattr(plan, 'runs', others_are_quick)
    worker.run(dataclasses.replace(STUDY, variants=('qk/vo',)), path)
    stages = [line['stage'] for line in read_lines(path / 'plan.jsonl')]
    assert stages == ['screening', 'screening', 'verdict']


@dataclasses.dataclass(frozen=True, kw_only=True)
class LaterStudy(Study):
    """The study of a later version, which has one field more."""

    correction: str = setting('holm', 'For several comparisons.')


# The settings of STUDY by name.
FIELDS_OF_STUDY = {field.name: getattr(STUDY, field.name) for field in dataclasses.fields(Study)}


def contents(path):
    return {p: p.read_bytes() for p in path.rglob('*.json*')}


def change_study_json(path, **changes):
    write_json(path / 'study.json', read_json(path / 'study.json', {}) | changes)


def change_last_run(path, **changes):
    *planned, last = read_lines(path / 'plan.jsonl')
    write_lines(path / 'plan.jsonl', [*planned, last | changes])


REMATCHED = 'would train runs/shared_qk-vo.* of workdir=.* again; use the version'


@pytest.mark.parametrize(
    ('study', 'damage', 'message'),
    [
        (
            study_with(margin=0.01),
            None,
            r'settings:\n  margin: 0.005 -> 0.01\nSet them back or give',
        ),
        (study_with(data={'eval_sequences': 64}), None, 'base.data.eval_sequences: null -> 64'),
        (study_with(tuning=TuningConfig()), None, r'\n  tuning.*-> null'),
        (study_with(trials={'seeds': (0, 1, 2, 3)}), None, r'seeds: \[0, 1, 2\] -> \[0, 1, 2, 3\]'),
        (study_with(variants=('qk/vo', 'qk/k_is_v')), None, "\n  variants: 'shared_qk/vo' is left"),
        (LaterStudy(**FIELDS_OF_STUDY, correction='none'), None, r'correction: "holm" -> "none"\n'),
        (
            study_with(margin=1.0),
            lambda path: (path / 'study.json').unlink(),
            'study.json is missing',
        ),
        (
            study_with(margin=0.05),
            lambda path: change_study_json(path, margin=0.05),
            'is not what .*declares',
        ),
        (STUDY, lambda path: change_study_json(path, history={}), r'history: \{\} -> absent\nSet'),
        (
            STUDY,
            lambda path: change_study_json(path, variants='qk/vo'),
            "damaged .field 'variants' is",
        ),
        (STUDY, lambda path: change_last_run(path, run='0'), REMATCHED),
    ],
)
def test_a_directory_keeps_the_study_that_it_began_with(trained, finished, study, damage, message):
    if damage:
        damage(finished)
    before = contents(finished)
    with pytest.raises(ConfigError, match=message):
        worker.run(study, finished)
    assert contents(finished) == before
    assert not trained


def test_results_that_two_arms_exchanged_are_refused(trained, finished):
    planned = read_lines(finished / 'plan.jsonl')
    directories = [line['directory'] for line in planned if line['stage'] == 'verdict']
    # The files result.json of the two verdict runs.
    first, second = (finished / directory / 'result.json' for directory in directories)
    results = first.read_bytes()
    first.write_bytes(second.read_bytes())
    second.write_bytes(results)
    before = contents(finished)
    with pytest.raises(ConfigError, match=r"result.json is damaged .*'config_hash' is '\w+', exp"):
        worker.run(STUDY, finished)
    assert contents(finished) == before
    assert not trained


MACHINE = {
    'data': {'data_dir': '/other'},
    'mesh': {'trial': 1, 'data': 1},
    'train': {'sinks': ('tensorboard',)},
}


def test_settings_of_the_machine_train_nothing_again(trained, finished):
    """They are part of the plan, as the last worker set them, not of the study or its ledger."""
    ledger.record_look(finished)
    before = contents(finished)
    worker.run(study_with(**MACHINE), finished)
    worker.run(STUDY, finished)
    assert not trained
    assert contents(finished) == before
    assert not ledger.record_look(finished)  # the same files


def test_a_field_that_a_later_version_adds_trains_nothing_again(trained, finished):
    ledger.record_look(finished)
    before = contents(finished)
    worker.run(LaterStudy(**FIELDS_OF_STUDY), finished)
    assert not trained
    assert contents(finished) == before
    assert not ledger.record_look(finished)  # the same files


def test_a_worker_does_not_overwrite_the_plan_of_one_that_adds_arms(trained, tmp_path):
    path = tmp_path / 'out'

    def add_arms(config, workdir):
        if len(trained) == 2:
            declaration.declare(path, GROWN, build_arms(GROWN))

    # Another worker adds arms after two of the six runs of STUDY.
    trained.before = add_arms
    worker.run(STUDY, path)
    assert len(trained) == 6 and len(read_lines(path / 'plan.jsonl')) == 4  # as it was then
    worker.run(GROWN, path)
    assert len(trained) == 9 == len(read_lines(path / 'plan.jsonl'))


def test_a_stored_study_trains_the_run_whose_results_it_lacks_from_the_start(
    trained, finished, tmp_path
):
    """The log of a run without results does not count: it is trained as if it had not begun."""
    results = finished / 'results.jsonl'
    lines = read_lines(results)
    run_without_results = lines[-1]['run']
    write_lines(results, [line for line in lines if line['run'] != run_without_results])
    kept = tmp_path / 'kept'
    stored.pack(finished, kept)
    has_log = []  # of each run, before it is trained
    trained.before = lambda config, workdir: has_log.append((workdir / 'metrics.jsonl').exists())
    worker.run(STUDY, kept)
    (name,) = trained
    assert name.endswith(run_without_results)
    assert has_log == [False]
    assert read_lines(kept / 'results.jsonl') == lines
