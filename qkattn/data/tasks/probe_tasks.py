"""Probes: synthetic tasks with known answers, each of which tests one ability of attention.

A probe is named by a call, such as 'recall(pairs=8)'. Rows are generated from random numbers when
they are read. Training rows repeat only by chance; validation and test rows are fixed.
"""

import abc
import dataclasses
import inspect
import math
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from qkattn.config import Config
from qkattn.config.calls import parse_call, resolve
from qkattn.config.imports import source_digest
from qkattn.data.corpora.corpus import SPLITS
from qkattn.data.corpora.corpus_registry import SETTINGS, in_catalogue, refuse_unused
from qkattn.data.tasks.repeats import induction
from qkattn.data.tasks.rows import Batch, DataForm, Rows, TrainedTrials, token_batch, uniform
from qkattn.errors import ConfigError

# Changes whenever the same draws would make other rows.
VERSION = 1
# Rows of an epoch.
TRAIN_ROWS = 2**24
# Rows of each evaluation split.
EVAL_ROWS = 1024
# Settings that have no effect on a probe.
SETTINGS_OF_TEXT = (
    'lowercase',
    'tokenizer',
    'carve_test',
    'mask_rate',
    'shift_windows',
    'cross_documents',
    'drop_long',
)

# tokens_BT, targets_BT and loss_weights_BT.
Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]


class Sizes(NamedTuple):
    """Sizes of a probe's rows."""

    # How many ids there are.
    vocabulary: int
    # How many different ids an answer may have.
    answers: int
    # How many uniform random numbers a row is made from.
    draws: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe(abc.ABC):
    """A synthetic task. Its options are the fields of the dataclass, whole numbers.

    If the probe is causal, a decoder predicts the next tokens of a sequence. Otherwise an encoder
    labels each of a set of tokens.
    """

    causal: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def least(self) -> dict[str, int]:
        """The smallest value of each option. It may depend on the options before it."""

    @property
    @abc.abstractmethod
    def sizes(self) -> Sizes:
        """The sizes of a row, which follow from the options."""

    @abc.abstractmethod
    def make(self, u_BU: np.ndarray) -> Arrays:
        """Makes rows from uniform random numbers [rows, sizes.draws].

        Returns tokens_BT, targets_BT and loss_weights_BT.
        """


def _to_whole_numbers(u: np.ndarray, bound: int) -> np.ndarray:
    """Converts uniform numbers in [0, 1) to uniform whole numbers in [0, bound)."""
    return (u * bound).astype(np.int64)


