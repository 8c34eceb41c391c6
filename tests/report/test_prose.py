"""Every code has its words, which name the numbers; numbers as they are printed."""

import enum

import pytest

from qkattn.report import prose
from qkattn.report.prose import environment
from qkattn.stats.decision import Decision
from qkattn.stats.scaling import Problem, ProblemCode
from qkattn.study.arm_key import ArmKey
from qkattn.verdict import NotScaled, Reason, ReasonCode, Remark, RemarkCode, find, load_study
from qkattn.verdict.load import Missing
from tests.report.conftest import BASE, shifted
from tests.studies import edit_plan, run_name, trial_record, tuned_arm, write_study, write_tuned

A, B = ArmKey('a', 's', 'c'), ArmKey('b', 's', 'c')
REMARKS = {
    'LEARNING_RATE_NOT_TUNED': ({'learning_rates': (1e-3,)}, 'its grid is 0.001 only'),
    'SHARED_SEEDS': ({'seeds': (7, 8)}, 'screening and verdict share seeds 7 and 8, which makes'),
    'STOPPED_EARLY': (
        {'stopped': 1, 'trials': 8, 'step': 40, 'num_steps': 4000},
        '1 of 8 verdict trials stopped at step 40 of 4,000 and cannot enter a verdict',
    ),
    'NOT_ANNEALED': (
        {'schedule': 'linear', 'final_fraction': 0.5, 'limit': 0.1},
        'the learning rate ends at 0.5 of its peak, above 0.1, so',
    ),
    'MISSING_RESULTS': (
        {'readable': 1, 'planned': 2, 'stage': 'verdict', 'run': 'abc'},
        'run abc has readable results of 1 of its 2 verdict trials',
    ),
    'OVER_TOLERANCE': (
        {'matched': 'total', 'residual': 0.0123, 'tolerance': 1e-3},
        'total parameters differ by +1.23 %, above the tolerance of 0.1 %: no verdict at equal',
    ),
    'OTHER_SEEDS': (
        {'stage': 'verdict', 'actual': (1, 2), 'declared': (0, 1, 2)},
        'its verdict ran on seeds 1 and 2, the study declares 0, 1 and 2',
    ),
    'NOT_BRACKETED': (
        {'knob': 'learning_rate', 'low': 1e-3, 'high': 1.6e-2, 'best': 1.6e-2},
        'learning rate not bracketed: the best of 0.001 to 0.016 is 0.016',
    ),
    'SCREENING_INCOMPLETE': (
        {'knob': 'weight_decay', 'values': (0.1, 0.2)},
        'screening of the weight decay lacks results at 0.1, 0.2 to choose',
    ),
    'OTHER_SETTING': (
        {'knob': 'score_scale', 'actual': 1.0, 'expected': 2.0, 'tuned': False},
        'the verdict ran at score scale 1, the screening trials ran at 2',
    ),
    'FEW_SEEDS': (
        {'counts': (1,), 'enough': 5, 'arms': (A, B)},
        'verdicts rest on 1 seed (fewer than 5) for a at s and b at s',
    ),
    'DIVERGED': (
        {
            'arms': (
                (A, (('screening', 1, 10, (12,)), ('verdict', 2, 8, (7, 30)))),
                (B, ((None, 1, 1, ()),)),
            )
        },
        'a at s: 1 of 10 screening trials (at step 12) and 2 of 8 verdict trials (at steps 7-30); '
        'b at s: 1 of 1 trial',
    ),
    'EVALUATION': (
        {'tokens': (65536,), 'rows': (512, 1024), 'test_tokens': (9,), 'documents': (99, 120)},
        'in 512 or 1,024 rows, test losses over 9 tokens, of 99-120 documents a split',
    ),
    'DIFFERS': (
        {
            'name': 'x',
            'size': 's',
            'corpus': 'c',
            'values': {'1': ('a', 'b', 'c', 'd'), 'f' * 40: ('e',)},
            'harmless': False,
        },
        f'x differs between arms at s on c: 1 (a, b, c and 1 more), {"f" * 12}… (e)',
    ),
    'DIFFERS_FROM_BASELINE': (
        {'name': 'x', 'value': '1', 'baseline': '2'},
        "x is 1, the baseline's 2",
    ),
    'SOFTWARE_DIFFERS': (
        {
            'name': 'jax',
            'values': {'1': ((A, 'screening'),), '2': ((B, 'verdict'),)},
            'accepted': None,
        },
        'jax differs between runs: 1 (a at s (screening)), 2 (b at s)',
    ),
    'UNCOMMITTED_CHANGES': (
        {'accepted': 'a comment'},
        'changes that no commit holds (accepted: a comment)',
    ),
    'OTHER_DECLARATION': ({}, 'study.json is not what the ledger declares last'),
    'LOOK_IN_PROGRESS': (
        {'look': 2, 'looks': 3, 'seeds': 12, 'reached': 1, 'arms': 7},
        'look 2 of 3, at 12 seeds, is in progress: 1 of 7 arms has reached it',
    ),
    'ALTERED': ({'run': 'a1', 'look': 2}, 'run a1 is not what look 2 saw: its results, evalua'),
    'ORPHANED_RUNS': (
        {'runs': ('runs/a',)},
        '1 run outside the plan, which no number rests on: runs/a',
    ),
    'UNBOUNDED_OPTIMUM': (
        {'knob': 'learning_rate'},
        'its screening does not bound the optimum of the learning rate',
    ),
    'NO_TEST': ({}, 'its trials have no test loss'),
    'FEW_DOCUMENTS': (
        {'split': 'test', 'documents': 15, 'needed': 100},
        'its test split has 15 documents, a verdict needs 100',
    ),
    'POST_HOC': (
        {'first_look': '2025-01-02T03:04:05+00:00'},
        'post hoc: the arm was added, or its settings changed, after the first look at results '
        '(2025-01-02T03:04:05+00:00)',
    ),
    'NO_YARDSTICK': ({}, 'its yardsticks are not recorded; python -m experiments.report --study='),
    'BELOW_YARDSTICK': (
        {'split': 'test', 'loss': 1.94, 'name': '5-gram', 'yardstick': 1.577, 'tokens': 512000},
        'not trained enough to compare: test loss 1.940 nats/token, counts of the same 512,000 '
        'tokens (5-gram) have 1.577',
    ),
    'LITTLE_CONTEXT': (
        {'gain': 0.022, 'needed': 0.1},
        'not trained enough to compare: its loss falls by 0.022 nats/token between position 4 and',
    ),
    'LOW_BLEU': ({'bleu': 3.5, 'needed': 15.0}, 'not trained enough to compare: BLEU 3.5, less'),
    'SOURCES_UNUSED': (
        {'cost': 0.05, 'needed': 0.5},
        'with the sources of other sentences its loss rises by 0.050 nats/token, less than 0.5',
    ),
    'BIMODAL_SEEDS': (
        {'sd': 0.4, 'usual': 0.012, 'times': 3.0},
        'standard deviation of 0.4 nats/token is more than 3 times the median arm',
    ),
}
REASONS = {
    'DIVERGED': ({'arm': 1, 'baseline': 2}, "1 of its trials diverged; 2 of the baseline's trials"),
    'FEW_PAIRS': ({'n': 1, 'needed': 3}, '1 finished seed in both, a verdict needs 3'),
    'EQUIVALENT': ({'p': 0.0123}, 'equivalence p = 0.012, corrected for 7 arms'),
    'DIFFERENT': ({'p': 1e-4}, 'p < 0.001, corrected for 7 arms'),
    'BEYOND_MARGIN': (
        {'margin': 0.005, 'p': 0.01},
        'by more than 0.005 nats/token, p = 0.010, corrected for 7 arms',
    ),
    'NOT_BEYOND_MARGIN': (
        {'margin': 0.005, 'p': 0.5},
        'not shown to be more than 0.005 nats/token, p = 0.500, corrected for 7 arms',
    ),
    'SPLITS_DISAGREE': (
        {'decision': Decision.BETTER, 'test': -0.0123, 'validation': 0.002},
        'it would be better, but the splits disagree: -0.0123 nats/token on test, +0.0020 on',
    ),
    'DIFFERENT_WITHIN_MARGIN': (
        {'side': Decision.WORSE, 'margin': 0.005, 'p': 0.01},
        'worse by less than 0.005 nats/token, p = 0.010',
    ),
    'DIFFERENT_BUT_DIVERGED': (
        {'side': Decision.BETTER, 'p': 0.002},
        'better on the seeds left, p = 0.002, corrected',
    ),
    'NOT_SHOWN': (
        {'p': 0.5, 'p_equivalence': 0.25, 'detectable': 0.0123},
        'p = 0.500, equivalence p = 0.250, corrected for 7 arms; a difference of 0.012 nats/token',
    ),
    'NO_VERDICT_TRIALS': ({}, 'its verdict trials have no results yet'),
    'NO_BASELINE_TRIALS': ({'baseline': 'qk/vo'}, 'the baseline qk/vo has no verdict trials there'),
    'BASELINE_BLOCKED': (
        {'baseline': 'qk/vo', 'remarks': (Remark(RemarkCode.NO_TEST),)},
        'the baseline qk/vo: its trials have no test loss, and the test split decides',
    ),
    'NO_DOCUMENTS': ({}, 'it and the baseline have no losses over the same documents'),
    'SEEDS_APART': (
        {'apart': 2, 'n': 16, 'mean': 0.02, 'typical': -0.001, 'p': 0.4},
        '2 of 16 seeds lie apart, +0.0200 nats/token with and -0.0010 without (p = 0.400, not',
    ),
}
LOOSE = {'value': 0.25, 'low': 0.01, 'high': 0.5}
PROBLEMS = {
    'FEW_SIZES': ({'sizes': 2, 'needed': 4}, 'a scaling law needs 4 sizes or more, there are 2'),
    'NARROW_SPAN': ({'factor': 2.5, 'needed': 4.0}, 'span a factor of 2.5, a scaling law needs 4'),
    'NOT_FALLING': (
        {'losses': (2.0, 2.1), 'parameters': (1000.0, 9000.0)},
        '2.0000 nats/token at 1,000 parameters, 2.1000 at 9,000',
    ),
    'POOR_FIT': ({'r_squared': 0.5, 'needed': 0.95}, 'R² is 0.500, below 0.95'),
    'EXPONENT_NEAR_ZERO': (LOOSE, 'distinguish the exponent from zero: 0.25, with a 95 % interval'),
    'EXPONENT_LOOSE': (
        LOOSE,
        'determine the exponent: 0.25, with a 95 % interval from 0.01 to 0.5',
    ),
    'NO_BASELINE_LAW': (
        {'problem': Problem(ProblemCode.FEW_SIZES, {'sizes': 1, 'needed': 4})},
        'the baseline has no scaling law',
    ),
    'SINGLE_LOSS': ({}, 'from a single loss of the arm'),
    'EXTRAPOLATED': (
        {'loss': 2.0, 'parameters': 1000.0, 'end': 'largest', 'factor': 2.0},
        '2.0000 nats/token at 1,000 parameters is that of a baseline of more than 2 times',
    ),
    'INTERVAL_EXTRAPOLATED': ({'value': 1.2345}, 'around a multiplier of 1.23 reaches sizes'),
}
CASES = [
    (kind(code[name], data), said)
    for kind, code, table in (
        (Remark, RemarkCode, REMARKS),
        (Reason, ReasonCode, REASONS),
        (Problem, ProblemCode, PROBLEMS),
    )
    for name, (data, said) in table.items()
]


