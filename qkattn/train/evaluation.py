"""Measuring the trials of a run on held-out rows."""

import dataclasses
from collections.abc import Iterable

import jax
import numpy as np

from qkattn.config import Config
from qkattn.data import pipeline
from qkattn.data.tasks import repeats
from qkattn.data.tasks.rows import Batch, Rows
from qkattn.metrics import bits_per_byte
from qkattn.train import program as programs
from qkattn.train.program import Program


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What X trials reach on a split; NaN for trials that diverged.

    Attributes:
      loss_X: nats per target.
      loss_se_X: standard error of the loss, in nats: what other rows of the same kind would change
        it by. Rows are drawn, not targets, which are alike within a row. NaN for a single row.
      bits_per_byte_X: the loss per byte of text, so that tokenizers compare; None where bytes mean
        nothing.
      accuracy_X: part of the targets that are the likeliest token.
      solved_X: part of the rows in which every target is.
      num_targets: targets, which padding is none of.
      num_rows: rows with any target.
    """

    loss_X: np.ndarray
    loss_se_X: np.ndarray
    bits_per_byte_X: list[float] | None
    accuracy_X: np.ndarray
    solved_X: np.ndarray
    num_targets: int
    num_rows: int


@dataclasses.dataclass(frozen=True)
class Induction:
    """How X trials use what they have read before in their window; NaN for trials that diverged.

    Random tokens are shown twice (Olsson et al. 2022, 'In-context learning and induction heads'):
    only a model that finds them again in its window does better the second time.

    Attributes:
      gain_X: nats per token, by which the loss is lower on the second copy than on the first.
      accuracy_X: part of the second copy's targets that are the likeliest token.
    """

    gain_X: np.ndarray
    accuracy_X: np.ndarray


def evaluate(config: Config, program: Program, rows: Rows, state: dict, split: str) -> Evaluation:
    """Reads the split, or as much of it as data.eval_sequences says, and measures every trial."""
    batches = pipeline.eval_batches(
        rows, split, batch_size=config.train.batch_size, max_rows=config.data.eval_sequences
    )
    sums = _sums(program, state, batches)
    total = {name: parts_PX.sum(0) for name, parts_PX in sums.items()}
    alive_X = _alive(state)
    loss_X = alive_X * total['nats'] / total['weight']
    size = rows.bytes_per_token(split)
    return Evaluation(
        loss_X=loss_X,
        loss_se_X=alive_X * standard_error(sums),
        bits_per_byte_X=None if size is None else [bits_per_byte(x, size) for x in loss_X],
        accuracy_X=alive_X * total['correct'] / total['weight'],
        solved_X=alive_X * total['solved'] / total['rows'],
        num_targets=int(total['weight'][0]),
        num_rows=int(total['rows'][0]),
    )


def standard_error(sums: dict[str, np.ndarray]) -> np.ndarray:
    """Standard error of the loss [X], in nats per target, over rows; NaN for fewer than two rows.

    The loss is a ratio of two sums over R rows, of nats n and weights w, with the variance
    R / (R - 1) * sum (n - loss * w)^2 / (sum w)^2 (Cochran 1977, 'Sampling techniques', ch. 6),
    without a correction for a split that is read whole: it stands for all text of its kind.

    Args:
      sums: of `step.measure`, each [P, X] for P batches.
    """
    total = {name: parts_PX.sum(0) for name, parts_PX in sums.items()}
    # Row excesses are over the mean of their own batch; shift_PX leads on to the overall mean.
    own_PX = sums['nats'] / np.maximum(sums['weight'], 1)
    shift_PX = total['nats'] / np.maximum(total['weight'], 1) - own_PX
    squares_PX = sums['ee'] - 2 * shift_PX * sums['ew'] + shift_PX**2 * sums['ww']
    rows_X = np.where(total['rows'] > 1, total['rows'], np.nan)
    return np.sqrt(rows_X / (rows_X - 1) * squares_PX.sum(0)) / total['weight']


def induction(config: Config, program: Program, rows: Rows, state: dict) -> Induction | None:
    """Measures every trial on `data.repeats` of the validation split.

    Returns:
      None for other models than decoders, and where `repeats.sequences` has none.
    """
    r_BH = repeats.sequences(rows) if config.model.kind == 'decoder' else None
    if r_BH is None:
        return None

    def total(copy: repeats.Copy) -> dict[str, np.ndarray]:
        batches = repeats.batches(
            r_BH, config.model.context, copy, batch_size=config.train.batch_size
        )
        return {name: parts_PX.sum(0) for name, parts_PX in _sums(program, state, batches).items()}

    first, second = total('first'), total('second')
    alive_X = _alive(state)
    return Induction(
        gain_X=alive_X * (first['nats'] / first['weight'] - second['nats'] / second['weight']),
        accuracy_X=alive_X * second['correct'] / second['weight'],
    )


def _sums(program: Program, state: dict, batches: Iterable[Batch]) -> dict[str, np.ndarray]:
    """The sums of `step.measure` for P batches and X trials, each [P, X] in float64."""
    found = [
        program.evaluate(state, programs.place_everywhere(program.mesh, batch)) for batch in batches
    ]
    return jax.tree.map(lambda *parts: np.asarray(parts, np.float64), *found)


def _alive(state: dict) -> np.ndarray:
    """1 for a trial, NaN for one that diverged."""
    return np.where(np.asarray(state['trials']['alive']), 1.0, np.nan)
