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
    names = {field.name for field in dataclasses.fields(AttentionSpec)} - {'residual_gain'}
    fields = {name: getattr(config, name) for name in names}
    if config.positions not in ('rope', 'alibi'):
        fields['positions'] = 'none'  # added to the stream, outside of attention
    return AttentionSpec(**fields, residual_gain=config.num_branches**-0.5)


def sites(config: ModelConfig) -> dict[str, Callable[[], AttentionSpec]]:
    """The attention layers of a model: a function that makes each specification, by its setting."""
    specs = {'model': lambda: attention_spec(config)}

    def at_turn(turn: int) -> Callable[[], AttentionSpec]:
        return lambda: attention_spec(config.cycle[turn])

    for turn in range(0 if config.pattern is None else len(split_pattern(config.pattern))):
        specs[f'model.pattern[{turn}]'] = at_turn(turn)
    if config.kind == 'encoder_decoder':
        specs['model.encoder_variant'] = lambda: attention_spec(config.encoder)
        specs['model.cross_variant'] = lambda: attention_spec(config.cross)
    return specs


def validate(config: Config) -> None:
    """Raises ConfigError for the first invalid setting of a run; nothing compiles."""
    validate_settings(config)
    for where, spec in sites(config.model).items():
        with _refused(where):
            made = spec()
        check = _refused(where)(functools.partial(registry.check, made))
        outside = ', '.join(x for x in (str(made.variant), made.normalizer) if ':' in x)
        if not outside:
            check()
            continue
        called(where, outside, check)
        plain = dataclasses.replace(made, kernel='einsum')  # other kernels are checked below
        # The arrays of classes from outside may not fit together.
        called(where, outside, functools.partial(_attend_once, config.model, where, plain))
    check_kernel(config.model, None)


def check_kernel(model: ModelConfig, mesh: Mesh | None) -> None:
    """ConfigError where model.kernel cannot serve a layer at the lengths of training.

    `mesh` is of the devices; None where they are not known yet.
    """
    if model.kernel == 'auto':
        return
    for where, spec in sites(model).items():
        with _refused(where), choice.on(mesh):
            _attend_once(model, where, spec())


@contextlib.contextmanager
def _refused(where: str) -> Iterator[None]:
    """A SpecError becomes a ConfigError that names the setting."""
    try:
        yield
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
