"""One trial's result: the record, and the checks a line of results.jsonl has to pass."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from qkattn.config import ConfigError


class ReportError(ConfigError):
    """A study that cannot be reported on; the message is one sentence."""


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trained model. Losses are nats/token and None where the trial diverged.

    `settings` holds every trial setting but the seed, sorted by name: trials that share it are
    repetitions of each other. Seconds and tokens/second are the whole cell's, all trials together.
    """

    cell: str
    variant: str
    size: str
    seed: int
    learning_rate: float
    settings: tuple[tuple[str, Any], ...]
    status: str
    num_steps: int
    num_tokens: int
    weights: Mapping[str, int]
    target_weights: int | None
    residual: float | None
    config: Mapping[str, Any]
    flops_per_token: float
    cache_floats_per_token: float | None
    val_loss: float | None
    val_bits_per_byte: float | None
    test_loss: float | None
    test_bits_per_byte: float | None
    train_seconds: float | None
    compile_seconds: float | None
    tokens_per_second: float | None
    lifting: str | None
    data: Mapping[str, Any]
    eval_tokens: int | None
    provenance: Mapping[str, Any]

    @property
    def finished(self) -> bool:
        return self.status == 'finished'

    @property
    def key(self) -> tuple:
        """What makes the trial one of its cell."""
        return self.seed, self.settings


TEXT, NUMBER, MAPPING = (str,), (int, float), (dict,)
OPTIONAL = (type(None),)
_TRIAL_FIELDS: dict[str, tuple[type, ...]] = {
    'cell': TEXT,
    'variant': TEXT,
    'size': TEXT,
    'trial': MAPPING,
    'status': TEXT,
    'num_steps': (int,),
    'num_tokens': (int,),
    'weights': MAPPING,
    'target_weights': NUMBER + OPTIONAL,
    'residual': NUMBER + OPTIONAL,
    'config': MAPPING,
    'flops_per_token': NUMBER,
    'cache_floats_per_token': NUMBER + OPTIONAL,
    'val_loss': NUMBER + OPTIONAL,
    'val_bits_per_byte': NUMBER + OPTIONAL,
    'test_loss': NUMBER + OPTIONAL,
    'test_bits_per_byte': NUMBER + OPTIONAL,
    'train_seconds': NUMBER + OPTIONAL,
    'compile_seconds': NUMBER + OPTIONAL,
    'tokens_per_second': NUMBER + OPTIONAL,
    'lifting': TEXT + OPTIONAL,
    'data': MAPPING,
    'eval_tokens': (int,) + OPTIONAL,
    'provenance': MAPPING,
}


def check_fields(record: Any, fields: Mapping[str, tuple[type, ...]]) -> None:
    """Raises ValueError, in words, unless `record` is an object with fields of these types."""
    if not isinstance(record, dict):
        raise ValueError(f'expected an object, found {type(record).__name__}')
    for name, types in fields.items():
        if name not in record:
            raise ValueError(f'field {name!r} is missing')
        value = record[name]
        if isinstance(value, bool) or not isinstance(value, types):
            valid = ' or '.join('null' if t is type(None) else t.__name__ for t in types)
            raise ValueError(f'field {name!r} is {value!r}, expected {valid}')


def parse_trial(record: Any) -> Trial:
    """A trial from one object of results.jsonl; raises ValueError that names the bad field."""
    check_fields(record, _TRIAL_FIELDS)
    check_fields(record['trial'], {'seed': (int,), 'learning_rate': NUMBER})
    check_fields(record['weights'], {'attention': (int,), 'total': (int,)})
    check_fields(record['config'], {'d_model': (int,), 'd_ff': (int,)})
    check_fields(record['data'], {'name': TEXT, 'version': TEXT})
    if record['status'] not in ('finished', 'diverged'):
        raise ValueError(f"field 'status' is {record['status']!r}, expected finished or diverged")
    for name in ('val_loss', 'val_bits_per_byte') if record['status'] == 'finished' else ():
        if record[name] is None or not math.isfinite(record[name]):
            raise ValueError(f'field {name!r} of a finished trial is {record[name]}')
    settings = tuple(sorted((k, v) for k, v in record['trial'].items() if k != 'seed'))
    values = {name: record[name] for name in _TRIAL_FIELDS if name != 'trial'}
    trial = record['trial']
    return Trial(
        seed=trial['seed'], learning_rate=trial['learning_rate'], settings=settings, **values
    )
