"""What is measured of one model: of its matrices and its attention."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.analysis.matrices import MATRIX_QUANTITIES, drift, singular_values
from qkattn.analysis.patterns import attention_patterns, induction_score, pattern_quantities, sites
from qkattn.errors import ConfigError
from qkattn.model import EncoderDecoder
from qkattn.model.transformer import Transformer, inputs_of

Circuit = tuple[str, int, str]  # site, layer, and 'A' or 'B'


@dataclasses.dataclass(frozen=True)
class Row:
    """One number, of a quantity in docs/analysis.md."""

    site: str  # 'attention', 'cross_attention', 'encoder/attention'
    layer: int  # from 0, as `head`
    head: int
    subject: str  # 'A' or 'B', the matrices of a head, or its 'pattern'
    quantity: str
    value: float  # NaN where it is not defined, as the effective rank of a zero matrix


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What was measured."""

    rows: list[Row]
    spectra: dict[Circuit, np.ndarray]  # singular values [N, D] where there is one matrix a head
    missing: list[Circuit]  # the others: scores that are not bilinear, values that are not linear

    def values(
        self, quantity: str, subject: str | None = None, site: str = 'attention'
    ) -> np.ndarray:
        """[L, N] of a quantity, NaN in layers without it; KeyError if it was not measured there."""
        at_site = [row for row in self.rows if row.site == site]
        chosen = [row for row in at_site if row.quantity == quantity]
        chosen = [row for row in chosen if subject in (None, row.subject)]
        if not chosen:
            of = '' if subject is None else f' of {subject}'
            raise KeyError(f'no {quantity}{of} was measured at {site}')
        if len(subjects := {row.subject for row in chosen}) > 1:
            raise KeyError(
                f'{quantity} is of {" and of ".join(sorted(subjects))}; give the subject'
            )
        layers = [row.layer for row in at_site]
        layers += [layer for where, layer, _ in self.missing if where == site]
        shape = max(layers) + 1, max(row.head for row in chosen) + 1
        values_LN = np.full(shape, np.nan)
        for row in chosen:
            values_LN[row.layer, row.head] = row.value
        return values_LN


def analyze(
    model: Transformer,
    batch: Mapping[str, Any] | None = None,
    *,
    reference: Transformer | None = None,
    induction: bool = True,
) -> Analysis:
    """Measures a model, all layers and heads.

    A and B are in stream coordinates, A with the scale on the logits; what acts between the
    projections (QK-norm, RoPE) is left out of A, as are biases of both. `batch`, inputs of the
    model (tokens_BT; source_BS, segments, ...), adds patterns; `reference`, a model, adds the drift
    of A and B from it (ConfigError as `drifts`); `induction` shows random tokens twice to a decoder
    or encoder.
    """
    rows: list[Row] = []
    if reference is not None:
        for circuit, drift_N in jax.device_get(drifts(reference, model)).items():
            rows += _by_head(circuit, {'drift': drift_N})
    matrices = jax.jit(circuit_matrices)(model)
    present = {circuit: a_NDD for circuit, a_NDD in matrices.items() if a_NDD is not None}
    numbers: dict[str, np.ndarray] = {'singular_values': np.empty(0)}
    if present:
        numbers = jax.device_get(of_matrices(jnp.stack([*present.values()])))
    spectra = dict(zip(present, numbers.pop('singular_values'), strict=True))
    for p, circuit in enumerate(present):
        rows += _by_head(circuit, {name: values_P[p] for name, values_P in numbers.items()})
    inputs, repeated = inputs_of(batch or {}), repeated_tokens(model) if induction else None
    measured = [jax.device_get(_of_patterns(model, inputs))] if inputs else []
    if repeated is not None:
        period = repeated['tokens_BT'].shape[1] // 2
        measured.append(jax.device_get(_of_patterns(model, repeated, period)))
    for (site, layer), numbers_N in (item for each in measured for item in each.items()):
        rows += _by_head((site, layer, 'pattern'), numbers_N)
    return Analysis(rows, spectra, [circuit for circuit in matrices if circuit not in spectra])


