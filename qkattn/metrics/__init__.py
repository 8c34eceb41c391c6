"""Every metric of a trial, declared once: result files, tables and figures follow from METRICS.

An evaluated metric is one `Metric` with its sums and its line below. A metric that is measured when
a run ends is declared likewise, without sums, and computed by a function of train.measurements.
"""

from typing import Any

import numpy as np

from qkattn.metrics.attention import ATTENTION
from qkattn.metrics.losses import (
    BITS_PER_BYTE,
    LOSS,
    LOSS_SE,
    PERPLEXITY,
    bits_per_byte,
    perplexity,
    rows,
    weight,
)
from qkattn.metrics.measured import BLEU, CHRF, EXACT_MATCH, INDUCTION_ACCURACY, INDUCTION_GAIN
from qkattn.metrics.metric import PREFIXES, Metric, Predictions, Sums
from qkattn.metrics.scores import ACCURACY, SOLVED
from qkattn.metrics.times import TIMES

# In the order in which they are printed: the main score first.
METRICS: dict[str, Metric] = {
    metric.name: metric
    for metric in (
        LOSS,
        BITS_PER_BYTE,
        PERPLEXITY,
        LOSS_SE,
        BLEU,
        CHRF,
        EXACT_MATCH,
        ACCURACY,
        SOLVED,
        INDUCTION_GAIN,
        INDUCTION_ACCURACY,
    )
}
EVALUATED = {name: metric for name, metric in METRICS.items() if metric.value is not None}
# The fields of an evaluation in metrics.jsonl, one value a trial.
LOGGED = tuple(metric.field('val') for metric in METRICS.values() if metric.logged)

_ROW_SUMS = {
    function.__name__: function
    for functions in ((weight, rows), *(metric.sums for metric in EVALUATED.values()))
    for function in functions
}


def row_sums(predictions: Predictions) -> dict[str, Any]:
    """What an evaluation needs of each row of a batch, [B], for all evaluated metrics, by name."""
    return {name: function(predictions) for name, function in _ROW_SUMS.items()}


def values(sums: Sums, bytes_per_target: float | None) -> dict[str, np.ndarray | None]:
    """Every evaluated metric for X trials, from the sums of R rows, each [R, X]."""
    return {
        name: metric.value(sums, bytes_per_target)
        for name, metric in EVALUATED.items()
        if metric.value is not None
    }


def result_fields() -> dict[str, type]:
    """The fields that metrics may have in a result, and their types (null where not measured)."""
    return {
        f'{prefix}_{name}': kind
        for metric in METRICS.values()
        for prefix in metric.prefixes
        for name, kind in {metric.name: float, **metric.details}.items()
    }


__all__ = [
    'ATTENTION',
    'EVALUATED',
    'LOGGED',
    'METRICS',
    'PREFIXES',
    'TIMES',
    'Metric',
    'Predictions',
    'Sums',
    'bits_per_byte',
    'perplexity',
    'result_fields',
    'row_sums',
    'values',
]
