"""What a finished run leaves: results of trials and of documents."""

import math
from types import SimpleNamespace

import numpy as np
import pytest

from qkattn import metrics
from qkattn.data.tasks.task_registry import rows_of
from qkattn.model import cost
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import read_json
from qkattn.train import results
from qkattn.train.loop import train
from qkattn.train.trials import Evaluation


def evaluation(nats_RX=None, targets_R=None, **metrics_X):
    """An evaluation with these metrics; the others are not defined."""
    return Evaluation(
        values={name: None for name in metrics.EVALUATED} | metrics_X,
        num_targets=16,
        num_rows=1,
        nats_RX=16 * metrics_X['loss'][None] if nats_RX is None else nats_RX,
        targets_R=np.array([16.0]) if targets_R is None else targets_R,
    )


def results_of(config, evaluations, alive=(True, True), induction=None, diverged_at=(None, None)):
    stack = SimpleNamespace(
        config=config,
        rows=rows_of(config),
        step=7,
        alive_X=np.array(alive),
        induction=lambda: induction,
        params=dict,
    )
    return results.trial_results(stack, evaluations, {}, {}, list(diverged_at))


def test_a_run_leaves_induction_and_documents_and_of_a_diverged_trial_nothing(small, tmp_path):
    config = small(trials={'seeds': (0,), 'learning_rates': (1e-2, 1e30)}, train={'num_steps': 4})
    fine, diverged = train(config, tmp_path / 'run')
    (final,) = (r for r in read_metrics(tmp_path / 'run/metrics.jsonl') if r['kind'] == 'final')
    assert diverged['status'] == 'diverged'
    for name in ('val_induction_gain', 'val_induction_accuracy', 'val_loss', 'test_loss_se'):
        assert math.isfinite(fine[name]) and diverged[name] is None
        assert final[name] == [fine[name], diverged[name]]
    splits = read_json(tmp_path / 'run/documents.json', {})
    for split, prefix in metrics.PREFIXES.items():
        found = splits[split]
        assert sum(found['tokens']) == 8 * 16 and all(t % 16 == 0 for t in found['tokens'])
        assert len(set(found['documents'])) == len(found['tokens']) > 4
        assert all(name.endswith('.py') for name in found['documents'])
        nats, none = found['nats']
        assert none is None and len(nats) == len(found['tokens'])
        assert math.isclose(sum(nats) / (8 * 16), fine[f'{prefix}_loss'], rel_tol=1e-12)


def test_rows_without_documents_are_dealt_out_and_empty_clusters_left_out(tiny):
    config = tiny(model={'context': 7}, data={'name': 'recall(pairs=2)', 'eval_sequences': 300})
    nats_R = np.arange(304.0)
    targets_R = np.where(np.arange(304) < 256, 2.0, 0.0)
    targets_R[5::128] = 0
    one = evaluation(nats_R[:, None], targets_R, loss=np.array([1.0]))
    stack = SimpleNamespace(config=config, rows=rows_of(config))
    found = results.document_results(stack, {'test': one}, [{'status': 'finished'}])['test']
    assert found['documents'] == [str(c) for c in range(128) if c != 5]
    assert found['tokens'] == [4] * 127
    assert found['nats'] == [[sum(nats_R[c:300:128]) for c in range(128) if c != 5]]


def test_a_metric_without_a_value_is_null_and_a_measurement_that_does_not_apply_absent(tiny):
    config = tiny(model={'context': 7}, trials={'seeds': (0,)})
    one = evaluation(loss=np.array([2.0]), loss_se=np.array([np.nan]))
    (result,) = results_of(config, {'validation': one}, alive=[True])
    assert result['val_loss_se'] is result['test_loss_se'] is result['val_bits_per_byte'] is None
    assert not [name for name in result if 'induction' in name or 'bleu' in name]
    assert result['val_loss'] == 2.0 and result['eval_rows'] == 1
    assert result['num_steps'] == 7 and result['status'] == 'finished'
    assert result['parameters'] == cost.count(config.model)


def test_a_loss_that_is_not_finite_is_a_divergence_however_late(tiny):
    """The gradient of the last step was finite, the parameters after it are not."""
    values_X = np.array([2.0, np.inf])
    late = evaluation(loss=values_X, accuracy=np.array([0.5, 0.0]))
    fine, diverged = results_of(
        tiny(), {'validation': late, 'test': late}, induction={'val_induction_gain': values_X}
    )
    assert (fine['status'], diverged['status']) == ('finished', 'diverged')
    assert (fine['diverged_at'], diverged['diverged_at']) == (None, 7)
    for name in ('val_loss', 'test_accuracy', 'val_induction_gain'):
        assert fine[name] is not None and diverged[name] is None


@pytest.mark.parametrize(
    ('diverged_at', 'starts', 'ends'),
    [
        ([None, None], None, None),
        ([1200, None], '1 of 2 trials diverged: seed 0 at', 'learning rate 0.1 at step 1,200'),
        ([3], 'the only trial diverged, the run has', 'at step 3; lower trials.learning_rates'),
        (
            [1, 1, 2, 2, 3, 3],
            'all 6 trials diverged',
            'step 2, 2 more; lower trials.learning_rates',
        ),
    ],
)
def test_a_warning_names_the_diverged_trials(diverged_at, starts, ends, caplog):
    found = [
        {
            'trial': {'seed': seed, 'learning_rate': 0.1},
            'status': 'finished' if at is None else 'diverged',
            'diverged_at': at,
        }
        for seed, at in enumerate(diverged_at)
    ]
    results.warn_of_diverged('runs/a', found)
    messages = [record.message for record in caplog.records]
    assert len(messages) == (starts is not None)
    for message in messages:
        assert message.startswith(f'runs/a: {starts}') and message.endswith(ends)
