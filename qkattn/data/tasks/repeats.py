"""Random tokens shown twice, so that the second copy can be predicted from the first alone."""

import functools
from collections.abc import Iterator
from typing import Literal

import numpy as np

from qkattn.data.pipeline import Part, eval_batches, eval_rows, selected
from qkattn.data.tasks.rows import Batch, Rows, TrainedTrials, token_batch

NUM_ROWS = 64  # sequences, and validation rows that their tokens come from, at most
MIN_LENGTH = 8  # copies in shorter rows have too few tokens to be recognized
SEED = 0

Copy = Literal['first', 'second']


def induction(rows: Rows, trained: TrainedTrials) -> dict[str, np.ndarray]:
    """Measures [X] how trained models use what stands earlier in their context.

    Random tokens are shown twice (Olsson et al. 2022, 'In-context learning and induction heads');
    only a model that finds them again in its context does better on the second copy. The gain is
    the loss on the first copy minus that on the second. Empty for rows without `sequences`.
    """
    r_BH = sequences(rows)
    if r_BH is None:
        return {}
    length = trained.config.model.context
    first = trained.sums(functools.partial(batches, r_BH, length, 'first'))
    second = trained.sums(functools.partial(batches, r_BH, length, 'second'))
    loss_of_first_X = first['loss'].sum(0) / first['weight'].sum(0)
    loss_of_second_X = second['loss'].sum(0) / second['weight'].sum(0)
    return {
        'val_induction_gain': loss_of_first_X - loss_of_second_X,
        'val_induction_accuracy': second['accuracy'].sum(0) / second['weight'].sum(0),
    }


def sequences(rows: Rows) -> np.ndarray | None:
    """r_BH, H = (T + 1) // 2: validation tokens in a random order, int32.

    The tokens of up to NUM_ROWS rows, evenly spaced over the split, are shuffled across all of
    them, which keeps the corpus's token frequencies but neither its order nor its topics. None
    where T < MIN_LENGTH, and where the rows are not plain next-token prediction: inputs besides
    tokens and segments, targets that do not follow, or targets with loss weight 0 (as in probes).
    """
    num_rows = len(eval_rows(rows, 'validation', NUM_ROWS))
    batch = next(eval_batches(rows, 'validation', batch_size=num_rows, max_rows=NUM_ROWS))
    tokens_BT = batch['tokens_BT']
    length = tokens_BT.shape[1]
    # Segments say where documents begin; the random tokens are one document.
    names = batch.keys() - {'segments_BT'}
    is_next_token_prediction = (
        names == {'tokens_BT', 'targets_BT', 'loss_weights_BT'}
        and (batch['targets_BT'][:, :-1] == tokens_BT[:, 1:]).all()
        and (batch['loss_weights_BT'] == 1).all()
    )
    if length < MIN_LENGTH or not is_next_token_prediction:
        return None
    half = (length + 1) // 2
    shuffled = np.random.default_rng(SEED).permutation(tokens_BT.ravel())
    return shuffled[: num_rows * half].reshape(num_rows, half)


def batches(
    r_BH: np.ndarray, length: int, copy: Copy, *, batch_size: int, part: Part = None
) -> Iterator[Batch]:
    """Batches of rows r_1 .. r_H r_1 .. r_H, of which one copy's r_2 .. r_H are targets.

    The first token of the second copy cannot be predicted, so r_1 is a target of neither. Rows that
    pad the last batch to `batch_size` hold zeros, loss weights included. T is 2 H - 1 or 2 H; in
    2 H, the last position predicts nothing. `part` is as in `eval_batches`.
    """
    num_rows, half = r_BH.shape
    num_batches = -(-num_rows // batch_size)
    # One token more, [R, T + 1]: the last is a target alone.
    twice_RT1 = np.zeros((num_batches * batch_size, length + 1), np.int32)
    twice_RT1[:num_rows, : 2 * half] = np.tile(r_BH, 2)
    first_target = 0 if copy == 'first' else half
    loss_weights_RT = np.zeros((len(twice_RT1), length), np.float32)
    loss_weights_RT[:num_rows, first_target : first_target + half - 1] = 1
    numbers_B = selected(batch_size, part)
    for start in range(0, len(twice_RT1), batch_size):
        rows_B = start + numbers_B
        tokens_BT1 = twice_RT1[rows_B]
        yield token_batch(tokens_BT1[:, :-1], tokens_BT1[:, 1:], loss_weights_RT[rows_B])
