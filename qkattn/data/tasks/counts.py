"""Counts of the text that models are trained on, as yardsticks: n-grams and visible neighbours."""

from collections.abc import Callable

import numpy as np

from qkattn.config import Config
from qkattn.data.pipeline import eval_batches, train_batch
from qkattn.data.tasks.rows import Batch, Rows, Yardsticks
from qkattn.metrics import PREFIXES
from qkattn.stats import ngrams

MAX_ORDER = 6  # of the n-grams
MAX_NEIGHBOURS = 5  # of a masked token
# Counts of more tokens take more memory than they lower the loss; the file says how many were.
MAX_TOKENS = 2**23
ROWS_PER_READ = 1024


def ngram_yardsticks(rows: Rows, config: Config) -> Yardsticks:
    """The losses of 1-grams to MAX_ORDER-grams, whose targets are those of a language model.

    They count the training tokens of the first trial. The first token of a row is only context, as
    it is for the model.
    """

    def text_of(batch: Batch) -> np.ndarray:
        return np.concatenate([batch['tokens_BT'][:, :1], batch['targets_BT']], axis=1)

    text_RL = _training_text(rows, config, text_of)
    contexts_KN, targets_N = ngrams.preceding(text_RL, MAX_ORDER - 1)
    splits = rows.splits[1:]
    batches = [_evaluated(rows, config, split) for split in splits]
    evaluated = [ngrams.preceding(text_of(batch), MAX_ORDER - 1) for batch in batches]
    nats = ngrams.losses(contexts_KN, targets_N, evaluated, rows.vocab_size)
    names = [f'{order}-gram' for order in range(1, MAX_ORDER + 1)]
    losses = {}
    for split, batch, nats_OM in zip(splits, batches, nats, strict=True):
        weights_M = batch['loss_weights_BT'].ravel()
        means_O = np.average(nats_OM, axis=1, weights=weights_M)
        losses[PREFIXES[split]] = dict(zip(names, means_O.tolist(), strict=True))
    num_tokens = len(text_RL) * config.model.context
    return Yardsticks(task='language', tokens=num_tokens, losses=losses)


def neighbour_yardsticks(rows: Rows, config: Config, mask: int) -> Yardsticks:
    """The losses of frequencies and of the 1 to MAX_NEIGHBOURS nearest visible neighbours.

    They count the training tokens of the first trial and predict the hidden tokens of a masked
    model, which sees the id `mask` in the place of most of them.
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
    """The rows that the first trial is trained on, each once and MAX_TOKENS at most, as text."""
    num_rows = min(
        config.train.num_steps * config.train.batch_size,
        rows.count('train'),
        max(MAX_TOKENS // config.model.context, 1),
    )
    seed = config.trials.seeds[0]
    size = min(num_rows, ROWS_PER_READ)
    # Read in batches of another size, the endless sequence of training rows is the same.
    texts = []
    for step in range(-(-num_rows // size)):
        texts.append(text_of(train_batch(rows, seed=seed, step=step, batch_size=size)))
    return np.concatenate(texts)[:num_rows]


def _evaluated(rows: Rows, config: Config, split: str) -> Batch:
    """The rows that an evaluation reads, as one batch; rows that pad it have loss weight 0."""
    batches = list(
        eval_batches(rows, split, batch_size=ROWS_PER_READ, max_rows=config.data.eval_sequences)
    )
    return {name: np.concatenate([batch[name] for batch in batches]) for name in batches[0]}
