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

# (site, layer, 'A' or 'B'), the QK or the OV circuit of one attention layer. A site is a place of
# attention layers in a model: 'attention', 'cross_attention' or 'encoder/attention'.
Circuit = tuple[str, int, str]


@dataclasses.dataclass(frozen=True)
class Row:
    """One number, of a quantity in docs/analysis.md."""

    site: str  # see `Circuit`
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
        site_rows = [row for row in self.rows if row.site == site]
        rows = [row for row in site_rows if row.quantity == quantity]
        if subject is not None:
            rows = [row for row in rows if row.subject == subject]
        if not rows:
            name = quantity if subject is None else f'{quantity} of {subject}'
            raise KeyError(f'no {name} was measured at {site}')
        subjects = {row.subject for row in rows}
        if len(subjects) > 1:
            listed = ' and of '.join(sorted(subjects))
            raise KeyError(f'{quantity} is of {listed}; give the subject')

        layers = [row.layer for row in site_rows]
        layers += [layer for missing_site, layer, _ in self.missing if missing_site == site]
        num_layers = max(layers) + 1
        num_heads = max(row.head for row in rows) + 1
        values_LN = np.full((num_layers, num_heads), np.nan)
        for row in rows:
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
    missing = [circuit for circuit, a_NDD in matrices.items() if a_NDD is None]
    spectra: dict[Circuit, np.ndarray] = {}
    if present:
        a_PNDD = jnp.stack([*present.values()])
        numbers = jax.device_get(of_matrices(a_PNDD))
        spectra_PND = numbers.pop('singular_values')
        for index, circuit in enumerate(present):
            spectra[circuit] = spectra_PND[index]
            values = {name: values_PN[index] for name, values_PN in numbers.items()}
            rows += _by_head(circuit, values)

    inputs = inputs_of(batch or {})
    if inputs:
        patterns = jax.device_get(_of_patterns(model, inputs))
        for (site, layer), values in patterns.items():
            rows += _by_head((site, layer, 'pattern'), values)
    repeated = repeated_tokens(model) if induction else None
    if repeated is not None:
        period = repeated['tokens_BT'].shape[1] // 2
        scores = jax.device_get(_of_patterns(model, repeated, period))
        for (site, layer), values in scores.items():
            rows += _by_head((site, layer, 'pattern'), values)
    return Analysis(rows, spectra, missing)


def circuit_matrices(model: Transformer) -> dict[Circuit, jax.Array | None]:
    """A[n] and B[n], [N, D, D], of every attention layer, in float32 or wider.

    A has the scale of the logits. None where the circuit is not one matrix a head.
    """
    D = model.config.d_model
    matrices: dict[Circuit, jax.Array | None] = {}
    for site, layers in sites(model).items():
        for layer, attention in enumerate(layers):
            attention = jax.tree.map(_in_float32, attention)
            score = attention.score
            value = attention.value
            # Rows and columns from D on are those of biases.
            matrices[site, layer, 'A'] = None
            if score.bilinear:
                scale = score.scale * attention.spec.score_scale
                a_NDE = scale * score.matrix()
                matrices[site, layer, 'A'] = a_NDE[:, :D, :D]
            matrices[site, layer, 'B'] = None
            if value.linear:
                b_NDE = value.matrix(score)
                matrices[site, layer, 'B'] = b_NDE[:, :D, :D]
    return matrices


def _in_float32(array: jax.Array) -> jax.Array:
    """The array in float32, or in its own dtype if that is wider."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


@jax.jit
def drifts(reference: Transformer, other: Transformer) -> dict[Circuit, jax.Array]:
    """`drift` [N] from the reference's A[n] and B[n] to the other's, of circuits that have both.

    ConfigError if the models differ in layers, heads or d_model.
    """
    before = circuit_matrices(reference)
    after = circuit_matrices(other)
    needs = 'drift is between models of the same layers, heads and d_model'
    unpaired = sorted(before.keys() ^ after.keys())
    if unpaired:
        site, layer, _ = unpaired[0]
        raise ConfigError(f'{site} {layer} is a layer of one model only; {needs}')
    changes = {}
    for circuit, before_NDD in before.items():
        after_NDD = after[circuit]
        if before_NDD is None or after_NDD is None:
            continue
        if before_NDD.shape != after_NDD.shape:
            site, layer, matrix = circuit
            raise ConfigError(
                f'{site} {layer}: {matrix}[n] is {[*before_NDD.shape]} in the reference and '
                f'{[*after_NDD.shape]} in the model; {needs}'
            )
        changes[circuit] = jax.vmap(drift)(before_NDD, after_NDD)
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
        if period is None:
            quantities = pattern_quantities(site)
            results[site, layer] = {name: measure(pattern) for name, measure in quantities.items()}
        else:
            results[site, layer] = {'induction_score': induction_score(pattern, period)}
    return results


def _by_head(source: tuple[str, int, str], quantities: Mapping[str, np.ndarray]) -> list[Row]:
    """A row per head and quantity, of values [N] by name; `source` is (site, layer, subject)."""
    site, layer, subject = source
    rows = []
    for quantity, values_N in quantities.items():
        for head, value in enumerate(values_N):
            rows.append(Row(site, layer, head, subject, quantity, float(value)))
    return rows
