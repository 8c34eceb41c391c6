"""Verdicts, and the words for them: every number recomputed by hand."""

import itertools

import numpy as np
import pytest
from scipy import stats

from qkattn.report import find, load_study, sentences, write_report
from qkattn.report.notes import notes
from qkattn.study.tuning import tune
from qkattn.verdict import NotScaled
from tests.studies import (
    RATES,
    edit_plan,
    run_name,
    trial_record,
    tuned_arm,
    write_study,
    write_tuned,
)

BASE = 2 + 0.05 * np.arange(8)
NOISE = 0.001 * np.array([3, -1, 2, 0, -2, 1, -3, 1])


class Said:
    """Findings with their prose."""

    def __init__(self, study, found):
        self.found = found
        self.sentences = sentences.found_in(study, found)
        self.held_equal = sentences.held_equal(study, found)
        self.without_scaling = sentences.NO_SCALING_LAW if found.lacks_scaling else None

    def __getattr__(self, name):
        return getattr(self.found, name)


def found_in(directory):
    study = load_study(directory)
    found = find(study)
    return Said(study, found)


def arm(variant, delta, **keywords):
    return tuned_arm(variant, losses=list(BASE + delta + NOISE * (delta != 0)), **keywords)


def words(found):
    return {a.variant: a.verdict.decision.value for a in found.arms if a.verdict}


def reason(found, variant):
    (verdict,) = [a.verdict for a in found.arms if a.variant == variant]
    return sentences.reason(verdict)


@pytest.fixture
def three(study_dir):
    records = arm('qk/vo', 0) + arm('b/vo', -0.03) + arm('c/vo', 0.02) + arm('d/vo', 0.0004)
    return write_tuned(study_dir, records)


def test_verdicts_by_hand(three):
    found = found_in(three)
    assert words(found) == {'b/vo': 'better', 'c/vo': 'worse', 'd/vo': 'equivalent'}
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
    assert found.num_comparisons == 3 and found.arms[0].verdict is None


def test_sentences_of_the_first_screen(three):
    found = found_in(three)
    half = stats.t.ppf(0.975, 7) * NOISE.std(ddof=1) / 8**0.5
    low, high = NOISE.mean() - 0.03 - half, NOISE.mean() - 0.03 + half
    (said,) = found.sentences
    assert said.startswith(
        'At equal total parameters (820k), each arm at its own tuned learning rate, 8 fresh seeds: '
        f'b/vo (-0.030 [{low:+.3f}, {high:+.3f}]) is better than qk/vo; c/vo (+0.020 ['
    )
    assert said.endswith('is equivalent to qk/vo (within 0.005 nats/token).')
    assert found.held_equal == (
        'Equal total parameters (820k, within 0.1 %); same data, training (400 steps) and '
        'evaluation set; each arm at its own tuned learning rate.'
    )
    assert found.scaling == ()


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
    assert [said.partition(',')[0] for said in found.sentences] == [
        'At equal total parameters (214k at s64)',
        'At equal total parameters (820k at s128)',
    ]
    assert found.scaling[0].fit.problem.data == {'sizes': 2, 'needed': 4}
    assert [s.variant for s in found.scaling] == ['qk/vo', 'b/vo', 'c/vo']


def scaled(widths, loose=None):
    """Two arms by width on a law of size; the baseline is not bracketed at the `loose` one."""
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


def test_sizes_with_a_diverged_seed_are_left_out_of_the_scaling(study_dir):
    records = arm('qk/vo', 0, size='s64', d_model=64)
    records += tuned_arm('qk/vo', 's128', [None, *BASE[1:]])
    (scaling,) = found_in(write_tuned(study_dir, records)).scaling
    assert len(scaling.fit.sizes) == 1


