"""What a reader is told first, and what codes become in prose."""

import numpy as np
import pytest

from qkattn.report import find, load_study
from qkattn.report.notes import notes
from qkattn.report.sentences import found_in, held_equal, reason, remark_text
from tests.studies import edit_plan, run_name, trial_record, tuned_arm, write_study, write_tuned

BASE = 2 + 0.05 * np.arange(8)
NOISE = 0.001 * np.array([3, -1, 2, 0, -2, 1, -3, 1])


def arm(variant, delta, **keywords):
    return tuned_arm(variant, losses=list(BASE + delta + NOISE * (delta != 0)), **keywords)


def read(directory):
    study = load_study(directory)
    return study, find(study)


def test_the_first_screen(study_dir):
    records = arm('qk/vo', 0) + arm('b/vo', -0.03) + arm('d/vo', 0.0004)
    study, found = read(write_tuned(study_dir, records))
    (said,) = found_in(study, found)
    low, high = found.arms[1].difference.low, found.arms[1].difference.high
    assert said.startswith(
        'At equal total parameters (820k), each arm at its own tuned learning rate, 8 fresh seeds: '
        f'b/vo (-0.030 [{low:+.3f}, {high:+.3f}]) is better than qk/vo'
    )
    assert said.endswith('is equivalent to qk/vo (within 0.005 nats/token).')
    assert held_equal(study, found) == (
        'Equal total parameters (820k, within 0.1 %); same data, training (400 steps) and '
        'evaluation set; each arm at its own tuned learning rate.'
    )


def test_what_differs_and_what_is_not_matched_is_not_called_equal(study_dir):
    records = [*arm('qk/vo', 0), *arm('b/vo', 0.02)]
    for record in records:
        record |= {'target_parameters': None, 'residual': None}
    write_tuned(study_dir, records, matched=None)
    edit_plan(study_dir, run_name('b/vo', 'd_model=128', 'verdict'), optimizer__beta2=0.5)
    study, found = read(study_dir)
    assert held_equal(study, found).startswith('Parameters are not matched; same data')
    assert 'but for optimizer.beta2;' in held_equal(study, found)
    assert found_in(study, found)[0].startswith('Parameters not matched, each arm at its own')


def test_many_arms_are_counted_in_the_sentence(study_dir):
    records = arm('qk/vo', 0)
    for index in range(8):
        records += arm(f'v{index}/vo', 0.02 + 0.01 * index)
    (said,) = found_in(*read(write_tuned(study_dir, records)))
    assert said.count('[') == 5 and 'and 3 more arms are worse than qk/vo.' in said
    assert said.index('v0/vo') < said.index('v4/vo') and 'v5/vo' not in said


def test_arms_without_results_are_counted(study_dir):
    records = arm('qk/vo', 0) + arm('b/vo', 0.02) + arm('c/vo', 0.02)[:10]
    said = found_in(*read(write_tuned(study_dir, records)))
    assert said[-1] == '1 arm of 3 has no verdict trials so far.'


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
    first, second = found_in(*read(write_study(study_dir, records)))
    assert first.startswith(f'No verdict: {why}')
    assert second.startswith('Differences to qk/vo, nats/token (descriptive, below zero is better)')
    assert second.index('c/vo -0.490') < second.index('b/vo +0.505')


def test_what_blocks_every_arm_is_the_result(study_dir):
    records = arm('qk/vo', 0, screening_seeds=(100, 7)) + arm('b/vo', 1, screening_seeds=(100, 7))
    study, found = read(write_tuned(study_dir, records, tuning__seeds=[100, 7]))
    assert found_in(study, found) == (
        'No verdict: screening and verdict share seed 7, which makes the tuned settings look '
        'better than they are.',
    )


def test_a_verdict_with_its_caveat(study_dir):
    study, found = read(write_tuned(study_dir, arm('qk/vo', 0) + arm('b/vo', 0.02, optimum=16e-3)))
    assert reason(found.arms[1].verdict) == (
        'p < 0.001; learning rate not bracketed; it would be worse, but a better value may lie '
        'beyond those tried'
    ).replace('learning rate', 'its learning rate')
    (said,) = [remark_text(r) for r in found.remarks if r.arm]
    assert said == (
        'b/vo at d_model=128: learning rate not bracketed, the best of 0.001 to 0.016 is 0.016.'
    )
    assert any(note.startswith('Undecided, b/vo at d_model=128: p') for note in notes(study, found))
