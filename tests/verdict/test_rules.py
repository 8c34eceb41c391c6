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
BOTH_WORSE = {'b/vo': Decision.WORSE, 'c/vo': Decision.WORSE}
ALL_WITHHELD = {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.NO_VERDICT}


def three_arms(**keywords):
    """Records of the baseline, of b/vo, worse by 0.02, and of c/vo, worse by 0.04.

    The keywords go to `tuned_arm` for b/vo only.
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

    `b.blocks` lists the remarks that withhold the verdict on b/vo. Their flag `blocks` is set.

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

    # The verdict gives these remarks as its reasons.
    assert b.verdict.reasons == b.blocks

    # No other remark blocks a verdict. The blocking remarks come first.
    blocks = list(b.blocks)
    assert [remark for remark in remarks if remark.blocks] == blocks
    assert remarks[: len(blocks)] == blocks


@pytest.mark.parametrize(
    # `changes` sets fields of the planned verdict run of b/vo. The remark has `code` and `data`.
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
    # `changes` sets fields of the study. The remark has `code` and `remark_data`.
    # Arms are compared on `split`: test, or validation if there are no test losses.
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

    # A baseline never has a verdict.
    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.NO_VERDICT}

    # The three arms get equal remarks. A single remark with `every_arm` replaces them.
    assert any(remark.code is code and has_data(remark, remark_data) for remark in findings.blocks)
    assert findings.blocks[0].every_arm

    assert findings.split == split


@pytest.mark.parametrize(
    # `changes` sets fields of the study. The remark has `code` and `remark_data`.
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

    # A baseline never has a verdict.
    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.NO_VERDICT}

    # This remark is about the study itself, so it does not stand for equal remarks on every arm.
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
        # The learning rate of all arms falls to a tenth of its peak.
        (['qk/vo', 'b/vo', 'c/vo'], {'optimizer__final_fraction': 0.1}),
        # These settings belong to the variant, the matching, the tuning or the machine.
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

    assert decisions == BOTH_WORSE
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
        # A text needs at least 100 documents. A probe is no text, so it has no bits per byte.
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

    assert decisions == BOTH_WORSE
    assert remarks == []
    assert evaluation_remark(num_documents) in findings.remarks


def test_settings_outside_the_variant_are_compared_at_each_size(study_dir):
    """An arm is compared with the baseline of its size, and its name says how it may differ.

    A remark names any other setting that differs.
    """
    variant = 'b/vo?norm=rmsnorm&num_kv_heads=1 [d_ff]'
    records = []
    for size, d_model in (('s64', 64), ('s128', 128)):
        for name in ('qk/vo', variant):
            # The number of evaluated tokens differs only between sizes, so no remark names it.
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
    """Every arm is compared with the baseline qk/vo, so a remark on qk/vo concerns all of them."""
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
    assert remark.every_arm
    assert remark.arm is None
    # The remark blocks the study, and the verdict on b/vo has no other reason.
    _, b, _ = findings.arms
    assert findings.blocks == (remark,)
    assert b.verdict.reasons == (remark,)


def three_arms_of_different_code():
    """Returns records of three arms, in which b/vo was trained by other code than qk/vo and c/vo.

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
    """Other code may give other losses, so it withholds every verdict.

    The verdict run of b/vo has another commit, with uncommitted changes. Its imported module x:y
    and its version of JAX differ too. A remark on versions blocks nothing.
    """
    write_tuned(study_dir, three_arms_of_different_code())

    _, decisions, remarks = judge_study(study_dir)

    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.NO_VERDICT}
    # Each tuple has the remark's code, the field that differs, and whether the remark blocks.
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
    """Somebody may accept a problem and give a reason. Its remark stays, but no longer blocks.

    At first, three remarks block: on commits, an imported module and uncommitted changes. A fourth
    remark is on versions, and never blocks.
    """
    write_tuned(study_dir, three_arms_of_different_code())

    # The commits and the imported module still block.
    ledger.accept(study_dir, ['uncommitted'], 'a comment only')
    findings, _, remarks = judge_study(study_dir)
    assert len(findings.blocks) == 2
    assert len(remarks) == 4
    assert 'a comment only' in [remark.data['accepted'] for remark in remarks]

    # Accepting the commits accepts the imported module too.
    ledger.accept(study_dir, ['commits'], 'a comment only')
    findings, decisions, remarks = judge_study(study_dir)
    assert findings.blocks == ()
    assert len(remarks) == 4
    assert 'a comment only' in [remark.data['accepted'] for remark in remarks]
    assert decisions == {'b/vo': Decision.WORSE, 'c/vo': Decision.WORSE}


