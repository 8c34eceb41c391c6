"""Measures induction: random tokens are shown twice, and the second copy is to be predicted."""

import functools
import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from qkattn.data.pipeline import Part, eval_batches, eval_rows, rows_of_part
from qkattn.data.tasks.rows import Batch, Rows, TrainedTrials, token_batch

# The most sequences, which is also the most validation rows that their tokens come from.
NUM_ROWS = 64
# The shortest row. In shorter rows, a copy has too few tokens to be recognized.
MIN_LENGTH = 8
# The seed of the random order of the tokens.
SEED = 0

Copy = Literal['first', 'second']


def induction(rows: Rows, trained: TrainedTrials) -> dict[str, np.ndarray]:
    """Measures how well X trained models predict random tokens that occurred in their context.

    Random tokens are shown twice (Olsson et al. 2022, 'In-context learning and induction heads').
    A model does better on the second copy only if it finds the first one in its context. The gain
    is the loss on the first copy minus the loss on the second.

    Returns values [X] by field of a result; {} if the rows have no `sequences`.
    """
    r_BH = sequences(rows)
    if r_BH is None:
        return {}
    length = trained.config.model.context
    # Evaluate the models on each copy. The sums [R, X] are those of the losses, weights and correct
    # predictions of the targets of a row.
    first = trained.sums(functools.partial(batches, r_BH, length, 'first'))
    second = trained.sums(functools.partial(batches, r_BH, length, 'second'))
    loss_of_first_X = first['loss'].sum(0) / first['weight'].sum(0)
    loss_of_second_X = second['loss'].sum(0) / second['weight'].sum(0)
    return {
        'val_induction_gain': loss_of_first_X - loss_of_second_X,
        'val_induction_accuracy': second['accuracy'].sum(0) / second['weight'].sum(0),
    }


def sequences(rows: Rows) -> np.ndarray | None:
    """Draws the random tokens of a copy from the corpus: [B, H], int32, with H = (T + 1) // 2.

    They are the tokens of up to NUM_ROWS rows at equal distances in the validation split, shuffled
    across all of these rows. So they have the token frequencies of the corpus, but not its order or
    its topics.

    Returns None if rows of T tokens are shorter than MIN_LENGTH, or if the task does not train a
    model to predict the next token at every position.
    """
    num_rows = len(eval_rows(rows, 'validation', NUM_ROWS))
    batch = next(eval_batches(rows, 'validation', batch_size=num_rows, max_rows=NUM_ROWS))
    tokens_BT = batch['tokens_BT']
    length = tokens_BT.shape[1]
    if length < MIN_LENGTH or not _predicts_every_next_token(batch):
        return None

    half = (length + 1) // 2
    shuffled = np.random.default_rng(SEED).permutation(tokens_BT.ravel())
    return shuffled[: num_rows * half].reshape(num_rows, half)


def _predicts_every_next_token(batch: Batch) -> bool:
    """Whether all that a batch asks for is the next token, at every position.

    This is false for masked text, whose targets are the tokens at the same positions, and for
    translation, which has sources besides the tokens. It is also false for most probes, because
    some of their positions have the loss weight 0.
    """
    # Segments say where documents begin. They do not matter, because random tokens have none.
    names = batch.keys() - {'segments_BT'}
    if names != {'tokens_BT', 'targets_BT', 'loss_weights_BT'}:
        return False
    # The target of each position but the last must be the token of the next position.
    targets_BT1 = batch['targets_BT'][:, :-1]
    next_tokens_BT1 = batch['tokens_BT'][:, 1:]
    if not np.array_equal(targets_BT1, next_tokens_BT1):
        return False
    return bool((batch['loss_weights_BT'] == 1).all())


def batches(
    r_BH: np.ndarray, length: int, copy: Copy, *, batch_size: int, part: Part = None
) -> Iterator[Batch]:
    """Yields batches of rows r_1 .. r_H r_1 .. r_H, in which one of the copies is predicted.

    The targets are r_2 .. r_H of that copy. Nothing tells where the second copy begins, so r_1
    is not a target of either copy. For the tokens a b c, a row has the inputs a b c a b and the
    targets b c a b c. Its loss weights are 1 1 0 0 0 for the first copy, 0 0 0 1 1 for the second.

    The last batch is padded to `batch_size` with rows of zeros, whose loss weights are 0, too.

    Args:
      r_BH: the tokens of a copy.
      length: the number T of input tokens of a row, 2 H - 1 or 2 H. With 2 H, the last position
        predicts nothing.
      copy: which copy has targets.
      batch_size: the number of rows of a batch.
      part: which of these rows to read; None for all.
    """
    num_rows, half = r_BH.shape
    num_batches = math.ceil(num_rows / batch_size)
    # Write both copies. Rows have T + 1 tokens, because the last target is not an input.
    tokens_RT1 = np.zeros((num_batches * batch_size, length + 1), np.int32)
    tokens_RT1[:num_rows, : 2 * half] = np.tile(r_BH, 2)

    # The targets r_2 .. r_H are at the H - 1 positions of r_1 .. r_(H-1).
    first_target = 0 if copy == 'first' else half
    after_targets = first_target + half - 1
    loss_weights_RT = np.zeros((len(tokens_RT1), length), np.float32)
    loss_weights_RT[:num_rows, first_target:after_targets] = 1

    rows_of_part_B = rows_of_part(batch_size, part)
    for start in range(0, len(tokens_RT1), batch_size):
        rows_B = start + rows_of_part_B
        tokens_BT1 = tokens_RT1[rows_B]
        yield token_batch(tokens_BT1[:, :-1], tokens_BT1[:, 1:], loss_weights_RT[rows_B])
