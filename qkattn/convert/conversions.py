"""The registry of conversions between attention variants, and conversion of whole models.

To add a conversion, register a function `(layer, *, options) -> layer` in `CONVERSIONS`. It raises
`ConversionError` if a precondition does not hold.
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
from qkattn.model.transformer import Transformer, on_any_device


@dataclasses.dataclass(frozen=True)
class Conversion:
    """A conversion of attention layers to another variant.

    Unless the conversion is lossy, the converted layer computes the same function in the same
    dtype.
    """

    # (layer, **options) -> layer, with keyword-only options.
    function: Callable[..., Any]
    # The circuit that changes.
    circuit: Literal['QK', 'OV', 'both']
    # `function` returns (layer, error). The error is relative to the norm of A or B.
    lossy: bool = False
    # `function` also takes gain and bias of the norm before attention: (layer, gain_D, bias_D).
    takes_norm: bool = False
    # `function` takes and returns a list of all layers.
    of_stack: bool = False

    def __call__(
        self, layer: Attention, *norm_gain_and_bias: Any, **options: Any
    ) -> tuple[Attention, float]:
        """Converts one layer.

        Args:
            layer: The layer.
            *norm_gain_and_bias: Gain [D] and bias [D] of the norm, if the conversion takes them.
            **options: The options of the conversion.

        Returns:
            layer: The converted layer.
            error: The error of a lossy conversion, otherwise 0.
        """
        if self.of_stack:
            # The function takes and returns a list of layers.
            (converted_layer,) = self.function([layer], **options)
            return converted_layer, 0.0
        if self.lossy:
            converted_layer, error = self.function(layer, *norm_gain_and_bias, **options)
            return converted_layer, error
        converted_layer = self.function(layer, *norm_gain_and_bias, **options)
        return converted_layer, 0.0

    @property
    def summary(self) -> str:
        """The first line of the function's docstring."""
        docstring = inspect.getdoc(self.function) or ''
        first_line, _, _ = docstring.partition('\n')
        return first_line.removesuffix(' Exact.')


# Conversions by name.
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
    """Parses a conversion with options, such as 'truncate(rank=8)'.

    Args:
        text: A name in `CONVERSIONS` or an import path, and options in parentheses.

    Returns:
        conversion: The conversion.
        options: The options by name.

    Raises:
        ConfigError: The conversion or an option is unknown, or a required option is missing.
    """

    def is_conversion(imported: Any) -> bool:
        return isinstance(imported, Conversion)

    def function_of(conversion: Conversion) -> Callable[..., Any]:
        return conversion.function

    # `resolve` checks the options against the keyword arguments of the function.
    conversion, options = resolve(
        text,
        known=CONVERSIONS,
        field='conversion',
        needs='a Conversion',
        is_valid=is_conversion,
        call=function_of,
    )
    for option, default in options_of(conversion.function).items():
        is_required = default is inspect.Parameter.empty
        if is_required and option not in options:
            raise ConfigError(f'{text} requires the option {option!r}')
    return conversion, options


def convert_model(
    text: str, config: ModelConfig, params: dict[str, Any]
) -> tuple[ModelConfig, dict[str, Any], list[float]]:
    """Converts all attention layers of a model.

    Args:
        text: The conversion with its options, such as 'merge' or 'truncate(rank=8)'.
        config: The config of the model.
        params: The parameters of the model.

    Returns:
        config: The config of the converted model.
        params: The parameters of the converted model.
        errors: The error of each layer if the conversion is lossy; otherwise [].

    Raises:
        ConfigError: `text` is invalid, or the model is not a single stack of one variant.
        ConversionError: A precondition of the conversion does not hold.
    """
    conversion, options = parse_conversion(text)
    _require_one_stack(config)
    # The gain of the norm moves into W_Q, W_K and W_V, but a post-norm residual stream needs it.
    needs_gain = config.norm_position == 'post'
    require(
        not (conversion.takes_norm and needs_gain),
        'in a post-norm model the residual stream also reads what the norm before attention writes',
    )

    model = with_params(config, jax.tree.map(jnp.asarray, params))
    layers_and_errors = _convert_layers(conversion, options, model)
    layers = [layer for layer, _ in layers_and_errors]
    errors = [error for _, error in layers_and_errors] if conversion.lossy else []

    spec = _common_spec(layers)
    converted_config = _config_with(config, spec)

    # A model stores its layers as one module, whose arrays have a leading axis of layers.
    model.blocks.attention = jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    if conversion.takes_norm:
        _reset_norm(model.blocks.attention_norm)
    converted_params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    return converted_config, converted_params, errors


def _common_spec(layers: list[Attention]) -> AttentionSpec:
    """Returns the spec of all layers. Raises ConversionError if they differ."""
    spec = layers[0].spec
    for index, layer in enumerate(layers):
        require(
            layer.spec == spec,
            f'layer {index} would become {layer.spec.variant} and layer 0 {spec.variant}, but a '
            'stack has one variant',
        )
    return spec


def _config_with(config: ModelConfig, spec: AttentionSpec) -> ModelConfig:
    """Returns the config of a model whose attention layers have `spec`.

    Raises ConversionError if no config gives this spec.
    """
    changes: dict[str, Any] = {
        name: getattr(spec, name)
        for name in ('score', 'value', 'num_kv_heads', 'head_size', 'score_scale')
    }
    # The MLP width is written out, so that it does not depend on a default.
    converted_config = dataclasses.replace(config, d_ff=config.mlp_width, **changes)
    require(attention_spec(converted_config) == spec, f'no model setting gives layers of {spec}')
    return converted_config


def _require_one_stack(config: ModelConfig) -> None:
    """Raises ConfigError unless the model is a single stack of one attention variant."""
    if config.pattern is not None:  # layers of several variants
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
    """Returns gain_D and bias_D of the norm before attention in one layer."""
    norm = model.blocks.attention_norm  # its arrays have a leading axis of layers
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
    """Applies one or more conversions to a model; see `convert_model`."""
    config = model.config
    params = nnx.to_pure_dict(nnx.state(model))
    for text in texts:
        config, params, _ = convert_model(text, config, params)
    return with_params(config, jax.tree.map(jnp.asarray, params))


def logit_error(
    before: tuple[ModelConfig, dict], after: tuple[ModelConfig, dict], tokens_BT: np.ndarray
) -> float:
    """Returns the largest difference between the logits of two models, as a relative error.

    Args:
        before: Config and parameters of the model before a conversion.
        after: Config and parameters of the converted model.
        tokens_BT: The tokens.

    Returns:
        Max |before - after| / max |before|, over all logits.
    """

    def logits_of(config: ModelConfig, params: dict) -> np.ndarray:
        model = with_params(on_any_device(config), jax.tree.map(jnp.asarray, params))
        compute_logits = jax.jit(lambda model, tokens_BT: model(tokens_BT))
        return np.asarray(compute_logits(model, tokens_BT), np.float64)

    # By default, some GPUs multiply float32 in TF32, which moves logits by almost 1e-3.
    with jax.default_matmul_precision('float32'):
        before_BTV = logits_of(*before)
        after_BTV = logits_of(*after)
    return float(np.abs(before_BTV - after_BTV).max() / np.abs(before_BTV).max())
