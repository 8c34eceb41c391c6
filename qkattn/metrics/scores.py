"""Metrics of the argmax predictions."""

from typing import Any

from qkattn.metrics.losses import rows, weight
from qkattn.metrics.metric import Metric, Predictions


def correct(p: Predictions) -> Any:
    return (p.correct_BT * p.loss_weights_BT).sum(-1)


def solved(p: Predictions) -> Any:
    right_B = (p.correct_BT | (p.loss_weights_BT == 0)).all(-1)
    return p.loss_weights_BT.any(-1) & right_B


ACCURACY = Metric(
    name='accuracy',
    label='accuracy',
    unit='%',
    direction='higher',
    description='Fraction of the targets that are the argmax prediction.',
    role='score',
    scale=100.0,
    decimals=2,
    logged=True,
    for_text=False,
    sums=(correct, weight),
    value=lambda sums, _: sums['correct'].sum(0) / sums['weight'].sum(0),
)
SOLVED = Metric(
    name='solved',
    label='solved',
    unit='%',
    direction='higher',
    description='Fraction of the rows whose targets are all the argmax prediction.',
    role='score',
    scale=100.0,
    decimals=2,
    logged=True,
    for_text=False,
    sums=(solved, rows),
    value=lambda sums, _: sums['solved'].sum(0) / sums['rows'].sum(0),
)
