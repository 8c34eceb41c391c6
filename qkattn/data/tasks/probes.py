"""Synthetic tasks whose answers are known exactly, each for one ability of attention.

A task is named by a call, e.g. 'recall(pairs=8)'. Rows are generated from random numbers when they
are read: training rows repeat only by chance, validation and test rows are fixed.
"""

import dataclasses
import inspect
import math
from typing import Any, ClassVar, Self

import numpy as np

from qkattn.config import Config, DataConfig, ModelConfig
from qkattn.config.calls import digest, parse_call, resolve
from qkattn.data.corpora.corpus_registry import in_catalogue
from qkattn.data.tasks.probe_tasks import PROBES, Probe
from qkattn.data.tasks.rows import ArrayShapes, Batch, DataForm, token_shapes
from qkattn.errors import ConfigError

# Changes whenever the same draws would make other rows.
VERSION = 1
TRAIN_ROWS = 2**24
EVAL_ROWS = 1024
SPLITS = ('train', 'validation', 'test')
# Settings of text that a probe has no use for.
TEXT_SETTINGS: tuple[str, ...] = (
    *('manual_dir', 'path', 'languages', 'feature', 'lowercase', 'tokenizer', 'carve_test'),
)


def is_probe(text: str) -> bool:
    """Whether `text` names a probe, with options or without; ConfigError as `resolve`."""
    name, _ = parse_call(text, 'data.name')
    return name in PROBES or (
        ':' in name and not in_catalogue(text) and _is_probe(resolve(name, PROBES, 'data.name')[0])
    )


def _is_probe(found: Any) -> bool:
    return inspect.isclass(found) and issubclass(found, Probe)


def find(text: str) -> tuple[str, Probe]:
    """The name and the task of a probe, e.g. of 'recall(pairs=8)'.

    Raises:
      ConfigError: an unknown probe or option, or an option out of range.
    """
    kind, options = resolve(text, PROBES, 'data.name', needs='a subclass of Probe', fits=_is_probe)
    for option, value in options.items():
        least = kind.least[option]
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ConfigError(
                f'data.name={text!r}: {option}={value!r} must be a whole number of at least '
                f'{least}.'
            )
    probe = kind(**options)
    probe.check()
    return text.partition('(')[0], probe


class ProbeRows:
    """Endless training rows and 1,024 fixed rows each for validation and test.

    A training row is a function of its draws only, an evaluation row of its split and number; the
    three splits read different parts of their generators' streams.

    Attributes:
      length: tokens of a row.
      options: of the task, all of them.
    """

    splits: tuple[str, ...] = SPLITS

    @staticmethod
    def array_shapes(model: ModelConfig) -> ArrayShapes:
        return token_shapes(model)

    @classmethod
    def open(cls, config: Config) -> Self:
        data, model = config.data, config.model
        for field in TEXT_SETTINGS:
            value, default = getattr(data, field), getattr(DataConfig, field)
            if value != default:
                raise ConfigError(
                    f'data.{field}={value!r} has no effect on data.name={data.name!r}; leave it '
                    f'{default!r}.'
                )
        rows = cls(*find(data.name))
        if rows.length != model.context:
            raise ConfigError(
                f'model.context={model.context} must equal the length of the rows of '
                f'{data.name!r}, {rows.length}.'
            )
        return rows

    def __init__(self, name: str, probe: Probe):
        self.name = name
        self.options = dataclasses.asdict(probe)
        self.vocab_size = probe.sizes.vocabulary
        self._probe = probe
        self.length = self.read('validation', np.arange(1), np.zeros((1, 2)))['tokens_BT'].shape[1]

    def _place(self, split: str) -> int:
        if split not in SPLITS:
            raise ConfigError(
                f'split={split!r} is not in probe {self.name!r}; valid: '
                f'{", ".join(map(repr, SPLITS))}.'
            )
        return SPLITS.index(split)

    def count(self, split: str) -> int:
        return EVAL_ROWS if self._place(split) else TRAIN_ROWS

    def read(self, split: str, rows_B: np.ndarray, draws_B2: np.ndarray) -> Batch:
        place = self._place(split)
        if place:
            rows_B = np.asarray(rows_B)
            draws_B2 = np.stack([np.zeros_like(rows_B), rows_B], axis=1)
        u_BU = np.empty((len(draws_B2), self._probe.sizes.draws))
        for draws_2, u_U in zip(np.asarray(draws_B2, np.uint64), u_BU, strict=True):
            # A counter's high word sets the splits 2^192 draws apart.
            generator = np.random.Philox(key=draws_2, counter=place << 192)
            np.random.Generator(generator).random(out=u_U)
        tokens_BT, targets_BT, loss_weights_BT = self._probe.make(u_BU)
        return {
            'tokens_BT': tokens_BT.astype(np.int32),
            'targets_BT': targets_BT.astype(np.int32),
            'loss_weights_BT': loss_weights_BT.astype(np.float32),
        }

    def documents(self, split: str) -> None:
        return None

    def identity(self) -> dict[str, Any]:
        version = f'{VERSION}-{digest(self.name)}' if ':' in self.name else VERSION
        return {'name': self.name, 'version': version, 'options': self.options}

    def bytes_per_token(self, split: str) -> None:
        return None

    def unigram_nats(self, split: str) -> float:
        return math.log(self._probe.sizes.answers)


class CausalProbeRows(ProbeRows):
    """Rows of a probe whose next tokens a decoder predicts."""

    kind: ClassVar[str] = 'decoder'
    data: ClassVar[DataForm] = 'a causal probe'


class LabellingProbeRows(ProbeRows):
    """Rows of a probe whose tokens an encoder labels."""

    kind: ClassVar[str] = 'encoder'
    data: ClassVar[DataForm] = 'a labelling probe'
