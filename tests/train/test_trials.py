"""What trials reach and leave: evaluations, induction, results. (Also test_loop.py.)"""

import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn import metrics
from qkattn.config import MeshConfig
from qkattn.data import pipeline
from qkattn.data.tasks import repeats
from qkattn.data.tasks.language import LanguageRows
from qkattn.data.tasks.task_registry import rows_of
from qkattn.model import cost, with_params
from qkattn.model.transformer import inputs_of
from qkattn.storage.records import metrics_of
from qkattn.train import program, results, trials
from qkattn.train.sharding import make_mesh
from qkattn.train.trials import Evaluation, Stack
from tests.lanes import slow_except
from tests.refusals import refused


@pytest.mark.parametrize(
    'name', slow_except(['masked'], ['translation', 'masked', 'labelling probe'])
)
def test_metrics_of_an_evaluation_are_means_over_targets(
    task, name, monkeypatch, evaluation_only, outside
):
    # 5 rows at a time do not divide the rows that there are, nor 5 positions a row.
    own = {'metrics': ('confidence:top(k=3)', 'confidence:CALIBRATION'), 'logits_chunk': 5}
    own |= {'batch_size': 5, 'accumulation': 1, 'label_smoothing': 0.2}
    data = {'eval_sequences': None if name == 'translation' else 12}
    config = task(name, model={'dropout': 0.5}, train=own, trials={'seeds': (0, 7)}, data=data)
    rows = rows_of(config)
    if 'probe' not in name:
        monkeypatch.setattr(rows, 'bytes_per_token', {'validation': 2.0}.__getitem__)
    built = program.build(config)
    stack = Stack(config, built, rows, built.init(None))
    got = stack.evaluate('validation')
    numbers = pipeline.eval_rows(rows, 'validation', config.data.eval_sequences)
    draws_B2 = np.stack([np.zeros_like(numbers), numbers], axis=1).astype(np.uint64)
    batch = rows.read('validation', numbers, draws_B2)
    predict = jax.jit(lambda params: with_params(config.model, params)(**inputs_of(batch)))
    used = batch['loss_weights_BT'] > 0
    for x in range(2):
        logits_BTV = np.asarray(predict(stack.params(x)), np.float64)
        logs_BTV = logits_BTV - np.log(np.exp(logits_BTV).sum(-1, keepdims=True))
        nats_BT = -np.take_along_axis(logs_BTV, batch['targets_BT'][..., None], -1)[..., 0] * used
        right_BT = logs_BTV.argmax(-1) == batch['targets_BT']
        excess_B = nats_BT.sum(-1) - nats_BT[used].mean() * used.sum(-1)
        in_top_BT = (np.argsort(logs_BTV)[..., -3:] == batch['targets_BT'][..., None]).any(-1)
        confidence_C = np.exp(logs_BTV.max(-1))[used]
        gaps_C = confidence_C - right_BT[used]
        bins_C = np.floor(10 * confidence_C)
        gaps = [gaps_C[bins_C == number].sum() for number in range(10)]
        want = {
            'top_3': (in_top_BT[used].mean(), 1e-6),
            'calibration_error': (np.abs(gaps).sum() / used.sum(), 1e-4),
            'loss': (nats_BT[used].mean(), 1e-5),
            'accuracy': (right_BT[used].mean(), 1e-6),
            'solved': (np.mean([right_BT[b, used[b]].all() for b in range(len(used))]), 1e-6),
            'loss_se': (np.std(excess_B, ddof=1) * len(used) ** 0.5 / used.sum(), 1e-4),
        }
        for metric, (value, rtol) in want.items():
            np.testing.assert_allclose(got.values[metric][x], value, rtol=rtol, err_msg=metric)
        nats_R = got.nats_RX[: len(used), x]
        np.testing.assert_allclose(nats_R, nats_BT.sum(-1), rtol=1e-5, atol=1e-5)
    assert got.num_targets == got.targets_R.sum() == batch['loss_weights_BT'].sum()
    bits = None if 'probe' in name else pytest.approx(got.values['loss'] / math.log(2) / 2)
    assert got.values['bits_per_byte'] == bits
    stack.state['trials']['alive'] = jnp.array([True, False])
    loss_X = stack.evaluate('validation').values['loss']
    assert loss_X[0] == got.values['loss'][0] and np.isnan(loss_X[1])
    assert stack.evaluate('validation', lambda: True) is None


# Induction


