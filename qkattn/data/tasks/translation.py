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
        """Packs the sentence pairs of all splits into rows, several pairs to a row.

        Raises ConfigError if a pair is too long for a row, unless `drop_long` leaves it out.

        Args:
          pairs: the tokens of the source and target sentences, by split.
          source_length: the number of source tokens of a row.
          length: the number of target tokens of a row.
          drop_long: whether pairs that are too long for a row are left out.
        """
        self.pairs = pairs
        self.source_length = source_length
        self.length = length
        self.splits = pairs.splits
        self.vocab_size = pairs.vocab_size
        # By split: how many of its pairs are too long for a row.
        self.num_dropped: dict[str, int] = {}
        # By split: for each row, the numbers of the pairs in it. [[4, 0], [2]] are two rows.
        self._packed: dict[str, list[np.ndarray]] = {}
        # By split: for each pair, the number of the pair from which it takes its source sentence.
        # With [1, 0, 2], the pairs 0 and 1 exchange their sources. `with_shuffled_sources` sets it;
        # without it, all pairs have their own sources.
        self._sources: dict[str, np.ndarray] = {}

        for split in self.splits:
            # The numbers of tokens of the sources, sizes_2I[0], and of the targets, sizes_2I[1].
            sizes_2I = self._sizes(split)
            source_sizes_I, target_sizes_I = sizes_2I
            fits_I = (source_sizes_I <= source_length) & (target_sizes_I <= length)
            kept = np.flatnonzero(fits_I)
            self.num_dropped[split] = len(fits_I) - len(kept)
            self._packed[split] = pack(sizes_2I, kept, capacity_2=(source_length, length))
        if not drop_long:
            self._refuse_dropped()

    def _sizes(self, split: str) -> np.ndarray:
        """Returns how many tokens the source and the target of each pair have, [2, pairs]."""
        source_bounds, target_bounds = self.pairs.bounds(split)
        return np.stack([np.diff(source_bounds), np.diff(target_bounds)])

    def _refuse_dropped(self) -> None:
        """Raises ConfigError, which names the longest pairs, if a pair is too long for a row."""
        num_dropped = sum(self.num_dropped.values())
        if not num_dropped:
            return
        sizes_2I = np.concatenate([self._sizes(split) for split in self.splits], axis=1)
        longest_source, longest_target = sizes_2I.max(axis=1)
        raise ConfigError(
            f'{num_dropped} sentence pairs do not fit into model.source_context='
            f'{self.source_length} and model.context={self.length}; they must be at least '
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
        pairs_of_row = [self._packed[split][row] for row in rows_B]
        sources_of_row = pairs_of_row
        if split in self._sources:  # the sources are shuffled
            sources_of_row = [self._sources[split][pairs] for pairs in pairs_of_row]

        source_tokens, target_tokens = self.pairs.tokens(split)
        source_bounds, target_bounds = self.pairs.bounds(split)
        source_BS, source_segments_BS = _lay_out(
            source_tokens, source_bounds, sources_of_row, self.source_length
        )
        targets_BT, segments_BT = _lay_out(target_tokens, target_bounds, pairs_of_row, self.length)

        # The inputs are the targets one position later, with a separator at the beginning. With '|'
        # for the separator, the targets 'a b | c |' have the inputs '| a b | c'.
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

        The other source has the same length. So a model loses the information in the words of the
        sources, but keeps the information in their lengths. A source stays where it is if no other
        source has its length.
        """
        shuffled = copy.copy(self)
        shuffled._sources = {}
        for split in self.splits:
            source_sizes_I, _ = self._sizes(split)
            shuffled._sources[split] = _exchange_at_random(source_sizes_I)
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
            # The function by which trial x translates a list of sources.
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


def _exchange_at_random(sizes_I: np.ndarray) -> np.ndarray:
    """Gives every sentence the number of another sentence of equal size, at random.

    For the sizes [3, 5, 3, 3], it may return [2, 1, 3, 0]. Sentence 1 keeps its number, because it
    is the only one of its size.
    """
    # Sort the sentences by size, and at random among equal sizes: [0, 2, 3, 1] in the example.
    draw_I = np.random.Generator(np.random.Philox(key=0)).random(len(sizes_I))
    order_I = np.lexsort((draw_I, sizes_I))
    # Cut them where the size changes: [0, 2, 3] and [1].
    first_of_size = np.flatnonzero(np.diff(sizes_I[order_I])) + 1
    groups = np.split(order_I, first_of_size)
    # In a group, each sentence gets the next one, and the last one gets the first.
    exchanged_I = np.empty_like(order_I)
    for group in groups:
        exchanged_I[group] = np.roll(group, -1)
    return exchanged_I


def _lay_out(
    tokens: np.ndarray, bounds: np.ndarray, sentences_of_row: Sequence[np.ndarray], length: int
) -> tuple[np.ndarray, np.ndarray]:
    """Writes the sentences of each row one after the other, and zeros after the last one.

    Args:
      tokens: the tokens of all sentences of a split.
      bounds: sentence i has the tokens from bounds[i] to bounds[i + 1].
      sentences_of_row: the numbers i of the sentences in each of the B rows.
      length: T, the number of tokens of a row.

    Returns:
      tokens_BT, and segments_BT, which number the sentences of a row from 1. 0 is padding.
    """
    tokens_BT = np.zeros((len(sentences_of_row), length), INT)
    segments_BT = np.zeros((len(sentences_of_row), length), INT)
    for row, sentences in enumerate(sentences_of_row):
        start = 0
        for segment, sentence in enumerate(sentences.tolist(), start=1):
            sentence_tokens = tokens[bounds[sentence] : bounds[sentence + 1]]
            end = start + len(sentence_tokens)
            tokens_BT[row, start:end] = sentence_tokens
            segments_BT[row, start:end] = segment
            start = end
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

    A row has two sides, one for source tokens and one for target tokens. OPEN_ROWS rows are open
    at a time. A pair goes into the open row in which it leaves the least free space, summed over
    both sides. If it fits into none, the open row with the least free space on one of its sides is
    closed. An empty row takes its place, and gets the pair.

    Args:
      sizes_2I: the number of tokens of the source and of the target of each pair.
      kept: the numbers of the pairs to pack. Each of them fits into an empty row.
      capacity_2: the tokens that a row has for sources and for targets.

    Returns:
      The numbers of the pairs in each row.
    """
    draws = np.random.Generator(np.random.Philox(key=0)).random(len(kept))
    order = kept[np.argsort(draws)]

    # There is a slot for each of the O open rows. The arrays hold the number of the row in each
    # slot, and its free space on both sides.
    row_O = np.arange(OPEN_ROWS)
    free_2O = np.tile(np.array(capacity_2)[:, None], OPEN_ROWS)
    num_rows = OPEN_ROWS  # how many rows have been opened so far
    # The pairs in each row, in the order in which they were packed.
    pairs_of_row: dict[int, list[int]] = {}
    for pair in order.tolist():
        size_2 = sizes_2I[:, pair]
        # The space that the pair would leave in each open row; negative if it does not fit.
        left_2O = free_2O - size_2[:, None]
        fits_O = (left_2O >= 0).all(axis=0)
        if fits_O.any():
            total_left_O = left_2O.sum(axis=0)
            slot = np.where(fits_O, total_left_O, np.inf).argmin()
        else:
            # Close the fullest row, and open an empty one in its slot.
            least_free_O = free_2O.min(axis=0)
            slot = least_free_O.argmin()
            free_2O[:, slot] = capacity_2
            row_O[slot] = num_rows
            num_rows += 1
        free_2O[:, slot] -= size_2
        pairs_of_row.setdefault(int(row_O[slot]), []).append(pair)

    return [np.array(pairs_of_row[row]) for row in sorted(pairs_of_row)]
