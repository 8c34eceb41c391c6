"""Measures induction: how well models predict the second copy of random tokens."""

import functools
import math
from collections.abc import Iterator
from typing import Literal

import numpy as np

from qkattn.data.pipeline import Part, eval_batches, eval_rows, rows_of_part
from qkattn.data.tasks.rows import Batch, Rows, TrainedTrials, token_batch

# The most sequences, and the most validation rows from which their tokens are taken.
NUM_ROWS = 64
# The shortest row. Shorter copies would have too few tokens to be recognized.
MIN_LENGTH = 8
# The seed that shuffles the tokens.
SEED = 0

Copy = Literal['first', 'second']


def induction(rows: Rows, trained: TrainedTrials) -> dict[str, np.ndarray]:
    """Measures how well X trained models predict random tokens when shown again.

    The gain is the loss on the first copy minus the loss on the second copy. From Olsson et al.
    2022, 'In-context learning and induction heads'.

    Args:
        rows: The task of the models.
        trained: The models.

    Returns:
        Arrays [X] by metric name, or {} if `sequences(rows)` is None.
    """
    random_tokens_BH = sequences(rows)
    if random_tokens_BH is None:
        return {}
    length = trained.config.model.context
    read_copy = functools.partial(batches, random_tokens_BH, length)
    # Sums [rows, X] over the targets in one copy, by metric.
    first = trained.sums(functools.partial(read_copy, 'first'))
    second = trained.sums(functools.partial(read_copy, 'second'))
    first_loss_X = first['loss'].sum(0) / first['weight'].sum(0)
    second_loss_X = second['loss'].sum(0) / second['weight'].sum(0)
    return {
        'val_induction_gain': first_loss_X - second_loss_X,
        'val_induction_accuracy': second['accuracy'].sum(0) / second['weight'].sum(0),
    }


def sequences(rows: Rows) -> np.ndarray | None:
    """Draws random tokens with the token frequencies of the validation split.

    Returns:
        Shuffled tokens of at most NUM_ROWS validation rows, [B, H], int32. For rows of T tokens, H
        is (T + 1) // 2. None if T is below MIN_LENGTH, or if the task is not to predict the next
        token at every position.
    """
    num_rows = len(eval_rows(rows, 'validation', NUM_ROWS))
    batch = next(eval_batches(rows, 'validation', batch_size=num_rows, max_rows=NUM_ROWS))
    tokens_BT = batch['tokens_BT']
    length = tokens_BT.shape[1]
    if length < MIN_LENGTH or not _predicts_every_next_token(batch):
        return None

    H = (length + 1) // 2
    shuffled_tokens = np.random.default_rng(SEED).permutation(tokens_BT.ravel())
    return shuffled_tokens[: num_rows * H].reshape(num_rows, H)


def _predicts_every_next_token(batch: Batch) -> bool:
    """Whether the task of a batch is to predict the next token at every position."""
    # Segments may be missing. They are the documents of a text, which random tokens do not have.
    names = batch.keys() - {'segments_BT'}
    if names != {'tokens_BT', 'targets_BT', 'loss_weights_BT'}:  # a translation has sources, too
        return False
    targets = batch['targets_BT'][:, :-1]
    next_tokens = batch['tokens_BT'][:, 1:]
    if not np.array_equal(targets, next_tokens):
        return False
    return bool((batch['loss_weights_BT'] == 1).all())


def batches(
    r_BH: np.ndarray, length: int, copy: Copy, *, batch_size: int, part: Part = None
) -> Iterator[Batch]:
    """Yields batches of rows r r, which hold random tokens twice, with targets in one copy.

    For example, r = a b c gives:

        inputs                       a b c a b
        targets                      b c a b c
        loss weights, first copy     1 1 0 0 0
        loss weights, second copy    0 0 0 1 1

    The first token of a copy is never a target, because it is unpredictable.

    Args:
        r_BH: Random tokens.
        length: Number of input tokens in a row, T = 2 H - 1 or 2 H.
        copy: The copy with targets.
        batch_size: Number of rows in a batch. The last batch is padded with rows of zeros.
        part: The rows of a batch to read; None for all.
    """
    num_rows, H = r_BH.shape
    num_padded_rows = math.ceil(num_rows / batch_size) * batch_size
    # R rows of T + 1 tokens, because the last target is not an input.
    tokens_RT1 = np.zeros((num_padded_rows, length + 1), np.int32)
    tokens_RT1[:num_rows, : 2 * H] = np.tile(r_BH, 2)

    num_targets = H - 1
    begin = 0 if copy == 'first' else H
    loss_weights_RT = np.zeros((num_padded_rows, length), np.float32)
    loss_weights_RT[:num_rows, begin : begin + num_targets] = 1

    batch_row_B = rows_of_part(batch_size, part)
    for batch_begin in range(0, num_padded_rows, batch_size):
        row_B = batch_begin + batch_row_B
        tokens_BT1 = tokens_RT1[row_B]
        yield token_batch(
            tokens_BT=tokens_BT1[:, :-1],
            targets_BT=tokens_BT1[:, 1:],
            loss_weights_BT=loss_weights_RT[row_B],
        )
