"""The analysis of one model: quantities of its matrices A[n] and B[n] and of its patterns."""

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

# The name of a circuit, (site, layer, matrix). The matrix is 'A' for the layer's QK circuit, and
# 'B' for its OV circuit. A site is a place of attention layers in a model: 'attention',
# 'cross_attention' or 'encoder/attention'.
Circuit = tuple[str, int, str]


@dataclasses.dataclass(frozen=True)
class Row:
    """The value of one quantity for one head; docs/analysis.md explains the quantities."""

    site: str  # see `Circuit`
    layer: int  # from 0
    head: int  # from 0
    subject: str  # 'A' or 'B' for a matrix of the head, or 'pattern'
    quantity: str
    value: float  # NaN if it is not defined, e.g. the effective rank of a zero matrix


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The results of `analyze`."""

    rows: list[Row]
    spectra: dict[Circuit, np.ndarray]  # the singular values [N, D] of circuits that are matrices
    missing: list[Circuit]  # the other circuits: scores not bilinear, values not linear

    def values(
        self, quantity: str, subject: str | None = None, site: str = 'attention'
    ) -> np.ndarray:
        """Returns one quantity of all L layers and N heads of a site, [L, N].

        For example, `values('effective_rank', 'A')` is the effective rank of every A[n]. A layer
        without the quantity has NaN. Raises KeyError if no layer of the site has the quantity, or
        if both A and B have it and `subject` is None.
        """
        rows = [row for row in self.rows if row.site == site and row.quantity == quantity]
        if subject is not None:
            rows = [row for row in rows if row.subject == subject]

        if not rows:
            name = quantity if subject is None else f'{quantity} of {subject}'
            raise KeyError(f'no {name} was measured at {site}')
        subjects = {row.subject for row in rows}
        if len(subjects) > 1:
            listed = ' and of '.join(sorted(subjects))
            raise KeyError(f'{quantity} is of {listed}; give the subject')

        num_heads = max(row.head for row in rows) + 1
        values_LN = np.full((self._num_layers(site), num_heads), np.nan)
        for row in rows:
            values_LN[row.layer, row.head] = row.value
        return values_LN

    def _num_layers(self, site: str) -> int:
        """Returns the number of layers of a site; each has rows or missing circuits."""
        layers = [row.layer for row in self.rows if row.site == site]
        layers += [layer for missing_site, layer, _ in self.missing if missing_site == site]
        return max(layers) + 1


def analyze(
    model: Transformer,
    batch: Mapping[str, Any] | None = None,
    *,
    reference: Transformer | None = None,
    induction: bool = True,
) -> Analysis:
    """Measures all layers and heads of a model.

    A and B are matrices of the stream's size, and A includes the scale of the logits. A leaves out
    what acts between the projections (QK-norm, RoPE), and both leave out biases.

    Args:
      model: the model.
      batch: inputs of the model (tokens_BT; source_BS, segments, ...). With a batch, the attention
        patterns of the model are measured too.
      reference: another model. With it, the drift of A and B from the reference is measured.
      induction: whether to measure induction scores, on random tokens that occur twice. An
        encoder-decoder has none.

    Raises:
      ConfigError: if `reference` differs from the model in layers, heads or d_model.
    """
    rows: list[Row] = []
    # 1. The drift of the matrices.
    if reference is not None:
        for circuit, drift_N in jax.device_get(drifts(reference, model)).items():
            rows += _rows_by_head(circuit, {'drift': drift_N})

    # 2. The other quantities of the matrices. The P matrices are stacked into one array;
    # qkattn/analysis/matrices.py says why.
    matrices = jax.jit(circuit_matrices)(model)
    present = {circuit: a_NDD for circuit, a_NDD in matrices.items() if a_NDD is not None}
    missing = [circuit for circuit, a_NDD in matrices.items() if a_NDD is None]
    spectra: dict[Circuit, np.ndarray] = {}
    if present:
        a_PNDD = jnp.stack(list(present.values()))
        values_PN_by_name = jax.device_get(quantities_of_matrices(a_PNDD))
        spectra_PND = values_PN_by_name.pop('singular_values')
        for index, circuit in enumerate(present):
            spectra[circuit] = spectra_PND[index]
            quantities = {name: values_PN[index] for name, values_PN in values_PN_by_name.items()}
            rows += _rows_by_head(circuit, quantities)

    # 3. The quantities of the patterns on the batch.
    inputs = inputs_of(batch or {})
    if inputs:
        quantities_by_layer = jax.device_get(_quantities_of_patterns(model, inputs))
        for (site, layer), quantities in quantities_by_layer.items():
            rows += _rows_by_head((site, layer, 'pattern'), quantities)

    # 4. The induction scores on tokens that occur twice.
    repeated = repeated_tokens(model) if induction else None
    if repeated is not None:
        period = repeated['tokens_BT'].shape[1] // 2
        scores = jax.device_get(_induction_scores(model, repeated, period))
        for (site, layer), score_N in scores.items():
            rows += _rows_by_head((site, layer, 'pattern'), {'induction_score': score_N})
    return Analysis(rows, spectra, missing)


def circuit_matrices(model: Transformer) -> dict[Circuit, jax.Array | None]:
    """Returns A[n] and B[n] of all heads, [N, D, D], for every attention layer.

    The logit of a query x and a key y is x A[n] y^T, scale included. Head n outputs the
    attention-weighted mean of y B[n] over the keys. Biases are left out.

    Returns:
      The matrices by circuit, float32 or wider. A is None if the Score is not bilinear. B is None
      if the Value is not linear.
    """
    D = model.config.d_model
    matrices: dict[Circuit, jax.Array | None] = {}
    for site, layers in sites(model).items():
        for layer, attention in enumerate(layers):
            attention = jax.tree.map(_in_float32, attention)
            score = attention.score
            value = attention.value

            # E is D, or D + 1 in a layer with biases. Slicing to D removes the biases.
            a_NDD = None
            if score.bilinear:
                scale = score.scale * attention.spec.score_scale
                a_NEE = scale * score.matrix()
                a_NDD = a_NEE[:, :D, :D]
            matrices[site, layer, 'A'] = a_NDD

            b_NDD = None
            if value.linear:
                b_NED = value.matrix(score)
                b_NDD = b_NED[:, :D, :]
            matrices[site, layer, 'B'] = b_NDD
    return matrices


def _in_float32(array: jax.Array) -> jax.Array:
    """Returns the array in float32, or in its own dtype if that is wider."""
    return array.astype(jnp.promote_types(array.dtype, jnp.float32))


@jax.jit
def drifts(reference: Transformer, other: Transformer) -> dict[Circuit, jax.Array]:
    """Returns how far each circuit has moved from the reference, |other - reference| / |reference|.

    For example, the value of ('attention', 0, 'A') is one number per head, [N]. A circuit that is
    not a matrix in both models is left out. Raises ConfigError if the models differ in layers,
    heads or d_model.
    """
    before = circuit_matrices(reference)
    after = circuit_matrices(other)
    needs = 'drift is between models of the same layers, heads and d_model'
    unpaired = sorted(before.keys() ^ after.keys())  # the circuits of one model only
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
    """Returns a batch for `induction_score`: random tokens_BT whose rows repeat their first half.

    For example, a row is [7, 3, 9, 7, 3, 9] for a context of 6. Returns None for an
    encoder-decoder, and if the half would have fewer than two tokens.
    """
    config = model.config
    half = config.context // 2
    if config.window is not None:
        # A query must see the token half - 1 positions before it, which the score is about.
        half = min(half, config.window)
    if half < 2 or isinstance(model, EncoderDecoder):
        return None
    random = np.random.default_rng(0)
    first_half_BT = random.integers(0, config.vocab_size, (8, half))
    return {'tokens_BT': np.tile(first_half_BT, 2)}


@jax.jit
def quantities_of_matrices(a_PNDD: jax.Array) -> dict[str, jax.Array]:
    """Returns the quantities of P matrices per head: [P, N] for each name in MATRIX_QUANTITIES.

    The dict also has 'singular_values' [P, N, D].
    """
    results = {name: quantity(a_PNDD) for name, quantity in MATRIX_QUANTITIES.items()}
    results['singular_values'] = singular_values(a_PNDD)
    return results


@jax.jit
def _quantities_of_patterns(
    model: Transformer, inputs: Mapping[str, Any]
) -> dict[tuple[str, int], dict[str, jax.Array]]:
    """Returns {(site, layer): {quantity: its value per head, [N]}} of all attention patterns."""
    results = {}
    for (site, layer), pattern in attention_patterns(model, inputs).items():
        quantities = pattern_quantities(site)
        results[site, layer] = {name: quantity(pattern) for name, quantity in quantities.items()}
    return results


@functools.partial(jax.jit, static_argnames='period')
def _induction_scores(
    model: Transformer, inputs: Mapping[str, Any], period: int
) -> dict[tuple[str, int], jax.Array]:
    """Returns the induction scores [N] of each (site, layer), for tokens with this period."""
    scores = {}
    for (site, layer), pattern in attention_patterns(model, inputs).items():
        scores[site, layer] = induction_score(pattern, period)
    return scores


def _rows_by_head(source: tuple[str, int, str], quantities: Mapping[str, np.ndarray]) -> list[Row]:
    """Returns one `Row` for each quantity and head.

    Args:
      source: (site, layer, subject), which all the rows share.
      quantities: the values of each quantity by its name, one value per head, [N].
    """
    site, layer, subject = source
    rows = []
    for quantity, values_N in quantities.items():
        for head, value in enumerate(values_N):
            rows.append(Row(site, layer, head, subject, quantity, float(value)))
    return rows
