"""The cost of a model: parameters, FLOPs per token, cache floats per token.

By abstract evaluation, not formulas, of the parameter tree, the program, and what layers cache.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from qkattn.config import ModelConfig
from qkattn.model.transformer import Transformer, abstract_model

GROUPS = ('embedding', 'attention', 'mlp', 'norm')


def abstract_params(config: ModelConfig) -> dict:
    """The parameter tree with shapes in place of arrays."""
    return nnx.to_pure_dict(nnx.state(abstract_model(config)))


def group_of(path: str) -> str:
    """The budget group of a parameter by its path, e.g. 'blocks/mlp/w_in_DF' -> 'mlp'."""
    *modules, name = path.split('/')
    if modules and modules[-1].endswith('norm'):
        return 'norm'
    for group in ('attention', 'mlp'):
        if any(module.endswith(group) for module in modules):
            return group
    if modules in ([], ['encoder']) and name.startswith(('w_embedding', 'w_position', 'w_output')):
        return 'embedding'
    raise ValueError(f'parameter {path} belongs to no budget group of {", ".join(GROUPS)}')


def count(config: ModelConfig) -> dict[str, int]:
    """Parameters per group and their total, as counted on the parameter tree."""
    parameters = dict.fromkeys(GROUPS, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(config)):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        parameters[group_of(name)] += math.prod(leaf.shape)
    return {**parameters, 'total': sum(parameters.values())}


@functools.lru_cache(maxsize=1024)  # a run of a known config need not trace it again
def flops_per_token(config: ModelConfig) -> float:
    """Floating-point operations of all matrix products in one forward pass, per token.

    Two per multiply-add at the full context, masked positions included, whatever model.kernel is.
    In an encoder-decoder, per target token, with the encoding of a full source.
    """
    return _flops_per_token(config, lambda model, inputs: model(**inputs))


def training_flops_per_token(config: ModelConfig) -> float:
    """As `flops_per_token`, of one forward and backward pass.

    Three times as much, less gradients of what is not trained, plus what model.remat repeats.
    """
    loss = jax.value_and_grad(lambda model, inputs: jnp.square(model(**inputs)).sum())
    return _flops_per_token(config, loss)


def _flops_per_token(config: ModelConfig, program: Callable) -> float:
    config = dataclasses.replace(config, kernel='einsum')
    inputs = {'tokens_BT': jax.ShapeDtypeStruct((1, config.context), jnp.int32)}
    if config.kind == 'encoder_decoder':
        inputs['source_BS'] = jax.ShapeDtypeStruct((1, config.encoder.context), jnp.int32)
    jaxpr = jax.make_jaxpr(program)(abstract_model(config), inputs)
    return _matmul_flops(jaxpr.jaxpr) / config.context


def _matmul_flops(jaxpr: Jaxpr) -> int:
    """FLOPs of all dot_generals; a value computed twice counts once, as the compiler merges it."""
    flops = 0
    values: dict[Any, Any] = {}
    seen: set[int] = set()
    for equation in jaxpr.eqns:
        inputs = tuple(
            repr(v) if isinstance(v, Literal) else values.get(v, id(v)) for v in equation.invars
        )
        value = hash((equation.primitive.name, str(equation.params), inputs))
        values.update({out: (value, i) for i, out in enumerate(equation.outvars)})
        if value in seen:
            continue
        seen.add(value)
        if equation.primitive.name == 'dot_general':
            (contracted, _), _ = equation.params['dimension_numbers']
            left, out = (v.aval.shape for v in (equation.invars[0], equation.outvars[0]))  # type: ignore[attr-defined]
            flops += 2 * math.prod(out) * math.prod(left[axis] for axis in contracted)
        repeats = equation.params['length'] if equation.primitive.name == 'scan' else 1
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                flops += repeats * _matmul_flops(getattr(inner, 'jaxpr', inner))
    return flops


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr))


@functools.lru_cache(maxsize=1024)
def cache_floats_per_token(config: ModelConfig) -> int:
    """Floats in the key/value cache of decoding per past token, over all layers.

    In an encoder-decoder, of one target token and one source token together; 0 for an encoder.
    """
    if config.kind == 'encoder':
        return 0
    sites = ['attention'] + ['cross_attention'] * (config.kind == 'encoder_decoder')
    y_BSD = jax.ShapeDtypeStruct((1, 1, config.d_model), jnp.float32)

    def cached(model: Transformer, y_BSD: jax.Array) -> list[dict]:
        return [layer.cached(y_BSD) for site in sites for layer in model.layers(site)]

    arrays = jax.tree.leaves(jax.eval_shape(cached, abstract_model(config), y_BSD))
    return sum(math.prod(array.shape) for array in arrays)


@functools.lru_cache(maxsize=1024)
def measured(config: ModelConfig, which: str) -> float | int:
    """The cost by name: 'total' or 'non_embedding' parameters, 'flops' or 'cache' per token."""
    if which == 'flops':
        return flops_per_token(config)
    if which == 'cache':
        return cache_floats_per_token(config)
    if which not in ('total', 'non_embedding'):
        raise ValueError(f'which={which!r} must be total, non_embedding, flops or cache')
    parameters = count(config)
    return parameters['total'] - (parameters['embedding'] if which == 'non_embedding' else 0)
