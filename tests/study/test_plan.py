"""The chain of runs of an arm: what is known grows with the results, and never otherwise."""

import dataclasses
import json
import math

import pytest

from qkattn.config import Config, ModelConfig, Study, TrialsConfig, TuningConfig, fingerprint
from qkattn.study import plan
from qkattn.study.arms import build_arms

STUDY = Study(
    name='small',
    base=Config(
        model=ModelConfig(num_layers=1, context=16),
        trials=TrialsConfig(seeds=(0, 1, 2), learning_rates=(1e-3, 2e-3, 4e-3)),
    ),
    variants=('qk/vo', 'shared_qk/vo'),
    sizes=('d_model=32',),
    tolerance=1e-2,
    tuning=TuningConfig(seeds=(10, 11), max_points=6),
)


def landscape(optimum: float, scale: float = 1.0):
    """Results whose loss is a parabola in ln(learning rate), with a level per seed."""

    def results(run):
        found = []
        for trial in run.config.trials.trials():
            away = math.log(trial['learning_rate'] / optimum)
            away += math.log(run.config.model.score_scale / scale) / 2
            away += math.log(trial['weight_decay'] / 0.1) / 4
            loss = 2 + 0.01 * trial['seed'] + 0.1 * away**2
            found.append({'trial': trial, 'status': 'finished', 'val_loss': loss})
        return found

    return results


def stages(runs):
    return [(c.stage, c.knob, c.config.trials.learning_rates) for c in runs]


@pytest.fixture(scope='module')
def arms():
    return build_arms(STUDY)


def test_nothing_is_known_beyond_what_is_unfinished(arms):
    runs = plan.runs(STUDY, arms, lambda run: None)
    assert stages(runs) == 2 * [('screening', 'learning_rate', (1e-3, 2e-3, 4e-3))]
    assert {c.config.trials.seeds for c in runs} == {(10, 11)}
    assert len({c.id for c in runs}) == len({c.directory for c in runs}) == 2


def test_a_bracketed_arm_gets_its_verdict_on_fresh_seeds_at_the_optimum(arms):
    runs = list(plan.chain(STUDY, arms[0], landscape(2.3e-3)))
    assert [c.stage for c in runs] == ['screening', 'verdict']
    assert runs[1].config.trials.seeds == (0, 1, 2)
    assert runs[1].config.trials.learning_rates == (0.0023,)
    assert runs[1].config.model == arms[0].model


def test_a_grid_is_extended_until_it_is_bracketed(arms):
    runs = list(plan.chain(STUDY, arms[0], landscape(7e-3)))
    assert stages(runs)[:3] == [
        ('screening', 'learning_rate', (1e-3, 2e-3, 4e-3)),
        ('screening', 'learning_rate', (8e-3,)),
        ('screening', 'learning_rate', (1.6e-2,)),
    ]
    assert [c.stage for c in runs[3:]] == ['verdict']
    assert runs[3].config.trials.learning_rates == pytest.approx((7e-3,), rel=1e-2)


def test_the_extension_is_bounded(arms):
    runs = list(plan.chain(STUDY, arms[0], landscape(1e-6)))
    tried = [rate for c in runs[:-1] for rate in c.config.trials.learning_rates]
    assert len(tried) == STUDY.tuning.max_points
    assert runs[-1].stage == 'verdict'
    assert runs[-1].config.trials.learning_rates == (min(tried),)


def test_weight_decay_and_score_scale_are_tuned_one_after_the_other(arms):
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
    assert decay == pytest.approx(0.1, rel=2e-2) and scale == pytest.approx(1.0, rel=2e-2)


def test_a_diverged_trial_counts_as_worse(arms):
    def results(run):
        found = landscape(7e-3)(run)
        for trial in found:
            if trial['trial']['learning_rate'] > 3e-3 and trial['trial']['seed'] == 11:
                trial |= {'status': 'diverged', 'val_loss': None}
        return found

    runs = list(plan.chain(STUDY, arms[0], results))
    assert [c.stage for c in runs] == ['screening', 'verdict']
    assert runs[1].config.trials.learning_rates[0] <= 2e-3


def test_without_tuning_every_combination_is_one_run(arms):
    single = dataclasses.replace(STUDY, tuning=TuningConfig())
    runs = plan.runs(single, arms, lambda run: None)
    assert [c.stage for c in runs] == ['single', 'single']
    assert runs[0].config.trials == STUDY.base.trials
    assert runs[0].directory == f'runs/qk-vo-d_model=32-{runs[0].id}'


def test_the_least_holds_every_grid_and_one_verdict_per_arm(arms):
    runs = plan.least(STUDY, arms)
    assert [c.stage for c in runs] == 2 * ['screening', 'verdict']
    assert runs[0].tokens == 6 * 1000 * 16 * 16


def test_the_lines_of_the_plan_say_what_a_cell_is(arms):
    runs = plan.runs(STUDY, arms, landscape(2e-3))
    lines = [json.loads(line) for line in plan.lines(STUDY, runs).splitlines()]
    assert [line['run'] for line in lines] == [c.id for c in runs]
    assert [line['stage'] for line in lines] == 2 * ['screening', 'verdict']
    for line, run in zip(lines, runs, strict=True):
        assert line['config']['model']['score'] == run.config.model.score
        assert line['run'] == fingerprint(run.config) and line['trials'] in (3, 6)
        assert line['residual'] == run.arm.match.residual
    declared = plan.declaration(STUDY, arms, ['python', '-m', 'x'])
    assert declared['arms'][1] == {'variant': 'shared_qk/vo', 'size': 'd_model=32'}
    assert declared['tuning']['learning_rates'] == (1e-3, 2e-3, 4e-3)
    assert declared['seeds'] == (0, 1, 2) and declared['command'] == 'python -m x'


def test_the_loss_of_a_diverged_trial_does_not_count(arms):
    measured, settings = {}, {'learning_rate': 1e-3, 'weight_decay': 0.1}
    trials = [
        {'trial': settings | {'seed': seed}, 'status': status, 'val_loss': 2.0}
        for seed, status in enumerate(('finished', 'diverged'))
    ]
    plan._collect(measured, plan.least(STUDY, arms)[0], trials)
    assert measured == {(1e-3, 0.1, 1.0): {0: 2.0, 1: None}}
