"""The attention layers of a model configuration: one specification per site."""

import functools
from collections.abc import Callable

from qkattn.attention import registry
from qkattn.attention.spec import AttentionSpec
from qkattn.config import Config, ModelConfig
from qkattn.config.calls import split_pattern
from qkattn.config.validate import validate_settings
from qkattn.errors import ConfigError, SpecError


def attention_spec(config: ModelConfig) -> AttentionSpec:
    """The self-attention layer; SpecError where its sizes do not fit together."""
    return AttentionSpec(
        score=config.score,
        value=config.value,
        d_model=config.d_model,
        num_heads=config.num_heads,
        num_kv_heads=config.num_kv_heads,
        head_size=config.head_size,
        biases=config.biases,
        residual_gain=config.num_branches**-0.5,
        init=config.init,
        init_qk=config.init_qk,
        init_vo=config.init_vo,
        positions=config.positions if config.positions in ('rope', 'alibi') else 'none',
        qk_norm=config.qk_norm,
        score_scale=config.score_scale,
        logit_cap=config.logit_cap,
        normalizer=config.normalizer,
        window=config.window,
    )


def sites(config: ModelConfig) -> dict[str, Callable[[], AttentionSpec]]:
    """The attention layers of a model: a function that makes each specification, by its setting."""
    found = {'model': lambda: attention_spec(config)}
    for turn in range(0 if config.pattern is None else len(split_pattern(config.pattern))):
        found[f'model.pattern[{turn}]'] = functools.partial(_at_turn, config, turn)
    if config.kind == 'encoder_decoder':
        found['model.encoder_variant'] = lambda: attention_spec(config.encoder)
        found['model.cross_variant'] = lambda: attention_spec(config.cross)
    return found


def _at_turn(config: ModelConfig, turn: int) -> AttentionSpec:
    return attention_spec(config.cycle[turn])


def validate(config: Config) -> None:
    """Raises ConfigError for the first invalid setting of a run; nothing compiles."""
    validate_settings(config)
    for where, spec in sites(config.model).items():
        try:
            registry.check(spec())
        except SpecError as error:
            raise ConfigError(f'{where}: {error}') from error
