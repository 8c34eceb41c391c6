"""Measures a model's attention: quantities of its matrices A[n], B[n] and of its patterns."""

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

# (site, layer, matrix). The matrix is 'A' for the QK circuit, and 'B' for the OV circuit. The site
# is 'attention', 'cross_attention' or 'encoder/attention'.
Circuit = tuple[str, int, str]


@dataclasses.dataclass(frozen=True)
class Row:
    """The value of one quantity for one head; docs/analysis.md explains the quantities."""

    site: str  # 'attention', 'cross_attention' or 'encoder/attention'
    layer: int  # from 0
    head: int  # from 0
    subject: str  # what is measured: 'A', 'B' or 'pattern'
    quantity: str
    value: float  # NaN if undefined, e.g. the effective rank of a zero matrix


@dataclasses.dataclass(frozen=True)
class Analysis:
    """The results of `analyze`."""

    rows: list[Row]
    spectra: dict[Circuit, np.ndarray]  # singular values [N, D] of N heads
    missing: list[Circuit]  # circuits without a matrix: scores not bilinear, values not linear

    def values(
        self, quantity: str, subject: str | None = None, site: str = 'attention'
    ) -> np.ndarray:
        """Returns one quantity of all L layers and N heads of a site, [L, N].

        For example, `values('effective_rank', 'A')` is the effective rank of every A[n]. Layers
        without the quantity have NaN.

        Args:
            quantity: The name of the quantity.
            subject: 'A', 'B' or 'pattern'; by default the only one that has the quantity.
            site: 'attention', 'cross_attention' or 'encoder/attention'.

        Raises:
            KeyError: No layer of the site has the quantity, or several subjects have it and
                `subject` is None.
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
    """Measures all attention layers and heads of a model.

    A and B are matrices [D, D], and A includes the scale of the logits. A excludes QK-norm and
    RoPE. Both exclude biases.

    Args:
        model: The model.
        batch: Inputs of the model (tokens_BT; source_BS, segments, ...), to measure its attention
            patterns.
        reference: Another model, to measure the drift of A and B from it.
        induction: Whether to measure induction scores, on random tokens that occur twice. An
            encoder-decoder has none.

    Raises:
        ConfigError: `reference` differs from the model in layers, heads or d_model.
    """
    rows: list[Row] = []
    if reference is not None:
        for circuit, drift_N in jax.device_get(drifts(reference, model)).items():
            rows += _rows_by_head(circuit, {'drift': drift_N})

    matrices = jax.jit(circuit_matrices)(model)
    present = {circuit: a_NDD for circuit, a_NDD in matrices.items() if a_NDD is not None}
    missing = [circuit for circuit, a_NDD in matrices.items() if a_NDD is None]
    spectra: dict[Circuit, np.ndarray] = {}
    if present:
        # Stack the P matrices, because a program with two LAPACK calls may hang on CPUs.
        a_PNDD = jnp.stack(list(present.values()))
        values_PN_by_name = jax.device_get(quantities_of_matrices(a_PNDD))
        spectra_PND = values_PN_by_name.pop('singular_values')
        for index, circuit in enumerate(present):
            spectra[circuit] = spectra_PND[index]
            quantities = {name: values_PN[index] for name, values_PN in values_PN_by_name.items()}
            rows += _rows_by_head(circuit, quantities)

    inputs = inputs_of(batch or {})
    if inputs:
        quantities_by_layer = jax.device_get(_quantities_of_patterns(model, inputs))
        for (site, layer), quantities in quantities_by_layer.items():
            rows += _rows_by_head((site, layer, 'pattern'), quantities)

    repeated = repeated_tokens(model) if induction else None
    if repeated is not None:
        period = repeated['tokens_BT'].shape[1] // 2
        scores = jax.device_get(_induction_scores(model, repeated, period))
        for (site, layer), score_N in scores.items():
            rows += _rows_by_head((site, layer, 'pattern'), {'induction_score': score_N})
    return Analysis(rows, spectra, missing)


def circuit_matrices(model: Transformer) -> dict[Circuit, jax.Array | None]:
    """Returns the matrices A[n] and B[n] of every attention layer, for N heads.

    The logit of a query x and a key y is x A[n] y^T, scale included. With attention weights p, head
    n outputs the sum of p y B[n] over the keys. Biases are left out.

    Returns:
        Arrays [N, D, D] by circuit, float32 or wider. A is None if the Score is not bilinear. B is
        None if the Value is not linear.
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
    """Returns |other - reference| / |reference| of each circuit, one number per head.

    Circuits without a matrix in both models are left out.

    Raises:
        ConfigError: The models differ in layers, heads or d_model.
    """
    reference_matrices = circuit_matrices(reference)
    other_matrices = circuit_matrices(other)
    needs = 'drift is between models of the same layers, heads and d_model'
    in_one_model_only = sorted(reference_matrices.keys() ^ other_matrices.keys())
    if in_one_model_only:
        site, layer, _ = in_one_model_only[0]
        raise ConfigError(f'{site} {layer} is a layer of one model only; {needs}')

    drift_by_circuit = {}
    for circuit, reference_NDD in reference_matrices.items():
        other_NDD = other_matrices[circuit]
        if reference_NDD is None or other_NDD is None:
            continue
        if reference_NDD.shape != other_NDD.shape:
            site, layer, matrix = circuit
            raise ConfigError(
                f'{site} {layer}: {matrix}[n] is {[*reference_NDD.shape]} in the reference and '
                f'{[*other_NDD.shape]} in the model; {needs}'
            )
        drift_by_circuit[circuit] = jax.vmap(drift)(reference_NDD, other_NDD)
    return drift_by_circuit


