"""Verdicts: every number recomputed by hand, every decision with the codes of its reasons."""

import itertools

import numpy as np
import pytest
from scipy import stats

from qkattn.config import TuningConfig
from qkattn.stats.sweep import fit
from qkattn.study.tuning import KNOBS, tune
from qkattn.verdict import Decision, NotScaled, ReasonCode, RemarkCode, find, load_study
from tests.studies import (
    RATES,
    edit_plan,
    run_name,
    trial_record,
    tuned_arm,
    write_study,
    write_tuned,
)

BETTER, BETTER_BELOW, EQUIVALENT, WORSE_BELOW, WORSE, UNDECIDED, NO_VERDICT = Decision
BASE = 2 + 0.05 * np.arange(8)
NOISE = 0.001 * np.array([3, -1, 2, 0, -2, 1, -3, 1])


def found_in(directory):
    return find(load_study(directory))


def arm(variant, delta, **keywords):
    return tuned_arm(variant, losses=list(BASE + delta + NOISE * (delta != 0)), **keywords)


def decisions(found):
    return {a.variant: a.verdict.decision for a in found.arms if a.verdict}


def verdict_of(found, variant):
    (verdict,) = [a.verdict for a in found.arms if a.variant == variant]
    return verdict


def codes(reasons):
    return [reason.code for reason in reasons]


@pytest.fixture
def three(study_dir):
    records = arm('qk/vo', 0) + arm('b/vo', -0.03) + arm('c/vo', 0.02) + arm('d/vo', 0.0004)
    return write_tuned(study_dir, records)


def test_verdicts_by_hand(three):
    found = found_in(three)
    assert decisions(found) == {'b/vo': BETTER, 'c/vo': WORSE, 'd/vo': EQUIVALENT}
    b = found.arms[1]
    differences = NOISE - 0.03
    assert b.differences == pytest.approx(differences.tolist())
    error = differences.std(ddof=1) / 8**0.5
    half = stats.t.ppf(0.975, 7) * error
    assert (b.difference.low, b.difference.high) == pytest.approx(
        (differences.mean() - half, differences.mean() + half)
    )
    raw = [
        2 * stats.t.sf(abs((NOISE + delta).mean()) / (NOISE.std(ddof=1) / 8**0.5), 7)
        for delta in (-0.03, 0.02, 0.0004)
    ]
    # Holm: the smallest times 3, the next times 2, the largest as it is.
    assert [a.verdict.p_holm for a in found.arms[1:]] == pytest.approx(
        [3 * raw[0], 2 * raw[1], raw[2]], rel=1e-6
    )
    sweep = b.sweeps['learning_rate']
    assert sweep.values == RATES and sweep.bracketed and len(sweep.losses[0]) == 2
    assert sweep.optimum == pytest.approx(4e-3) and sweep.chosen == 4e-3
    assert found.num_comparisons == 3 and found.arms[0].verdict is None and found.scaling == ()
    reasons = [a.verdict.reasons for a in found.arms[1:]]
    assert [codes(of) for of in reasons] == [
        [ReasonCode.DIFFERENT, ReasonCode.BEYOND_MARGIN],
        [ReasonCode.DIFFERENT, ReasonCode.BEYOND_MARGIN],
        [ReasonCode.EQUIVALENT],
    ]
    assert reasons[0][0].data == {'p': b.verdict.p_holm}
    assert reasons[0][1].data == {'margin': 0.005, 'p': b.verdict.p_margin_holm}
    assert (b.verdict.alpha, b.verdict.num_seeds) == (pytest.approx(0.05), 8)
    assert reasons[2][0].data == {'p': found.arms[3].verdict.p_equivalence_holm}


def test_all_comparisons_of_all_sizes_are_one_family(study_dir):
    records = [
        record
        for variant, d in itertools.product(('qk/vo', 'b/vo', 'c/vo'), (64, 128))
        for record in arm(variant, 0 if variant == 'qk/vo' else 0.02, size=f's{d}', d_model=d)
    ]
    found = found_in(write_tuned(study_dir, records))
    assert found.num_comparisons == 4
    p = 2 * stats.t.sf(0.02 / (NOISE.std(ddof=1) / 8**0.5), 7)
    assert NOISE.mean() == pytest.approx(0.000125)
    assert found.arms[1].verdict.p_holm == pytest.approx(4 * p, rel=0.05)
    assert found.scaling[0].fit.problem.data == {'sizes': 2, 'needed': 4}
    assert [s.variant for s in found.scaling] == ['qk/vo', 'b/vo', 'c/vo']


