"""Evaluations of trials, induction, and results. (See also test_loop.py.)"""

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
from qkattn.model.cost import abstract_params
from qkattn.model.transformer import inputs_of
from qkattn.storage.records import metrics_of
from qkattn.train import program, results, trials
from qkattn.train.sharding import make_mesh
from qkattn.train.trials import Evaluation, Stack
from tests.lanes import slow_except
from tests.refusals import refused

# Relative tolerances of metrics.
RTOL = {
    'loss': 1e-5,
    'loss_se': 1e-4,
    'accuracy': 1e-6,
    'solved': 1e-6,
    'top_3': 1e-6,
    'calibration_error': 1e-4,
}


def losses_of_targets(logits_BTV, batch):
    """Returns the losses in nats, [B, T]. Positions without a target have 0."""
    log_normalizer_BT1 = np.log(np.exp(logits_BTV).sum(-1, keepdims=True))
    targets_BT1 = batch['targets_BT'][..., None]
    logits_BT1 = np.take_along_axis(logits_BTV, targets_BT1, -1)
    nats_BT = (log_normalizer_BT1 - logits_BT1)[..., 0]
    return np.where(batch['loss_weights_BT'] > 0, nats_BT, 0.0)


def expected_metrics(logits_BTV, batch):
    """Returns the metrics of one trial by name, computed in NumPy from its logits.

    A target is a position with a positive loss weight.
    """
    is_target_BT = batch['loss_weights_BT'] > 0
    targets_BT = batch['targets_BT']
    num_rows = len(targets_BT)
    num_targets = is_target_BT.sum()

    # The losses within a row are correlated, so the standard error is computed from sums of rows.
    nats_BT = losses_of_targets(logits_BTV, batch)
    loss = nats_BT[is_target_BT].mean()
    excess_B = nats_BT.sum(-1) - loss * is_target_BT.sum(-1)
    loss_se = np.std(excess_B, ddof=1) * num_rows**0.5 / num_targets

    # A row is solved if all its targets are predicted.
    is_correct_BT = logits_BTV.argmax(-1) == targets_BT
    is_solved_B = [is_correct_BT[b, is_target_BT[b]].all() for b in range(num_rows)]
    three_best_BT3 = np.argsort(logits_BTV)[..., -3:]
    is_in_top_3_BT = (three_best_BT3 == targets_BT[..., None]).any(-1)

    # The confidence is the highest probability. The calibration error compares confidence with
    # accuracy in ten bins of the confidence.
    exp_BTV = np.exp(logits_BTV)
    probabilities_BTV = exp_BTV / exp_BTV.sum(-1, keepdims=True)
    confidence = probabilities_BTV.max(-1)[is_target_BT]
    gaps = confidence - is_correct_BT[is_target_BT]
    bins = np.floor(10 * confidence)
    gap_of_bin = [gaps[bins == number].sum() for number in range(10)]

    return {
        'loss': loss,
        'loss_se': loss_se,
        'accuracy': is_correct_BT[is_target_BT].mean(),
        'solved': np.mean(is_solved_B),
        'top_3': is_in_top_3_BT[is_target_BT].mean(),
        'calibration_error': np.abs(gap_of_bin).sum() / num_targets,
    }