def test_the_code_of_earlier_starts_of_a_run_counts(study_dir):
    # A run's provenance describes its last start, and lists former starts under 'earlier'.
    last_start = trial_record('x')['provenance']
    # The verdict run of b/vo was first started at another commit, with uncommitted changes.
    earlier_start = {'git': {'commit': 'e' * 40, 'dirty': True}, 'imported': {}}
    provenance = last_start | {'earlier': [earlier_start]}
    records = three_arms_with_verdict_of_b(provenance=provenance)
    write_tuned(study_dir, records)

    _, decisions, remarks = judge_study(study_dir)

    # Different code withholds every verdict, even the one on c/vo.
    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.NO_VERDICT}

    commits_differ, uncommitted_changes = remarks
    assert commits_differ.code is RemarkCode.SOFTWARE_DIFFERS
    assert commits_differ.data['name'] == 'git.commit'
    assert uncommitted_changes.code is RemarkCode.UNCOMMITTED_CHANGES
    assert uncommitted_changes.data == {'accepted': None}  # nobody accepted the changes


def test_results_without_a_commit_are_mentioned_and_keep_their_verdicts(study_dir):
    """An image or an installed package has no git history, so its results record no commit."""
    no_commit = {'commit': None, 'dirty': None, 'reason': 'not a git repository'}
    provenance = trial_record('x')['provenance'] | {'git': no_commit}
    write_tuned(study_dir, with_fields(three_arms(), provenance=provenance))

    _, decisions, remarks = judge_study(study_dir)

    assert decisions == BOTH_WORSE
    assert remarks == [Remark(RemarkCode.UNKNOWN_CODE)]


