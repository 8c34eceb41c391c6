"""Verdicts of a study that repeats another one: pooled, and as a further look."""

import numpy as np
import pytest

from qkattn.errors import ReportError
from qkattn.report import verify, write_report
from qkattn.stats import inference
from qkattn.stats.decision import ALPHA, level
from qkattn.storage import ledger
from qkattn.verdict import load_findings, load_study
from tests import studies
from tests.refusals import refused

FIRST_SEEDS = studies.VERDICT_SEEDS  # eight
FRESH_SEEDS = (20, 21, 22, 23, 24, 25)
NOISE = 0.003 * np.array([3, -1, 2, 0, -2, 1, -3, 1])


def records_of_arm(variant, delta, seeds=FIRST_SEEDS):
    """Trials of an arm that is worse by `delta`. If `delta` is 0, no noise is added."""
    num_seeds = len(seeds)
    losses = 2 + 0.05 * np.arange(num_seeds) + delta
    if delta != 0:
        losses = losses + NOISE[:num_seeds]
    return studies.tuned_arm(variant, losses=losses.tolist(), seeds=seeds)


def declare_repeat(directory, name):
    """Adds an entry to the ledger of a study: it repeats the study `name` in the same directory.

    The entry has the hash of the last entry of the other ledger. `retrospective` says that the
    results were already known.
    """
    last_entry = ledger.read(directory.parent / name / ledger.NAME).last
    ledger.append(
        directory / ledger.NAME,
        ledger.REPEATS,
        study=name,
        entry=last_entry,
        retrospective=True,
        why='left open',
    )


@pytest.fixture
def first(tmp_path):
    """A study that compares b/vo and c/vo with the baseline, with eight seeds."""
    records = [
        *records_of_arm('qk/vo', 0),
        *records_of_arm('b/vo', 0.004),
        *records_of_arm('c/vo', 0.03),
    ]
    return studies.write_tuned(tmp_path / 'first', records)


@pytest.fixture
def second(first):
    """A study that repeats the comparison of b/vo in the first study, with six fresh seeds."""
    records = [
        *records_of_arm('qk/vo', 0, FRESH_SEEDS),
        *records_of_arm('b/vo', 0.006, FRESH_SEEDS),
    ]
    path = studies.write_tuned(first.parent / 'second', records, seeds=list(FRESH_SEEDS))
    declare_repeat(path, 'first')
    return path


def arm_of(directory, variant='b/vo'):
    findings = load_findings(directory)
    return next(arm for arm in findings.arms if arm.variant == variant)


def sum_of_squared_deviations(values):
    return np.var(values) * len(values)


def test_a_repeat_pools_the_seeds_of_both_studies(first, second):
    """A study that repeats another study compares arms over the seeds of both.

    The first study has eight seeds. The second study has six other seeds. Both have the arm b/vo.
    """
    arm = arm_of(second, 'b/vo')

    # Eight of the differences come from the first study.
    assert arm.comparison.pooled == {'first': 8}
    assert arm.difference.n == 8 + 6
    differences = arm.comparison.differences  # by seed
    assert sorted(differences) == [*FIRST_SEEDS, *FRESH_SEEDS]

    first_differences = list(arm_of(first, 'b/vo').comparison.differences.values())
    second_differences = [differences[seed] for seed in FRESH_SEEDS]
    mean = np.mean(first_differences + second_differences)
    assert arm.difference.mean == pytest.approx(mean)

    # Each difference deviates from the mean of its own study. The two means cost two degrees of
    # freedom.
    squares_of_first = sum_of_squared_deviations(first_differences)
    squares_of_second = sum_of_squared_deviations(second_differences)
    variance = (squares_of_first + squares_of_second) / (8 + 6 - 2)
    assert arm.difference.sd == pytest.approx(np.sqrt(variance))


def bound_of_tuning(arm):
    """A bound on the loss that imperfect tuning costs, summed over the tuned settings."""
    return sum(sweep.at_worst for sweep in arm.sweeps.values())


def test_the_bound_of_tuning_is_a_weighted_mean_of_both(first, second):
    arm = arm_of(second)
    bound_of_first = bound_of_tuning(arm_of(first))
    bound_of_second = bound_of_tuning(arm)
    expected = (8 * bound_of_first + 6 * bound_of_second) / 14
    assert arm.difference.tuning_low == pytest.approx(expected)


def test_a_repeat_is_a_second_look_in_the_family_of_both(first, second):
    arm = arm_of(second)

    assert arm.verdict.look == 2
    assert arm.verdict.num_comparisons == 2
    p_holm = min(1.0, 2 * arm.difference.p * ALPHA / level(look=2))
    assert arm.verdict.p_holm == pytest.approx(p_holm)
    assert arm_of(first).verdict.look == 1


