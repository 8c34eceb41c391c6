"""Every rule that a verdict has to keep: broken once, reported, and the verdict withheld."""

from typing import NamedTuple

import numpy as np
import pytest

from qkattn.storage import ledger
from qkattn.study.arm_key import ArmKey
from qkattn.verdict import (
    Decision,
    Findings,
    ReasonCode,
    Remark,
    RemarkCode,
    find,
    load_study,
)
from tests import studies
from tests.studies import edit_plan, run_name, trial_record, tuned_arm, write_tuned

BASE = 2 + 0.05 * np.arange(8)
MEAN_TEST_LOSS = float(BASE.mean()) + 0.1  # of the baseline
SEEDS = studies.VERDICT_SEEDS
RATES = studies.RATES
SIZE = 'd_model=128'
B = ArmKey('b/vo', SIZE, 'stdlib')
BASELINE = B._replace(variant='qk/vo')
VERDICT_RUNS = {
    'qk/vo': run_name('qk/vo', SIZE, 'verdict'),
    'b/vo': run_name('b/vo', SIZE, 'verdict'),
    'c/vo': run_name('c/vo', SIZE, 'verdict'),
}
SCREENING_OF_B = run_name('b/vo', SIZE, 'screening', 'learning_rate')
SCREENING_OF_BASELINE = run_name('qk/vo', SIZE, 'screening', 'learning_rate')
JUDGED = {'b/vo': Decision.WORSE, 'c/vo': Decision.WORSE}
B_WITHHELD = {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.WORSE}
ALL_WITHHELD = {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.NO_VERDICT}


def three_arms(**keywords):
    """Records of the baseline, of b/vo, worse by 0.02, and of c/vo, worse by 0.04.

    The keywords of `tuned_arm` are for b/vo alone.
    """
    return [
        *tuned_arm('qk/vo', losses=list(BASE)),
        *tuned_arm('b/vo', **{'losses': list(BASE + 0.02)} | keywords),
        *tuned_arm('c/vo', losses=list(BASE + 0.04)),
    ]


def is_of_b(record, stage):
    return record['variant'] == 'b/vo' and record['stage'] == stage


def three_arms_with_verdict_of_b(**fields):
    """Records of three arms, with these fields in the verdict trials of b/vo."""
    return [record | fields if is_of_b(record, 'verdict') else record for record in three_arms()]


def with_fields(records, **fields):
    return [record | fields for record in records]


class JudgedStudy(NamedTuple):
    findings: Findings
    decisions: dict  # by variant, of the arms that have a verdict
    remarks: list  # without the one that describes the evaluation


def judge_study(directory):
    findings = find(load_study(directory))
    decisions = {arm.variant: arm.verdict.decision for arm in findings.arms if arm.verdict}
    remarks = [r for r in findings.remarks if r.code is not RemarkCode.EVALUATION]
    return JudgedStudy(findings, decisions, remarks)


def has_data(remark, data):
    """Whether the data of a remark have at least these values."""
    return all(remark.data.get(name) == value for name, value in data.items())


def assert_verdict_of_b_is_withheld(directory, code, data):
    """b/vo alone has no verdict, and one of the reasons is a remark of this code and data."""
    judged = judge_study(directory)
    assert judged.decisions == B_WITHHELD

    arm = next(arm for arm in judged.findings.arms if arm.key == B)
    assert any(remark.code is code and has_data(remark, data) for remark in arm.blocks)

    # The remarks on the arm are the reasons of its verdict, and come before all others.
    assert arm.verdict.reasons == arm.blocks
    blocks = list(arm.blocks)
    assert [remark for remark in judged.remarks if remark.blocks] == blocks
    assert judged.remarks[: len(blocks)] == blocks


