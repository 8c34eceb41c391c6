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
      SpecError: the sizes do not fit together.
    """
    # The config caches the result. `vars` gives write access to a frozen dataclass.
    attributes = vars(config)
    if SPEC in attributes:
        return attributes[SPEC]

    field_names = [field.name for field in dataclasses.fields(AttentionSpec)]
    field_names.remove('residual_gain')  # the only field that the config lacks
    fields = {name: getattr(config, name) for name in field_names}
    if config.positions not in ('rope', 'alibi'):
        # Learned and sinusoidal positions are added to the stream, outside of attention.
        fields['positions'] = 'none'
    # The sum of n residual branches has n times the variance of one. The gain cancels the factor n.
    residual_gain = config.num_branches**-0.5
    spec = AttentionSpec(**fields, residual_gain=residual_gain)
    attributes[SPEC] = spec
    return spec


def sites(config: ModelConfig) -> dict[str, Callable[[], AttentionSpec]]:
    """Returns, for each attention site of a model, a function that makes its specification.

    A site is a group of attention layers with one specification. Its key is the setting that
    decides it: 'model'; with a pattern also 'model.pattern[0]', 'model.pattern[1]', ...; and in an
    encoder-decoder also 'model.encoder_variant' and 'model.cross_variant'.

    A function raises SpecError if the settings of its site do not fit together. The caller can then
    name the setting.
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
    """Raises ConfigError for the first invalid setting of a run. It does not compile anything."""
    validate_settings(config)
    for setting, make_spec in sites(config.model).items():
        _check_site(config, setting, make_spec)
    check_kernel(config, None)


def _check_site(config: Config, setting: str, make_spec: Callable[[], AttentionSpec]) -> None:
    """Raises ConfigError if the attention layers of one site cannot be built.

    A site is a group of layers with one specification, which `make_spec` makes. `setting` decides
    it, such as 'model' or 'model.encoder_variant'; see `sites`.
    """
    with _as_config_error(setting):
        spec = make_spec()

    # A name with a colon is the import path of a class from outside the package.
    outside_names = [name for name in (str(spec.variant), spec.normalizer) if ':' in name]
    joined_names = ', '.join(outside_names)

    def check_spec() -> None:
        with _as_config_error(setting):
            registry.check(spec)

    def trace_layer() -> None:
        # 'einsum' computes every variant. `check_kernel` checks the other kernels.
        plain_spec = dataclasses.replace(spec, kernel='einsum')
        x_BTD, out_BTD = _trace_attention(config, setting, plain_spec)
        # The stream would broadcast an output of another shape without an error.
        if out_BTD.shape != x_BTD.shape:
            raise ConfigError(
                f'{setting}={joined_names!r} returns an output of shape {out_BTD.shape} for a '
                f'stream of shape {x_BTD.shape}; both must have the same shape'
            )

    if not outside_names:
        check_spec()
        return

    # Code from outside may raise anything, and every exception becomes a ConfigError. A trace finds
    # out whether its arrays fit together.
    call_with_config_errors(setting, joined_names, check_spec)
    call_with_config_errors(setting, joined_names, trace_layer)


def check_kernel(config: Config, mesh: Mesh | None) -> None:
    """Raises ConfigError if the kernel of model.kernel cannot compute a layer in training.

    `mesh` has the devices of the run. It is None if they are not known yet; then only a kernel that
    no platform could use is refused.
    """
    if config.model.kernel == 'auto':
        return
    for setting, make_spec in sites(config.model).items():
        with _as_config_error(setting), choice.tracing_for_mesh(mesh):
            _trace_attention(config, setting, make_spec())


@contextlib.contextmanager
def _as_config_error(setting: str) -> Iterator[None]:
    """Turns a SpecError raised inside the block into a ConfigError that names the setting."""
    try:
        yield
    except SpecError as error:
        raise ConfigError(f'{setting}: {error}') from error


def _trace_attention(
    config: Config, setting: str, spec: AttentionSpec
) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
    """Traces one attention layer as in training, without computing it.

    Returns the shapes of the stream of the queries and of the output. The trace raises what the
    layer's code would raise in training.

    Args:
      config: the settings of the run.
      setting: the setting that decides the layer's specification, such as 'model'; see `sites`.
      spec: the specification of the layer, in which the caller may have replaced the kernel.
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

    def attend(layer: Attention, x_BTD: jax.Array, y_BSD: jax.Array) -> jax.Array:
        """Attends with the mask of this site, as in training."""
        mask = Mask(
            causal=is_causal,
            window=spec.window,
            segments_BT=jnp.ones((1, T), jnp.int32) if has_segments else None,
            segments_BS=jnp.ones((1, S), jnp.int32) if has_segments else None,
        )
        return layer.attend_to(
            x_BTD,
            layer.cached(y_BSD),
            mask,
            cross=is_cross,
            dropout=model.probability_dropout,
            dropout_key=jax.random.key(0),
        )

    # There are only shapes in place of arrays. All have the dtype in which training computes.
    dtype = jnp.dtype(model.compute_dtype)
    layer = nnx.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    layer = jax.tree.map(lambda array: jax.ShapeDtypeStruct(array.shape, dtype), layer)
    x_BTD = jax.ShapeDtypeStruct((1, T, model.d_model), dtype)
    y_BSD = jax.ShapeDtypeStruct((1, S, model.d_model), dtype)
    return x_BTD, jax.eval_shape(attend, layer, x_BTD, y_BSD)
