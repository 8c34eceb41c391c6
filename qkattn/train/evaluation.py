"""Measuring the trials of a run on held-out rows."""

import dataclasses

import jax
import numpy as np

from qkattn.config import Config
from qkattn.data import pipeline
from qkattn.data.rows import Rows
from qkattn.evaluate import bits_per_byte
from qkattn.train import program as programs
from qkattn.train.program import Program


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """What X trials reach on a split; NaN for trials that diverged.

    Attributes:
      loss_X: nats per target.
      bits_per_byte_X: the same per byte of text, so that tokenizers compare; None where bytes mean
        nothing.
      accuracy_X: part of the targets that are the likeliest token.
      solved_X: part of the rows in which every target is.
      num_targets: targets, which padding is none of.
    """

    loss_X: np.ndarray
    bits_per_byte_X: list[float] | None
    accuracy_X: np.ndarray
    solved_X: np.ndarray
    num_targets: int


def evaluate(config: Config, program: Program, rows: Rows, state: dict, split: str) -> Evaluation:
    """Reads the split, or as much of it as data.eval_sequences says, and measures every trial."""
    batches = pipeline.eval_batches(
        rows, split, batch_size=config.train.batch_size, max_rows=config.data.eval_sequences
    )
    sums = [
        program.evaluate(state, programs.place_everywhere(program.mesh, batch)) for batch in batches
    ]
    total = jax.tree.map(lambda *parts: np.sum(np.asarray(parts, np.float64), axis=0), *sums)
    alive_X = np.where(np.asarray(state['trials']['alive']), 1.0, np.nan)
    loss_X = alive_X * total['nats'] / total['weight']
    size = rows.bytes_per_token(split)
    return Evaluation(
        loss_X=loss_X,
        bits_per_byte_X=None if size is None else [bits_per_byte(x, size) for x in loss_X],
        accuracy_X=alive_X * total['correct'] / total['weight'],
        solved_X=alive_X * total['solved'] / total['rows'],
        num_targets=int(total['weight'][0]),
    )
