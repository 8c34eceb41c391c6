"""The registry of conversions between attention variants, and their use on whole models.

To add one, write a function `(layer, *, options) -> layer` that raises `ConversionError` where a
precondition does not hold, and add it to `CONVERSIONS`. `experiments.convert --apply=NAME` and
`experiments.variants --conversions` read this table.
"""

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.attention.attention import Attention
from qkattn.attention.spec import AttentionSpec
from qkattn.config import ModelConfig
from qkattn.config.calls import options_of, resolve
from qkattn.convert import circuits, whole_layer
from qkattn.convert.factors import Truncation
from qkattn.convert.target import require
from qkattn.errors import ConfigError, ConversionError, SpecError
from qkattn.model import with_params
from qkattn.model.sites import attention_spec
from qkattn.model.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Conversion:
    """One conversion of a layer.

    Attributes:
      function: (layer, **options) -> the converted layer, which computes the same function in the
        same dtype; where `lossy`, (layer, **options) -> (layer, Truncation). Options are its
        keyword-only parameters.
      circuit: the circuit that it rewrites.
      lossy: whether it changes the function that the layer computes.
      takes_norm: whether `function` also takes the gain and bias of the norm before attention.
      in_stack: (layers, **options) -> options for each layer of a model, whose layers have to
        remain one variant; None is the options as given.
      example: options with which the catalogue measures a conversion that requires some.
    """

    function: Callable[..., Any]
    circuit: Literal['QK', 'OV', 'both']
    lossy: bool = False
    takes_norm: bool = False
    in_stack: Callable[..., Mapping[str, Any]] | None = None
    example: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __call__(
        self, layer: Attention, *norm: Any, **options: Any
    ) -> tuple[Attention, Truncation | None]:
        """The converted layer, and the error of a lossy conversion."""
        result = self.function(layer, *norm, **options)
        return result if self.lossy else (result, None)

    @property
    def summary(self) -> str:
        """From which variant to which, in one line."""
        first = (inspect.getdoc(self.function) or '').partition('\n')[0]
        return first.removesuffix(' Exact.')


CONVERSIONS: dict[str, Conversion] = {
    'to_standard': Conversion(whole_layer.to_standard, 'both'),
    'merge': Conversion(circuits.merge, 'QK'),
    'unmerge': Conversion(circuits.unmerge, 'QK'),
    'truncate': Conversion(circuits.truncate, 'QK', lossy=True, example={'rank': 2}),
    'merge_vo': Conversion(circuits.merge_vo, 'OV'),
    'unmerge_vo': Conversion(circuits.unmerge_vo, 'OV'),
    'truncate_vo': Conversion(circuits.truncate_vo, 'OV', lossy=True, example={'rank': 2}),
    'gauge_fix_qk': Conversion(circuits.gauge_fix_qk, 'QK', in_stack=circuits.shared_rows),
    'gauge_fix_vo': Conversion(circuits.gauge_fix_vo, 'OV', in_stack=circuits.shared_columns),
    'to_symmetric': Conversion(circuits.to_symmetric, 'QK'),
    'to_shared': Conversion(circuits.to_shared, 'QK'),
    'to_collaborative': Conversion(circuits.to_collaborative, 'QK'),
    'fold_double': Conversion(whole_layer.fold_double, 'both'),
    'fold_biases': Conversion(whole_layer.fold_biases, 'both'),
    'fold_gains': Conversion(whole_layer.fold_gains, 'both', takes_norm=True),
    'gqa_to_mha': Conversion(whole_layer.gqa_to_mha, 'both'),
    'gqa_to_latent': Conversion(whole_layer.gqa_to_latent, 'both'),
}


def parse_conversion(text: str) -> tuple[Conversion, dict[str, Any]]:
    """The conversion and options that `text` names, e.g. 'merge' or 'truncate(rank=8)'.

    `text` may also be the import path of a Conversion.

    Raises:
      ConfigError: an unknown conversion or option, or a missing option.
    """
    conversion, options = resolve(
        text,
        CONVERSIONS,
        'conversion',
        needs='a Conversion',
        fits=lambda resolved: isinstance(resolved, Conversion),
        call=lambda conversion: conversion.function,
    )
    for option, default in options_of(conversion.function).items():
        if default is inspect.Parameter.empty and option not in options:
            raise ConfigError(f'{text} requires the option {option!r}')
    return conversion, options


def convert_model(
    text: str, config: ModelConfig, params: dict[str, Any]
) -> tuple[ModelConfig, dict[str, Any], list[Truncation]]:
    """Applies the conversion that `text` names to the attention of every layer.

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
    require(
        not (conversion.takes_norm and config.norm_position == 'post'),
        'in a post-norm model the residual stream also reads what the norm before attention '
        'writes, so its gain and bias have no place in the projections alone',
    )
    model = with_params(config, jax.tree.map(jnp.asarray, params))
    norm, sources = model.blocks.attention_norm, model.layers()
    before: list[Any] = []
    if conversion.takes_norm:
        shape = config.num_layers, config.d_model
        before = [np.ones(shape) if norm.g_D is None else np.array(norm.g_D)]
        before += [] if norm.b_D is None else [np.array(norm.b_D)]
    if conversion.in_stack is not None:
        options = {**conversion.in_stack(sources, **options)}
    layers: list[Attention] = []
    errors: list[Truncation] = []
    for index, source in enumerate(sources):
        try:
            layer, truncation = conversion(source, *(p[index] for p in before), **options)
        except (ConversionError, SpecError) as error:
            raise ConversionError(f'layer {index}: {error}') from error
        layers.append(layer)
        errors += [] if truncation is None else [truncation]
        require(
            layer.spec == layers[0].spec,
            f'layer {index} would become {layer.spec.variant} and layer 0 '
            f'{layers[0].spec.variant}, but a stack has one variant',
        )
    model.blocks.attention = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    if conversion.takes_norm:
        for parameter, initial in ((norm.g_D, 1.0), (norm.b_D, 0.0)):
            if parameter is not None:
                parameter[...] = jnp.full_like(parameter[...], initial)
    config = _config_with(config, layers[0].spec)
    return config, jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model))), errors


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


def _config_with(config: ModelConfig, spec: AttentionSpec) -> ModelConfig:
    """The model whose attention layers have `spec`."""
    fields = ('score', 'value', 'num_kv_heads', 'head_size', 'score_scale')
    changes = {name: getattr(spec, name) for name in fields}
    config = dataclasses.replace(config, d_ff=config.mlp_width, **changes)
    require(attention_spec(config) == spec, f'no model setting gives layers of {spec}')
    return config
