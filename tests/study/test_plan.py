"""The runs of a study: what is known grows with the results, and never otherwise."""

import dataclasses
import itertools
import math
import re
import shlex
import sys
from unittest.mock import Mock

import numpy as np
import pytest
from jax.errors import JaxRuntimeError

from qkattn.config import Config, ControlsConfig, Study, TuningConfig, from_json
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.stats.sweep import Sweep
from qkattn.study import declaration, plan
from qkattn.study.arms import build_arms
from qkattn.study.tuning import KNOBS, tune

TRIALS = {'seeds': (0, 1, 2), 'learning_rates': (1e-3, 2e-3, 4e-3), 'weight_decays': (0.1,)}
MODEL = {'num_layers': 1, 'context': 16}
STUDY = Study(
    name='small',
    base=from_json(Config, {'model': MODEL, 'optimizer': {'decay': 'coupled'}, 'trials': TRIALS}),
    variants=('qk/vo', 'shared_qk/vo'),
    sizes=('d_model=32',),
    tolerance=1e-2,
    tuning=TuningConfig(seeds=(10, 11), max_points=6, max_seeds=2),
    controls=ControlsConfig(equal_shape=False, longer=None),
)
GRID = (1e-3, 2e-3, 4e-3)


def study_with(study=STUDY, **fields):
    """STUDY, or another one, with these fields; `trials={...}` changes fields of a section."""
    base = study.base
    for part in vars(base).keys() & fields.keys():
        values = dataclasses.replace(getattr(base, part), **fields.pop(part))
        base = dataclasses.replace(base, **{part: values})
    return dataclasses.replace(study, base=base, **fields)


@pytest.fixture(scope='module')
def arms():
    return build_arms(STUDY)


def no_results(run):
    """No run has results."""


def parabola_results(optimum, effect=lambda run, trial: 0.0):
    """A function from a run to results whose loss is a parabola in ln(learning rate).

    A seed adds 0.01 times its number. `effect` of a run and a trial is added to the test loss;
    where it is None, the trial diverges, with losses of 0 that must not be taken for the best.
    """

    def results(run):
        trials = []
        for trial in run.config.trials.trials():
            distance = math.log(trial['learning_rate'] / optimum)
            loss = 2 + 0.01 * trial['seed'] + 0.1 * distance**2
            change = effect(run, trial)
            if change is None:
                fields = {'status': 'diverged', 'val_loss': 0.0, 'test_loss': 0.0}
            else:
                fields = {'status': 'finished', 'val_loss': loss, 'test_loss': loss + change}
            trials.append({'trial': trial, **fields})
        return trials

    return results


def one_diverges(run, trial):
    diverges = trial['seed'] == 11 and trial['learning_rate'] == 4e-3
    return None if diverges else 0.0


@pytest.mark.parametrize(
    ('results', 'rates'),
    [
        (no_results, [GRID]),
        (parabola_results(2.3e-3), [GRID, (0.0023,)]),
        (parabola_results(7e-3), [GRID, (8e-3,), (1.6e-2,), (0.007,)]),  # the grid is extended
        (
            parabola_results(1e-6),
            [GRID, (5e-4,), (2.5e-4,), (1.25e-4,), (1.25e-4,)],
        ),  # to max_points
        (parabola_results(7e-3, one_diverges), [GRID, (2e-3,)]),  # of two seeds, at the last value
    ],
    ids=['unfinished', 'bracketed', 'extended', 'bounded', 'diverged'],
)
def test_an_arm_is_screened_until_bracketed_then_judged_on_fresh_seeds(arms, results, rates):
    runs = plan.runs(STUDY, arms[:1], results)
    assert [run.config.trials.learning_rates for run in runs] == rates
    screening = ('screening', (10, 11))
    stages = [(run.stage, run.config.trials.seeds) for run in runs]
    if len(runs) == 1:
        assert stages == [screening]
    else:
        assert stages == [screening] * (len(runs) - 1) + [('verdict', (0, 1, 2))]
    assert runs[-1].config.model == arms[0].model


def declaration_of_command(monkeypatch, arms, typed):
    """The declaration of the study by a command with these arguments."""
    monkeypatch.setattr(sys, 'orig_argv', ['/bin/python3', *typed])
    return declaration.content(STUDY, arms)


def test_the_declared_command_names_no_directory_of_the_machine(arms, monkeypatch):
    typed = ['/home/ann/ablate.py', '--workdir=/home/ann/runs/a b']
    command = declaration_of_command(monkeypatch, arms, typed)['command']
    assert shlex.split(command) == ['python', 'ablate.py', '--workdir=a b']