def test_a_study_that_is_not_kept_counts_as_a_look(first, second):
    """Each study that compares an arm with the baseline is a look at that arm.

    A study whose files are lost counts too: a ledger that repeats it names its arms. Here, `second`
    repeats `first`, which repeats the lost study 'zeroth'.

    | study  | compares with qk/vo |
    |--------|---------------------|
    | zeroth | b/vo, d/vo          |
    | first  | b/vo, c/vo          |
    | second | b/vo                |
    """
    place = {'size': 'd_model=128', 'corpus': 'stdlib', 'control': None}
    arms = [{'variant': variant, **place} for variant in ('qk/vo', 'b/vo', 'd/vo')]
    ledger.append(
        first / ledger.NAME,
        ledger.REPEATS,
        lost={'commit': 'abc', 'seeds': [0, 1, 2], 'arms': arms},
        study='zeroth',
        entry='0' * 64,
        retrospective=True,
        why='replaced',
    )

    # A look is numbered in the chain zeroth, first, second.
    assert arm_of(first, 'b/vo').verdict.look == 2
    assert arm_of(second, 'b/vo').verdict.look == 3
    # The lost study did not compare c/vo.
    assert arm_of(first, 'c/vo').verdict.look == 1

    # p values are corrected for all arms of the three studies: b/vo, c/vo and d/vo.
    assert arm_of(first, 'b/vo').verdict.num_comparisons == 3
    assert arm_of(second, 'b/vo').verdict.num_comparisons == 3


def train_with_label_smoothing(directory):
    """Plans label smoothing in all runs of a study that has results already."""
    lines = studies.read_lines(directory / 'plan.jsonl')
    for line in lines:
        line['config']['train']['label_smoothing'] = 0.1
    studies.write_lines(directory / 'plan.jsonl', lines)


def train_on_other_text(directory):
    """Gives the training split of a study another fingerprint; its other splits stay."""
    lines = studies.read_lines(directory / 'results.jsonl')
    for line in lines:
        line['data'] = line['data'] | {'fingerprints': {'train': 'f00d'}}
    studies.write_lines(directory / 'results.jsonl', lines)


def remove_yardsticks(directory):
    (directory / ledger.YARDSTICKS).unlink()


@pytest.mark.parametrize(
    'change', [train_with_label_smoothing, train_on_other_text, remove_yardsticks]
)
def test_a_study_that_cannot_be_pooled_still_counts_as_a_look(first, second, change):
    change(first)

    arm = arm_of(second)

    # An arm of `first` counts if it differs in seeds alone and qualifies for a verdict there.
    assert arm.comparison.pooled == {}
    assert arm.difference.n == len(FRESH_SEEDS)
    assert arm.verdict.look == 2


def test_an_arm_may_not_have_a_seed_in_both_studies(first):
    records = [*records_of_arm('qk/vo', 0), *records_of_arm('b/vo', 0.006)]
    second = studies.write_tuned(first.parent / 'second', records)
    declare_repeat(second, 'first')

    with refused('second and first, of the chain of .*, share the seeds', ReportError):
        load_study(second)


@pytest.mark.parametrize('call', [write_report, verify.check_study])
def test_a_ledger_other_than_the_declared_one_is_refused(first, second, call):
    # The first study is written again with another margin, so its ledger changes.
    records = [*records_of_arm('qk/vo', 0), *records_of_arm('b/vo', 0.004)]
    studies.write_tuned(first, records, margin=0.02)

    with refused("repeats 'first' as of the entry .* does not have", ReportError):
        call(second)


def test_a_table_names_what_it_repeats(second):
    write_report(second)

    table = (second / 'table.md').read_text()
    assert 'Earlier study of its questions: first, as was declared in retrospect' in table
    assert 'pooled with those of this study: b/vo (8)' in table
    assert 'b/vo 2; others 1' in table  # looks


def test_a_single_stratum_is_a_test_without_strata():
    values = np.random.default_rng(0).normal(0.01, 0.01, 9)
    assert inference.paired_test(values, strata=[0] * 9) == inference.paired_test(values)


def test_the_mean_of_each_stratum_does_not_add_to_the_deviation():
    values = np.random.default_rng(0).normal(0.01, 0.01, 9)
    two_strata = np.concatenate([values, values + 5])

    test = inference.paired_test(two_strata, strata=[0] * 9 + [1] * 9)

    assert test.sd == pytest.approx(float(np.std(values, ddof=1)))
    assert test.df == 2 * (9 - 1)
