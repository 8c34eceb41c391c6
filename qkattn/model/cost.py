"""The cost of a model: parameters, FLOPs per token, cache floats per token.

There are no formulas here. The parameter tree, the program and the caches are built with shapes in
place of arrays, and their sizes are counted.
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
    """Returns the parameter tree with shapes in place of arrays."""
    return nnx.to_pure_dict(nnx.state(abstract_model(config)))


def group_of(path: str) -> str:
    """Returns the group in which a parameter is counted: 'blocks/mlp/w_in_DF' -> 'mlp'.

    Raises ValueError for a parameter that belongs to no group.
    """
    *modules, name = path.split('/')
    if modules and modules[-1].endswith('norm'):
        return 'norm'
    for group in ('attention', 'mlp'):
        if any(module.endswith(group) for module in modules):
            return group
    # The embeddings are parameters of the model itself, or of its encoder.
    is_outside_of_blocks = modules in ([], ['encoder'])
    if is_outside_of_blocks and name.startswith(('w_embedding', 'w_position', 'w_output')):
        return 'embedding'
    raise ValueError(f'parameter {path} belongs to no budget group of {", ".join(GROUPS)}')


def count(config: ModelConfig) -> dict[str, int]:
    """Counts the parameters of each group, and of all groups as 'total'."""
    parameters = dict.fromkeys(GROUPS, 0)
    for path, leaf in jax.tree_util.tree_leaves_with_path(abstract_params(config)):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        parameters[group_of(name)] += math.prod(leaf.shape)
    return {**parameters, 'total': sum(parameters.values())}


@functools.lru_cache(maxsize=1024)  # Tracing takes long, and configs come again.
def flops_per_token(config: ModelConfig) -> float:
    """Counts the floating-point operations of all matrix products in a forward pass, per token.

    A multiply-add counts as two. The context is full, and masked positions count too, whatever
    model.kernel is. For an encoder-decoder the count is per target token, and includes the encoding
    of a full source.
    """
    return _flops_per_token(config, lambda model, inputs: model(**inputs))


def training_flops_per_token(config: ModelConfig) -> float:
    """Counts the FLOPs of a forward and a backward pass per token, as `flops_per_token` does.

    There are about three times as many as in the forward pass alone. There are fewer if some
    parameters do not train, and more if model.remat repeats parts of the forward pass.
    """

    # Any scalar of the logits will do: only matrix products are counted.
    def loss(model: Transformer, inputs: dict[str, jax.Array]) -> jax.Array:
        return jnp.square(model(**inputs)).sum()

    return _flops_per_token(config, jax.value_and_grad(loss))


def _flops_per_token(config: ModelConfig, program: Callable) -> float:
    """Returns the FLOPs per token of program(model, inputs) on one row of full context."""
    config = dataclasses.replace(config, kernel='einsum')
    inputs = {'tokens_BT': jax.ShapeDtypeStruct((1, config.context), jnp.int32)}
    if config.kind == 'encoder_decoder':
        inputs['source_BS'] = jax.ShapeDtypeStruct((1, config.encoder.context), jnp.int32)
    jaxpr = jax.make_jaxpr(program)(abstract_model(config), inputs)
    return _matmul_flops(jaxpr.jaxpr) / config.context


def _matmul_flops(jaxpr: Jaxpr) -> int:
    """Returns the FLOPs of all matrix products (dot_general) in a program.

    The compiler merges equations that compute the same value, so they count once. For example,

        a = dot_general x w
        b = dot_general x w
        c = dot_general a b

    counts as two products: b is equal to a, because the same primitive with the same parameters is
    applied to the same inputs.
    """
    flops = 0
    # The id of the value that a variable holds. In the example, a and b have the same id.
    id_of_variable: dict[Any, Any] = {}
    # The hashes of the computations so far: in the example, of x w and of a b.
    computed: set[int] = set()
    for equation in jaxpr.eqns:
        primitive = equation.primitive.name
        input_ids: list[Any] = []
        for variable in equation.invars:
            if isinstance(variable, Literal):
                input_ids.append(repr(variable))  # literals of the same value are equal
            elif variable in id_of_variable:
                input_ids.append(id_of_variable[variable])
            else:
                # An argument of the program, such as x: it is equal to no other variable.
                input_ids.append(id(variable))

        # Equations with the same hash compute the same value, so their outputs get the same ids.
        computation = hash((primitive, str(equation.params), tuple(input_ids)))
        for index, variable in enumerate(equation.outvars):
            id_of_variable[variable] = (computation, index)
        if computation in computed:
            continue  # an earlier equation has counted it, together with its inner programs
        computed.add(computation)

        if primitive == 'dot_general':
            flops += _dot_general_flops(equation)
        # The body of a scan runs `length` times.
        repeats = equation.params['length'] if primitive == 'scan' else 1
        for inner_jaxpr in _inner_jaxprs(equation):
            flops += repeats * _matmul_flops(inner_jaxpr)
    return flops


def _inner_jaxprs(equation: JaxprEqn) -> list[Jaxpr]:
    """Returns the programs among the parameters of an equation, e.g. the body of a scan."""
    parameters = list(equation.params.values())
    jaxprs = []
    for value in jax.tree.leaves(parameters, is_leaf=_is_jaxpr):
        if isinstance(value, ClosedJaxpr):
            jaxprs.append(value.jaxpr)
        elif isinstance(value, Jaxpr):
            jaxprs.append(value)
    return jaxprs


def _dot_general_flops(equation: JaxprEqn) -> int:
    """Returns 2 * outputs * contracted: each output element sums that many products."""
    (contracted_axes, _), _ = equation.params['dimension_numbers']
    left_shape = equation.invars[0].aval.shape  # type: ignore[attr-defined]
    out_shape = equation.outvars[0].aval.shape  # type: ignore[attr-defined]
    contracted = math.prod(left_shape[axis] for axis in contracted_axes)
    return 2 * math.prod(out_shape) * contracted


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr))


@functools.lru_cache(maxsize=1024)
def cache_floats_per_token(config: ModelConfig) -> int:
    """Returns how many floats the key/value cache of decoding holds per token, over all layers.

    An encoder-decoder caches target tokens and source tokens. Its number is the floats of one
    target token plus the floats of one source token. An encoder does not decode: its number is 0.
    """
    if config.kind == 'encoder':
        return 0
    # The attributes of a block that hold attention layers.
    sites = ['attention']
    if config.kind == 'encoder_decoder':
        sites.append('cross_attention')

    def cached(model: Transformer, token_11D: jax.Array) -> list[Cache]:
        """Returns what each layer caches of one token."""
        caches = []
        for site in sites:
            for layer in model.layers(site):
                caches.append(layer.cached(token_11D))
        return caches

    token_11D = jax.ShapeDtypeStruct((1, 1, config.d_model), jnp.float32)
    caches = jax.eval_shape(cached, abstract_model(config), token_11D)
    return sum(math.prod(array.shape) for array in jax.tree.leaves(caches))


@functools.lru_cache(maxsize=1024)
def measured(config: ModelConfig, which: str) -> float | int:
    """Returns one cost of a model.

    `which` is 'total' or 'non_embedding', for numbers of parameters; 'flops', for the FLOPs of a
    forward pass per token; or 'cache', for the floats per token that decoding caches.
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
