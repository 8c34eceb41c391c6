"""Every rule that a verdict has to keep: broken once, reported, and the verdict withheld."""

import numpy as np
import pytest

from qkattn.storage import ledger
from qkattn.study.arm_key import ArmKey
from qkattn.verdict import Decision, ReasonCode, Remark, RemarkCode, find, load_study
from tests import studies
from tests.studies import edit_plan, run_name, trial_record, tuned_arm, write_tuned

BASE = 2 + 0.05 * np.arange(8)
MEAN = float(BASE.mean()) + 0.1  # of the test split
SEEDS = studies.VERDICT_SEEDS
RATES = studies.RATES
SIZE = 'd_model=128'
B = ArmKey('b/vo', SIZE, 'stdlib')
QK = B._replace(variant='qk/vo')
VERDICT = {v: run_name(v, SIZE, 'verdict') for v in ('qk/vo', 'b/vo', 'c/vo')}
SCREENING = run_name('b/vo', SIZE, 'screening', 'learning_rate')
WORSE = Decision.WORSE
NO_VERDICT = Decision.NO_VERDICT
JUDGED = {'b/vo': WORSE, 'c/vo': WORSE}
WITHHELD = JUDGED | {'b/vo': NO_VERDICT}
ALL_WITHHELD = dict.fromkeys(JUDGED, NO_VERDICT)
EVALUATION = {'tokens': (65536,), 'rows': (512,), 'test_tokens': (32768,), 'documents': (100,)}


def records_of(stage='verdict', variant='b/vo', **changes):
    """The records of three arms, with these changes in those of one arm at one stage."""
    records = []
    for number, name in enumerate(VERDICT):
        records += tuned_arm(name, losses=list(BASE + 0.02 * number))
    for record in records:
        if (record['variant'], record['stage']) == (variant, stage):
            record |= changes
    return records


def records_with_b(**b):
    """The records of three arms, of which b/vo is made with these keywords of `tuned_arm`."""
    records = [record for record in records_of() if record['variant'] != 'b/vo']
    return records[:18] + tuned_arm('b/vo', **{'losses': list(BASE + 0.02)} | b) + records[18:]


def judge_study(directory):
    """(findings, decisions by variant, remarks) of a study; leaves out the remark that describes
    the evaluation."""
    findings = find(load_study(directory))
    decisions = {arm.variant: arm.verdict.decision for arm in findings.arms if arm.verdict}
    remarks = [r for r in findings.remarks if r.code is not RemarkCode.EVALUATION]
    return findings, decisions, remarks


def blocking_remark(code, arm=B, **data):
    return Remark(RemarkCode[code], data, blocks=True, arm=arm)


TARGET = trial_record('b/vo')['target_parameters']
LARGE = {'parameters': trial_record('b/vo')['parameters'] | {'total': round(1.004 * TARGET)}}
LARGE['residual'] = LARGE['parameters']['total'] / TARGET - 1
DATA = {'data': {'name': 'stdlib', 'version': '3.12', 'unigram_bits_per_byte': 4.53}}
DECAY = {'trial': {'seed': 7, 'learning_rate': 4e-3, 'weight_decay': 0.2}}
ONE_DECAY = [*records_with_b()[:35], records_with_b()[35] | DECAY, *records_with_b()[36:]]
NEAR_CHOSEN_RATE = 4.000001e-3
DIFFERS = 'DIFFERS_FROM_BASELINE'
SECOND_VERDICT_RUN = [r | {'run': 'later', 'config_hash': 'later'} for r in records_with_b()[28:36]]
SEEDS_OF_SCREENING = (*studies.SCREENING_SEEDS, 102)
RATE = {'knob': 'learning_rate'}


