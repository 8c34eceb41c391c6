"""Synthetic tasks whose answers are known exactly, each for one ability of attention.

A task is named by a call, e.g. 'recall(pairs=8)'. Rows are generated from random numbers when they
are read: training rows repeat only by chance, validation and test rows are fixed.
"""

import abc
import dataclasses
import inspect
import math
from typing import Any, ClassVar, NamedTuple, Self

import numpy as np

from qkattn.config import Config
from qkattn.config.calls import parse_call, resolve
from qkattn.config.imports import digest
from qkattn.data.corpora.corpus import SPLITS
from qkattn.data.corpora.corpus_registry import SETTINGS, in_catalogue, refuse_unused
from qkattn.data.tasks.repeats import induction
from qkattn.data.tasks.rows import Batch, DataForm, Rows, TrainedTrials, token_batch, uniform
from qkattn.errors import ConfigError

VERSION = 1  # changes whenever the same draws would make other rows
TRAIN_ROWS = 2**24  # of an epoch
EVAL_ROWS = 1024  # of each evaluation split
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

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]  # tokens_BT, targets_BT, loss_weights_BT


class Sizes(NamedTuple):
    """Sizes of a probe's rows."""

    vocabulary: int  # ids in all
    answers: int  # ids that an answer may have
    draws: int  # uniform numbers that a row is made of


@dataclasses.dataclass(frozen=True, kw_only=True)
class Probe(abc.ABC):
    """A synthetic task; the fields of the dataclass are its options, whole numbers.

    A causal one is a sequence whose next tokens a decoder predicts, another one a set of tokens
    that an encoder labels.
    """

    causal: ClassVar[bool] = True

    @property
    @abc.abstractmethod
    def least(self) -> dict[str, int]:
        """The smallest value of each option; it may depend on the options before it."""

    @property
    @abc.abstractmethod
    def sizes(self) -> Sizes:
        """Sizes of a row, from the options."""

    @abc.abstractmethod
    def make(self, u_BU: np.ndarray) -> Arrays:
        """tokens_BT, targets_BT and loss_weights_BT from uniform numbers [rows, sizes.draws]."""


def _whole(u: np.ndarray, bound: int) -> np.ndarray:
    """Uniform numbers in [0, 1) as uniform whole numbers in [0, bound)."""
    return (u * bound).astype(np.int64)


def _predict(sequence_BT1: np.ndarray, is_predicted: np.ndarray) -> Arrays:
    """Next-token prediction of sequences of T + 1 tokens.

    `is_predicted`, [T] or [B, T], says at which positions the next token is a target.
    """
    tokens_BT = sequence_BT1[:, :-1]
    targets_BT = sequence_BT1[:, 1:]
    return tokens_BT, targets_BT, np.broadcast_to(is_predicted, tokens_BT.shape)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Copy(Probe):
    """x_1 .. x_n, a separator, x_1 .. x_n; the second half is predicted."""

    least = {'length': 1, 'symbols': 2}
    step: ClassVar[int] = 1  # 1 if the second half has the order of the first, -1 if the reverse
    length: int = 16  # n
    symbols: int = 64  # that the x are drawn from, independently

    @property
    def sizes(self) -> Sizes:
        return Sizes(vocabulary=self.symbols + 1, answers=self.symbols, draws=self.length)

    def make(self, u_BU: np.ndarray) -> Arrays:
        x_BN = _whole(u_BU, self.symbols)
        separator_B1 = np.full((len(u_BU), 1), self.symbols)
        sequence_BT1 = np.concatenate([x_BN, separator_B1, x_BN[:, :: self.step]], axis=1)
        return _predict(sequence_BT1, np.arange(2 * self.length) >= self.length)


