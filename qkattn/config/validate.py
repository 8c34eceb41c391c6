"""Validation of the settings of a run, before anything compiles."""

import dataclasses
import typing
from typing import Any, Literal

from qkattn.config import (
    Config,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrialsConfig,
    concrete_types,
)
from qkattn.config.setting import Bounds
from qkattn.errors import ConfigError

# Widest heads of one layer together, N H.
MAX_HEADS_WIDTH = 2**24


def validate_settings(config: Config) -> None:
    """Raises ConfigError for the first invalid setting."""
    check_section('', config)
    _check_model(config.model)
    _check_train(config.train)
    _check_optimizer(config.optimizer, config.train.num_steps)
    _check_weight_decays(config.trials, config.optimizer)
    _check_mesh(config)


def check_section(where: str, section: Any) -> None:
    """Raises ConfigError where a field, or one of a nested section, is not what it declares.

    Args:
      where: the prefix of the fields' names in messages, as in 'model.'.
    """
    kinds = typing.get_type_hints(type(section))
    for field in dataclasses.fields(section):
        name, value, kind = f'{where}{field.name}', getattr(section, field.name), kinds[field.name]
        if 'bounds' in field.metadata:
            _check_field(name, value, kind, field.metadata['bounds'])
        elif isinstance(value, kind):
            check_section(f'{name}.', value)
        else:
            raise ConfigError(f'{name}={_shown(value)} must be a {kind.__name__}')


def _check_field(name: str, value: Any, kind: Any, bounds: Bounds) -> None:
    several, options = typing.get_origin(kind) is tuple, concrete_types(kind)
    optional = ', or None' if type(None) in options else ''

    def must(words: str) -> ConfigError:
        return ConfigError(f'{name}={_shown(value)} must {words}{optional}')

    if value is None and optional:
        return
    if several and isinstance(value, tuple):
        options = concrete_types(typing.get_args(kind)[0])
    entries, of_type = value if several and isinstance(value, tuple) else (value,), options[0]
    if not all(_is_a(of_type, entry) for entry in entries):
        raise must(
            f'hold {of_type.__name__} values' if several else f'be of type {of_type.__name__}'
        )
    literals = _literals(kind)
    if literals and not set(entries) <= set(literals):
        raise must(f'{"hold" if several else "be one of"} {", ".join(literals)}')
    if not all(bounds.admit(of_type, entry) for entry in entries):
        raise must(f'{"hold values that are" if several else "be"} {bounds.words(of_type)}')
    if bounds.filled and not entries:
        raise must('hold at least one value, none twice')
    if len(set(entries)) < len(entries):
        raise must('hold no value twice')


def _check_model(model: ModelConfig) -> None:
    width = model.num_heads * (model.head_size or 1)
    if width > MAX_HEADS_WIDTH:
        raise ConfigError(
            f'model.num_heads * model.head_size = {width} must be at most {MAX_HEADS_WIDTH}'
        )
    if not model.attention_gain and model.norm_position == 'post':
        raise ConfigError(
            'model.attention_gain=False needs model.norm_position=pre: with post, the norm before '
            'attention also ends the branch before it'
        )
    if model.kind == 'encoder_decoder':
        return
    for name in ('encoder_variant', 'cross_variant', 'num_encoder_layers', 'source_context'):
        if (value := getattr(model, name)) is not None:
            raise ConfigError(
                f'model.{name}={value!r} is a setting of an encoder-decoder, but model.kind is '
                f'{model.kind!r}; leave it None or set model.kind to encoder_decoder'
            )


def _check_train(train: TrainConfig) -> None:
    if train.batch_size % train.accumulation:
        raise ConfigError(
            f'train.accumulation={train.accumulation} must divide batch_size={train.batch_size}'
        )
    for name in ('num_steps', 'log_every', 'eval_every', 'checkpoint_every'):
        # A run can only resume between two dispatches.
        unit = 'steps_per_dispatch' if name in ('num_steps', 'log_every') else 'log_every'
        if getattr(train, name) % getattr(train, unit):
            raise ConfigError(
                f'train.{name}={getattr(train, name)} must be a multiple of '
                f'train.{unit}={getattr(train, unit)}'
            )


def _check_optimizer(optimizer: OptimizerConfig, num_steps: int) -> None:
    if optimizer.warmup_steps >= num_steps:
        raise ConfigError(
            f'optimizer.warmup_steps={optimizer.warmup_steps} must be below '
            f'train.num_steps={num_steps}'
        )
    if optimizer.schedule == 'inverse_sqrt' and not optimizer.warmup_steps:
        raise ConfigError(
            'optimizer.warmup_steps=0 must be at least 1 with optimizer.schedule=inverse_sqrt, '
            'whose unit is the warm-up'
        )


def _check_weight_decays(trials: TrialsConfig, optimizer: OptimizerConfig) -> None:
    if optimizer.decay == 'independent' and max(trials.weight_decays) >= 0.1:
        raise ConfigError(
            f'trials.weight_decays={trials.weight_decays} must be below 0.1 with '
            "optimizer.decay='independent', which subtracts this fraction in every step at the "
            'peak, e.g. 5e-4; for a published decay that is multiplied by the learning rate, set '
            "optimizer.decay='coupled'"
        )


def _check_mesh(config: Config) -> None:
    mesh, trials, train = config.mesh, config.trials.trials(), config.train
    if len(trials) % mesh.trial:
        raise ConfigError(
            f'mesh.trial={mesh.trial} must divide the number of trials, {len(trials)}'
        )
    microbatch = train.batch_size // train.accumulation
    if microbatch % (mesh.data * mesh.fsdp):
        raise ConfigError(
            f'mesh.data * mesh.fsdp = {mesh.data * mesh.fsdp} must divide the microbatch of '
            f'{microbatch} sequences (train.batch_size / train.accumulation)'
        )


def _literals(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    return tuple(v for arm in typing.get_args(annotation) for v in _literals(arm))


def _is_a(kind: type, value: Any) -> bool:
    """Whether `value` is of this type; an int counts as a float, True and False as no number."""
    if isinstance(value, bool):
        return kind is bool
    return isinstance(value, (int, float) if kind is float else kind)


def _shown(value: Any) -> str:
    """The value in a message, cut where it is long."""
    try:
        text = repr(value)
    except ValueError:  # Python prints integers of up to 4,300 digits
        return 'an integer of over 4,300 digits'
    return text if len(text) <= 200 else f'{text[:100]}...{text[-50:]}'