@pytest.mark.parametrize(
    # Changes of the records of b/vo, or all records; changes of its planned run; and the code and
    # data of the remark that withholds its verdict.
    ('records', 'plan', 'code', 'data'),
    [
        ({}, {'optimizer__schedule': 'constant'}, 'NOT_ANNEALED', {'schedule': 'constant'}),
        ({}, {'trials__seeds': [*SEEDS, 8]}, 'OTHER_SEEDS', {'actual': (*SEEDS, 8)}),
        (
            {},
            {'screening': [*SEEDS_OF_SCREENING]},
            'OTHER_SEEDS',
            {'actual': SEEDS_OF_SCREENING, 'stage': 'screening'},
        ),
        (
            {},
            {'train__init_from': 'runs/a'},
            DIFFERS,
            {'name': 'train.init_from', 'value': 'runs/a'},
        ),
        # A score scale or weight decay that is not tuned is no arm's own.
        ({}, {'model__score_scale': 2.0}, DIFFERS, {'name': 'model.score_scale', 'value': '2.0'}),
        (DATA, {}, DIFFERS, {'name': 'data.version', 'value': '3.12', 'baseline': '3.11.7'}),
        ({'eval_tokens': 4096}, {}, DIFFERS, {'name': 'eval_tokens', 'value': '4096'}),
        (records_with_b(**LARGE), {}, 'OVER_TOLERANCE', {'residual': LARGE['residual']}),
        (
            records_with_b(learning_rate=NEAR_CHOSEN_RATE),
            {},
            'OTHER_SETTING',
            RATE | {'actual': NEAR_CHOSEN_RATE, 'tuned': True},
        ),
        (ONE_DECAY, {}, 'OTHER_SETTING', {'knob': 'weight_decay', 'actual': 0.2, 'tuned': False}),
        (
            records_with_b()[:18] + records_with_b()[28:],
            {},
            'SCREENING_INCOMPLETE',
            RATE | {'values': RATES},
        ),
        (records_with_b(optimum=16e-3), {}, 'NOT_BRACKETED', RATE | {'high': 0.016, 'best': 0.016}),
        # A second verdict run, which would count seeds twice.
        (
            records_with_b() + SECOND_VERDICT_RUN,
            {},
            'OTHER_SEEDS',
            {'actual': (*SEEDS, *SEEDS), 'stage': 'verdict'},
        ),
        # Bracketed by diverged values alone.
        (records_with_b(diverged_rates=(1e-3, 2e-3, 8e-3, 16e-3)), {}, 'UNBOUNDED_OPTIMUM', RATE),
    ],
)
def test_an_arm_that_breaks_a_rule_or_is_unlike_the_baseline_gets_no_verdict(
    study_dir, records, plan, code, data
):
    records = records_of(**records) if isinstance(records, dict) else records
    write_tuned(study_dir, records)
    if 'screening' in plan:
        edit_plan(study_dir, SCREENING, trials__seeds=plan['screening'])
    else:
        edit_plan(study_dir, VERDICT['b/vo'], **plan)
    findings, decisions, remarks = judge_study(study_dir)
    assert decisions == WITHHELD
    # The remarks on the arm are the reasons of its verdict, and come before all others.
    arm = next(arm for arm in findings.arms if arm.key == B)
    blocks = list(arm.blocks)
    assert arm.verdict.reasons == arm.blocks
    assert [remark for remark in remarks if remark.blocks] == blocks
    assert remarks[: len(blocks)] == blocks
    assert any(r.code.name == code and r.data.items() >= data.items() for r in blocks)


MAY_DIFFER = {f'model__{name}': 8 for name in ('d_model', 'd_ff', 'num_heads', 'head_size')}
MAY_DIFFER |= {'model__score': 'x', 'model__value': 'y', 'train__lifting': 'vmap'}
MAY_DIFFER |= {'trials__learning_rates': [4e-3, 1.0], 'data__data_dir': '/elsewhere'}


# One of the screening seeds is a verdict seed.
SHARING_A_SEED = [
    r for name in VERDICT for r in tuned_arm(name, losses=BASE, screening_seeds=(100, 7))
]
NO_TEST = [record | {'test_loss': None, 'test_bits_per_byte': None} for record in records_of()]
ONE_RATE = {'tuning__learning_rates': [4e-3], 'tuning__weight_decays': [0.1, 0.2]}


@pytest.mark.parametrize(
    ('records', 'study', 'code', 'data'),
    [
        (SHARING_A_SEED, {'tuning__seeds': [100, 7]}, 'SHARED_SEEDS', {'seeds': (7,)}),
        (records_of(), ONE_RATE, 'LEARNING_RATE_NOT_TUNED', {'learning_rates': (4e-3,)}),
        (records_of(), {'num_documents': 99}, 'FEW_DOCUMENTS', {'documents': 99, 'needed': 100}),
        (NO_TEST, {}, 'NO_TEST', {}),
    ],
)
def test_a_rule_that_every_arm_breaks_withholds_every_verdict(
    study_dir, records, study, code, data
):
    findings, decisions, _ = judge_study(write_tuned(study_dir, records, **study))
    assert decisions == ALL_WITHHELD
    assert findings.split == ('val' if code == 'NO_TEST' else 'test')
    assert any(r.code.name == code and r.data.items() >= data.items() for r in findings.blocks)
    assert all(r.every_arm == (code in ('FEW_DOCUMENTS', 'NO_TEST')) for r in findings.blocks[:1])


