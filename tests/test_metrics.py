"""The table of metrics, and metrics from outside. Values are tested in train/test_trials.py."""

import functools
import math
import sys

import jax
import numpy as np
import pytest

from qkattn import metrics
from qkattn.config import Config, ModelConfig, TrainConfig
from qkattn.errors import ConfigError
from qkattn.storage.records import describe_outside_metrics, metrics_of
from qkattn.train.trials import check_metrics, per_target
from tests.fixtures import chosen
from tests.refusals import refused


def test_every_metric_of_the_table_is_described():
    for name, metric in metrics.METRICS.items():
        assert metric.name == name
        assert metric.label
        assert metric.description.endswith('.')
        if metric.logged:
            assert metric.value is not None
        is_error = metric.role in ('loss', 'error')
        assert (metric.direction == 'lower') == is_error


def test_fields_of_results_have_types():
    types = metrics.result_fields()
    assert types['test_loss_se'] is float
    assert types['val_num_sentences'] is int


def test_a_metric_has_no_field_for_another_prefix():
    with pytest.raises(ValueError, match="induction_gain has no prefix 'test'"):
        metrics.METRICS['induction_gain'].field('test')


def test_perplexity_of_a_uniform_guess(recwarn):
    vocab_size = 50
    assert metrics.perplexity(math.log(vocab_size)) == pytest.approx(vocab_size)
    assert not recwarn.list


def test_perplexity_of_losses_without_a_finite_one(recwarn):
    assert metrics.perplexity(1e4) == math.inf  # an overflow
    assert metrics.perplexity(math.inf) == math.inf
    assert math.isnan(metrics.perplexity(math.nan))
    assert not recwarn.list


def test_bits_per_byte_of_a_uniform_guess():
    # 12 bits for each token of 4 bytes.
    assert metrics.bits_per_byte(math.log(2**12), bytes_per_token=4.0) == pytest.approx(3)


def test_bits_per_byte_need_a_number_of_bytes():
    with pytest.raises(ConfigError, match='bytes_per_token=nan must be above 0'):
        metrics.bits_per_byte(1.0, math.nan)


# Metrics from outside the package

R, T, V, X = 6, 20, 13, 2  # rows, tokens of a row, vocabulary, trials
EXAMPLES = ['confidence:top(k=3)', 'confidence:ENTROPY', 'confidence:CALIBRATION']


def pytest_generate_tests(metafunc):
    chosen(metafunc, 'metric', EXAMPLES)


def config_of(*names):
    return Config(model=ModelConfig(vocab_size=V), train=TrainConfig(metrics=names))


def outside_metric(known):
    """The only metric that is not in the table of metrics."""
    (name,) = known.keys() - metrics.METRICS.keys()
    return known[name]


def evaluator_of(metric):
    """Returns the function evaluate(logits_XRTV, targets_RT, weights_RT) of a metric.

    `metric` is an import path, and `name` is the name of the metric. `known` has all metrics by
    name. `measure` gives the numbers of each metric for each target.
    """
    known = metrics.named([metric])
    name = outside_metric(known).name
    measure = jax.jit(functools.partial(per_target, known))

    def evaluate(logits_XRTV, targets_RT, weights_RT):
        """The metric `name` of X trials, computed from its sums over the targets of each row."""
        weights_RT = jax.numpy.asarray(weights_RT)
        sums_of_trials = []
        for logits_RTV in logits_XRTV:
            measured = measure(logits_RTV, targets_RT)
            sums_of_trials.append(metrics.row_sums(measured, weights_RT))

        # Each trial has a dictionary of arrays [R, ...]. They are stacked to arrays [R, X, ...].
        sums = {}
        for sum_name in sums_of_trials[0]:
            rows_of_trials = [np.float64(trial[sum_name]) for trial in sums_of_trials]
            sums[sum_name] = np.stack(rows_of_trials, axis=1)
        values = metrics.values(sums, bytes_per_target=1.0, metrics=known)
        return values[name]

    return evaluate