@pytest.mark.parametrize(
    'name', slow_except(['masked'], ['translation', 'masked', 'labelling probe'])
)
def test_metrics_of_an_evaluation_are_means_over_targets(
    task, name, monkeypatch, evaluation_only, outside
):
    """An evaluation has the metrics of `expected_metrics`, without dropout or label smoothing.

    The tokens of a probe stand for no bytes, so a probe has no bits per byte. `outside` puts the
    module `confidence`, with two further metrics, on the path.
    """
    train = {
        # The numbers of rows and of positions in a row are no multiples of 5.
        'batch_size': 5,
        'logits_chunk': 5,
        'accumulation': 1,
        'label_smoothing': 0.2,
        'metrics': ('confidence:top(k=3)', 'confidence:CALIBRATION'),
    }
    data = {'eval_sequences': None if name == 'translation' else 12}
    model = {'dropout': 0.5}
    config = task(name, model=model, train=train, data=data, trials={'seeds': (0, 7)})
    rows = rows_of(config)
    bytes_per_token = 2.0
    if 'probe' not in name:
        monkeypatch.setattr(rows, 'bytes_per_token', {'validation': bytes_per_token}.__getitem__)
    built = program.build(config)
    stack = Stack(config, built, rows, built.init(None))

    evaluation = stack.evaluate('validation')

    # Read all rows as one batch. In an evaluation, the random seed of row r is (0, r).
    row_numbers = pipeline.eval_rows(rows, 'validation', config.data.eval_sequences)
    draws_B2 = np.stack([np.zeros_like(row_numbers), row_numbers], axis=1).astype(np.uint64)
    batch = rows.read('validation', row_numbers, draws_B2)
    num_rows = len(batch['targets_BT'])

    # Each of the two trials has the expected metrics, and the expected loss of each row.
    predict = jax.jit(lambda params: with_params(config.model, params)(**inputs_of(batch)))
    for x in range(2):
        logits_BTV = np.asarray(predict(stack.params(x)), np.float64)
        for metric, expected in expected_metrics(logits_BTV, batch).items():
            value = evaluation.values[metric][x]
            np.testing.assert_allclose(value, expected, rtol=RTOL[metric], err_msg=metric)
        nats_B = evaluation.nats_RX[:num_rows, x]  # without rows that pad the last batch
        expected_nats_B = losses_of_targets(logits_BTV, batch).sum(-1)
        np.testing.assert_allclose(nats_B, expected_nats_B, rtol=1e-5, atol=1e-5)

    num_targets = batch['loss_weights_BT'].sum()
    assert evaluation.num_targets == num_targets
    assert evaluation.targets_R.sum() == num_targets

    if 'probe' in name:
        assert evaluation.values['bits_per_byte'] is None
    else:
        bits_per_token = evaluation.values['loss'] / math.log(2)
        bits_per_byte = bits_per_token / bytes_per_token
        assert evaluation.values['bits_per_byte'] == pytest.approx(bits_per_byte)

    # A diverged trial, where `alive` is False, has no metrics.
    stack.state['trials']['alive'] = jnp.array([True, False])
    loss_X = stack.evaluate('validation').values['loss']
    assert loss_X[0] == evaluation.values['loss'][0]
    assert np.isnan(loss_X[1])

    # An evaluation that a signal ends early has no result.
    assert stack.evaluate('validation', should_stop=lambda: True) is None


# Induction


def induction_of(config, logits_of):
    """Measures the induction of two trials that share one stand-in model.

    Induction is how well a model predicts the second copy of a sequence of random tokens.

    Args:
        config: The settings of a run of two trials.
        logits_of: The model. It maps tokens_BT to the logits of the next tokens, [B, T, V].

    Returns:
        (gain [X], accuracy [X]) of the X = 2 trials, or () if the task does not measure induction.
        The gain is the loss on the first copy minus the loss on the second copy.
    """

    class StackOfTwo(Stack):
        """Two trials that have the logits of `logits_of`."""

        def _measure(self, batch):
            logits_BTV = logits_of(batch['tokens_BT'])
            targets = trials.per_target(metrics.METRICS, logits_BTV, batch['targets_BT'])
            sums = metrics.row_sums(targets, batch['loss_weights_BT'])
            return {name: np.stack([sum_B, sum_B]) for name, sum_B in sums.items()}

    rows = rows_of(config)
    built = SimpleNamespace(mesh=make_mesh(MeshConfig()), lifting='map')
    measured = repeats.induction(rows, StackOfTwo(config, built, rows, state={}))
    return tuple(measured.values())


@pytest.fixture(params=[16, 17])
def config(request, tiny):
    """A run on windows of an even or an odd length."""
    train = {'batch_size': 24, 'accumulation': 1}
    return tiny(model={'context': request.param}, train=train)


