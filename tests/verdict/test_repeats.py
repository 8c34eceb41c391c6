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

FRESH = (20, 21, 22, 23, 24, 25)
NOISE = 0.003 * np.array([3, -1, 2, 0, -2, 1, -3, 1])


def records_of_arm(variant, delta, seeds=studies.VERDICT_SEEDS):
    losses = 2 + 0.05 * np.arange(len(seeds)) + delta + (delta != 0) * NOISE[: len(seeds)]
    return studies.tuned_arm(variant, losses=losses.tolist(), seeds=seeds)


def declare_repeat(directory, name, **fields):
    last = ledger.read(directory.parent / name / ledger.NAME).last
    about = {'study': name, 'entry': last, 'retrospective': True, 'why': 'left open'} | fields
    ledger.append(directory / ledger.NAME, ledger.REPEATS, **about)


@pytest.fixture
def repeated(tmp_path):
    """A study of two arms, and a repeat of one of them beside it."""
    records = [
        *records_of_arm('qk/vo', 0),
        *records_of_arm('b/vo', 0.004),
        *records_of_arm('c/vo', 0.03),
    ]
    studies.write_tuned(tmp_path / 'first', records)
    records = [*records_of_arm('qk/vo', 0, FRESH), *records_of_arm('b/vo', 0.006, FRESH)]
    studies.write_tuned(tmp_path / 'second', records, seeds=list(FRESH))
    declare_repeat(tmp_path / 'second', 'first')
    return tmp_path


def arm_of(directory, variant='b/vo'):
    return next(one for one in load_findings(directory).arms if one.variant == variant)


def test_a_repeat_pools_the_seeds_of_both_studies(repeated):
    first = arm_of(repeated / 'first')
    both = arm_of(repeated / 'second')
    # 8 seeds of the first study and 6 of its repeat, with the mean of each study removed in the sd.
    assert both.comparison.pooled == {'first': 8}
    assert both.difference.n == 14
    assert sorted(both.comparison.differences) == [*studies.VERDICT_SEEDS, *FRESH]
    own = [v for seed, v in both.comparison.differences.items() if seed in FRESH]
    earlier = list(first.comparison.differences.values())
    assert both.difference.mean == pytest.approx(np.mean([*own, *earlier]))
    squares = [np.var(values) * len(values) for values in (own, earlier)]
    assert both.difference.sd == pytest.approx((sum(squares) / (14 - 2)) ** 0.5)


def test_the_bound_of_tuning_is_a_mean_weighted_by_the_seeds_of_both(repeated):
    first = arm_of(repeated / 'first')
    both = arm_of(repeated / 'second')
    bounds = [sum(s.at_worst for s in arm.sweeps.values()) for arm in (both, first)]
    assert both.difference.tuning_low == pytest.approx((6 * bounds[0] + 8 * bounds[1]) / 14)


def test_a_repeat_is_a_second_look_in_the_family_of_both(repeated):
    verdict = arm_of(repeated / 'second').verdict
    assert (verdict.look, verdict.num_comparisons) == (2, 2)
    p = arm_of(repeated / 'second').difference.p
    assert verdict.p_holm == pytest.approx(min(1.0, 2 * p * ALPHA / level(2)))
    assert arm_of(repeated / 'first').verdict.look == 1


def test_a_study_that_is_not_kept_counts_as_a_look(repeated):
    key = {'size': 'd_model=128', 'corpus': 'stdlib', 'control': None}
    arms = [{'variant': variant} | key for variant in ('qk/vo', 'b/vo', 'd/vo')]
    # An earlier study, of which only the commit, the seeds and the arms are known.
    lost = {'commit': 'abc', 'seeds': [0, 1, 2], 'arms': arms}
    about = {'study': 'zeroth', 'entry': '0' * 64, 'retrospective': True, 'why': 'replaced'}
    ledger.append(repeated / 'first' / ledger.NAME, ledger.REPEATS, lost=lost, **about)
    for name, look, family in (('first', 2, 3), ('second', 3, 3)):
        verdict = arm_of(repeated / name).verdict
        assert (verdict.look, verdict.num_comparisons) == (look, family)
    assert arm_of(repeated / 'first', 'c/vo').verdict.look == 1


def with_label_smoothing(directory):
    """The study as if its runs had trained with label smoothing."""
    lines = studies.read_lines(directory / 'plan.jsonl')
    for line in lines:
        line['config']['train']['label_smoothing'] = 0.1
    studies.write_lines(directory / 'plan.jsonl', lines)


def without_yardsticks(directory):
    (directory / ledger.YARDSTICKS).unlink()


@pytest.mark.parametrize('change', [with_label_smoothing, without_yardsticks])
def test_a_study_that_cannot_be_pooled_still_counts_as_a_look(repeated, change):
    change(repeated / 'first')
    arm = arm_of(repeated / 'second')
    assert (arm.comparison.pooled, arm.difference.n, arm.verdict.look) == ({}, 6, 2)


def test_a_shared_seed_of_one_question_is_refused(repeated):
    studies.write_tuned(
        repeated / 'second', [*records_of_arm('qk/vo', 0), *records_of_arm('b/vo', 0.006)]
    )
    declare_repeat(repeated / 'second', 'first')
    with refused('second and first, of the chain of .*, share the seeds', ReportError):
        load_study(repeated / 'second')


@pytest.mark.parametrize('call', [write_report, verify.check_study])
def test_a_ledger_other_than_the_declared_one_is_refused(repeated, call):
    # The first study is written again, with another margin.
    studies.write_tuned(
        repeated / 'first',
        [*records_of_arm('qk/vo', 0), *records_of_arm('b/vo', 0.004)],
        margin=0.02,
    )
    with refused("repeats 'first' as of the entry .* does not have", ReportError):
        call(repeated / 'second')


def test_a_table_names_what_it_repeats(repeated):
    write_report(repeated / 'second')
    table = (repeated / 'second/table.md').read_text()
    assert 'Earlier study of its questions: first, as was declared in retrospect' in table
    assert 'pooled with those of this study: b/vo (8)' in table
    assert 'b/vo 2; others 1' in table


def test_a_study_alone_is_a_sample_of_one_stratum():
    values = np.random.default_rng(0).normal(0.01, 0.01, 9)
    assert inference.paired_test(values, strata=[0] * 9) == inference.paired_test(values)
    apart = [*values, *(values + 5)]
    two = inference.paired_test(apart, strata=[0] * 9 + [1] * 9)
    assert two.sd == pytest.approx(float(np.std(values, ddof=1)))
    assert two.df == 16