PROBE = [r | {'val_bits_per_byte': None, 'test_bits_per_byte': None} for r in records_of()]
UNMATCHED = [r | {'target_parameters': None, 'residual': None} for r in records_of()]
DIVERGED = records_with_b(losses=[None, *(BASE[1:] + 0.02)], diverged_rates=(16e-3,))


@pytest.mark.parametrize(
    ('records', 'study', 'runs', 'changes'),
    [
        (records_of(), {}, VERDICT, {'optimizer__final_fraction': 0.1}),
        (records_of(), {}, ['b/vo'], MAY_DIFFER),
        (DIVERGED, {}, [], {}),
        (UNMATCHED, {'matched': None}, [], {}),
        (PROBE, {'num_documents': 99}, [], {}),  # those of text have to be many
    ],
)
def test_settings_that_may_differ_and_divergence_block_no_verdict(
    study_dir, records, study, runs, changes
):
    write_tuned(study_dir, records, **study)
    for variant in runs:
        edit_plan(study_dir, VERDICT[variant], **changes)
    findings, *others = judge_study(study_dir)
    assert others == [JUDGED, []]
    evaluation = EVALUATION | {'documents': (study.get('num_documents', 100),)}
    assert Remark(RemarkCode.EVALUATION, evaluation) in findings.remarks


def test_settings_outside_the_variant_are_compared_at_each_size(study_dir):
    variant = 'b/vo?norm=rmsnorm&num_kv_heads=1 [d_ff]'
    records = []
    for size, d_model in (('s64', 64), ('s128', 128)):
        for name in ('qk/vo', variant):
            records += tuned_arm(name, size, BASE, d_model=d_model, eval_tokens=d_model)
    write_tuned(study_dir, records)
    run = run_name(variant, 's64', 'verdict')
    changes = {'model__norm': 'rmsnorm', 'model__num_kv_heads': 1}
    edit_plan(study_dir, run, **changes, train__batch_size=7)
    named = [(r.data['name'], r.arm.size) for r in judge_study(study_dir)[2] if 'name' in r.data]
    assert named == [('train.batch_size', 's64')]


def test_a_remark_on_the_baseline_withholds_every_verdict(study_dir):
    write_tuned(study_dir, records_of())
    edit_plan(study_dir, VERDICT['qk/vo'], optimizer__schedule='constant')
    findings, decisions, _ = judge_study(study_dir)
    assert decisions == ALL_WITHHELD
    reason = findings.arms[1].verdict.reasons[-1]
    assert reason.code is ReasonCode.BASELINE_BLOCKED
    assert reason.data == {'baseline': 'qk/vo', 'remarks': findings.arms[0].blocks}


def test_a_rule_that_all_arms_break_is_a_single_remark(study_dir):
    write_tuned(study_dir, records_of())
    for variant in ('qk/vo', 'b/vo', 'c/vo'):
        edit_plan(study_dir, VERDICT[variant], optimizer__schedule='constant')
    findings, decisions, (remark,) = judge_study(study_dir)
    assert decisions == ALL_WITHHELD
    assert findings.blocks == (remark,) == findings.arms[1].verdict.reasons
    assert remark.code is RemarkCode.NOT_ANNEALED
    assert remark.arm is None
    assert remark.every_arm


def test_different_or_uncommitted_code_blocks_verdicts_until_it_is_accepted(study_dir):
    provenance = trial_record('x')['provenance']
    provenance |= {'git': {'commit': 'f' * 40, 'dirty': True}, 'versions': {'jax': '0.12.0'}}
    records = records_of(provenance=provenance | {'imported': {'x:y': '2', 'x:z': '1'}})
    for record in records:  # the arm c/vo uses nothing from outside
        if record['variant'] == 'qk/vo':
            record['provenance'] = record['provenance'] | {'imported': {'x:y': '1', 'x:z': '1'}}
    _, decisions, remarks = judge_study(write_tuned(study_dir, records))
    assert decisions == ALL_WITHHELD
    assert [(r.code.name, r.data.get('name'), r.blocks) for r in remarks] == [
        ('SOFTWARE_DIFFERS', 'git.commit', True),
        ('SOFTWARE_DIFFERS', 'imported.x:y', True),
        ('UNCOMMITTED_CHANGES', None, True),
        ('SOFTWARE_DIFFERS', 'versions.jax', False),
    ]
    assert remarks[0].data['values']['f' * 40] == (B,)
    for code, still in (('uncommitted', 2), ('commits', 0)):
        ledger.accept(study_dir, [code], 'a comment only')
        findings, decisions, remarks = judge_study(study_dir)
        assert len(findings.blocks) == still
        assert len(remarks) == 4
        assert 'a comment only' in [remark.data['accepted'] for remark in remarks]
    assert decisions == JUDGED