def induction_of(config, answer):
    """Gain [X] and accuracy [X] of two models that predict `answer(tokens_BT)`, logits_BTV."""

    class Answering(Stack):
        def _measure(self, batch):
            logits_BTV = answer(batch['tokens_BT'])
            targets = trials.per_target(metrics.METRICS, logits_BTV, batch['targets_BT'])
            sums = metrics.row_sums(targets, batch['loss_weights_BT'])
            return {name: np.stack([rows_B, rows_B]) for name, rows_B in sums.items()}

    rows = rows_of(config)
    built = SimpleNamespace(mesh=make_mesh(MeshConfig()), lifting='map')
    measured = repeats.induction(rows, Answering(config, built, rows, state={}))
    return tuple(measured.values())


@pytest.fixture(params=[16, 17])
def config(request, tiny):
    """A run on windows of an even or an odd length."""
    train = {'batch_size': 24, 'accumulation': 1}
    return tiny(model={'context': request.param}, train=train)


def test_a_model_that_copies_gains_on_the_second_copy(config):
    context = config.model.context
    half = (context + 1) // 2

    def copying(tokens_BT):
        """Predicts what stood H - 1 positions ago, its logit 5 above the others."""
        again_BT = np.roll(tokens_BT, half - 1, axis=1)
        again_BT[:, : half - 1] = 0
        return np.where(again_BT[..., None] == np.arange(256), np.float32(5), np.float32(0))

    # The first copy was never seen before: token 0 is guessed, which no text holds. The gain is the
    # difference of two closed forms.
    gain_X, accuracy_X = induction_of(config, copying)
    np.testing.assert_allclose(gain_X, 5, rtol=1e-5)
    np.testing.assert_allclose(accuracy_X, [1, 1])


def test_a_model_that_is_blind_to_its_window_gains_nothing(config):
    """Every copy costs the same, and only one token is ever right."""
    r_BH = repeats.sequences(rows_of(config))
    values, counts = np.unique(r_BH[:, 1:], return_counts=True)
    always_BTV = np.zeros((24, config.model.context, 256), np.float32)
    always_BTV[..., values[counts.argmax()]] = 3.0
    gain_X, accuracy_X = induction_of(config, lambda _: always_BTV)
    np.testing.assert_allclose(gain_X, [0, 0], atol=1e-6)
    part = counts.max() / r_BH[:, 1:].size
    np.testing.assert_allclose(accuracy_X, [part, part], rtol=1e-6)


def test_a_masked_model_measures_no_induction(tiny):
    assert induction_of(tiny(model={'kind': 'encoder', 'vocab_size': 257}), None) == ()


# Results of trials and of documents


def evaluation_of(nats_RX=None, targets_R=(16.0,), **metrics_X):
    """An evaluation with these metrics; the others are not defined."""
    nats_RX = 16 * metrics_X['loss'][None] if nats_RX is None else nats_RX
    values = dict.fromkeys(metrics.METRICS) | metrics_X
    return Evaluation(values, metrics.METRICS, 16, 1, nats_RX, np.array(targets_R))


def stack_of(config, **fields):
    return SimpleNamespace(config=config, rows=rows_of(config), corpora=(), **fields)


def results_of(config, evaluations, end_metrics=None, alive=None):
    """Results of trials of which the task measures `end_metrics` when training ends."""
    alive_X = np.array(alive or [True] * len(config.trials.trials()))
    stack = stack_of(config, step=7, alive_X=alive_X)
    stack.rows.end_metrics = lambda trained, finished_X: end_metrics or {}
    return results.trial_results(stack, evaluations, {}, {}, {}, {})


def test_rows_without_documents_are_dealt_into_clusters(tiny):
    config = tiny(model={'context': 7}, data={'name': 'recall(pairs=2)', 'eval_sequences': 300})
    nats_R = np.arange(304.0)
    # Of 304 rows, 300 are evaluated, and those from 256 on have no targets; nor have those of
    # cluster 5, as row r is in cluster r modulo 128.
    targets_R = np.where(np.arange(304) < 256, 2.0, 0.0)
    targets_R[5::128] = 0
    one = evaluation_of(nats_R[:, None], targets_R, loss=np.array([1.0]))
    finished = [{'status': 'finished'}]
    test = results.document_results(stack_of(config), {'test': one}, finished)['test']
    assert test['documents'] == [str(c) for c in range(128) if c != 5]
    assert test['tokens'] == [4] * 127
    assert test['nats'] == [[sum(nats_R[c:300:128]) for c in range(128) if c != 5]]


