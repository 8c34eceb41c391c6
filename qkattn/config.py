"""Every setting of a run or a study: typed, frozen, validated before anything compiles.

A config file is a Python file with `get_config()`, which returns a `Config` or a `Study`; single
fields are overridden on the command line as `--config.model.d_model=256`.
"""

import dataclasses
import hashlib
import json
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from ml_collections import config_dict

from qkattn.attention import registry
from qkattn.attention.spec import AttentionSpec, SpecError


class ConfigError(ValueError):
    """A setting that cannot work, said in one sentence that names the field and what is valid."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A pre-norm decoder-only language model.

    Attributes:
      score, value: the attention cell; names, names with options, or import paths.
      d_model: D, width of the residual stream.
      num_layers: L.
      num_heads: N, query heads.
      num_kv_heads: K, key and value heads; None is num_heads.
      head_size: H; None is d_model / num_heads.
      d_ff: F, width of the MLP; None is 4 d_model.
      context: longest sequence in tokens.
      vocab_size: V.
      norm: 'layernorm' (Ba et al. 2016) or 'rmsnorm' (Zhang & Sennrich 2019).
      activation: of the MLP: 'gelu' (exact) or 'gelu_tanh' (its tanh form, as in GPT-2).
      positions: 'learned' or 'sinusoidal' embeddings added to the tokens', 'rope' or 'alibi' inside
        attention, or 'none'.
      qk_norm, score_scale, logit_cap, window: options of attention, see AttentionSpec.
      biases: biases in projections, MLP and layer norms.
      tied_embeddings: the output matrix is the transposed input embedding.
      dropout: rate on embeddings, attention probabilities and both branches of a block.
      remat: recompute a layer's activations in the backward pass.
      scan_unroll: layers unrolled per iteration of the scan over layers; None unrolls all of them
        below 12 layers (a rolled scan costs speed) and none from 12 on (it saves compile time).
      compute_dtype: 'float32' or 'bfloat16'; parameters stay in float32.
    """

    score: str = 'qk'
    value: str = 'vo'
    d_model: int = 128
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int | None = None
    head_size: int | None = None
    d_ff: int | None = None
    context: int = 128
    vocab_size: int = 256
    norm: Literal['layernorm', 'rmsnorm'] = 'layernorm'
    activation: Literal['gelu', 'gelu_tanh'] = 'gelu_tanh'
    positions: Literal['learned', 'sinusoidal', 'rope', 'alibi', 'none'] = 'learned'
    qk_norm: bool = False
    score_scale: float = 1.0
    logit_cap: float | None = None
    window: int | None = None
    biases: bool = False
    tied_embeddings: bool = True
    dropout: float = 0.0
    remat: bool = False
    scan_unroll: int | None = None
    compute_dtype: Literal['float32', 'bfloat16'] = 'float32'

    @property
    def mlp_width(self) -> int:
        return 4 * self.d_model if self.d_ff is None else self.d_ff

    @property
    def unroll(self) -> int:
        if self.scan_unroll is not None:
            return self.scan_unroll
        return self.num_layers if self.num_layers < 12 else 1

    @property
    def attention(self) -> AttentionSpec:
        """The attention layer; SpecError where its sizes do not fit together."""
        if self.head_size is None and self.d_model % self.num_heads:
            raise SpecError(
                f'd_model={self.d_model} must be a multiple of num_heads={self.num_heads}, '
                'or head_size must be given'
            )
        return AttentionSpec(
            score=self.score,
            value=self.value,
            d_model=self.d_model,
            num_heads=self.num_heads,
            num_kv_heads=self.num_heads if self.num_kv_heads is None else self.num_kv_heads,
            head_size=self.head_size or self.d_model // self.num_heads,
            biases=self.biases,
            residual_gain=(2 * self.num_layers) ** -0.5,
            positions=self.positions if self.positions in ('rope', 'alibi') else 'none',
            qk_norm=self.qk_norm,
            score_scale=self.score_scale,
            logit_cap=self.logit_cap,
            window=self.window,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read.

    Attributes:
      name: a dataset of qkattn.data, e.g. 'stdlib'.
      data_dir: where prepared data is cached; None is $QKATTN_DATA or ~/.cache/qkattn.
      eval_sequences: sequences per evaluation, evenly spaced over the split; None is all.
    """

    name: str = 'stdlib'
    data_dir: str | None = None
    eval_sequences: int | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019) with linear warm-up, then decay.

    Attributes:
      warmup_steps: steps from 0 to the peak learning rate.
      schedule: 'linear' or 'cosine' decay to final_fraction of the peak at the last step, or
        'constant'.
      final_fraction: learning rate at the end over the peak.
      beta1, beta2, epsilon: Adam's.
      clip_norm: gradients are scaled down to this global norm; None is off.
    """

    warmup_steps: int = 100
    schedule: Literal['linear', 'cosine', 'constant'] = 'linear'
    final_fraction: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    clip_norm: float | None = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop.

    Attributes:
      num_steps: optimizer steps.
      batch_size: sequences per step and trial.
      accumulation: microbatches per step, weighted by their tokens.
      steps_per_dispatch: steps compiled into one program call.
      log_every, eval_every, checkpoint_every: in steps, multiples of steps_per_dispatch.
      lifting: how the step is lifted over trials: 'vmap' (side by side), 'map' (one after another
        inside the program), or 'auto': the faster in a short measurement, recorded and kept.
      init_from: weights directory or run directory (its first trial) that all trials start from;
        None draws initial weights from the seeds.
    """

    num_steps: int = 1000
    batch_size: int = 16
    accumulation: int = 1
    steps_per_dispatch: int = 10
    log_every: int = 10
    eval_every: int = 100
    checkpoint_every: int = 100
    lifting: Literal['auto', 'vmap', 'map'] = 'auto'
    init_from: str | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialsConfig:
    """The stack of a run: every combination of the three, learning rate outermost.

    Attributes:
      seeds: of initial weights, data order and dropout.
      learning_rates: peaks.
      weight_decays: decoupled, on matrices and embeddings only.
    """

    seeds: tuple[int, ...] = (0,)
    learning_rates: tuple[float, ...] = (2e-3,)
    weight_decays: tuple[float, ...] = (0.1,)

    def trials(self) -> list[dict[str, Any]]:
        return [
            {'seed': seed, 'learning_rate': learning_rate, 'weight_decay': weight_decay}
            for learning_rate in self.learning_rates
            for weight_decay in self.weight_decays
            for seed in self.seeds
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """Devices along each axis; their product is the number of devices used."""

    trial: int = 1
    data: int = 1
    fsdp: int = 1
    tensor: int = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A run: X trials of one architecture."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    trials: TrialsConfig = TrialsConfig()
    mesh: MeshConfig = MeshConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """A weight-matched ablation: variants x sizes, each cell trained as one run.

    Attributes:
      name, question: for the report.
      base: what all cells share.
      baseline: the variant whose weight count the others are matched to.
      variants: 'score/value', with model fields as in 'qk/vo?num_kv_heads=1'.
      sizes: model fields of the baseline at each size, as in 'd_model=128&num_layers=2'.
      match: which weights are made equal: 'total', 'non_embedding', or None for equal shapes.
      fill: the second knob that takes up what d_model leaves: 'd_ff' or None.
      tolerance: largest |residual| accepted, relative to the target.
    """

    name: str = 'study'
    question: str | None = None
    base: Config = Config()
    baseline: str = 'qk/vo'
    variants: tuple[str, ...] = ('qk/vo',)
    sizes: tuple[str, ...] = ('d_model=128',)
    match: Literal['total', 'non_embedding'] | None = 'total'
    fill: Literal['d_ff'] | None = 'd_ff'
    tolerance: float = 1e-3


def validate(config: Config) -> None:
    """Raises ConfigError for the first setting that cannot work."""
    model, train, optimizer = config.model, config.train, config.optimizer
    for section in dataclasses.fields(config):
        _check_types(section.name, getattr(config, section.name))
    for name in ('num_layers', 'num_heads', 'context', 'vocab_size', 'd_model', 'mlp_width'):
        _at_least(f'model.{name}', getattr(model, name), 1)
    if not 0 <= model.dropout < 1:
        raise ConfigError(f'model.dropout={model.dropout} must be at least 0 and below 1')
    if model.scan_unroll is not None:
        _at_least('model.scan_unroll', model.scan_unroll, 1)
    try:
        registry.check(model.attention)
    except SpecError as error:
        raise ConfigError(f'model: {error}') from error

    for field in dataclasses.fields(train):
        if field.name not in ('lifting', 'init_from'):
            _at_least(f'train.{field.name}', getattr(train, field.name), 1)
    if train.batch_size % train.accumulation:
        raise ConfigError(
            f'train.accumulation={train.accumulation} must divide batch_size={train.batch_size}'
        )
    for name in ('num_steps', 'log_every', 'eval_every', 'checkpoint_every'):
        # A record or a checkpoint between two dispatches would be one that nobody can resume to.
        unit = 'steps_per_dispatch' if name in ('num_steps', 'log_every') else 'log_every'
        if getattr(train, name) % getattr(train, unit):
            raise ConfigError(
                f'train.{name}={getattr(train, name)} must be a multiple of '
                f'train.{unit}={getattr(train, unit)}'
            )
    if not 0 <= optimizer.warmup_steps < train.num_steps:
        raise ConfigError(
            f'optimizer.warmup_steps={optimizer.warmup_steps} must be at least 0 and below '
            f'train.num_steps={train.num_steps}'
        )
    for name in ('beta1', 'beta2', 'final_fraction'):
        if not 0 <= getattr(optimizer, name) <= 1:
            raise ConfigError(f'optimizer.{name}={getattr(optimizer, name)} must be in [0, 1]')
    if optimizer.clip_norm is not None and not optimizer.clip_norm > 0:
        raise ConfigError(f'optimizer.clip_norm={optimizer.clip_norm} must be above 0, or None')

    trials = config.trials
    for name in ('seeds', 'learning_rates', 'weight_decays'):
        values = getattr(trials, name)
        if not values or len(set(values)) != len(values):
            raise ConfigError(f'trials.{name}={values} must hold at least one value, none twice')
        if not all(math.isfinite(v) and v >= 0 for v in values):
            raise ConfigError(f'trials.{name}={values} must be finite and not negative')
    if max(trials.seeds) >= 2**31:
        raise ConfigError(f'trials.seeds={trials.seeds} must be below 2**31')
    if config.data.eval_sequences is not None:
        _at_least('data.eval_sequences', config.data.eval_sequences, 1)

    mesh = config.mesh
    for field in dataclasses.fields(mesh):
        _at_least(f'mesh.{field.name}', getattr(mesh, field.name), 1)
    if len(trials.trials()) % mesh.trial:
        raise ConfigError(
            f'mesh.trial={mesh.trial} must divide the number of trials, {len(trials.trials())}'
        )
    microbatch = train.batch_size // train.accumulation
    if microbatch % (mesh.data * mesh.fsdp):
        raise ConfigError(
            f'mesh.data * mesh.fsdp = {mesh.data * mesh.fsdp} must divide the microbatch of '
            f'{microbatch} sequences (train.batch_size / train.accumulation)'
        )


def to_json(config: Any) -> dict[str, Any]:
    """The config as plain JSON values."""
    return json.loads(json.dumps(dataclasses.asdict(config)))


def from_json(cls: type, values: Mapping[str, Any], where: str = '') -> Any:
    """Builds `cls` from nested values; an unknown or ill-typed field raises ConfigError."""
    types_by_field = typing.get_type_hints(cls)
    if unknown := sorted(set(values) - set(types_by_field)):
        raise ConfigError(
            f'unknown field {where}{unknown[0]}; known are {", ".join(types_by_field)}'
        )
    built = {}
    for name, value in values.items():
        expected = types_by_field[name]
        if dataclasses.is_dataclass(expected):
            built[name] = from_json(expected, value, f'{where}{name}.')
        elif typing.get_origin(expected) is tuple and isinstance(value, (list, tuple)):
            built[name] = tuple(value)
        else:
            built[name] = value
    return cls(**built)


def fingerprint(config: Config) -> str:
    """Hash of what a run computes: every field but the mesh, which only says where."""
    values = to_json(config)
    del values['mesh']
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def to_config_dict(config: Config | Study) -> config_dict.ConfigDict:
    """The config as a locked ConfigDict whose optional fields keep their type for overrides."""
    out = config_dict.ConfigDict()
    types_by_field = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_config_dict(value)
        elif type(None) in (options := _options(types_by_field[field.name])):
            concrete = next(o for o in options if o is not type(None))
            reference = config_dict.placeholder(concrete)
            reference.set(value)
            value = reference
        out[field.name] = value
    return out.lock()


def from_config_dict(values: config_dict.ConfigDict) -> Config | Study:
    """Back to the dataclass, after overrides."""
    cls = Study if 'variants' in values else Config
    return from_json(cls, values.to_dict())


def _options(annotation: Any) -> list[type]:
    """The concrete types that a field may hold; a Literal counts as the type of its values."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return [o for arm in typing.get_args(annotation) for o in _options(arm)]
    if typing.get_origin(annotation) is Literal:
        return [type(typing.get_args(annotation)[0])]
    return [typing.get_origin(annotation) or annotation]


def _literals(annotation: Any) -> tuple[Any, ...]:
    if typing.get_origin(annotation) is Literal:
        return typing.get_args(annotation)
    return tuple(v for arm in typing.get_args(annotation) for v in _literals(arm))


def _check_types(where: str, section: Any) -> None:
    types_by_field = typing.get_type_hints(type(section))
    for name, expected in types_by_field.items():
        value, options = getattr(section, name), _options(expected)
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
