"""Which numbers are shown: those that the trials have."""

import pytest

from qkattn.report.measures import losses, probes, scores
from qkattn.verdict import load_study
from qkattn.verdict.arms import arms_of
from tests.studies import probe_record, translation_record, trial_record, write_study

NAMES = ('loss', 'bits_per_byte', 'accuracy', 'solved', 'bleu', 'chrf', 'exact_match')
NO_TEST = dict.fromkeys(f'test_{name}' for name in NAMES)
NATS = ['val_loss', 'test_loss']
TRANSLATION = ['bleu', 'chrf', 'exact_match']
PROBE = {'val_induction_gain': 1.0, 'val_induction_accuracy': 0.5}


@pytest.mark.parametrize(
    ('record', 'shown', 'scored', 'probed'),
    [
        (trial_record('qk/vo'), NATS, [], []),
        # A language model has an accuracy too; its loss says more.
        (trial_record('qk/vo', val_accuracy=0.5, val_solved=0.0), NATS, [], []),
        (trial_record('qk/vo', **NO_TEST, **PROBE), NATS[:1], [], list(PROBE)),
        (probe_record('qk/vo'), NATS, ['test_accuracy', 'test_solved'], []),
        (probe_record('qk/vo') | NO_TEST, NATS[:1], ['val_accuracy', 'val_solved'], []),
        (translation_record('qk/vo'), NATS, [f'test_{name}' for name in TRANSLATION], []),
        (translation_record('qk/vo') | NO_TEST, NATS[:1], [f'val_{n}' for n in TRANSLATION], []),
        (translation_record('qk/vo', bleu=None), NATS[:1], [], []),
    ],
)
def test_what_is_shown_follows_from_the_fields(study_dir, record, shown, scored, probed):
    arms = arms_of(load_study(write_study(study_dir, [record])))
    for chosen, fields in ((losses, shown), (scores, scored), (probes, probed)):
        assert [measure.field for measure in chosen(arms)] == fields


def test_fractions_are_printed_in_percent(study_dir):
    records = [probe_record('qk/vo', accuracy, seed=s) for s, accuracy in enumerate((0.5, 0.75))]
    arms = arms_of(load_study(write_study(study_dir, records)))
    accuracy = scores(arms)[0]
    value = accuracy.over_seeds(arms[0])
    assert (value.mean, value.n) == (62.5, 2)
    assert value.sd == pytest.approx(25 / 2**0.5)
    assert accuracy.of_seeds(arms[0]) == [50, 75] and accuracy.axis == 'test accuracy (%)'


def test_a_seed_without_the_number_leaves_no_mean(study_dir):
    records = [translation_record('qk/vo', seed=0), translation_record('qk/vo', seed=1)]
    del records[1]['test_bleu']
    arms = arms_of(load_study(write_study(study_dir, records)))
    assert scores(arms)[0].over_seeds(arms[0]) is None
    assert scores(arms)[0].of_seeds(arms[0]) == [30.0]
