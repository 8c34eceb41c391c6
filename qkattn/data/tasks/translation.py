"""The task of translation: sentence pairs in rows of a fixed shape for an encoder-decoder."""

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
# How many rows are filled at a time. More rows pack a little tighter, but take longer, because each
# pair is compared with all of them.
OPEN_ROWS = 64

log = logging.getLogger(__name__)


class TranslationRows(Rows):
    """Rows of several sentence pairs each, in which the targets are predicted from the sources.

    A source x_1 .. x_m takes m + 1 tokens of the encoder: x_1 .. x_m and the separator. A target
    y_1 .. y_n takes n + 1 tokens of the decoder: its inputs are the separator and y_1 .. y_n, its
    targets y_1 .. y_n and the separator.

    Rows hold whole pairs, and every pair is in exactly one row. `source_segments_BS` and
    `segments_BT` number the pairs of a row from 1; 0 is padding, with token 0 and loss weight 0.
    Which pairs share a row depends only on the data and on the lengths S and T of a row. A pair
    that is longer than a row raises ConfigError, unless `drop_long` is set, which leaves such pairs
    out of every split.
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
        return cls(load_pairs(data), model.encoder.context, model.context, drop_long=data.drop_long)

    def __init__(
        self, pairs: PairDataset, source_length: int, length: int, *, drop_long: bool = False
    ):
        """Packs the pairs of all splits into rows of S = source_length and T = length tokens.

        Raises ConfigError if a pair is too long for a row, unless `drop_long` leaves it out.
        """
        self.pairs = pairs
        self.source_length = source_length
        self.length = length
        self.splits = pairs.splits
        self.vocab_size = pairs.vocab_size
        # How many pairs of each split are left out.
        self.num_dropped: dict[str, int] = {}
        # _packed[split][row] holds the numbers of the pairs in a row.
        self._packed: dict[str, list[np.ndarray]] = {}
        # _sources[split][pair] is the number of the pair from which a pair gets its source, after
        # `with_shuffled_sources`. It is empty before, because each pair has its own source.
        self._sources: dict[str, np.ndarray] = {}

        longest_source = 0
        longest_target = 0
        for split in self.splits:
            # The number of tokens of source and target, for each of the I pairs of a split.
            source_bounds, target_bounds = pairs.bounds(split)
            source_sizes_I = np.diff(source_bounds)
            target_sizes_I = np.diff(target_bounds)
            longest_source = max(longest_source, source_sizes_I.max(initial=0))
            longest_target = max(longest_target, target_sizes_I.max(initial=0))

            fits_I = (source_sizes_I <= source_length) & (target_sizes_I <= length)
            self.num_dropped[split] = int(np.sum(~fits_I))
            sizes_2I = np.stack([source_sizes_I, target_sizes_I])
            self._packed[split] = pack(sizes_2I, np.flatnonzero(fits_I), (source_length, length))

        num_dropped = sum(self.num_dropped.values())
        if num_dropped and not drop_long:
            raise ConfigError(
                f'{num_dropped} sentence pairs do not fit into model.source_context='
                f'{source_length} and model.context={length}; they must be at least '
                f'{longest_source} and {longest_target}, or set data.drop_long=True to leave such '
                'pairs out, of evaluation too.'
            )

    def count(self, split: str) -> int:
        """Returns the number of rows of a split; raises ConfigError if there are none."""
        self.pairs.bounds(split)  # raises ConfigError for an unknown split
        if not self._packed[split]:
            raise ConfigError(
                f'split {split!r} of {self.pairs.source.name} has no sentence pair that fits into '
                f'model.source_context={self.source_length} and model.context={self.length}.'
            )
        return len(self._packed[split])

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        """Reads rows by number. The rows have no randomness, so `draws_B2` is not used."""
        # The P pairs of the batch, row after row.
        pairs_of_row = [self._packed[split][row] for row in rows_B]
        pair_P = np.concatenate(pairs_of_row)
        num_pairs_B = [len(pairs) for pairs in pairs_of_row]

        # The source of a pair is its own, or that of another pair if the sources are shuffled.
        source_P = pair_P
        if split in self._sources:
            source_P = self._sources[split][pair_P]

        source_tokens, target_tokens = self.pairs.tokens(split)
        source_bounds, target_bounds = self.pairs.bounds(split)
        source_BS, source_segments_BS = _laid_out(
            source_tokens, source_bounds, source_P, num_pairs_B, self.source_length
        )
        targets_BT, segments_BT = _laid_out(
            target_tokens, target_bounds, pair_P, num_pairs_B, self.length
        )

        # The inputs are the targets, shifted by one. Each target ends with the separator, so the
        # separator comes before the tokens of the next pair.
        tokens_BT = np.roll(targets_BT, 1, axis=1)
        tokens_BT[:, 0] = self.pairs.separator
        is_used_BT = segments_BT > 0
        return {
            'source_BS': source_BS,
            'source_segments_BS': source_segments_BS,
            'segments_BT': segments_BT,
            **token_batch(np.where(is_used_BT, tokens_BT, 0), targets_BT, is_used_BT),
        }

    def with_shuffled_sources(self) -> Self:
        """Returns the same rows, except that each target gets the source of another pair.

        Only sources of equal length are exchanged. So a model loses the information in the words of
        the sources, but keeps the information in their lengths. If no other source has the length
        of a source, it stays where it is.
        """
        shuffled = copy.copy(self)
        shuffled._sources = {}
        for split in self.splits:
            source_bounds, _ = self.pairs.bounds(split)
            lengths_I = np.diff(source_bounds)
            draw_I = np.random.Generator(np.random.Philox(key=0)).random(len(lengths_I))
            # Sorted by length, and in a random order among equal lengths.
            order_I = np.lexsort((draw_I, lengths_I))
            # A group of equal length begins where the length changes.
            first_of_length = np.flatnonzero(np.diff(lengths_I[order_I])) + 1
            # Within a group, each target gets the source of the next pair.
            shuffled_I = np.empty_like(order_I)
            for group in np.split(order_I, first_of_length):
                shuffled_I[group] = np.roll(group, -1)
            shuffled._sources[split] = shuffled_I
        return shuffled

    def identity(self) -> dict[str, Any]:
        lengths = {'source_length': self.source_length, 'length': self.length}
        packing = {'packing': {'version': PACKING} | lengths, 'dropped_pairs': self.num_dropped}
        return self.pairs.identity() | packing

    def bytes_per_token(self, split: str) -> float:
        """Returns the mean bytes per target token of the whole split.

        Like `unigram_nats`, it includes the pairs that `drop_long` leaves out.
        """
        return self.pairs.target.bytes_per_token(split)

    def unigram_nats(self, split: str) -> float:
        return self.pairs.target.unigram_nats(split)

    def end_metrics(
        self, trained: TrainedTrials, finished_X: np.ndarray
    ) -> Mapping[str, Sequence[Any]]:
        """Scores the translations of every finished trial with BLEU and the other scores.

        All splits except 'train' are scored; see `score_split`.

        Returns:
          The scores of the X trials by field of a result: {'val_bleu': [21.5, None], ...}. Trials
          that are not finished have None.
        """
        config = trained.config
        values: dict[str, list[Any]] = {}
        for x in np.flatnonzero(finished_X).tolist():
            # Trial x translates a list of sources.
            translate = functools.partial(trained.translate, x, self.pairs.source.tokenizer)
            for split in self.splits[1:]:  # the first one is 'train'
                scores = score_split(
                    self.pairs,
                    split,
                    translate,
                    longest_source=self.source_length - 1,  # one position is the separator's
                    max_sources=config.decode.max_sources,
                    lowercase=config.data.lowercase,
                )
                for name, score in scores.items():
                    field = f'{PREFIXES[split]}_{name}'
                    values.setdefault(field, [None] * len(finished_X))
                    values[field][x] = score
        return values

    def yardsticks(self, config: Config) -> Yardsticks:
        """Measures the BLEU of IBM model 1, which translates word by word.

        The model learns a dictionary from the train split. It translates the same sentences as
        models of this configuration.
        """
        decode = self.pairs.source.tokenizer.decode

        def texts(split: str) -> tuple[list[str], list[str]]:
            """All source sentences and all target sentences of a split."""
            sources, targets = self.pairs.sentences(split)
            return [decode(source) for source in sources], [decode(target) for target in targets]

        training_sources, training_targets = texts('train')
        dictionary = ibm1.fit(list(zip(training_sources, training_targets, strict=True)))

        bleu = {}
        for split in self.splits[1:]:  # the first one is 'train'
            sources, references = texts(split)
            sources = sources[: config.decode.max_sources]
            references = references[: config.decode.max_sources]
            translations = [dictionary.translate(source) for source in sources]
            scores = translation_scores(translations, references, lowercase=config.data.lowercase)
            bleu[PREFIXES[split]] = float(scores['bleu'])  # 'val' or 'test', as in results
        return Yardsticks(task='translation', bleu=bleu)

    def context_losses(self, losses_by_position: LossesByPosition) -> dict[str, np.ndarray]:
        """Measures the loss if every target gets the source of another sentence."""
        nats_XT, weights_T = losses_by_position(self.with_shuffled_sources())
        return {'shuffled': nats_XT.sum(1) / weights_T.sum()}


def _laid_out(
    tokens: np.ndarray,
    bounds: np.ndarray,
    sentence_P: np.ndarray,
    num_sentences_B: Sequence[int],
    length: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Puts P sentences into B rows, one after the other, and fills up each row with zeros.

    Args:
      tokens: the tokens of all sentences of a split.
      bounds: sentence i has the tokens from bounds[i] to bounds[i + 1].
      sentence_P: the number i of each sentence, row after row.
      num_sentences_B: how many of the P sentences are in each row.
      length: T, the number of tokens of a row.

    Returns:
      tokens_BT, and segments_BT, which number the sentences of a row from 1. 0 is padding.
    """
    starts_P = bounds[sentence_P]
    ends_P = bounds[sentence_P + 1]
    sizes_P = ends_P - starts_P
    sentences = [tokens[start:end] for start, end in zip(starts_P, ends_P, strict=True)]

    num_rows = len(num_sentences_B)
    row_P = np.repeat(np.arange(num_rows), num_sentences_B)
    segment_P = np.concatenate([np.arange(count) + 1 for count in num_sentences_B])
    num_tokens_B = np.bincount(row_P, sizes_P, num_rows)

    # Filling the used positions in row-major order puts each sentence into its row.
    is_used_BT = np.arange(length) < num_tokens_B[:, None]
    tokens_BT = np.zeros(is_used_BT.shape, INT)
    tokens_BT[is_used_BT] = np.concatenate(sentences)
    segments_BT = np.zeros(is_used_BT.shape, INT)
    segments_BT[is_used_BT] = np.repeat(segment_P, sizes_P)
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
    """Scores translations of the first `max_sources` sentences of a split, or of all.

    Args:
      pairs: the sentences and their references.
      split: 'train', 'validation' or 'test'.
      translate: translates sources, given as token ids without separators.
      longest_source: the most tokens of a source that `translate` takes. Longer sources are
        truncated and scored as well; the log says how many there are.
      max_sources: None for all.
      lowercase: whether scores ignore case.

    Returns the scores of `translation_scores`.
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
    """Packs sentence pairs into rows by best fit, in a shuffled order.

    A row has two sides: one for source tokens, one for target tokens. OPEN_ROWS rows are open at a
    time. A pair goes into the open row in which it leaves the least free space, summed over both
    sides. If it fits into no open row, one row is closed, and an empty row takes its place: the row
    that has the least free space on one of its sides.

    Args:
      sizes_2I: the number of tokens of the source and of the target of each pair.
      kept: the numbers of the pairs to pack. Each of them fits into an empty row.
      capacity_2: the tokens that a row has for sources and for targets.

    Returns:
      The numbers of the pairs in each row.
    """
    draws = np.random.Generator(np.random.Philox(key=0)).random(len(kept))
    order = kept[np.argsort(draws)]

    # The O open rows: the number of each, and its free space on both sides.
    num_rows = OPEN_ROWS
    row_O = np.arange(num_rows)
    free_2O = np.tile(np.array(capacity_2)[:, None], num_rows)
    # The pairs in each row, in the order in which they were packed.
    pairs_of_row: dict[int, list[int]] = {}
    for pair in order.tolist():
        size_2 = sizes_2I[:, pair]
        # The space that the pair would leave in each open row.
        left_2O = free_2O - size_2[:, None]
        fits_O = (left_2O >= 0).all(0)
        if fits_O.any():
            slot = np.where(fits_O, left_2O.sum(0), np.inf).argmin()
        else:
            slot = free_2O.min(0).argmin()
            free_2O[:, slot] = capacity_2
            row_O[slot] = num_rows
            num_rows += 1
        free_2O[:, slot] -= size_2
        pairs_of_row.setdefault(int(row_O[slot]), []).append(pair)

    return [np.array(pairs_of_row[row]) for row in sorted(pairs_of_row)]
