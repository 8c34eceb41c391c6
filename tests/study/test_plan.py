"""The chain of runs of an arm: what is known grows with the results, and never otherwise."""

import dataclasses
import json
import math

import pytest

from qkattn.config import (
    Config,
    ModelConfig,
    OptimizerConfig,
    Study,
    TrialsConfig,
    TuningConfig,
    fingerprint,
)
from qkattn.study import plan
from qkattn.study.arms import build_arms

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
    tuning=TuningConfig(seeds=(10, 11), max_points=6),
)


def landscape(optimum: float, scale: float = 1.0, diverged=lambda trial: False):
    """Results whose loss is a parabola in ln(learning rate), with a level per seed.

    Diverged trials have losses that would be the best.
    """

    def results(run):
        found = []
        for trial in run.config.trials.trials():
            away = math.log(trial['learning_rate'] / optimum)
            away += math.log(run.config.model.score_scale / scale) / 2
            away += math.log(trial['weight_decay'] / 0.1) / 4
            loss = 2 + 0.01 * trial['seed'] + 0.1 * away**2
            ended = ('diverged', 0.0) if diverged(trial) else ('finished', loss)
            found.append({'trial': trial} | dict(zip(('status', 'val_loss'), ended, strict=True)))
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
    *screening, last = plan.chain(STUDY, arms[0], results)
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
    runs = list(plan.chain(wanted, build_arms(wanted)[0], landscape(2e-3, scale=1.1)))
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


def test_the_lines_of_the_plan_describe_its_runs(arms):
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
    declared = plan.declaration(STUDY, arms, ['python', '-m', 'x'])
    assert declared['arms'][1]['variant'] == 'shared_qk/vo'
    assert declared['tuning']['learning_rates'] == GRID
    assert declared['seeds'] == (0, 1, 2) and declared['command'] == 'python -m x'
