"""Random tokens shown twice, so that the second copy can be predicted from the first alone."""

from collections.abc import Iterator
from typing import Literal

import numpy as np

from qkattn.data.pipeline import Part, chosen, eval_batches, eval_rows
from qkattn.data.tasks.rows import Batch, Rows, token_batch

NUM_ROWS = 64  # sequences, and validation rows that their tokens come from, at most
MIN_LENGTH = 8  # copies in shorter rows have too few tokens to be recognized
SEED = 0

Copy = Literal['first', 'second']


def sequences(rows: Rows) -> np.ndarray | None:
    """r_BH, H = (T + 1) // 2: validation tokens in a random order, int32.

    The tokens of up to NUM_ROWS rows, evenly spaced over the split, are shuffled across all of
    them, which keeps the corpus's token frequencies but neither its order nor its topics. None
    where T < MIN_LENGTH, and where the rows are not plain next-token prediction: inputs besides the
    tokens, targets that do not follow, or targets with loss weight 0 (as in probes).
    """
    count = len(eval_rows(rows, 'validation', NUM_ROWS))
    batch = next(eval_batches(rows, 'validation', batch_size=count, max_rows=NUM_ROWS))
    tokens_BT = batch['tokens_BT']
    length = tokens_BT.shape[1]
    next_token = (
        batch.keys() == {'tokens_BT', 'targets_BT', 'loss_weights_BT'}
        and (batch['targets_BT'][:, :-1] == tokens_BT[:, 1:]).all()
        and (batch['loss_weights_BT'] == 1).all()
    )
    if length < MIN_LENGTH or not next_token:
        return None
    half = (length + 1) // 2
    shuffled = np.random.default_rng(SEED).permutation(tokens_BT.ravel())
    return shuffled[: count * half].reshape(count, half)


def batches(
    r_BH: np.ndarray, length: int, copy: Copy, *, batch_size: int, part: Part = None
) -> Iterator[Batch]:
    """Batches of rows r_1 .. r_H r_1 .. r_H, of which one copy's r_2 .. r_H are targets.

    The first token of the second copy cannot be predicted, so r_1 is a target of neither. Rows that
    pad the last batch to `batch_size` hold zeros, loss weights included. T is 2 H - 1 or 2 H; in
    2 H, the last position predicts nothing. `part` is as in `eval_batches`.
    """
    (count, half) = r_BH.shape
    wanted = chosen(batch_size, part)
    twice_BT1 = np.zeros((-(-count // batch_size) * batch_size, length + 1), np.int32)
    twice_BT1[:count, : 2 * half] = np.tile(r_BH, 2)
    loss_weights_BT = np.zeros((len(twice_BT1), length), np.float32)
    first = 0 if copy == 'first' else half
    loss_weights_BT[:count, first : first + half - 1] = 1
    for start in range(0, len(twice_BT1), batch_size):
        shown_BT1 = twice_BT1[start + wanted]
        weights_BT = loss_weights_BT[start + wanted]
        yield token_batch(shown_BT1[:, :-1], shown_BT1[:, 1:], weights_BT)
