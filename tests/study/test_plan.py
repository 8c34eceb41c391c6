"""The chain of runs of an arm: what is known grows with the results, and never otherwise."""

import dataclasses
import json
import math
import sys

import pytest

from qkattn.config import (
    Config,
    ControlsConfig,
    ModelConfig,
    OptimizerConfig,
    Study,
    TrialsConfig,
    TuningConfig,
    fingerprint,
)
from qkattn.storage.records import to_jsonable
from qkattn.study import plan
from qkattn.study.arms import build_arms
from qkattn.study.plan import to_lengthen

SEEDS = range(6)
NOISE = (0.010, -0.012, 0.004, -0.008, 0.011, -0.005)


def losses(mean, missing=()):
    own = {seed: 3 + mean + NOISE[seed] for seed in SEEDS}
    return own | dict.fromkeys(missing)


@pytest.mark.parametrize(
    ('mean', 'comparisons', 'number'),
    # The difference of 0.015 has p = 0.01 against zero; corrected for 12 arms it is no word.
    [(0.015, 1, 2), (0.015, 12, 0), (0.2, 12, 2), (-0.2, 12, 2), (0.0, 1, 0)],
)
def test_a_word_is_corrected_for_the_whole_study(arms, mean, comparisons, number):
    of = {arms[0].key: dict.fromkeys(SEEDS, 3.0), arms[1].key: losses(mean)}
    assert to_lengthen(STUDY, arms, of, comparisons) == arms[:number]


def test_divergence_helps_nobody_to_a_word(arms):
    of = {arms[0].key: dict.fromkeys(SEEDS, 3.0), arms[1].key: losses(-0.2, missing=[2])}
    assert not to_lengthen(STUDY, arms, of, 1)
    of[arms[1].key] = dict.fromkeys(SEEDS)
    assert not to_lengthen(STUDY, arms, of, 1)


STUDY = Study(
    name='small',
    base=Config(
        model=ModelConfig(num_layers=1, context=16),
        optimizer=OptimizerConfig(decay='coupled'),
        trials=TrialsConfig(
            seeds=(0, 1, 2), learning_rates=(1e-3, 2e-3, 4e-3), weight_decays=(0.1,)
        ),
    ),
    variants=('qk/vo', 'shared_qk/vo'),
    sizes=('d_model=32',),
    tolerance=1e-2,
    tuning=TuningConfig(seeds=(10, 11), max_points=6, max_seeds=2),
    controls=ControlsConfig(equal_shape=False, longer=None),
)


def landscape(
    optimum: float,
    scale: float = 1.0,
    diverged=lambda trial: False,
    effect=lambda run, seed: 0.0,
):
    """Results whose loss is a parabola in ln(learning rate), with a level per seed.

    The test loss is larger by the effect of a run and seed. Diverged trials have losses that would
    be the best.
    """

    def results(run):
        found = []
        for trial in run.config.trials.trials():
            away = math.log(trial['learning_rate'] / optimum)
            away += math.log(run.config.model.score_scale / scale) / 2
            away += math.log(trial['weight_decay'] / 0.1) / 4
            loss = 2 + 0.01 * trial['seed'] + 0.1 * away**2
            status, loss = ('diverged', 0.0) if diverged(trial) else ('finished', loss)
            measured = {'val_loss': loss, 'test_loss': loss + effect(run, trial['seed'])}
            found.append({'trial': trial, 'status': status, **measured})
        return found

    return results


@pytest.fixture(scope='module')
def arms():
    return build_arms(STUDY)


GRID = (1e-3, 2e-3, 4e-3)


@pytest.mark.parametrize(
    ('results', 'rates'),
    [
        (lambda run: None, [GRID]),  # nothing is known beyond what is unfinished
        (landscape(2.3e-3), [GRID, (0.0023,)]),
        (landscape(7e-3), [GRID, (8e-3,), (1.6e-2,), (0.007,)]),  # the grid is extended
        (landscape(1e-6), [GRID, (5e-4,), (2.5e-4,), (1.25e-4,), (1.25e-4,)]),  # to max_points
        # One of two seeds diverged at the last value.
        (landscape(7e-3, diverged=lambda t: (t['seed'], t['learning_rate']) == (11, 4e-3)), None),
    ],
    ids=['unfinished', 'bracketed', 'extended', 'bounded', 'diverged'],
)
def test_an_arm_is_screened_until_bracketed_then_judged_on_fresh_seeds(arms, results, rates):
    *screening, last = plan.runs(STUDY, arms[:1], results)
    assert all(run.stage == 'screening' for run in screening)
    if rates is None:
        assert len(screening) == 1 and last.config.trials.learning_rates[0] <= 2e-3
    else:
        tried = [run.config.trials.learning_rates for run in (*screening, last)]
        assert tried == rates
    assert last.stage == ('verdict' if screening else 'screening')
    assert {run.config.trials.seeds for run in screening} <= {(10, 11)}
    assert last.config.trials.seeds == ((0, 1, 2) if screening else (10, 11))
    assert last.config.model == arms[0].model