def test_the_code_of_earlier_starts_of_a_run_counts(study_dir):
    earlier = [{'git': {'commit': 'e' * 40, 'dirty': True}, 'imported': {}}]
    provenance = trial_record('x')['provenance'] | {'earlier': earlier}
    _, decisions, remarks = judge_study(write_tuned(study_dir, records_of(provenance=provenance)))
    assert decisions == ALL_WITHHELD
    found = [(remark.code.name, remark.data.get('name')) for remark in remarks]
    assert found == [('SOFTWARE_DIFFERS', 'git.commit'), ('UNCOMMITTED_CHANGES', None)]


def test_a_run_that_was_altered_after_a_look_gives_no_verdict(study_dir):
    """All files of the run were replaced, so that they agree; the other arm keeps its verdict."""
    path = write_tuned(study_dir, records_of())
    ledger.record_look(path)
    entries = (path / ledger.NAME).read_text()
    write_tuned(path, records_with_b(losses=BASE + 1))
    (path / ledger.NAME).write_text(entries)
    findings, decisions, _ = judge_study(path)
    arm = next(arm for arm in findings.arms if arm.key == B)
    assert decisions == WITHHELD
    assert arm.blocks[-1] == blocking_remark('ALTERED', run=VERDICT['b/vo'], look=1)
    assert not ledger.record_look(path)
    assert (path / ledger.NAME).read_text() == entries


def trial_of_yardsticks(early=2.0, late=1.8, shuffled=None):
    by_position = {'positions': {'1': 2.6, '5-8': None}, 'early': early, 'late': late}
    return {'seed': 0, 'loss': 1.9, 'shuffled': shuffled} | by_position


def yardsticks_of(test):
    return {'losses': {'val': {'5-gram': 1.0}, 'test': {'4-gram': test + 0.3, '5-gram': test}}}


SCREENING_OF_BASELINE = run_name('qk/vo', 'd_model=128', 'screening', 'learning_rate')
BELOW = {'split': 'test', 'loss': MEAN, 'name': '5-gram', 'tokens': 307200, 'yardstick': MEAN}
GAIN = {'gain': 0.1, 'needed': 0.1}
COST = {'cost': 0.5, 'needed': 0.5}
TRANSLATION = {'task': 'translation', 'losses': {}, 'tokens': None, 'definition': 2}
TRANSLATION |= {'bleu': {'val': 4.0, 'test': 5.0}}
MASKED = {'task': 'masked', 'definition': 2}
LOW_BLEU = {'bleu': 14.9, 'word_by_word': 5.0, 'needed': 15.0}


@pytest.mark.parametrize(
    ('changes', 'trial', 'bleu', 'expected'),
    [
        # What the yardsticks record of the group and of the trial of the baseline, its BLEU, and
        # the remarks that withhold all verdicts.
        (yardsticks_of(MEAN + 1e-6), trial_of_yardsticks(), None, []),
        (yardsticks_of(MEAN - 1e-6), trial_of_yardsticks(), None, [('BELOW_YARDSTICK', BELOW)]),
        ({'run': SCREENING_OF_BASELINE}, trial_of_yardsticks(), None, [('NO_YARDSTICK', {})]),
        ({}, trial_of_yardsticks(early=2.0, late=1.9 + 1e-6), None, [('LITTLE_CONTEXT', GAIN)]),
        ({}, trial_of_yardsticks(early=2.0, late=1.9 - 1e-6), None, []),
        ({}, trial_of_yardsticks(early=None, late=None), None, []),
        (TRANSLATION, trial_of_yardsticks(shuffled=2.4 + 1e-6), 15.0, []),
        (TRANSLATION, trial_of_yardsticks(), 14.9, [('LOW_BLEU', LOW_BLEU)]),
        (TRANSLATION, trial_of_yardsticks(), None, [('LOW_BLEU', LOW_BLEU | {'bleu': None})]),
        (MASKED, trial_of_yardsticks(), None, []),
        (MASKED | {'definition': 1}, trial_of_yardsticks(), None, [('OUTDATED_YARDSTICK', {})]),
        ({'task': 'translation'}, trial_of_yardsticks(), 90.0, [('OUTDATED_YARDSTICK', {})]),
        (TRANSLATION, trial_of_yardsticks(shuffled=2.4 - 1e-6), 20.0, [('SOURCES_UNUSED', COST)]),
    ],
)
def test_a_baseline_has_to_pass_its_yardsticks(study_dir, changes, trial, bleu, expected):
    records = records_of()
    for record in records if bleu is not None else ():
        record |= {'val_bleu': bleu - 1, 'test_bleu': bleu}
    trials = {'trials': {'qk/vo': [trial], 'b/vo': [trial_of_yardsticks(early=2.0, late=2.0)]}}
    _, decisions, every = judge_study(write_tuned(study_dir, records, yardsticks=trials | changes))
    remarks = [remark for remark in every if remark.blocks]
    assert [(r.code.name, r.arm) for r in remarks] == [(name, QK) for name, _ in expected]
    for remark, (_, data) in zip(remarks, expected, strict=True):
        assert remark.data.keys() == data.keys()
        for name, value in data.items():
            assert remark.data[name] == pytest.approx(value, abs=1e-5)
    assert decisions == (ALL_WITHHELD if expected else JUDGED)


