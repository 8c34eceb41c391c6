"""The translation task: sentence pairs, packed into rows, for an encoder-decoder."""

import copy
import functools
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Self

import numpy as np

from qkattn.config import Config, ModelConfig
from qkattn.data.corpora.corpus_registry import refuse_unused
from qkattn.data.load import load_pairs
from qkattn.data.tasks.rows import (
    INT,
    ArrayShapes,
    Batch,
    DataForm,
    LossesByPosition,
    Rows,
    TrainedTrials,
    Yardsticks,
    token_batch,
)
from qkattn.data.tokens import PairDataset
from qkattn.errors import ConfigError
from qkattn.metrics import PREFIXES
from qkattn.metrics.translation import translation_scores
from qkattn.stats import ibm1

# Changes whenever the same pairs would be packed differently.
PACKING = 1
# The number of rows that are filled at a time. More rows pack tighter, but take longer.
OPEN_ROWS = 64

log = logging.getLogger(__name__)


class TranslationRows(Rows):
    """Rows of packed sentence pairs, in which targets are predicted from sources.

    With '|' for the separator, the pair of source 'x y' and target 'a b' has the encoder input
    'x y |', the decoder input '| a b' and the targets 'a b |'.

    Every pair is in one row. Segments number the pairs of a row from 1, and segment 0 is padding.
    The packing depends only on the data and the lengths of a row.
    """

    kind: ClassVar[str] = 'encoder_decoder'
    data: ClassVar[DataForm] = 'a translation set'

    @staticmethod
    def array_shapes(model: ModelConfig) -> ArrayShapes:
        S = model.encoder.context
        T = model.context
        source = {'source_BS': (S, INT), 'source_segments_BS': (S, INT)}
        return Rows.array_shapes(model) | source | {'segments_BT': (T, INT)}

    @classmethod
    def open(cls, config: Config) -> Self:
        model = config.model
        data = config.data
        not_taken = ('mask_rate', 'shift_windows', 'cross_documents')
        refuse_unused(data, not_taken, 'an encoder-decoder')
        return cls(
            load_pairs(data),
            source_length=model.encoder.context,
            length=model.context,
            drop_long=data.drop_long,
        )

    def __init__(
        self, pairs: PairDataset, source_length: int, length: int, *, drop_long: bool = False
    ):
        """Packs the sentence pairs of all splits into rows.

        Args:
            pairs: The tokens of the source and target sentences.
            source_length: Number of source tokens in a row.
            length: Number of target tokens in a row.
            drop_long: Whether to leave out pairs that are too long for a row.

        Raises:
            ConfigError: A pair is too long for a row, and `drop_long` is False.
        """
        self.pairs = pairs
        self.source_length = source_length
        self.length = length
        self.splits = pairs.splits
        self.vocab_size = pairs.vocab_size
        # By split, the number of pairs that are too long for a row.
        self.num_dropped: dict[str, int] = {}
        # By split, the indices of the pairs in each row: [[4, 0], [2]] are two rows.
        self._pairs_of_row: dict[str, list[np.ndarray]] = {}
        # By split, the index of each pair's source if sources are shuffled: in [1, 0, 2], pairs 0
        # and 1 have swapped sources.
        self._shuffled_sources: dict[str, np.ndarray] = {}

        for split in self.splits:
            sizes_2I = self._sizes(split)
            source_sizes_I, target_sizes_I = sizes_2I
            fits_I = (source_sizes_I <= source_length) & (target_sizes_I <= length)
            kept = np.flatnonzero(fits_I)
            self.num_dropped[split] = len(fits_I) - len(kept)
            self._pairs_of_row[split] = pack(sizes_2I, kept, capacity_2=(source_length, length))
        if not drop_long:
            self._refuse_dropped()

    def _sizes(self, split: str) -> np.ndarray:
        """Returns the numbers of source and target tokens of I pairs, [2, I]."""
        source_bounds, target_bounds = self.pairs.bounds(split)
        return np.stack([np.diff(source_bounds), np.diff(target_bounds)])

    def _refuse_dropped(self) -> None:
        """Raises ConfigError if a pair is too long for a row."""
        num_dropped = sum(self.num_dropped.values())
        if not num_dropped:
            return
        sizes_2I = np.concatenate([self._sizes(split) for split in self.splits], axis=1)
        longest_source, longest_target = sizes_2I.max(axis=1)
        raise ConfigError(
            f'{num_dropped} sentence pairs do not fit into model.source_context='
            f'{self.source_length} and model.context={self.length}; they must be at least '
            f'{longest_source} and {longest_target}, or set data.drop_long=True to leave such '
            'pairs out of training and of losses.'
        )

    def count(self, split: str) -> int:
        """Returns the number of rows of a split; raises ConfigError if there are none."""
        self.pairs.bounds(split)  # raises ConfigError for an unknown split
        if not self._pairs_of_row[split]:
            raise ConfigError(
                f'split {split!r} of {self.pairs.source.name} has no sentence pair that fits into '
                f'model.source_context={self.source_length} and model.context={self.length}.'
            )
        return len(self._pairs_of_row[split])

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        """Reads rows by index; `draws_B2` is not used, because rows are not random."""
        # The indices of the sentences in each row. The sentences of a pair have the same index,
        # unless sources are shuffled.
        targets_of_row = [self._pairs_of_row[split][row] for row in rows_B]
        sources_of_row = targets_of_row
        if split in self._shuffled_sources:
            source_of_target = self._shuffled_sources[split]
            sources_of_row = [source_of_target[targets] for targets in targets_of_row]

        # Concatenate the sentences of each row. Segments number them from 1, and 0 is padding.
        source_tokens, target_tokens = self.pairs.tokens(split)
        source_bounds, target_bounds = self.pairs.bounds(split)
        source_BS, source_segments_BS = _lay_out(
            source_tokens, source_bounds, sources_of_row, self.source_length
        )
        targets_BT, segments_BT = _lay_out(
            target_tokens, target_bounds, targets_of_row, self.length
        )

        # Shift right: with '|' for the separator, targets 'a b | c |' have inputs '| a b | c'.
        tokens_BT = np.roll(targets_BT, 1, axis=1)
        tokens_BT[:, 0] = self.pairs.separator
        is_target_BT = segments_BT > 0
        tokens_BT = np.where(is_target_BT, tokens_BT, 0)
        return {
            'source_BS': source_BS,
            'source_segments_BS': source_segments_BS,
            'segments_BT': segments_BT,
            **token_batch(tokens_BT, targets_BT, loss_weights_BT=is_target_BT),
        }

    def with_shuffled_sources(self) -> Self:
        """Returns the same rows with sources shuffled among pairs of equal source length.

        A source whose length is unique stays in its pair.
        """
        rows = copy.copy(self)
        rows._shuffled_sources = {}
        for split in self.splits:
            source_sizes_I, _ = self._sizes(split)
            rows._shuffled_sources[split] = _exchange_at_random(source_sizes_I)
        return rows

    def identity(self) -> dict[str, Any]:
        packing = {
            'version': PACKING,
            'source_length': self.source_length,
            'length': self.length,
        }
        return self.pairs.identity() | {'packing': packing, 'dropped_pairs': self.num_dropped}

    def bytes_per_token(self, split: str) -> float:
        """Returns the mean bytes per target token of a split, including dropped pairs."""
        return self.pairs.target.bytes_per_token(split)

    def unigram_nats(self, split: str) -> float:
        return self.pairs.target.unigram_nats(split)

    def end_metrics(
        self, trained: TrainedTrials, finished_X: np.ndarray
    ) -> Mapping[str, Sequence[Any]]:
        """Scores the translations of finished trials on the evaluation splits.

        Returns:
            The scores of all X trials by field of a result: {'val_bleu': [21.5, None], ...}. The
            score of an unfinished trial is None.
        """
        config = trained.config
        values: dict[str, list[Any]] = {}
        for x in np.flatnonzero(finished_X).tolist():
            translate = functools.partial(trained.translate, x, self.pairs.source.tokenizer)
            for split in self.splits[1:]:  # the first split is train
                scores = score_split(
                    self.pairs,
                    split,
                    translate,
                    longest_source=self.source_length - 1,  # without the separator
                    max_sources=config.decode.max_sources,
                    lowercase=config.data.lowercase,
                )
                for name, score in scores.items():
                    field = f'{PREFIXES[split]}_{name}'  # such as 'val_bleu'
                    values.setdefault(field, [None] * len(finished_X))
                    values[field][x] = score
        return values

    def yardsticks(self, config: Config) -> Yardsticks:
        """Measures the BLEU of IBM model 1, a word-by-word translation, fitted to train."""
        decode = self.pairs.source.tokenizer.decode

        def texts(split: str) -> tuple[list[str], list[str]]:
            """Returns all source sentences and all target sentences of a split."""
            sources, targets = self.pairs.sentences(split)
            source_texts = [decode(source) for source in sources]
            target_texts = [decode(target) for target in targets]
            return source_texts, target_texts

        training_sources, training_targets = texts('train')
        training_pairs = list(zip(training_sources, training_targets, strict=True))
        dictionary = ibm1.fit(training_pairs)

        bleu = {}
        max_sources = config.decode.max_sources  # None is all
        for split in self.splits[1:]:  # the first split is train
            sources, references = texts(split)
            translations = [dictionary.translate(source) for source in sources[:max_sources]]
            scores = translation_scores(
                translations, references[:max_sources], lowercase=config.data.lowercase
            )
            prefix = PREFIXES[split]  # 'val' or 'test'
            bleu[prefix] = float(scores['bleu'])
        return Yardsticks(task='translation', bleu=bleu)

    def context_losses(self, losses_by_position: LossesByPosition) -> dict[str, np.ndarray]:
        """Measures the loss of each trial with shuffled sources, [X], in nats/token."""
        # Losses of all trials and loss weights at each position, summed over rows.
        nats_XT, weights_T = losses_by_position(self.with_shuffled_sources())
        return {'shuffled': nats_XT.sum(axis=1) / weights_T.sum()}