def test_a_model_that_copies_gains_on_the_second_copy(config):
    """A model that copies predicts the second of two copies, but not the first.

    Each window holds a sequence of random tokens twice. The gain is the loss on the first copy
    minus the loss on the second copy.
    """
    length_of_copy = (config.model.context + 1) // 2

    def logits_of_copying(tokens_BT):
        """Gives a logit of 5 to the token that follows in the first copy."""
        predicted_BT = np.roll(tokens_BT, length_of_copy - 1, axis=1)
        # In the first copy, it predicts token 0, which never occurs.
        predicted_BT[:, : length_of_copy - 1] = 0
        is_predicted_BTV = predicted_BT[..., None] == np.arange(256)
        return np.where(is_predicted_BTV, np.float32(5), np.float32(0))

    gain_X, accuracy_X = induction_of(config, logits_of_copying)

    # One logit is 5 and the others are 0, so log Z is the same everywhere. The loss is log Z - 0 in
    # the first copy and log Z - 5 in the second.
    np.testing.assert_allclose(gain_X, 5 - 0, rtol=1e-5)
    # In both trials, every token of the second copy is predicted.
    np.testing.assert_allclose(accuracy_X, [1, 1])


def test_a_model_that_does_not_read_its_window_gains_nothing(config):
    """A model that always predicts the same token has the same loss on both copies.

    Each window holds a sequence of random tokens twice.
    """
    # The targets are all tokens of a sequence except the first.
    sequences_BH = repeats.sequences(rows_of(config))
    targets = sequences_BH[:, 1:]
    tokens, counts = np.unique(targets, return_counts=True)
    most_frequent = tokens[counts.argmax()]
    # The same logits for each of the 24 rows of a batch.
    logits_BTV = np.zeros((24, config.model.context, 256), np.float32)
    logits_BTV[..., most_frequent] = 3.0

    gain_X, accuracy_X = induction_of(config, lambda tokens_BT: logits_BTV)

    # The gain is the loss on the first copy minus the loss on the second copy.
    np.testing.assert_allclose(gain_X, [0, 0], atol=1e-6)
    # The model is right wherever the target is the most frequent token.
    frequency = counts.max() / targets.size
    np.testing.assert_allclose(accuracy_X, [frequency, frequency], rtol=1e-6)


def test_a_masked_model_measures_no_induction(tiny):
    config = tiny(model={'kind': 'encoder', 'vocab_size': 257})
    assert induction_of(config, logits_of=None) == ()


# Results of trials and of documents


def evaluation_of(nats_RX=None, targets_R=(16.0,), **metrics_X):
    """Returns an `Evaluation` of X trials with the given metrics. All other metrics are None.

    Args:
        nats_RX: The sum of losses in each row. By default, there is one row with 16 * loss.
        targets_R: The number of targets in each row. By default, there is one row of 16 targets.
        **metrics_X: The values of metrics, such as loss=np.array([2.0, 3.0]) for two trials.
    """
    if nats_RX is None:
        loss_X = metrics_X['loss']
        nats_RX = 16 * loss_X[None]
    return Evaluation(
        values=dict.fromkeys(metrics.METRICS) | metrics_X,
        metrics=metrics.METRICS,
        num_targets=16,
        num_rows=1,
        nats_RX=nats_RX,
        targets_R=np.array(targets_R),
    )


def results_of(config, evaluations, end_metrics=None, alive=None, of_corpora=None):
    """Returns the results of a run that ended after step 7, one dict per trial.

    Nothing is trained. The results are computed from the arguments.

    Args:
        config: The settings of the run.
        evaluations: The last `Evaluation` of each split.
        end_metrics: What the task measures when training ends, [X] by field.
        alive: Whether all losses of each trial were finite in training. By default, they were.
        of_corpora: The last `Evaluation` on each further corpus.
    """
    of_corpora = of_corpora or {}
    rows = rows_of(config)
    rows.end_metrics = lambda trained, finished_X: end_metrics or {}
    num_trials = len(config.trials.trials())
    stack = SimpleNamespace(
        config=config,
        rows=rows,
        corpora=tuple(SimpleNamespace(name=name, identity=dict) for name in of_corpora),
        step=7,
        alive_X=np.array(alive or [True] * num_trials),
    )
    return results.trial_results(
        stack, evaluations, costs={}, provenance={}, diverged_at={}, corpora=of_corpora
    )


