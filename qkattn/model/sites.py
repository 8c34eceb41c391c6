"""The attention sites of a model: groups of attention layers with one specification."""

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from qkattn.attention import Attention, Mask, registry
from qkattn.attention.kernels import choice
from qkattn.attention.spec import AttentionSpec
from qkattn.config import Config, ModelConfig
from qkattn.config.calls import call_with_config_errors
from qkattn.config.run_config import validate_settings
from qkattn.config.variant import split_pattern
from qkattn.errors import ConfigError, SpecError

# `attention_spec` stores its result in this attribute of the ModelConfig.
SPEC = '_attention_spec'


def attention_spec(config: ModelConfig) -> AttentionSpec:
    """Returns the self-attention specification of a model config.

    The same config always gives the same object.

    Raises:
        SpecError: The sizes do not fit together.
    """
    # The config caches the result. `vars` gives write access to a frozen dataclass.
    attributes = vars(config)
    if SPEC in attributes:
        return attributes[SPEC]

    field_names = [field.name for field in dataclasses.fields(AttentionSpec)]
    fields = {name: getattr(config, name) for name in field_names}
    if config.positions not in ('rope', 'alibi'):
        # Learned and sinusoidal positions are added to the stream, outside of attention.
        fields['positions'] = 'none'
    spec = AttentionSpec(**fields)
    attributes[SPEC] = spec
    return spec


def sites(config: ModelConfig) -> dict[str, Callable[[], AttentionSpec]]:
    """Returns a function for each attention site that makes the site's specification.

    A site is a group of attention layers with one specification. Its key is the setting that
    determines it: 'model', 'model.pattern[0]', 'model.encoder_variant' or 'model.cross_variant'.

    A function raises SpecError if its settings do not fit together.
    """

    def spec_in_pattern(index: int) -> AttentionSpec:
        return attention_spec(config.cycle[index])

    spec_makers: dict[str, Callable[[], AttentionSpec]] = {}
    spec_makers['model'] = lambda: attention_spec(config)
    if config.pattern is not None:
        num_variants = len(split_pattern(config.pattern))
        for index in range(num_variants):
            spec_makers[f'model.pattern[{index}]'] = functools.partial(spec_in_pattern, index)
    if config.kind == 'encoder_decoder':
        spec_makers['model.encoder_variant'] = lambda: attention_spec(config.encoder)
        spec_makers['model.cross_variant'] = lambda: attention_spec(config.cross)
    return spec_makers


def validate(config: Config) -> None:
    """Checks all settings of a run without compiling anything.

    Raises:
        ConfigError: A setting is invalid.
    """
    validate_settings(config)
    for setting, make_spec in sites(config.model).items():
        _check_site(config, setting, make_spec)
    check_kernel(config, mesh=None)


def _check_site(config: Config, setting: str, make_spec: Callable[[], AttentionSpec]) -> None:
    """Raises ConfigError if an attention layer cannot be built.

    `setting` determines the layer's specification, such as 'model' or 'model.encoder_variant'.
    """
    with _as_config_error(setting):
        spec = make_spec()
        # A name with a colon is the import path of a class from outside the package.
        outside_names = [name for name in (str(spec.variant), spec.normalizer) if ':' in name]
        if not outside_names:
            registry.check(spec)
            return

    # Code from outside the package may raise any exception, which becomes a ConfigError.
    joined_names = ', '.join(outside_names)
    call_with_config_errors(
        setting, joined_names, lambda: _check_outside_code(config, setting, joined_names, spec)
    )


def _check_outside_code(config: Config, setting: str, names: str, spec: AttentionSpec) -> None:
    """Raises ConfigError if an attention layer with code from outside the package cannot be used.

    Args:
        config: The settings of the run.
        setting: The setting that names the code.
        names: The value of the setting, for error messages.
        spec: The specification of the layer.
    """
    with _as_config_error(setting):
        registry.check(spec)
    # The einsum kernel computes every variant.
    einsum_spec = dataclasses.replace(spec, kernel='einsum')
    bare_array = _bare_array(_abstract_layer(einsum_spec))
    if bare_array is not None:
        raise ConfigError(
            f'{setting}={names!r} has an array as its attribute {bare_array!r}; make it '
            'an nnx.Param to train it, or compute it in the method that needs it'
        )
    x_BTD, out_BTD = _trace_attention(config, setting, einsum_spec)
    # The residual sum would broadcast another shape without an error.
    if out_BTD.shape != x_BTD.shape:
        raise ConfigError(
            f'{setting}={names!r} returns an output of shape {out_BTD.shape} for a '
            f'stream of shape {x_BTD.shape}; both must have the same shape'
        )
    # The scan over layers refuses a stream that gets wider.
    stream_dtype = jnp.promote_types(x_BTD.dtype, out_BTD.dtype)
    if stream_dtype != x_BTD.dtype:
        raise ConfigError(
            f'{setting}={names!r} returns an output of {out_BTD.dtype} for a stream of '
            f'{x_BTD.dtype}, which is model.compute_dtype; cast it with .astype(x_BTD.dtype)'
        )


