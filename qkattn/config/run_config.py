"""The settings of a run."""

import dataclasses
from typing import Any, Literal

from qkattn.config.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """The dataset, its tokenizer, and the rows that are cut from it.

    Attributes:
      name: 'stdlib', 'tiny_shakespeare' or 'text' for language models; 'multi30k', 'cldr' or
        'parallel' for translation; 'tfds:NAME' or 'tfds:NAME/CONFIG' for either; or a probe with
        its options, as in 'recall(pairs=8)'. See docs/data.md.
      data_dir: where prepared data is cached; None is $QKATTN_DATA or ~/.cache/qkattn.
      manual_dir: directory of files that were downloaded by hand.
      path: the files of 'text' and 'parallel'.
      languages: source and target of a translation set, as in 'en-de'.
      feature: which feature of a tfds set is its text, where it has several.
      lowercase: text is lower-cased before it is tokenised.
      tokenizer: 'bytes', 'characters' or 'bpe'; the latter two are learned from the training
        split, and for translation from both languages together.
      tokenizer_size: number of ids of a 'bpe' vocabulary, at least 257.
      mask_rate: fraction of the tokens that an encoder has to restore.
      shift_windows: windows of text begin at an offset drawn for every epoch, so that the context
        of a token varies.
      drop_long: leaves out sentence pairs that do not fit into the model, in evaluation too;
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


# Schedules that decay to final_fraction, and the fraction at which a run counts as annealed.
DECAYS, ANNEALED = ('linear', 'cosine'), 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """The optimizer, and the learning rate over the steps: linear warm-up, then a schedule.

    Attributes:
      name: 'adamw' (Loshchilov & Hutter 2019), 'muon' (Jordan et al. 2024; parameters outside the
        blocks, biases and gains by Adam), 'sgd' (with momentum), or the import path of a function,
        as in 'my_package.my_module:lion(b1=0.9)'.
      warmup_steps: steps from 0 to the peak learning rate.
      schedule: 'linear' or 'cosine' decay to final_fraction of the peak at the last step,
        'constant', or 'inverse_sqrt', sqrt(W / step) after a warm-up of W steps (Vaswani et al.
        2017, section 5.3), which does not depend on num_steps; or the import path of a function.
      final_fraction: learning rate at the end over the peak, of 'linear', 'cosine' and schedules
        from outside.
      beta1, beta2, epsilon: of Adam; Muon reads epsilon too.
      momentum: of 'muon' and 'sgd'.
      clip_norm: gradients are scaled down to this global norm; None is off.
      decay: 'independent' subtracts fraction(step) * weight_decay * p in each step, whatever the
        peak learning rate, so that arms tuned to different rates decay alike (Wortsman et al.
        2023, section 3.2.2); 'coupled' subtracts learning_rate(step) * weight_decay * p, as in
        PyTorch and optax. fraction(step) is the schedule, from 0 to 1. Matrices and embeddings
        decay; biases and gains do not. The gain of the norm before attention is then an undecayed
        diagonal factor of W_Q, W_K and W_V, and the only one where one of them is the identity;
        `model.attention_gain=False` removes it.
    """

    name: str = 'adamw'
    warmup_steps: int = 100
    schedule: str = 'linear'
    final_fraction: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.99
    epsilon: float = 1e-8
    momentum: float = 0.95
    clip_norm: float | None = 1.0
    decay: Literal['independent', 'coupled'] = 'independent'

    @property
    def anneals(self) -> bool:
        """Whether the learning rate decays to a tenth of its peak or less."""
        return self.decays and self.final_fraction <= ANNEALED

    @property
    def decays(self) -> bool:
        """Whether the schedule ends at final_fraction; one from outside is checked to."""
        return self.schedule in DECAYS or ':' in self.schedule


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Steps, batches and how often the loop logs, evaluates and saves.

    Attributes:
      num_steps: optimizer steps.
      batch_size: sequences per step and trial.
      accumulation: microbatches per step, weighted by their tokens.
      label_smoothing: weight of the uniform distribution in the training target (Szegedy et al.
        2016, section 7); not used in evaluation.
      steps_per_dispatch: steps compiled into one program call.
      log_every, eval_every, checkpoint_every: in steps, multiples of steps_per_dispatch.
      lifting: how the step is lifted over trials: 'vmap' (side by side), 'map' (one after another
        inside the program), or 'auto': the faster in a short measurement, recorded and kept.
      init_from: exported parameters, or a run directory (its first trial), from which all trials
        start; None initializes from the seeds.
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
    """The trials of a run: every combination of the three, learning rate outermost.

    Attributes:
      seeds: of initialization, data order and dropout.
      learning_rates: peaks.
      weight_decays: of matrices and embeddings, as `optimizer.decay` says: independent ones are
        fractions lost per step at the peak of the schedule.
    """

    seeds: tuple[int, ...] = (0,)
    learning_rates: tuple[float, ...] = (2e-3,)
    weight_decays: tuple[float, ...] = (5e-4,)

    def trials(self) -> list[dict[str, Any]]:
        return [
            {'seed': seed, 'learning_rate': learning_rate, 'weight_decay': weight_decay}
            for learning_rate in self.learning_rates
            for weight_decay in self.weight_decays
            for seed in self.seeds
        ]


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
    """Beam search at the end of a translation run and in experiments.translate.

    Attributes:
      beam: number of hypotheses; 1 is greedy.
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