def test_an_arm_short_of_the_yardstick_of_its_baseline_is_marked(study_dir):
    """The arm and its control end above the yardstick; the baseline beats it.

    The remarks on them block nothing: the arm keeps its difference and its verdict.
    """
    yardstick = MEAN + 0.5
    control_records = tuned_arm('b/vo', losses=list(BASE + 2.0), control='equal_shape')
    records = records_with_b(losses=BASE + 1.0) + control_records
    path = write_tuned(study_dir, records, yardsticks=yardsticks_of(yardstick))
    findings, decisions, remarks = judge_study(path)
    assert {remark.code for remark in remarks} == {RemarkCode.ARM_BELOW_YARDSTICK}
    yardstick_of_arm = {r.arm: r.data['yardstick'] for r in remarks if not r.blocks}
    control = B._replace(control='equal_shape')
    assert yardstick_of_arm == pytest.approx({B: yardstick, control: yardstick})
    assert decisions['b/vo'] is WORSE
    assert {arm.key for arm in findings.every_arm if arm.shortfalls} == {B, control}


def test_a_translating_arm_short_of_its_yardstick_is_marked(study_dir):
    records = records_of()
    # The yardstick is a BLEU of 15. Only the baseline must reach it; an arm gets a remark.
    for record in records:
        bleu = 14.9 if record['variant'] == 'b/vo' else 15.1
        record |= {'val_bleu': bleu, 'test_bleu': bleu}
    path = write_tuned(study_dir, records, yardsticks=TRANSLATION)
    _, decisions, (remark,) = judge_study(path)
    assert remark == Remark(RemarkCode.ARM_LOW_BLEU, remark.data, arm=B)
    assert decisions == JUDGED
    assert remark.data == pytest.approx(LOW_BLEU)


def test_a_study_whose_yardsticks_are_not_recorded_has_no_verdict(study_dir):
    (write_tuned(study_dir, records_of()) / ledger.YARDSTICKS).unlink()
    assert list(judge_study(study_dir)[1:]) == [
        ALL_WITHHELD,
        [blocking_remark('NO_YARDSTICK', None)],
    ]


@pytest.mark.parametrize('variant', ['b/vo', 'qk/vo'])
def test_seeds_that_end_far_apart_withhold_the_verdict_of_their_arm(variant, study_dir):
    """Two of eight seeds end 2 nats higher. In the baseline, that concerns every arm."""
    records = records_of() + tuned_arm('d/vo', losses=list(BASE + 0.06))
    for record in records:
        if record['variant'] == variant and record['trial']['seed'] in SEEDS[:2]:
            record['test_loss'] += 2.0
    _, decisions, remarks = judge_study(write_tuned(study_dir, records))
    (bimodal,) = [r for r in remarks if r.code is RemarkCode.BIMODAL_SEEDS]
    assert bimodal.arm.variant == variant
    assert bimodal.data['sd'] > 3 * bimodal.data['usual']
    withheld = {v for v, decision in decisions.items() if decision is NO_VERDICT}
    assert withheld == ({'b/vo'} if variant == 'b/vo' else {'b/vo', 'c/vo', 'd/vo'})
    two = [record for record in records if record['variant'] in ('qk/vo', 'b/vo')]
    assert judge_study(write_tuned(study_dir / 'two', two))[1] == {'b/vo': NO_VERDICT}
