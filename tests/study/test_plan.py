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


def changed(study=STUDY, **fields):
    """The study with other fields, or other fields in the parts of its base."""
    base = study.base
    for part in vars(base).keys() & fields.keys():
        values = dataclasses.replace(getattr(base, part), **fields.pop(part))
        base = dataclasses.replace(base, **{part: values})
    return dataclasses.replace(study, base=base, **fields)


@pytest.fixture(scope='module')
def arms():
    return build_arms(STUDY)


def unfinished(run):
    """No run has results."""


def landscape(optimum, effect=lambda run, trial: 0.0):
    """Results whose loss is a parabola in ln(learning rate), with a level per seed.

    The test loss is larger by the effect of a run and trial, None of one that diverges, which has
    losses that would be the best.
    """

    def results(run):
        trials = []
        for trial in run.config.trials.trials():
            away = math.log(trial['learning_rate'] / optimum)
            loss, change = 2 + 0.01 * trial['seed'] + 0.1 * away**2, effect(run, trial)
            fields = {'status': 'diverged', 'val_loss': 0.0, 'test_loss': 0.0}
            if change is not None:
                fields = {'status': 'finished', 'val_loss': loss, 'test_loss': loss + change}
            trials.append({'trial': trial} | fields)
        return trials

    return results


def one_diverges(run, trial):
    return None if (trial['seed'], trial['learning_rate']) == (11, 4e-3) else 0.0


@pytest.mark.parametrize(
    ('results', 'rates'),
    [
        (unfinished, [GRID]),
        (landscape(2.3e-3), [GRID, (0.0023,)]),
        (landscape(7e-3), [GRID, (8e-3,), (1.6e-2,), (0.007,)]),  # the grid is extended
        (landscape(1e-6), [GRID, (5e-4,), (2.5e-4,), (1.25e-4,), (1.25e-4,)]),  # to max_points
        (landscape(7e-3, one_diverges), [GRID, (2e-3,)]),  # of two seeds, at the last value
    ],
    ids=['unfinished', 'bracketed', 'extended', 'bounded', 'diverged'],
)
def test_an_arm_is_screened_until_bracketed_then_judged_on_fresh_seeds(arms, results, rates):
    *screening, last = runs = plan.runs(STUDY, arms[:1], results)
    assert [run.config.trials.learning_rates for run in runs] == rates
    assert {(run.stage, run.config.trials.seeds) for run in screening} <= {('screening', (10, 11))}
    expected = ('verdict', (0, 1, 2)) if screening else ('screening', (10, 11))
    assert (last.stage, last.config.trials.seeds) == expected
    assert last.config.model == arms[0].model


def test_the_declared_command_names_no_directory_of_the_machine(arms, monkeypatch):
    typed = ['/home/ann/ablate.py', '--workdir=/home/ann/runs/a b']
    monkeypatch.setattr(sys, 'orig_argv', ['/bin/python3', *typed])
    command = declaration.content(STUDY, arms)['command']
    assert shlex.split(command) == ['python', 'ablate.py', '--workdir=a b']


def test_the_declaration_of_a_study_and_the_run_of_an_untuned_one(arms, monkeypatch):
    typed = ['-m', 'experiments.ablate', '--config.variants=("qk/vo", "qk/no_v")']
    monkeypatch.setattr(sys, 'orig_argv', ['/bin/python3', *typed])
    declared = declaration.content(STUDY, arms)
    assert shlex.split(declared['command']) == ['python', *typed]  # a shell reads it as it was
    # Ledgers of earlier versions hold the hash of a declaration that has the looks of the study.
    assert declared['tuning']['learning_rates'] == [*GRID] and declared['looks'] == [3]
    untuned = changed(tuning=TuningConfig())
    assert declaration.content(untuned, arms)['looks'] == []
    (single, _) = plan.runs(untuned, arms, unfinished)
    assert single.stage == 'single' and single.config.trials == STUDY.base.trials
    assert single.directory == f'runs/qk-vo-d_model=32-{single.id}'


def better_without_w_q(run, trial):
    """Test losses: one variant is better by 0.5 with little noise, the others by nothing."""
    noise = 0.02 * math.sin(trial['seed'] + 10 * len(run.arm.key.variant))
    return noise - 0.5 * (run.config.model.score == 'query_free')


DECIDING = landscape(2.5e-3, better_without_w_q)


def longer(runs):
    return [run for run in runs if run.arm.key.control == 'longer']


@pytest.fixture(scope='module')
def study():
    """One of three arms with controls, and its arms."""
    variants = ('qk/vo', 'shared_qk/vo', 'query_free/vo')
    study = changed(variants=variants, controls=ControlsConfig(), sizes=('d_model=64',))
    return study, build_arms(study)


def test_decided_arms_and_the_baseline_are_trained_longer_at_a_rate_of_their_own(study):
    study, study_arms = study
    runs = plan.runs(study, study_arms, DECIDING)
    made = longer(runs)
    assert runs[-len(made) :] == made
    verdicts = [run.arm.key.variant for run in made if run.stage == 'verdict']
    assert verdicts == ['qk/vo', 'query_free/vo']  # the third is like the baseline
    (chosen,) = next(run for run in runs if run.stage == 'verdict').config.trials.learning_rates
    around = pytest.approx((chosen / 2, chosen, chosen * 2))
    assert made[0].config.trials.learning_rates == around
    times = {'num_steps': 4000, 'eval_every': 400, 'checkpoint_every': 400}
    other = dataclasses.replace(study, controls=ControlsConfig(longer_seeds=(5, 6, 7)))
    alone = longer(plan.runs(other, study_arms, DECIDING))
    assert {run.config.trials.seeds for run in alone} == {(10, 11), (5, 6, 7)}
    for run in made:
        assert run.config.train == dataclasses.replace(STUDY.base.train, **times)
        assert run.config.optimizer.warmup_steps == 4 * STUDY.base.optimizer.warmup_steps
        assert run.config.trials.seeds == ((0, 1, 2) if run.stage == 'verdict' else (10, 11))
        assert run.config.model == run.arm.model