def scaled(widths, loose=None):
    """Two arms by width on a scaling law; the baseline is not bracketed at the `loose` one."""
    records = []
    for d in widths:
        parameters = trial_record('qk/vo', d_model=d)['parameters']['total']
        for variant, worth in (('qk/vo', 1.0), ('b/vo', 1.5)):
            law = 1.5 + 40 * (worth * parameters) ** -0.4
            losses = list(law + 0.0002 * (np.arange(8) - 3.5))
            optimum = 16e-3 if (variant, d) == ('qk/vo', loose) else 4e-3
            records += tuned_arm(variant, f's{d}', losses, optimum, d_model=d)
    return records


def test_scaling_over_four_sizes(study_dir):
    base, other = found_in(write_tuned(study_dir, scaled((32, 64, 128, 256)))).scaling
    assert base.fit.problem is None and base.multiplier is None
    assert base.fit.a.value == pytest.approx(0.4, rel=0.01)
    assert other.multiplier.problem is None
    assert other.multiplier.value == pytest.approx(1.5, rel=0.01)


def test_sizes_that_are_not_bracketed_are_left_out_of_the_scaling(study_dir):
    found = found_in(write_tuned(study_dir, scaled((32, 64, 128, 256, 512), loose=128)))
    assert [len(scaling.fit.sizes) for scaling in found.scaling] == [4, 5]
    (left_out,) = [a for a in found.arms if a.not_scaled]
    assert (left_out.place, left_out.not_scaled) == (
        ('qk/vo', 's128', 'stdlib', None),
        NotScaled.NOT_BRACKETED,
    )


def test_a_scaling_fit_of_no_usable_size_is_lacking(study_dir):
    diverged = [None, *BASE[1:]]
    small, large = (tuned_arm('qk/vo', f's{d}', diverged, d_model=d) for d in (64, 128))
    one = arm('qk/vo', 0, size='s64', d_model=64)
    (scaling,) = found_in(write_tuned(study_dir / 'a', one + large)).scaling
    assert len(scaling.fit.sizes) == 1
    for number, (records, lacks) in enumerate(((small + large, True), (small, False))):
        none = found_in(write_tuned(study_dir / str(number), records))
        assert none.scaling == () and none.lacks_scaling == lacks


def test_why_an_arm_is_left_out_of_scaling_fits(study_dir):
    records = arm('qk/vo', 0) + tuned_arm('b/vo', losses=[None, *BASE[1:]])
    records += arm('c/vo', 0.1, optimum=16e-3) + arm('d/vo', 0.1)[:10]
    records += arm('e/vo', 0.1, learning_rate=1e-3)
    assert [a.not_scaled for a in found_in(write_tuned(study_dir, records)).arms] == [
        None,
        NotScaled.DIVERGED,
        NotScaled.NOT_BRACKETED,
        NotScaled.NO_LOSSES,
        NotScaled.BLOCKED,
    ]


def test_scaling_without_tuning(study_dir):
    verdicts = [r for r in scaled((32, 64, 128, 256)) if r['stage'] == 'verdict']
    single = [r | {'stage': 'single', 'run': f'{r["run"]}-single'} for r in verdicts]
    for record in single:
        record['config_hash'] = record['run']
    found = found_in(write_study(study_dir, single))
    assert all(scaling.fit.problem is None for scaling in found.scaling)


TUNED = {'learning_rate': RATES, 'weight_decay': (0.05, 0.1, 0.2), 'score_scale': (0.5, 1.0, 2.0)}
GRIDS = dict.fromkeys(KNOBS, (1.0,)) | TUNED
LIMITS = TuningConfig(seeds=(100, 101), max_points=5, max_seeds=2)
OPTIMA = (4e-3, 0.3, 1.25)


