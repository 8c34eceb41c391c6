"""The registry of conversions between attention variants, and their use on whole models.

To add one, add to `CONVERSIONS` a function `(layer, *, options) -> layer` that raises
`ConversionError` where a precondition does not hold.
"""

import dataclasses
import inspect
from collections.abc import Callable
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
from qkattn.convert.factors import require
from qkattn.errors import ConfigError, ConversionError, SpecError
from qkattn.model import with_params
from qkattn.model.blocks import Norm
from qkattn.model.sites import attention_spec
from qkattn.model.transformer import Transformer


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion of attention layers to another variant.

    Unless it is lossy, the converted layer computes the same function in the same dtype.
    """

    function: Callable[..., Any]  # (layer, **options) -> layer; options are keyword-only
    circuit: Literal['QK', 'OV', 'both']  # the one that changes
    # `function` returns (layer, error). The error is the lost share of the norm of A[n] or B[n].
    lossy: bool = False
    takes_norm: bool = False  # `function` also takes the gain and bias of the norm before attention
    of_stack: bool = False  # `function` takes and returns all layers of a model

    def __call__(self, layer: Attention, *norm: Any, **options: Any) -> tuple[Attention, float]:
        """Returns the converted layer, and the error of a lossy conversion, else 0.

        `norm` is the gain and the bias [D] of the norm, if the conversion takes them.
        """
        if self.of_stack:
            (converted_layer,) = self.function([layer], **options)
            return converted_layer, 0.0
        result = self.function(layer, *norm, **options)
        return result if self.lossy else (result, 0.0)

    @property
    def summary(self) -> str:
        """The first line of the function's docstring: from which variant to which."""
        first = (inspect.getdoc(self.function) or '').partition('\n')[0]
        return first.removesuffix(' Exact.')


# The conversions of the package, by name.
CONVERSIONS: dict[str, Conversion] = {
    'to_standard': Conversion(whole_layer.to_standard, 'both'),
    'merge': Conversion(circuits.merge, 'QK'),
    'unmerge': Conversion(circuits.unmerge, 'QK'),
    'truncate': Conversion(circuits.truncate, 'QK', lossy=True),
    'merge_vo': Conversion(circuits.merge_vo, 'OV'),
    'unmerge_vo': Conversion(circuits.unmerge_vo, 'OV'),
    'truncate_vo': Conversion(circuits.truncate_vo, 'OV', lossy=True),
    'fold_double': Conversion(whole_layer.fold_double, 'both'),
    'fold_biases': Conversion(whole_layer.fold_biases, 'both'),
    'fold_gains': Conversion(whole_layer.fold_gains, 'both', takes_norm=True),
    'gqa_to_mha': Conversion(whole_layer.gqa_to_mha, 'both'),
    'gqa_to_latent': Conversion(whole_layer.gqa_to_latent, 'both'),
}


def parse_conversion(text: str) -> tuple[Conversion, dict[str, Any]]:
    """Parses the name of a conversion and its options, e.g. 'truncate(rank=8)'.

    The name is one of `CONVERSIONS` or an import path. Raises ConfigError if the conversion or an
    option is unknown, or an option is missing.
    """

    def is_conversion(imported: Any) -> bool:
        return isinstance(imported, Conversion)

    def function_of(conversion: Conversion) -> Callable[..., Any]:
        return conversion.function

    # The options are the keyword-only parameters of the conversion's function. `resolve` refuses
    # others.
    conversion, options = resolve(
        text,
        CONVERSIONS,
        'conversion',
        needs='a Conversion',
        is_valid=is_conversion,
        call=function_of,
    )
    # An option without a default must be in the text.
    for option, default in options_of(conversion.function).items():
        if default is inspect.Parameter.empty and option not in options:
            raise ConfigError(f'{text} requires the option {option!r}')
    return conversion, options


def convert_model(
    text: str, config: ModelConfig, params: dict[str, Any]
) -> tuple[ModelConfig, dict[str, Any], list[float]]:
    """Converts all attention layers of a model.

    Args:
      text: the conversion with its options, e.g. 'merge' or 'truncate(rank=8)'.
      config: the config of the model.
      params: the parameters of the model.

    Returns:
      config: the config of the converted model.
      params: the parameters of the converted model.
      errors: the error of each layer, for a lossy conversion; else empty.

    Raises:
      ConfigError: as `parse_conversion` does, or if the model is not one stack of one variant.
      ConversionError: if a precondition of the conversion does not hold.
    """
    conversion, options = parse_conversion(text)
    _require_one_stack(config)
    # A conversion with `takes_norm` moves the gain of the norm before attention into W_Q, W_K and
    # W_V. In a post-norm model, the residual stream needs that gain, too.
    require(
        not (conversion.takes_norm and config.norm_position == 'post'),
        'in a post-norm model the residual stream also reads what the norm before attention writes',
    )

    model = with_params(config, jax.tree.map(jnp.asarray, params))
    results = _convert_layers(conversion, options, model)
    layers = [layer for layer, _ in results]
    errors = [error for _, error in results] if conversion.lossy else []

    # The model holds all layers in one module, whose arrays have a leading axis over the layers.
    spec = _common_spec(layers)
    model.blocks.attention = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    if conversion.takes_norm:
        _reset_norm(model.blocks.attention_norm)
    converted_params = nnx.to_pure_dict(nnx.state(model))
    converted_params = jax.tree.map(np.asarray, converted_params)
    return _config_with(config, spec), converted_params, errors


