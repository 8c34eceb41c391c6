"""The cost of a plan: counted, and timed by a warm-up."""

import dataclasses

import pytest

from qkattn.config import OptimizerConfig, TrainConfig, TrialsConfig, TuningConfig
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


def test_the_speed_is_that_of_the_compiled_program():
    one = dataclasses.replace(STUDY, variants=('qk/vo',), sizes=('d_model=32',))
    (first, _) = plan.least(one, build_arms(one))
    found = estimate.measure(first)
    assert found.flops_per_second > 1e5 and found.compile_seconds > 0
