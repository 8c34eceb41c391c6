"""Stacks of layers of one variant each, and the scan over them."""

import contextvars
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import Mask
from qkattn.attention.parameters import set_context_variable
from qkattn.config import ModelConfig
from qkattn.model.blocks import Block

# What a layer keeps for the backward pass: nothing, or its products with weight matrices. Unlike
# q k^T and p v, these have no batch axes.
REMAT_POLICIES = {
    'full': jax.checkpoint_policies.nothing_saveable,
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Pattern(nnx.Module):
    """Layers of P variants in turn, with a stack for each variant.

    Layer l is layer l // P of stack l % P.
    """

    def __init__(self, stacks: list[Block]):
        self.period = len(stacks)
        for stack_index, stack in enumerate(stacks):
            setattr(self, f'stack_{stack_index}', stack)


Blocks = Block | Pattern

# Places an activation on the devices of a mesh, given a letter for each axis.
Placement = Callable[[jax.Array, str], jax.Array]
_placement: contextvars.ContextVar[Placement] = contextvars.ContextVar('placement')


def use_placement(placement: Placement) -> AbstractContextManager[None]:
    """Returns a context in which traced models apply a placement to their activations."""
    return set_context_variable(_placement, placement)


def apply_placement(array: jax.Array, letters: str) -> jax.Array:
    """Applies the placement of the context, if any. `letters` are the axes, as in 'BTD'."""
    placement = _placement.get(None)
    if placement is None:
        return array
    return placement(array, letters)


def stacks_of(blocks: Blocks) -> list[Block]:
    """Returns the stacks of a model. Without a pattern there is one."""
    if isinstance(blocks, Block):
        return [blocks]
    return [getattr(blocks, f'stack_{stack_index}') for stack_index in range(blocks.period)]


def stack_blocks(config: ModelConfig, *, key: jax.Array, kind: type[Block]) -> Blocks:
    """Initializes all layers, as one stack for each variant.

    In a stack, every parameter has a leading axis over layers.

    Args:
        config: The settings of the model.
        key: The random key.
        kind: The class of the layers.
    """
    keys_L = jax.random.split(key, config.num_layers)
    num_variants = len(config.cycle)
    stacks = []
    for stack_index, layer_config in enumerate(config.cycle):
        # With 2 variants, the stacks have the layers 0, 2, 4, ... and 1, 3, 5, ...
        keys_of_stack = keys_L[stack_index::num_variants]
        make_block = functools.partial(kind, layer_config)
        make_stack = jax.vmap(make_block)
        stacks.append(make_stack(key=keys_of_stack))
    return stacks[0] if num_variants == 1 else Pattern(stacks)


def layer_of(blocks: Blocks, index: int) -> Block:
    """Returns layer number `index`, counted from 0."""
    stacks = stacks_of(blocks)
    index_in_stack, stack_index = divmod(index, len(stacks))
    block = _items(stacks[stack_index], index_in_stack)
    return block.at(index)


class _StackInputs(NamedTuple):
    """The scan inputs of a stack, with a leading axis over layers.

    In an iteration of the scan, these are the inputs of one layer.
    """

    block: Block
    layer: jax.Array  # the number of the layer in the model
    index_in_stack: jax.Array
    row: Any  # the layer's part of the `rows` of `scan_layers`


def scan_layers(
    step: Callable[[Any, Block, tuple[int, jax.Array], Any], Any],
    carry: Any,
    blocks: Blocks,
    rows: Any,
    *,
    config: ModelConfig,
) -> Any:
    """Runs `carry = step(carry, block, index, row)` for every layer; returns the last carry.

    Each iteration of the scan runs one layer of each of P stacks. The last L % P layers run after
    the scan.

    Args:
        step: The function of a layer. Its `index` is a pair (stack, layer in the stack), and its
            `row` is the layer's part of `rows`.
        carry: The input of the first layer.
        blocks: The L layers.
        rows: A pytree of arrays [L, ...].
        config: The settings of the model.
    """
    stacks = stacks_of(blocks)
    L = config.num_layers
    P = len(stacks)

    inputs = []
    for stack_index, stack in enumerate(stacks):
        layers = jnp.arange(stack_index, L, P, dtype=jnp.int32)
        indices_in_stack = jnp.arange(len(layers), dtype=jnp.int32)
        rows_of_stack = rows if P == 1 else _items(rows, slice(stack_index, None, P))
        inputs.append(_StackInputs(stack, layers, indices_in_stack, rows_of_stack))

    def iteration(carry: Any, layer_inputs: list[_StackInputs]) -> tuple[Any, None]:
        """Runs one layer of each given stack."""
        for stack_index, (block, layer, index_in_stack, row) in enumerate(layer_inputs):
            carry = step(carry, block.at(layer), (stack_index, index_in_stack), row)
        return carry, None

    num_iterations, num_left = divmod(L, P)
    scanned_inputs = inputs
    if num_left > 0:
        scanned_inputs = _items(inputs, slice(num_iterations))
    # config.unroll counts layers, and an iteration has P.
    unroll = max(1, config.unroll // P)
    carry, _ = jax.lax.scan(iteration, carry, scanned_inputs, unroll=unroll)

    # The first `num_left` stacks have one more layer, with index `num_iterations` in the stack.
    left_inputs = _items(inputs[:num_left], num_iterations)
    carry, _ = iteration(carry, left_inputs)
    return carry


def _items(tree: Any, index: int | slice) -> Any:
    """Indexes every array of a pytree."""
    return jax.tree.map(lambda array: array[index], tree)


def run_blocks(
    blocks: Blocks,
    x_BTD: jax.Array,
    mask: Mask,
    *,
    config: ModelConfig,
    dropout_key: jax.Array | None,
    **shared: Any,
) -> jax.Array:
    """Passes x through all layers.

    Args:
        blocks: The layers.
        x_BTD: The stream before the first layer.
        mask: The attention mask.
        config: The settings of the model. `config.remat` rematerializes layers in the backward
            pass.
        dropout_key: The key of all dropout. None is no dropout.
        **shared: Further arguments of every block.
    """

    def run_layer(x_BTD: jax.Array, block: Block, key: jax.Array | None) -> jax.Array:
        """Runs one layer, with its input and output on the devices of the mesh, if any."""
        x_BTD = apply_placement(x_BTD, 'BTD')
        out_BTD = block(x_BTD, mask, key, **shared)
        return apply_placement(out_BTD, 'BTD')

    if config.remat != 'none':
        policy = REMAT_POLICIES[config.remat]
        run_layer = jax.checkpoint(run_layer, prevent_cse=False, policy=policy)

    def step(
        x_BTD: jax.Array, block: Block, index: tuple[int, jax.Array], key: jax.Array | None
    ) -> jax.Array:
        return run_layer(x_BTD, block, key)

    keys_L = None if dropout_key is None else jax.random.split(dropout_key, config.num_layers)
    return scan_layers(step, x_BTD, blocks, keys_L, config=config)