@pytest.mark.parametrize(
    # Changes of the planned verdict run of b/vo, and the remark.
    ('changes', 'code', 'data'),
    [
        (
            {'optimizer__schedule': 'constant'},
            RemarkCode.NOT_ANNEALED,
            {'schedule': 'constant'},
        ),
        (
            {'trials__seeds': [*SEEDS, 8]},
            RemarkCode.OTHER_SEEDS,
            {'actual': (*SEEDS, 8)},
        ),
        (
            {'train__init_from': 'runs/a'},
            RemarkCode.DIFFERS_FROM_BASELINE,
            {'name': 'train.init_from', 'value': 'runs/a'},
        ),
        # A score scale that is not tuned may not differ.
        (
            {'model__score_scale': 2.0},
            RemarkCode.DIFFERS_FROM_BASELINE,
            {'name': 'model.score_scale', 'value': '2.0'},
        ),
    ],
)
def test_an_arm_whose_verdict_run_breaks_a_rule_gets_no_verdict(study_dir, changes, code, data):
    write_tuned(study_dir, three_arms())
    edit_plan(study_dir, VERDICT_RUNS['b/vo'], **changes)
    assert_verdict_of_b_is_withheld(study_dir, code, data)


def test_an_arm_whose_screening_has_other_seeds_gets_no_verdict(study_dir):
    seeds = (*studies.SCREENING_SEEDS, 102)
    write_tuned(study_dir, three_arms())
    edit_plan(study_dir, SCREENING_OF_B, trials__seeds=list(seeds))
    data = {'actual': seeds, 'stage': 'screening'}
    assert_verdict_of_b_is_withheld(study_dir, RemarkCode.OTHER_SEEDS, data)


TARGET = trial_record('b/vo')['target_parameters']
LARGE_TOTAL = round(1.004 * TARGET)
LARGE_RESIDUAL = LARGE_TOTAL / TARGET - 1


def three_arms_with_too_large_b():
    """Records of three arms, of which b/vo has 0.4 % more parameters than the target."""
    parameters = trial_record('b/vo')['parameters'] | {'total': LARGE_TOTAL}
    return three_arms(parameters=parameters, residual=LARGE_RESIDUAL)


def three_arms_with_another_weight_decay():
    """Records of three arms, in which one verdict trial of b/vo has another weight decay."""
    records = three_arms()
    for record in records:
        if is_of_b(record, 'verdict') and record['trial']['seed'] == 7:
            record['trial'] = record['trial'] | {'weight_decay': 0.2}
    return records


def three_arms_without_screening_of_b():
    return [record for record in three_arms() if not is_of_b(record, 'screening')]


def three_arms_with_two_verdict_runs_of_b():
    """Records of three arms, with a second verdict run of b/vo, which would count seeds twice."""
    records = three_arms()
    verdict = [record for record in records if is_of_b(record, 'verdict')]
    return records + with_fields(verdict, run='later', config_hash='later')


@pytest.mark.parametrize(
    ('records', 'code', 'data'),
    [
        pytest.param(
            three_arms_with_verdict_of_b(
                data={'name': 'stdlib', 'version': '3.12', 'unigram_bits_per_byte': 4.53}
            ),
            RemarkCode.DIFFERS_FROM_BASELINE,
            {'name': 'data.version', 'value': '3.12', 'baseline': '3.11.7'},
            id='other data',
        ),
        pytest.param(
            three_arms_with_verdict_of_b(eval_tokens=4096),
            RemarkCode.DIFFERS_FROM_BASELINE,
            {'name': 'eval_tokens', 'value': '4096'},
            id='fewer tokens of evaluation',
        ),
        pytest.param(
            three_arms_with_too_large_b(),
            RemarkCode.OVER_TOLERANCE,
            {'residual': LARGE_RESIDUAL},
            id='too many parameters',
        ),
        pytest.param(
            three_arms(learning_rate=4.000001e-3),
            RemarkCode.OTHER_SETTING,
            {'knob': 'learning_rate', 'actual': 4.000001e-3, 'tuned': True},
            id='a learning rate beside the chosen one',
        ),
        pytest.param(
            three_arms_with_another_weight_decay(),
            RemarkCode.OTHER_SETTING,
            {'knob': 'weight_decay', 'actual': 0.2, 'tuned': False},
            id='another weight decay in one trial',
        ),
        pytest.param(
            three_arms_without_screening_of_b(),
            RemarkCode.SCREENING_INCOMPLETE,
            {'knob': 'learning_rate', 'values': RATES},
            id='no screening',
        ),
        pytest.param(
            three_arms(optimum=16e-3),
            RemarkCode.NOT_BRACKETED,
            {'knob': 'learning_rate', 'high': 0.016, 'best': 0.016},
            id='the last rate is the best one',
        ),
        pytest.param(
            three_arms_with_two_verdict_runs_of_b(),
            RemarkCode.OTHER_SEEDS,
            {'actual': (*SEEDS, *SEEDS), 'stage': 'verdict'},
            id='two verdict runs',
        ),
        pytest.param(
            three_arms(diverged_rates=(1e-3, 2e-3, 8e-3, 16e-3)),
            RemarkCode.UNBOUNDED_OPTIMUM,
            {'knob': 'learning_rate'},
            id='bracketed by diverged rates alone',
        ),
    ],
)
def test_an_arm_whose_results_break_a_rule_gets_no_verdict(study_dir, records, code, data):
    write_tuned(study_dir, records)
    assert_verdict_of_b_is_withheld(study_dir, code, data)


