"""Numbers behind the table, recomputed by hand."""

import math

import pytest

from qkattn.verdict import find, load_study
from qkattn.verdict.arms import arms_of
from tests.studies import VERDICT_SEEDS, trial_record, tuned_arm, write_study, write_tuned

# 0.975 quantiles of Student's t from printed tables, at 1 and 2 degrees of freedom.
T_1, T_2 = 12.706, 4.303


def arms_in(study_dir, records, **keywords):
    return arms_of(load_study(write_study(study_dir, records, **keywords)))


def differences_of(study_dir, records):
    study = load_study(write_study(study_dir, records))
    return [arm.difference for arm in find(study).arms]


def test_mean_sd_and_paired_interval(study_dir):
    base, other = (2.00, 2.10, 2.30), (2.05, 2.12, 2.38)
    records = [trial_record('qk/vo', seed=s, val_loss=v) for s, v in enumerate(base)]
    # The other variant's seeds come in another order than the baseline's.
    records += [trial_record('b/vo', seed=s, val_loss=other[s]) for s in (2, 0, 1)]
    baseline, arm = arms_in(study_dir, records)
    assert baseline.is_baseline
    assert baseline.val_loss.mean == pytest.approx(6.4 / 3)
    mean = 6.55 / 3
    sd = math.sqrt(sum((v - mean) ** 2 for v in other) / 2)
    assert arm.val_loss.sd == pytest.approx(sd)
    assert arm.over_seeds('val_bits_per_byte').mean == pytest.approx(mean / math.log(2))
    assert arm.over_seeds('test_bits_per_byte').mean == pytest.approx((mean + 0.1) / math.log(2))
    # Differences 0.05, 0.02, 0.08: mean 0.05, sd 0.03.
    none, difference = differences_of(study_dir, records)
    assert none is None
    assert difference.mean == pytest.approx(0.05)
    assert difference.sd == pytest.approx(0.03)
    half = T_2 * 0.03 / math.sqrt(3)
    assert difference.low == pytest.approx(0.05 - half, rel=1e-3)
    assert difference.high == pytest.approx(0.05 + half, rel=1e-3)


def test_only_shared_seeds_are_paired(study_dir):
    records = [trial_record('qk/vo', seed=s, val_loss=2.0 + s) for s in (0, 1, 2)]
    records += [trial_record('b/vo', seed=s, val_loss=v) for s, v in ((1, 3.5), (2, 4.7), (9, 0.0))]
    difference = differences_of(study_dir, records)[1]
    assert difference.paired and difference.n == 2
    assert difference.mean == pytest.approx(0.6)
    half = T_1 * math.sqrt(0.02) / math.sqrt(2)
    assert difference.high - difference.mean == pytest.approx(half, rel=1e-3)


def test_diverged_trials_are_counted_not_averaged(study_dir):
    records = [trial_record('qk/vo', seed=s, val_loss=v) for s, v in ((0, 2.0), (1, None))]
    records += [trial_record('b/vo', seed=s, val_loss=None) for s in (0, 1)]
    baseline, dead = arms_in(study_dir, records)
    assert (baseline.val_loss.mean, baseline.val_loss.n) == (2.0, 1)
    assert (baseline.num_diverged, len(baseline.trials)) == (1, 2)
    assert dead.val_loss is None and dead.learning_rate is None
    assert dead.num_diverged == 2
    assert differences_of(study_dir, records) == [None, None]


def test_best_learning_rate_by_mean_val_loss(study_dir):
    losses = {1e-3: (2.0, 2.4), 3e-3: (2.1, 2.2), 1e-2: (1.0, None)}
    records = [
        trial_record('qk/vo', seed=seed, learning_rate=rate, val_loss=loss)
        for rate, values in losses.items()
        for seed, loss in enumerate(values)
    ]
    (arm,) = arms_in(study_dir, records)
    # 1e-3 holds the lowest single loss that finished everywhere, 1e-2 a lucky seed: neither wins.
    assert arm.learning_rate == 3e-3
    assert arm.val_loss.mean == pytest.approx(2.15)
    assert arm.learning_rates == (1e-3, 3e-3, 1e-2)
    assert not arm.at_edge and arm.num_diverged == 1
    (arm,) = arms_in(study_dir / 'b', records[:4])
    assert arm.learning_rate == 3e-3 and arm.at_edge


def test_every_arm_is_paired_at_its_own_best_rate(study_dir):
    losses = {('qk/vo', 1e-3): 2.0, ('qk/vo', 3e-3): 2.5, ('b/vo', 1e-3): 2.9, ('b/vo', 3e-3): 2.3}
    records = [
        trial_record(variant, learning_rate=rate, val_loss=loss)
        for (variant, rate), loss in losses.items()
    ]
    assert differences_of(study_dir, records)[1].mean == pytest.approx(0.3)


def test_baseline_of_the_same_size_comes_first(study_dir):
    records = [
        trial_record(variant, f'd_model={d}', val_loss=loss, d_model=d)
        for variant, d, loss in (('b/vo', 64, 3.5), ('b/vo', 128, 2.5), ('qk/vo', 64, 3.0))
    ]
    arms = arms_in(study_dir, records)
    assert [(arm.variant, arm.size) for arm in arms] == [
        ('qk/vo', 'd_model=64'),
        ('b/vo', 'd_model=64'),
        ('b/vo', 'd_model=128'),
    ]
    _, second, third = differences_of(study_dir, records)
    assert second.mean == pytest.approx(0.5) and third is None


def test_run_numbers_count_once_per_run(study_dir):
    records = [trial_record('qk/vo', seed=s, run='a', train_seconds=10.0) for s in (0, 1)]
    records += [trial_record('qk/vo', seed=2, run='b', train_seconds=7.0)]
    (arm,) = arms_in(study_dir, records)
    assert arm.of_runs('train_seconds') == [10.0, 7.0]


def test_screening_trials_never_count(study_dir):
    losses = [2.0 + 0.01 * seed for seed in range(8)]
    records = tuned_arm('qk/vo', losses=losses)
    for record in records[:10]:
        record['val_loss'] = 0.5  # far below the verdict's
    (arm,) = arms_of(load_study(write_tuned(study_dir, records)))
    assert [trial.seed for trial in arm.chosen] == list(VERDICT_SEEDS)
    assert {trial.stage for trial in arm.verdict_trials} == {'verdict'}
    assert arm.val_loss.mean == pytest.approx(2.035) and arm.val_loss.n == 8
    assert len(arm.screening_trials) == 10 and len(arm.trials) == 18
    assert arm.learning_rate == 4e-3 and not arm.at_edge


def test_an_arm_that_is_only_screened_has_no_loss(study_dir):
    (arm,) = arms_of(load_study(write_tuned(study_dir, tuned_arm('qk/vo')[:10])))
    assert arm.chosen == arm.verdict_trials == () and arm.val_loss is None
    assert arm.example.parameters['total'] > 0 and arm.num_diverged == 0


def test_trials_of_other_stages_are_no_verdict(study_dir):
    records = tuned_arm('qk/vo', losses=[3.0] * 8)
    records += [trial_record('qk/vo', seed=s, val_loss=2.0) for s in range(8)]
    (arm,) = arms_of(load_study(write_tuned(study_dir, records)))
    assert arm.val_loss.mean == 3.0 and len(arm.chosen) == len(arm.verdict_trials) == 8
    (arm,) = arms_of(load_study(write_study(study_dir / 'b', records)))
    assert arm.val_loss.mean == 2.0 and len(arm.chosen) == len(arm.verdict_trials) == 8