def test_a_shell_reads_the_declared_command_as_it_was_typed(arms, monkeypatch):
    typed = ['-m', 'experiments.ablate', '--config.variants=("qk/vo", "qk/no_v")']
    command = declaration_of_command(monkeypatch, arms, typed)['command']
    assert shlex.split(command) == ['python', *typed]


def test_a_declaration_has_every_tuned_grid(arms):
    assert declaration.content(STUDY, arms)['tuning']['learning_rates'] == [*GRID]


def test_a_declaration_has_the_looks_that_earlier_versions_hash(arms):
    assert declaration.content(STUDY, arms)['looks'] == [3]
    untuned = study_with(tuning=TuningConfig())
    assert declaration.content(untuned, arms)['looks'] == []


def test_an_untuned_study_has_a_single_run_of_each_arm(arms):
    runs = plan.runs(study_with(tuning=TuningConfig()), arms, no_results)
    assert [run.arm for run in runs] == arms
    single = runs[0]
    assert single.stage == 'single'
    assert single.config.trials == STUDY.base.trials
    assert single.directory == f'runs/qk-vo-d_model=32-{single.id}'


def better_without_w_q(run, trial):
    """Test losses: one variant is better by 0.5 with little noise, the others by nothing."""
    noise = 0.02 * math.sin(trial['seed'] + 10 * len(run.arm.key.variant))
    return noise - 0.5 * (run.config.model.score == 'query_free')


DECIDING = parabola_results(2.5e-3, better_without_w_q)


def longer_runs_of(runs):
    return [run for run in runs if run.arm.key.control == 'longer']


@pytest.fixture(scope='module')
def controlled_study():
    """A study of three arms with controls at the same shape and of longer training."""
    variants = ('qk/vo', 'shared_qk/vo', 'query_free/vo')
    return study_with(variants=variants, controls=ControlsConfig(), sizes=('d_model=64',))


@pytest.fixture(scope='module')
def controlled_arms(controlled_study):
    return build_arms(controlled_study)


@pytest.fixture(scope='module')
def decided_plan(controlled_study, controlled_arms):
    return plan.runs(controlled_study, controlled_arms, DECIDING)


def test_decided_arms_are_trained_longer_beside_the_baseline(decided_plan):
    longer_runs = longer_runs_of(decided_plan)
    assert decided_plan[-len(longer_runs) :] == longer_runs
    verdicts = [run.arm.key.variant for run in longer_runs if run.stage == 'verdict']
    assert verdicts == ['qk/vo', 'query_free/vo']  # the third is like the baseline


def test_longer_training_has_a_learning_rate_of_its_own(decided_plan):
    verdict = next(run for run in decided_plan if run.stage == 'verdict')
    (chosen,) = verdict.config.trials.learning_rates
    around = pytest.approx((chosen / 2, chosen, chosen * 2))
    assert longer_runs_of(decided_plan)[0].config.trials.learning_rates == around


def test_longer_training_multiplies_steps_alone(decided_plan):
    steps = {'num_steps': 4000, 'eval_every': 400, 'checkpoint_every': 400}
    for run in longer_runs_of(decided_plan):
        assert run.config.train == dataclasses.replace(STUDY.base.train, **steps)
        assert run.config.optimizer.warmup_steps == 4 * STUDY.base.optimizer.warmup_steps
        assert run.config.trials.seeds == ((0, 1, 2) if run.stage == 'verdict' else (10, 11))
        assert run.config.model == run.arm.model


def test_longer_training_may_have_verdict_seeds_of_its_own(controlled_study, controlled_arms):
    controls = ControlsConfig(longer_seeds=(5, 6, 7))
    study = dataclasses.replace(controlled_study, controls=controls)
    runs = longer_runs_of(plan.runs(study, controlled_arms, DECIDING))
    assert {run.config.trials.seeds for run in runs} == {(10, 11), (5, 6, 7)}


NOISE = (0.010, -0.012, 0.004, -0.008, 0.011, -0.005)


