"""The table of metrics, and metrics from outside. (Values by hand: train/test_trials.py.)"""

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
        assert metric.name == name and metric.label and metric.description.endswith('.')
        assert metric.value is not None or not metric.logged
        assert (metric.direction == 'lower') == (metric.role in ('loss', 'error'))
    kinds = metrics.result_fields()
    assert (kinds['test_loss_se'], kinds['val_num_sentences']) == (float, int)
    with pytest.raises(ValueError, match="induction_gain has no prefix 'test'"):
        metrics.METRICS['induction_gain'].field('test')


def test_perplexity_of_a_uniform_guess(recwarn):
    assert metrics.perplexity(math.log(50)) == pytest.approx(50)
    assert metrics.perplexity(1e4) == metrics.perplexity(math.inf) == math.inf
    assert math.isnan(metrics.perplexity(math.nan))
    assert not recwarn.list


def test_bits_per_byte_of_a_uniform_guess():
    assert metrics.bits_per_byte(math.log(2**12), 4.0) == pytest.approx(3)
    with pytest.raises(ConfigError, match='bytes_per_token=nan must be above 0'):
        metrics.bits_per_byte(1.0, math.nan)


# Metrics from outside the package

R, T, V, X = 6, 20, 13, 2
EXAMPLES = ['confidence:top(k=3)', 'confidence:ENTROPY', 'confidence:CALIBRATION']


def pytest_generate_tests(metafunc):
    chosen(metafunc, 'metric', EXAMPLES)


def config_of(*names):
    return Config(model=ModelConfig(vocab_size=V), train=TrainConfig(metrics=names))


def test_a_metric_keeps_its_contract(outside, metric):
    check_metrics(config_of(metric))
    known = metrics.named([metric])
    rng = np.random.default_rng(0)
    (name,) = known.keys() - metrics.METRICS.keys()
    measure = jax.jit(functools.partial(per_target, known))

    def values(logits_XRTV, targets_RT, weights_RT):
        """The metric of X trials, computed as an evaluation does."""
        weights_RT = jax.numpy.asarray(weights_RT)
        trials = [metrics.row_sums(measure(x, targets_RT), weights_RT) for x in logits_XRTV]
        sums = {n: np.stack([np.float64(t[n]) for t in trials], axis=1) for n in trials[0]}
        return metrics.values(sums, 1.0, known)[name]

    logits_XRTV = 3 * rng.standard_normal((X, R, T, V)).astype(np.float32)
    targets_RT = rng.integers(0, V, (R, T))
    weights_RT = np.float32(rng.random((R, T)) < 0.7)
    weights_RT[-1] = 0
    got_X = values(logits_XRTV, targets_RT, weights_RT)
    assert np.shape(got_X) == (X,) and np.isfinite(got_X).all() and got_X[0] != got_X[1]
    # Neither the length of a row nor what stands where there is no target changes a mean.
    logits_XRTV[:, weights_RT == 0] = np.nan
    halves = [
        logits_XRTV.reshape(X, 2 * R, T // 2, V),
        *(array.reshape(2 * R, T // 2) for array in (targets_RT, weights_RT)),
    ]
    for arrays in ((logits_XRTV, targets_RT, weights_RT), halves):
        np.testing.assert_allclose(values(*arrays), got_X, rtol=1e-5)
    recorded = metrics_of(describe_outside_metrics(known))[name]
    printed = ('name', 'label', 'unit', 'scale', 'decimals', 'direction', 'prefixes', 'for_text')
    assert [getattr(recorded, n) for n in printed] == [getattr(known[name], n) for n in printed]
    assert recorded.text(0.5) == known[name].text(0.5)


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
"""


def test_an_object_that_is_no_metric_is_refused_in_one_sentence(outside):
    (outside / 'bad.py').write_text(BAD_MODULE)
    # The object in bad.py, and what the refusal says.
    for name, says in (
        ('jnp', "train.metrics='bad:jnp' is not a Metric, or a function"),
        ('fails', 'fails, ZeroDivisionError in .*bad.py, line 12: '),
        ('FIELD', "metric 'tokens' has the name of another"),
        ('MEAN', r"per_target of metric 'mine' gives \(2,\) for targets .* \(2, 3\)"),
        ('SCALAR', r"value of metric 'mine' gives \(\) for sums of shape \(5, 7\)"),
        ('MISSING', "metrics='bad:MISSING' fails, KeyError in .* line 9"),
        ('NOTHING', "metric 'mine' must have per_target, value or both"),
        ('SEVERAL', "metric 'mine' gives several numbers for each target, so it needs value"),
    ):
        with refused(says):
            check_metrics(config_of(f'bad:{name}'))
    sys.modules.pop('bad')
