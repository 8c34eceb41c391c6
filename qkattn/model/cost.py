"""The cost of a model: parameters, FLOPs per token, cache floats per token.

Costs are counted from abstract shapes of the parameters, the traced program and the caches.
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
from jax.interpreters.partial_eval import dce_jaxpr

from qkattn.attention import Cache
from qkattn.config import ModelConfig
from qkattn.model.transformer import Transformer, abstract_model

GROUPS = ('embedding', 'attention', 'mlp', 'norm')


def abstract_params(config: ModelConfig) -> dict:
    """Returns the parameter tree with shapes in place of arrays."""
    return nnx.to_pure_dict(nnx.state(abstract_model(config)))


def group_of(path: str) -> str:
    """Returns the group of a parameter: 'blocks/mlp/w_in_DF' -> 'mlp'.

    Raises:
        ValueError: The parameter belongs to no group.
    """
    *modules, name = path.split('/')
    if modules and modules[-1].endswith('norm'):
        return 'norm'
    for group in ('attention', 'mlp'):
        if any(module.endswith(group) for module in modules):
            return group
    is_outside_blocks = modules in ([], ['encoder'])
    if is_outside_blocks and name.startswith(('w_embedding', 'w_position', 'w_output')):
        return 'embedding'
    raise ValueError(f'parameter {path} belongs to no budget group of {", ".join(GROUPS)}')


def count(config: ModelConfig) -> dict[str, int]:
    """Counts the parameters of each group, and the 'total' of all groups."""
    parameters = dict.fromkeys(GROUPS, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(config)):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        parameters[group_of(name)] += math.prod(leaf.shape)
    return {**parameters, 'total': sum(parameters.values())}


@functools.lru_cache(maxsize=1024)
def flops_per_token(config: ModelConfig) -> float:
    """Counts the FLOPs per token of all matrix products in a forward pass with full context.

    A multiply-add counts as two. Masked positions count too. The count of an encoder-decoder is per
    target token and includes the encoding of a full source.
    """
    return _flops_per_token(config, lambda model, inputs: model(**inputs))


def training_flops_per_token(config: ModelConfig) -> float:
    """Counts the FLOPs per token of a forward and a backward pass.

    The rules are those of `flops_per_token`. Forward computations that model.remat repeats count
    again.
    """

    # Only matrix products count, so any scalar function of the logits will do.
    def loss(model: Transformer, inputs: dict[str, jax.Array]) -> jax.Array:
        return jnp.square(model(**inputs)).sum()

    return _flops_per_token(config, jax.value_and_grad(loss))


def _flops_per_token(config: ModelConfig, program: Callable) -> float:
    """Returns the FLOPs per token of program(model, inputs) on one row of full context."""
    # The einsum kernel computes every variant, masked positions included.
    config = dataclasses.replace(config, kernel='einsum')
    inputs = {'tokens_BT': jax.ShapeDtypeStruct((1, config.context), jnp.int32)}
    if config.kind == 'encoder_decoder':
        inputs['source_BS'] = jax.ShapeDtypeStruct((1, config.encoder.context), jnp.int32)
    jaxpr = jax.make_jaxpr(program)(abstract_model(config), inputs).jaxpr
    # XLA removes products that no output depends on, such as the keys of absorbed latents.
    all_outputs = [True] * len(jaxpr.outvars)
    used_jaxpr, _ = dce_jaxpr(jaxpr, used_outputs=all_outputs)
    return _matmul_flops(used_jaxpr) / config.context


def _matmul_flops(jaxpr: Jaxpr) -> int:
    """Returns the FLOPs of all matrix products (dot_general) in a jaxpr.

    Equations that compute the same value count once, because XLA merges them.
    """
    flops = 0
    # Variables that hold the same value have the same id.
    id_of_variable: dict[Any, Any] = {}
    counted_computations: set[int] = set()
    for equation in jaxpr.eqns:
        primitive = equation.primitive.name
        input_ids: list[Any] = []
        for variable in equation.invars:
            if isinstance(variable, Literal):
                input_ids.append(repr(variable))
            elif variable in id_of_variable:
                input_ids.append(id_of_variable[variable])
            else:
                input_ids.append(id(variable))  # an argument of the jaxpr

        # The same primitive with the same parameters and inputs computes the same value.
        computation = hash((primitive, str(equation.params), tuple(input_ids)))
        for output_index, variable in enumerate(equation.outvars):
            id_of_variable[variable] = (computation, output_index)
        if computation in counted_computations:
            continue
        counted_computations.add(computation)

        if primitive == 'dot_general':
            flops += _dot_general_flops(equation)
        # The body of a scan runs `length` times.
        repeats = equation.params['length'] if primitive == 'scan' else 1
        for inner_jaxpr in _inner_jaxprs(equation):
            flops += repeats * _matmul_flops(inner_jaxpr)
    return flops


def _inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    """Returns the jaxprs among an equation's parameters, such as the body of a scan."""
    parameters = list(equation.params.values())
    jaxprs = []
    for leaf in jax.tree.leaves(parameters, is_leaf=_is_jaxpr):
        if isinstance(leaf, ClosedJaxpr):
            jaxprs.append(leaf.jaxpr)
        elif isinstance(leaf, Jaxpr):
            jaxprs.append(leaf)
    return jaxprs


def _dot_general_flops(equation: JaxprEqn) -> int:
    """Returns the FLOPs of a matrix product, two per output element and contracted element."""
    contracted_axes, _ = equation.params['dimension_numbers']
    left_contracted_axes, _ = contracted_axes  # one tuple for each of the two matrices
    left_shape = equation.invars[0].aval.shape  # type: ignore[attr-defined]
    output_shape = equation.outvars[0].aval.shape  # type: ignore[attr-defined]
    contracted_size = math.prod(left_shape[axis] for axis in left_contracted_axes)
    return 2 * math.prod(output_shape) * contracted_size


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr))


@functools.lru_cache(maxsize=1024)
def cache_floats_per_token(config: ModelConfig) -> int:
    """Counts the floats per token in the key/value caches of all layers.

    For an encoder-decoder, this is the sum for one target token and one source token. An encoder
    has no cache.
    """
    if config.kind == 'encoder':
        return 0
    # The attention layers of a block.
    sites = ['attention']
    if config.kind == 'encoder_decoder':
        sites.append('cross_attention')

    def cache_token(model: Transformer, token_11D: jax.Array) -> list[Cache]:
        """Returns each layer's cache of one token."""
        caches = []
        for site in sites:
            for layer in model.layers(site):
                caches.append(layer.cached(token_11D))
        return caches

    token_11D = jax.ShapeDtypeStruct((1, 1, config.d_model), jnp.float32)
    caches = jax.eval_shape(cache_token, abstract_model(config), token_11D)
    return sum(math.prod(array.shape) for array in jax.tree.leaves(caches))


@functools.lru_cache(maxsize=1024)
def measured(config: ModelConfig, which: str) -> float | int:
    """Returns one cost of a model.

    Args:
        config: The model settings.
        which: 'total' or 'non_embedding' for the parameter count; 'flops' for the FLOPs per token
            of a forward pass; 'cache' for the cached floats per token.
    """
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
