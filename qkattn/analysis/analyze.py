"""Everything that is measured of one model: of its matrices, its attention, its gradients."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from qkattn.analysis import factors, watching
from qkattn.analysis.matrices import OF_MATRICES, definiteness, drift, singular_values
from qkattn.analysis.patterns import IN_ORDER, OF_PATTERNS, Pattern, induction_score
from qkattn.errors import ConfigError
from qkattn.model import Encoder, EncoderDecoder
from qkattn.model.transformer import Transformer, inputs_of

# Site, layer, and 'A' or 'B'.
Place = tuple[str, int, str]
# Rows of random tokens that are shown twice, for the induction score.
REPEATED_ROWS = 8


@dataclasses.dataclass(frozen=True, order=True)
class Row:
    """One number.

    Attributes:
      site: 'attention', 'cross_attention', 'encoder/attention'; of parameters also 'mlp', 'model'
        (outside the blocks) and the like.
      layer, head: from 0; None of what has none.
      of: 'A' or 'B', the matrices of a head; 'pattern', its probabilities and logits; or the name
        of a parameter.
      quantity: a name of OF_MATRICES, OF_PATTERNS, IN_ORDER, or 'drift', 'induction_score',
        'parameter_norm', 'gradient_norm'.
      value: NaN where it is not defined, as the effective rank of a zero matrix.
    """

    site: str
    layer: int | None
    head: int | None
    of: str
    quantity: str
    value: float


@dataclasses.dataclass(frozen=True)
class Analysis:
    """What was measured.

    Attributes:
      rows: the numbers.
      spectra: singular values [N, D] by (site, layer, 'A' or 'B').
      missing: (site, layer, 'A' or 'B') of circuits that are no such matrix: scores that are not
        bilinear, values that are not linear.
    """

    rows: list[Row]
    spectra: dict[Place, np.ndarray]
    missing: list[Place]

    def values(self, quantity: str, of: str | None = None, site: str = 'attention') -> np.ndarray:
        """[L, N] of a quantity, or [L, 1] of one that has no heads; NaN in layers without it.

        Raises:
          KeyError: the quantity was not measured there.
        """
        found: dict[int, list[float]] = {}
        for row in self.rows:
            if (row.quantity, row.site) == (quantity, site) and of in (None, row.of):
                found.setdefault(row.layer or 0, []).append(row.value)
        if not found:
            raise KeyError(f'no {quantity} of {of} at {site}')
        layers = [row.layer or 0 for row in self.rows if row.site == site]
        layers += [layer for where, layer, _ in self.missing if where == site]
        values_LN = np.full((max(layers) + 1, max(map(len, found.values()))), np.nan)
        for layer, values_N in found.items():
            values_LN[layer] = values_N
        return values_LN


def analyze(
    model: Transformer,
    batch: Mapping[str, Any] | None = None,
    *,
    reference: Transformer | None = None,
    induction: bool = True,
    seed: int = 0,
) -> Analysis:
    """Measures a model, all layers and heads.

    A and B are in stream coordinates, A with the scale on the logits; what acts between the
    projections (QK-norm, RoPE) is left out of A, as are biases of both.

    Args:
      batch: inputs of the model (tokens_BT; source_BS, segments, ...), of which patterns are taken;
        with targets_BT and loss_weights_BT also gradients. None measures matrices and parameters.
      reference: model from which the drift of A and B is measured.
      induction: whether random tokens are shown twice to a decoder or encoder.
      seed: of these tokens.

    Raises:
      ConfigError: as `drifts`.
    """
    rows: list[Row] = []
    if reference is not None:
        for (site, layer, of), drift_N in jax.device_get(drifts(reference, model)).items():
            rows += _by_head(site, layer, of, {drift.__name__: drift_N})
    spectra: dict[Place, np.ndarray] = {}
    missing: list[Place] = []
    for (site, layer, of), numbers in of_matrices(model).items():
        if not numbers:
            missing.append((site, layer, of))
            continue
        spectra[site, layer, of] = numbers.pop('singular_values')
        rows += _by_head(site, layer, of, numbers)
    inputs = inputs_of(batch or {})
    measured = jax.device_get(_of_inputs(model, inputs)) if inputs else {}
    for (site, layer), numbers in measured.items():
        rows += _by_head(site, layer, 'pattern', numbers)
    if induction and (repeated := repeated_tokens(model, seed)) is not None:
        period = repeated['tokens_BT'].shape[1] // 2
        for layer, numbers in enumerate(jax.device_get(_of_repeats(model, repeated, period))):
            rows += _by_head('attention', layer, 'pattern', {'induction_score': numbers})
    trees = {'parameter_norm': factors.params_of(model)}
    if batch is not None and 'targets_BT' in batch:
        trees['gradient_norm'] = factors.gradients(model, dict(batch))
    for quantity, tree in trees.items():
        rows += [
            Row(site, layer, None, factor, quantity, value)
            for site, layer, factor, value in factors.norms(model, tree)
        ]
    return Analysis(rows, spectra, missing)


def circuit_matrices(model: Transformer) -> dict[Place, jax.Array | None]:
    """A[n] and B[n], [N, D, D], of every attention layer, in float32 or wider.

    A has the scale of the logits. None where the circuit is not one matrix a head.
    """
    D = model.config.d_model
    found: dict[Place, jax.Array | None] = {}
    for site, layers in watching.sites(model).items():
        for layer, attention in enumerate(layers):
            attention = jax.tree.map(_wide, attention)
            score, value = attention.score, attention.value
            scale = score.scale * attention.spec.score_scale
            a_NDE = scale * score.matrix() if score.bilinear else None
            b_NDE = value.matrix(score) if value.linear else None
            found[site, layer, 'A'] = None if a_NDE is None else a_NDE[:, :D, :D]
            found[site, layer, 'B'] = None if b_NDE is None else b_NDE[:, :D, :D]
    return found


@jax.jit
def drifts(reference: Transformer, other: Transformer) -> dict[Place, jax.Array]:
    """`drift` [N] from the reference's A[n] and B[n] to the other's, of circuits that have both.

    Raises:
      ConfigError: the models differ in layers, heads or d_model.
    """
    theirs, ours = circuit_matrices(reference), circuit_matrices(other)
    needs = 'drift is between models of the same layers, heads and d_model'
    for site, layer, _ in sorted(theirs.keys() ^ ours.keys()):
        raise ConfigError(f'{site} {layer} is a layer of one model only; {needs}')
    found = {}
    for place, a_NDD in theirs.items():
        b_NDD = ours[place]
        if a_NDD is None or b_NDD is None:
            continue
        if a_NDD.shape != b_NDD.shape:
            site, layer, of = place
            raise ConfigError(
                f'{site} {layer}: {of}[n] is {[*a_NDD.shape]} in the reference and '
                f'{[*b_NDD.shape]} in the model; {needs}'
            )
        found[place] = jax.vmap(drift)(a_NDD, b_NDD)
    return found


def repeated_tokens(model: Transformer, seed: int) -> dict[str, np.ndarray] | None:
    """tokens_BT of uniform random tokens r_1 .. r_H r_1 .. r_H, T <= context; None where T < 4.

    H <= window, so that a query sees the token after its previous occurrence. None of an
    encoder-decoder, too, whose targets follow a source.
    """
    config = model.config
    half = min(config.context // 2, config.window or config.context)
    if half < 2 or isinstance(model, EncoderDecoder):
        return None
    rng = np.random.default_rng(seed)
    r_BH = rng.integers(0, config.vocab_size, (REPEATED_ROWS, half))
    return {'tokens_BT': np.tile(r_BH, 2)}


def next_token_batch(model: Transformer, tokens_BT: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs of the model for tokens, and of a decoder as targets the tokens that follow."""
    if isinstance(model, Encoder | EncoderDecoder):
        return {'tokens_BT': tokens_BT}
    targets_BT = np.roll(tokens_BT, -1, 1)
    weights_BT = np.ones(tokens_BT.shape, np.float32)
    weights_BT[:, -1] = 0
    return {'tokens_BT': tokens_BT, 'targets_BT': targets_BT, 'loss_weights_BT': weights_BT}