def arms_that_share_a_seed():
    """Records of three arms, in which one of the screening seeds is a verdict seed, 7."""
    records = []
    for variant in ('qk/vo', 'b/vo', 'c/vo'):
        records += tuned_arm(variant, losses=BASE, screening_seeds=(100, 7))
    return records


@pytest.mark.parametrize(
    # Trials of the arms, changes of the study, the remark, and the split of the differences.
    ('records', 'changes', 'code', 'remark_data', 'split'),
    [
        pytest.param(
            three_arms(),
            {'num_documents': 99},
            RemarkCode.FEW_DOCUMENTS,
            {'documents': 99, 'needed': 100},
            'test',
            id='few documents',
        ),
        pytest.param(
            with_fields(three_arms(), test_loss=None, test_bits_per_byte=None),
            {},
            RemarkCode.NO_TEST,
            {},
            'val',
            id='no test split',
        ),
    ],
)
def test_a_rule_that_every_arm_breaks_withholds_every_verdict(
    study_dir, records, changes, code, remark_data, split
):
    write_tuned(study_dir, records, **changes)

    findings, decisions, _ = judge_study(study_dir)

    # The arms are b/vo, c/vo and the baseline, which has no verdict in any study.
    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.NO_VERDICT}

    # The remarks on the three arms are equal, so one remark on every arm replaces them.
    assert any(remark.code is code and has_data(remark, remark_data) for remark in findings.blocks)
    assert findings.blocks[0].every_arm

    # Arms are compared on the test split. Without test losses, validation takes its place.
    assert findings.split == split


@pytest.mark.parametrize(
    # Trials of the arms, changes of the study, and the remark.
    ('records', 'changes', 'code', 'remark_data'),
    [
        pytest.param(
            # Verdict runs have the seeds 0 to 7.
            arms_that_share_a_seed(),
            {'tuning__seeds': [100, 7]},
            RemarkCode.SHARED_SEEDS,
            {'seeds': (7,)},
            id='a seed of both stages',
        ),
        pytest.param(
            three_arms(),
            # Only the weight decay is tuned.
            {'tuning__learning_rates': [4e-3], 'tuning__weight_decays': [0.1, 0.2]},
            RemarkCode.LEARNING_RATE_NOT_TUNED,
            {'learning_rates': (4e-3,)},
            id='one learning rate',
        ),
    ],
)
def test_a_rule_that_the_study_breaks_withholds_every_verdict(
    study_dir, records, changes, code, remark_data
):
    write_tuned(study_dir, records, **changes)

    findings, decisions, _ = judge_study(study_dir)

    # The arms are b/vo, c/vo and the baseline, which has no verdict in any study.
    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.NO_VERDICT}

    # The remark is on the study, and does not replace remarks on its arms.
    assert any(remark.code is code and has_data(remark, remark_data) for remark in findings.blocks)
    assert not findings.blocks[0].every_arm

    # All records have a test loss, so arms are compared on the test split.
    assert findings.split == 'test'


def evaluation_remark(num_documents=100):
    """The remark on the evaluation of a study from `tuned_arm`."""
    data = {
        'tokens': (65536,),
        'rows': (512,),
        'test_tokens': (32768,),
        'documents': (num_documents,),
    }
    return Remark(RemarkCode.EVALUATION, data)