def test_sizes_that_are_not_bracketed_are_left_out_of_the_scaling_and_named(study_dir):
    write_tuned(study_dir, scaled((32, 64, 128, 256, 512), loose=128))
    found = found_in(study_dir)
    assert [len(scaling.fit.sizes) for scaling in found.scaling] == [4, 5]
    said = notes(load_study(study_dir), found)
    assert 'Left out of the laws of size: qk/vo at s128 (learning rate not bracketed).' in said
    assert any("fitted to the baseline's 4 sizes" in note for note in said)
    assert not any('laws of size are descriptive' in note for note in said)


def test_sizes_of_which_none_can_be_used_say_so(study_dir):
    records = [
        record
        for size, d_model in (('s64', 64), ('s128', 128))
        for record in tuned_arm('qk/vo', size, [None, *BASE[1:]], d_model=d_model)
    ]
    found = found_in(write_tuned(study_dir, records))
    assert found.scaling == () and found.without_scaling.startswith('No law of size')
    said = notes(load_study(study_dir), found)
    assert found.without_scaling in said
    assert any(note.startswith('Left out of the laws of size: qk/vo at s64') for note in said)
    assert found.without_scaling in write_report(study_dir).read_text()
    one = found_in(write_tuned(study_dir / 'one', tuned_arm('qk/vo', 's64', d_model=64)))
    assert one.without_scaling is None


def test_why_an_arm_is_no_point_of_a_law(study_dir):
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


def test_laws_without_tuning_are_called_descriptive(study_dir):
    verdicts = [r for r in scaled((32, 64, 128, 256)) if r['stage'] == 'verdict']
    single = [r | {'stage': 'single', 'run': f'{r["run"]}-single'} for r in verdicts]
    for record in single:
        record['config_hash'] = record['run']
    write_study(study_dir, single)
    found = found_in(study_dir)
    assert all(scaling.fit.problem is None for scaling in found.scaling)
    assert any('laws of size are descriptive' in n for n in notes(load_study(study_dir), found))


def test_bowls_come_from_screening_trials(three):
    bowl = found_in(three).arms[1].sweeps['learning_rate']
    assert bowl.values == RATES and bowl.bracketed
    assert bowl.optimum == pytest.approx(4e-3) and bowl.chosen == 4e-3
    assert len(bowl.losses[0]) == 2


GRIDS = {
    'learning_rate': RATES,
    'weight_decay': (0.05, 0.1, 0.2),
    'score_scale': (0.5, 1.0, 2.0),
}
OPTIMA = (4e-3, 0.3, 1.25)


def write_chain(directory, variant='qk/vo'):
    """Trials as they are asked for one after another, the verdict at what was found."""
    runs, measured = {}, {}
    while (asked := tune(GRIDS, 5, measured)).knob:
        for at in map(asked.at, asked.values):
            away = sum(np.log(value / best) ** 2 for value, best in zip(at, OPTIMA, strict=True))
            measured[at] = {seed: 2 + 0.1 * away + 0.01 * seed for seed in (100, 101)}
            runs[at] = asked.knob, measured[at]
    runs[asked.settings] = None, dict(enumerate(BASE))
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
    return asked


def test_bowls_and_settings_are_those_that_the_plan_comes_to(study_dir):
    """A rate on the grid is chosen, so that one trial belongs to the bowls of two knobs."""
    asked = write_chain(study_dir)
    (arm,) = found_in(study_dir).arms
    assert arm.sweeps == asked.sweeps and list(arm.sweeps) == list(GRIDS)
    assert arm.sweeps['weight_decay'].values == (0.05, 0.1, 0.2, 0.4, 0.8)
    assert asked.settings == pytest.approx(OPTIMA, rel=1e-2) and asked.settings[0] == 4e-3
    assert arm.blocks == arm.not_bracketed == ()


def test_the_middle_of_what_is_tuned_later_is_where_bowls_are_read(study_dir):
    """Trials of the same knob elsewhere are none of its bowl."""
    records = arm('qk/vo', 0)
    for seed in (100, 101):
        elsewhere = trial_record(
            'qk/vo', stage='screening', knob='learning_rate', seed=seed, val_loss=0.1, run='x'
        )
        elsewhere['trial'] |= {'learning_rate': 32e-3, 'weight_decay': 0.3}
        records.append(elsewhere)
    bowl = found_in(write_tuned(study_dir, records)).arms[0].sweeps['learning_rate']
    assert bowl.values == RATES and bowl.best == 4e-3


