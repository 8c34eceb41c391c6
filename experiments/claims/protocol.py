"""The protocol of the claims' studies at each scale: model sizes, data, steps, seeds, tuning.

The scale 'smoke' trains every arm for seconds and decides nothing. The scale 'cpu' is the full
protocol for two CPU cores, and 'gpu' is the same protocol at published sizes.
"""

import dataclasses
from typing import Any, TypeVar

from qkattn import config
from qkattn.errors import ConfigError

SCALES = ('smoke', 'cpu', 'gpu')
T = TypeVar('T')

SCREENING = 100  # the first seed for tuning; verdicts use seeds below


def pick(scale: str, *, smoke: T, cpu: T, gpu: T) -> T:
    """Returns the value for a scale. Raises ConfigError if the scale is unknown."""
    values = {'smoke': smoke, 'cpu': cpu, 'gpu': gpu}
    if scale not in values:
        raise ConfigError(f'scale={scale!r} must be one of {", ".join(SCALES)}')
    return values[scale]


def language_model(
    scale: str,
    *,
    learning_rates: tuple[float, ...] = (3e-3, 6e-3, 1.2e-2),
    seeds: int = 8,
    first_seed: int = 0,
    evaluations: int = 2,
    times_as_long: int = 1,
    **fields: Any,
) -> config.Config:
    """Returns the config of a language model, trained for 1.2 epochs of 3.4 MB at scale cpu.

    The model has two layers and reads bytes. At scale gpu, it has twelve layers and reads BPE
    tokens. `kind='encoder'` makes it a masked language model.

    Args:
        scale: One of SCALES.
        learning_rates: The learning rates of the tuning at scale cpu. At scale gpu, each is divided
            by 16.
        seeds: The number of seeds for the verdict at scale cpu.
        first_seed: The first of these seeds. A repeat of a study needs other seeds.
        evaluations: The number of evenly spaced evaluations of a run.
        times_as_long: A factor of the number of steps.
        **fields: Fields of `ModelConfig` that replace those of the scale.
    """
    is_large = scale == 'gpu'
    num_steps = times_as_long * pick(scale, smoke=20, cpu=2000, gpu=10000)
    batch_size = pick(scale, smoke=8, cpu=16, gpu=64)
    num_tokens = 16384 if is_large else 256
    model_fields: dict[str, Any] = {
        'num_layers': pick(scale, smoke=2, cpu=2, gpu=12),
        'num_heads': pick(scale, smoke=2, cpu=4, gpu=12),
        'context': pick(scale, smoke=16, cpu=128, gpu=1024),
        'vocab_size': num_tokens,
    }
    if fields.get('kind') == 'encoder':
        model_fields['vocab_size'] = num_tokens + 1  # the mask token
    data_fields: dict[str, Any] = {}
    if is_large:
        model_fields['compute_dtype'] = 'bfloat16'
        data_fields = {
            'name': 'tfds:wiki40b/en',
            'tokenizer': 'bpe',
            'tokenizer_size': num_tokens,
        }
    model_fields |= fields
    return config.Config(
        model=config.ModelConfig(**model_fields),
        data=config.DataConfig(
            **data_fields,
            # A verdict needs 100 documents, which are 4096 sequences at scale cpu.
            eval_sequences=pick(scale, smoke=512, cpu=4096, gpu=4096),
        ),
        optimizer=_optimizer(scale),
        train=_train(scale, num_steps, batch_size, evaluations),
        trials=_trials(scale, learning_rates, seeds, first_seed),
    )


def masked_language_model(scale: str, **options: Any) -> config.Config:
    """Returns the config of a masked language model.

    Positions are rotary, as seeds with learned ones leave their plateaus at different times. A mask
    rate of 0.3 has twice the predictions of 0.15 (in BERT-large 0.4 is better: Wettig et al. 2023,
    arXiv 2202.08005).

    Args:
        scale: One of SCALES.
        **options: Further arguments of `language_model`.
    """
    base = language_model(scale, kind='encoder', positions='rope', **options)
    return dataclasses.replace(base, data=dataclasses.replace(base.data, mask_rate=0.3))