class Reversal(Copy):
    """x_1 .. x_n, a separator, x_n .. x_1; the second half is predicted. Options as of Copy."""

    step = -1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Induction(Probe):
    """Random symbols, with some bigrams `a b` that occur twice; after the second a, b is predicted.

    All other symbols of a row occur once, so that the answer is what followed the only earlier a
    (Olsson et al. 2022). Bigrams do not overlap; their two places in the row are random.
    """

    length: int = 32  # tokens of a row
    repeats: int = 4  # bigrams that occur twice
    symbols: int = 64  # that those of a row are drawn from, without replacement

    @property
    def num_units(self) -> int:
        """Bigrams, each counted twice, and single symbols in a row of length + 1 tokens."""
        return self.length + 1 - 2 * self.repeats

    @property
    def least(self) -> dict[str, int]:
        # 4 R of the length + 1 tokens are those of bigrams. A row has as many different symbols as
        # units: two for a bigram, which is two units, and one for each other unit.
        return {'repeats': 1, 'length': 4 * self.repeats - 1, 'symbols': self.num_units}

    @property
    def sizes(self) -> Sizes:
        draws = self.symbols + self.num_units
        return Sizes(vocabulary=self.symbols, answers=self.symbols, draws=draws)

    def make(self, u_BU: np.ndarray) -> Arrays:
        # N = num_units units, bigrams or single symbols, stand in a random order.
        R = self.repeats
        u_symbols_BV, u_order_BN = np.split(u_BU, [self.symbols], axis=1)
        # The symbols of a row: a random order of all.
        symbols_BV = np.argsort(u_symbols_BV, axis=1)
        # A random order of the units. Units r and R + r, r < R, are both the bigram of the symbols
        # 2r and 2r + 1 of the row; unit n, n >= 2R, is its symbol n.
        units_BN = np.argsort(u_order_BN, axis=1)
        lengths = np.where(units_BN.ravel() < 2 * R, 2, 1)
        unit_BT1 = np.repeat(units_BN, lengths).reshape(len(u_BU), self.length + 1)
        is_second_BT1 = np.diff(unit_BT1, axis=1, prepend=-1) == 0  # of a bigram
        number_BT1 = np.where(unit_BT1 < 2 * R, unit_BT1 % R * 2 + is_second_BT1, unit_BT1)
        sequence_BT1 = np.take_along_axis(symbols_BV, number_BT1, axis=1)
        # What follows the first symbol of a bigram is predicted where that was seen before.
        is_same_BTT = sequence_BT1[:, :-1, None] == sequence_BT1[:, None, :-1]
        is_seen_BT = np.tril(is_same_BTT, -1).any(-1)
        return _predict(sequence_BT1, is_seen_BT & ~is_second_BT1[:, :-1])


@dataclasses.dataclass(frozen=True, kw_only=True)
class Recall(Probe):
    """Key-value pairs, then every key again in a random order, each followed by its value.

    The values of the second half are predicted: multi-query associative recall (Arora et al. 2023).
    """

    pairs: int = 8  # keys in a row, all different
    keys: int = 32  # that those of a row are drawn from
    values: int = 32  # that the values are drawn from, independently; other ids than the keys'

    @property
    def least(self) -> dict[str, int]:
        return {'pairs': 1, 'keys': self.pairs, 'values': 2}

    @property
    def sizes(self) -> Sizes:
        draws = self.keys + 2 * self.pairs
        return Sizes(vocabulary=self.keys + self.values, answers=self.values, draws=draws)

    def make(self, u_BU: np.ndarray) -> Arrays:
        P = self.pairs
        u_keys_BK, u_values_BP, u_order_BP = np.split(u_BU, [self.keys, self.keys + P], axis=1)
        keys_BP = np.argsort(u_keys_BK, axis=1)[:, :P]
        values_BP = self.keys + _whole(u_values_BP, self.values)
        pairs_BP2 = np.stack([keys_BP, values_BP], axis=2)
        order_BP = np.argsort(u_order_BP, axis=1)
        queries_BP2 = np.take_along_axis(pairs_BP2, order_BP[..., None], axis=1)
        sequence_BT1 = np.concatenate([pairs_BP2, queries_BP2], axis=1).reshape(len(u_BU), -1)
        # After each key of the second half stands a value.
        position_T = np.arange(4 * P - 1)
        return _predict(sequence_BT1, (position_T >= 2 * P) & (position_T % 2 == 0))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Successor(Probe):
    """All keys of a circle in a random order, each with a payload; the next key's is the label.

    Token key * payloads + payload stands for both; the label of key k is the payload that key
    (k + 1) mod keys has in this row. Positions carry no information.

    The task tells directions apart. To read its successor and not its predecessor, every k needs
    s(k, k + 1) > s(k, k - 1). A symmetric score has s(k, k - 1) = s(k - 1, k), so that the scores
    would have to grow with every step around the circle, which ends where it began. One head with
    a symmetric score, without positions, thus finds the successors of all keys but one, at best:
    accuracy 1 - (1 - 1 / payloads) / keys. Only an MLP that takes a mixture of both neighbours'
    values apart gets further: within a thousand steps with 6 keys at width 64 and with 8 at width
    128, but not with 16 keys at either width.
    """

    causal = False
    least = {'keys': 3, 'payloads': 2}
    keys: int = 16  # on the circle, and tokens of a row
    payloads: int = 16  # that those of a row are drawn from, independently

    @property
    def sizes(self) -> Sizes:
        vocabulary = self.keys * self.payloads
        return Sizes(vocabulary=vocabulary, answers=self.payloads, draws=2 * self.keys)

    def make(self, u_BU: np.ndarray) -> Arrays:
        u_order_BT, u_payloads_BK = np.split(u_BU, 2, axis=1)
        keys_BT = np.argsort(u_order_BT, axis=1)
        payloads_BK = _whole(u_payloads_BK, self.payloads)
        tokens_BT = keys_BT * self.payloads + np.take_along_axis(payloads_BK, keys_BT, axis=1)
        targets_BT = np.take_along_axis(payloads_BK, (keys_BT + 1) % self.keys, axis=1)
        return tokens_BT, targets_BT, np.ones(keys_BT.shape)