def test_values_that_lack_a_screening_seed_have_no_bowl(study_dir):
    records = arm('qk/vo', 0)
    del records[2]
    found = found_in(write_tuned(study_dir, records)).arms[0]
    assert found.sweeps == {}
    assert tuple(map(sentences.clause, found.blocks)) == (
        'its screening of the learning rate lacks results at 0.002 to choose a value by',
    )


def test_a_knob_of_one_value_is_where_the_arm_has_it(study_dir):
    variant = 'b/vo?score_scale=2.0'
    write_tuned(study_dir, arm('qk/vo', 0) + arm(variant, 0.02))
    for stage, knob in (('screening', 'learning_rate'), ('verdict', None)):
        name = run_name(variant, 'd_model=128', stage, knob)
        edit_plan(study_dir, name, model__score_scale=2.0)
    found = found_in(study_dir)
    assert words(found) == {variant: 'worse'} and found.arms[1].sweeps['learning_rate'].bracketed


@pytest.fixture
def vague(study_dir):
    """Writes two arms, one of them with a noisy screening; the words, its bowl and the reason."""

    def write(delta, noisy):
        records = arm('qk/vo', 0) + arm('b/vo', delta)
        noise = np.random.default_rng(0).normal(0, 0.07, 10)
        for record, extra in zip(
            [r for r in records if r['stage'] == 'screening' and r['variant'] == noisy],
            noise,
            strict=True,
        ):
            record['val_loss'] += extra
        chosen = found_in(write_tuned(study_dir, records))
        at = next(a for a in chosen.arms if a.variant == noisy)
        rate = at.sweeps['learning_rate'].chosen
        for record in records:
            if record['stage'] == 'verdict' and record['variant'] == noisy:
                record['trial']['learning_rate'] = rate
        return found_in(write_tuned(study_dir, records)), at.sweeps['learning_rate'].at_worst

    return write


@pytest.mark.parametrize(('noisy', 'whose'), [('b/vo', 'its '), ('qk/vo', "the baseline's ")])
@pytest.mark.parametrize(('delta', 'word'), [(0.02, 'worse'), (-0.02, 'better'), (0.5, 'worse')])
def test_what_screening_may_have_missed_stands_with_the_word(
    study_dir, vague, noisy, whose, delta, word
):
    found, at_worst = vague(delta, noisy)
    assert 0.02 < at_worst < 0.5 and words(found) == {'b/vo': word}
    said = (
        f'{whose}learning rate may be off by more than that: {at_worst:.2g} nats/token at the '
        "farther end of the optimum's interval"
    )
    assert tuple(sentences._reason(c, 1) for c in found.arms[1].verdict.caveats) == (
        (said,) if abs(delta) < 0.1 else ()
    )
    assert reason(found, 'b/vo').endswith(f'; {said}') == (abs(delta) < 0.1)
    noted = [note for note in notes(load_study(study_dir), found) if said in note]
    assert [note.partition(':')[0] for note in noted] == (
        [f'{word.capitalize()}, b/vo at d_model=128'] if abs(delta) < 0.1 else []
    )


@pytest.mark.parametrize(
    ('delta', 'loose', 'word'),
    [
        (0.02, 'arm', 'undecided'),
        (-0.02, 'arm', 'better'),
        (0.0004, 'arm', 'undecided'),
        (0.02, 'baseline', 'worse'),
        (-0.02, 'baseline', 'undecided'),
        (0.0004, 'baseline', 'undecided'),
    ],
)
def test_an_optimum_beyond_the_grid_forbids_words(study_dir, delta, loose, word):
    edge = {'optimum': 16e-3}
    records = arm('qk/vo', 0, **(edge if loose == 'baseline' else {}))
    records += arm('b/vo', delta, **(edge if loose == 'arm' else {}))
    found = found_in(write_tuned(study_dir, records))
    assert words(found) == {'b/vo': word}
    said = 'learning rate not bracketed'
    assert (said if loose == 'arm' else f"the baseline's {said}") in reason(found, 'b/vo')
    assert ('may lie beyond' in reason(found, 'b/vo')) == (word == 'undecided')
    assert (not found.arms[0].not_bracketed) == (loose == 'arm')


