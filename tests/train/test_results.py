"""What a finished run leaves: results of trials and of documents. (Also test_loop.py.)"""

from types import SimpleNamespace

import numpy as np

from qkattn.data.tasks.task_registry import rows_of
from qkattn.metrics import METRICS
from qkattn.model import cost
from qkattn.train import results
from qkattn.train.trials import Evaluation


def evaluation(nats_RX=None, targets_R=(16.0,), **metrics_X):
    """An evaluation with these metrics; the others are not defined."""
    nats_RX = 16 * metrics_X['loss'][None] if nats_RX is None else nats_RX
    values = dict.fromkeys(METRICS) | metrics_X
    return Evaluation(values, METRICS, 16, 1, nats_RX, np.array(targets_R))


def stack_of(config, **fields):
    return SimpleNamespace(config=config, rows=rows_of(config), **fields)


def results_of(config, evaluations, induction=None):
    alive_X = np.full(len(config.trials.trials()), True)
    stack = stack_of(config, step=7, alive_X=alive_X, induction=lambda: induction, params=dict)
    return results.trial_results(stack, evaluations, {}, {}, {})


def test_rows_without_documents_are_dealt_out_and_empty_clusters_left_out(tiny):
    config = tiny(model={'context': 7}, data={'name': 'recall(pairs=2)', 'eval_sequences': 300})
    nats_R = np.arange(304.0)
    targets_R = np.where(np.arange(304) < 256, 2.0, 0.0)
    targets_R[5::128] = 0
    one = evaluation(nats_R[:, None], targets_R, loss=np.array([1.0]))
    finished = [{'status': 'finished'}]
    test = results.document_results(stack_of(config), {'test': one}, finished)['test']
    assert test['documents'] == [str(c) for c in range(128) if c != 5]
    assert test['tokens'] == [4] * 127
    assert test['nats'] == [[sum(nats_R[c:300:128]) for c in range(128) if c != 5]]


def test_a_metric_without_a_value_is_null_and_a_measurement_that_does_not_apply_absent(tiny):
    config = tiny(model={'context': 7}, trials={'seeds': (0,)})
    one = evaluation(loss=np.array([2.0]), loss_se=np.array([np.nan]))
    (result,) = results_of(config, {'validation': one})
    assert result['val_loss_se'] is result['test_loss_se'] is result['val_bits_per_byte'] is None
    assert not [name for name in result if 'induction' in name or 'bleu' in name]
    assert (result['val_loss'], result['num_steps'], result['status']) == (2.0, 7, 'finished')
    assert result['parameters'] == cost.count(config.model)


def test_a_loss_that_is_not_finite_is_a_divergence_however_late(tiny):
    """The gradient of the last step was finite, the parameters after it are not."""
    values_X = np.array([2.0, np.inf])
    late = evaluation(loss=values_X, accuracy=np.array([0.5, 0.0]))
    induction = {'val_induction_gain': values_X}
    fine, diverged = results_of(tiny(), {'validation': late, 'test': late}, induction)
    assert (fine['status'], diverged['status']) == ('finished', 'diverged')
    assert (fine['diverged_at'], diverged['diverged_at']) == (None, 7)
    for name in ('val_loss', 'test_accuracy', 'val_induction_gain'):
        assert fine[name] is not None and diverged[name] is None