def test_rows_without_documents_are_grouped_into_128_clusters(tiny):
    """In a task without documents, row r belongs to cluster r % 128.

    The task `recall` makes its own rows. A cluster without targets is left out.
    """
    config = tiny(model={'context': 7}, data={'name': 'recall(pairs=2)', 'eval_sequences': 300})
    # 300 rows are evaluated in 38 batches of 8 rows. So 38 * 8 - 300 = 4 rows are padding.
    num_padded_rows = 304
    nats_R = np.arange(float(num_padded_rows))
    # Rows before 256 have two targets each, except rows of cluster 5. Later rows have no targets.
    targets_R = np.full(num_padded_rows, 2.0)
    targets_R[256:] = 0
    targets_R[5::128] = 0
    evaluation = evaluation_of(nats_R[:, None], targets_R, loss=np.array([1.0]))

    stack = SimpleNamespace(config=config, rows=rows_of(config))
    results_of_trials = [{'status': 'finished'}]
    losses_by_split = results.document_results(stack, {'test': evaluation}, results_of_trials)
    clusters_of_split = losses_by_split['test']

    clusters = [cluster for cluster in range(128) if cluster != 5]
    # The loss of a cluster is the sum over every 128th row, up to row 299.
    nats = [sum(nats_R[cluster:300:128]) for cluster in clusters]
    assert clusters_of_split['documents'] == [str(cluster) for cluster in clusters]
    # Each of the 127 clusters has two rows among the first 256 rows, with two targets each.
    assert clusters_of_split['tokens'] == [2 * 2] * 127
    # There is one trial, so there is one list of losses.
    assert clusters_of_split['nats'] == [nats]


def test_weighted_targets_count_with_their_weights(tiny):
    """A loss per target is nats / tokens of a document, so both must have the same weights."""
    # Each of two rows is a cluster of its own.
    config = tiny(model={'context': 7}, data={'name': 'recall(pairs=2)', 'eval_sequences': 2})
    # The first row has three targets of weight 1/2, and the second has two of weight 1.
    evaluation = evaluation_of(np.array([[3.0], [5.0]]), (1.5, 2.0), loss=np.array([2.0]))

    stack = SimpleNamespace(config=config, rows=rows_of(config))
    results_of_trials = [{'status': 'finished'}]
    losses_by_split = results.document_results(stack, {'test': evaluation}, results_of_trials)

    tokens = losses_by_split['test']['tokens']
    assert tokens == [3 * 0.5, 2]
    # Whole numbers are stored without a decimal point.
    assert [type(number) for number in tokens] == [float, int]


@pytest.fixture
def result_without_test_split(tiny):
    """The result of one trial with a validation loss of 2.0 after step 7, without a test split.

    The standard error of the loss is NaN.
    """
    config = tiny(model={'context': 7}, trials={'seeds': (0,)})
    validation = evaluation_of(loss=np.array([2.0]), loss_se=np.array([np.nan]))
    by_trial = results_of(config, {'validation': validation})
    assert len(by_trial) == 1
    return by_trial[0]


def test_a_result_holds_what_was_trained(result_without_test_split, tiny):
    result = result_without_test_split
    assert result['val_loss'] == 2.0
    assert result['num_steps'] == 7
    assert result['status'] == 'finished'
    assert result['parameters'] == cost.count(tiny(model={'context': 7}).model)


@pytest.mark.parametrize('field', ['val_loss_se', 'test_loss_se', 'val_bits_per_byte'])
def test_a_metric_without_a_value_is_null(result_without_test_split, field):
    assert result_without_test_split[field] is None


def test_a_measurement_that_does_not_apply_is_absent(result_without_test_split):
    for name in result_without_test_split:
        assert 'induction' not in name
        assert 'bleu' not in name


def test_a_final_loss_that_is_not_finite_counts_as_a_divergence(tiny):
    """A trial has diverged if its evaluation after the last step has an infinite loss.

    `results_of` returns the results of a run of two trials that ended after step 7.
    """
    last_step = 7
    loss_X = np.array([2.0, np.inf])
    evaluation = evaluation_of(loss=loss_X, accuracy=np.array([0.5, 0.0]))
    end_metrics = {'val_induction_gain': loss_X}

    finished, diverged = results_of(
        tiny(), {'validation': evaluation, 'test': evaluation}, end_metrics
    )

    assert finished['status'] == 'finished'
    assert finished['diverged_at'] is None
    assert diverged['status'] == 'diverged'
    assert diverged['diverged_at'] == last_step

    # A diverged trial has no metrics, although its accuracy is finite.
    for name in ('val_loss', 'test_accuracy', 'val_induction_gain'):
        assert finished[name] is not None
        assert diverged[name] is None