@pytest.mark.parametrize(
    ('found', 'said'), CASES, ids=lambda x: x.code.name if hasattr(x, 'code') else ''
)
def test_clause(found, said):
    assert said in prose.clause(found, comparisons=7)


@pytest.mark.parametrize(
    ('prefix', 'codes', 'table'),
    [
        ('remark', RemarkCode, REMARKS),
        ('reason', ReasonCode, REASONS),
        ('problem', ProblemCode, PROBLEMS),
        ('not_scaled', NotScaled, None),
    ],
)
def test_every_code_has_a_clause_and_every_clause_a_code(prefix, codes: type[enum.Enum], table):
    names = {code.name for code in codes}
    assert table is None or table.keys() == names
    module = environment(html=False).get_template('clauses.j2').module
    assert {
        n.removeprefix(f'{prefix}_').upper() for n in dir(module) if n.startswith(f'{prefix}_')
    } == names


def test_remarks_name_their_arm():
    remark = Remark(RemarkCode.NO_TEST)
    clause = prose.clause(remark)
    assert prose.remark(remark) == f'{clause[0].upper()}{clause[1:]}.'
    of_arm = Remark(RemarkCode.NO_TEST, arm=ArmKey('a/vo', 's', 'c'))
    assert prose.remark(of_arm) == f'a/vo at s: {clause}.'
    of_all = Remark(RemarkCode.NO_TEST, every_arm=True)
    assert prose.remark(of_all) == f'every arm: {clause}.'


