"""The program that measures the attention of a stack of trials during training."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from qkattn.analysis import matrices, patterns, watching
from qkattn.analysis.analyze import circuit_matrices
from qkattn.attention.kernels import choice
from qkattn.config import Config
from qkattn.metrics import ATTENTION
from qkattn.model import with_params
from qkattn.model.stack import placing
from qkattn.train.lifting import lift
from qkattn.train.sharding import place_activations, row_sharding

OF_MATRICES = ('norm', 'effective_rank', 'symmetric_share')
OF_PATTERNS = ('entropy', 'logit_deviation', 'diagonal_mass', 'previous_token_mass')


def measure(config: Config, params: dict, inputs: dict) -> dict[str, jax.Array]:
    """`metrics.ATTENTION` of one trial; NaN for what its attention does not have.

    The first metrics are those of `qkattn.analysis`, mean over sites, layers and heads.
    """
    model = with_params(config.model, params)
    found: dict[str, jax.Array] = {}
    circuits = circuit_matrices(model)
    layers = [layer for of_site in watching.sites(model).values() for layer in of_site]
    for circuit, of, part in (('qk', 'A', 'score'), ('ov', 'B', 'value')):
        stacks = [a for (*_, which), a in circuits.items() if which == of and a is not None]
        for name in OF_MATRICES:
            function = matrices.OF_MATRICES[name]
            found[f'{circuit}_{name}'] = _mean(function(a_NDD) for a_NDD in stacks)
        found[f'{circuit}_factor_norm'] = _mean(_norm(getattr(layer, part)) for layer in layers)
    seen = watching.attention_patterns(model, inputs)
    for name in OF_PATTERNS:
        of_pattern = (patterns.OF_PATTERNS | patterns.IN_ORDER)[name]
        chosen = [
            pattern
            for (site, _), pattern in seen.items()
            if name not in patterns.IN_ORDER or not site.endswith('cross_attention')
        ]
        found[f'attention_{name}'] = _mean(of_pattern(pattern) for pattern in chosen)
    return {name: found[name] for name in ATTENTION}


def program(config: Config, lifting: str, mesh: Mesh) -> Callable[[dict, dict], dict]:
    """The program (params of X trials, one batch) -> `measure`, each [X]."""

    def measured(params: dict, batch: dict) -> dict:
        batch = jax.lax.with_sharding_constraint(batch, row_sharding(mesh))
        inputs = {n: a for n, a in batch.items() if n not in ('targets_BT', 'loss_weights_BT')}
        with placing(place_activations(mesh)), choice.on(mesh):
            return lift(lambda params: measure(config, params, inputs), lifting, mesh)(params)

    return measured


def _mean(values: Iterable[jax.Array]) -> jax.Array:
    flat = [jnp.ravel(value) for value in values]
    return jnp.concatenate(flat).mean() if flat else jnp.float32(jnp.nan)


def _norm(circuit: Any) -> jax.Array:
    squares = [(leaf.astype(jnp.float32) ** 2).sum() for leaf in jax.tree.leaves(circuit)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))