@pytest.mark.parametrize(
    ('variants', 'changes'),
    [
        # All arms end at a tenth of the learning rate.
        (['qk/vo', 'b/vo', 'c/vo'], {'optimizer__final_fraction': 0.1}),
        # An arm may differ in what its variant, its matching, its tuning and its machine set.
        (
            ['b/vo'],
            {
                'model__score': 'x',
                'model__value': 'y',
                'model__d_model': 8,
                'model__d_ff': 8,
                'model__num_heads': 8,
                'model__head_size': 8,
                'train__lifting': 'vmap',
                'trials__learning_rates': [4e-3, 1.0],
                'data__data_dir': '/elsewhere',
            },
        ),
    ],
    ids=['of all arms', 'of one arm'],
)
def test_settings_that_may_differ_block_no_verdict(study_dir, variants, changes):
    write_tuned(study_dir, three_arms())
    for variant in variants:
        edit_plan(study_dir, VERDICT_RUNS[variant], **changes)

    findings, decisions, remarks = judge_study(study_dir)

    assert decisions == JUDGED
    assert remarks == []
    assert evaluation_remark() in findings.remarks


@pytest.mark.parametrize(
    ('records', 'matched', 'num_documents'),
    [
        pytest.param(
            three_arms(losses=[None, *(BASE[1:] + 0.02)], diverged_rates=(16e-3,)),
            'total',
            100,
            id='a verdict trial and a rate diverged',
        ),
        pytest.param(
            with_fields(three_arms(), target_parameters=None, residual=None),
            None,
            100,
            id='unmatched',
        ),
        # Documents of text have to be at least 100.
        pytest.param(
            with_fields(three_arms(), val_bits_per_byte=None, test_bits_per_byte=None),
            'total',
            99,
            id='few documents of a probe',
        ),
    ],
)
def test_results_that_break_no_rule_block_no_verdict(study_dir, records, matched, num_documents):
    write_tuned(study_dir, records, matched=matched, num_documents=num_documents)

    findings, decisions, remarks = judge_study(study_dir)

    assert decisions == JUDGED
    assert remarks == []
    assert evaluation_remark(num_documents) in findings.remarks


def test_settings_outside_the_variant_are_compared_at_each_size(study_dir):
    variant = 'b/vo?norm=rmsnorm&num_kv_heads=1 [d_ff]'
    records = []
    for size, d_model in (('s64', 64), ('s128', 128)):
        for name in ('qk/vo', variant):
            records += tuned_arm(name, size, BASE, d_model=d_model, eval_tokens=d_model)
    write_tuned(study_dir, records)
    edit_plan(
        study_dir,
        run_name(variant, 's64', 'verdict'),
        # Settings of the variant.
        model__norm='rmsnorm',
        model__num_kv_heads=1,
        # A setting that may not differ.
        train__batch_size=7,
    )

    _, _, remarks = judge_study(study_dir)

    named = [remark for remark in remarks if 'name' in remark.data]
    assert len(named) == 1
    assert named[0].data['name'] == 'train.batch_size'
    assert named[0].arm.size == 's64'


def test_a_remark_on_the_baseline_withholds_every_verdict(study_dir):
    write_tuned(study_dir, three_arms())
    edit_plan(study_dir, VERDICT_RUNS['qk/vo'], optimizer__schedule='constant')

    findings, decisions, _ = judge_study(study_dir)

    assert decisions == ALL_WITHHELD
    baseline, b, _ = findings.arms
    reason = b.verdict.reasons[-1]
    assert reason.code is ReasonCode.BASELINE_BLOCKED
    assert reason.data == {'baseline': 'qk/vo', 'remarks': baseline.blocks}


def test_a_rule_that_all_arms_break_is_a_single_remark(study_dir):
    write_tuned(study_dir, three_arms())
    for run in VERDICT_RUNS.values():
        edit_plan(study_dir, run, optimizer__schedule='constant')

    findings, decisions, (remark,) = judge_study(study_dir)

    assert decisions == ALL_WITHHELD
    assert remark.code is RemarkCode.NOT_ANNEALED
    assert remark.arm is None
    assert remark.every_arm
    assert findings.blocks == (remark,)
    assert findings.arms[1].verdict.reasons == (remark,)