def test_divergence_never_helps(study_dir):
    records = arm('qk/vo', 0) + tuned_arm('b/vo', losses=[None, *(BASE[1:] - 0.03 + NOISE[1:])])
    found = found_in(write_tuned(study_dir, records))
    assert words(found) == {'b/vo': 'undecided'}
    assert found.arms[1].difference.n == 7 and found.arms[1].num_diverged == 1


def test_no_shared_seed_is_said_and_tested_unpaired(study_dir):
    records = arm('qk/vo', 0) + arm('b/vo', 0.5, seeds=range(20, 28))
    found = found_in(write_tuned(study_dir, records))
    difference = found.arms[1].difference
    assert words(found) == {'b/vo': 'no verdict'}
    assert not difference.paired and found.arms[1].differences == ()
    p = stats.ttest_ind(BASE + 0.5 + NOISE, BASE, equal_var=False).pvalue
    assert difference.p == pytest.approx(p)


def test_arms_without_their_verdict_run(study_dir):
    records = arm('qk/vo', 0) + arm('b/vo', 0.02) + arm('c/vo', 0.02)[:10]
    found = found_in(write_tuned(study_dir, records))
    assert words(found) == {'b/vo': 'worse', 'c/vo': 'no verdict'}
    assert reason(found, 'c/vo') == 'its verdict trials have no results yet'
    # The arm that is still to come is corrected for already.
    assert found.num_comparisons == 2
    assert reason(found, 'b/vo').endswith('after Holm over 2 arms')
    assert found.sentences[-1] == '1 arm of 3 has no verdict trials so far.'


def test_nothing_can_be_said_before_the_baseline_has_its_verdict(study_dir):
    found = found_in(write_tuned(study_dir, arm('qk/vo', 0)[:10] + arm('b/vo', 0.02)))
    assert words(found) == {'b/vo': 'no verdict'}
    assert reason(found, 'b/vo') == 'the baseline qk/vo has no verdict trials there'


def test_many_arms_are_counted_in_the_sentence(study_dir):
    records = arm('qk/vo', 0)
    for index in range(8):
        records += arm(f'v{index}/vo', 0.02 + 0.01 * index)
    (said,) = found_in(write_tuned(study_dir, records)).sentences
    assert said.count('[') == 5 and 'and 3 more arms are worse than qk/vo.' in said
    assert said.index('v0/vo') < said.index('v4/vo') and 'v5/vo' not in said


@pytest.mark.parametrize(
    ('rates', 'why'),
    [
        ((1e-3,), 'the learning rate was not tuned per arm, all ran at 0.001'),
        ((1e-3, 2e-3), 'the learning rate of each arm was chosen by the seeds that its loss is'),
    ],
)
def test_a_study_without_tuning_describes(study_dir, rates, why):
    records = [
        trial_record(variant, seed=seed, learning_rate=rate, val_loss=loss + 0.01 * seed * place)
        for rate in rates
        for place, (variant, loss) in enumerate((('qk/vo', 2.0), ('b/vo', 2.5), ('c/vo', 1.5)))
        for seed in (0, 1)
    ]
    found = found_in(write_study(study_dir, records))
    first, second = found.sentences
    assert first.startswith(f'No verdict: {why}')
    assert second.startswith('Differences to qk/vo, nats/token (descriptive, below zero is better)')
    assert second.index('c/vo -0.490') < second.index('b/vo +0.505')
    assert all(a.verdict is None for a in found.arms) and found.num_comparisons == 0
