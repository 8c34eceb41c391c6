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
    """Asserts that a remark withholds the verdict on b/vo, and that c/vo keeps its verdict.

    A remark is a finding on an arm, with a code and data.

    Args:
        directory: Directory of a study that compares b/vo and c/vo with qk/vo.
        code: Code of the remark.
        data: Some of the data of the remark.
    """
    findings, decisions, remarks = judge_study(directory)
    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.WORSE}

    b = next(arm for arm in findings.arms if arm.key == B)
    expected = [remark for remark in b.blocks if remark.code is code and has_data(remark, data)]
    assert expected

    # The remarks that block b/vo are the reasons of its verdict.
    assert b.verdict.reasons == b.blocks

    # No other remark blocks a verdict, and those that do come first.
    blocks = list(b.blocks)
    assert [remark for remark in remarks if remark.blocks] == blocks
    assert remarks[: len(blocks)] == blocks


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
    """An arm may differ from the baseline of its size in the settings that its name gives.

    Any other difference is a remark, which names the setting.
    """
    variant = 'b/vo?norm=rmsnorm&num_kv_heads=1 [d_ff]'
    records = []
    for size, d_model in (('s64', 64), ('s128', 128)):
        for name in ('qk/vo', variant):
            # The tokens of evaluation differ between the sizes, but not between arms of a size.
            records += tuned_arm(name, size, BASE, d_model=d_model, eval_tokens=d_model)
    write_tuned(study_dir, records)
    edit_plan(
        study_dir,
        run_name(variant, 's64', 'verdict'),
        # Settings in the name of the variant.
        model__norm='rmsnorm',
        model__num_kv_heads=1,
        # A setting that is not in its name.
        train__batch_size=7,
    )

    _, _, remarks = judge_study(study_dir)

    remarks_on_settings = [remark for remark in remarks if 'name' in remark.data]
    assert len(remarks_on_settings) == 1
    remark = remarks_on_settings[0]
    assert remark.data['name'] == 'train.batch_size'
    assert remark.arm.size == 's64'


def test_a_remark_on_the_baseline_withholds_every_verdict(study_dir):
    """Every arm is compared with the baseline qk/vo, so no verdict is left without it."""
    write_tuned(study_dir, three_arms())
    # A rule requires that the learning rate falls to zero.
    edit_plan(study_dir, VERDICT_RUNS['qk/vo'], optimizer__schedule='constant')

    findings, decisions, _ = judge_study(study_dir)

    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.NO_VERDICT}
    # The last reason names the baseline and the remarks on it.
    baseline, b, _ = findings.arms
    reason = b.verdict.reasons[-1]
    assert reason.code is ReasonCode.BASELINE_BLOCKED
    assert reason.data == {'baseline': 'qk/vo', 'remarks': baseline.blocks}


def test_a_rule_that_all_arms_break_is_a_single_remark(study_dir):
    """Equal remarks on all arms become one remark, which withholds every verdict."""
    write_tuned(study_dir, three_arms())
    # A rule requires that the learning rate falls to zero.
    for run in VERDICT_RUNS.values():
        edit_plan(study_dir, run, optimizer__schedule='constant')

    findings, decisions, (remark,) = judge_study(study_dir)

    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.NO_VERDICT}
    assert remark.code is RemarkCode.NOT_ANNEALED
    # It is about every arm, so it names none.
    assert remark.every_arm
    assert remark.arm is None
    # It blocks the study, and is the only reason of each verdict.
    _, b, _ = findings.arms
    assert findings.blocks == (remark,)
    assert b.verdict.reasons == (remark,)


