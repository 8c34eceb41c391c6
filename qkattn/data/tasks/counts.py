"""Baselines that count the training text: n-grams for language models, neighbours for masked ones.

Code and files call the baselines of a task its yardsticks.
"""

import math
from collections.abc import Callable

import numpy as np

from qkattn.config import Config
from qkattn.data.pipeline import eval_batches, train_batch
from qkattn.data.tasks.rows import Batch, Rows, Yardsticks
from qkattn.metrics import PREFIXES
from qkattn.stats import ngrams

# The largest n of the n-grams.
MAX_ORDER = 6
# The most neighbours that predict a masked token.
MAX_NEIGHBOURS = 5
# The most training tokens to count. More would take much memory and hardly lower the loss.
MAX_TOKENS = 2**23
ROWS_PER_READ = 1024


def ngram_yardsticks(rows: Rows, config: Config) -> Yardsticks:
    """Computes the losses of 1-grams to MAX_ORDER-grams on the targets of a language model.

    The n-grams are fitted to the training tokens of the first trial.
    """

    def text_of(batch: Batch) -> np.ndarray:
        """Returns rows of T + 1 tokens: 'a b c d' for inputs 'a b c' and targets 'b c d'."""
        first_token_B1 = batch['tokens_BT'][:, :1]
        return np.concatenate([first_token_B1, batch['targets_BT']], axis=1)

    # N targets to count, each with the K tokens before it.
    K = MAX_ORDER - 1
    training_text = _training_text(rows, config, text_of)
    contexts_KN, targets_N = ngrams.preceding(training_text, K)

    # For each evaluation split, M targets to predict, each with the K tokens before it.
    evaluation_splits = rows.splits[1:]  # the first split is train
    batches = [_read_evaluation(rows, config, split) for split in evaluation_splits]
    evaluated = [ngrams.preceding(text_of(batch), K) for batch in batches]

    # The loss of each of O = MAX_ORDER orders on each target, in nats.
    nats_of_splits = ngrams.losses(contexts_KN, targets_N, evaluated, rows.vocab_size)
    names = [f'{order}-gram' for order in range(1, MAX_ORDER + 1)]
    losses = {}
    for split, batch, nats_OM in zip(evaluation_splits, batches, nats_of_splits, strict=True):
        weights_M = batch['loss_weights_BT'].ravel()  # 0 in padding
        prefix = PREFIXES[split]  # 'val' or 'test'
        losses[prefix] = _mean_losses(names, nats_OM, weights_M)
    num_tokens = len(training_text) * config.model.context
    return Yardsticks(task='language', tokens=num_tokens, losses=losses)


def neighbour_yardsticks(rows: Rows, config: Config, mask: int) -> Yardsticks:
    """Computes the losses of predicting masked tokens from counts of visible neighbours.

    The baselines use 0 to MAX_NEIGHBOURS nearest visible tokens. They are fitted to the training
    tokens of the first trial.

    Args:
        rows: The rows of a masked model.
        config: The configuration of the run.
        mask: The id of the mask token.
    """

    def text_of(batch: Batch) -> np.ndarray:
        return batch['targets_BT']  # the tokens before masking

    training_text = _training_text(rows, config, text_of)

    # For each evaluation split, the tokens that are not masked, all tokens, and the targets.
    evaluation_splits = rows.splits[1:]  # the first split is train
    evaluated = []
    for split in evaluation_splits:
        batch = _read_evaluation(rows, config, split)
        tokens_BT = batch['tokens_BT']
        visible_BT = np.where(tokens_BT == mask, ngrams.MISSING, tokens_BT)
        is_target_BT = batch['loss_weights_BT'] > 0
        evaluated.append((visible_BT, text_of(batch), is_target_BT))

    # The loss of each of O baselines on each of the M targets of a split, in nats.
    nats_of_splits = ngrams.masked_losses(training_text, evaluated, MAX_NEIGHBOURS, rows.vocab_size)
    names = ['frequencies', 'nearest visible neighbour']  # 0 and 1 neighbours
    for num_neighbours in range(2, MAX_NEIGHBOURS + 1):
        names.append(f'{num_neighbours} nearest visible neighbours')
    losses = {}
    for split, nats_OM in zip(evaluation_splits, nats_of_splits, strict=True):
        prefix = PREFIXES[split]  # 'val' or 'test'
        losses[prefix] = _mean_losses(names, nats_OM)
    num_tokens = len(training_text) * config.model.context
    return Yardsticks(task='masked', tokens=num_tokens, losses=losses)


def _mean_losses(
    names: list[str], nats_OM: np.ndarray, weights_M: np.ndarray | None = None
) -> dict[str, float]:
    """Returns the mean loss of each of O baselines over M targets, by name."""
    means_O = np.average(nats_OM, axis=1, weights=weights_M)
    return dict(zip(names, means_O.tolist(), strict=True))


def _training_text(
    rows: Rows, config: Config, text_of: Callable[[Batch], np.ndarray]
) -> np.ndarray:
    """Returns the rows that the first trial is trained on, at most MAX_TOKENS tokens.

    Args:
        rows: The task.
        config: The configuration of the run.
        text_of: Returns the tokens of a batch, [rows, length].

    Returns:
        Tokens [rows, length]; each row once.
    """
    num_rows_trained = config.train.num_steps * config.train.batch_size
    max_rows = max(MAX_TOKENS // config.model.context, 1)
    num_rows = min(num_rows_trained, rows.count('train'), max_rows)
    # Large batches are read faster, and hold the training rows in the same order.
    batch_size = min(num_rows, ROWS_PER_READ)
    num_batches = math.ceil(num_rows / batch_size)
    seed = config.trials.seeds[0]
    texts = []
    for step in range(num_batches):
        batch = train_batch(rows, seed=seed, step=step, batch_size=batch_size)
        texts.append(text_of(batch))
    return np.concatenate(texts)[:num_rows]


def _read_evaluation(rows: Rows, config: Config, split: str) -> Batch:
    """Returns all evaluated rows of a split as one batch, padded with rows of loss weight 0."""
    max_rows = config.data.eval_sequences
    batches = list(eval_batches(rows, split, batch_size=ROWS_PER_READ, max_rows=max_rows))
    arrays = {}
    for name in batches[0]:
        arrays[name] = np.concatenate([batch[name] for batch in batches])
    return arrays
