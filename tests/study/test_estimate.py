"""The cost of a plan: counted, and timed by a warm-up."""

import dataclasses
import datetime

import pytest

from qkattn.config import ControlsConfig, OptimizerConfig, TrainConfig, TrialsConfig, TuningConfig
from qkattn.model import cost
from qkattn.study import estimate, plan
from qkattn.study.arms import build_arms
from tests.study.test_plan import STUDY as small

SHORT = dataclasses.replace(
    small.base,
    model=dataclasses.replace(small.base.model, num_heads=2),
    optimizer=OptimizerConfig(warmup_steps=10),
    train=TrainConfig(num_steps=100, batch_size=4),
    trials=TrialsConfig(seeds=(0, 1, 2), learning_rates=(1e-3, 2e-3)),
)
STUDY = dataclasses.replace(
    small,
    base=SHORT,
    sizes=('d_model=32', 'd_model=48'),
    tuning=TuningConfig(seeds=(10,), max_points=5, max_seeds=4),
)


def test_a_cost_is_the_sum_over_its_runs():
    arms = build_arms(STUDY)
    runs = plan.least(STUDY, arms)
    speeds = {'d_model=32': estimate.Speed(1e9, 2.0), 'd_model=48': estimate.Speed(2e9, 3.0)}
    found = estimate.cost(runs, speeds)
    # Of each of 4 arms: 1 seed at 2 rates, then 3 seeds at one.
    assert (found.runs, found.trials) == (8, 4 * (2 + 3))
    tokens = 100 * 4 * 16
    assert found.tokens == 20 * tokens
    work = {
        size: sum(5 * tokens * 3 * cost.flops_per_token(a.model) for a in arms if a.size == size)
        for size in STUDY.sizes
    }
    assert found.flops == pytest.approx(sum(work.values()))
    seconds = work['d_model=32'] / 1e9 + work['d_model=48'] / 2e9 + 4 * 2.0 + 4 * 3.0
    assert found.seconds == pytest.approx(seconds)


def test_the_warm_up_measures_every_size_once(monkeypatch):
    measured = []

    def measure(run):
        measured.append((run.arm.label, run.arm.size))
        return estimate.Speed(1e9, 1.0)

    monkeypatch.setattr(estimate, 'measure', measure)
    text = estimate.text(STUDY, build_arms(STUDY))
    assert measured == [('qk/vo', 'd_model=32'), ('qk/vo', 'd_model=48')]
    first, second, total, more, _ = text.splitlines()
    assert first.startswith('screening (learning_rate)') and '4 runs     8 trials' in first
    assert second.startswith('verdict') and '4 runs    12 trials' in second
    assert total.startswith('total') and '8 runs    20 trials' in total
    assert (
        more.startswith('each value') and 'adds 1 trial, 6.4e+03 tokens; at most 3 values' in more
    )


def test_controls_corpora_and_looks_are_counted_and_longer_runs_apart(monkeypatch):
    monkeypatch.setattr(estimate, 'measure', lambda run: estimate.Speed(1e9, 1.0))
    study = dataclasses.replace(
        STUDY,
        sizes=('d_model=32',),
        controls=ControlsConfig(longer=3, longer_seeds=(20, 21, 22, 23)),
        corpora=('stdlib', 'tiny_shakespeare'),
        looks=(1, 3),
    )
    text = estimate.text(study, build_arms(study))
    costs = {line.split('  ')[0]: ' '.join(line.split()) for line in text.splitlines()}
    # Of each corpus: two arms and a control, each 2 trials of screening and 3 of two looks.
    assert '4 runs 8 trials' in costs['screening (learning_rate)']
    assert '8 runs 12 trials' in costs['verdict']
    assert '2 runs 4 trials' in costs['equal_shape screening (learning_rate)']
    assert '4 runs 6 trials' in costs['equal_shape verdict']
    assert '18 runs 30 trials' in costs['total']
    # At three rates on one seed, and four seeds of the verdict.
    longer = 4 * (3 + 4)
    assert f'8 runs {longer} trials' in costs['longer, if every arm has a word']
    tokens = 100 * 4 * 16 * (30 + 3 * longer)
    assert f'26 runs {30 + longer} trials {tokens:.3g} tokens' in costs['total with longer']
    assert 'gets up to 3 further seeds' in text
    most = dataclasses.replace(study.tuning, max_points=3, max_seeds=2)
    text = estimate.text(dataclasses.replace(study, tuning=most), build_arms(study))
    assert 'at most 1 value per arm' in text and text.count('up to 1 further seed\n') == 1
    most = dataclasses.replace(most, seeds=(10, 11))
    text = estimate.text(dataclasses.replace(study, tuning=most), build_arms(study))
    assert 'further seed' not in text


def test_the_time_is_that_of_one_worker(monkeypatch):
    monkeypatch.setattr(estimate, 'measure', lambda run: estimate.Speed(1e6, 30.0))
    arms = build_arms(STUDY)
    runs = plan.least(STUDY, arms)
    training = sum(map(estimate.flops, runs)) / 1e6
    text = estimate.text(STUDY, arms)
    seconds = round(training + 30 * len(runs))
    (total,) = [line for line in text.splitlines() if line.startswith('total ')]
    assert total.endswith(f'about {datetime.timedelta(seconds=seconds)}')


def test_the_speed_is_that_of_the_compiled_program():
    one = dataclasses.replace(STUDY, variants=('qk/vo',), sizes=('d_model=32',))
    (first, _) = plan.least(one, build_arms(one))
    found = estimate.measure(first)
    assert found.flops_per_second > 1e5 and found.compile_seconds > 0
