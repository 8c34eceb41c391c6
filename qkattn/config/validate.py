"""Validation of the settings of a run, before anything compiles."""

import dataclasses
import math
import typing
from typing import Any, Literal

from qkattn.config import (
    Config,
    DataConfig,
    DecodeConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
    TrialsConfig,
    concrete_types,
)
from qkattn.errors import ConfigError


def validate_settings(config: Config) -> None:
    """Raises ConfigError for the first invalid setting."""
    for section in dataclasses.fields(config):
        check_types(section.name, getattr(config, section.name))
    _check_model(config.model)
    _check_train(config.train)
    _check_optimizer(config.optimizer, config.train.num_steps)
    _check_trials(config.trials, config.optimizer)
    _check_data(config.data)
    check_decode(config.decode)
    _check_mesh(config)


def check_decode(decode: DecodeConfig) -> None:
    """Raises ConfigError for the first invalid setting of the beam search."""
    _at_least('decode.beam', decode.beam, 1)
    if decode.max_sources is not None:
        _at_least('decode.max_sources', decode.max_sources, 1)
    if not 0 <= decode.length_penalty < math.inf:
        raise ConfigError(
            f'decode.length_penalty={decode.length_penalty} must be at least 0 and finite'
        )


def _check_model(model: ModelConfig) -> None:
    for name in ('num_layers', 'num_heads', 'context', 'vocab_size', 'd_model', 'mlp_width'):
        _at_least(f'model.{name}', getattr(model, name), 1)
    for name in ('dropout', 'attention_dropout', 'activation_dropout'):
        rate = getattr(model, name)
        if rate is not None and not 0 <= rate < 1:
            raise ConfigError(f'model.{name}={rate} must be at least 0 and below 1')
    for name in ('init_embedding', 'init_qk', 'init_vo', 'init_mlp'):
        if not 0 < getattr(model, name) < math.inf:
            raise ConfigError(f'model.{name}={getattr(model, name)} must be above 0 and finite')
    if not model.attention_gain and model.norm_position == 'post':
        raise ConfigError(
            'model.attention_gain=False needs model.norm_position=pre: with post, the norm before '
            'attention also ends the branch before it'
        )
    if model.scan_unroll is not None:
        _at_least('model.scan_unroll', model.scan_unroll, 1)
    both = model.kind == 'encoder_decoder'
    for name in ('encoder_variant', 'cross_variant', 'num_encoder_layers', 'source_context'):
        value = getattr(model, name)
        if value is not None and not both:
            raise ConfigError(
                f'model.{name}={value!r} is a setting of an encoder-decoder, but model.kind is '
                f'{model.kind!r}; leave it None or set model.kind to encoder_decoder'
            )
        if isinstance(value, int):
            _at_least(f'model.{name}', value, 1)


def _check_train(train: TrainConfig) -> None:
    for field in dataclasses.fields(train):
        if field.name not in ('lifting', 'init_from', 'label_smoothing'):
            _at_least(f'train.{field.name}', getattr(train, field.name), 1)
    if not 0 <= train.label_smoothing < 1:
        raise ConfigError(
            f'train.label_smoothing={train.label_smoothing} must be at least 0 and below 1'
        )
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
    if not 0 <= optimizer.warmup_steps < num_steps:
        raise ConfigError(
            f'optimizer.warmup_steps={optimizer.warmup_steps} must be at least 0 and below '
            f'train.num_steps={num_steps}'
        )
    if optimizer.schedule == 'inverse_sqrt' and not optimizer.warmup_steps:
        raise ConfigError(
            'optimizer.warmup_steps=0 must be at least 1 with optimizer.schedule=inverse_sqrt, '
            'whose unit is the warm-up'
        )
    for name in ('beta1', 'beta2', 'momentum', 'final_fraction'):
        if not 0 <= getattr(optimizer, name) <= 1:
            raise ConfigError(f'optimizer.{name}={getattr(optimizer, name)} must be in [0, 1]')
    if optimizer.clip_norm is not None and not optimizer.clip_norm > 0:
        raise ConfigError(f'optimizer.clip_norm={optimizer.clip_norm} must be above 0, or None')


def _check_trials(trials: TrialsConfig, optimizer: OptimizerConfig) -> None:
    for name in ('seeds', 'learning_rates', 'weight_decays'):
        values = getattr(trials, name)
        if not values or len(set(values)) != len(values):
            raise ConfigError(f'trials.{name}={values} must hold at least one value, none twice')
        if not all(math.isfinite(v) and v >= 0 for v in values):
            raise ConfigError(f'trials.{name}={values} must be finite and not negative')
    if optimizer.decay == 'independent' and max(trials.weight_decays) >= 0.1:
        raise ConfigError(
            f'trials.weight_decays={trials.weight_decays} must be below 0.1 with '
            "optimizer.decay='independent', which subtracts this fraction in every step at the "
            'peak, e.g. 5e-4; for a published decay that is multiplied by the learning rate, set '
            "optimizer.decay='coupled'"
        )
    if max(trials.seeds) >= 2**31:
        raise ConfigError(f'trials.seeds={trials.seeds} must be below 2**31')


def _check_data(data: DataConfig) -> None:
    if data.eval_sequences is not None:
        _at_least('data.eval_sequences', data.eval_sequences, 1)
    _at_least('data.tokenizer_size', data.tokenizer_size, 1)
    if not 0 < data.mask_rate < 1:
        raise ConfigError(f'data.mask_rate={data.mask_rate} must be above 0 and below 1')


def _check_mesh(config: Config) -> None:
    mesh, trials, train = config.mesh, config.trials.trials(), config.train
    for field in dataclasses.fields(mesh):
        _at_least(f'mesh.{field.name}', getattr(mesh, field.name), 1)
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


def check_types(where: str, section: Any) -> None:
    """Raises ConfigError where a field of a dataclass holds a value of another type."""
    types_by_field = typing.get_type_hints(type(section))
    for name, expected in types_by_field.items():
        value, options = getattr(section, name), concrete_types(expected)
        fits = isinstance(value, tuple(options)) or (float in options and isinstance(value, int))
        if not fits or (isinstance(value, bool) and bool not in options):
            wanted = ' or '.join('None' if o is type(None) else o.__name__ for o in options)
            raise ConfigError(f'{where}.{name}={value!r} must be of type {wanted}')
        literals = _literals(expected)
        if literals and value is not None and value not in literals and type(None) not in options:
            raise ConfigError(f'{where}.{name}={value!r} must be one of {", ".join(literals)}')
        if typing.get_origin(expected) is tuple:
            item = typing.get_args(expected)[0]
            accepted = (int, float) if item is float else item
            if any(isinstance(v, bool) or not isinstance(v, accepted) for v in value):
                raise ConfigError(f'{where}.{name}={value!r} must hold {item.__name__} values')


def _at_least(where: str, number: int, least: int) -> None:
    if number < least:
        raise ConfigError(f'{where}={number} must be at least {least}')
