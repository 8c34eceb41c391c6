"""Every code has its words; sentences that depend on the study; numbers as they are printed."""

import pytest

from qkattn.report import prose
from qkattn.report.prose import environment
from qkattn.stats.decision import Decision
from qkattn.stats.scaling import Problem, ProblemCode
from qkattn.study.arm_key import ArmKey
from qkattn.verdict import NotScaled, Reason, ReasonCode, Remark, RemarkCode, load_study
from qkattn.verdict.load import Missing
from tests.report.conftest import BASE, read, shifted
from tests.studies import edit_plan, run_name, trial_record, tuned_arm, write_study, write_tuned

A, B = ArmKey('a', 's', 'c'), ArmKey('b', 's', 'c')
CODES = {Remark: RemarkCode, Reason: ReasonCode, Problem: ProblemCode}
# What codes hold, by name; below, what some of them hold else.
DATA = {
    **{'accepted': None, 'actual': (1, 2), 'apart': 2, 'arm': 1, 'arms': (A, B)},
    **{'baseline': 'qk/vo', 'best': 1.6e-2, 'bleu': 3.5, 'corpus': 'c', 'cost': 0.05},
    **{'counts': (1,), 'decision': Decision.BETTER, 'declared': (0, 1, 2), 'detectable': 0.0123},
    **{'documents': 15, 'end': 'largest', 'enough': 5, 'expected': 2.0, 'factor': 2.5},
    **{'final_fraction': 0.5, 'first_look': '2025-01-02', 'gain': 0.022, 'harmless': False},
    **{'high': 0.5, 'knob': 'weight_decay', 'learning_rates': (1e-3, 2e-3), 'limit': 0.1},
    **{'look': 2, 'looks': 3, 'loss': 1.94, 'losses': (2.0, 2.1), 'low': 0.01, 'margin': 0.005},
    **{'matched': 'total', 'mean': 0.02, 'n': 16, 'name': '5-gram', 'needed': 4, 'num_steps': 4000},
    **{'p': 1e-2, 'p_equivalence': 1e-4, 'parameters': (1000.0, 9000.0), 'planned': 2},
    **{'problem': Problem(ProblemCode.SINGLE_LOSS, {}), 'r_squared': 0.5, 'reached': 1},
    **{'readable': 1, 'remarks': (Remark(RemarkCode.NO_TEST),), 'residual': 0.0123},
    **{'rows': (512, 1024), 'run': 'abc', 'runs': ('1', '2', '3', '4'), 'schedule': 'linear'},
    **{'sd': 0.4, 'seeds': (7, 8), 'side': Decision.WORSE, 'size': 's', 'sizes': 2},
    **{
        'split': 'test',
        'stage': 'verdict',
        'step': 40,
        'stopped': 1,
        'target': 12000,
        'test': -0.01,
    },
    **{'test_tokens': (9,), 'times': 3.0, 'tokens': 512000, 'tolerance': 1e-3, 'trials': 8},
    **{'tuned': False, 'typical': -0.001, 'usual': 0.012, 'validation': 0.002, 'value': 0.25},
    **{'values': (0.1, 0.2), 'yardstick': 1.577},
}
OTHER = {
    'remark_diverged': {'arms': ((A, (('screening', 1, 10, (12,)), ('verdict', 2, 8, (7, 30)))),)},
    'remark_differs': {'values': {'1': ('a', 'b', 'c', 'd'), 'f' * 40: ('e',)}},
    'remark_differs_from_baseline': {'value': '1'},
    'remark_evaluation': {'tokens': (65536,), 'documents': (99, 120)},
    'remark_look_in_progress': {'seeds': 12, 'arms': 7},
    'remark_other_setting': {'actual': 1.0},
    'remark_software_differs': {'values': {'1': ((A, 'screening'),), '2': ((B, 'verdict'),)}},
    'reason_diverged': {'baseline': 2},
    'problem_extrapolated': {'parameters': 1000.0},
}


def clauses() -> str:
    """A line for every code, of the arguments that its macro has."""
    module = environment(html=False).get_template('clauses.j2').module
    lines = []
    for kind, codes in CODES.items():
        for code in codes:
            name = f'{kind.__name__}_{code.name}'.lower()
            data = DATA | OTHER.get(name, {})
            about = {argument: data[argument] for argument in getattr(module, name).arguments}
            lines.append(f'{name}: {prose.clause(kind(code, about), comparisons=7)}')
    return '\n'.join([*lines, *(f'{code.name}: {prose.clause(code)}' for code in NotScaled)]) + '\n'


def test_every_clause_has_a_code():
    names = {f'{kind.__name__}_{c.name}'.lower() for kind in CODES for c in CODES[kind]}
    names |= {f'not_scaled_{code.name}'.lower() for code in NotScaled}
    macros = dir(environment(html=False).get_template('clauses.j2').module)
    kinds = ('remark_', 'reason_', 'problem_', 'not_scaled_')
    assert {name for name in macros if name.startswith(kinds)} == names


@pytest.mark.parametrize(
    ('about', 'subject'),
    [({}, 'Its '), ({'arm': A}, 'a at s: its '), ({'every_arm': True}, 'every arm: its ')],
)
def test_a_remark_names_its_arm(about, subject):
    text = prose.remark(Remark(RemarkCode.NO_TEST, **about))
    assert text == f'{subject}trials have no test loss, and the test split decides.'