def _common_spec(layers: list[Attention]) -> AttentionSpec:
    """Returns the spec of all layers; raises ConversionError if they differ."""
    spec = layers[0].spec
    for index, layer in enumerate(layers):
        require(
            layer.spec == spec,
            f'layer {index} would become {layer.spec.variant} and layer 0 {spec.variant}, but a '
            'stack has one variant',
        )
    return spec


def _config_with(config: ModelConfig, spec: AttentionSpec) -> ModelConfig:
    """Returns the config of a model whose attention layers have this spec.

    Raises ConversionError if there is no such config.
    """
    changes: dict[str, Any] = {
        name: getattr(spec, name)
        for name in ('score', 'value', 'num_kv_heads', 'head_size', 'score_scale')
    }
    # The MLP keeps its width, whatever default the changed config would give it.
    config = dataclasses.replace(config, d_ff=config.mlp_width, **changes)
    require(attention_spec(config) == spec, f'no model setting gives layers of {spec}')
    return config


def _require_one_stack(config: ModelConfig) -> None:
    """Raises ConfigError unless the model is a single stack of layers of one variant."""
    if config.pattern is not None:
        field = 'pattern'
    elif config.kind == 'encoder_decoder':
        field = 'kind'
    else:
        return
    raise ConfigError(
        'conversions rewrite a decoder or an encoder, a stack of one variant, but '
        f'model.{field} is {getattr(config, field)!r}'
    )


def _convert_layers(
    conversion: Conversion, options: dict[str, Any], model: Transformer
) -> list[tuple[Attention, float]]:
    """Converts all attention layers and returns (converted layer, error) for each.

    The error is 0 unless the conversion is lossy. Raises ConversionError if a layer cannot be
    converted.
    """
    layers = model.layers()
    if conversion.of_stack:
        # One call converts all layers.
        try:
            converted_layers = conversion.function(layers, **options)
        except SpecError as refusal:
            raise ConversionError(f'{refusal}') from refusal
        return [(layer, 0.0) for layer in converted_layers]

    results: list[tuple[Attention, float]] = []
    for index, layer in enumerate(layers):
        norm_gain_and_bias: tuple[np.ndarray, ...] = ()
        if conversion.takes_norm:
            norm_gain_and_bias = _norm_of_layer(model, index)
        try:
            converted_layer, error = conversion(layer, *norm_gain_and_bias, **options)
        except (ConversionError, SpecError) as refusal:
            raise ConversionError(f'layer {index}: {refusal}') from refusal
        results.append((converted_layer, error))
    return results


def _norm_of_layer(model: Transformer, index: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns the gain and the bias [D] of the norm before attention in one layer."""
    norm = model.blocks.attention_norm
    D = model.config.d_model
    gain_D = np.ones(D) if norm.g_D is None else np.array(norm.g_D)[index]
    bias_D = np.zeros(D) if norm.b_D is None else np.array(norm.b_D)[index]
    return gain_D, bias_D


def _reset_norm(norm: Norm) -> None:
    """Sets the gain of a norm to 1 and its bias to 0, if it has them."""
    if norm.g_D is not None:
        norm.g_D[...] = jnp.ones_like(norm.g_D[...])
    if norm.b_D is not None:
        norm.b_D[...] = jnp.zeros_like(norm.b_D[...])


def converted(model: Transformer, *texts: str) -> Transformer:
    """Returns the model after one or more conversions; see `convert_model`."""
    config = model.config
    params = nnx.to_pure_dict(nnx.state(model))
    for text in texts:
        config, params, _ = convert_model(text, config, params)
    return with_params(config, jax.tree.map(jnp.asarray, params))


def logit_error(
    before: tuple[ModelConfig, dict], after: tuple[ModelConfig, dict], tokens_BT: np.ndarray
) -> float:
    """Returns the largest difference of two models' logits, divided by the first's largest one."""
    logits = []
    for config, params in (before, after):
        model = with_params(config, jax.tree.map(jnp.asarray, params))
        logits.append(np.asarray(jax.jit(lambda m, t: m(t))(model, tokens_BT), np.float64))
    return float(np.abs(logits[0] - logits[1]).max() / np.abs(logits[0]).max())