def write_chain(directory, variant='qk/vo'):
    """Writes the trials of coordinate-wise tuning and the verdict at the chosen settings."""
    runs, measured = {}, {}
    while (tuned := tune(GRIDS, LIMITS, measured)).knob:
        for at in map(tuned.at, tuned.values):
            away = sum(np.log(value / best) ** 2 for value, best in zip(at, OPTIMA, strict=False))
            measured[at] = {seed: 2 + 0.1 * away + 0.01 * seed for seed in (100, 101)}
            runs[at] = tuned.knob, measured[at]
    runs[tuned.settings] = None, dict(enumerate(BASE))
    records = [
        trial_record(
            variant,
            stage='screening' if knob else 'verdict',
            knob=knob,
            seed=seed,
            val_loss=loss,
            run=f'run {at}',
            trial={'seed': seed, 'learning_rate': at[0], 'weight_decay': at[1]},
        )
        for at, (knob, of) in runs.items()
        for seed, loss in of.items()
    ]
    grids = {f'tuning__{knob}s': values for knob, values in GRIDS.items()}
    write_tuned(directory, records, **grids)
    for at in runs:
        edit_plan(directory, f'run {at}', model__score_scale=at[2])
    return tuned


def test_sweeps_and_settings_are_those_of_the_plan(study_dir):
    """A rate on the grid is chosen, so that one trial belongs to the sweeps of two knobs."""
    tuned = write_chain(study_dir)
    (arm,) = found_in(study_dir).arms
    assert arm.sweeps == tuned.sweeps and list(arm.sweeps) == list(TUNED)
    assert arm.sweeps['weight_decay'].values == (0.05, 0.1, 0.2, 0.4, 0.8)
    assert tuned.settings[:3] == pytest.approx(OPTIMA, rel=1e-2) and tuned.settings[0] == 4e-3
    assert arm.blocks == arm.not_bracketed == ()


@pytest.mark.parametrize(
    ('seeds', 'trial'),
    [
        # Knobs that are tuned later are at the middle of their grids.
        ((100, 101), {'learning_rate': 32e-3, 'weight_decay': 0.3}),
        # A seed that was not declared.
        ((102,), {'learning_rate': 1e-3, 'weight_decay': 0.1}),
    ],
)
def test_trials_at_other_settings_or_seeds_enter_no_sweep(study_dir, seeds, trial):
    other = {'stage': 'screening', 'knob': 'learning_rate', 'val_loss': 0.1, 'run': 'x'}
    records = [trial_record('qk/vo', trial=trial | {'seed': s}, **other) for s in seeds]
    found = found_in(write_tuned(study_dir, arm('qk/vo', 0) + records))
    sweep = found.arms[0].sweeps['learning_rate']
    assert sweep.values == RATES and sweep.best == 4e-3


def test_values_that_lack_a_screening_seed_have_no_sweep(study_dir):
    records = arm('qk/vo', 0)
    del records[2]
    found = found_in(write_tuned(study_dir, records)).arms[0]
    assert found.sweeps == {}
    (remark,) = found.blocks
    assert remark.code is RemarkCode.SCREENING_INCOMPLETE
    assert remark.data == {'knob': 'learning_rate', 'values': (0.002,)}


def test_a_knob_of_one_value_is_at_the_value_of_the_arm(study_dir):
    variant = 'b/vo?score_scale=2.0'
    write_tuned(study_dir, arm('qk/vo', 0) + arm(variant, 0.02))
    for stage, knob in (('screening', 'learning_rate'), ('verdict', None)):
        name = run_name(variant, 'd_model=128', stage, knob)
        edit_plan(study_dir, name, model__score_scale=2.0)
    found = found_in(study_dir)
    assert decisions(found) == {variant: WORSE} and found.arms[1].sweeps['learning_rate'].bracketed


def noisy(records, sd):
    """Screening losses with noise on the validation split, and the verdict at the chosen rate."""
    for record, extra in zip(records[:10], np.random.default_rng(4).normal(0, sd, 10), strict=True):
        record['val_loss'] += extra
    losses = {}
    for record in records[:10]:
        of = record['trial']
        losses.setdefault(of['learning_rate'], {})[of['seed']] = record['val_loss']
    sweep = fit(losses)
    for record in records[10:]:
        record['trial']['learning_rate'] = sweep.chosen
    return sweep


