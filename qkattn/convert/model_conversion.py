"""Conversion of a whole model: one conversion in the attention of every layer."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention import Attention
from qkattn.attention.spec import AttentionSpec
from qkattn.config import ModelConfig
from qkattn.convert.conversions import Conversion, parse_conversion
from qkattn.convert.truncation import Truncation
from qkattn.errors import ConfigError, ConversionError, SpecError
from qkattn.model import with_params
from qkattn.model.blocks import Norm
from qkattn.model.sites import attention_spec
from qkattn.model.transformer import Transformer

# Largest change of the logits by a conversion that is exact but for rounding.
EXACT = 1e-3


def convert_model(
    text: str, config: ModelConfig, params: dict[str, Any]
) -> tuple[ModelConfig, dict[str, Any], list[Truncation]]:
    """Applies the conversion that `text` names, e.g. 'merge' or 'truncate(rank=8)'.

    Returns:
      The config and parameters of the converted model, and the error in each layer of a lossy
      conversion.

    Raises:
      ConfigError: an unknown conversion or option.
      ConversionError: a precondition does not hold.
    """
    conversion, options = parse_conversion(text)
    if config.kind == 'encoder_decoder':
        raise ConfigError(
            'conversions rewrite the single stack of a decoder or an encoder, but model.kind is '
            'encoder_decoder'
        )
    if config.pattern is not None:
        raise ConfigError(
            f'conversions rewrite a stack of one variant, but model.pattern is {config.pattern!r}'
        )
    if conversion.takes_norm and config.norm_position == 'post':
        raise ConversionError(
            'in a post-norm model the residual stream also reads what the norm before attention '
            'writes, so its gain and bias have no place in the projections alone'
        )
    model = with_params(config, jax.tree.map(jnp.asarray, params))
    sources = model.layers()
    if conversion.in_stack is not None:
        options = {**conversion.in_stack(sources, **options)}
    layers: list[Attention] = []
    errors: list[Truncation] = []
    for index, source in enumerate(sources):
        try:
            layer, truncation = _convert_layer(model, index, source, conversion, options)
        except (ConversionError, SpecError) as error:
            raise ConversionError(f'layer {index}: {error}') from error
        layers.append(layer)
        if truncation is not None:
            errors.append(truncation)
        if layer.spec != layers[0].spec:
            raise ConversionError(
                f'layer {index} would become {layer.spec.variant} and layer 0 '
                f'{layers[0].spec.variant}, but a stack has one variant'
            )
    model.blocks.attention = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    if conversion.takes_norm:
        _reset(model.blocks.attention_norm)
    converted = _config_with(config, layers[0].spec)
    return converted, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model))), errors


def converted(model: Transformer, *texts: str) -> Transformer:
    """The model after the conversions that `texts` name; see `convert_model`."""
    config, params = model.config, nnx.to_pure_dict(nnx.state(model))
    for text in texts:
        config, params, _ = convert_model(text, config, params)
    return with_params(config, jax.tree.map(jnp.asarray, params))


def logit_error(
    before: tuple[ModelConfig, dict], after: tuple[ModelConfig, dict], tokens_BT: np.ndarray
) -> float:
    """Largest difference of the two models' logits, relative to the largest logit."""
    logits = []
    for config, params in (before, after):
        model = with_params(config, jax.tree.map(jnp.asarray, params))
        logits.append(np.asarray(jax.jit(lambda m, t: m(t))(model, tokens_BT), np.float64))
    return float(np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max())


def require_exact(text: str, change: float) -> None:
    """Requires that an exact conversion moves no logit by more than 1e-3 of the largest.

    Raises:
      ConversionError: it does; a lossy conversion may.
    """
    if not (parse_conversion(text)[0].lossy or change <= EXACT):
        raise ConversionError(
            f'it moves logits by {change:.1e} of the largest, and an exact conversion may by '
            f'{EXACT:.0e} at most'
        )


def _convert_layer(
    model: Any, index: int, layer: Attention, conversion: Conversion, options: dict[str, Any]
) -> tuple[Attention, Truncation | None]:
    if not conversion.takes_norm:
        return conversion(layer, **options)
    norm = model.blocks.attention_norm
    bias_D = None if norm.b_D is None else np.asarray(norm.b_D[index])
    gain_D = np.ones(model.config.d_model) if norm.g_D is None else np.asarray(norm.g_D[index])
    converted, truncation = conversion(layer, gain_D, bias_D, **options)
    if converted.spec.biases and not model.config.biases:
        raise ConversionError('the bias of a norm folds into a model with biases only')
    return converted, truncation


def _reset(norm: Norm) -> None:
    if norm.g_D is not None:
        norm.g_D[...] = jnp.ones_like(norm.g_D[...])
    if norm.b_D is not None:
        norm.b_D[...] = jnp.zeros_like(norm.b_D[...])


def _config_with(config: ModelConfig, spec: AttentionSpec) -> ModelConfig:
    """The model whose attention layers have `spec`."""
    converted = dataclasses.replace(
        config,
        score=spec.score,
        value=spec.value,
        num_kv_heads=spec.num_kv_heads,
        head_size=spec.head_size,
        score_scale=spec.score_scale,
        d_ff=config.mlp_width,
    )
    if attention_spec(converted) != spec:
        raise ConversionError(f'no model setting gives layers of {spec}')
    return converted