PROBES = {cls.__name__.lower(): cls for cls in (Copy, Reversal, Induction, Recall, Successor)}


def is_probe(text: str) -> bool:
    """Whether `text` names a probe, with options or without; ConfigError as `resolve`."""
    name, _ = parse_call(text, 'data.name')
    is_import_path = ':' in name and not in_catalogue(name)
    if not is_import_path:
        return name in PROBES
    target, _ = resolve(name, PROBES, 'data.name')
    return _is_probe_class(target)


def _is_probe_class(target: Any) -> bool:
    return inspect.isclass(target) and issubclass(target, Probe)


def find(text: str) -> tuple[str, Probe]:
    """The name of a probe without options, and the probe: 'recall' for 'recall(pairs=8)'.

    ConfigError if it is unknown, or an option is no whole number or too small.
    """
    probe_class, options = resolve(
        text, PROBES, 'data.name', needs='a subclass of Probe', fits=_is_probe_class
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
    """Endless training rows and 1,024 fixed rows each for validation and test.

    A training row is a function of its draws only, an evaluation row of its split and number; the
    three splits read different parts of their generators' streams.
    """

    splits: tuple[str, ...] = SPLITS

    @classmethod
    def open(cls, config: Config) -> Self:
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
        if split != 'train':  # an evaluation row is the same whoever reads it
            draws_B2 = np.stack([np.zeros_like(rows_B), rows_B], axis=1)
        u_BU = uniform(draws_B2, (self._probe.sizes.draws,), part=SPLITS.index(split))
        tokens_BT, targets_BT, loss_weights_BT = self._probe.make(u_BU)
        return token_batch(tokens_BT, targets_BT, loss_weights_BT)

    def identity(self) -> dict[str, Any]:
        version: int | str = VERSION
        if ':' in self.name:  # of a probe from outside
            version = f'{VERSION}-{digest(self.name)}'
        options = dataclasses.asdict(self._probe)
        return {'name': self.name, 'version': version, 'options': options}

    def unigram_nats(self, split: str) -> float:
        return math.log(self._probe.sizes.answers)


class CausalProbeRows(ProbeRows):
    """Rows of a probe whose next tokens a decoder predicts."""

    kind: ClassVar[str] = 'decoder'
    data: ClassVar[DataForm] = 'a causal probe'

    def end_metrics(self, trained: TrainedTrials, finished_X: np.ndarray) -> dict[str, np.ndarray]:
        """Induction of a probe that predicts every token, as none here does."""
        return induction(self, trained)


class LabellingProbeRows(ProbeRows):
    """Rows of a probe whose tokens an encoder labels."""

    kind: ClassVar[str] = 'encoder'
    data: ClassVar[DataForm] = 'a labelling probe'