@pytest.mark.parametrize(
    ('whose', 'delta', 'decision'),
    [
        ('arm', -0.003, BETTER_BELOW),
        ('baseline', -0.003, EQUIVALENT),
        ('arm', 0.003, EQUIVALENT),
        ('baseline', 0.003, WORSE_BELOW),
        ('baseline', -0.02, BETTER),
    ],
)
def test_the_interval_includes_what_tuning_may_have_missed(study_dir, whose, delta, decision):
    records = {'baseline': arm('qk/vo', 0), 'arm': arm('b/vo', delta)}
    sweep = noisy(records[whose], 0.012)
    assert sweep.bracketed and 0.001 < sweep.at_worst < 0.01
    found = found_in(write_tuned(study_dir, records['baseline'] + records['arm']))
    other = next(a for a in found.arms if a.is_baseline == (whose == 'arm'))
    errors = {whose: sweep.at_worst, 'other': other.sweeps['learning_rate'].at_worst}
    low, high = (errors.get(side, errors['other']) for side in ('arm', 'baseline'))
    difference = found.arms[1].difference
    assert (difference.tuning_low, difference.tuning_high) == pytest.approx((low, high))
    half = stats.t.ppf(0.975, 7) * NOISE.std(ddof=1) / 8**0.5
    mean = delta + NOISE.mean()
    assert (difference.low, difference.high) == pytest.approx(
        (mean - low - half, mean + high + half)
    )
    assert decisions(found) == {'b/vo': decision}


def test_a_word_that_a_bad_seed_withholds_says_so(study_dir):
    """Seven of eight seeds are better, one is worse by far: the word has to hold both ways."""
    records = arm('qk/vo', 0) + arm('b/vo', -0.03)
    for split in ('val_loss', 'test_loss'):
        records[-1][split] += 0.5
    found = found_in(write_tuned(study_dir, records))
    assert decisions(found) == {'b/vo': UNDECIDED}
    not_shown, apart = found.arms[1].verdict.reasons
    assert [not_shown.code, apart.code] == [ReasonCode.NOT_SHOWN, ReasonCode.SEEDS_APART]
    assert (apart.data['apart'], apart.data['n']) == (1, 8)
    assert apart.data['typical'] < -0.02 < 0.02 < apart.data['mean'] and apart.data['p'] < 0.001


@pytest.mark.parametrize('whose', ['arm', 'baseline'])
@pytest.mark.parametrize('delta', [0.02, -0.02, 0.0004])
@pytest.mark.parametrize('code', [RemarkCode.NOT_BRACKETED, RemarkCode.UNBOUNDED_OPTIMUM])
def test_an_optimum_that_is_not_known_withholds_the_word(study_dir, whose, delta, code):
    """Whatever the word: beyond the grid, or bracketed by diverged values alone."""
    loose = {RemarkCode.NOT_BRACKETED: {'optimum': 16e-3}}
    loose[RemarkCode.UNBOUNDED_OPTIMUM] = {'diverged_rates': (1e-3, 2e-3, 8e-3, 16e-3)}
    own = {'arm': {}, 'baseline': {}} | {whose: loose[code]}
    records = arm('qk/vo', 0, **own['baseline']) + arm('b/vo', delta, **own['arm'])
    found = found_in(write_tuned(study_dir, records))
    assert decisions(found) == {'b/vo': NO_VERDICT}
    (loose_arm,) = [a for a in found.arms if a.blocks]
    assert loose_arm.is_baseline == (whose == 'baseline') and codes(loose_arm.blocks) == [code]
    (reason,) = verdict_of(found, 'b/vo').reasons
    assert reason.code is (ReasonCode.BASELINE_BLOCKED if whose == 'baseline' else code)


@pytest.mark.parametrize(
    ('loser', 'delta', 'decision', 'reason'),
    [
        ('b/vo', -0.03, UNDECIDED, ReasonCode.DIFFERENT_BUT_DIVERGED),
        ('b/vo', 0.03, WORSE, ReasonCode.DIFFERENT),
        ('qk/vo', 0.03, UNDECIDED, ReasonCode.DIFFERENT_BUT_DIVERGED),
        ('qk/vo', -0.03, BETTER, ReasonCode.DIFFERENT),
    ],
)
def test_divergence_never_helps(study_dir, loser, delta, decision, reason):
    losses = {'qk/vo': list(BASE), 'b/vo': list(BASE + delta + NOISE)}
    losses[loser][0] = None
    records = [r for variant, of in losses.items() for r in tuned_arm(variant, losses=of)]
    found = found_in(write_tuned(study_dir, records))
    assert decisions(found) == {'b/vo': decision} and found.arms[1].difference.n == 7
    assert [a.num_diverged for a in found.arms] == [loser == 'qk/vo', loser == 'b/vo']
    reasons = verdict_of(found, 'b/vo').reasons
    beyond = [ReasonCode.BEYOND_MARGIN] * (reason is ReasonCode.DIFFERENT)
    assert codes(reasons) == [ReasonCode.DIVERGED, reason, *beyond]
    assert reasons[0].data == {'arm': int(loser == 'b/vo'), 'baseline': int(loser == 'qk/vo')}