def test_progress():
    def said(*about):
        return prose.progress(Missing(None, ArmKey('a/vo', 's', 'c'), *about))

    assert said(None) == 'not started' and said('verdict') == 'verdict not started'
    assert said('single', None, 30, 80) == 'step 30 of 80'
    text = said('screening', 'learning_rate', 300, 1800)
    assert text == 'screening of learning rate, step 300 of 1,800'


def summary(directory):
    study = load_study(directory)
    return prose.sentences('summary.j2', study=study, found=find(study))


def test_what_differs_and_what_is_not_matched_is_not_called_equal(study_dir):
    records = [*tuned_arm('qk/vo', losses=BASE), *tuned_arm('b/vo', losses=shifted(0.02))]
    for record in records:
        record |= {'target_parameters': None, 'residual': None}
    write_tuned(study_dir, records, matched=None)
    edit_plan(study_dir, run_name('b/vo', 'd_model=128', 'verdict'), optimizer__beta2=0.5)
    first, held_equal = summary(study_dir)
    assert first.startswith('Parameters not matched, each arm at its own tuned learning rate, 8')
    assert held_equal.startswith('Parameters are not matched; same data')
    assert 'but for optimizer.beta2;' in held_equal


def test_many_arms_are_counted(study_dir):
    records = tuned_arm('qk/vo', losses=BASE)
    for index in range(8):
        records += tuned_arm(f'v{index}/vo', losses=shifted(0.02 + 0.01 * index))
    said, _ = summary(write_tuned(study_dir, records))
    assert said.count('[') == 5 and 'and 3 more arms are worse than qk/vo by more' in said
    assert said.index('v0/vo') < said.index('v4/vo') and 'v5/vo' not in said