def test_a_run_that_was_altered_after_a_look_gives_no_verdict(study_dir):
    """A look at the results records the hash of every run in the ledger.

    If a run no longer has that hash, its arm gets no verdict.
    """
    write_tuned(study_dir, three_arms())
    ledger.record_look(study_dir)
    ledger_after_look = (study_dir / ledger.NAME).read_text()

    # After the look, all files of b/vo get other losses, so they still agree with each other.
    write_tuned(study_dir, three_arms(losses=BASE + 1))
    (study_dir / ledger.NAME).write_text(ledger_after_look)

    findings, decisions, _ = judge_study(study_dir)

    assert decisions == {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.WORSE}
    # The remark names the altered run and the number of the look.
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
        early: The loss at the fourth position of the context.
        late: The loss in the last half of the context.
        shuffled: The loss of a translator that gets wrong source sentences. None for other tasks.
    """
    return {
        'seed': 0,
        'loss': 1.9,
        'shuffled': shuffled,
        'positions': {'1': 2.6, '5-8': None},
        'early': early,
        'late': late,
    }


def ngram_yardsticks(lowest):
    """Keywords of `write_yardsticks` that give the best n-grams this test loss."""
    test = {'4-gram': lowest + 0.3, '5-gram': lowest}
    return {'losses': {'val': {'5-gram': 1.0}, 'test': test}}


# A word-by-word translation reaches a BLEU of 5 on test. A baseline needs 10 more: 15.
TRANSLATION = {
    'task': 'translation',
    'losses': {},
    'tokens': None,
    'definition': 2,
    'bleu': {'val': 4.0, 'test': 5.0},
}


def judge_with_yardsticks(directory, yardsticks, trial, bleu):
    """Judges three arms.

    Args:
        directory: Directory of the study.
        yardsticks: Keywords of `write_yardsticks`.
        trial: The measured trial of the baseline.
        bleu: The test BLEU of all arms, or None for tasks other than translation.
    """
    records = three_arms()
    if bleu is not None:
        records = with_fields(records, val_bleu=bleu - 1, test_bleu=bleu)
    trial_of_b = measured_trial(early=2.0, late=2.0)
    trials = {'qk/vo': [trial], 'b/vo': [trial_of_b]}
    write_tuned(directory, records, yardsticks={'trials': trials} | yardsticks)
    return judge_study(directory)


@pytest.mark.parametrize(
    # The yardsticks, the measured trial of the baseline, and the BLEU of all arms.
    ('yardsticks', 'trial', 'bleu'),
    [
        pytest.param(
            ngram_yardsticks(lowest=MEAN_TEST_LOSS + 1e-6),
            measured_trial(),
            None,
            id='better than n-grams',
        ),
        # The gain is early - late, just above the needed 0.1.
        pytest.param({}, measured_trial(early=2.0, late=1.9 - 1e-6), None, id='uses its context'),
        pytest.param({}, measured_trial(early=None, late=None), None, id='a short context'),
        # With wrong source sentences, the loss of 1.9 has to rise by 0.5 to 2.4.
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
    assert decisions == BOTH_WORSE
    assert [remark for remark in remarks if remark.blocks] == []


@pytest.mark.parametrize(
    # The yardsticks, the measured trial of the baseline, and the BLEU of all arms.
    # The remark has `code` and `data`.
    ('yardsticks', 'trial', 'bleu', 'code', 'data'),
    [
        # The best n-grams have a lower loss than the baseline.
        pytest.param(
            ngram_yardsticks(lowest=MEAN_TEST_LOSS - 1e-6),
            measured_trial(),
            None,
            RemarkCode.BELOW_YARDSTICK,
            {
                'split': 'test',
                'loss': MEAN_TEST_LOSS,
                'name': '5-gram',
                'tokens': 307200,  # the n-grams are counted in these tokens
                'yardstick': MEAN_TEST_LOSS,
            },
            id='worse than n-grams',
        ),
        # These yardsticks name a screening run. Yardsticks of the verdict run are missing.
        pytest.param(
            {'run': SCREENING_OF_BASELINE},
            measured_trial(),
            None,
            RemarkCode.NO_YARDSTICK,
            {},
            id='the yardstick is that of another run',
        ),
        # The gain is early - late, just below the needed 0.1.
        pytest.param(
            {},
            measured_trial(early=2.0, late=1.9 + 1e-6),
            None,
            RemarkCode.LITTLE_CONTEXT,
            {'gain': 0.1, 'needed': 0.1},
            id='hardly uses its context',
        ),
        # A loss of 0 was measured, as losses of tasks that a model can solve are.
        pytest.param(
            {},
            measured_trial(early=0.0, late=0.0),
            None,
            RemarkCode.LITTLE_CONTEXT,
            {'gain': 0.0, 'needed': 0.1},
            id='gains nothing from a loss of 0',
        ),
        # A word-by-word translation has a BLEU of 5. A baseline needs 10 more.
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
        # With wrong source sentences, the loss of 1.9 has to rise by 0.5.
        pytest.param(
            TRANSLATION,
            measured_trial(shuffled=1.9 + 0.5 - 1e-6),
            20.0,
            RemarkCode.SOURCES_UNUSED,
            {'cost': 0.5, 'needed': 0.5},
            id='hardly uses its sources',
        ),
        # The current definition of masked texts and translations has the number 2.
        pytest.param(
            {'task': 'masked', 'definition': 1},
            measured_trial(),
            None,
            RemarkCode.OUTDATED_YARDSTICK,
            {},
            id='an outdated definition of masked text',
        ),
        # Yardsticks without the field `definition` have definition 1.
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
    """A yardstick is the loss or BLEU of a model that only counts, such as n-grams.

    A baseline that does not beat it has learned too little to compare other arms with.
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
    """Only the baseline has to beat the yardstick, which is the loss of n-grams.

    Another arm with a higher loss gets a remark, and keeps its verdict.
    """
    # The losses of b/vo are 1.0 above the baseline's, and its control's are 2.0 above.
    yardstick = MEAN_TEST_LOSS + 0.5
    records = [
        *three_arms(losses=BASE + 1.0),
        *tuned_arm('b/vo', losses=list(BASE + 2.0), control='equal_shape'),
    ]
    write_tuned(study_dir, records, yardsticks=ngram_yardsticks(lowest=yardstick))

    findings, decisions, remarks = judge_study(study_dir)

    for remark in remarks:
        assert remark.code is RemarkCode.ARM_BELOW_YARDSTICK
    control_of_b = B._replace(control='equal_shape')
    yardstick_of_arm = {r.arm: r.data['yardstick'] for r in remarks if not r.blocks}
    assert yardstick_of_arm == pytest.approx({B: yardstick, control_of_b: yardstick})

    # Tables mark the arms that have shortfalls.
    marked_arms = {arm.key for arm in findings.every_arm if arm.shortfalls}
    assert marked_arms == {B, control_of_b}

    assert decisions['b/vo'] is Decision.WORSE