@pytest.mark.parametrize(
    ('base', 'losses', 'decision', 'reasons'),
    [
        (BASE, BASE + 0.002 + NOISE / 10, EQUIVALENT, ['EQUIVALENT', 'DIFFERENT_WITHIN_MARGIN']),
        (BASE, BASE + 0.01 * (-1) ** np.arange(8), UNDECIDED, ['NOT_SHOWN']),
        ([2.0, 2.1, *[None] * 6], BASE + 0.02 + NOISE, UNDECIDED, ['DIVERGED', 'FEW_PAIRS']),
    ],
)
def test_reasons_of_small_noisy_and_few_differences(study_dir, base, losses, decision, reasons):
    records = tuned_arm('qk/vo', losses=list(base)) + tuned_arm('b/vo', losses=list(losses))
    verdict = verdict_of(found_in(write_tuned(study_dir, records)), 'b/vo')
    assert verdict.decision is decision
    assert [reason.code.name for reason in verdict.reasons] == reasons
    p, p_same, detectable = verdict.p_holm, verdict.p_equivalence_holm, verdict.detectable
    assert (p is None) == (detectable is None) == (reasons[-1] == 'FEW_PAIRS')
    assert (
        verdict.reasons[-1].data
        == {
            'DIFFERENT_WITHIN_MARGIN': {'side': WORSE, 'margin': 0.005, 'p': p},
            'NOT_SHOWN': {'p': p, 'p_equivalence': p_same, 'detectable': detectable},
            'FEW_PAIRS': {'n': 2, 'needed': 3},
        }[reasons[-1]]
    )


def test_without_a_shared_seed_arms_are_compared_unpaired(study_dir):
    records = arm('qk/vo', 0) + arm('b/vo', 0.5, seeds=range(20, 28))
    found = found_in(write_tuned(study_dir, records))
    difference = found.arms[1].difference
    assert decisions(found) == {'b/vo': NO_VERDICT}
    assert not difference.paired and found.arms[1].differences == ()
    p = stats.ttest_ind(BASE + 0.5 + NOISE, BASE, equal_var=False).pvalue
    assert difference.p == pytest.approx(p)


def test_arms_without_their_verdict_run(study_dir):
    records = arm('qk/vo', 0) + arm('b/vo', 0.02) + arm('c/vo', 0.02)[:10]
    found = found_in(write_tuned(study_dir, records))
    assert decisions(found) == {'b/vo': WORSE, 'c/vo': NO_VERDICT}
    assert codes(verdict_of(found, 'c/vo').reasons) == [ReasonCode.NO_VERDICT_TRIALS]
    # The arm that is still to come is corrected for already.
    assert found.num_comparisons == verdict_of(found, 'b/vo').num_comparisons == 2
    assert verdict_of(found, 'b/vo').p_holm == pytest.approx(2 * found.arms[1].difference.p)


def test_no_verdict_before_the_baseline_has_its_own(study_dir):
    found = found_in(write_tuned(study_dir, arm('qk/vo', 0)[:10] + arm('b/vo', 0.02)))
    assert decisions(found) == {'b/vo': NO_VERDICT}
    (reason,) = verdict_of(found, 'b/vo').reasons
    assert reason.code is ReasonCode.NO_BASELINE_TRIALS and reason.data == {'baseline': 'qk/vo'}


def test_a_study_without_tuning_has_differences_and_no_verdict(study_dir):
    records = [
        trial_record(variant, seed=seed, val_loss=loss + 0.01 * seed * place)
        for place, (variant, loss) in enumerate((('qk/vo', 2.0), ('b/vo', 2.5), ('c/vo', 1.5)))
        for seed in (0, 1)
    ]
    found = found_in(write_study(study_dir, records))
    assert [a.difference and round(a.difference.mean, 3) for a in found.arms] == [
        None,
        0.505,
        -0.49,
    ]
    assert all(a.verdict is None for a in found.arms) and found.num_comparisons == 0