def check_kernel(config: Config, mesh: Mesh | None) -> None:
    """Checks that model.kernel can compute the attention layers in training.

    Args:
        config: The settings of the run.
        mesh: The devices of the run; None, if unknown, accepts a kernel that some platform
            supports.

    Raises:
        ConfigError: The kernel cannot compute a layer.
    """
    if config.model.kernel == 'auto':
        return
    for setting, make_spec in sites(config.model).items():
        with _as_config_error(setting), choice.tracing_for_mesh(mesh):
            _trace_attention(config, setting, make_spec())


@contextlib.contextmanager
def _as_config_error(setting: str) -> Iterator[None]:
    """Turns a SpecError inside the block into a ConfigError that names the setting."""
    try:
        yield
    except SpecError as error:
        raise ConfigError(f'{setting}: {error}') from error


def _trace_attention(
    config: Config, setting: str, spec: AttentionSpec
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Traces an attention layer as in training, without computing it.

    Args:
        config: The settings of the run.
        setting: The setting that determines the specification, such as 'model.encoder_variant'.
        spec: The specification of the layer.

    Returns:
        The shapes of the layer's input and output.
    """
    model = config.model
    is_in_encoder = setting == 'model.encoder_variant'
    is_cross = setting == 'model.cross_variant'
    is_bidirectional = model.kind == 'encoder' or is_in_encoder
    is_causal = not is_bidirectional and not is_cross
    # T queries attend to S keys.
    T = model.encoder.context if is_in_encoder else model.context
    S = model.encoder.context if is_cross else T
    # The segments of a row are documents, or sentence pairs in an encoder-decoder.
    has_segments = not config.data.cross_documents or model.kind == 'encoder_decoder'

    attend = functools.partial(
        _attend_as_in_training,
        is_causal=is_causal,
        is_cross=is_cross,
        has_segments=has_segments,
        dropout=model.probability_dropout,
    )
    dtype = jnp.dtype(model.compute_dtype)
    layer = _abstract_layer(spec)
    layer = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, dtype), layer)
    x_BTD = jax.ShapeDtypeStruct((1, T, model.d_model), dtype)
    y_BSD = jax.ShapeDtypeStruct((1, S, model.d_model), dtype)
    return x_BTD, jax.eval_shape(attend, layer, x_BTD, y_BSD)


def _abstract_layer(spec: AttentionSpec) -> Attention:
    """Returns an attention layer with shapes in place of arrays."""
    return nnx.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))


def _bare_array(layer: Attention) -> str | None:
    """Returns the name of an attribute that is an array, but no nnx.Variable; None without one.

    Such an array is neither trained nor saved, and JAX cannot compare layers that have one.
    """
    for path, node in nnx.iter_graph(layer):
        if isinstance(node, jax.Array | np.ndarray):
            # A path such as ('score', 'table'), whose first name is the part of the layer.
            names_in_part = path[1:]
            return '.'.join(str(name) for name in names_in_part)
    return None


def _attend_as_in_training(
    layer: Attention,
    x_BTD: jax.Array,
    y_BSD: jax.Array,
    *,
    is_causal: bool,
    is_cross: bool,
    has_segments: bool,
    dropout: float,
) -> jax.Array:
    """Attends from T tokens x to S tokens y, for tracing.

    Segments and the dropout key have arbitrary values, because tracing needs only their shapes.
    """
    segments_BT = None
    segments_BS = None
    if has_segments:
        segments_BT = jnp.ones(x_BTD.shape[:2], jnp.int32)
        segments_BS = jnp.ones(y_BSD.shape[:2], jnp.int32)
    mask = Mask(
        causal=is_causal,
        window=layer.spec.window,
        segments_BT=segments_BT,
        segments_BS=segments_BS,
    )
    return layer.attend_to(
        x_BTD,
        layer.cached(y_BSD),
        mask,
        cross=is_cross,
        dropout=dropout,
        dropout_key=jax.random.key(0),
    )
