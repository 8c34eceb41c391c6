"""What a trained stack reaches: evaluations of a split, and the measurements when a run ends.

A measurement is one function here or in decode/, its line in STACK_MEASUREMENTS or
TRIAL_MEASUREMENTS, and its outputs in qkattn.metrics.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import numpy as np

from qkattn import metrics
from qkattn.config import Config
from qkattn.data import pipeline
from qkattn.data.tasks import repeats
from qkattn.data.tasks.rows import Batch, Rows
from qkattn.decode.translate import score_trial
from qkattn.train.placement import fetch, local_rows, place_rows
from qkattn.train.program import Program


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """X trials on one split.

    Attributes:
      values: [X] by the name of a metric, NaN for trials that diverged; None where the metric is
        not defined.
      num_targets: evaluated targets; padding is none.
      num_rows: rows with at least one target.
      nats_RX, targets_R: the loss summed over each evaluated row, and its targets, in row order.
      attention: `metrics.ATTENTION`, each [X], of the validation split; {} where that is off.
    """

    values: Mapping[str, np.ndarray | None]
    num_targets: int
    num_rows: int
    nats_RX: np.ndarray
    targets_R: np.ndarray
    attention: Mapping[str, np.ndarray] = dataclasses.field(default_factory=dict)


def evaluate(
    config: Config,
    program: Program,
    rows: Rows,
    state: dict,
    split: str,
    stop: Callable[[], bool] = lambda: False,
) -> Evaluation | None:
    """Evaluates every trial on the split, or on data.eval_sequences rows of it.

    `stop` is asked before every batch; where it returns true the evaluation ends, and is None.
    """
    batches = pipeline.eval_batches(
        rows,
        split,
        batch_size=config.train.batch_size,
        max_rows=config.data.eval_sequences,
        part=local_rows(config, program.mesh),
    )
    sums = _sums(config, program, state, batches, stop)
    if sums is None:
        return None
    alive_X = _alive(state)
    values = metrics.values(sums, rows.bytes_per_token(split))
    return Evaluation(
        values={name: None if v_X is None else alive_X * v_X for name, v_X in values.items()},
        num_targets=int(sums['weight'].sum(0)[0]),
        num_rows=int(sums['rows'].sum(0)[0]),
        nats_RX=alive_X * sums['nats'],
        targets_R=sums['weight'][:, 0],
        attention=_attention(config, program, rows, state) if split == 'validation' else {},
    )


def by_document(
    config: Config, rows: Rows, split: str, reached: Evaluation
) -> dict[str, list[Any]]:
    """The documents of an evaluation: their names, targets [C], and nats [X, C].

    Their sums are those of the split. A row counts as one of the document that it belongs to; rows
    that belong to none are dealt out in turn.
    """
    names, document_R = pipeline.clusters(rows, split, config.data.eval_sequences)
    count = len(document_R)  # rows that pad the last batch follow

    def total(values_R: np.ndarray) -> np.ndarray:
        return np.bincount(document_R, values_R[:count], minlength=len(names))

    targets_C = total(reached.targets_R)
    present_C = targets_C > 0
    return {
        'documents': [name for name, present in zip(names, present_C, strict=True) if present],
        'tokens': targets_C[present_C].astype(int).tolist(),
        'nats': [total(nats_R)[present_C].tolist() for nats_R in reached.nats_RX.T],
    }


def induction(
    config: Config, program: Program, rows: Rows, state: dict
) -> dict[str, np.ndarray] | None:
    """How the trials use what stands earlier in their context; NaN for trials that diverged.

    Random tokens are shown twice (Olsson et al. 2022, 'In-context learning and induction heads');
    only a model that finds them again in its context does better on the second copy.

    Returns:
      None where the rows have no such `repeats.sequences`.
    """
    r_BH = repeats.sequences(rows)
    if r_BH is None:
        return None

    def total(copy: repeats.Copy) -> dict[str, np.ndarray]:
        batches = repeats.batches(
            r_BH,
            config.model.context,
            copy,
            batch_size=config.train.batch_size,
            part=local_rows(config, program.mesh),
        )
        sums = _sums(config, program, state, batches)
        return {name: sums_RX.sum(0) for name, sums_RX in sums.items()}

    first, second = total('first'), total('second')
    alive_X = _alive(state)
    gain_X = first['nats'] / first['weight'] - second['nats'] / second['weight']
    return {
        'val_induction_gain': alive_X * gain_X,
        'val_induction_accuracy': alive_X * second['correct'] / second['weight'],
    }


# (config, program, rows, state) -> [X] by field, or None where it does not apply.
STACK_MEASUREMENTS: tuple[
    Callable[[Config, Program, Rows, dict], dict[str, np.ndarray] | None], ...
] = (induction,)
# (config, rows, () -> one trial's parameters) -> value by field, or None where it does not apply.
TRIAL_MEASUREMENTS: tuple[
    Callable[[Config, Rows, Callable[[], dict]], dict[str, Any] | None], ...
] = (score_trial,)


def _attention(config: Config, program: Program, rows: Rows, state: dict) -> dict[str, np.ndarray]:
    """`Evaluation.attention`; NaN for trials that diverged."""
    if not config.train.attention_metrics:
        return {}
    size, part = config.train.batch_size, local_rows(config, program.mesh)
    batch = next(
        pipeline.eval_batches(rows, 'validation', batch_size=size, max_rows=size, part=part)
    )
    measured = program.attention(state, place_rows(config, program.mesh, batch))
    return {name: _alive(state) * fetch(values_X) for name, values_X in measured.items()}


def _sums(
    config: Config,
    program: Program,
    state: dict,
    batches: Iterable[Batch],
    stop: Callable[[], bool] = lambda: False,
) -> metrics.Sums | None:
    """Sums over the R rows of all batches for X trials, each [R, X] in float64; None if stopped.

    Each process gives its `local_rows` of the batches, and gets the sums of all rows.
    """
    parts: list[dict] = []
    for batch in batches:
        if stop():
            return None
        parts.append(program.evaluate(state, place_rows(config, program.mesh, batch)))
        # At most two batches ahead of the devices, so that a stop request is seen early.
        jax.block_until_ready(parts[-2:][0])
    return jax.tree.map(lambda *sums_XB: np.concatenate(sums_XB, 1).astype(np.float64).T, *parts)


def _alive(state: dict) -> np.ndarray:
    """1 for a trial, NaN for one that diverged."""
    return np.where(fetch(state['trials']['alive']), 1.0, np.nan)
