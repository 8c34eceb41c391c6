"""Yardsticks from counts of the training text: models that any trained model has to beat.

Language models are compared with n-grams, masked models with counts of visible neighbours.
"""

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
        first_tokens_B1 = batch['tokens_BT'][:, :1]
        return np.concatenate([first_tokens_B1, batch['targets_BT']], axis=1)

    text_RL = _training_text(rows, config, text_of)
    contexts_KN, targets_N = ngrams.preceding(text_RL, MAX_ORDER - 1)

    splits = rows.splits[1:]
    batches = [_evaluated(rows, config, split) for split in splits]
    evaluated = [ngrams.preceding(text_of(batch), MAX_ORDER - 1) for batch in batches]
    nats = ngrams.losses(contexts_KN, targets_N, evaluated, rows.vocab_size)

    # The O orders of n-grams, each with the loss of M targets.
    names = [f'{order}-gram' for order in range(1, MAX_ORDER + 1)]
    losses = {}
    for split, batch, nats_OM in zip(splits, batches, nats, strict=True):
        weights_M = batch['loss_weights_BT'].ravel()
        means_O = np.average(nats_OM, axis=1, weights=weights_M)
        losses[PREFIXES[split]] = dict(zip(names, means_O.tolist(), strict=True))
    num_tokens = len(text_RL) * config.model.context
    return Yardsticks(task='language', tokens=num_tokens, losses=losses)


def neighbour_yardsticks(rows: Rows, config: Config, mask: int) -> Yardsticks:
    """Computes the losses of predictions from frequencies, and from 1 to MAX_NEIGHBOURS neighbours.

    The targets are those of a masked model: hidden tokens, most of which are replaced by the id
    `mask`. They are predicted from counts of the training tokens of the first trial, given the
    nearest tokens of the row that are visible.
    """

    def text_of(batch: Batch) -> np.ndarray:
        return batch['targets_BT']  # before masking

    text_RT = _training_text(rows, config, text_of)
    splits = rows.splits[1:]
    evaluated = []
    for split in splits:
        batch = _evaluated(rows, config, split)
        tokens_BT = batch['tokens_BT']
        shown_BT = np.where(tokens_BT == mask, ngrams.MISSING, tokens_BT)
        evaluated.append((shown_BT, text_of(batch), batch['loss_weights_BT'] > 0))
    nats = ngrams.masked_losses(text_RT, evaluated, MAX_NEIGHBOURS, rows.vocab_size)

    names = ['frequencies', 'nearest visible neighbour']
    names += [f'{number} nearest visible neighbours' for number in range(2, MAX_NEIGHBOURS + 1)]
    losses = {}
    for split, nats_OM in zip(splits, nats, strict=True):
        means_O = np.average(nats_OM, axis=1)
        losses[PREFIXES[split]] = dict(zip(names, means_O.tolist(), strict=True))
    num_tokens = len(text_RT) * config.model.context
    return Yardsticks(task='masked', tokens=num_tokens, losses=losses)


def _training_text(
    rows: Rows, config: Config, text_of: Callable[[Batch], np.ndarray]
) -> np.ndarray:
    """Returns the rows on which the first trial is trained, each once, as tokens [rows, length].

    It returns about MAX_TOKENS tokens at most. `text_of` returns the text of a batch.
    """
    num_rows = min(
        config.train.num_steps * config.train.batch_size,
        rows.count('train'),
        max(MAX_TOKENS // config.model.context, 1),
    )
    seed = config.trials.seeds[0]
    size = min(num_rows, ROWS_PER_READ)
    # The sequence of training rows does not depend on the size of the batches.
    texts = []
    for step in range(-(-num_rows // size)):
        texts.append(text_of(train_batch(rows, seed=seed, step=step, batch_size=size)))
    return np.concatenate(texts)[:num_rows]


def _evaluated(rows: Rows, config: Config, split: str) -> Batch:
    """Returns the rows that an evaluation reads as one batch, padded by rows of loss weight 0."""
    max_rows = config.data.eval_sequences
    batches = list(eval_batches(rows, split, batch_size=ROWS_PER_READ, max_rows=max_rows))
    arrays = {}
    for name in batches[0]:
        arrays[name] = np.concatenate([batch[name] for batch in batches])
    return arrays
