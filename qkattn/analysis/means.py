"""Attention of a model in a few numbers: means over sites, layers and heads."""

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from qkattn.analysis import matrices, patterns, watching
from qkattn.analysis.analyze import circuit_matrices
from qkattn.model.transformer import Transformer

OF_MATRICES = ('norm', 'effective_rank', 'symmetric_share')
OF_PATTERNS = ('entropy', 'logit_deviation', 'diagonal_mass', 'previous_token_mass')


def means(
    model: Transformer,
    inputs: Mapping[str, Any] | None = None,
    rows_B: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """OF_MATRICES of A[n] as 'qk_norm', of B[n] as 'ov_norm', and OF_PATTERNS for these inputs.

    'qk_factor_norm' and 'ov_factor_norm' are those of all parameters of the score and of the value
    of a layer. NaN for what the attention does not have; no inputs, no patterns. `rows_B` is False
    for rows whose patterns do not count; None is all.
    """
    found: dict[str, jax.Array] = {}
    layers = [layer for of_site in watching.sites(model).values() for layer in of_site]
    present = {place: a for place, a in circuit_matrices(model).items() if a is not None}
    numbers = {}
    if present:  # all in one array, as `matrices` asks for
        stacked_PNDD = jnp.stack(list(present.values()))
        numbers = {name: matrices.OF_MATRICES[name](stacked_PNDD) for name in OF_MATRICES}
    for circuit, of, part in (('qk', 'A', 'score'), ('ov', 'B', 'value')):
        rows = [row for row, (*_, which) in enumerate(present) if which == of]
        for name in OF_MATRICES:
            found[f'{circuit}_{name}'] = _mean(numbers[name][row] for row in rows)
        found[f'{circuit}_factor_norm'] = _mean(_norm(getattr(layer, part)) for layer in layers)
    if inputs is None:
        return found
    seen = watching.attention_patterns(model, inputs)
    if rows_B is not None:
        seen = {
            place: pattern._replace(mask_BTS=pattern.mask_BTS & rows_B[:, None, None])
            for place, pattern in seen.items()
        }
    for name in OF_PATTERNS:
        of_pattern = (patterns.OF_PATTERNS | patterns.IN_ORDER)[name]
        chosen = [
            pattern
            for (site, _), pattern in seen.items()
            if name not in patterns.IN_ORDER or not site.endswith('cross_attention')
        ]
        found[f'attention_{name}'] = _mean(of_pattern(pattern) for pattern in chosen)
    return found


def _mean(values: Iterable[jax.Array]) -> jax.Array:
    flat = [jnp.ravel(value) for value in values]
    return jnp.concatenate(flat).mean() if flat else jnp.float32(jnp.nan)


def _norm(circuit: Any) -> jax.Array:
    squares = [(leaf.astype(jnp.float32) ** 2).sum() for leaf in jax.tree.leaves(circuit)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))
