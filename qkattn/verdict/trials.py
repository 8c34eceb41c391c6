"""One trial's result: the record, and the checks a line of results.jsonl has to pass."""

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from qkattn.study.tuning import KNOBS, SCREENING, STAGES, Settings


@dataclasses.dataclass(frozen=True)
class Trial:
    """One trained model. Scores are None where there is no such number or the trial diverged.

    Losses are nats/token; accuracy (part of the targets that are the likeliest token), solved (part
    of the rows in which every target is) and exact match are between 0 and 1, BLEU and chrF between
    0 and 100. All from BLEU on, on either split, are there for translation only.

    `variant` is the arm's label: the variant, with where its saved parameters go in brackets where
    the study has several destinations. `stage` and `knob` are those of the trial's run.
    `settings` holds every trial setting but the seed, sorted by name: trials of a run that share
    it are repetitions of each other. `score_scale` is the model's, which no trial setting holds.
    Seconds and tokens/second are the whole run's, all trials together. `val_loss_se` is the
    standard error of the loss over the evaluated rows, in nats/token.
    """

    run: str
    variant: str
    size: str
    stage: str
    knob: str | None
    config_hash: str
    seed: int
    learning_rate: float
    settings: tuple[tuple[str, Any], ...]
    status: str
    num_steps: int
    num_tokens: int
    parameters: Mapping[str, int]
    target_parameters: int | None
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
    score_scale: float | None = None
    eval_rows: int | None = None
    val_loss_se: float | None = None
    val_induction_gain: float | None = None
    val_induction_accuracy: float | None = None
    val_accuracy: float | None = None
    val_solved: float | None = None
    val_bleu: float | None = None
    val_chrf: float | None = None
    val_exact_match: float | None = None
    val_num_sentences: int | None = None
    val_bleu_signature: str | None = None
    val_chrf_signature: str | None = None
    test_accuracy: float | None = None
    test_solved: float | None = None
    test_bleu: float | None = None
    test_chrf: float | None = None
    test_exact_match: float | None = None
    test_num_sentences: int | None = None
    test_bleu_signature: str | None = None
    test_chrf_signature: str | None = None

    @property
    def finished(self) -> bool:
        return self.status == 'finished'

    @property
    def at(self) -> Settings:
        """Its value of every knob."""
        return self.learning_rate, dict(self.settings)['weight_decay'], self.score_scale

    @property
    def key(self) -> tuple:
        """What makes the trial one of its run."""
        return self.seed, self.settings


TEXT, NUMBER, MAPPING = (str,), (int, float), (dict,)
OPTIONAL = (type(None),)
_TRIAL_FIELDS: dict[str, tuple[type, ...]] = {
    'run': TEXT,
    'variant': TEXT,
    'size': TEXT,
    'stage': TEXT,
    'knob': TEXT + OPTIONAL,
    'config_hash': TEXT,
    'trial': MAPPING,
    'status': TEXT,
    'num_steps': (int,),
    'num_tokens': (int,),
    'parameters': MAPPING,
    'target_parameters': NUMBER + OPTIONAL,
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
# Each with val_ or test_ before it; a record may lack them.
_SCORES: dict[str, tuple[type, ...]] = {
    'accuracy': NUMBER,
    'solved': NUMBER,
    'bleu': NUMBER,
    'chrf': NUMBER,
    'exact_match': NUMBER,
    'num_sentences': (int,),
    'bleu_signature': TEXT,
    'chrf_signature': TEXT,
}
_OPTIONAL_FIELDS = {
    f'{split}_{name}': types + OPTIONAL
    for split in ('val', 'test')
    for name, types in _SCORES.items()
} | {
    'eval_rows': (int,) + OPTIONAL,
    'val_loss_se': NUMBER + OPTIONAL,
    'val_induction_gain': NUMBER + OPTIONAL,
    'val_induction_accuracy': NUMBER + OPTIONAL,
}
# Losses and scores: where a finished trial has them, they are numbers one can average.
_FINITE = (
    *(
        f'{split}_{name}'
        for split in ('val', 'test')
        for name in (
            'loss',
            'bits_per_byte',
            *(n for n, types in _SCORES.items() if types == NUMBER),
        )
    ),
    'val_loss_se',
    'val_induction_gain',
    'val_induction_accuracy',
)


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
    optional = {name: types for name, types in _OPTIONAL_FIELDS.items() if name in record}
    check_fields(record, optional)
    check_fields(record['trial'], {'seed': (int,), 'learning_rate': NUMBER, 'weight_decay': NUMBER})
    check_fields(record['parameters'], {'attention': (int,), 'total': (int,)})
    check_fields(record['config'], {'d_model': (int,), 'd_ff': (int,)})
    if 'source' in record['data'] or 'target' in record['data']:
        check_fields(record['data'], {'source': MAPPING, 'target': MAPPING})
    for data in corpora(record['data']):
        check_fields(data, {'name': TEXT, 'version': (str, int)})
    check_stage(record)
    values = {name: record[name] for name in (*_TRIAL_FIELDS, *optional) if name != 'trial'}
    _check_outcome(values)
    if values['config_hash'] != values['run']:
        raise ValueError(
            f'its config_hash {values["config_hash"]!r} is not that of the planned run '
            f'{values["run"]!r}, so it was trained with other settings'
        )
    trial = record['trial']
    settings = tuple(sorted((k, v) for k, v in trial.items() if k != 'seed'))
    return Trial(
        seed=trial['seed'], learning_rate=trial['learning_rate'], settings=settings, **values
    )


def flat(
    record: Mapping[str, Any], separator: str = '.', prefix: str = ''
) -> Iterator[tuple[str, Any]]:
    """(name, value) of every value that is no mapping itself, named 'outer.inner'."""
    for name, value in record.items():
        if isinstance(value, Mapping):
            yield from flat(value, separator, f'{prefix}{name}{separator}')
        else:
            yield f'{prefix}{name}', value


def check_stage(record: Mapping[str, Any]) -> None:
    """Raises ValueError unless stage and knob of a record are known and fit together."""
    stage, knob = record['stage'], record['knob']
    if stage not in STAGES:
        raise ValueError(f"field 'stage' is {stage!r}, expected {', '.join(STAGES)}")
    valid = KNOBS if stage == SCREENING else (None,)
    if knob not in valid:
        listed = ', '.join('null' if name is None else name for name in valid)
        raise ValueError(f"field 'knob' is {knob!r}, expected {listed} at stage {stage!r}")


def corpora(data: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Identities of what a trial was trained on: source and target of parallel text, else one."""
    return (data['source'], data['target']) if 'source' in data else (data,)


def _check_outcome(values: Mapping[str, Any]) -> None:
    if values['status'] not in ('finished', 'diverged'):
        raise ValueError(f"field 'status' is {values['status']!r}, expected finished or diverged")
    if values['status'] == 'diverged':
        return
    if values['val_loss'] is None:
        raise ValueError("field 'val_loss' of a finished trial is None")
    for name in _FINITE:
        if name in values and values[name] is not None and not math.isfinite(values[name]):
            raise ValueError(f'field {name!r} of a finished trial is {values[name]}')
