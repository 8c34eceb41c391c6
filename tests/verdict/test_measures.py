"""Which numbers are shown: those that the trials have."""

import pytest

from qkattn.verdict import load_study
from qkattn.verdict.arms import arms_of
from qkattn.verdict.measures import losses, scores
from tests.studies import probe_record, translation_record, trial_record, write_study

NO_TEST = dict.fromkeys(
    f'test_{name}'
    for name in ('loss', 'bits_per_byte', 'accuracy', 'solved', 'bleu', 'chrf', 'exact_match')
)


@pytest.mark.parametrize(
    ('record', 'shown', 'scored'),
    [
        (trial_record('qk/vo'), ['val bits/byte', 'test bits/byte'], []),
        # A language model has an accuracy too; its loss says more.
        (trial_record('qk/vo', val_accuracy=0.5, val_solved=0.0), None, []),
        (trial_record('qk/vo', **NO_TEST), ['val bits/byte'], []),
        (
            probe_record('qk/vo'),
            ['val loss, nats/token', 'test loss, nats/token'],
            ['test accuracy, %', 'test solved, %'],
        ),
        (
            probe_record('qk/vo') | NO_TEST,
            ['val loss, nats/token'],
            ['val accuracy, %', 'val solved, %'],
        ),
        (
            translation_record('qk/vo'),
            ['val bits/byte', 'test bits/byte'],
            ['test BLEU', 'test chrF', 'test exact match, %'],
        ),
        (
            translation_record('qk/vo') | NO_TEST,
            ['val bits/byte'],
            ['val BLEU', 'val chrF', 'val exact match, %'],
        ),
        (translation_record('qk/vo', bleu=None), ['val loss, nats/token'], []),
    ],
)
def test_what_is_shown_follows_from_the_fields(study_dir, record, shown, scored):
    rows = arms_of(load_study(write_study(study_dir, [record])))
    headings = [measure.heading for measure in losses(rows)]
    assert headings == (shown or ['val bits/byte', 'test bits/byte'])
    assert [measure.heading for measure in scores(rows)] == scored


def test_parts_are_printed_in_percent(study_dir):
    records = [probe_record('qk/vo', accuracy, seed=s) for s, accuracy in enumerate((0.5, 0.75))]
    rows = arms_of(load_study(write_study(study_dir, records)))
    accuracy = scores(rows)[0]
    value = accuracy.over_seeds(rows[0])
    assert (value.mean, value.n) == (62.5, 2)
    assert value.sd == pytest.approx(25 / 2**0.5)
    assert accuracy.of_seeds(rows[0]) == [50, 75] and accuracy.axis == 'test accuracy (%)'


def test_a_seed_without_the_number_leaves_no_mean(study_dir):
    records = [translation_record('qk/vo', seed=0), translation_record('qk/vo', seed=1)]
    del records[1]['test_bleu']
    rows = arms_of(load_study(write_study(study_dir, records)))
    assert scores(rows)[0].over_seeds(rows[0]) is None
    assert scores(rows)[0].of_seeds(rows[0]) == [30.0]
