"""The settings of a run, and checks for conflicts between them."""

import dataclasses
import itertools
from collections.abc import Iterator
from typing import Any, Literal

from qkattn.config.model_config import RATE, ModelConfig
from qkattn.config.setting import check_section, setting
from qkattn.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset, its tokenizer, and the rows that are cut from it."""

    name: str = setting(
        'stdlib',
        'A corpus, a translation set, a set of a catalogue, a probe with options, as in '
        "'recall(pairs=8)', or an import path. See docs/data.md.",
        registries=(
            'qkattn.data.corpora.corpus_registry:CORPORA',
            'qkattn.data.tasks.probe_tasks:PROBES',
        ),
        path=True,
    )
    data_dir: str | None = setting(
        None, 'Where prepared data is cached; None is $QKATTN_DATA or ~/.cache/qkattn.', path=True
    )
    manual_dir: str | None = setting(None, 'Directory of files downloaded by hand.', path=True)
    path: str | None = setting(None, "Files of 'text', 'parallel' and 'tokens'.", path=True)
    languages: str | None = setting(
        None, "Source and target of a translation set, as in 'en-de'.", path=True
    )
    feature: str | None = setting(
        None, "Text feature of a tfds set, column of an hf set, or field of records of 'text'."
    )
    documents: str | None = setting(
        None,
        "What is a document of 'tokens' of another tool ('id=50256': what this id separates, "
        "'tokens=8192': a block) or of long texts ('blank_line', 'kB=16', or a regular expression "
        'at whose matches documents begin). See docs/data.md.',
    )
    token_dtype: Literal['uint8', 'uint16', 'uint32'] | None = setting(
        None, "Type of the ids of 'tokens' in files without a header; None is uint16."
    )
    lowercase: bool = setting(False, 'Text is lower-cased before it is tokenized.')
    tokenizer: str = setting(
        'bytes',
        'A name, a .json file of Hugging Face tokenizers, tiktoken:NAME, or an import path. '
        "'characters' and 'bpe' are learned from the training split; 'tokens' have their own.",
        registries=('qkattn.data.tokenizers.vocabulary:KINDS',),
        path=True,
    )
    tokenizer_size: int = setting(8192, "Ids of a 'bpe' vocabulary, at least 257.", least=1)
    carve_test: bool = setting(False, 'Carves a missing test split, a tenth of train.')
    task: str | None = setting(
        None,
        'A task by name or import path; None is the one for model.kind and the data.',
        registries=('qkattn.data.tasks.task_registry:TASKS',),
        path=True,
    )
    mask_rate: float = setting(
        0.15, 'Fraction of tokens that an encoder predicts.', above=0, below=1
    )
    shift_windows: bool = setting(False, 'Windows of text start at an offset drawn per epoch.')
    cross_documents: bool = setting(
        True,
        'Tokens of a text attend to earlier documents in their row. With False, in a decoder, they '
        'attend to their own document alone, and positions count from its beginning.',
    )
    drop_long: bool = setting(
        False,
        'Sentence pairs that do not fit into the model are left out; by default they are an error.',
    )
    eval_sequences: int | None = setting(
        None, 'Rows per evaluation, evenly spaced over the split; None is all.', least=1
    )
    evaluate: tuple[str, ...] = setting(
        (),
        'Further corpora on which a model of text is evaluated, and which decide nothing: names as '
        "in data.name, with a path and a split as in 'text:PATH', 'tokens:DIR' and "
        "'tiny_shakespeare@test'; '@train' is of the data itself. See docs/data.md.",
        path=True,
    )


# The largest num_heads * head_size.
MAX_HEADS_WIDTH = 2**24
# Schedules that decay to final_fraction.
DECAYS = ('linear', 'cosine', 'wsd')
# The largest final_fraction of a run that counts as annealed.
ANNEALED = 0.1
# The exclusive upper bound of weight decays with optimizer.decay='independent'.
INDEPENDENT_END = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer and its learning-rate schedule, which begins with a linear warm-up.

    The peak learning rate and the weight decay are settings of each trial (`TrialsConfig`).
    """

    name: str = setting(
        'adamw',
        "A name, or an import path with options, as in 'my.module:lion(b1=0.9)'. 'muon' trains all "
        'but the matrices of blocks by Adam (Jordan et al. 2024).',
        registries=('qkattn.train.optimizer:OPTIMIZERS',),
    )
    warmup_steps: int = setting(100, 'Steps from 0 to the peak learning rate.', least=0)
    schedule: str = setting(
        'linear',
        "Rate after the warm-up: 'linear' and 'cosine' decay to final_fraction of the peak after "
        "the last step; 'wsd' stays at the peak and decays linearly in the last decay_fraction of "
        "the steps (Hu et al. 2024); 'inverse_sqrt' is sqrt(W / step) after W warm-up steps "
        '(Vaswani et al. 2017). Or an import path.',
        registries=('qkattn.train.optimizer:SCHEDULES',),
    )
    final_fraction: float = setting(
        0.0, 'Final learning rate over the peak, where the schedule decays.', least=0, most=1
    )
    decay_fraction: float = setting(
        0.1, "Fraction of the steps, the last ones, in which 'wsd' decays.", above=0, most=1
    )
    beta1: float = setting(0.9, 'Decay of the first moment in Adam.', least=0, below=1)
    beta2: float = setting(0.99, 'Decay of the second moment in Adam.', least=0, below=1)
    epsilon: float = setting(1e-8, 'Added to the root in Adam and Muon.', above=0)
    momentum: float = setting(0.95, "Momentum of 'muon' and 'sgd'.", least=0, most=1)
    clip_norm: float | None = setting(1.0, 'Largest norm of the gradient; None is off.', above=0)
    decay: Literal['independent', 'coupled'] = setting(
        'independent',
        "'independent' subtracts fraction(step) * weight_decay * p in each step, whatever the peak "
        'learning rate (Wortsman et al. 2023, section 3.2.2), where fraction is the schedule, 0 to '
        "1; 'coupled' subtracts learning_rate(step) * weight_decay * p, as in optax. Biases and "
        'gains do not decay.',
    )

    @property
    def anneals(self) -> bool:
        """Whether the learning rate decays to a tenth of its peak or less."""
        return self.decays and self.final_fraction <= ANNEALED

    @property
    def decays(self) -> bool:
        """Whether the schedule ends at final_fraction."""
        # Schedules from outside the package are required to end there.
        is_from_outside = ':' in self.schedule
        return is_from_outside or self.schedule.removesuffix('()') in DECAYS

    def wsd_decay_steps(self, num_steps: int) -> int:
        """The number of last steps in which 'wsd' decays, at least one."""
        return max(round(self.decay_fraction * num_steps), 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Number of steps, batch size, and how often to log, evaluate and save."""

    num_steps: int = setting(1000, 'Optimizer steps.', least=1)
    batch_size: int = setting(16, 'Sequences per step and trial.', least=1)
    accumulation: int = setting(1, 'Microbatches per step, weighted by their tokens.', least=1)
    label_smoothing: float = setting(0.0, 'Weight of a uniform distribution in targets.', **RATE)
    z_loss: float = setting(
        0.0,
        'Coefficient of (log Z)^2 in what is minimized, where Z is the sum of exp(logits); 1e-4 in '
        'PaLM (Chowdhery et al. 2022, section 5). Losses that are logged leave it out.',
        least=0,
    )
    steps_per_dispatch: int = setting(10, 'Steps compiled into one program call.', least=1)
    log_every: int = setting(10, 'Steps per record; a multiple of steps_per_dispatch.', least=1)
    eval_every: int = setting(100, 'Steps per evaluation; a multiple of log_every.', least=1)
    checkpoint_every: int = setting(100, 'Steps per checkpoint; a multiple of log_every.', least=1)
    keep: int = setting(2, 'Newest checkpoints that are kept.', least=2)
    lifting: Literal['auto', 'vmap', 'map'] = setting(
        'auto', "Trials run as 'vmap' (at once), 'map' (in turn), or 'auto', as is faster."
    )
    metrics: tuple[str, ...] = setting(
        (), 'Further metrics of an evaluation, by import path (docs/outside.md#a-metric).'
    )
    logits_chunk: int | None = setting(
        None, 'Positions whose logits are held at a time; None is all, B T V floats.', least=1
    )
    init_from: str | None = setting(
        None, 'Exported parameters or a run (trial 0) to start all trials from.', path=True
    )
    sinks: tuple[str, ...] = setting(
        (),
        'Further logs, by name or the import path of a class (docs/outside.md).',
        registries=('qkattn.storage.sinks:SINKS',),
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrialsConfig:
    """The trials of a run: all combinations of learning rate, weight decay and seed."""

    seeds: tuple[int, ...] = setting(
        (0,), 'Seeds of initialization, data order and dropout.', least=0, filled=True
    )
    learning_rates: tuple[float, ...] = setting((2e-3,), 'Rates at the peak.', least=0, filled=True)
    weight_decays: tuple[float, ...] = setting(
        (5e-4,),
        'Weight decays of matrices and embeddings; see optimizer.decay.',
        least=0,
        filled=True,
    )

    def trials(self) -> list[dict[str, Any]]:
        """Returns the trials in the order in which arrays have them: all seeds of a setting first.

        For example, [{'seed': 0, 'learning_rate': 0.002, 'weight_decay': 0.0005}, ...].
        """
        trials = []
        for learning_rate in self.learning_rates:
            for weight_decay in self.weight_decays:
                for seed in self.seeds:
                    trials.append(
                        {'seed': seed, 'learning_rate': learning_rate, 'weight_decay': weight_decay}
                    )
        return trials


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Beam search at the end of a translation run and in experiments.translate."""

    beam: int = setting(5, 'Number of hypotheses; 1 is greedy.', least=1)
    length_penalty: float = setting(1.0, 'a in score / length^a.', least=0)
    max_sources: int | None = setting(
        None, 'Sentences of each split that are translated for BLEU; None is all.', least=1
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MeshConfig:
    """The number of devices along each mesh axis; the product is the number of devices used."""

    trial: int = setting(1, 'Devices over which the trials are split.', least=1)
    data: int = setting(1, 'Devices over which the sequences of a microbatch are split.', least=1)
    fsdp: int = setting(1, 'Devices over which sequences and parameters are split.', least=1)
    tensor: int = setting(1, 'Devices over which heads and the MLP are split.', least=1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """All settings of a run, which trains several trials of one model."""

    model: ModelConfig = ModelConfig()
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    train: TrainConfig = TrainConfig()
    trials: TrialsConfig = TrialsConfig()
    decode: DecodeConfig = DecodeConfig()
    mesh: MeshConfig = MeshConfig()


def validate_settings(config: Config) -> None:
    """Raises ConfigError for the first invalid setting or the first conflict between settings."""
    check_section('', config)
    conflicts = itertools.chain(
        _model_conflicts(config.model),
        _optimizer_conflicts(config),
        _train_conflicts(config.train),
        _mesh_conflicts(config),
    )
    first_conflict = next(conflicts, None)
    if first_conflict is not None:
        raise ConfigError(first_conflict)


def _model_conflicts(model: ModelConfig) -> Iterator[str]:
    """Yields an error message for each conflict between settings of the model."""
    head_size = model.head_size or 1  # None stands for d_model / num_heads, never too large
    heads_width = model.num_heads * head_size
    if heads_width > MAX_HEADS_WIDTH:
        yield f'model.num_heads * model.head_size = {heads_width} must be at most {MAX_HEADS_WIDTH}'
    if not model.attention_gain and model.norm_position == 'post':
        yield 'model.attention_gain=False needs model.norm_position=pre'
    if model.kind != 'encoder_decoder':
        for field in ('encoder_variant', 'cross_variant', 'num_encoder_layers', 'source_context'):
            value = getattr(model, field)
            if value is not None:
                yield (
                    f'model.{field}={value!r} is a setting of an encoder-decoder, not of '
                    f'{model.kind}'
                )
    if model.kind == 'encoder' and model.context < 2:
        yield f'model.context={model.context} must be at least 2 in an encoder'


def _optimizer_conflicts(config: Config) -> Iterator[str]:
    """Yields an error message for each conflict of an optimizer setting."""
    optimizer = config.optimizer
    num_steps = config.train.num_steps
    weight_decays = config.trials.weight_decays
    optimizer_name, _, _ = optimizer.name.partition('(')  # without options
    schedule = optimizer.schedule.removesuffix('()')  # 'wsd()' is the same as 'wsd'

    if optimizer_name == 'muon' and optimizer.momentum == 1:
        yield "optimizer.momentum=1 must be below 1 with optimizer.name='muon'"

    if optimizer.warmup_steps >= num_steps:
        yield (
            f'optimizer.warmup_steps={optimizer.warmup_steps} must be below '
            f'train.num_steps={num_steps}'
        )
    if schedule == 'inverse_sqrt' and optimizer.warmup_steps == 0:
        yield 'optimizer.warmup_steps=0 must be at least 1 with optimizer.schedule=inverse_sqrt'
    if schedule == 'wsd':
        # The decay must not begin before the end of the warm-up.
        decay_steps = optimizer.wsd_decay_steps(num_steps)
        steps_after_warmup = num_steps - optimizer.warmup_steps
        if decay_steps > steps_after_warmup:
            yield (
                f'optimizer.decay_fraction={optimizer.decay_fraction} must leave room for '
                f'optimizer.warmup_steps={optimizer.warmup_steps}: it decays in {decay_steps} of '
                f'train.num_steps={num_steps}'
            )

    if optimizer.decay == 'independent' and max(weight_decays) >= INDEPENDENT_END:
        yield (
            f'trials.weight_decays={weight_decays} must be below {INDEPENDENT_END} with '
            "optimizer.decay='independent', which subtracts that fraction in every step; "
            "optimizer.decay='coupled' multiplies it by the learning rate"
        )


def _train_conflicts(train: TrainConfig) -> Iterator[str]:
    """Yields an error message for each number of steps or rows that is not a valid multiple."""
    if train.batch_size % train.accumulation:
        yield f'train.accumulation={train.accumulation} must divide batch_size={train.batch_size}'

    divisor_of_field = {
        'num_steps': 'steps_per_dispatch',
        'log_every': 'steps_per_dispatch',
        'eval_every': 'log_every',
        'checkpoint_every': 'log_every',
    }
    for field, divisor_field in divisor_of_field.items():
        steps = getattr(train, field)
        divisor = getattr(train, divisor_field)
        if steps % divisor:
            yield f'train.{field}={steps} must be a multiple of train.{divisor_field}={divisor}'


def _mesh_conflicts(config: Config) -> Iterator[str]:
    """Yields an error message for each mesh axis that does not divide the trials or sequences."""
    mesh = config.mesh
    num_trials = len(config.trials.trials())
    if num_trials % mesh.trial:
        yield f'mesh.trial={mesh.trial} must divide the number of trials, {num_trials}'
    microbatch = config.train.batch_size // config.train.accumulation
    row_devices = mesh.data * mesh.fsdp
    if microbatch % row_devices:
        yield f'mesh.data * mesh.fsdp = {row_devices} must divide the microbatch of {microbatch}'
