"""Numbers behind the table, recomputed by hand."""

import math

import pytest

from qkattn.verdict import find, load_study
from qkattn.verdict.arms import arms_of
from tests.studies import VERDICT_SEEDS, trial_record, tuned_arm, write_study, write_tuned

T_2 = 4.303  # 0.975 quantile of Student's t at 2 degrees of freedom, from a printed table


def arms_in(study_dir, records):
    return find(load_study(write_study(study_dir, records))).arms


def seeds_of(variant, losses, **changes):
    return [trial_record(variant, seed=s, val_loss=v, **changes) for s, v in losses.items()]


def test_mean_sd_and_paired_interval(study_dir):
    # The other variant's seeds come in another order than the baseline's.
    base, other = {0: 2.00, 1: 2.10, 2: 2.30}, {2: 2.38, 0: 2.05, 1: 2.12}
    baseline, arm = arms_in(study_dir, seeds_of('qk/vo', base) + seeds_of('b/vo', other))
    assert baseline.is_baseline and baseline.difference is None
    assert baseline.val_loss.mean == pytest.approx(6.4 / 3)
    mean = 6.55 / 3
    sd = math.sqrt(sum((v - mean) ** 2 for v in other.values()) / 2)
    assert arm.val_loss.sd == pytest.approx(sd)
    assert arm.over_seeds('val_bits_per_byte').mean == pytest.approx(mean / math.log(2))
    assert arm.over_seeds('test_bits_per_byte').mean == pytest.approx((mean + 0.1) / math.log(2))
    # Differences 0.05, 0.02, 0.08: mean 0.05, sd 0.03.
    assert arm.differences == pytest.approx((0.05, 0.02, 0.08))
    assert (arm.difference.mean, arm.difference.sd) == pytest.approx((0.05, 0.03))
    half = T_2 * 0.03 / math.sqrt(3)
    assert arm.difference.low == pytest.approx(0.05 - half, rel=1e-3)
    assert arm.difference.high == pytest.approx(0.05 + half, rel=1e-3)


def test_only_shared_seeds_are_paired(study_dir):
    records = seeds_of('qk/vo', {0: 2.0, 1: 3.0, 2: 4.0})
    difference = arms_in(study_dir, records + seeds_of('b/vo', {1: 3.5, 2: 4.7, 9: 0.0}))[1]
    assert difference.differences == pytest.approx((0.5, 0.7)) and difference.difference.paired


def test_diverged_trials_are_counted_not_averaged(study_dir):
    records = seeds_of('qk/vo', {0: 2.0, 1: None}) + seeds_of('b/vo', {0: None, 1: None})
    baseline, dead = arms_in(study_dir, records)
    assert (baseline.val_loss.mean, baseline.val_loss.n) == (2.0, 1)
    assert (baseline.num_diverged, len(baseline.trials)) == (1, 2)
    assert dead.val_loss is dead.learning_rate is dead.difference is None
    assert dead.num_diverged == 2


def test_best_learning_rate_by_mean_val_loss(study_dir):
    losses = {1e-3: (2.0, 2.4), 3e-3: (2.1, 2.2), 1e-2: (1.0, None)}
    records = [
        record
        for rate, values in losses.items()
        for record in seeds_of('qk/vo', dict(enumerate(values)), learning_rate=rate)
    ]
    # Every arm is compared at its own best rate.
    records += seeds_of('b/vo', {0: 9.0, 1: 9.0})
    records += seeds_of('b/vo', {0: 2.4, 1: 2.5}, learning_rate=3e-2)
    arm, other = arms_in(study_dir, records)
    # 1e-3 holds the lowest single loss that finished everywhere, 1e-2 a lucky seed: neither wins.
    assert arm.learning_rate == 3e-3
    assert arm.val_loss.mean == pytest.approx(2.15)
    assert arm.learning_rates == (1e-3, 3e-3, 1e-2)
    assert not arm.at_edge and arm.num_diverged == 1
    assert other.at_edge and other.difference.mean == pytest.approx(0.3)


def test_baseline_of_the_same_size_comes_first(study_dir):
    records = [
        trial_record(variant, f'd_model={d}', val_loss=loss, d_model=d)
        for variant, d, loss in (('b/vo', 64, 3.5), ('b/vo', 128, 2.5), ('qk/vo', 64, 3.0))
    ]
    arms = arms_in(study_dir, records)
    small = [('qk/vo', 'd_model=64', 'stdlib', None), ('b/vo', 'd_model=64', 'stdlib', None)]
    assert [arm.place for arm in arms] == [*small, ('b/vo', 'd_model=128', 'stdlib', None)]
    assert arms[1].difference.mean == pytest.approx(0.5) and arms[2].difference is None


def test_run_numbers_count_once_per_run(study_dir):
    records = seeds_of('qk/vo', {0: 2.0, 1: 2.0}, run='a', train_seconds=10.0)
    (arm,) = arms_in(study_dir, records + seeds_of('qk/vo', {2: 2.0}, run='b', train_seconds=7.0))
    assert arm.of_runs('train_seconds') == [10.0, 7.0]


def test_only_trials_of_the_stage_that_decides_count(study_dir):
    records = tuned_arm('qk/vo', losses=[2.0 + 0.01 * seed for seed in range(8)])
    for record in records[:10]:
        record['val_loss'] = 0.5  # far below the verdict's
    records += seeds_of('qk/vo', dict.fromkeys(range(8), 1.0))  # of no screening and no verdict
    (arm,) = arms_of(load_study(write_tuned(study_dir / 'a', records)))
    assert [trial.seed for trial in arm.chosen] == list(VERDICT_SEEDS)
    assert {trial.stage for trial in arm.verdict_trials} == {'verdict'}
    assert arm.val_loss.mean == pytest.approx(2.035) and len(arm.verdict_trials) == 8
    assert len(arm.screening_trials) == 10 and len(arm.trials) == 26
    assert arm.learning_rate == 4e-3 and not arm.at_edge
    (arm,) = arms_of(load_study(write_study(study_dir / 'b', records)))
    assert arm.val_loss.mean == 1.0 and len(arm.chosen) == len(arm.verdict_trials) == 8
    (arm,) = arms_of(load_study(write_tuned(study_dir / 'c', records[:10])))
    assert arm.chosen == arm.verdict_trials == () and arm.val_loss is None
    assert arm.example.parameters['total'] > 0 and arm.num_diverged == 0
