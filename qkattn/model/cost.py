"""The cost of a model: parameters, FLOPs per token, cache floats per token.

No formulas: the parameter tree, the program and the caches of layers are evaluated with shapes in
place of arrays, and what they hold is counted.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal

from qkattn.attention import Cache
from qkattn.config import ModelConfig
from qkattn.model.transformer import Transformer, abstract_model

GROUPS = ('embedding', 'attention', 'mlp', 'norm')


def abstract_params(config: ModelConfig) -> dict:
    """The parameter tree with shapes in place of arrays."""
    return nnx.to_pure_dict(nnx.state(abstract_model(config)))


def group_of(path: str) -> str:
    """The budget group of a parameter by its path: 'blocks/mlp/w_in_DF' -> 'mlp'.

    ValueError for a parameter of no group.
    """
    *modules, name = path.split('/')
    if modules and modules[-1].endswith('norm'):
        return 'norm'
    for group in ('attention', 'mlp'):
        if any(module.endswith(group) for module in modules):
            return group
    of_stream = modules in ([], ['encoder'])
    if of_stream and name.startswith(('w_embedding', 'w_position', 'w_output')):
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

    def loss(model: Transformer, inputs: dict[str, jax.Array]) -> jax.Array:
        return jnp.square(model(**inputs)).sum()

    return _flops_per_token(config, jax.value_and_grad(loss))


def _flops_per_token(config: ModelConfig, program: Callable) -> float:
    """FLOPs of program(model, inputs) on one row of the full context, by tokens of the context."""
    config = dataclasses.replace(config, kernel='einsum')
    inputs = {'tokens_BT': jax.ShapeDtypeStruct((1, config.context), jnp.int32)}
    if config.kind == 'encoder_decoder':
        inputs['source_BS'] = jax.ShapeDtypeStruct((1, config.encoder.context), jnp.int32)
    jaxpr = jax.make_jaxpr(program)(abstract_model(config), inputs)
    return _matmul_flops(jaxpr.jaxpr) / config.context


def _matmul_flops(jaxpr: Jaxpr) -> int:
    """FLOPs of all dot_generals; a value computed twice counts once, as the compiler merges it.

    Two equations compute the same value where the primitive, its parameters and the values of its
    inputs are the same.
    """
    flops = 0
    value_of: dict[Any, Any] = {}  # what identifies the value of a variable
    computed: set[int] = set()
    for equation in jaxpr.eqns:
        primitive = equation.primitive.name
        inputs = []
        for variable in equation.invars:
            if isinstance(variable, Literal):
                inputs.append(repr(variable))
            else:
                inputs.append(value_of.get(variable, id(variable)))
        value = hash((primitive, str(equation.params), tuple(inputs)))
        for index, variable in enumerate(equation.outvars):
            value_of[variable] = (value, index)
        if value in computed:
            continue
        computed.add(value)
        if primitive == 'dot_general':
            flops += _dot_general_flops(equation)
        repeats = equation.params['length'] if primitive == 'scan' else 1
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                flops += repeats * _matmul_flops(getattr(inner, 'jaxpr', inner))
    return flops


def _dot_general_flops(equation: JaxprEqn) -> int:
    """Two for each multiply-add: one per output element and contracted element."""
    (contracted_axes, _), _ = equation.params['dimension_numbers']
    left_shape = equation.invars[0].aval.shape  # type: ignore[attr-defined]
    out_shape = equation.outvars[0].aval.shape  # type: ignore[attr-defined]
    contracted = math.prod(left_shape[axis] for axis in contracted_axes)
    return 2 * math.prod(out_shape) * contracted


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr))


@functools.lru_cache(maxsize=1024)
def cache_floats_per_token(config: ModelConfig) -> int:
    """Floats in the key/value cache of decoding per past token, over all layers.

    In an encoder-decoder, of one target token and one source token together; 0 for an encoder.
    """
    if config.kind == 'encoder':
        return 0
    sites = ['attention']
    if config.kind == 'encoder_decoder':
        sites.append('cross_attention')
    y_BSD = jax.ShapeDtypeStruct((1, 1, config.d_model), jnp.float32)

    def cached(model: Transformer, y_BSD: jax.Array) -> list[Cache]:
        """What every layer caches of one position."""
        caches = []
        for site in sites:
            for layer in model.layers(site):
                caches.append(layer.cached(y_BSD))
        return caches

    arrays = jax.tree.leaves(jax.eval_shape(cached, abstract_model(config), y_BSD))
    return sum(math.prod(array.shape) for array in arrays)


@functools.lru_cache(maxsize=1024)
def measured(config: ModelConfig, which: str) -> float | int:
    """The cost by name: 'total' or 'non_embedding' parameters, 'flops' or 'cache' per token."""
    match which:
        case 'total':
            return count(config)['total']
        case 'non_embedding':
            parameters = count(config)
            return parameters['total'] - parameters['embedding']
        case 'flops':
            return flops_per_token(config)
        case 'cache':
            return cache_floats_per_token(config)
    raise ValueError(f'which={which!r} must be total, non_embedding, flops or cache')
