"""The blocks of a model: stacks of equal layers, through which one scan passes."""

import contextvars
import operator
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

# An activation and a letter per axis -> the activation, placed on the devices of a mesh.
Placement = Callable[[jax.Array, str], jax.Array]
_placement: contextvars.ContextVar[Placement] = contextvars.ContextVar('placement')


def placing(placement: Placement) -> AbstractContextManager[None]:
    """Models traced inside apply the placement to the stream around layers, logits, embeddings."""
    return inside(_placement, placement)


def placed(array: jax.Array, letters: str) -> jax.Array:
    """The array with the placement in force; itself without one."""
    return _placement.get(lambda array, letters: array)(array, letters)


def stacks_of(blocks: Blocks) -> list[Block]:
    """The stacks in the order of their first layers; one where all layers have one variant."""
    if isinstance(blocks, Block):
        return [blocks]
    return [getattr(blocks, f'stack_{number}') for number in range(blocks.period)]


def stack_blocks(config: ModelConfig, *, key: jax.Array, kind: type[Block]) -> Blocks:
    """L blocks: every parameter has a leading axis of the layers of one variant."""
    keys, cycle = jax.random.split(key, config.num_layers), config.cycle
    if len(cycle) == 1:
        return jax.vmap(lambda key: kind(cycle[0], key=key))(keys)
    stacks = [
        jax.vmap(lambda key, layer=layer: kind(layer, key=key))(keys[number :: len(cycle)])
        for number, layer in enumerate(cycle)
    ]
    return Pattern(stacks)


def layer_of(blocks: Blocks, index: int) -> Block:
    """Layer number `index`, from 0."""
    stacks = stacks_of(blocks)
    row, number = divmod(index, len(stacks))
    return jax.tree.map(operator.itemgetter(row), stacks[number]).at(index)


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
    stacks, L = stacks_of(blocks), config.num_layers
    P, inputs = len(stacks), []
    for number, stack in enumerate(stacks):
        layers = jnp.arange(number, L, P, dtype=jnp.int32)
        part = rows if P == 1 else jax.tree.map(operator.itemgetter(slice(number, None, P)), rows)
        inputs.append((stack, layers, jnp.arange(len(layers), dtype=jnp.int32), part))

    def cycle(carry: Any, inputs: list[tuple]) -> tuple[Any, None]:
        for number, (block, layer, index, row) in enumerate(inputs):
            carry = step(carry, block.at(layer), (number, index), row)
        return carry, None

    whole, rest = divmod(L, P)
    first = jax.tree.map(operator.itemgetter(slice(whole)), inputs) if rest else inputs
    carry, _ = jax.lax.scan(cycle, carry, first, unroll=max(1, config.unroll // P))
    last = jax.tree.map(operator.itemgetter(whole), inputs[:rest])
    return cycle(carry, last)[0]


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
    keys = None if dropout_key is None else jax.random.split(dropout_key, config.num_layers)
    return scan_layers(
        lambda x_BTD, block, _, key: layer(x_BTD, block, key), x_BTD, blocks, keys, config=config
    )