@pytest.mark.parametrize(
    # The difference, seeds that diverge, the number of sizes, and of arms trained longer.
    ('change', 'diverged', 'sizes', 'number'),
    [
        # The difference of 0.0125 has p = 0.03 against zero; corrected for 3 arms it is undecided.
        (0.0125, (), 1, 2),
        (0.0125, (), 3, 0),
        (-0.2, (1,), 1, 0),
        (-0.2, range(6), 1, 0),
    ],
)
def test_a_difference_is_decided_after_correction_for_all_arms_and_sizes(
    change, diverged, sizes, number
):
    """At other sizes than the first, seeds differ too much for any decision."""

    def effect(run, trial):
        seed = trial['seed']
        if seed > 5 or run.arm.variant == 'qk/vo':
            return 0.0
        if run.arm.key.size != 'd_model=64':
            return 3.0 * (-1) ** seed
        return None if seed in diverged else change + NOISE[seed]

    sizes = ('d_model=64', 'd_model=72', 'd_model=80')[:sizes]
    controls = ControlsConfig(equal_shape=False)
    study = study_with(trials={'seeds': tuple(range(6))}, sizes=sizes, controls=controls)
    runs = longer_runs_of(plan.runs(study, build_arms(study), parabola_results(2.5e-3, effect)))
    assert len({run.arm.key for run in runs}) == number


def test_the_plan_does_not_depend_on_the_order_in_which_runs_finish(
    controlled_study, controlled_arms
):
    arms = [arm for arm in controlled_arms if arm.variant != 'shared_qk/vo']

    def final_plan(index):
        """The plan after all runs, of which always the one at `index` of those left finishes."""
        results_by_id = {}

        def runs_so_far():
            return plan.runs(controlled_study, arms, lambda run: results_by_id.get(run.id))

        while left := [run for run in runs_so_far() if run.id not in results_by_id]:
            run = left[index]
            results_by_id[run.id] = DECIDING(run)
        return runs_so_far()

    # Always the first of the runs that are left finishes, or always the last.
    expected = plan.runs(controlled_study, arms, DECIDING)
    assert final_plan(0) == expected
    assert final_plan(-1) == expected


@dataclasses.dataclass
class Screening:
    """A finished screening: the sweep, all losses, and the measurements that `tune` asked for."""

    sweep: Sweep
    measured: dict  # losses by settings and seed
    asked: list  # (values, seeds) in order


def screen(limits, sd, diverged=lambda rate, seed: False):
    """Measures what `tune` asks for, with noise of this deviation, until it asks for nothing."""
    grids = dict.fromkeys(KNOBS, (1.0,)) | {'learning_rate': GRID}
    measured = {}
    asked = []
    while (tuning := tune(grids, limits, measured, 'coupled')).knob:
        asked.append((tuning.values, tuning.seeds))
        for value, seed in itertools.product(tuning.values, tuning.seeds):
            losses = measured.setdefault(tuning.at(value), {})
            assert seed not in losses  # nothing is measured twice
            noise = sd * np.random.default_rng([seed, round(1e7 * value)]).normal()
            loss = 2 + 0.11 * seed + 0.1 * math.log(value / 2.2e-3) ** 2 + noise
            losses[seed] = None if diverged(value, seed) else loss
    # More measurements than asked for change nothing.
    other = {(5e-3, *tuning.settings[1:]): {10: 0.0, 11: 0.0}}
    assert tune(grids, limits, measured | other, 'coupled') == tuning
    return Screening(tuning.sweeps['learning_rate'], measured, asked)


LIMITS = TuningConfig(seeds=(10, 11), max_points=5, max_seeds=12)


def test_a_significant_bracket_takes_the_first_seeds_alone():
    screening = screen(LIMITS, sd=1e-4)
    assert screening.asked == [(GRID, (10, 11))]
    assert screening.sweep.chosen == pytest.approx(2.2e-3, rel=1e-2)


def test_further_seeds_are_drawn_until_the_bracket_is_significant():
    screening = screen(LIMITS, sd=0.08)
    drawn = [seeds for _, seeds in screening.asked]
    assert drawn[0] == (10, 11)
    assert (12, 13) in drawn
    assert drawn[-1][-1] < 21
    assert screening.sweep.bracketed
    assert screening.sweep.optimum_low
    # All values of the grid get them, so that a seed's level cancels.
    every_seed = tuple(range(10, drawn[-1][-1] + 1))
    assert {tuple(losses) for losses in screening.measured.values()} == {every_seed}


def test_further_seeds_are_drawn_while_a_loss_may_lie_too_far_above_its_optimum():
    bound = screen(LIMITS, sd=0.01).sweep.at_worst / 2
    limits = dataclasses.replace(LIMITS, max_excess=bound, max_seeds=16)
    screening = screen(limits, sd=0.01)
    assert len(screening.asked) > 1
    assert screening.sweep.at_worst <= bound


def test_a_value_at_which_a_seed_diverged_gets_no_further_seeds():
    limits = dataclasses.replace(LIMITS, max_seeds=6)
    screening = screen(limits, 0.1, lambda rate, seed: rate > 3e-3 and seed == 11)
    num_seeds = {settings[0]: len(losses) for settings, losses in screening.measured.items()}
    assert {rate: number for rate, number in num_seeds.items() if rate > 3e-3} == {4e-3: 2}
    assert max(num_seeds.values()) > 2


