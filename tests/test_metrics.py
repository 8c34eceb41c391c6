"""The table of metrics, and metrics against arithmetic by hand."""

import math

import numpy as np
import pytest

from qkattn import metrics
from qkattn.errors import ConfigError


def test_the_table_is_complete():
    for name, metric in metrics.METRICS.items():
        assert metric.name == name and metric.label and metric.description.endswith('.')
        assert metric.value is not None or not metric.logged
    fields = ('val_loss', 'val_bits_per_byte', 'val_accuracy', 'val_solved')
    assert fields == metrics.LOGGED
    kinds = metrics.result_fields()
    assert (kinds['test_loss_se'], kinds['val_num_sentences']) == (float, int)
    assert kinds['val_induction_gain'] is float and 'test_induction_gain' not in kinds
    with pytest.raises(ValueError, match="induction_gain has no prefix 'test'"):
        metrics.METRICS['induction_gain'].field('test')


def test_a_value_is_printed_with_its_label_and_unit():
    printed = {
        'loss': 'loss 2.3000 nats/token',
        'accuracy': 'accuracy 230.00 %',
        'bleu': 'BLEU 2.30',
    }
    assert {name: metrics.METRICS[name].text(2.3) for name in printed} == printed
    assert metrics.METRICS['bits_per_byte'].text(2.3) == 'bits/byte 2.3000'


def test_values_are_ratios_of_sums_over_all_batches():
    """Two batches of two rows with one or two targets; the last row is padding."""
    nats_PBT = np.array([[[1.0, 2.0], [2.0, 3.0]], [[4.0, 9.0], [7.0, 7.0]]])
    correct_PBT = np.array([[[1, 0], [1, 0]], [[1, 0], [1, 1]]], bool)
    weights_PBT = np.array([[[1.0, 1.0], [1.0, 0.0]], [[1.0, 0.0], [0.0, 0.0]]])
    batches = [
        metrics.row_sums(metrics.Predictions(None, weights_BT, nats_BT, correct_BT))
        for nats_BT, correct_BT, weights_BT in zip(nats_PBT, correct_PBT, weights_PBT, strict=True)
    ]
    sums = {
        name: np.concatenate([batch[name] for batch in batches])[:, None].astype(float)
        for name in batches[0]
    }
    got = metrics.values(sums, bytes_per_target=2.0)
    loss = (1 + 2 + 2 + 4) / 4
    squares = [(n - loss * w) ** 2 for n, w in ((3, 2), (2, 1), (4, 1))]
    want = {
        'loss': loss,
        'bits_per_byte': loss / math.log(2) / 2,
        'perplexity': math.exp(loss),
        'loss_se': math.sqrt(3 / 2 * sum(squares)) / 4,
        'accuracy': 3 / 4,
        'solved': 2 / 3,
    }
    assert {name: value.item() for name, value in got.items()} == pytest.approx(want)
    assert metrics.values(sums, None)['bits_per_byte'] is None
    assert np.isnan(metrics.standard_error({name: rows[:1] for name, rows in sums.items()}))


def test_perplexity_and_bits_per_byte_of_a_uniform_guess(recwarn):
    assert metrics.perplexity(math.log(50)) == pytest.approx(50)
    assert metrics.perplexity(1e4) == metrics.perplexity(math.inf) == math.inf
    assert math.isnan(metrics.perplexity(math.nan))
    assert not recwarn.list
    assert metrics.bits_per_byte(math.log(2**12), 4.0) == pytest.approx(3)
    for wrong in (0.0, -1.0, math.nan):
        with pytest.raises(ConfigError, match=f'bytes_per_token={wrong} must be above 0'):
            metrics.bits_per_byte(1.0, wrong)