@pytest.fixture
def result_without_test_split(tiny):
    """The result of one trial whose standard error is not defined."""
    config = tiny(model={'context': 7}, trials={'seeds': (0,)})
    validation = evaluation_of(loss=np.array([2.0]), loss_se=np.array([np.nan]))
    (result,) = results_of(config, {'validation': validation})
    return result


def test_a_result_holds_what_was_trained(result_without_test_split, tiny):
    result = result_without_test_split
    assert (result['val_loss'], result['num_steps'], result['status']) == (2.0, 7, 'finished')
    assert result['parameters'] == cost.count(tiny(model={'context': 7}).model)


@pytest.mark.parametrize('field', ['val_loss_se', 'test_loss_se', 'val_bits_per_byte'])
def test_a_metric_without_a_value_is_null(result_without_test_split, field):
    assert result_without_test_split[field] is None


def test_a_measurement_that_does_not_apply_is_absent(result_without_test_split):
    names = result_without_test_split.keys()
    assert not [name for name in names if 'induction' in name or 'bleu' in name]


def test_a_final_loss_that_is_not_finite_counts_as_a_divergence(tiny):
    """The gradient of the last step was finite, the parameters after it are not."""
    values_X = np.array([2.0, np.inf])
    late = evaluation_of(loss=values_X, accuracy=np.array([0.5, 0.0]))
    measured = {'val_induction_gain': values_X}
    fine, diverged = results_of(tiny(), {'validation': late, 'test': late}, measured)
    assert (fine['status'], diverged['status']) == ('finished', 'diverged')
    assert (fine['diverged_at'], diverged['diverged_at']) == (None, 7)
    for name in ('val_loss', 'test_accuracy', 'val_induction_gain'):
        assert fine[name] is not None and diverged[name] is None


def test_a_late_divergence_leaves_no_metrics_on_further_corpora(tiny):
    config = tiny()
    # The second trial diverges in the last evaluation; on the further corpus it has a finite loss.
    late = evaluation_of(loss=np.array([2.0, np.inf]))
    on_corpus = evaluation_of(loss=np.array([3.0, 4.0]))
    corpus = SimpleNamespace(name='@train', identity=dict)
    stack = stack_of(config, step=7, alive_X=np.array([True, True]))
    stack.corpora = (corpus,)
    stack.rows.end_metrics = lambda trained, finished_X: {}
    fine, diverged = results.trial_results(
        stack, {'validation': late}, {}, {}, {}, {'@train': on_corpus}
    )
    assert (fine['loss[@train]'], diverged['loss[@train]']) == (3.0, None)


def test_a_trial_that_diverged_earlier_has_no_end_metrics(tiny):
    one = evaluation_of(loss=np.array([2.0, np.nan]))
    measured = {'val_induction_gain': np.array([1.5, 0.5])}
    fine, diverged = results_of(tiny(), {'validation': one}, measured, alive=[True, False])
    assert (fine['val_induction_gain'], diverged['val_induction_gain']) == (1.5, None)


@pytest.mark.slow
def test_a_task_from_outside_measures_its_metric_when_training_ends(tiny, outside):
    config = tiny(data={'task': 'ahead:Ahead'})
    rows = rows_of(config)
    built = program.build(config)
    stack = Stack(config, built, rows, built.init(None))
    read = functools.partial(
        pipeline.eval_batches,
        LanguageRows(rows.dataset, rows.length),
        'validation',
        max_rows=config.data.eval_sequences,
    )
    sums = stack.sums(read)
    expected_X = sums['accuracy'].sum(0) / sums['weight'].sum(0)
    evaluations = {'validation': stack.evaluate('validation')}
    by_trial = results.trial_results(stack, evaluations, {}, {}, {}, {})
    assert [result['val_nearer'] for result in by_trial] == expected_X.tolist()
    # Read without the module of the task.
    assert metrics_of(by_trial[0])['nearer'] == rows.metrics[0]
    assert 'val_induction_gain' not in by_trial[0]


def test_an_end_metric_that_is_not_declared_is_refused(tiny):
    one = evaluation_of(loss=np.array([2.0, 2.0]))
    with refused(
        "end_metrics of LanguageRows measures 'val_nearer', which is no field of a metric"
    ):
        results_of(tiny(), {'validation': one}, {'val_nearer': np.array([0.1, 0.2])})


def test_a_metric_of_a_task_needs_a_name_of_its_own(tiny, outside):
    source = (outside / 'ahead.py').read_text()
    (outside / 'taken.py').write_text(source.replace("'nearer'", "'accuracy'"))
    with refused("metric 'accuracy' has the name of another"):
        trials.check_metrics(tiny(data={'task': 'taken:Ahead'}))
