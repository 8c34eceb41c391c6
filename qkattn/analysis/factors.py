"""Norms of the parameters and of their gradients, by layer and factor."""

from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from flax import nnx

from qkattn.model.stack import stacks_of
from qkattn.model.transformer import Transformer, loss


@jax.jit
def gradients(model: Transformer, batch: dict[str, Any]) -> dict:
    """The gradient of the loss of a batch, nats per target, as a parameter tree."""
    graph, params = nnx.split(model)
    grads = jax.grad(lambda params: loss(nnx.merge(graph, params), batch))(params)
    return nnx.to_pure_dict(grads)


def params_of(model: Transformer) -> dict:
    """The parameter tree."""
    return nnx.to_pure_dict(nnx.state(model))


def norms(model: Transformer, tree: dict) -> Iterator[tuple[str, int | None, str, float]]:
    """(site, layer, factor, norm) of every array of a tree with the model's parameter paths.

    The norm is the root of the sum of squares. Of 'blocks/attention/score/w_q_DNH' the site is
    'attention', the factor 'score/w_q_DNH', and there is one norm a layer; what is outside the
    blocks has no layer.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(tree)):
        parts = jax.tree_util.keystr(path, simple=True, separator='/').split('/')
        prefix, *rest = ('encoder/', *parts[1:]) if parts[0] == 'encoder' else ('', *parts)
        if rest[0] != 'blocks':
            yield f'{prefix}model', None, '/'.join(rest), float(np.linalg.norm(leaf.ravel()))
            continue
        period, number = len(stacks_of((model.encoder if prefix else model).blocks)), 0
        if period > 1:
            number = int(rest.pop(1).removeprefix('stack_'))
        for row, of_layer in enumerate(leaf):
            size = float(np.linalg.norm(of_layer.ravel()))
            yield prefix + rest[1], number + row * period, '/'.join(rest[2:]), size
