"""The attention layers of a model configuration: one specification per site."""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import AbstractMesh, Mesh

from qkattn.attention import Attention, Mask, registry
from qkattn.attention.kernels import choice
from qkattn.attention.spec import AttentionSpec
from qkattn.config import Config, ModelConfig
from qkattn.config.calls import split_pattern
from qkattn.config.run_config import validate_settings
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
        kernel=config.kernel,
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
    check_kernel(config.model, None)


def check_kernel(model: ModelConfig, mesh: Mesh | AbstractMesh | None) -> None:
    """Raises ConfigError where model.kernel cannot serve a layer at the lengths of training.

    Args:
      mesh: of the devices; None where they are not known yet.
    """
    if model.kernel == 'auto':
        return
    for where, spec in sites(model).items():
        try:
            with choice.on(mesh):
                _attend_once(model, where, spec())
        except SpecError as error:
            raise ConfigError(f'{where}: {error}') from error


def _attend_once(model: ModelConfig, where: str, spec: AttentionSpec) -> None:
    """Traces a layer as in training."""
    dtype = jnp.dtype(model.compute_dtype)
    encoder, cross = where == 'model.encoder_variant', where == 'model.cross_variant'
    T = model.encoder.context if encoder else model.context
    S = model.encoder.context if cross else T
    causal = not (encoder or cross or model.kind == 'encoder')

    def attend(layer: Attention, x_BTD: jax.Array, y_BSD: jax.Array) -> jax.Array:
        mask, key = Mask(causal=causal, window=spec.window), jax.random.key(0)
        if model.kind == 'encoder_decoder':
            one_BT, one_BS = (jnp.ones((1, length), jnp.int32) for length in (T, S))
            mask = dataclasses.replace(mask, segments_BT=one_BT, segments_BS=one_BS)
        rate = model.probability_dropout
        return layer.attend_to(
            x_BTD, layer.cached(y_BSD), mask, cross=cross, dropout=rate, dropout_key=key
        )

    layer = nnx.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), layer)
    x_BTD, y_BSD = (jax.ShapeDtypeStruct((1, n, model.d_model), dtype) for n in (T, S))
    jax.eval_shape(attend, layer, x_BTD, y_BSD)
