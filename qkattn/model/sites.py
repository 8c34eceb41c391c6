"""The attention layers of a model configuration: one specification per site."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh

from qkattn.attention import Attention, Mask, registry
from qkattn.attention.kernels import choice
from qkattn.attention.spec import AttentionSpec
from qkattn.config import Config, ModelConfig
from qkattn.config.calls import called
from qkattn.config.run_config import validate_settings
from qkattn.config.variant import split_pattern
from qkattn.errors import ConfigError, SpecError


def attention_spec(config: ModelConfig) -> AttentionSpec:
    """The self-attention layer; SpecError where its sizes do not fit together."""
    fields = {}
    for field in dataclasses.fields(AttentionSpec):
        if field.name != 'residual_gain':
            fields[field.name] = getattr(config, field.name)
    if config.positions not in ('rope', 'alibi'):
        fields['positions'] = 'none'  # added to the stream, outside of attention
    return AttentionSpec(**fields, residual_gain=config.num_branches**-0.5)


def sites(config: ModelConfig) -> dict[str, Callable[[], AttentionSpec]]:
    """A function that makes the specification of each attention site, by the setting behind it.

    A site is a kind of attention layer: that of the model, 'model', of each turn of a pattern,
    'model.pattern[0]', ..., of the encoder, 'model.encoder_variant', and the cross-attention,
    'model.cross_variant'. The functions raise SpecError where the settings do not fit together.
    """
    specs: dict[str, Callable[[], AttentionSpec]] = {}

    def add(setting: str, layer_config: Callable[[], ModelConfig]) -> None:
        specs[setting] = lambda: attention_spec(layer_config())

    def config_of_turn(turn: int) -> Callable[[], ModelConfig]:
        return lambda: config.cycle[turn]

    add('model', lambda: config)
    if config.pattern is not None:
        for turn in range(len(split_pattern(config.pattern))):
            add(f'model.pattern[{turn}]', config_of_turn(turn))
    if config.kind == 'encoder_decoder':
        add('model.encoder_variant', lambda: config.encoder)
        add('model.cross_variant', lambda: config.cross)
    return specs


def validate(config: Config) -> None:
    """Raises ConfigError for the first invalid setting of a run; nothing compiles."""
    validate_settings(config)
    for setting, make_spec in sites(config.model).items():
        with _refused(setting):
            spec = make_spec()
        # Classes from outside the package, whose code may raise anything.
        outside = ', '.join(name for name in (str(spec.variant), spec.normalizer) if ':' in name)
        check = _refused(setting)(functools.partial(registry.check, spec))
        if not outside:
            check()
            continue
        called(setting, outside, check)
        # The arrays of such classes may not fit together. `check_kernel` is for other kernels.
        spec = dataclasses.replace(spec, kernel='einsum')
        called(setting, outside, functools.partial(_attend_once, config.model, setting, spec))
    check_kernel(config, None)


def check_kernel(config: Config, mesh: Mesh | None) -> None:
    """ConfigError where model.kernel cannot serve a layer at the lengths of training.

    `mesh` is of the devices; None where they are not known yet.
    """
    model = config.model
    packed = not config.data.cross_documents
    if model.kernel == 'auto':
        return
    for setting, make_spec in sites(model).items():
        with _refused(setting), choice.on(mesh):
            _attend_once(model, setting, make_spec(), packed=packed)


@contextlib.contextmanager
def _refused(setting: str) -> Iterator[None]:
    """A SpecError becomes a ConfigError that names the setting."""
    try:
        yield
    except SpecError as error:
        raise ConfigError(f'{setting}: {error}') from error


def _attend_once(
    model: ModelConfig, setting: str, spec: AttentionSpec, packed: bool = False
) -> None:
    """Traces the layer of one site with the shapes and the mask of training.

    `packed` rows hold several documents; those of an encoder-decoder hold several pairs anyway.
    """
    in_encoder = setting == 'model.encoder_variant'
    cross = setting == 'model.cross_variant'
    T = model.encoder.context if in_encoder else model.context
    S = model.encoder.context if cross else T

    def attend(layer: Attention, x_BTD: jax.Array, y_BSD: jax.Array) -> jax.Array:
        causal = not in_encoder and not cross and model.kind != 'encoder'
        mask = Mask(causal=causal, window=spec.window)
        if packed or model.kind == 'encoder_decoder':
            mask = dataclasses.replace(
                mask,
                segments_BT=jnp.ones((1, T), jnp.int32),
                segments_BS=jnp.ones((1, S), jnp.int32),
            )
        return layer.attend_to(
            x_BTD,
            layer.cached(y_BSD),
            mask,
            cross=cross,
            dropout=model.probability_dropout,
            dropout_key=jax.random.key(0),
        )

    dtype = jnp.dtype(model.compute_dtype)
    layer = nnx.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    layer = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), layer)
    x_BTD = jax.ShapeDtypeStruct((1, T, model.d_model), dtype)
    y_BSD = jax.ShapeDtypeStruct((1, S, model.d_model), dtype)
    jax.eval_shape(attend, layer, x_BTD, y_BSD)