def repeated_tokens(model: Transformer) -> dict[str, np.ndarray] | None:
    """Returns random tokens_BT for `induction_score`, whose rows repeat their first half.

    For example, a row is [7, 3, 9, 7, 3, 9] for a context of 6. Returns None for an
    encoder-decoder, and for halves of fewer than two tokens.
    """
    config = model.config
    half = config.context // 2
    if config.window is not None:
        # Induction attends to the token half - 1 positions before the query.
        half = min(half, config.window)
    if half < 2 or isinstance(model, EncoderDecoder):
        return None
    rng = np.random.default_rng(0)
    first_half_BT = rng.integers(0, config.vocab_size, size=(8, half))
    return {'tokens_BT': np.tile(first_half_BT, 2)}


@jax.jit
def quantities_of_matrices(a_PNDD: jax.Array) -> dict[str, jax.Array]:
    """Measures P matrices of N heads.

    Returns:
        An array [P, N] for each name in MATRIX_QUANTITIES, and 'singular_values' [P, N, D].
    """
    results = {name: quantity(a_PNDD) for name, quantity in MATRIX_QUANTITIES.items()}
    results['singular_values'] = singular_values(a_PNDD)
    return results


@jax.jit
def _quantities_of_patterns(
    model: Transformer, inputs: Mapping[str, Any]
) -> dict[tuple[str, int], dict[str, jax.Array]]:
    """Returns arrays [N] by quantity of each attention pattern, by (site, layer)."""
    results = {}
    for (site, layer), pattern in attention_patterns(model, inputs).items():
        quantities = pattern_quantities(site)
        results[site, layer] = {name: quantity(pattern) for name, quantity in quantities.items()}
    return results


@functools.partial(jax.jit, static_argnames='period')
def _induction_scores(
    model: Transformer, inputs: Mapping[str, Any], period: int
) -> dict[tuple[str, int], jax.Array]:
    """Returns induction scores [N] by (site, layer), for tokens that repeat with this period."""
    scores = {}
    for (site, layer), pattern in attention_patterns(model, inputs).items():
        scores[site, layer] = induction_score(pattern, period)
    return scores


def _rows_by_head(source: tuple[str, int, str], quantities: Mapping[str, np.ndarray]) -> list[Row]:
    """Returns one `Row` for each quantity and head.

    Args:
        source: (site, layer, subject) of the rows.
        quantities: An array [N] of N heads for each quantity.
    """
    site, layer, subject = source
    rows = []
    for quantity, values_N in quantities.items():
        for head, value in enumerate(values_N):
            rows.append(Row(site, layer, head, subject, quantity, float(value)))
    return rows
