"""The protocol of the claims' studies at each scale: model sizes, data, steps, seeds, tuning.

'smoke' trains every arm for seconds, which shows that it runs and decides nothing; 'cpu' is the
fair protocol at the size of two CPU cores; 'gpu' is the same protocol at published sizes.
"""

import dataclasses
from typing import Any, TypeVar

from qkattn import config
from qkattn.errors import ConfigError

SCALES = ('smoke', 'cpu', 'gpu')
T = TypeVar('T')

SCREENING = 100  # the first seed of the screening; those of the verdicts are below


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
    """A byte-level language model that gets beyond n-grams: 1.2 epochs of 3.4 MB at scale cpu.

    It has two layers; at scale gpu, twelve and BPE pieces. With `kind='encoder'` it restores masked
    tokens.

    Args:
      scale: one of SCALES.
      learning_rates: those of the screening at scale cpu; at scale gpu, a sixteenth of them.
      seeds: the number of seeds of the verdict at scale cpu.
      first_seed: the first of them, so that a study may be repeated with others.
      evaluations: how often a run is evaluated, evenly spaced.
      times_as_long: a factor of the number of steps.
      fields: fields of `ModelConfig` that replace those of the scale.
    """
    is_large = scale == 'gpu'
    num_steps = times_as_long * pick(scale, smoke=20, cpu=2000, gpu=10000)
    pieces = 16384 if is_large else 256
    model: dict[str, Any] = {
        'num_layers': pick(scale, smoke=2, cpu=2, gpu=12),
        'num_heads': pick(scale, smoke=2, cpu=4, gpu=12),
        'context': pick(scale, smoke=16, cpu=128, gpu=1024),
        'vocab_size': pieces,
    }
    if fields.get('kind') == 'encoder':
        model['vocab_size'] = pieces + 1  # one more, for the mask
    corpus: dict[str, Any] = {}
    if is_large:
        model |= {'compute_dtype': 'bfloat16'}
        corpus = {'name': 'tfds:wiki40b/en', 'tokenizer': 'bpe', 'tokenizer_size': pieces}
    return config.Config(
        model=config.ModelConfig(**model | fields),
        data=config.DataConfig(
            **corpus,
            # At scale cpu 100 documents, which a verdict needs.
            eval_sequences=pick(scale, smoke=512, cpu=4096, gpu=4096),
        ),
        optimizer=_optimizer(scale),
        train=_train(scale, num_steps, pick(scale, smoke=8, cpu=16, gpu=64), evaluations),
        trials=_trials(scale, learning_rates, seeds, first_seed),
    )


def translator(
    scale: str,
    *,
    learning_rates: tuple[float, ...] = (2e-3, 4e-3, 8e-3),
    seeds: int = 8,
    first_seed: int = 0,
) -> config.Config:
    """Returns the config of an encoder-decoder that translates English to German.

    It is trained on Multi30k, or at scale smoke on cldr. At scale gpu, the model is larger. The
    arguments are those of `language_model`.
    """
    is_large = scale == 'gpu'
    pieces = pick(scale, smoke=500, cpu=1000, gpu=8192)
    num_steps = pick(scale, smoke=20, cpu=2200, gpu=6000)
    train = _train(scale, num_steps, pick(scale, smoke=8, cpu=32, gpu=64))
    sources = pick(scale, smoke=8, cpu=64, gpu=None)
    return config.Config(
        model=config.ModelConfig(
            kind='encoder_decoder',
            num_layers=3 if is_large else 1,
            num_encoder_layers=6 if is_large else 4,
            num_heads=4 if is_large else 2,
            context=128 if is_large else 64,
            vocab_size=pieces,
            dropout=0.1,
            attention_dropout=0.0,
        ),
        data=config.DataConfig(
            name=pick(scale, smoke='cldr', cpu='multi30k', gpu='multi30k'),
            languages='en-de',
            tokenizer='bpe',
            tokenizer_size=pieces,
            drop_long=True,
            eval_sequences=pick(scale, smoke=128, cpu=None, gpu=None),
        ),
        optimizer=dataclasses.replace(_optimizer(scale), beta2=0.98),
        train=dataclasses.replace(train, label_smoothing=0.1),
        trials=_trials(scale, learning_rates, seeds, first_seed),
        decode=config.DecodeConfig(beam=4 if is_large else 1, max_sources=sources),
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
        max_excess: How much higher than at the optimum the loss of a tuned arm may be at scale cpu,
            nats/token; None for no limit.
        screening: The number of seeds that tune an arm at scale cpu. More are added while its
            optimum is not clear.
        max_screening: The most seeds that tune an arm; by default 4, or 8 with `max_excess`.
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
    """The optimizer of a study, of which only the warm-up depends on the scale."""
    return config.OptimizerConfig(warmup_steps=pick(scale, smoke=5, cpu=50, gpu=500))


def _train(scale: str, num_steps: int, batch_size: int, evaluations: int = 2) -> config.TrainConfig:
    """Returns how the runs of a study are trained: steps, batch, and evenly spaced evaluations.

    `lifting` says how the trials of a run are computed together. It is set here, so that no time is
    spent on measuring which way is faster.
    """
    interval = num_steps // evaluations
    dispatch = 5 if interval < 25 else 25
    return config.TrainConfig(
        num_steps=num_steps,
        batch_size=batch_size,
        steps_per_dispatch=dispatch,
        log_every=dispatch,
        eval_every=interval,
        checkpoint_every=interval,
        lifting=pick(scale, smoke='map', cpu='map', gpu='vmap'),
    )


def _trials(scale: str, rates: tuple[float, ...], seeds: int, first: int) -> config.TrialsConfig:
    """The seeds of the verdict, `seeds` from `first` at scale cpu, and learning rates to screen."""
    num_seeds = pick(scale, smoke=2, cpu=seeds, gpu=5)
    rates_of_large_model = tuple(rate / 16 for rate in rates)
    return config.TrialsConfig(
        seeds=tuple(range(first, first + num_seeds)),
        learning_rates=pick(scale, smoke=rates[:1], cpu=rates, gpu=rates_of_large_model),
    )
