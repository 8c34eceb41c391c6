"""The blocks of a model: stacks of equal layers, through which one scan passes."""

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

# What a layer keeps for the backward pass. Products with a weight matrix have no batch axes; those
# of queries and keys, and of probabilities and values, have.
REMAT_POLICIES = {
    'full': jax.checkpoint_policies.nothing_saveable,
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
}


class Pattern(nnx.Module):
    """Layers of several variants in turn: layer l is number l // P of stack l % P, of P stacks."""

    def __init__(self, stacks: list[Block]):
        self.period = len(stacks)
        for number, stack in enumerate(stacks):
            setattr(self, f'stack_{number}', stack)


Blocks = Block | Pattern

# (activation, a letter per axis) -> the activation, placed on the devices of a mesh.
Placement = Callable[[jax.Array, str], jax.Array]
_placement: contextvars.ContextVar[Placement] = contextvars.ContextVar('placement')


def placing(placement: Placement) -> AbstractContextManager[None]:
    """Models traced inside apply it to embeddings, logits and the stream around each layer."""
    return inside(_placement, placement)


def placed(array: jax.Array, letters: str) -> jax.Array:
    """The array with the placement in force; itself without one."""
    placement = _placement.get(None)
    if placement is None:
        return array
    return placement(array, letters)


def stacks_of(blocks: Blocks) -> list[Block]:
    """The stacks in the order of their first layers; one where all layers have one variant."""
    if isinstance(blocks, Block):
        return [blocks]
    return [getattr(blocks, f'stack_{number}') for number in range(blocks.period)]


def stack_blocks(config: ModelConfig, *, key: jax.Array, kind: type[Block]) -> Blocks:
    """L blocks: every parameter has a leading axis of the layers of one variant."""
    keys_L = jax.random.split(key, config.num_layers)
    period = len(config.cycle)
    stacks = []
    for number, layer_config in enumerate(config.cycle):
        keys = keys_L if period == 1 else keys_L[number::period]
        stacks.append(jax.vmap(functools.partial(kind, layer_config))(key=keys))
    return stacks[0] if period == 1 else Pattern(stacks)


def layer_of(blocks: Blocks, index: int) -> Block:
    """Layer number `index`, from 0."""
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
    """The carry after `carry = step(carry, block, index, row)` for every layer in turn.

    One scan: a layer, or with a pattern one layer of each variant, is an iteration. Layers beyond
    the last whole iteration follow the scan. `index` is the number of the block's stack and the
    block's index in it; `row` is that of the layer in `rows`, arrays [L, ...] in any tree.
    """
    stacks = stacks_of(blocks)
    L = config.num_layers
    P = len(stacks)
    # What each stack contributes: its blocks, the numbers of its layers, their indices, their rows.
    inputs = []
    for number, stack in enumerate(stacks):
        layers = jnp.arange(number, L, P, dtype=jnp.int32)
        indices = jnp.arange(len(layers), dtype=jnp.int32)
        stack_rows = rows if P == 1 else _items(rows, slice(number, None, P))
        inputs.append((stack, layers, indices, stack_rows))

    def iteration(carry: Any, inputs: list[tuple]) -> tuple[Any, None]:
        for number, (block, layer, index, row) in enumerate(inputs):
            carry = step(carry, block.at(layer), (number, index), row)
        return carry, None

    num_iterations, num_left = divmod(L, P)
    scanned = inputs if num_left == 0 else _items(inputs, slice(num_iterations))
    unroll = max(1, config.unroll // P)
    carry, _ = jax.lax.scan(iteration, carry, scanned, unroll=unroll)
    left = _items(inputs[:num_left], num_iterations)
    carry, _ = iteration(carry, left)
    return carry


def _items(tree: Any, index: int | slice) -> Any:
    """array[index] of every array in a tree."""
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
    """Passes x through all layers; `shared` are further arguments, the same for all of them."""

    def layer(x_BTD: jax.Array, block: Block, key: jax.Array | None) -> jax.Array:
        x_BTD = placed(x_BTD, 'BTD')
        return placed(block(x_BTD, mask, key, **shared), 'BTD')

    if config.remat != 'none':
        layer = jax.checkpoint(layer, prevent_cse=False, policy=REMAT_POLICIES[config.remat])

    def step(
        x_BTD: jax.Array, block: Block, index: tuple[int, jax.Array], key: jax.Array | None
    ) -> jax.Array:
        """`layer` with the arguments of `scan_layers`, which also gives the number of the layer."""
        return layer(x_BTD, block, key)

    keys_L = None if dropout_key is None else jax.random.split(dropout_key, config.num_layers)
    return scan_layers(step, x_BTD, blocks, keys_L, config=config)