def test_a_positive_control_that_fails_is_said_first(study_dir):
    records = [*tuned_arm('qk/vo', losses=BASE), *tuned_arm('b/vo', losses=shifted(0.02))]
    expected = ['b/vo is worse', 'b/vo is not worse']
    first, verdicts, passed, _ = summary(write_tuned(study_dir, records, expected=expected))
    assert first.startswith('Positive control fails: b/vo is expected to be not worse than qk/vo, ')
    assert 'and is worse (+0.02' in first and 'b/vo (+0.02' in verdicts
    assert passed.startswith('Positive control: b/vo is worse than qk/vo, as expected (+0.02')


def test_many_described_arms_are_a_range(study_dir):
    records = [
        trial_record('qk/vo'),
        *(trial_record(f'v{i}/vo', val_loss=2.5 - i) for i in range(6)),
    ]
    _, said, _ = summary(write_study(study_dir, records))
    assert said.endswith(
        '(descriptive, below zero is better): from v5/vo -4.5000 to v0/vo +0.5000.'
    )


def test_arms_without_results_are_counted(study_dir):
    records = tuned_arm('qk/vo', losses=BASE) + tuned_arm('b/vo', losses=BASE)[:10]
    *_, last, _ = summary(write_tuned(study_dir, records))
    assert last == '1 arm of 2 has no verdict trials so far.'


def test_an_arm_that_waits_for_its_next_look_has_verdict_trials(study_dir):
    arms = ('qk/vo', 'b/vo')
    records = [r for variant in arms for r in tuned_arm(variant, losses=BASE)[:14]]
    late = [(variant, 'd_model=128', 'verdict', None, f'{variant} late') for variant in arms]
    write_tuned(study_dir, records, looks=[4, 8], declared=late)
    for *_, name in late:
        edit_plan(study_dir, name, trials__seeds=[4, 5, 6, 7])
    assert [missing.name for missing in load_study(study_dir).missing] == [of[-1] for of in late]
    assert 'no verdict trials' not in ' '.join(summary(study_dir))


def test_what_blocks_every_arm_is_the_result(study_dir):
    records = [
        r for v in ('qk/vo', 'b/vo') for r in tuned_arm(v, losses=BASE, screening_seeds=(100, 7))
    ]
    first, _ = summary(write_tuned(study_dir, records, tuning__seeds=[100, 7]))
    assert first.startswith('No verdict: screening and verdict share seed 7, which')


@pytest.mark.parametrize(
    ('baseline', 'rates', 'why'),
    [
        (None, (1e-3,), 'the study has no baseline to compare with.'),
        ('qk/vo', (1e-3,), 'the learning rate was not tuned per arm, all ran at 0.001.'),
        ('qk/vo', (1e-3, 2e-3), 'the learning rate of each arm was chosen by the seeds that its'),
    ],
)
def test_a_study_without_tuning_describes(study_dir, baseline, rates, why):
    records = [
        trial_record(variant, seed=seed, learning_rate=rate, val_loss=loss + 0.01 * seed * number)
        for rate in rates
        for number, (variant, loss) in enumerate((('qk/vo', 2.0), ('b/vo', 2.5), ('c/vo', 1.5)))
        for seed in (0, 1)
    ]
    first, *rest, _ = summary(write_study(study_dir, records, baseline=baseline))
    assert first.startswith(f'No verdict: {why}')
    if baseline:
        assert rest[0].startswith('Differences in test loss from qk/vo, nats/token (descriptive,')
        assert rest[0].index('c/vo -0.4900') < rest[0].index('b/vo +0.5050')


def test_si():
    values = (None, 0, 12.5, 999.6, 4921812, 123456, 0.25, 2.5e15)
    assert [*map(prose.si, values)] == ['-', '0', '12.5', '1.00k', '4.92M', '123k', '0.25', '2.50P']


def test_data_is_named():
    sides = {'source': {'name': 'a', 'version': '1'}, 'target': {'name': 'b', 'version': '2'}}
    assert prose.data_name(sides) == 'a → b 1 → 2'
    assert prose.data_name({'name': 'copy', 'version': 1, 'options': {}}) == 'copy 1'
    carved = {'name': 'own', 'version': '1-carved-test', 'carved': {'test': 0.1}}
    assert prose.data_name(carved) == 'own 1-carved-test (10 % of train carved as test split)'