def test_different_or_uncommitted_code_blocks_verdicts_until_it_is_accepted(study_dir):
    of_others = trial_record('x')['provenance']
    of_baseline = of_others | {'imported': {'x:y': '1', 'x:z': '1'}}
    of_b = of_others | {
        'git': {'commit': 'f' * 40, 'dirty': True},
        'versions': {'jax': '0.12.0'},
        'imported': {'x:y': '2', 'x:z': '1'},
    }
    records = three_arms_with_verdict_of_b(provenance=of_b)
    for record in records:  # the arm c/vo imports nothing from outside
        if record['variant'] == 'qk/vo':
            record['provenance'] = of_baseline
    write_tuned(study_dir, records)

    _, decisions, remarks = judge_study(study_dir)

    assert decisions == ALL_WITHHELD
    assert [(r.code.name, r.data.get('name'), r.blocks) for r in remarks] == [
        ('SOFTWARE_DIFFERS', 'git.commit', True),
        ('SOFTWARE_DIFFERS', 'imported.x:y', True),
        ('UNCOMMITTED_CHANGES', None, True),
        ('SOFTWARE_DIFFERS', 'versions.jax', False),
    ]
    assert remarks[0].data['values']['f' * 40] == (B,)

    # Accepting the uncommitted changes leaves the other two blocks.
    ledger.accept(study_dir, ['uncommitted'], 'a comment only')
    findings, _, remarks = judge_study(study_dir)
    assert len(findings.blocks) == 2
    assert len(remarks) == 4
    assert 'a comment only' in [remark.data['accepted'] for remark in remarks]

    # Accepting the commits leaves none.
    ledger.accept(study_dir, ['commits'], 'a comment only')
    findings, decisions, remarks = judge_study(study_dir)
    assert findings.blocks == ()
    assert len(remarks) == 4
    assert 'a comment only' in [remark.data['accepted'] for remark in remarks]
    assert decisions == JUDGED


def test_the_code_of_earlier_starts_of_a_run_counts(study_dir):
    # All runs ended with the code of one commit, without changes.
    last_start = trial_record('x')['provenance']
    # The verdict run of b/vo was started before, at another commit with changes.
    earlier_start = {'git': {'commit': 'e' * 40, 'dirty': True}, 'imported': {}}
    provenance = last_start | {'earlier': [earlier_start]}
    records = three_arms_with_verdict_of_b(provenance=provenance)
    write_tuned(study_dir, records)

    _, decisions, remarks = judge_study(study_dir)

    # Different code withholds the verdicts of all arms, not of b/vo alone.
    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.NO_VERDICT}

    # One remark is on the two commits, and one on the changes ('dirty').
    commits_differ, uncommitted_changes = remarks
    assert commits_differ.code is RemarkCode.SOFTWARE_DIFFERS
    assert commits_differ.data['name'] == 'git.commit'
    assert uncommitted_changes.code is RemarkCode.UNCOMMITTED_CHANGES
    assert uncommitted_changes.data == {'accepted': None}


def test_a_run_that_was_altered_after_a_look_gives_no_verdict(study_dir):
    """All files of the run were replaced, so that they agree; the other arm keeps its verdict."""
    write_tuned(study_dir, three_arms())
    ledger.record_look(study_dir)
    entries = (study_dir / ledger.NAME).read_text()
    write_tuned(study_dir, three_arms(losses=BASE + 1))
    (study_dir / ledger.NAME).write_text(entries)

    findings, decisions, _ = judge_study(study_dir)

    assert decisions == B_WITHHELD
    b = findings.arms[1]
    data = {'run': VERDICT_RUNS['b/vo'], 'look': 1}
    assert b.blocks[-1] == Remark(RemarkCode.ALTERED, data, blocks=True, arm=B)
    # No further look is recorded.
    assert not ledger.record_look(study_dir)
    assert (study_dir / ledger.NAME).read_text() == entries


def measured_trial(early=2.0, late=1.8, shuffled=None):
    """What yardsticks.json has of a trial with a loss of 1.9.

    `early` and `late` are losses in parts of the context; `shuffled` is the loss of a translation
    whose sources are shuffled.
    """
    return {
        'seed': 0,
        'loss': 1.9,
        'shuffled': shuffled,
        'positions': {'1': 2.6, '5-8': None},
        'early': early,
        'late': late,
    }


