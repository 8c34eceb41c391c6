"""The blocks of a model: stacks of layers of one variant each, and the scan over them."""

import contextvars
import functools
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import Mask
from qkattn.attention.parameters import inside
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


def placing(placement: Placement) -> AbstractContextManager[None]:
    """Makes models traced inside the block apply a placement to their activations.

    These are the embeddings, the logits, and the stream before and after each layer.
    """
    return inside(_placement, placement)


def placed(array: jax.Array, letters: str) -> jax.Array:
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
    """Initializes L blocks, as one stack per variant.

    In a stack, every parameter has a leading axis over the layers of that variant.
    """
    keys_L = jax.random.split(key, config.num_layers)
    period = len(config.cycle)
    stacks = []
    for number, layer_config in enumerate(config.cycle):
        keys = keys_L if period == 1 else keys_L[number::period]
        stacks.append(jax.vmap(functools.partial(kind, layer_config))(key=keys))
    return stacks[0] if period == 1 else Pattern(stacks)


def layer_of(blocks: Blocks, index: int) -> Block:
    """Returns layer number `index`, counted from 0."""
    stacks = stacks_of(blocks)
    row, number = divmod(index, len(stacks))
    block = _items(stacks[number], row)
    return block.at(index)


def scan_layers(
    step: Callable[[Any, Block, tuple[int, jax.Array], Any], Any],
    carry: Any,
    blocks: Blocks,
    rows: Any,
    *,
    config: ModelConfig,
) -> Any:
    """Runs `carry = step(carry, block, index, row)` for every layer, and returns the last carry.

    There is one scan. An iteration is one layer of each variant, so a single layer without a
    pattern. If the last iteration would be incomplete, its layers follow the scan.

    Args:
      step: called with the block of the layer; `index`, the number of its stack and its index in
        that stack; and `row`, the layer's part of `rows`.
      rows: a tree of arrays [L, ...].
    """
    stacks = stacks_of(blocks)
    L = config.num_layers
    P = len(stacks)

    # Each stack contributes its blocks. Each block comes with the number of its layer in the model,
    # its index in the stack, and its row.
    inputs = []
    for number, stack in enumerate(stacks):
        layers = jnp.arange(number, L, P, dtype=jnp.int32)
        indices = jnp.arange(len(layers), dtype=jnp.int32)
        stack_rows = rows if P == 1 else _items(rows, slice(number, None, P))
        inputs.append((stack, layers, indices, stack_rows))

    def iteration(carry: Any, inputs: list[tuple]) -> tuple[Any, None]:
        """Runs one layer of each stack in `inputs`."""
        for number, (block, layer, index, row) in enumerate(inputs):
            carry = step(carry, block.at(layer), (number, index), row)
        return carry, None

    # Every stack has a layer in each whole iteration; the first `num_left` stacks have one more.
    num_iterations, num_left = divmod(L, P)
    scanned = inputs if num_left == 0 else _items(inputs, slice(num_iterations))
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
    """Passes x through all layers. Every block gets the arguments in `shared`."""

    def layer(x_BTD: jax.Array, block: Block, key: jax.Array | None) -> jax.Array:
        x_BTD = placed(x_BTD, 'BTD')
        return placed(block(x_BTD, mask, key, **shared), 'BTD')

    if config.remat != 'none':
        layer = jax.checkpoint(layer, prevent_cse=False, policy=REMAT_POLICIES[config.remat])

    def step(
        x_BTD: jax.Array, block: Block, index: tuple[int, jax.Array], key: jax.Array | None
    ) -> jax.Array:
        """Calls `layer` for `scan_layers`, whose `index` is not needed here."""
        return layer(x_BTD, block, key)

    keys_L = None if dropout_key is None else jax.random.split(dropout_key, config.num_layers)
    return scan_layers(step, x_BTD, blocks, keys_L, config=config)