def test_weight_decay_and_score_scale_are_tuned_one_at_a_time(arms):
    trials = dataclasses.replace(STUDY.base.trials, weight_decays=(0.05, 0.1, 0.2))
    wanted = dataclasses.replace(
        STUDY,
        base=dataclasses.replace(STUDY.base, trials=trials),
        tuning=dataclasses.replace(STUDY.tuning, score_scales=(0.5, 1.0, 2.0)),
    )
    runs = plan.runs(wanted, build_arms(wanted)[:1], landscape(2e-3, scale=1.1))
    assert [(c.stage, c.knob) for c in runs] == [
        ('screening', 'learning_rate'),
        ('screening', 'weight_decay'),
        *3 * [('screening', 'score_scale')],
        ('verdict', None),
    ]
    assert runs[0].config.trials.weight_decays == (0.1,)
    assert runs[1].config.trials.weight_decays == (0.05, 0.1, 0.2)
    assert [c.config.model.score_scale for c in runs[2:5]] == [0.5, 1.0, 2.0]
    # Each is tuned given the ones before, so the joint optimum need not be reached by each alone.
    (rate,), (decay,) = runs[5].config.trials.learning_rates, runs[5].config.trials.weight_decays
    scale = runs[5].config.model.score_scale
    assert rate == pytest.approx(2e-3 * 1.1**0.5, rel=5e-3)
    assert (decay, scale) == pytest.approx((0.1, 1.0), rel=2e-2)


def test_without_tuning_every_combination_is_one_run(arms):
    single = dataclasses.replace(STUDY, tuning=TuningConfig())
    runs = plan.runs(single, arms, lambda run: None)
    assert [c.stage for c in runs] == ['single', 'single']
    assert runs[0].config.trials == STUDY.base.trials
    assert runs[0].directory == f'runs/qk-vo-d_model=32-{runs[0].id}'


def test_the_lines_of_the_plan_describe_its_runs(arms, monkeypatch):
    runs = plan.runs(STUDY, arms, landscape(2e-3))
    assert len({run.directory for run in runs}) == 4
    lines = [json.loads(line) for line in plan.lines(STUDY, runs).splitlines()]
    least = plan.least(STUDY, arms)
    for planned in (lines, [vars(run) for run in least]):
        assert [line['stage'] for line in planned] == 2 * ['screening', 'verdict']
    assert least[0].tokens == 6 * 1000 * 16 * 16
    for line, run in zip(lines, runs, strict=True):
        assert line['config']['model']['score'] == run.config.model.score
        assert line['run'] == run.id == fingerprint(run.config) and line['trials'] in (3, 6)
        assert line['residual'] == run.arm.match.residual
    monkeypatch.setattr(sys, 'orig_argv', ['python3', '-m', 'x', '--a'])
    declared = plan.declaration(STUDY, arms)
    assert declared['arms'][1]['variant'] == 'shared_qk/vo'
    assert declared['tuning']['learning_rates'] == GRID
    assert declared['seeds'] == (0, 1, 2) and declared['command'] == 'python -m x --a'


def with_controls(**fields):
    fields = {'controls': ControlsConfig(), 'sizes': ('d_model=64',)} | fields
    return dataclasses.replace(STUDY, **fields)


def better_without_w_q(run, seed):
    """Test losses: one variant is better by 0.5 with little noise, the others by nothing."""
    noise = 0.02 * math.sin(seed + 10 * len(run.arm.label))
    return noise - 0.5 * (run.config.model.score == 'query_free')


WORDS = landscape(2.5e-3, effect=better_without_w_q)


def of_control(runs, control):
    return [run for run in runs if run.arm.key.control == control]