def translator(
    scale: str,
    *,
    learning_rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3),
    seeds: int = 8,
    first_seed: int = 0,
) -> config.Config:
    """Returns the config of an encoder-decoder that translates English to German.

    The arguments are those of `language_model`.
    """
    is_large = scale == 'gpu'
    num_tokens = pick(scale, smoke=500, cpu=1000, gpu=8192)
    num_steps = pick(scale, smoke=20, cpu=2200, gpu=6000)
    batch_size = pick(scale, smoke=8, cpu=32, gpu=64)
    train = _train(scale, num_steps, batch_size)
    max_sources = pick(scale, smoke=8, cpu=64, gpu=None)
    return config.Config(
        model=config.ModelConfig(
            kind='encoder_decoder',
            num_layers=3 if is_large else 1,
            num_encoder_layers=6 if is_large else 4,
            num_heads=4 if is_large else 2,
            context=128 if is_large else 64,
            vocab_size=num_tokens,
            dropout=0.1,
            attention_dropout=0.0,
        ),
        data=config.DataConfig(
            name=pick(scale, smoke='cldr', cpu='multi30k', gpu='multi30k'),
            languages='en-de',
            tokenizer='bpe',
            tokenizer_size=num_tokens,
            drop_long=True,
            eval_sequences=pick(scale, smoke=128, cpu=None, gpu=None),
        ),
        optimizer=dataclasses.replace(_optimizer(scale), beta2=0.98),
        train=dataclasses.replace(train, label_smoothing=0.1),
        trials=_trials(scale, learning_rates, seeds, first_seed),
        decode=config.DecodeConfig(beam=4 if is_large else 1, max_sources=max_sources),
    )


def protocol(
    scale: str,
    *,
    equal_shape: bool = True,
    max_excess: float | None = None,
    screening: int = 2,
    max_screening: int | None = None,
) -> dict[str, Any]:
    """Returns the fields `tuning`, `tolerance` and `controls` of a study.

    Args:
        scale: One of SCALES.
        equal_shape: Whether each arm is also trained at the baseline's shape.
        max_excess: The largest excess loss that tuning may leave at scale cpu, in nats/token; None
            for no limit.
        screening: The number of tuning seeds at scale cpu. An arm with an unclear optimum gets
            more.
        max_screening: The largest number of tuning seeds; by default 4, or 8 with `max_excess`.
    """
    if max_screening is None:
        most_seeds = 4 if max_excess is None else 8
        max_screening = max(screening, most_seeds)
    return {
        'tuning': pick(
            scale,
            smoke=config.TuningConfig(),
            cpu=config.TuningConfig(
                seeds=tuple(range(SCREENING, SCREENING + screening)),
                max_seeds=max_screening,
                max_excess=max_excess,
                choice='minimax',
            ),
            gpu=config.TuningConfig(seeds=(SCREENING,), max_seeds=3, choice='minimax'),
        ),
        'tolerance': pick(scale, smoke=5e-3, cpu=2e-3, gpu=1e-3),
        'controls': config.ControlsConfig(equal_shape=equal_shape, longer=None, longer_seeds=()),
    }


def _optimizer(scale: str) -> config.OptimizerConfig:
    """Returns an optimizer config with the warm-up of the scale."""
    return config.OptimizerConfig(warmup_steps=pick(scale, smoke=5, cpu=50, gpu=500))


def _train(scale: str, num_steps: int, batch_size: int, evaluations: int = 2) -> config.TrainConfig:
    """Returns a training config with evenly spaced evaluations and checkpoints."""
    interval = num_steps // evaluations
    steps_per_dispatch = 5 if interval < 25 else 25
    return config.TrainConfig(
        num_steps=num_steps,
        batch_size=batch_size,
        steps_per_dispatch=steps_per_dispatch,
        log_every=steps_per_dispatch,
        eval_every=interval,
        checkpoint_every=interval,
        # A fixed value saves measuring which one is faster.
        lifting=pick(scale, smoke='map', cpu='map', gpu='vmap'),
    )


def _trials(
    scale: str, learning_rates: tuple[float, ...], seeds: int, first_seed: int
) -> config.TrialsConfig:
    """Returns the seeds and learning rates of a scale. The arguments are those of scale cpu."""
    num_seeds = pick(scale, smoke=2, cpu=seeds, gpu=5)
    rates_at_gpu = tuple(rate / 16 for rate in learning_rates)
    return config.TrialsConfig(
        seeds=tuple(range(first_seed, first_seed + num_seeds)),
        learning_rates=pick(scale, smoke=learning_rates[:1], cpu=learning_rates, gpu=rates_at_gpu),
    )