def three_arms_of_different_code():
    """Returns records of three arms, in which b/vo was trained by other code than the others.

    Provenance is the software that a run recorded. `imported` has the hash of each module from
    outside the package.

    | field          | qk/vo    | b/vo (verdict) | c/vo      |
    |----------------|----------|----------------|-----------|
    | git.commit     | abc1234  | fff...         | abc1234   |
    | git.dirty      | False    | True           | False     |
    | versions.jax   | 0.10.2   | 0.12.0         | 0.10.2    |
    | imported.x:y   | 1        | 2              | (nothing) |
    | imported.x:z   | 1        | 1              | (nothing) |
    """
    provenance_of_c = trial_record('c/vo')['provenance']
    provenance_of_baseline = provenance_of_c | {'imported': {'x:y': '1', 'x:z': '1'}}
    provenance_of_b = provenance_of_c | {
        'git': {'commit': 'f' * 40, 'dirty': True},
        'versions': {'jax': '0.12.0'},
        'imported': {'x:y': '2', 'x:z': '1'},
    }
    records = three_arms_with_verdict_of_b(provenance=provenance_of_b)
    for record in records:
        if record['variant'] == 'qk/vo':
            record['provenance'] = provenance_of_baseline
    return records


def test_different_or_uncommitted_code_blocks_verdicts(study_dir):
    """Other code may give other losses, so verdicts are withheld. Other versions are only named."""
    write_tuned(study_dir, three_arms_of_different_code())

    _, decisions, remarks = judge_study(study_dir)

    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.NO_VERDICT}
    # The code of each remark, the field of provenance, and whether the remark blocks.
    assert [(r.code.name, r.data.get('name'), r.blocks) for r in remarks] == [
        ('SOFTWARE_DIFFERS', 'git.commit', True),
        ('SOFTWARE_DIFFERS', 'imported.x:y', True),
        ('UNCOMMITTED_CHANGES', None, True),
        ('SOFTWARE_DIFFERS', 'versions.jax', False),
    ]
    # The first remark gives the arms of each commit.
    arms_by_commit = remarks[0].data['values']
    assert arms_by_commit['f' * 40] == (B,)


def test_different_or_uncommitted_code_is_accepted_with_a_reason(study_dir):
    """A person accepts a problem in the ledger, a log of the study. Its remark then blocks nothing.

    There are four remarks: three that block, and one on versions.
    """
    write_tuned(study_dir, three_arms_of_different_code())

    # Accepting the uncommitted changes leaves two blocks: the commits and the imported module.
    ledger.accept(study_dir, ['uncommitted'], 'a comment only')
    findings, _, remarks = judge_study(study_dir)
    assert len(findings.blocks) == 2
    assert len(remarks) == 4
    assert 'a comment only' in [remark.data['accepted'] for remark in remarks]

    # Accepting the commits accepts the imported module as well, so no block is left.
    ledger.accept(study_dir, ['commits'], 'a comment only')
    findings, decisions, remarks = judge_study(study_dir)
    assert findings.blocks == ()
    assert len(remarks) == 4
    assert 'a comment only' in [remark.data['accepted'] for remark in remarks]
    assert decisions == {'b/vo': Decision.WORSE, 'c/vo': Decision.WORSE}


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
    """A look is a recorded reading of results, with a hash of every run in the ledger.

    A run whose results differ from that hash later on withholds the verdict of its arm.
    """
    # First, somebody looks at the results.
    write_tuned(study_dir, three_arms())
    ledger.record_look(study_dir)
    ledger_after_look = (study_dir / ledger.NAME).read_text()

    # Then all files of b/vo get other losses, so that they agree with each other.
    write_tuned(study_dir, three_arms(losses=BASE + 1))
    (study_dir / ledger.NAME).write_text(ledger_after_look)

    findings, decisions, _ = judge_study(study_dir)

    # c/vo keeps its verdict.
    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.WORSE}
    # The remark names the altered run, and the first look, at which it had other results.
    _, b, _ = findings.arms
    data = {'run': VERDICT_RUNS['b/vo'], 'look': 1}
    assert b.blocks[-1] == Remark(RemarkCode.ALTERED, data, blocks=True, arm=B)

    # A look at altered results is not recorded.
    assert not ledger.record_look(study_dir)
    assert (study_dir / ledger.NAME).read_text() == ledger_after_look