def test_a_translating_arm_short_of_its_yardstick_is_marked(study_dir):
    """Only the baseline has to reach the yardstick. Another arm below it gets a remark.

    Here the yardstick is a BLEU of 15: a word-by-word translation has 5, and 10 more are needed.
    """
    records = three_arms()
    for record in records:
        bleu = 14.9 if record['variant'] == 'b/vo' else 15.1
        record |= {'val_bleu': bleu, 'test_bleu': bleu}
    write_tuned(study_dir, records, yardsticks=TRANSLATION)

    _, decisions, (remark,) = judge_study(study_dir)

    # Both arms keep the verdict that follows from their losses.
    assert decisions == {'b/vo': Decision.WORSE, 'c/vo': Decision.WORSE}
    assert remark == Remark(RemarkCode.ARM_LOW_BLEU, remark.data, blocks=False, arm=B)
    assert remark.data == pytest.approx({'bleu': 14.9, 'word_by_word': 5.0, 'needed': 5.0 + 10.0})


def test_a_study_whose_yardsticks_are_not_recorded_has_no_verdict(study_dir):
    write_tuned(study_dir, three_arms())
    (study_dir / ledger.YARDSTICKS).unlink()

    _, decisions, remarks = judge_study(study_dir)

    assert decisions == ALL_WITHHELD
    assert remarks == [Remark(RemarkCode.NO_YARDSTICK, {}, blocks=True, arm=None)]


def four_arms_of_which_one_has_two_high_seeds(high_variant):
    """Returns records of the baseline qk/vo and of b/vo, c/vo and d/vo.

    The losses of each arm are BASE, from 2.00 to 2.35, plus a constant. So all arms have the same
    spread over seeds. Then two of the eight seeds of `high_variant` get losses higher by 2, which
    makes its spread about seven times as large.
    """
    records = three_arms() + tuned_arm('d/vo', losses=list(BASE + 0.06))
    for record in records:
        if record['variant'] == high_variant and record['trial']['seed'] in (0, 1):
            record['test_loss'] += 2.0
    return records


@pytest.mark.parametrize(
    ('high_variant', 'withheld'),
    [
        pytest.param('b/vo', ['b/vo'], id='an arm'),
        # Every other arm is compared with the baseline.
        pytest.param('qk/vo', ['b/vo', 'c/vo', 'd/vo'], id='the baseline'),
    ],
)
def test_seeds_that_end_far_apart_withhold_the_verdict_of_their_arm(
    high_variant, withheld, study_dir
):
    """An arm gets no verdict if its losses spread too much over seeds.

    The limit is sd(arm) <= 3 median(sd(other arms)), where sd is the standard deviation over seeds.
    """
    write_tuned(study_dir, four_arms_of_which_one_has_two_high_seeds(high_variant))

    _, decisions, remarks = judge_study(study_dir)

    (remark,) = [r for r in remarks if r.code is RemarkCode.BIMODAL_SEEDS]
    assert remark.arm.variant == high_variant
    sd_of_arm = remark.data['sd']
    median_sd_of_other_arms = remark.data['usual']
    assert sd_of_arm > 3 * median_sd_of_other_arms

    variants_without_verdict = [v for v, d in decisions.items() if d is Decision.NO_VERDICT]
    assert variants_without_verdict == withheld


@pytest.mark.parametrize('high_variant', ['b/vo', 'qk/vo'])
def test_seeds_that_end_far_apart_withhold_the_verdict_of_two_arms(high_variant, study_dir):
    """The spread of each of two arms is compared with the spread of the other arm."""
    records = four_arms_of_which_one_has_two_high_seeds(high_variant)
    two_arms = [record for record in records if record['variant'] in ('qk/vo', 'b/vo')]
    write_tuned(study_dir, two_arms)
    assert judge_study(study_dir).decisions == {'b/vo': Decision.NO_VERDICT}