def test_arms_with_a_word_and_the_baseline_are_trained_longer_at_a_rate_of_their_own():
    study = with_controls(variants=('qk/vo', 'shared_qk/vo', 'query_free/vo'))
    arms = build_arms(study)
    runs = plan.runs(study, arms, WORDS)
    longer = of_control(runs, 'longer')
    assert runs[-len(longer) :] == longer
    stages = ['screening', 'screening', 'verdict']
    # The arm that is like the baseline has no word.
    assert [(run.arm.label, run.stage) for run in longer if run.stage == 'verdict'] == [
        ('qk/vo', 'verdict'),
        ('query_free/vo', 'verdict'),
    ]
    (chosen,) = next(run for run in runs if run.stage == 'verdict').config.trials.learning_rates
    first = longer[0].config
    assert first.trials.learning_rates == pytest.approx((chosen / 2, chosen, chosen * 2))
    assert [run.stage for run in longer] in (2 * stages, 2 * stages[1:])
    base = STUDY.base
    for run in longer:
        train, config = base.train, run.config
        assert config.train == dataclasses.replace(
            train, num_steps=4000, eval_every=400, checkpoint_every=400
        )
        assert config.optimizer.warmup_steps == 4 * base.optimizer.warmup_steps
        assert config.trials.seeds == ((0, 1, 2) if run.stage == 'verdict' else (10, 11))
    primary = [run for run in runs if run.stage == 'verdict' and not run.arm.key.control]
    assert {(run.arm.key.variant, run.config.model) for run in longer} <= {
        (run.arm.key.variant, run.config.model) for run in primary
    }


def test_every_arm_reaches_a_look_before_any_goes_on():
    study = with_controls(looks=(2, 3), controls=ControlsConfig(longer=None))
    arms = build_arms(study)
    assert [arm.key.control for arm in arms] == [None, None, 'equal_shape']
    everything = plan.runs(study, arms, WORDS)
    verdicts = [run for run in everything if run.stage == 'verdict']
    assert [run.config.trials.seeds for run in verdicts] == 3 * [(0, 1)] + 3 * [(2,)]
    assert [run.arm.key for run in verdicts[3:]] == [arm.key for arm in arms]
    for late in verdicts[:3]:
        known = plan.runs(
            study, arms, lambda run, late=late: run.id != late.id and WORDS(run) or None
        )
        assert [run.config.trials.seeds for run in known if run.stage == 'verdict'] == 3 * [(0, 1)]
    assert len({run.id for run in everything}) == len(everything)
    assert plan.declaration(study, arms)['looks'] == (2, 3)
    assert plan.declaration(STUDY, arms[:2])['looks'] == (3,)


def test_the_plan_does_not_depend_on_the_order_in_which_runs_finish():
    study = with_controls(variants=('qk/vo', 'query_free/vo'), looks=(2, 3))
    arms = build_arms(study)

    def planned(pick):
        done = {}

        def known():
            return plan.runs(study, arms, lambda run: done.get(run.id))

        while left := [run for run in known() if run.id not in done]:
            done[left[pick].id] = WORDS(left[pick])
        assert {run.id for run in known()} == set(done)
        return known()

    assert planned(0) == planned(-1)


def continued(arms, *studies):
    """The history of the last study, where a directory has held one after the other."""
    declared = None
    for study in studies:
        kept = plan.history(study, declared)
        other = {} if kept == plan.history(study) else {'history': dataclasses.asdict(kept)}
        declared = to_jsonable(plan.declaration(study, arms) | other)
    return kept


def with_seeds(study, seeds, looks=()):
    trials = dataclasses.replace(study.base.trials, seeds=seeds)
    base = dataclasses.replace(study.base, trials=trials)
    return dataclasses.replace(study, base=base, looks=looks)


