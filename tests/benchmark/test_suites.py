"""Suites at all scales, without measuring: what they would start, and where targets read it."""

import json
import os

import pytest

from qkattn.benchmark import commands, race
from qkattn.benchmark.measurement import Group, Measurement
from qkattn.benchmark.session import SCALES, Options
from qkattn.benchmark.suites import steps, study
from qkattn.benchmark.suites.suite_registry import COLLECTIONS, SUITES
from qkattn.benchmark.targets import NO_AXIS, ONE_RUN, TARGETS
from qkattn.config import Config, ModelConfig, from_json
from qkattn.model.sites import validate

LINES = [
    (1.0, 'matching parameters'),
    (1.5, 'train: preparing data took 0.250 s'),
    (2.0, 'W1122 dispatch.py:204] Finished XLA compilation of jit(many_steps) in 0.3 sec'),
    (2.5, 'train: compiling took 0.750 s'),
    (3.0, 'train: step 10/20, training loss 5.3343 nats/token'),
    (3.5, 'W1122 dispatch.py:204] Finished XLA compilation of jit(evaluate) in 0.4 sec'),
    (4.0, 'train: evaluating took 0.125 s'),
    (5.0, 'train: evaluating took 0.125 s'),
]
FINISHED = commands.Finished(6.0, LINES)
RESULT = {
    **{'num_steps': 40, 'train_seconds': 2.0, 'checkpoint_seconds': 0.02, 'input_seconds': 0.01},
    **{'gap_seconds': 0.01, 'logging_seconds': 0.01},
}


class Recorded:
    """A session that measures nothing: every round takes a second."""

    def __init__(self, scale):
        self.options = Options(scale=SCALES[scale], peers=tuple(steps.PEERS))
        self.scale, self.cores, self.suite = self.options.scale, (1, 2), ''
        self.contestants, self.groups = [], []

    def race(self, title, contestants, *, reference='', x='', rounds=2, seconds=0):
        self.contestants += contestants
        assert len({own.name for own in contestants}) == len(contestants)
        extra = {'compile_seconds': 2.0, 'compilations_per_trial': 0.5, 'tokens': 8}
        extra |= {'trace_rounds': [1.0], 'compile_rounds': [2.0], 'temporary_bytes': 16}
        extra |= {'cache_bytes': 4, 'predicted_cache_bytes': 4}
        extra |= {'flops': 8, 'bytes': 8}
        rows = [Measurement(c.name, c.settings, [1.0], {**c.extra, **extra}) for c in contestants]
        return self.record(title, lambda: rows, reference=reference, x=x)

    def record(self, title, rows, *, reference='', x=''):
        self.groups.append(Group(self.suite, title, list(rows()), reference, x))
        return self.groups[-1]


@pytest.fixture
def measured(monkeypatch):
    """measured('cpu') -> a session in which all suites of a collection were run."""

    def command(script, *flags, environment=None):
        (directory,) = (f.partition('=')[2] for f in flags if f.startswith('--workdir='))
        path = commands.Path(directory)
        path.mkdir(parents=True, exist_ok=True)
        (path / 'result.json').write_text(json.dumps([RESULT]))
        results = [{**RESULT, 'run': f'{n // 3}'} for n in range(24)]  # three trials a run
        (path / 'results.jsonl').write_text(''.join(json.dumps(r) + '\n' for r in results))
        return FINISHED

    monkeypatch.setattr(commands, 'run', command)
    commands.trained.cache_clear()

    def run(scale):
        own = Recorded(scale)
        for own.suite in COLLECTIONS[scale]:
            SUITES[own.suite](own)
        return own

    yield run
    commands.trained.cache_clear()


@pytest.mark.parametrize('scale', SCALES)
def test_what_a_suite_starts_is_valid(measured, scale):
    own = measured(scale)
    titles = [group.name for group in own.groups]
    assert len(set(titles)) == len(titles)
    for group in own.groups:
        assert not group.reference or group.reference_row(), group.name
    configs = {json.dumps(c.settings['config']) for c in own.contestants if 'config' in c.settings}
    for config in (from_json(Config, json.loads(text)) for text in configs):
        if config.model.kernel != 'tokamax':  # an extra
            validate(config)
        assert config.data.name != 'stdlib' or config.model.vocab_size >= 256
    for contestant in own.contestants:
        if 'model' in contestant.settings:
            from_json(ModelConfig, contestant.settings['model'])


@pytest.mark.parametrize('scale', ['cpu', 'gpu'])
def test_every_target_finds_its_rows(measured, scale):
    own = measured(scale)
    here = [t for t in TARGETS if t.where in ('', scale) and t.suite in COLLECTIONS[scale]]
    assert here and [t.text for t in here if t.measured(own.groups) is None] == []


def test_one_trial_is_compared_in_one_process(measured):
    rows = [c for c in measured('cpu').contestants if c.process == 'one trial']
    assert [(own.name, own.cores) for own in rows] == [(NO_AXIS, 1), (ONE_RUN, 1)]
    assert len({repr(race._place(*pair)) for pair in enumerate(rows)}) == 1


def test_a_start_is_split_without_a_remainder(measured):
    cold, warm = (g for g in measured('cpu').groups if g.suite == 'startup')
    assert [row.rounds[0] for row in cold.rows] == pytest.approx([3.0, 1.25, 0.25, 0.45, 0.3, 0.75])
    assert [len(row.rounds) for row in warm.rows] == 6 * [2]


@pytest.mark.skipif(not hasattr(os, 'sched_getaffinity'), reason='needs affinities')
def test_one_of_the_ways_of_a_study_has_one_core(measured, monkeypatch):
    run, started = commands.run, []

    def seen(script, *flags, environment=None):
        started.append((len(os.sched_getaffinity(0)), flags[-1]))
        return run(script, *flags, environment=environment)

    measured('cpu')
    monkeypatch.setattr(commands, 'run', seen)
    study.run(Recorded('cpu'))
    all_cores = len(os.sched_getaffinity(0))
    assert [cores for cores, _ in started] == [all_cores] * 4 + [1]
    assert [flag for _, flag in started if 'workers' in flag] == [
        '--workers=auto',
        f'--workers={all_cores}',
    ]


def test_the_phases_of_a_study_add_up(measured):
    whole, *phases = next(g for g in measured('cpu').groups if 'phase' in g.title).rows
    seconds = {row.name: row.rounds[0] for row in phases}
    assert sum(seconds.values()) == pytest.approx(whole.rounds[0]) == 6.0
    assert seconds['training'] == 16.0 and seconds['evaluating'] == 0.25


def test_a_command_that_fails_is_a_row(measured, monkeypatch):
    def failing(script, *flags, environment=None):
        raise commands.Failed(f'{script} has ended with 2: no such flag')

    monkeypatch.setattr(commands, 'run', failing)
    own = Recorded('cpu')
    study.run(own)
    reasons = {row.extra['failed'] for group in own.groups for row in group.rows}
    assert reasons == {'ablate has ended with 2: no such flag'}


def test_a_command_that_ends_with_an_error_is_named():
    with pytest.raises(
        commands.Failed, match='^x has ended with 1: .* No module named experiments.x'
    ):
        commands.run('x')
