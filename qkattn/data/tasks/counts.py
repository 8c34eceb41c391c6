"""Yardsticks from counts of the training text: models that any trained model has to beat.

Language models are compared with n-grams, masked models with counts of visible neighbours.
"""

import math
from collections.abc import Callable

import numpy as np

from qkattn.config import Config
from qkattn.data.pipeline import eval_batches, train_batch
from qkattn.data.tasks.rows import Batch, Rows, Yardsticks
from qkattn.metrics import PREFIXES
from qkattn.stats import ngrams

# The longest n-grams.
MAX_ORDER = 6
# The most neighbours from which a masked token is predicted.
MAX_NEIGHBOURS = 5
# The most training tokens that are counted. More would take much memory and hardly lower the loss.
MAX_TOKENS = 2**23
ROWS_PER_READ = 1024


def ngram_yardsticks(rows: Rows, config: Config) -> Yardsticks:
    """Computes the losses of 1-grams to MAX_ORDER-grams on the targets of a language model.

    The n-grams count the training tokens of the first trial. As for the model, the first token of a
    row is context, but not a target.
    """

    def text_of(batch: Batch) -> np.ndarray:
        """The L = T + 1 tokens of each row: 'a b c d' for inputs 'a b c' and targets 'b c d'."""
        first_tokens_B1 = batch['tokens_BT'][:, :1]
        return np.concatenate([first_tokens_B1, batch['targets_BT']], axis=1)

    # Count the training text: N targets, each with the K = MAX_ORDER - 1 tokens before it.
    text_RL = _training_text(rows, config, text_of)
    contexts_KN, targets_N = ngrams.preceding(text_RL, MAX_ORDER - 1)

    # Compute the losses of the M targets of each evaluation split, by each order.
    splits = rows.splits[1:]  # the first one is train
    batches = [_read_evaluation(rows, config, split) for split in splits]
    evaluated = [ngrams.preceding(text_of(batch), MAX_ORDER - 1) for batch in batches]
    nats_of_split = ngrams.losses(contexts_KN, targets_N, evaluated, rows.vocab_size)

    names = [f'{order}-gram' for order in range(1, MAX_ORDER + 1)]
    losses = {}
    for split, batch, nats_OM in zip(splits, batches, nats_of_split, strict=True):
        weights_M = batch['loss_weights_BT'].ravel()
        losses[PREFIXES[split]] = _mean_losses(names, nats_OM, weights_M)
    num_tokens = len(text_RL) * config.model.context
    return Yardsticks(task='language', tokens=num_tokens, losses=losses)


def neighbour_yardsticks(rows: Rows, config: Config, mask: int) -> Yardsticks:
    """Computes the losses of predicting hidden tokens from counts, for a masked model to beat.

    A hidden token is predicted from its 0 to MAX_NEIGHBOURS nearest visible tokens in the row. With
    0 of them, the prediction is the frequency of each token. The counts are those of the training
    tokens of the first trial. `mask` is the id that most hidden tokens have in the inputs.
    """

    def text_of(batch: Batch) -> np.ndarray:
        return batch['targets_BT']  # the tokens before masking

    # The training text, and for each split the tokens that a prediction may use, the true tokens,
    # and which of these are predicted.
    text_RT = _training_text(rows, config, text_of)
    splits = rows.splits[1:]  # the first one is train
    evaluated = []
    for split in splits:
        batch = _read_evaluation(rows, config, split)
        tokens_BT = batch['tokens_BT']
        visible_BT = np.where(tokens_BT == mask, ngrams.MISSING, tokens_BT)
        is_target_BT = batch['loss_weights_BT'] > 0
        evaluated.append((visible_BT, text_of(batch), is_target_BT))

    # The losses of each split, by the number of neighbours.
    nats_of_split = ngrams.masked_losses(text_RT, evaluated, MAX_NEIGHBOURS, rows.vocab_size)
    names = ['frequencies', 'nearest visible neighbour']
    names += [f'{number} nearest visible neighbours' for number in range(2, MAX_NEIGHBOURS + 1)]
    losses = {}
    for split, nats_OM in zip(splits, nats_of_split, strict=True):
        losses[PREFIXES[split]] = _mean_losses(names, nats_OM)
    num_tokens = len(text_RT) * config.model.context
    return Yardsticks(task='masked', tokens=num_tokens, losses=losses)


def _mean_losses(
    names: list[str], nats_OM: np.ndarray, weights_M: np.ndarray | None = None
) -> dict[str, float]:
    """Returns the mean loss of each yardstick, by its name.

    `nats_OM` has a row for each of the O names, and a column for each of the M targets of a split.
    By default, all targets have equal weights.
    """
    means_O = np.average(nats_OM, axis=1, weights=weights_M)
    return dict(zip(names, means_O.tolist(), strict=True))


def _training_text(
    rows: Rows, config: Config, text_of: Callable[[Batch], np.ndarray]
) -> np.ndarray:
    """Returns the text on which the first trial is trained, as tokens [rows, length].

    Rows that training reads more than once are returned once. Only the first rows are returned if
    there are more than MAX_TOKENS tokens. `text_of` returns the text of a batch.
    """
    num_rows = min(
        config.train.num_steps * config.train.batch_size,
        rows.count('train'),
        max(MAX_TOKENS // config.model.context, 1),
    )
    # Training visits rows in an order that does not depend on the batch size. So the rows are read
    # in larger batches than those of the run, which is faster.
    seed = config.trials.seeds[0]
    batch_size = min(num_rows, ROWS_PER_READ)
    num_batches = math.ceil(num_rows / batch_size)
    texts = []
    for step in range(num_batches):
        batch = train_batch(rows, seed=seed, step=step, batch_size=batch_size)
        texts.append(text_of(batch))
    return np.concatenate(texts)[:num_rows]


def _read_evaluation(rows: Rows, config: Config, split: str) -> Batch:
    """Returns all rows of an evaluation as one batch, padded with rows whose loss weights are 0."""
    max_rows = config.data.eval_sequences
    batches = list(eval_batches(rows, split, batch_size=ROWS_PER_READ, max_rows=max_rows))
    arrays = {}
    for name in batches[0]:
        arrays[name] = np.concatenate([batch[name] for batch in batches])
    return arrays