def _next_token_rows(sequence_BT1: np.ndarray, is_predicted: np.ndarray) -> Arrays:
    """Makes rows of next-token prediction from sequences of T + 1 tokens.

    `is_predicted`, [T] or [B, T], says at which positions the next token is a target.
    """
    tokens_BT = sequence_BT1[:, :-1]
    targets_BT = sequence_BT1[:, 1:]
    return tokens_BT, targets_BT, np.broadcast_to(is_predicted, tokens_BT.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy(Probe):
    """Sequences x_1 .. x_n, a separator, x_1 .. x_n, in which the second half is predicted."""

    least = {'length': 1, 'symbols': 2}
    # The order of the second half: 1 if it is that of the first half, -1 if it is reversed.
    step: ClassVar[int] = 1
    # n, the length of each half.
    length: int = 16
    # How many symbols there are. Each x is drawn from them independently.
    symbols: int = 64

    @property
    def sizes(self) -> Sizes:
        return Sizes(vocabulary=self.symbols + 1, answers=self.symbols, draws=self.length)

    def make(self, u_BU: np.ndarray) -> Arrays:
        """Makes rows from uniform random numbers; see `Probe.make`."""
        x_BN = _to_whole_numbers(u_BU, self.symbols)
        separator_B1 = np.full((len(u_BU), 1), self.symbols)
        second_half_BN = x_BN[:, :: self.step]
        sequence_BT1 = np.concatenate([x_BN, separator_B1, second_half_BN], axis=1)
        # The first token of the second half is predicted at the separator, position n.
        position_T = np.arange(2 * self.length)
        return _next_token_rows(sequence_BT1, position_T >= self.length)


class Reversal(Copy):
    """Sequences x_1 .. x_n, a separator, x_n .. x_1, in which the second half is predicted.

    The options are those of Copy.
    """

    step = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Induction(Probe):
    """Random symbols in which some bigrams `a b` occur twice: b is predicted after the second a.

    All other symbols of a row occur once. So the answer is the symbol that followed the only
    earlier a (Olsson et al. 2022). Bigrams do not overlap, and stand at random positions.
    """

    # Tokens of a row.
    length: int = 32
    # How many bigrams occur twice in a row.
    repeats: int = 4
    # How many symbols there are. Those of a row are drawn without replacement.
    symbols: int = 64

    @property
    def num_units(self) -> int:
        """The number of units of a row: bigrams, each of which occurs twice, and single symbols.

        A row is made from length + 1 tokens, as the last target is not an input.
        """
        return self.length + 1 - 2 * self.repeats

    @property
    def least(self) -> dict[str, int]:
        # The R bigrams take 4 R of the length + 1 tokens. A row has as many different symbols as
        # units, because a bigram has two symbols and makes two units.
        return {'repeats': 1, 'length': 4 * self.repeats - 1, 'symbols': self.num_units}

    @property
    def sizes(self) -> Sizes:
        draws = self.symbols + self.num_units
        return Sizes(vocabulary=self.symbols, answers=self.symbols, draws=draws)

    def make(self, u_BU: np.ndarray) -> Arrays:
        """Makes rows from uniform random numbers; see `Probe.make`.

        A row joins units in random order: `repeats` bigrams, each twice, and single symbols. With
        one bigram (0, 1) and the single symbols 2 and 3, a row may be 2, 0, 1, 3, 0, 1. Each symbol
        is then replaced by a random token id.
        """
        R = self.repeats
        u_ids_BV, u_order_BN = np.split(u_BU, [self.symbols], axis=1)

        # List the symbols of all units. In the example: [[0, 1], [0, 1], [2, -1], [3, -1]].
        NONE = -1  # in place of the second symbol of a single
        bigrams_R2 = np.arange(2 * R).reshape(R, 2)
        singles_S = np.arange(2 * R, self.num_units)
        singles_S2 = np.stack([singles_S, np.full_like(singles_S, NONE)], axis=1)
        units_N2 = np.concatenate([bigrams_R2, bigrams_R2, singles_S2])

        # Shuffle the units of each row. Every row has length + 1 symbols.
        order_BN = np.argsort(u_order_BN, axis=1)
        units_BN2 = units_N2[order_BN]
        symbols_in_all_rows = units_BN2[units_BN2 != NONE]
        symbols_BT1 = symbols_in_all_rows.reshape(len(u_BU), self.length + 1)

        # Replace symbols by token ids.
        id_of_symbol_BV = np.argsort(u_ids_BV, axis=1)
        sequence_BT1 = np.take_along_axis(id_of_symbol_BV, symbols_BT1, axis=1)

        # The target is the second symbol of a bigram that has occurred before.
        symbols_BT = symbols_BT1[:, :-1]
        is_same_BTT = symbols_BT[:, :, None] == symbols_BT[:, None, :]
        occurred_before_BT = np.tril(is_same_BTT, k=-1).any(axis=-1)
        is_first_of_bigram_BT = np.isin(symbols_BT, bigrams_R2[:, 0])
        return _next_token_rows(sequence_BT1, occurred_before_BT & is_first_of_bigram_BT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(Probe):
    """Multi-query associative recall (Arora et al. 2023).

    A row holds pairs of a key and a value, and then every key again, in a random order and followed
    by its value. The values of the second half are predicted.
    """

    # How many pairs a row has. Their keys are all different.
    pairs: int = 8
    # How many keys there are.
    keys: int = 32
    # How many values there are, with other ids than keys. Those of a row are drawn independently.
    values: int = 32

    @property
    def least(self) -> dict[str, int]:
        return {'pairs': 1, 'keys': self.pairs, 'values': 2}

    @property
    def sizes(self) -> Sizes:
        draws = self.keys + 2 * self.pairs
        return Sizes(vocabulary=self.keys + self.values, answers=self.values, draws=draws)

    def make(self, u_BU: np.ndarray) -> Arrays:
        """Makes rows from uniform random numbers; see `Probe.make`.

        With two pairs, for example, a sequence of keys k and values v is k1 v1 k2 v2 k2 v2 k1 v1.
        """
        P = self.pairs
        u_keys_BK, u_values_BP, u_order_BP = np.split(u_BU, [self.keys, self.keys + P], axis=1)

        # The first half: P different keys, each followed by its value. Keys have the ids from 0 on,
        # values the ids after them.
        keys_BP = np.argsort(u_keys_BK, axis=1)[:, :P]
        values_BP = self.keys + _to_whole_numbers(u_values_BP, self.values)
        pairs_BP2 = np.stack([keys_BP, values_BP], axis=2)

        # The second half: the same pairs in a random order.
        order_BP = np.argsort(u_order_BP, axis=1)
        queries_BP2 = np.take_along_axis(pairs_BP2, order_BP[..., None], axis=1)
        sequence_BT1 = np.concatenate([pairs_BP2, queries_BP2], axis=1).reshape(len(u_BU), -1)

        # The value that comes next is predicted at each key of the second half. Keys are at even
        # positions. The sequence has 4 P tokens, the last of which is not an input.
        position_T = np.arange(4 * P - 1)
        is_second_half_T = position_T >= 2 * P
        is_key_T = position_T % 2 == 0
        return _next_token_rows(sequence_BT1, is_second_half_T & is_key_T)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Successor(Probe):
    """A label for each key of a circle: the payload of the next key.

    A row holds all keys in a random order, each with a random payload. The token of a key with its
    payload is key * payloads + payload. The label of key k is the payload of key (k + 1) mod keys
    in the same row. Positions carry no information.

    The task tests whether a score can tell directions apart. To attend to its successor and not to
    its predecessor, every key k needs s(k, k + 1) > s(k, k - 1). A symmetric score has
    s(k, k - 1) = s(k - 1, k), so its scores would have to grow with every step around the circle,
    which is impossible. Without positions, one head with a symmetric score thus finds the successor
    of all keys except one, at best: its accuracy is at most 1 - (1 - 1 / payloads) / keys. A model
    can exceed this only if its MLP separates a mixture of both neighbours' values. Within a
    thousand steps, this was learned with 6 keys at width 64 and with 8 keys at width 128, but not
    with 16 keys at either width.
    """

    causal = False
    least = {'keys': 3, 'payloads': 2}
    # How many keys are on the circle, and so how many tokens a row has.
    keys: int = 16
    # How many payloads there are. Those of a row are drawn independently.
    payloads: int = 16

    @property
    def sizes(self) -> Sizes:
        vocabulary = self.keys * self.payloads
        return Sizes(vocabulary=vocabulary, answers=self.payloads, draws=2 * self.keys)

    def make(self, u_BU: np.ndarray) -> Arrays:
        """Makes rows from uniform random numbers; see `Probe.make`.

        With payloads=10, for example, the token 37 is key 3 with payload 7. If the payload of key 4
        is 2 in the same row, the target of token 37 is 2.
        """
        # A row has a random number for the place of each key, and one for the payload of each key.
        u_order_BT, u_payloads_BK = np.split(u_BU, 2, axis=1)
        keys_BT = np.argsort(u_order_BT, axis=1)  # a random order of all keys
        payload_of_key_BK = _to_whole_numbers(u_payloads_BK, self.payloads)

        payloads_BT = np.take_along_axis(payload_of_key_BK, keys_BT, axis=1)
        tokens_BT = keys_BT * self.payloads + payloads_BT

        # The target is the payload of the next key. Key 0 comes after the last key.
        next_keys_BT = (keys_BT + 1) % self.keys
        targets_BT = np.take_along_axis(payload_of_key_BK, next_keys_BT, axis=1)
        return tokens_BT, targets_BT, np.ones(keys_BT.shape)


# The probes of the package, by the value of data.name.
PROBES = {cls.__name__.lower(): cls for cls in (Copy, Reversal, Induction, Recall, Successor)}


def is_probe(text: str) -> bool:
    """Whether `text` names a probe, with or without options.

    Raises ConfigError as `resolve` does, for an import path that cannot be imported.
    """
    name, _ = parse_call(text, 'data.name')
    is_import_path = ':' in name and not in_catalogue(name)
    if not is_import_path:
        return name in PROBES
    target, _ = resolve(name, PROBES, 'data.name')
    return _is_probe_class(target)


def _is_probe_class(target: Any) -> bool:
    return inspect.isclass(target) and issubclass(target, Probe)


def find(text: str) -> tuple[str, Probe]:
    """Returns the name of a probe without its options, and the probe.

    The name is 'recall' for 'recall(pairs=8)'. Raises ConfigError if the probe is unknown, or an
    option is not a whole number or is too small.
    """
    probe_class, options = resolve(
        text, PROBES, 'data.name', needs='a subclass of Probe', is_valid=_is_probe_class
    )
    if any(type(value) is not int for value in options.values()):
        raise ConfigError(f'data.name={text!r}: options of probes are whole numbers.')
    probe = probe_class(**options)
    for option, least in probe.least.items():
        value = getattr(probe, option)
        if value < least:
            raise ConfigError(f'data.name={text!r}: {option}={value} must be at least {least}.')
    name, _, _ = text.partition('(')
    return name, probe


class ProbeRows(Rows):
    """The rows of a probe: endless training rows, and EVAL_ROWS fixed rows each to evaluate.

    A training row is a function of its draws. A row of validation or test is a function of its
    split and its number. The three splits use different parts of the random streams.
    """

    splits: tuple[str, ...] = SPLITS

    @classmethod
    def open(cls, config: Config) -> Self:
        """Opens the probe that data.name names.

        Raises ConfigError unless its rows have model.context tokens, and for settings of other
        tasks.
        """
        refuse_unused(config.data, (*SETTINGS, *SETTINGS_OF_TEXT))
        name, probe = find(config.data.name)
        rows = cls(name, probe)
        if rows.length != config.model.context:
            raise ConfigError(
                f'model.context={config.model.context} must equal the length of the rows of '
                f'{config.data.name!r}, {rows.length}.'
            )
        return rows

    def __init__(self, name: str, probe: Probe):
        self.name = name
        self._probe = probe
        self.vocab_size = probe.sizes.vocabulary
        self.length = self.read('test', np.arange(1), np.zeros((1, 2)))['tokens_BT'].shape[1]

    def count(self, split: str) -> int:
        if split not in SPLITS:
            raise ConfigError(f'split={split!r} must be one of {", ".join(SPLITS)}.')
        return TRAIN_ROWS if split == 'train' else EVAL_ROWS

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        """Makes the rows with these numbers from random numbers."""
        if split != 'train':
            # An evaluation row depends on its number only, whatever draws the caller passes.
            draws_B2 = np.stack([np.zeros_like(rows_B), rows_B], axis=1)
        u_BU = uniform(draws_B2, (self._probe.sizes.draws,), stream=SPLITS.index(split))
        tokens_BT, targets_BT, loss_weights_BT = self._probe.make(u_BU)
        return token_batch(tokens_BT, targets_BT, loss_weights_BT)

    def identity(self) -> dict[str, Any]:
        version: int | str = VERSION
        if ':' in self.name:  # of a probe from outside
            version = f'{VERSION}-{source_digest(self.name)}'
        options = dataclasses.asdict(self._probe)
        return {'name': self.name, 'version': version, 'options': options}

    def unigram_nats(self, split: str) -> float:
        return math.log(self._probe.sizes.answers)


class CausalProbeRows(ProbeRows):
    """Rows of a probe whose next tokens a decoder predicts."""

    kind: ClassVar[str] = 'decoder'
    data: ClassVar[DataForm] = 'a causal probe'

    def end_metrics(self, trained: TrainedTrials, finished_X: np.ndarray) -> dict[str, np.ndarray]:
        """Measures induction if the probe predicts every token, which no built-in probe does."""
        return induction(self, trained)


class LabellingProbeRows(ProbeRows):
    """Rows of a probe whose tokens an encoder labels."""

    kind: ClassVar[str] = 'encoder'
    data: ClassVar[DataForm] = 'a labelling probe'
