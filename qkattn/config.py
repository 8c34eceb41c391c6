"""Every setting of a run or a study: typed, frozen, validated before anything compiles.

A config file is a Python file with `get_config()`, which returns a `Config` or a `Study`; single
fields are overridden on the command line as `--config.model.d_model=256`.
"""

import dataclasses
import hashlib
import json
import types
import typing
from collections.abc import Mapping
from typing import Any, Literal

from ml_collections import config_dict

from qkattn.model_config import ModelConfig


class ConfigError(ValueError):
    """A setting that cannot work, said in one sentence that names the field and what is valid."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """What is read.

    Attributes:
      name: 'stdlib', 'tiny_shakespeare' or 'text' for language models; 'multi30k', 'cldr' or
        'parallel' for translation; 'tfds:NAME' or 'tfds:NAME/CONFIG' for either; or a probe with
        its options, as in 'recall(pairs=8)'. See qkattn/data/README.md.
      data_dir: where prepared data is cached; None is $QKATTN_DATA or ~/.cache/qkattn.
      manual_dir: where files that were fetched by hand lie, instead of a download.
      path: the files of 'text' and 'parallel'.
      languages: source and target of a translation set, as in 'en-de'.
      feature: which feature of a tfds set is its text, where it has several.
      lowercase: text is lower-cased before it is tokenised.
      tokenizer: 'bytes', 'characters' or 'bpe'; the latter two are learned from the training
        split, and for translation from both languages together.
      tokenizer_size: pieces of a 'bpe' vocabulary.
      mask_rate: part of the tokens that an encoder has to restore.
      shift_windows: windows of text begin at an offset drawn for every epoch, so that a token is
        not always seen behind the same context.
      drop_long: sentence pairs that do not fit into the model are left out, from evaluation too;
        otherwise they are an error.
      eval_sequences: rows per evaluation, evenly spaced over the split; None is all.
    """

    name: str = 'stdlib'
    data_dir: str | None = None
    manual_dir: str | None = None
    path: str | None = None
    languages: str | None = None
    feature: str | None = None
    lowercase: bool = False
    tokenizer: Literal['bytes', 'characters', 'bpe'] = 'bytes'
    tokenizer_size: int = 8192
    mask_rate: float = 0.15
    shift_windows: bool = False
    drop_long: bool = False
    eval_sequences: int | None = None


# Schedules that come down to final_fraction, and how far down counts as annealed.
DECAYS, ANNEALED = ('linear', 'cosine'), 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """AdamW (Loshchilov & Hutter 2019) with linear warm-up, then decay.

    Attributes:
      warmup_steps: steps from 0 to the peak learning rate.
      schedule: 'linear' or 'cosine' decay to final_fraction of the peak at the last step,
        'constant', or 'inverse_sqrt', sqrt(W / step) behind a warm-up of W steps (Vaswani et al.
        2017, section 5.3), which no number of steps ends.
      final_fraction: learning rate at the end over the peak, of 'linear' and 'cosine'.
      beta1, beta2, epsilon: Adam's.
      clip_norm: gradients are scaled down to this global norm; None is off.
    """

    warmup_steps: int = 100
    schedule: Literal['linear', 'cosine', 'constant', 'inverse_sqrt'] = 'linear'
    final_fraction: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    clip_norm: float | None = 1.0

    @property
    def anneals(self) -> bool:
        """Whether the learning rate comes down to a tenth of its peak or less."""
        return self.schedule in DECAYS and self.final_fraction <= ANNEALED


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """The loop.

    Attributes:
      num_steps: optimizer steps.
      batch_size: sequences per step and trial.
      accumulation: microbatches per step, weighted by their tokens.
      label_smoothing: weight of the uniform distribution in the training target (Szegedy et al.
        2016, section 7); evaluation is without.
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
    label_smoothing: float = 0.0
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
class DecodeConfig:
    """How translations are searched for when a run ends and by experiments.translate.

    Attributes:
      beam: hypotheses kept; 1 is greedy.
      length_penalty: a in score / length^a.
      max_sources: sentences of each split that are translated for BLEU; None is all.
    """

    beam: int = 5
    length_penalty: float = 1.0
    max_sources: int | None = None


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
    decode: DecodeConfig = DecodeConfig()
    mesh: MeshConfig = MeshConfig()