def test_a_trial_that_diverged_last_has_no_metrics_on_further_corpora(tiny):
    """If a trial has diverged, its finite loss on the corpus '@train' becomes None."""
    two_trials = tiny()
    # The second trial has diverged, because its last validation loss is infinite.
    validation = evaluation_of(loss=np.array([2.0, np.inf]))
    # Both trials have a finite loss on '@train'.
    on_train = evaluation_of(loss=np.array([3.0, 4.0]))

    finished, diverged = results_of(
        two_trials, {'validation': validation}, of_corpora={'@train': on_train}
    )

    assert finished['loss[@train]'] == 3.0
    assert diverged['loss[@train]'] is None


def test_a_trial_that_diverged_earlier_has_no_end_metrics(tiny):
    """A task measures its end metrics when training ends. A diverged trial has None instead."""
    validation = evaluation_of(loss=np.array([2.0, np.nan]))
    end_metrics = {'val_induction_gain': np.array([1.5, 0.5])}

    # The second trial diverged: `alive` is False, because an earlier loss was not finite.
    finished, diverged = results_of(
        tiny(), {'validation': validation}, end_metrics, alive=[True, False]
    )

    assert finished['val_induction_gain'] == 1.5
    assert diverged['val_induction_gain'] is None


@pytest.mark.slow
def test_a_task_from_outside_measures_its_metric_when_training_ends(tiny, outside):
    """The results hold the metric 'nearer', which the task `Ahead` of the module `ahead` declares.

    In this task, a model predicts the token after the next one. 'nearer' is the fraction of
    positions where it predicts the next token instead.
    """
    config = tiny(data={'task': 'ahead:Ahead'})
    rows = rows_of(config)
    built = program.build(config)
    stack = Stack(config, built, rows, built.init(None))

    validation = stack.evaluate('validation')
    by_trial = results.trial_results(
        stack, {'validation': validation}, costs={}, provenance={}, diverged_at={}, corpora={}
    )

    # Compute how often the models predict the next token, which is the target of `LanguageRows`.
    read_next_tokens = functools.partial(
        pipeline.eval_batches,
        LanguageRows(rows.dataset, rows.length),
        'validation',
        max_rows=config.data.eval_sequences,
    )
    sums = stack.sums(read_next_tokens)
    accuracy_X = sums['accuracy'].sum(0) / sums['weight'].sum(0)
    assert [result['val_nearer'] for result in by_trial] == accuracy_X.tolist()

    # Language modelling measures induction when training ends. `Ahead` measures 'nearer' instead.
    assert 'val_induction_gain' not in by_trial[0]

    # The result describes the metric, so it can be read without the module of the task.
    described_metrics = metrics_of(by_trial[0])
    (nearer,) = rows.metrics
    assert described_metrics['nearer'] == nearer


def test_translations_of_a_run_are_computed_in_its_compute_dtype(task, monkeypatch):
    """The BLEU of a run is that of the model whose loss it measures, as `translate` loads it."""
    config = task('translation', model={'compute_dtype': 'bfloat16'})
    params_X = jax.tree.map(lambda leaf: jnp.zeros((1, *leaf.shape)), abstract_params(config.model))
    stack = Stack(config, program=None, rows=None, state={'trials': {'params': params_X}})
    translating_models = []

    def record_model(model, *_):
        translating_models.append(model)
        return []

    monkeypatch.setattr(trials, 'translate_ids', record_model)
    stack.translate(0, tokenizer=None, sources=[])
    (model,) = translating_models
    assert {leaf.dtype for leaf in jax.tree.leaves(model)} == {jnp.dtype('bfloat16')}


def test_an_end_metric_that_is_not_declared_is_refused(tiny):
    validation = evaluation_of(loss=np.array([2.0, 2.0]))
    end_metrics = {'val_nearer': np.array([0.1, 0.2])}
    message = "end_metrics of LanguageRows measures 'val_nearer', which is no field of a metric"
    with refused(message):
        results_of(tiny(), {'validation': validation}, end_metrics)


def test_a_metric_of_a_task_needs_a_name_of_its_own(tiny, outside):
    source = (outside / 'ahead.py').read_text()
    (outside / 'taken.py').write_text(source.replace("'nearer'", "'accuracy'"))
    config = tiny(data={'task': 'taken:Ahead'})
    with refused("metric 'accuracy' has the name of another"):
        trials.check_metrics(config)