def measured_trial(early=2.0, late=1.8, shuffled=None):
    """Returns the losses in yardsticks.json of a trial whose mean loss is 1.9 nats/token.

    With the defaults, the trial gains 0.2 from its context. A baseline needs 0.1.

    Args:
        early: The loss at position 4 of the context.
        late: The loss in the last half of the context.
        shuffled: The loss of a translation whose source sentences are exchanged with each other.
            None for other tasks.
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


# The yardstick of a translation is 10 more than the BLEU of a word-by-word translation: 15.
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
    # What the yardsticks have, the losses of the measured trial, and the BLEU of all arms.
    ('yardsticks', 'trial', 'bleu', 'code', 'data'),
    [
        # The baseline's loss is above that of the best n-grams, 5-grams.
        pytest.param(
            ngram_losses(lowest=MEAN_TEST_LOSS - 1e-6),
            measured_trial(),
            None,
            RemarkCode.BELOW_YARDSTICK,
            {
                'split': 'test',
                'loss': MEAN_TEST_LOSS,
                'name': '5-gram',
                'tokens': 307200,  # in which n-grams are counted
                'yardstick': MEAN_TEST_LOSS,
            },
            id='worse than n-grams',
        ),
        # Yardsticks belong to the verdict run.
        pytest.param(
            {'run': SCREENING_OF_BASELINE},
            measured_trial(),
            None,
            RemarkCode.NO_YARDSTICK,
            {},
            id='the yardstick is that of another run',
        ),
        # The gain is early - late, 1e-6 less than 0.1.
        pytest.param(
            {},
            measured_trial(early=2.0, late=1.9 + 1e-6),
            None,
            RemarkCode.LITTLE_CONTEXT,
            {'gain': 0.1, 'needed': 0.1},
            id='hardly uses its context',
        ),
        # A translation needs 10 more than the BLEU of a word-by-word translation, 5.
        pytest.param(
            TRANSLATION,
            measured_trial(),
            14.9,
            RemarkCode.LOW_BLEU,
            {'bleu': 14.9, 'word_by_word': 5.0, 'needed': 5.0 + 10.0},
            id='a bad translation',
        ),
        pytest.param(
            TRANSLATION,
            measured_trial(),
            None,
            RemarkCode.LOW_BLEU,
            {'bleu': None, 'word_by_word': 5.0, 'needed': 5.0 + 10.0},
            id='a translation without BLEU',
        ),
        # With exchanged sources, the loss of 1.9 rises by 1e-6 less than 0.5.
        pytest.param(
            TRANSLATION,
            measured_trial(shuffled=1.9 + 0.5 - 1e-6),
            20.0,
            RemarkCode.SOURCES_UNUSED,
            {'cost': 0.5, 'needed': 0.5},
            id='hardly uses its sources',
        ),
        # Yardsticks of masked texts and of translations have definition 2.
        pytest.param(
            {'task': 'masked', 'definition': 1},
            measured_trial(),
            None,
            RemarkCode.OUTDATED_YARDSTICK,
            {},
            id='an outdated definition of masked text',
        ),
        # A record without this field has definition 1.
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
    """A yardstick is what a simple model of counts reaches. A trained baseline has to beat it.

    Otherwise the baseline has learned too little to compare other arms with it.
    """
    _, decisions, remarks = judge_with_yardsticks(study_dir, yardsticks, trial, bleu)

    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.NO_VERDICT}
    (remark,) = [remark for remark in remarks if remark.blocks]
    assert remark.code is code
    assert remark.arm == BASELINE
    assert remark.data.keys() == data.keys()
    for name, value in data.items():
        assert remark.data[name] == pytest.approx(value, abs=1e-5)


def test_an_arm_short_of_the_yardstick_of_its_baseline_is_marked(study_dir):
    """Only the baseline has to beat the yardstick, a loss of n-grams.

    An arm that does not beat it gets a remark, and keeps its difference and its verdict.
    """
    # Above the baseline's loss, the yardstick is 0.5, b/vo is 1.0 and its control 2.0.
    yardstick = MEAN_TEST_LOSS + 0.5
    records = [
        *three_arms(losses=BASE + 1.0),
        *tuned_arm('b/vo', losses=list(BASE + 2.0), control='equal_shape'),
    ]
    write_tuned(study_dir, records, yardsticks=ngram_losses(lowest=yardstick))

    findings, decisions, remarks = judge_study(study_dir)

    for remark in remarks:
        assert remark.code is RemarkCode.ARM_BELOW_YARDSTICK
    control_of_b = B._replace(control='equal_shape')
    yardstick_of_arm = {r.arm: r.data['yardstick'] for r in remarks if not r.blocks}
    assert yardstick_of_arm == pytest.approx({B: yardstick, control_of_b: yardstick})

    # The arms that are marked in tables.
    marked_arms = {arm.key for arm in findings.every_arm if arm.shortfalls}
    assert marked_arms == {B, control_of_b}

    # b/vo is judged all the same.
    assert decisions['b/vo'] is Decision.WORSE


def test_a_translating_arm_short_of_its_yardstick_is_marked(study_dir):
    """Only the baseline has to reach the yardstick; an arm below it gets a remark.

    The yardstick of a translation is 10 more than the BLEU of a word-by-word translation, 5.
    """
    records = three_arms()
    for record in records:
        bleu = 14.9 if record['variant'] == 'b/vo' else 15.1
        record |= {'val_bleu': bleu, 'test_bleu': bleu}
    write_tuned(study_dir, records, yardsticks=TRANSLATION)

    _, decisions, (remark,) = judge_study(study_dir)

    # The remark does not block: both arms have the verdict of their losses.
    assert decisions == {'b/vo': Decision.WORSE, 'c/vo': Decision.WORSE}
    assert remark == Remark(RemarkCode.ARM_LOW_BLEU, remark.data, blocks=False, arm=B)
    assert remark.data == pytest.approx({'bleu': 14.9, 'word_by_word': 5.0, 'needed': 5.0 + 10.0})


def test_a_study_whose_yardsticks_are_not_recorded_has_no_verdict(study_dir):
    write_tuned(study_dir, three_arms())
    (study_dir / ledger.YARDSTICKS).unlink()

    _, decisions, remarks = judge_study(study_dir)

    assert decisions == ALL_WITHHELD
    assert remarks == [Remark(RemarkCode.NO_YARDSTICK, {}, blocks=True, arm=None)]


def four_arms_with_two_seeds_far_above(variant):
    """Returns records of four arms. In one of them, two of eight seeds end 2 nats/token higher."""
    records = three_arms() + tuned_arm('d/vo', losses=list(BASE + 0.06))
    for record in records:
        if record['variant'] == variant and record['trial']['seed'] in (0, 1):
            record['test_loss'] += 2.0
    return records


@pytest.mark.parametrize(
    ('variant', 'withheld'),
    [
        pytest.param('b/vo', ['b/vo'], id='an arm'),
        # Every arm is compared with the baseline.
        pytest.param('qk/vo', ['b/vo', 'c/vo', 'd/vo'], id='the baseline'),
    ],
)
def test_seeds_that_end_far_apart_withhold_the_verdict_of_their_arm(variant, withheld, study_dir):
    """The losses of an arm may spread over seeds three times as much as those of the other arms.

    A larger spread withholds the verdict of the arm.
    """
    write_tuned(study_dir, four_arms_with_two_seeds_far_above(variant))

    _, decisions, remarks = judge_study(study_dir)

    (remark,) = [r for r in remarks if r.code is RemarkCode.BIMODAL_SEEDS]
    assert remark.arm.variant == variant
    # The standard deviation over seeds, and the median of that of the other arms.
    assert remark.data['sd'] > 3 * remark.data['usual']
    assert [v for v, d in decisions.items() if d is Decision.NO_VERDICT] == withheld


@pytest.mark.parametrize('variant', ['b/vo', 'qk/vo'])
def test_seeds_that_end_far_apart_withhold_the_verdict_of_two_arms(variant, study_dir):
    """With two arms, each arm is compared with the spread of the other one."""
    records = four_arms_with_two_seeds_far_above(variant)
    two_arms = [record for record in records if record['variant'] in ('qk/vo', 'b/vo')]
    write_tuned(study_dir, two_arms)
    assert judge_study(study_dir).decisions == {'b/vo': Decision.NO_VERDICT}