@pytest.fixture(scope='module')
def costly_study():
    """A tuned study of two arms at two sizes, each also trained longer."""
    return study_with(
        sizes=('d_model=32', 'd_model=64'),
        controls=ControlsConfig(equal_shape=False),
        optimizer={'warmup_steps': 10},
        train={'num_steps': 100, 'batch_size': 4},
    )


@pytest.fixture(scope='module')
def costly_arms(costly_study):
    return build_arms(costly_study)


def test_the_least_cost_of_a_plan_supposes_every_optimum_inside_its_grid(costly_study, costly_arms):
    runs = plan.fewest_runs(costly_study, costly_arms)
    assert {run.config.trials.learning_rates for run in runs} == {GRID, (2e-3,)}
    # Of each of 4 arms: 2 seeds at 3 rates, then 3 seeds at one; then the same with 4 x the steps.
    tokens = 9 * 5 * 100 * 4 * 16
    work = sum(tokens * 3 * cost.flops_per_token(arm.model) for arm in costly_arms)
    assert plan.cost(runs) == (16, 72, 4 * tokens, pytest.approx(work))


def estimated_tables(study, arms, **options):
    """The lines of the table by arm, and those of the table by stage with its notes."""
    tables = plan.estimate(study, arms, **options).split('\n\n')
    return [[' '.join(line.split()) for line in table.splitlines()] for table in tables]


def test_a_plan_is_counted_by_arm_and_by_stage_without_a_measurement(
    costly_study, costly_arms, monkeypatch
):
    monkeypatch.setattr(plan.program, 'warm_up', lambda _: pytest.fail('it measures'))
    by_arm, by_stage = estimated_tables(costly_study, costly_arms)

    # 9 trials take 100 steps of 4 rows of 16 tokens; training costs 3 forward passes.
    tokens = 9 * 100 * 4 * 16
    flops = 3 * cost.flops_per_token(costly_arms[0].model) * tokens
    assert by_arm[2] == f'qk/vo d_model=32 2 9 {tokens:.3g} {flops:.3g}'

    # Two sizes, and the longer runs of each; then the total.
    assert [line.partition(' d_model')[0] for line in by_arm[2:]] == [
        *(['qk/vo', 'shared_qk/vo'] * 2),
        *(['qk/vo (longer)', 'shared_qk/vo (longer)'] * 2),
        by_arm[-1],
    ]
    assert by_stage[0] == 'stage runs trials tokens FLOPs'
    assert by_arm[-1] == by_stage[-2]
    assert by_stage[-1].startswith('lower bounds')
    assert sum(int(line.split()[-3]) for line in by_arm[2:-1]) == 72


def test_the_time_of_a_plan_is_measured_once_a_size_on_the_baseline(
    costly_study, costly_arms, monkeypatch
):
    measured = []

    def warm_up(config):
        """A step of a stack takes a second, compilation a minute."""
        measured.append((config.model.score, config.model.d_model))
        return 1.0, 60.0

    monkeypatch.setattr(plan.program, 'warm_up', warm_up)
    _, shown = estimated_tables(costly_study, costly_arms, measure=True)

    # Only the baseline qk is measured, at both widths.
    assert measured == [('qk', 32), ('qk', 64)]
    assert shown[4].startswith('longer, if every arm is decided 8 36')
    assert shown[5].startswith('total 16 72')
    assert ' 1:0' in shown[5]


@pytest.mark.parametrize(
    'error', [ConfigError('it needs 200 GiB'), JaxRuntimeError('RESOURCE_EXHAUSTED: it')]
)
def test_a_machine_that_cannot_train_a_plan_gives_its_cost_without_time(
    costly_study, costly_arms, monkeypatch, error
):
    monkeypatch.setattr(plan.program, 'warm_up', Mock(side_effect=error))
    _, shown = estimated_tables(costly_study, costly_arms, measure=True)
    assert shown[5].startswith('total 16 72')
    assert shown[5].endswith(' -')
    assert re.match('no time, as this machine cannot train it: .*it', shown[6])


def test_a_bug_in_the_warm_up_of_a_plan_is_raised(costly_study, costly_arms, monkeypatch):
    monkeypatch.setattr(plan.program, 'warm_up', Mock(side_effect=JaxRuntimeError('a bug')))
    with pytest.raises(JaxRuntimeError, match='a bug'):
        plan.estimate(costly_study, costly_arms, measure=True)