def ngram_losses(lowest):
    """Changes of yardsticks, in which the best n-grams have this test loss."""
    test = {'4-gram': lowest + 0.3, '5-gram': lowest}
    return {'losses': {'val': {'5-gram': 1.0}, 'test': test}}


# The yardstick of a translation is three times the BLEU of a word-by-word translation: 15.
TRANSLATION = {
    'task': 'translation',
    'losses': {},
    'tokens': None,
    'definition': 2,
    'bleu': {'val': 4.0, 'test': 5.0},
}


def judge_with_yardsticks(directory, yardsticks, trial, bleu):
    """Judges three arms whose baseline has this measured trial; all have this BLEU."""
    records = three_arms()
    if bleu is not None:
        records = with_fields(records, val_bleu=bleu - 1, test_bleu=bleu)
    trial_of_b = measured_trial(early=2.0, late=2.0)
    trials = {'qk/vo': [trial], 'b/vo': [trial_of_b]}
    write_tuned(directory, records, yardsticks={'trials': trials} | yardsticks)
    return judge_study(directory)


@pytest.mark.parametrize(
    ('yardsticks', 'trial', 'bleu'),
    [
        pytest.param(
            ngram_losses(MEAN_TEST_LOSS + 1e-6), measured_trial(), None, id='better than n-grams'
        ),
        pytest.param({}, measured_trial(early=2.0, late=1.9 - 1e-6), None, id='uses its context'),
        pytest.param({}, measured_trial(early=None, late=None), None, id='a short context'),
        pytest.param(
            TRANSLATION, measured_trial(shuffled=2.4 + 1e-6), 15.0, id='a good translation'
        ),
        pytest.param({'task': 'masked', 'definition': 2}, measured_trial(), None, id='masked'),
    ],
)
def test_a_baseline_that_passes_its_yardsticks_blocks_no_verdict(
    study_dir, yardsticks, trial, bleu
):
    _, decisions, remarks = judge_with_yardsticks(study_dir, yardsticks, trial, bleu)
    assert decisions == JUDGED
    assert [remark for remark in remarks if remark.blocks] == []


@pytest.mark.parametrize(
    ('yardsticks', 'trial', 'bleu', 'code', 'data'),
    [
        pytest.param(
            ngram_losses(MEAN_TEST_LOSS - 1e-6),
            measured_trial(),
            None,
            RemarkCode.BELOW_YARDSTICK,
            {
                'split': 'test',
                'loss': MEAN_TEST_LOSS,
                'name': '5-gram',
                'tokens': 307200,
                'yardstick': MEAN_TEST_LOSS,
            },
            id='worse than n-grams',
        ),
        pytest.param(
            {'run': SCREENING_OF_BASELINE},
            measured_trial(),
            None,
            RemarkCode.NO_YARDSTICK,
            {},
            id='the yardstick is that of another run',
        ),
        pytest.param(
            {},
            measured_trial(early=2.0, late=1.9 + 1e-6),
            None,
            RemarkCode.LITTLE_CONTEXT,
            {'gain': 0.1, 'needed': 0.1},
            id='hardly uses its context',
        ),
        pytest.param(
            TRANSLATION,
            measured_trial(),
            14.9,
            RemarkCode.LOW_BLEU,
            {'bleu': 14.9, 'word_by_word': 5.0, 'needed': 15.0},
            id='a bad translation',
        ),
        pytest.param(
            TRANSLATION,
            measured_trial(),
            None,
            RemarkCode.LOW_BLEU,
            {'bleu': None, 'word_by_word': 5.0, 'needed': 15.0},
            id='a translation without BLEU',
        ),
        pytest.param(
            TRANSLATION,
            measured_trial(shuffled=2.4 - 1e-6),
            20.0,
            RemarkCode.SOURCES_UNUSED,
            {'cost': 0.5, 'needed': 0.5},
            id='hardly uses its sources',
        ),
        pytest.param(
            {'task': 'masked', 'definition': 1},
            measured_trial(),
            None,
            RemarkCode.OUTDATED_YARDSTICK,
            {},
            id='an outdated definition of masked text',
        ),
        pytest.param(
            {'task': 'translation'},
            measured_trial(),
            90.0,
            RemarkCode.OUTDATED_YARDSTICK,
            {},
            id='an outdated definition of a translation',
        ),
    ],
)
def test_a_baseline_short_of_a_yardstick_withholds_every_verdict(
    study_dir, yardsticks, trial, bleu, code, data
):
    _, decisions, remarks = judge_with_yardsticks(study_dir, yardsticks, trial, bleu)

    assert decisions == ALL_WITHHELD
    (remark,) = [remark for remark in remarks if remark.blocks]
    assert remark.code is code
    assert remark.arm == BASELINE
    assert remark.data.keys() == data.keys()
    for name, value in data.items():
        assert remark.data[name] == pytest.approx(value, abs=1e-5)


