"""The blocks of a model: stacks of layers of one variant each, and the scan over them."""

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

# What a layer keeps for the backward pass: nothing, or its products with weight matrices. The
# policy tells those from q k^T and p v by their lack of batch axes.
REMAT_POLICIES = {
    'full': jax.checkpoint_policies.nothing_saveable,
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Pattern(nnx.Module):
    """Layers of several variants in turn.

    There is one stack for each of the P variants. Layer l has variant l % P, and it is number
    l // P in the stack of that variant.
    """

    def __init__(self, stacks: list[Block]):
        self.period = len(stacks)
        for number, stack in enumerate(stacks):
            setattr(self, f'stack_{number}', stack)


Blocks = Block | Pattern

# A Placement takes an activation and a letter per axis, and places it on the devices of a mesh.
Placement = Callable[[jax.Array, str], jax.Array]
_placement: contextvars.ContextVar[Placement] = contextvars.ContextVar('placement')


def use_placement(placement: Placement) -> AbstractContextManager[None]:
    """Makes models traced inside the block apply a placement to their activations.

    These are the embeddings, the logits, and the stream before and after each layer.
    """
    return set_context_variable(_placement, placement)


def apply_placement(array: jax.Array, letters: str) -> jax.Array:
    """Applies the placement in force, if any; `letters` names the axes, as in 'BTD'."""
    placement = _placement.get(None)
    if placement is None:
        return array
    return placement(array, letters)


def stacks_of(blocks: Blocks) -> list[Block]:
    """Returns the stacks, in the order of their first layers. Without a pattern there is one."""
    if isinstance(blocks, Block):
        return [blocks]
    return [getattr(blocks, f'stack_{number}') for number in range(blocks.period)]


def stack_blocks(config: ModelConfig, *, key: jax.Array, kind: type[Block]) -> Blocks:
    """Initializes the blocks of all layers, as one stack for each variant.

    In a stack, every parameter has a leading axis over the layers of that variant. Without a
    pattern, the only stack is returned as it is.
    """
    keys_L = jax.random.split(key, config.num_layers)
    num_variants = len(config.cycle)
    stacks = []
    for number, layer_config in enumerate(config.cycle):
        # With 2 variants, the stacks have the layers 0, 2, 4, ... and 1, 3, 5, ...
        keys_of_stack = keys_L[number::num_variants]
        # A block is initialized by kind(layer_config, key=...). vmap does this for all keys.
        make_block = functools.partial(kind, layer_config)
        stacks.append(jax.vmap(make_block)(key=keys_of_stack))
    return stacks[0] if num_variants == 1 else Pattern(stacks)


def layer_of(blocks: Blocks, index: int) -> Block:
    """Returns layer number `index`, counted from 0."""
    stacks = stacks_of(blocks)
    row, number = divmod(index, len(stacks))
    block = _items(stacks[number], row)
    return block.at(index)


class _StackInputs(NamedTuple):
    """What a stack contributes to the scan: arrays whose leading axis is over its layers.

    In an iteration, it holds the items of one layer.
    """

    block: Block
    number: jax.Array  # the number of the layer in the model
    number_in_stack: jax.Array
    row: Any  # the layer's part of the `rows` of `scan_layers`


def scan_layers(
    step: Callable[[Any, Block, tuple[int, jax.Array], Any], Any],
    carry: Any,
    blocks: Blocks,
    rows: Any,
    *,
    config: ModelConfig,
) -> Any:
    """Runs `carry = step(carry, block, index, row)` for every layer, and returns the last carry.

    The layers run in a scan. With a pattern, each iteration runs one layer of each variant. Layers
    that do not fill an iteration follow the scan: 7 layers of 3 variants are 2 iterations, and the
    last layer follows.

    Args:
      step: the function of a layer. Its `index` is a pair, the number of the layer's stack and the
        number of the layer in this stack. Its `row` is the layer's part of `rows`.
      carry: what the first layer gets.
      blocks: the layers.
      rows: a tree of arrays [L, ...].
      config: the settings of the model.
    """
    stacks = stacks_of(blocks)
    L = config.num_layers
    P = len(stacks)

    inputs = []
    for number, stack in enumerate(stacks):
        numbers = jnp.arange(number, L, P, dtype=jnp.int32)
        numbers_in_stack = jnp.arange(len(numbers), dtype=jnp.int32)
        rows_of_stack = rows if P == 1 else _items(rows, slice(number, None, P))
        inputs.append(_StackInputs(stack, numbers, numbers_in_stack, rows_of_stack))

    def iteration(carry: Any, inputs: list[_StackInputs]) -> tuple[Any, None]:
        """Runs one layer of each stack in `inputs`."""
        for number, layer in enumerate(inputs):
            block = layer.block.at(layer.number)
            carry = step(carry, block, (number, layer.number_in_stack), layer.row)
        return carry, None

    # Every stack has a layer in each iteration. The first `num_left` stacks have one more layer.
    num_iterations, num_left = divmod(L, P)
    scanned = inputs
    if num_left > 0:
        scanned = _items(inputs, slice(num_iterations))
    # config.unroll counts layers, and an iteration has P.
    unroll = max(1, config.unroll // P)
    carry, _ = jax.lax.scan(iteration, carry, scanned, unroll=unroll)

    left = _items(inputs[:num_left], num_iterations)
    carry, _ = iteration(carry, left)
    return carry


def _items(tree: Any, index: int | slice) -> Any:
    """Returns a tree with array[index] in place of every array."""
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
    """Passes x through all layers. Every block gets the arguments in `shared`.

    With config.remat, the backward pass computes layers again instead of keeping all their values.
    """

    def layer(x_BTD: jax.Array, block: Block, key: jax.Array | None) -> jax.Array:
        """Runs one layer, and places the stream on the devices before and after it."""
        x_BTD = apply_placement(x_BTD, 'BTD')
        return apply_placement(block(x_BTD, mask, key, **shared), 'BTD')

    if config.remat != 'none':
        layer = jax.checkpoint(layer, prevent_cse=False, policy=REMAT_POLICIES[config.remat])

    def step(
        x_BTD: jax.Array, block: Block, index: tuple[int, jax.Array], key: jax.Array | None
    ) -> jax.Array:
        """Runs one layer in `scan_layers`, which also passes an index that is not needed."""
        return layer(x_BTD, block, key)

    keys_L = None if dropout_key is None else jax.random.split(dropout_key, config.num_layers)
    return scan_layers(step, x_BTD, blocks, keys_L, config=config)