@pytest.mark.parametrize(
    ('about', 'text'),
    [
        ((None,), 'not started'),
        (('verdict',), 'verdict not started'),
        (('single', None, 30, 80), 'step 30 of 80'),
        (
            ('screening', 'learning_rate', 300, 1800),
            'screening of learning rate, step 300 of 1,800',
        ),
    ],
)
def test_progress(about, text):
    assert prose.progress(Missing(None, A, *about)) == text


def summary(directory):
    study, findings = read(directory)
    return prose.sentences('summary.j2', study=study, findings=findings)


def pair(**changes):
    """Records of a baseline and an arm that is worse."""
    records = [('qk/vo', BASE), ('b/vo', shifted(0.02))]
    return [r for name, losses in records for r in tuned_arm(name, losses=losses, **changes)]


def test_what_is_not_equal_is_not_called_equal(study_dir):
    records = pair()
    for record in records:
        record |= {'target_parameters': None, 'residual': None}
    write_tuned(study_dir, records, matched=None)
    edit_plan(study_dir, run_name('b/vo', 'd_model=128', 'verdict'), optimizer__beta2=0.5)
    first, held_equal = summary(study_dir)
    assert first.startswith('Parameters not matched, each arm at its own tuned learning rate, 8')
    assert held_equal.startswith('Parameters are not matched; same data')
    assert 'but for optimizer.beta2;' in held_equal


def test_many_arms_are_counted_and_described_ones_are_a_range(study_dir):
    records = tuned_arm('qk/vo', losses=BASE)
    for index in range(8):
        records += tuned_arm(f'v{index}/vo', losses=shifted(0.02 + 0.01 * index))
    text, _ = summary(write_tuned(study_dir / 'tuned', records))
    assert text.count('[') == 5 and 'and 3 more arms are worse than qk/vo by more' in text
    assert text.index('v0/vo') < text.index('v4/vo') and 'v5/vo' not in text
    records = [trial_record(f'v{i}/vo', val_loss=2.5 - i) for i in range(6)]
    _, text, _ = summary(write_study(study_dir / 'described', [trial_record('qk/vo'), *records]))
    assert text.endswith('below zero is better): from v5/vo -4.5000 to v0/vo +0.5000.')


def test_positive_controls_that_fail_stand_first(study_dir):
    expected = ['b/vo is worse', 'b/vo is not worse']
    first, verdicts, passed, _ = summary(write_tuned(study_dir, pair(), expected=expected))
    assert first.startswith('Positive control fails: b/vo is expected to be not worse than qk/vo, ')
    assert 'and is worse (+0.02' in first and 'b/vo (+0.02' in verdicts
    assert passed.startswith('Positive control: b/vo is worse than qk/vo, as expected (+0.02')


def test_arms_without_verdict_trials_are_counted(study_dir):
    records = tuned_arm('qk/vo', losses=BASE) + tuned_arm('b/vo', losses=BASE)[:10]
    *_, last, _ = summary(write_tuned(study_dir / 'screened', records))
    assert last == '1 arm of 2 has no verdict trials so far.'
    # One that waits for its next interim analysis has some.
    records = [r for v in ('qk/vo', 'b/vo') for r in tuned_arm(v, losses=BASE)[:14]]
    late = [(v, 'd_model=128', 'verdict', None, f'{v} late') for v in ('qk/vo', 'b/vo')]
    waiting = write_tuned(study_dir / 'waiting', records, looks=[4, 8], declared=late)
    for *_, name in late:
        edit_plan(waiting, name, trials__seeds=[4, 5, 6, 7])
    assert len(load_study(waiting).missing) == 2
    assert 'no verdict trials' not in ' '.join(summary(waiting))


@pytest.mark.parametrize(
    ('baseline', 'rates', 'why'),
    [
        (None, (1e-3,), 'the study has no baseline to compare with.'),
        ('qk/vo', (1e-3,), 'the learning rate was not tuned per arm, all ran at 0.001.'),
        ('qk/vo', (1e-3, 2e-3), 'the learning rate of each arm was chosen by the seeds that its'),
    ],
)
def test_why_there_is_no_verdict(study_dir, baseline, rates, why):
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


def test_what_blocks_every_arm_is_the_result(study_dir):
    records = pair(screening_seeds=(100, 7))
    first, _ = summary(write_tuned(study_dir, records, tuning__seeds=[100, 7]))
    assert first.startswith('No verdict: screening and verdict share seed 7, which')


def test_numbers_and_data_as_they_are_printed():
    values = (None, 0, 12.5, 999.6, 4921812, 123456, 0.25, 2.5e15)
    assert [*map(prose.si, values)] == ['-', '0', '12.5', '1.00k', '4.92M', '123k', '0.25', '2.50P']
    assert [*map(prose.p_value, (None, 9e-4, 1e-3))] == ['-', '< 0.001', '0.001']
    assert prose.rounded([1234567.89, 1 / 3, 2.0, 'a']) == [1234567.9, 0.333333, 2.0, 'a']
    sides = {'source': {'name': 'a', 'version': '1'}, 'target': {'name': 'b', 'version': '2'}}
    assert prose.data_name(sides) == 'a → b 1 → 2'
    carved = {'name': 'own', 'version': 1, 'carved': {'test': 0.1}}
    assert prose.data_name(carved) == 'own 1 (10 % of train carved as test split)'


def test_a_form_has_all_options_and_equations():
    config = {'model': {'score': 'shared_qk', 'value': 'my.module:MyValue(rank=2)'}}
    name, score, value = prose.form(config)
    options = 'key_norm=False, self_mask=False, temperature=None'
    assert name == f'shared_qk({options})/my.module:MyValue(rank=2)'
    assert (score, value) == ('W_Q[n] W_Q[n]^T', '-')
