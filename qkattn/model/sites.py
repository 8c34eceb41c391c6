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

# `attention_spec` stores its result in this attribute of the ModelConfig.
SPEC = '_attention_spec'


def attention_spec(config: ModelConfig) -> AttentionSpec:
    """Returns the specification of a config's self-attention layers.

    The same config always gives the same object, so that its check runs only once. Raises SpecError
    if the sizes do not fit together.
    """
    if SPEC in vars(config):
        return vars(config)[SPEC]
    # The fields have the same names in both classes, except for the residual gain.
    fields = {}
    for field in dataclasses.fields(AttentionSpec):
        if field.name != 'residual_gain':
            fields[field.name] = getattr(config, field.name)
    if config.positions not in ('rope', 'alibi'):
        # Learned and sinusoidal positions are added to the stream, outside of attention.
        fields['positions'] = 'none'
    spec = AttentionSpec(**fields, residual_gain=config.num_branches**-0.5)
    vars(config)[SPEC] = spec
    return spec


def sites(config: ModelConfig) -> dict[str, Callable[[], AttentionSpec]]:
    """Returns, for each attention site of a model, a function that makes its specification.

    A site is a group of attention layers with one specification. Its key is the setting that
    decides it: 'model'; with a pattern also 'model.pattern[0]', 'model.pattern[1]', ...; and in an
    encoder-decoder also 'model.encoder_variant' and 'model.cross_variant'.

    The functions raise SpecError if the settings do not fit together. So a caller can name the
    setting of the site that fails.
    """
    specs: dict[str, Callable[[], AttentionSpec]] = {}

    def add(setting: str, layer_config: Callable[[], ModelConfig]) -> None:
        specs[setting] = lambda: attention_spec(layer_config())

    def config_of_variant(index: int) -> Callable[[], ModelConfig]:
        return lambda: config.cycle[index]

    add('model', lambda: config)
    if config.pattern is not None:
        for index in range(len(split_pattern(config.pattern))):
            add(f'model.pattern[{index}]', config_of_variant(index))
    if config.kind == 'encoder_decoder':
        add('model.encoder_variant', lambda: config.encoder)
        add('model.cross_variant', lambda: config.cross)
    return specs


def validate(config: Config) -> None:
    """Raises ConfigError for the first invalid setting of a run. It does not compile anything."""
    validate_settings(config)
    for setting, make_spec in sites(config.model).items():
        with _refused(setting):
            spec = make_spec()
        check = _refused(setting)(functools.partial(registry.check, spec))

        # A name with a colon is the import path of a class from outside the package.
        outside = [name for name in (str(spec.variant), spec.normalizer) if ':' in name]
        if not outside:
            check()
            continue

        # The code of such classes may raise anything, and `called` turns it into a ConfigError.
        # Their arrays may not fit together, so one attention is traced. The plain kernel will do
        # here, because `check_kernel` below checks the others.
        names = ', '.join(outside)
        called(setting, names, check)
        spec = dataclasses.replace(spec, kernel='einsum')
        packed = not config.data.cross_documents
        attend_once = functools.partial(_attend_once, config.model, setting, spec, packed)
        called(setting, names, attend_once)
    check_kernel(config, None)


def check_kernel(config: Config, mesh: Mesh | None) -> None:
    """Raises ConfigError if model.kernel cannot serve a layer at the context lengths of training.

    `mesh` is that of the devices, or None if they are not known yet.
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
    """Turns a SpecError raised inside the block into a ConfigError that names the setting."""
    try:
        yield
    except SpecError as error:
        raise ConfigError(f'{setting}: {error}') from error


def _attend_once(
    model: ModelConfig, setting: str, spec: AttentionSpec, packed: bool = False
) -> None:
    """Traces the layer of one site with the shapes and the mask of training, without computing it.

    The trace raises what the layer's code would raise in training. `packed` rows hold several
    documents; rows of an encoder-decoder always hold several pairs.
    """
    in_encoder = setting == 'model.encoder_variant'
    cross = setting == 'model.cross_variant'
    T = model.encoder.context if in_encoder else model.context
    S = model.encoder.context if cross else T

    def attend(layer: Attention, x_BTD: jax.Array, y_BSD: jax.Array) -> jax.Array:
        """Attends from T queries to S keys with the mask of this site."""
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
