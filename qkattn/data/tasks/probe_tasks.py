"""Probes: synthetic tasks that test one ability of attention each.

A configuration names a probe by a call, such as 'recall(pairs=8)'. Rows are generated from random
numbers as they are read. Validation and test rows are fixed.
"""

import abc
import dataclasses
import inspect
import math
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from qkattn.config import Config
from qkattn.config.calls import call_with_config_errors, parse_call, resolve
from qkattn.config.imports import source_digest
from qkattn.data.corpora.corpus import SPLITS
from qkattn.data.corpora.corpus_registry import SETTINGS, in_catalogue, refuse_unused
from qkattn.data.tasks.repeats import induction
from qkattn.data.tasks.rows import Batch, DataForm, Rows, TrainedTrials, token_batch, uniform
from qkattn.errors import ConfigError

# Changes whenever the same random numbers would make other rows.
VERSION = 1
# Rows per epoch.
TRAIN_ROWS = 2**24
# Rows per evaluation split.
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

    # Number of token ids.
    vocabulary: int
    # Number of ids that a target can have.
    answers: int
    # Number of uniform random numbers that make a row.
    draws: int


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe(abc.ABC):
    """A synthetic task, whose integer options are the fields of the dataclass."""

    # Whether a decoder predicts next tokens. Otherwise, an encoder labels each token.
    causal: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def least(self) -> dict[str, int]:
        """The smallest value of each option, which may depend on earlier options."""

    @property
    @abc.abstractmethod
    def sizes(self) -> Sizes:
        """The sizes of the probe's rows."""

    @abc.abstractmethod
    def make(self, u_BU: np.ndarray) -> Arrays:
        """Makes rows from uniform random numbers.

        Args:
            u_BU: Numbers in [0, 1), U = `sizes.draws` for each row.

        Returns:
            tokens_BT, targets_BT and loss_weights_BT.
        """


def _to_integers(u: np.ndarray, bound: int) -> np.ndarray:
    """Converts uniform numbers in [0, 1) to uniform integers in [0, bound)."""
    return (u * bound).astype(np.int64)


def _next_token_rows(sequence_BT1: np.ndarray, has_target: np.ndarray) -> Arrays:
    """Makes rows for next-token prediction.

    Args:
        sequence_BT1: Sequences of T + 1 tokens.
        has_target: The positions at which the next token is predicted, [T] or [B, T].
    """
    tokens_BT = sequence_BT1[:, :-1]
    targets_BT = sequence_BT1[:, 1:]
    loss_weights_BT = np.broadcast_to(has_target, tokens_BT.shape)
    return tokens_BT, targets_BT, loss_weights_BT


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy(Probe):
    """Sequences x_1 .. x_n, a separator, x_1 .. x_n; the second half is predicted."""

    least = {'length': 1, 'symbols': 2}
    # Slice step that makes the second half from the first; -1 reverses.
    step: ClassVar[int] = 1
    # n, the length of each half.
    length: int = 16
    # Number of symbols, from which each x is drawn.
    symbols: int = 64

    @property
    def sizes(self) -> Sizes:
        return Sizes(vocabulary=self.symbols + 1, answers=self.symbols, draws=self.length)

    def make(self, u_BU: np.ndarray) -> Arrays:
        """Makes rows from uniform random numbers; see `Probe.make`."""
        first_half_BN = _to_integers(u_BU, self.symbols)
        separator_B1 = np.full((len(u_BU), 1), self.symbols)  # the id after the symbols
        second_half_BN = first_half_BN[:, :: self.step]  # a step of -1 reverses
        sequence_BT1 = np.concatenate([first_half_BN, separator_B1, second_half_BN], axis=1)

        position_T = np.arange(2 * self.length)
        separator_position = self.length
        return _next_token_rows(sequence_BT1, has_target=position_T >= separator_position)