@dataclasses.dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """How each arm of a study finds settings of its own before its verdict.

    The grids are trials.learning_rates, trials.weight_decays and score_scales. Those with several
    values are tuned, one after another, each at the middle of the grids still to come: they must
    ascend by one factor (2 is usual) and are extended by it until the best value has a worse one on
    both sides.

    Attributes:
      seeds: of the screening trials; none of trials.seeds, which are kept for the verdict. Empty:
        nothing is tuned, every combination is run with trials.seeds, and there is no verdict.
      max_points: most values tried of each setting; an arm that needs more is reported as not
        bracketed.
      score_scales: grid of model.score_scale; empty leaves it as it is.
    """

    seeds: tuple[int, ...] = ()
    max_points: int = 9
    score_scales: tuple[float, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True)
class Study:
    """An ablation at equal cost: arms x sizes, each arm at settings of its own.

    Attributes:
      name, question: for the report.
      base: what all arms share; trials.seeds are those of the verdict, trials.learning_rates and
        trials.weight_decays the grids.
      baseline: the variant that the others are matched to and compared with.
      variants: 'score/value', with model fields as in 'qk/vo?num_kv_heads=1'.
      sizes: model fields of the baseline at each size, as in 'd_model=128&num_layers=2'.
      match: what is made equal: 'total' or 'non_embedding' weights, 'flops' per token, 'cache'
        bytes per token, or None for equal shapes.
      destinations: where the weights go that a variant saves, each of them an arm of its own:
        'd_model', 'd_ff', 'num_heads' (of the baseline's size), 'num_layers'.
      fill: the second knob that takes up what the first leaves: 'd_ff' or None.
      tolerance: largest |residual| accepted, relative to the target.
      tuning: how settings are found.
      margin: differences of the loss below it, in nats per token, count as none (equivalence).
    """

    name: str = 'study'
    question: str | None = None
    base: Config = Config()
    baseline: str = 'qk/vo'
    variants: tuple[str, ...] = ('qk/vo',)
    sizes: tuple[str, ...] = ('d_model=128',)
    match: Literal['total', 'non_embedding', 'flops', 'cache'] | None = 'total'
    destinations: tuple[str, ...] = ('d_model',)
    fill: Literal['d_ff'] | None = 'd_ff'
    tolerance: float = 1e-3
    tuning: TuningConfig = TuningConfig()
    margin: float = 0.005


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
    """Hash of what a run computes: every field but those that only say where.

    These are the mesh and the directories of data, whose contents a run checks by fingerprints of
    their own.
    """
    return fingerprint_of(to_json(config))


def fingerprint_of(values: Mapping[str, Any]) -> str:
    """The fingerprint of a config that was written down by `to_json`."""
    values = {name: value for name, value in values.items() if name != 'mesh'}
    where = ('data_dir', 'manual_dir')
    values['data'] = {k: v for k, v in values['data'].items() if k not in where}
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:12]


def to_config_dict(config: Config | Study) -> config_dict.ConfigDict:
    """The config as a locked ConfigDict whose optional fields keep their type for overrides."""
    out = config_dict.ConfigDict()
    types_by_field = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if dataclasses.is_dataclass(value):
            value = to_config_dict(value)
        elif type(None) in (options := concrete_types(types_by_field[field.name])):
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


def concrete_types(annotation: Any) -> list[type]:
    """The concrete types that a field may hold; a Literal counts as the type of its values."""
    if typing.get_origin(annotation) in (types.UnionType, typing.Union):
        return [o for arm in typing.get_args(annotation) for o in concrete_types(arm)]
    if typing.get_origin(annotation) is Literal:
        return [type(typing.get_args(annotation)[0])]
    return [typing.get_origin(annotation) or annotation]
