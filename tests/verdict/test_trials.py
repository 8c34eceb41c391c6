"""One line of results.jsonl: what it may lack, and what is said about what it may not."""

import math

import pytest

from qkattn.verdict.trials import parse_trial
from tests.studies import probe_record, translation_record, trial_record

SCORES = ('accuracy', 'solved', 'bleu', 'chrf', 'exact_match', 'num_sentences')


def test_scores_that_are_absent_are_none():
    trial = parse_trial(trial_record('qk/vo'))
    for split in ('val', 'test'):
        assert [trial.metrics[f'{split}_{name}'] for name in SCORES] == [None] * 6
        assert trial.metrics[f'{split}_bleu_signature'] is None


def test_translation_scores_are_read():
    trial = parse_trial(translation_record('qk/vo', bleu=30.0))
    assert [trial.metrics[f'val_{name}'] for name in SCORES] == [0.5, 0.125, 29, 49, 0.15, 1014]
    assert [trial.metrics[f'test_{name}'] for name in SCORES] == [0.5, 0.125, 30, 50, 0.15, 1000]
    assert trial.metrics['test_chrf_signature'] == 'nrefs:1|case:lc|nc:6|version:2.5.1'


def test_a_finished_trial_needs_no_bytes_and_no_test_split():
    none = dict.fromkeys(f'test_{name}' for name in ('loss', 'accuracy', 'solved'))
    trial = parse_trial(probe_record('qk/vo', accuracy=0.75, **none))
    assert [trial.metrics[f'val_{n}'] for n in ('loss', 'bits_per_byte', 'accuracy')] == [
        0.25,
        None,
        0.75,
    ]
    assert trial.metrics['test_loss'] is None and trial.metrics['test_accuracy'] is None


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'val_bleu': '30'}, "field 'val_bleu' is '30', expected int or float or null"),
        ({'test_solved': True}, "field 'test_solved' is True, expected int or float or null"),
        ({'val_num_sentences': 1.5}, "field 'val_num_sentences' is 1.5, expected int or null"),
        ({'test_bleu_signature': 1}, "field 'test_bleu_signature' is 1, expected str or null"),
        ({'val_loss': None}, "field 'val_loss' of a finished trial is None"),
        ({'trial': {'seed': 0, 'learning_rate': 1.0}}, "field 'weight_decay' is missing"),
        ({'val_loss': math.inf}, "field 'val_loss' of a finished trial is inf"),
        ({'val_bits_per_byte': math.nan}, "field 'val_bits_per_byte' of a finished trial is nan"),
        ({'test_chrf': math.nan}, "field 'test_chrf' of a finished trial is nan"),
        ({'val_loss_se': math.inf}, "field 'val_loss_se' of a finished trial is inf"),
        (
            {'val_induction_gain': 'x'},
            "field 'val_induction_gain' is 'x', expected int or float or",
        ),
        (
            {'stage': 'screening'},
            "field 'knob' is None, expected learning_rate, weight_decay, scor",
        ),
    ],
)
def test_bad_scores_are_named(changes, said):
    with pytest.raises(ValueError) as raised:
        parse_trial(translation_record('qk/vo') | changes)
    assert str(raised.value).startswith(said)


def test_a_diverged_trial_may_have_nothing():
    assert not parse_trial(translation_record('qk/vo', bleu=None)).finished
    assert not parse_trial(probe_record('qk/vo', accuracy=None)).finished


SIDE = {'name': 'x', 'version': '1'}


@pytest.mark.parametrize(
    ('data', 'said'),
    [
        ({'name': 'x'}, "field 'version' is missing"),
        ({'source': SIDE}, "field 'target' is missing"),
        ({'target': SIDE}, "field 'source' is missing"),
        ({'source': SIDE, 'target': {'name': 'x'}}, "field 'version' is missing"),
        ({'source': 'x', 'target': SIDE}, "field 'source' is 'x', expected dict"),
    ],
)
def test_data_that_is_not_named_is_refused(data, said):
    with pytest.raises(ValueError) as raised:
        parse_trial(trial_record('qk/vo', data=data))
    assert str(raised.value) == said