NOISE = (0.010, -0.012, 0.004, -0.008, 0.011, -0.005)


@pytest.mark.parametrize(
    ('change', 'diverged', 'sizes', 'number'),
    [
        # The difference of 0.0125 has p = 0.03 against zero; corrected for 3 arms it is undecided.
        (0.0125, (), 1, 2),
        (0.0125, (), 3, 0),
        (-0.2, (1,), 1, 0),
        (-0.2, range(6), 1, 0),
    ],
)
def test_what_is_decided_is_corrected_for_the_whole_study(change, diverged, sizes, number):
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
    study = changed(trials={'seeds': tuple(range(6))}, sizes=sizes, controls=controls)
    runs = longer(plan.runs(study, build_arms(study), landscape(2.5e-3, effect)))
    assert len({run.arm.key for run in runs}) == number


def test_the_plan_does_not_depend_on_the_order_in_which_runs_finish(study):
    study, arms = study
    arms = [arm for arm in arms if arm.variant != 'shared_qk/vo']

    def planned(pick):
        done = {}

        def known():
            return plan.runs(study, arms, lambda run: done.get(run.id))

        while left := [run for run in known() if run.id not in done]:
            done[left[pick].id] = DECIDING(left[pick])
        return known()

    assert planned(0) == planned(-1) == plan.runs(study, arms, DECIDING)


def tuned(limits, sd, diverged=lambda rate, seed: False):
    """Measures what is asked for until nothing is: the sweep, its measurements, what was asked."""
    grids = dict.fromkeys(KNOBS, (1.0,)) | {'learning_rate': GRID}
    measured, asked = {}, []
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
    return tuning.sweeps['learning_rate'], measured, asked


def test_further_seeds_are_drawn_until_the_bracket_is_significant():
    limits = TuningConfig(seeds=(10, 11), max_points=5, max_seeds=12)
    sweep, _, asked = tuned(limits, 1e-4)
    assert asked == [(GRID, (10, 11))] and sweep.chosen == pytest.approx(2.2e-3, rel=1e-2)
    sweep, measured, asked = tuned(limits, 0.08)
    drawn = [seeds for _, seeds in asked]
    assert drawn[0] == (10, 11) and (12, 13) in drawn and drawn[-1][-1] < 21
    assert sweep.bracketed and sweep.optimum_low
    # All values of the grid get them, so that a seed's level cancels.
    assert {tuple(losses) for losses in measured.values()} == {tuple(range(10, drawn[-1][-1] + 1))}
    # The same for a loss that may lie too far above the optimum.
    bound = tuned(limits, 0.01)[0].at_worst / 2
    bounded = dataclasses.replace(limits, max_excess=bound, max_seeds=16)
    sweep, _, asked = tuned(bounded, 0.01)
    assert len(asked) > 1 and sweep.at_worst <= bound
    # A value at which a seed diverged gets no further seeds.
    limited = dataclasses.replace(limits, max_seeds=6)
    _, measured, _ = tuned(limited, 0.1, lambda rate, seed: rate > 3e-3 and seed == 11)
    seeds = {at[0]: len(losses) for at, losses in measured.items()}
    assert {rate: n for rate, n in seeds.items() if rate > 3e-3} == {4e-3: 2}
    assert max(seeds.values()) > 2


def test_the_least_cost_is_that_of_the_plan_with_every_optimum_in_the_middle(monkeypatch):
    train, controls = {'num_steps': 100, 'batch_size': 4}, ControlsConfig(equal_shape=False)
    fields = {'sizes': ('d_model=32', 'd_model=64'), 'controls': controls}
    study = changed(optimizer={'warmup_steps': 10}, train=train, **fields)
    arms, measured = build_arms(study), []
    runs = plan.imagined(study, arms)
    assert {run.config.trials.learning_rates for run in runs} == {GRID, (2e-3,)}
    # Of each of 4 arms: 2 seeds at 3 rates, then 3 seeds at one; then the same with 4 x the steps.
    tokens = 9 * 5 * 100 * 4 * 16
    work = sum(tokens * 3 * cost.flops_per_token(arm.model) for arm in arms)
    assert plan.cost(runs) == (16, 72, 4 * tokens, pytest.approx(work))

    def warm_up(config):
        """A step of a stack takes a second, compilation a minute."""
        measured.append((config.model.score, config.model.d_model))
        return 1.0, 60.0

    monkeypatch.setattr(plan.program, 'warm_up', warm_up)
    shown = [' '.join(line.split()) for line in plan.estimate(study, arms).splitlines()]
    assert measured == [('qk', 32), ('qk', 64)]
    assert shown[4].startswith('longer, if every arm is decided 8 36')
    assert shown[5].startswith('total 16 72') and ' 1:0' in shown[5]

    for error in (ConfigError('it needs 200 GiB'), JaxRuntimeError('RESOURCE_EXHAUSTED: it')):
        monkeypatch.setattr(plan.program, 'warm_up', Mock(side_effect=error))
        shown = [' '.join(line.split()) for line in plan.estimate(study, arms).splitlines()]
        assert shown[5].startswith('total 16 72') and shown[5].endswith(' -')
        assert re.match('no time, as this machine cannot train it: .*it', shown[6])
    monkeypatch.setattr(plan.program, 'warm_up', Mock(side_effect=JaxRuntimeError('a bug')))
    with pytest.raises(JaxRuntimeError, match='a bug'):
        plan.estimate(study, arms)