def test_a_metric_is_a_mean_over_targets(outside, metric):
    """The value of a user's metric does not depend on how targets are divided into rows.

    Axes are X trials, R rows, T tokens of a row, and V tokens of the vocabulary.
    """
    check_metrics(config_of(metric))
    evaluate = evaluator_of(metric)

    # Weight 0 means that a position has no target. The last row has no target at all.
    rng = np.random.default_rng(0)
    logits_XRTV = 3 * rng.standard_normal((X, R, T, V)).astype(np.float32)
    targets_RT = rng.integers(0, V, (R, T))
    weights_RT = np.float32(rng.random((R, T)) < 0.7)
    weights_RT[-1] = 0

    # The two trials have different logits, so they have different values.
    values_X = evaluate(logits_XRTV, targets_RT, weights_RT)
    assert np.shape(values_X) == (X,)
    assert np.isfinite(values_X).all()
    assert values_X[0] != values_X[1]

    # Logits at positions without a target do not matter, even if they are NaN.
    logits_XRTV[:, weights_RT == 0] = np.nan
    values_with_nan_X = evaluate(logits_XRTV, targets_RT, weights_RT)
    np.testing.assert_allclose(values_with_nan_X, values_X, rtol=1e-5)

    # The same targets in twice as many rows of half the length give the same values.
    values_of_half_rows_X = evaluate(
        logits_XRTV.reshape(X, 2 * R, T // 2, V),
        targets_RT.reshape(2 * R, T // 2),
        weights_RT.reshape(2 * R, T // 2),
    )
    np.testing.assert_allclose(values_of_half_rows_X, values_X, rtol=1e-5)


def test_a_metric_is_read_from_results_as_it_was(outside, metric):
    known = metrics.named([metric])
    original = outside_metric(known)
    read = metrics_of(describe_outside_metrics(known))[original.name]

    fields = ('name', 'label', 'unit', 'scale', 'decimals', 'direction', 'prefixes', 'for_text')
    for field in fields:
        assert getattr(read, field) == getattr(original, field)
    assert read.text(0.5) == original.text(0.5)


BAD_MODULE = """
import jax.numpy as jnp
from qkattn.metrics import Metric
def score(name='mine', per_target=lambda p: p.nats_BT, **fields):
    return Metric(name, 'score', 'Some.', per_target=per_target, **fields)
FIELD = score('tokens')
MEAN = score(per_target=lambda p: p.nats_BT.mean(-1))
SCALAR = score(value=lambda sums, _: sums['mine'].sum())
MISSING = score(value=lambda sums, _: sums['yours'])
NOTHING = Metric('mine', 'score', 'Some.')
SEVERAL = score(per_target=lambda p: p.logits_BTV)
def fails(*, k=1): return 1 / 0
UPPER = score('Mine')
LOSS = Metric('mine', 'loss', 'Some.')
UP = score(direction='up')
SPLIT = score(prefixes=('validation',))
"""


@pytest.fixture
def bad_module(outside):
    """Makes the module `bad` importable, whose objects are not valid metrics."""
    (outside / 'bad.py').write_text(BAD_MODULE)
    yield
    sys.modules.pop('bad')


@pytest.mark.parametrize(
    ('name', 'says'),
    [
        ('jnp', "train.metrics='bad:jnp' is not a Metric, or a function"),
        ('fails', 'fails, ZeroDivisionError in .*bad.py, line 12: '),
        ('FIELD', "metric 'tokens' has the name of another"),
        ('UPPER', "^name='Mine' of a metric must be lower-case letters, digits and underscores"),
        ('LOSS', "^role='loss' of metric 'mine' must be 'score'$"),
        ('UP', "^direction='up' of metric 'mine' must be 'lower' or 'higher'$"),
        ('SPLIT', r"^prefixes=\('validation',\) of metric 'mine' must be \('val', 'test'\), "),
        ('MEAN', r"per_target of metric 'mine' gives \(2,\) for targets .* \(2, 3\)"),
        ('SCALAR', r"value of metric 'mine' gives \(\) for sums of shape \(5, 7\)"),
        ('MISSING', "metrics='bad:MISSING' fails, KeyError in .* line 9"),
        ('NOTHING', "metric 'mine' must have per_target, value or both"),
        ('SEVERAL', "metric 'mine' gives several numbers for each target, so it needs value"),
    ],
)
def test_an_object_that_is_no_metric_is_refused_in_one_sentence(bad_module, name, says):
    with refused(says):
        check_metrics(config_of(f'bad:{name}'))