def of_pattern(pattern: Pattern, in_order: bool) -> dict[str, jax.Array]:
    """Every quantity [N] of a pattern by name; `in_order` where t and s count one sequence."""
    chosen = OF_PATTERNS | (IN_ORDER if in_order else {})
    return {name: function(pattern) for name, function in chosen.items()}


def of_matrices(model: Transformer) -> dict[Place, dict[str, np.ndarray]]:
    """OF_MATRICES [N] and singular_values [N, D] of every circuit; {} of one without a matrix."""
    found = jax.jit(circuit_matrices)(model)
    present = {place: a_NDD for place, a_NDD in found.items() if a_NDD is not None}
    if not present:
        return {place: {} for place in found}
    stacked_PNDD = jnp.stack(list(present.values()))
    # One after the other, each with one decomposition: see `matrices`.
    numbers = [jax.device_get(program(stacked_PNDD)) for program in (_of_spectra, _of_forms)]
    rows = {place: row for row, place in enumerate(present)}
    return {
        place: {n: of_P[rows[place]] for of in numbers for n, of_P in of.items()}
        if place in rows
        else {}
        for place in found
    }


@jax.jit
def _of_spectra(a_PNDD: jax.Array) -> dict[str, jax.Array]:
    """What needs no eigenvalues."""
    chosen = OF_MATRICES | {'singular_values': singular_values}
    return {name: of(a_PNDD) for name, of in chosen.items() if of is not definiteness}


@jax.jit
def _of_forms(a_PNDD: jax.Array) -> dict[str, jax.Array]:
    return {definiteness.__name__: definiteness(a_PNDD)}


@jax.jit
def _of_inputs(model: Transformer, inputs: Mapping[str, Any]) -> dict[tuple[str, int], dict]:
    return {
        place: of_pattern(pattern, not place[0].endswith('cross_attention'))
        for place, pattern in watching.attention_patterns(model, inputs).items()
    }


@functools.partial(jax.jit, static_argnames='period')
def _of_repeats(model: Transformer, inputs: Mapping[str, Any], period: int) -> list[jax.Array]:
    found = watching.attention_patterns(model, inputs)
    return [induction_score(pattern, period) for pattern in found.values()]


def _by_head(site: str, layer: int, of: str, numbers: Mapping[str, np.ndarray]) -> list[Row]:
    return [
        Row(site, layer, head, of, name, float(value))
        for name, values_N in numbers.items()
        for head, value in enumerate(values_N)
    ]


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(jnp.promote_types(leaf.dtype, jnp.float32))