class Reversal(Copy):
    """Sequences x_1 .. x_n, a separator, x_n .. x_1; the second half is predicted."""

    step = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Induction(Probe):
    """Random symbols in which some bigrams `a b` occur twice (Olsson et al. 2022).

    After the second a, b is predicted. All other symbols of a row occur once.
    """

    # Tokens in a row.
    length: int = 32
    # Bigrams that occur twice in a row.
    repeats: int = 4
    # Number of symbols, drawn for a row without replacement.
    symbols: int = 64

    @property
    def num_units(self) -> int:
        """The number of units in a row: each bigram twice, and each single symbol."""
        num_tokens = self.length + 1  # the last target is not an input
        num_bigram_units = 2 * self.repeats
        num_singles = num_tokens - 2 * num_bigram_units
        return num_bigram_units + num_singles

    @property
    def least(self) -> dict[str, int]:
        tokens_of_bigrams = 4 * self.repeats  # two symbols, twice
        min_length = tokens_of_bigrams - 1  # the last token is not an input
        # A bigram has two units and two different symbols, and a single symbol is a unit.
        num_different_symbols = self.num_units
        return {'repeats': 1, 'length': min_length, 'symbols': num_different_symbols}

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

        # Shuffle the units of each row. Without NONE, every row has length + 1 symbols.
        order_BN = np.argsort(u_order_BN, axis=1)
        units_BN2 = units_N2[order_BN]
        symbols_in_all_rows = units_BN2[units_BN2 != NONE]
        symbols_BT1 = symbols_in_all_rows.reshape(len(u_BU), self.length + 1)

        # Replace symbols by token ids.
        id_of_symbol_BV = np.argsort(u_ids_BV, axis=1)
        sequence_BT1 = np.take_along_axis(id_of_symbol_BV, symbols_BT1, axis=1)

        # Predict the next token where the first symbol of a bigram occurs for the second time.
        symbols_BT = symbols_BT1[:, :-1]
        is_same_BTT = symbols_BT[:, :, None] == symbols_BT[:, None, :]
        is_same_as_earlier_BTT = np.tril(is_same_BTT, k=-1)
        occurred_before_BT = is_same_as_earlier_BTT.any(axis=-1)
        is_first_of_bigram_BT = np.isin(symbols_BT, bigrams_R2[:, 0])
        return _next_token_rows(sequence_BT1, occurred_before_BT & is_first_of_bigram_BT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(Probe):
    """Multi-query associative recall (Arora et al. 2023).

    A row holds pairs of a key and a value, and then the same pairs in random order. The values of
    the second half are predicted.
    """

    # Pairs in a row, with different keys.
    pairs: int = 8
    # Number of keys.
    keys: int = 32
    # Number of values, drawn for each pair independently. Their ids follow the keys.
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

        With two pairs of keys k and values v, a sequence may be k1 v1 k2 v2 k2 v2 k1 v1.
        """
        P = self.pairs
        u_keys_BK, u_values_BP, u_order_BP = np.split(u_BU, [self.keys, self.keys + P], axis=1)

        # The first half: P different keys with random values.
        shuffled_keys_BK = np.argsort(u_keys_BK, axis=1)
        keys_BP = shuffled_keys_BK[:, :P]
        first_value_id = self.keys
        values_BP = first_value_id + _to_integers(u_values_BP, self.values)
        first_half_BP2 = np.stack([keys_BP, values_BP], axis=2)

        # The second half: the same pairs in random order.
        order_BP1 = np.argsort(u_order_BP, axis=1)[..., None]
        second_half_BP2 = np.take_along_axis(first_half_BP2, order_BP1, axis=1)
        pairs = np.concatenate([first_half_BP2, second_half_BP2], axis=1)
        sequence_BT1 = pairs.reshape(len(u_BU), 4 * P)

        # Predict the next token at each key of the second half.
        position_T = np.arange(4 * P - 1)  # the last token is not an input
        is_second_half_T = position_T >= 2 * P
        is_key_T = position_T % 2 == 0
        return _next_token_rows(sequence_BT1, has_target=is_second_half_T & is_key_T)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Successor(Probe):
    """A labelling task that needs asymmetric attention scores.

    A row holds all keys in random order. Each key has a random payload, and both make one token,
    key * payloads + payload. The label of key k is the payload of key (k + 1) mod keys.

    To attend to its successor, every key k needs s(k, k + 1) > s(k, k - 1). With a symmetric score,
    s(k, k + 1) would have to grow with k all around the circle, which is impossible. One head with
    a symmetric score and without positions therefore misses at least one successor. Its accuracy is
    at most 1 - (1 - 1 / payloads) / keys, if no MLP separates a mixture of both neighbours. Within
    a thousand steps, an MLP learns this with 6 keys at width 64 and with 8 keys at width 128, but
    not with 16 keys at either width.
    """

    causal = False
    least = {'keys': 3, 'payloads': 2}
    # Number of keys on the circle, and of tokens in a row.
    keys: int = 16
    # Number of payloads, drawn for each key independently.
    payloads: int = 16

    @property
    def sizes(self) -> Sizes:
        vocabulary = self.keys * self.payloads
        return Sizes(vocabulary=vocabulary, answers=self.payloads, draws=2 * self.keys)

    def make(self, u_BU: np.ndarray) -> Arrays:
        """Makes rows from uniform random numbers; see `Probe.make`.

        For example, token 37 is key 3 with payload 7 if payloads=10. If key 4 has payload 2, the
        target of token 37 is 2.
        """
        u_order_BT, u_payloads_BK = np.split(u_BU, 2, axis=1)
        keys_BT = np.argsort(u_order_BT, axis=1)  # all keys in random order
        payload_of_key_BK = _to_integers(u_payloads_BK, self.payloads)

        payloads_BT = np.take_along_axis(payload_of_key_BK, keys_BT, axis=1)
        tokens_BT = keys_BT * self.payloads + payloads_BT

        # The target is the payload of the next key on the circle.
        next_keys_BT = (keys_BT + 1) % self.keys
        targets_BT = np.take_along_axis(payload_of_key_BK, next_keys_BT, axis=1)
        return tokens_BT, targets_BT, np.ones(keys_BT.shape)


# The built-in probes, by the value of data.name.
PROBES = {cls.__name__.lower(): cls for cls in (Copy, Reversal, Induction, Recall, Successor)}


def is_probe(text: str) -> bool:
    """Whether `text` names a probe, with or without options.

    Raises:
        ConfigError: An import path cannot be imported.
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
    """Returns the name of a probe and the probe; 'recall(pairs=8)' has the name 'recall'.

    Raises:
        ConfigError: The probe is unknown, or an option is not an integer or is too small.
    """
    probe_class, options = resolve(
        text, PROBES, 'data.name', needs='a subclass of Probe', is_valid=_is_probe_class
    )
    are_integers = all(type(value) is int for value in options.values())
    if not are_integers:
        raise ConfigError(f'data.name={text!r}: options of probes are whole numbers.')
    # Exceptions in a user's class become ConfigErrors, as where it lacks a method.
    probe = call_with_config_errors('data.name', text, lambda: probe_class(**options))
    least_values = call_with_config_errors('data.name', text, lambda: probe.least)
    for option, least in least_values.items():
        value = getattr(probe, option)
        if value < least:
            raise ConfigError(f'data.name={text!r}: {option}={value} must be at least {least}.')
    name, _, _ = text.partition('(')
    return name, probe


class ProbeRows(Rows):
    """The rows of a probe, made from independent random numbers for each split.

    A training row is a function of its random seed. An evaluation row is a function of its index.
    """

    splits: tuple[str, ...] = SPLITS

    @classmethod
    def open(cls, config: Config) -> Self:
        """Opens the probe that data.name names.

        Raises:
            ConfigError: Rows do not have model.context tokens, or a setting is for other tasks.
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
        one_row = self.read('test', rows_B=np.arange(1), draws_B2=np.zeros((1, 2)))
        self.length = one_row['tokens_BT'].shape[1]

    def count(self, split: str) -> int:
        if split not in SPLITS:
            raise ConfigError(f'split={split!r} must be one of {", ".join(SPLITS)}.')
        return TRAIN_ROWS if split == 'train' else EVAL_ROWS

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        """Makes rows from random numbers."""
        if split != 'train':
            # An evaluation row depends only on its index, whatever seed the caller passes.
            draws_B2 = np.stack([np.zeros_like(rows_B), rows_B], axis=1)
        num_draws = self._probe.sizes.draws
        u_BU = uniform(draws_B2, shape=(num_draws,), stream=SPLITS.index(split))
        tokens_BT, targets_BT, loss_weights_BT = self._probe.make(u_BU)
        return token_batch(tokens_BT, targets_BT, loss_weights_BT)

    def identity(self) -> dict[str, Any]:
        version: int | str = VERSION
        if ':' in self.name:  # an import path
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
        """Measures induction if the probe predicts every next token; no built-in probe does."""
        return induction(self, trained)


class LabellingProbeRows(ProbeRows):
    """Rows of a probe whose tokens an encoder labels."""

    kind: ClassVar[str] = 'encoder'
    data: ClassVar[DataForm] = 'a labelling probe'