def test_an_arm_short_of_the_yardstick_of_its_baseline_is_marked(study_dir):
    """The arm and its control end above the yardstick; the baseline beats it.

    The remarks on them block nothing: the arm keeps its difference and its verdict.
    """
    yardstick = MEAN_TEST_LOSS + 0.5
    control = B._replace(control='equal_shape')
    records = [
        *three_arms(losses=BASE + 1.0),
        *tuned_arm('b/vo', losses=list(BASE + 2.0), control='equal_shape'),
    ]
    write_tuned(study_dir, records, yardsticks=ngram_losses(yardstick))

    findings, decisions, remarks = judge_study(study_dir)

    for remark in remarks:
        assert remark.code is RemarkCode.ARM_BELOW_YARDSTICK
    yardstick_of_arm = {r.arm: r.data['yardstick'] for r in remarks if not r.blocks}
    assert yardstick_of_arm == pytest.approx({B: yardstick, control: yardstick})
    assert decisions['b/vo'] is Decision.WORSE
    assert {arm.key for arm in findings.every_arm if arm.shortfalls} == {B, control}


def test_a_translating_arm_short_of_its_yardstick_is_marked(study_dir):
    """Only the baseline must reach a BLEU of 15; an arm gets a remark."""
    records = three_arms()
    for record in records:
        bleu = 14.9 if record['variant'] == 'b/vo' else 15.1
        record |= {'val_bleu': bleu, 'test_bleu': bleu}
    write_tuned(study_dir, records, yardsticks=TRANSLATION)

    _, decisions, (remark,) = judge_study(study_dir)

    assert decisions == JUDGED
    assert remark == Remark(RemarkCode.ARM_LOW_BLEU, remark.data, arm=B)
    assert remark.data == pytest.approx({'bleu': 14.9, 'word_by_word': 5.0, 'needed': 15.0})


def test_a_study_whose_yardsticks_are_not_recorded_has_no_verdict(study_dir):
    write_tuned(study_dir, three_arms())
    (study_dir / ledger.YARDSTICKS).unlink()

    _, decisions, remarks = judge_study(study_dir)

    assert decisions == ALL_WITHHELD
    assert remarks == [Remark(RemarkCode.NO_YARDSTICK, {}, blocks=True, arm=None)]


@pytest.mark.parametrize(
    ('variant', 'withheld'),
    [
        ('b/vo', ['b/vo']),
        # Every arm is compared with the baseline.
        ('qk/vo', ['b/vo', 'c/vo', 'd/vo']),
    ],
)
def test_seeds_that_end_far_apart_withhold_the_verdict_of_their_arm(variant, withheld, study_dir):
    records = three_arms() + tuned_arm('d/vo', losses=list(BASE + 0.06))
    # Two of eight seeds end 2 nats higher.
    for record in records:
        if record['variant'] == variant and record['trial']['seed'] in (0, 1):
            record['test_loss'] += 2.0
    write_tuned(study_dir, records)

    _, decisions, remarks = judge_study(study_dir)

    (remark,) = [r for r in remarks if r.code is RemarkCode.BIMODAL_SEEDS]
    assert remark.arm.variant == variant
    assert remark.data['sd'] > 3 * remark.data['usual']
    assert [v for v, d in decisions.items() if d is Decision.NO_VERDICT] == withheld

    # In a study of two arms, the verdict is withheld as well.
    two_arms = [record for record in records if record['variant'] in ('qk/vo', 'b/vo')]
    write_tuned(study_dir / 'two', two_arms)
    assert judge_study(study_dir / 'two').decisions == {'b/vo': Decision.NO_VERDICT}