@pytest.mark.parametrize(
    ('seeds', 'stacks'),
    [
        ([(0, 1, 2)], [(0, 1, 2)]),
        ([(0, 1, 2), (0, 1, 2, 3)], [(0, 1, 2), (3,)]),
        ([(0, 1, 2), (0, 1, 2, 3), (0, 1, 2, 3, 5, 4)], [(0, 1, 2), (3,), (5, 4)]),
        ([(1, 2), (0, 1, 2)], [(1, 2), (0,)]),
        # A run stays with all of its seeds, or not at all.
        ([(0, 1, 2), (0, 1)], [(0, 1)]),
        ([(0, 1, 2), (0, 1, 2, 3), (1, 2, 3)], [(3,), (1, 2)]),
        ([(0, 1, 2), (4, 5)], [(4, 5)]),
        # Settings that come back have the runs that they had.
        ([(0, 1, 2), (0, 1), (0, 1, 2)], [(0, 1, 2)]),
        ([(0, 1), (0, 1, 2, 3), (0, 1, 2), (0, 1, 2, 3)], [(0, 1), (2, 3)]),
    ],
)
def test_runs_stay_in_the_plan_where_seeds_change(arms, seeds, stacks):
    studies = [with_seeds(dataclasses.replace(STUDY, tuning=TuningConfig()), s) for s in seeds]
    kept = continued(arms, *studies)
    runs = plan.runs(studies[-1], arms, lambda run: None, kept)
    assert [run.config.trials.seeds for run in runs] == 2 * stacks
    assert len({run.id for run in runs}) == len(runs)
    assert {dataclasses.replace(run.config.trials, seeds=()) for run in runs} == {
        dataclasses.replace(STUDY.base.trials, seeds=())
    }
    # What a directory holds of the same study is no other history.
    assert (kept == plan.history(studies[-1])) == (len(seeds) == 1)
    assert continued(arms, *studies, studies[-1]) == kept


@pytest.mark.parametrize(
    ('declared', 'by_look'),
    [
        ([((0, 1, 2), ()), ((0, 1, 2, 3), ())], [[(0, 1, 2), (3,)]]),
        ([((0, 1, 2), ()), ((0, 1, 2, 3), (3, 4))], [[(0, 1, 2)], [(3,)]]),
        ([((0, 1, 2), (2, 3)), ((0, 1, 2, 3), (2, 4))], [[(0, 1)], [(2,), (3,)]]),
        ([((0, 1, 2), (2, 3)), ((0, 1, 2), ())], [[(0, 1), (2,)]]),
        # A run is of one look.
        ([((0, 1, 2), ()), ((0, 1, 2, 3), (2, 4))], [[(0, 1)], [(2, 3)]]),
    ],
)
def test_seeds_that_are_added_are_of_the_looks_that_are_declared(arms, declared, by_look):
    studies = [with_seeds(STUDY, *seeds) for seeds in declared]
    kept, results = continued(arms, *studies), landscape(2e-3)
    for look, stacks in enumerate(by_look):
        waiting = {stack for later in by_look[look:] for stack in later}

        def until(run, waiting=waiting):
            return None if run.config.trials.seeds in waiting else results(run)

        runs = plan.runs(studies[-1], arms, until, kept)
        seeds = [run.config.trials.seeds for run in runs if run.stage == 'verdict']
        assert seeds[: 2 * len(by_look[0])] == 2 * by_look[0]
        assert seeds[-2 * len(stacks) :] == 2 * stacks


def test_the_margin_and_seeds_of_the_beginning_decide_what_is_trained_longer():
    def effect(run, seed):
        """The difference that is clear with three seeds drowns in that of a fourth."""
        return better_without_w_q(run, seed) + 40 * (
            seed == 3 and run.config.model.score == 'query_free'
        )

    def longer(study, kept=None):
        runs = of_control(plan.runs(study, arms, results, kept), 'longer')
        return {run.arm.label for run in runs}

    results = landscape(2.5e-3, effect=effect)
    study = with_controls(variants=('qk/vo', 'shared_qk/vo', 'query_free/vo'))
    wider, more = dataclasses.replace(study, margin=100.0), with_seeds(study, (0, 1, 2, 3))
    arms = build_arms(study)
    before = {run.id for run in plan.runs(study, arms, results)}
    decided = {'qk/vo', 'query_free/vo'}
    assert (longer(study), longer(wider), longer(more)) == (decided, set(study.variants), set())
    # Of all arms, two controls of equal shape among them, and of the two that are trained longer.
    for other, further in ((wider, []), (more, 7 * [('verdict', (3,))])):
        kept = continued(arms, study, other)
        runs = plan.runs(other, arms, results, kept)
        assert before <= {run.id for run in runs} and longer(other, kept) == decided
        new = [run for run in runs if run.id not in before]
        assert [(run.stage, run.config.trials.seeds) for run in new] == further
    # Without the seeds of the beginning, those that are declared decide.
    other = with_seeds(study, (2, 3, 4))
    assert not longer(other, continued(arms, study, other))