def circuit_matrices(model: Transformer) -> dict[Circuit, jax.Array | None]:
    """A[n] and B[n], [N, D, D], of every attention layer, in float32 or wider.

    A has the scale of the logits. None where the circuit is not one matrix a head.
    """
    D = model.config.d_model
    matrices: dict[Circuit, jax.Array | None] = {}
    for site, layers in sites(model).items():
        for layer, attention in enumerate(layers):
            attention = jax.tree.map(
                lambda leaf: leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32)), attention
            )
            score, value = attention.score, attention.value
            scale = score.scale * attention.spec.score_scale
            a_NDE = scale * score.matrix() if score.bilinear else None
            b_NDE = value.matrix(score) if value.linear else None
            for name, matrix_NDE in (('A', a_NDE), ('B', b_NDE)):
                matrices[site, layer, name] = None if matrix_NDE is None else matrix_NDE[:, :D, :D]
    return matrices


@jax.jit
def drifts(reference: Transformer, other: Transformer) -> dict[Circuit, jax.Array]:
    """`drift` [N] from the reference's A[n] and B[n] to the other's, of circuits that have both.

    ConfigError if the models differ in layers, heads or d_model.
    """
    theirs, ours = circuit_matrices(reference), circuit_matrices(other)
    needs = 'drift is between models of the same layers, heads and d_model'
    for site, layer, _ in sorted(theirs.keys() ^ ours.keys()):
        raise ConfigError(f'{site} {layer} is a layer of one model only; {needs}')
    changes = {}
    for (site, layer, matrix), a_NDD in theirs.items():
        b_NDD = ours[site, layer, matrix]
        if a_NDD is not None and b_NDD is not None:
            if a_NDD.shape != b_NDD.shape:
                shapes = f'{[*a_NDD.shape]} in the reference and {[*b_NDD.shape]} in the model'
                raise ConfigError(f'{site} {layer}: {matrix}[n] is {shapes}; {needs}')
            changes[site, layer, matrix] = jax.vmap(drift)(a_NDD, b_NDD)
    return changes


def repeated_tokens(model: Transformer) -> dict[str, np.ndarray] | None:
    """tokens_BT of uniform random tokens r_1 .. r_H r_1 .. r_H; None of an encoder-decoder.

    H <= window, so that a query sees the token after its previous occurrence; None where H < 2.
    """
    config = model.config
    half = min(config.context // 2, config.window or config.context)
    if half < 2 or isinstance(model, EncoderDecoder):
        return None
    r_BH = np.random.default_rng(0).integers(0, config.vocab_size, (8, half))
    return {'tokens_BT': np.tile(r_BH, 2)}


@jax.jit
def of_matrices(a_PNDD: jax.Array) -> dict[str, jax.Array]:
    """Quantities of P circuits by name, each [P, N], and singular values [P, N, D]."""
    quantities = (*MATRIX_QUANTITIES.values(), singular_values)
    return {quantity.__name__: quantity(a_PNDD) for quantity in quantities}


@functools.partial(jax.jit, static_argnames='period')
def _of_patterns(
    model: Transformer, inputs: Mapping[str, Any], period: int | None = None
) -> dict[tuple[str, int], dict[str, jax.Array]]:
    """Quantities [N] by site and layer; of tokens with a period the induction score alone."""
    results = {}
    for (site, layer), pattern in attention_patterns(model, inputs).items():
        quantities = pattern_quantities(site)
        if period is not None:
            quantities = {'induction_score': functools.partial(induction_score, period=period)}
        results[site, layer] = {name: quantity(pattern) for name, quantity in quantities.items()}
    return results


def _by_head(key: Circuit, numbers: Mapping[str, np.ndarray]) -> list[Row]:
    return [
        Row(*key[:2], head, key[2], name, float(value))
        for name, values_N in numbers.items()
        for head, value in enumerate(values_N)
    ]
