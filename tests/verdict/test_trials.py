"""One result: what it may lack, and the message for what it may not."""

import math

import pytest

from qkattn.metrics import result_fields
from qkattn.verdict import runs
from tests.studies import plan_line, probe_record, translation_record, trial_record

SCORES = ('accuracy', 'solved', 'bleu', 'chrf', 'exact_match', 'num_sentences')
SIDE = {'name': 'x', 'version': '1'}
RUN = runs.parse_run(plan_line('qk/vo', 'd_model=128', [trial_record('qk/vo')]))


def parse_trial(record):
    return runs.parse_trial(record, RUN)


def test_metrics_are_those_that_are_declared():
    trial = parse_trial(translation_record('qk/vo', bleu=30.0))
    assert trial.metrics.keys() == result_fields().keys()
    assert [trial.metrics[f'val_{name}'] for name in SCORES] == [0.5, 0.125, 29, 49, 0.15, 1014]
    assert [trial.metrics[f'test_{name}'] for name in SCORES] == [0.5, 0.125, 30, 50, 0.15, 1000]
    assert trial.metrics['test_chrf_signature'] == 'nrefs:1|case:lc|nc:6|version:2.5.1'
    without = parse_trial(trial_record('qk/vo')).metrics
    assert {without[f'{split}_{name}'] for split in ('val', 'test') for name in SCORES} == {None}


def test_a_finished_trial_needs_no_bytes_and_no_test_split():
    none = dict.fromkeys(f'test_{name}' for name in ('loss', 'accuracy', 'solved'))
    metrics = parse_trial(probe_record('qk/vo', accuracy=0.75, **none)).metrics
    assert (metrics['val_loss'], metrics['val_accuracy']) == (0.25, 0.75)
    assert {metrics[name] for name in ('val_bits_per_byte', 'test_loss', 'test_accuracy')} == {None}


def test_a_diverged_trial_may_have_nothing():
    assert not parse_trial(translation_record('qk/vo', bleu=None)).finished
    assert not parse_trial(probe_record('qk/vo', accuracy=None)).finished


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'num_steps': 'many'}, "field 'num_steps' is 'many', expected int"),
        ({'val_bleu': '30'}, "field 'val_bleu' is '30', expected float"),
        ({'test_solved': True}, "field 'test_solved' is True, expected float"),
        ({'val_num_sentences': 1.5}, "field 'val_num_sentences' is 1.5, expected int"),
        ({'test_bleu_signature': 1}, "field 'test_bleu_signature' is 1, expected str"),
        ({'val_induction_gain': 'x'}, "field 'val_induction_gain' is 'x', expected float"),
        ({'trial': {'seed': 0, 'learning_rate': 1.0}}, "field 'weight_decay' is missing"),
        ({'parameters': {'total': 1}}, "field 'attention' is missing"),
        ({'status': 'lost'}, "field 'status' is 'lost', expected Literal"),
        ({'val_loss': None}, "field 'val_loss' of a finished trial is None"),
        ({'val_loss': math.inf}, "field 'val_loss' is inf, expected float"),
        (
            {'val_bits_per_byte': math.nan},
            "field 'val_bits_per_byte' is nan, expected float",
        ),
        ({'test_chrf': math.nan}, "field 'test_chrf' is nan, expected float"),
        ({'val_loss_se': math.inf}, "field 'val_loss_se' is inf, expected float"),
        ({'stage': 'verdict'}, "stage 'verdict' contradicts plan.jsonl"),
        ({'config_hash': '0123'}, "its config_hash '0123' is not that of the planned run"),
        ({'data': {'name': 'x'}}, "field 'version' is missing"),
        ({'data': {'source': SIDE}}, "field 'target' is missing"),
        ({'data': {'target': SIDE}}, "field 'source' is missing"),
        ({'data': {'source': SIDE, 'target': {'name': 'x'}}}, "field 'version' is missing"),
        ({'data': {'source': 'x', 'target': SIDE}}, "field 'source' is 'x', expected dict"),
    ],
)
def test_what_is_wrong_is_named(changes, message):
    with pytest.raises(ValueError) as raised:
        parse_trial(translation_record('qk/vo') | changes)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize('field', ['status', 'data', 'test_loss', 'test_bits_per_byte'])
def test_a_field_that_every_result_has_may_not_be_absent(field):
    record = trial_record('qk/vo')
    del record[field]
    with pytest.raises(ValueError, match=f"field '{field}' is missing"):
        parse_trial(record)
