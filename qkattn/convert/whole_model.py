"""Conversions of whole models: one attention conversion in every layer."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention import Attention
from qkattn.attention.spec import AttentionSpec
from qkattn.config import ModelConfig
from qkattn.config.calls import parse_call
from qkattn.convert import layer as convert
from qkattn.errors import ConfigError, ConversionError, SpecError
from qkattn.model.build import with_params
from qkattn.model.sites import attention_spec

# Conversions of single layers that make sense in a whole model. `fold_gains` also rewrites norms.
LAYERWISE = (
    'to_standard',
    'merge',
    'unmerge',
    'truncate',
    'merge_vo',
    'unmerge_vo',
    'truncate_vo',
    'gauge_fix_qk',
    'gauge_fix_vo',
    'to_symmetric',
    'to_shared',
    'to_collaborative',
    'fold_double',
    'fold_biases',
    'gqa_to_mha',
    'gqa_to_latent',
)
CONVERSIONS = (*LAYERWISE, 'fold_gains')


def apply(text: str, config: ModelConfig, params: dict) -> tuple[ModelConfig, dict, list[str]]:
    """Applies the conversion that `text` names, e.g. 'merge' or 'truncate(rank=8)'.

    Returns:
      The config and parameters of the converted model, and a line per layer for conversions that
      are not exact.

    Raises:
      ConfigError: an unknown conversion or option.
      ConversionError: a precondition does not hold.
    """
    try:
        name, options = parse_call(text, 'conversion')
    except SpecError as error:
        raise ConfigError(str(error)) from error
    if name not in CONVERSIONS:
        raise ConfigError(f'unknown conversion {name!r}; known are {", ".join(CONVERSIONS)}')
    if config.kind == 'encoder_decoder':
        raise ConfigError(
            'conversions rewrite the one stack of a decoder or an encoder, but model.kind is '
            'encoder_decoder'
        )
    model = with_params(config, jax.tree.map(jnp.asarray, params))
    if name == 'fold_gains':
        if options:
            raise ConfigError('fold_gains takes no options')
        layers = [_fold_gain(model, layer) for layer in range(config.num_layers)]
        _reset_norm(model.blocks.attention_norm)
        notes = []
    else:
        layers, notes = _convert_layers(getattr(convert, name), options, model)
    model.blocks.attention = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    converted = _config_of(config, layers[0].spec)
    return converted, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model))), notes


def layer_of(model: nnx.Module, index: int) -> Attention:
    """The attention of one layer, out of the stack."""
    return jax.tree.map(lambda stacked: stacked[index], model.blocks.attention)


def logit_error(
    before: tuple[ModelConfig, dict], after: tuple[ModelConfig, dict], tokens_BT: np.ndarray
) -> float:
    """Largest difference of the two models' logits, relative to the largest logit."""
    logits = []
    for config, params in (before, after):
        model = with_params(config, jax.tree.map(jnp.asarray, params))
        logits.append(np.asarray(jax.jit(lambda m, t: m(t))(model, tokens_BT), np.float64))
    return float(np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max())


def _convert_layers(
    conversion: Callable, options: dict[str, Any], model: nnx.Module
) -> tuple[list[Attention], list[str]]:
    if conversion.__name__.startswith('gauge_fix'):
        # All layers of a stack are the same cell, so they fix the same rows.
        options = {'pivot': False, **options}
    layers, notes = [], []
    for index in range(model.config.num_layers):
        try:
            done = conversion(layer_of(model, index), **options)
        except TypeError as error:
            raise ConfigError(f'{conversion.__name__}: {error}') from error
        except ConversionError as error:
            raise ConversionError(f'layer {index}: {error}') from error
        if isinstance(done, tuple):
            done, loss = done
            notes.append(
                f'layer {index}: rank {loss.rank} leaves out {loss.relative:.3e} of the norm of '
                f'the matrices (Eckart-Young) and changes logits by {loss.measured:.3e}'
            )
        layers.append(done)
        if done.spec != layers[0].spec:
            raise ConversionError(
                f'layer {index} would become {done.spec.score}/{done.spec.value} and layer 0 '
                f'{layers[0].spec.score}/{layers[0].spec.value}, but a stack has one cell'
            )
    return layers, notes


def _fold_gain(model: nnx.Module, index: int) -> Attention:
    norm = model.blocks.attention_norm
    bias_D = None if norm.b_D is None else np.asarray(norm.b_D[index])
    layer = convert.fold_gains(layer_of(model, index), np.asarray(norm.g_D[index]), bias_D)
    if layer.spec.biases and not model.config.biases:
        raise ConversionError('fold_gains of a norm with biases needs a model with biases')
    return layer


def _reset_norm(norm: nnx.Module) -> None:
    norm.g_D[...] = jnp.ones_like(norm.g_D[...])
    if norm.b_D is not None:
        norm.b_D[...] = jnp.zeros_like(norm.b_D[...])


def _config_of(config: ModelConfig, spec: AttentionSpec) -> ModelConfig:
    """The model whose layers have `spec`."""
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