def _exchange_at_random(sizes_I: np.ndarray) -> np.ndarray:
    """Returns a random permutation that moves every sentence to another one of equal size.

    For example, the sizes [3, 5, 3, 3] may give [2, 1, 3, 0]. A unique size, here of sentence 1,
    does not move.
    """
    u_I = np.random.Generator(np.random.Philox(key=0)).random(len(sizes_I))
    # Sort by size, in random order within a size. In the example: [0, 2, 3, 1].
    order_I = np.lexsort((u_I, sizes_I))
    # Group equal sizes: [0, 2, 3] and [1].
    size_changes = np.diff(sizes_I[order_I])
    first_of_group = np.flatnonzero(size_changes) + 1
    groups = np.split(order_I, first_of_group)
    # Replace each sentence by the next of its group, and the last by the first.
    permutation_I = np.empty_like(order_I)
    for group in groups:
        permutation_I[group] = np.roll(group, -1)
    return permutation_I


def _lay_out(
    tokens: np.ndarray, bounds: np.ndarray, sentences_of_row: Sequence[np.ndarray], length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Concatenates the sentences of each row, and pads with zeros.

    Args:
        tokens: The tokens of all sentences of a split.
        bounds: Sentence i is tokens[bounds[i]:bounds[i + 1]].
        sentences_of_row: The indices of the sentences in each row.
        length: Number of tokens in a row, T.

    Returns:
        tokens_BT.
        segments_BT: Numbers the sentences of a row from 1; 0 is padding.
    """
    tokens_BT = np.zeros((len(sentences_of_row), length), INT)
    segments_BT = np.zeros((len(sentences_of_row), length), INT)
    for b, sentences in enumerate(sentences_of_row):
        begin = 0
        for segment, i in enumerate(sentences.tolist(), start=1):
            sentence_tokens = tokens[bounds[i] : bounds[i + 1]]
            end = begin + len(sentence_tokens)
            tokens_BT[b, begin:end] = sentence_tokens
            segments_BT[b, begin:end] = segment
            begin = end
    return tokens_BT, segments_BT


def score_split(
    pairs: PairDataset,
    split: str,
    translate: Callable[[Sequence[np.ndarray]], list[str]],
    *,
    longest_source: int,
    max_sources: int | None,
    lowercase: bool,
) -> dict[str, float | int | str]:
    """Scores translations of a split with `translation_scores`.

    Args:
        pairs: The sources and reference translations.
        split: 'train', 'validation' or 'test'.
        translate: Translates sources, token ids without separators.
        longest_source: Longer sources are truncated to this number of tokens, with a warning.
        max_sources: Number of sources to translate; None for all.
        lowercase: Whether scores ignore case.
    """
    sources, targets = pairs.sentences(split)
    sources = sources[:max_sources]
    targets = targets[:max_sources]
    num_truncated = sum(len(source) > longest_source for source in sources)
    if num_truncated:
        log.warning(
            '%d of %d sources of split %r truncated to %d tokens',
            num_truncated,
            len(sources),
            split,
            longest_source,
        )
    hypotheses = translate([source[:longest_source] for source in sources])
    references = [pairs.source.tokenizer.decode(target) for target in targets]
    return translation_scores(hypotheses, references, lowercase=lowercase)


def pack(sizes_2I: np.ndarray, kept: np.ndarray, capacity_2: tuple[int, int]) -> list[np.ndarray]:
    """Packs sentence pairs into rows by best fit, in a random order.

    O = OPEN_ROWS rows are filled at a time. Axes of length 2 are (source, target).

    Args:
        sizes_2I: The numbers of source and target tokens of all I pairs.
        kept: The indices of the pairs to pack. Each pair fits into an empty row.
        capacity_2: The numbers of source and target tokens in a row.

    Returns:
        The indices of the pairs in each row.
    """
    sort_keys = np.random.Generator(np.random.Philox(key=0)).random(len(kept))
    random_order = kept[np.argsort(sort_keys)]

    # The index and the free tokens of each open row.
    row_O = np.arange(OPEN_ROWS)
    free_2O = np.tile(np.array(capacity_2)[:, None], OPEN_ROWS)
    next_row = OPEN_ROWS
    pairs_of_row: dict[int, list[int]] = {}
    for pair in random_order.tolist():
        size_2 = sizes_2I[:, pair]
        free_after_2O = free_2O - size_2[:, None]
        fits_O = (free_after_2O >= 0).all(axis=0)
        if fits_O.any():
            # Best fit: the fewest free tokens afterwards, source plus target.
            total_free_after_O = free_after_2O.sum(axis=0)
            fitting_O = np.flatnonzero(fits_O)
            index_of_best = total_free_after_O[fitting_O].argmin()
            o = fitting_O[index_of_best]
        else:
            # Close the row with the fewest free tokens on one side, and open an empty row.
            least_free_O = free_2O.min(axis=0)
            o = least_free_O.argmin()
            free_2O[:, o] = capacity_2
            row_O[o] = next_row
            next_row += 1
        free_2O[:, o] -= size_2
        row = int(row_O[o])
        pairs_of_row.setdefault(row, []).append(pair)

    return [np.array(pairs_of_row[row]) for row in sorted(pairs_of_row)]
