"""What is measured of one model: of its matrices, its attention, its parameters and gradients."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx, traverse_util

from qkattn.analysis.matrices import MATRIX_QUANTITIES, definiteness, drift, singular_values
from qkattn.analysis.patterns import (
    attention_patterns,
    induction_score,
    pattern_quantities,
    sites,
    streams,
)
from qkattn.errors import ConfigError
from qkattn.model import Encoder, EncoderDecoder
from qkattn.model.stack import layer_of
from qkattn.model.transformer import Transformer, inputs_of, loss

Circuit = tuple[str, int, str]  # site, layer, and 'A' or 'B'
# What one program computes; the last one needs eigenvalues, see `matrices`.
PROGRAMS: tuple[tuple[Callable, ...], ...] = (
    (*(q for q in MATRIX_QUANTITIES.values() if q is not definiteness), singular_values),
    (definiteness,),
)


@dataclasses.dataclass(frozen=True)
class Row:
    """One number, of a quantity in docs/analysis.md."""

    # 'attention', 'cross_attention', 'encoder/attention'; of parameters also 'mlp', 'model'
    # (outside the blocks) and the like.
    site: str
    layer: int | None  # from 0, as `head`; None of what has none
    head: int | None
    subject: str  # 'A' or 'B', the matrices of a head; its 'pattern'; or the name of a parameter
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
        """[L, N] of a quantity, or [L, 1] of one that has no heads; NaN in layers without it.

        KeyError if the quantity was not measured there.
        """
        at_site = [row for row in self.rows if row.site == site]
        chosen = [row for row in at_site if row.quantity == quantity]
        chosen = [row for row in chosen if subject in (None, row.subject)]
        if not chosen:
            raise KeyError(f'no {quantity} of {subject} at {site}')
        layers = [row.layer or 0 for row in at_site]
        layers += [layer for where, layer, _ in self.missing if where == site]
        shape = max(layers) + 1, max(row.head or 0 for row in chosen) + 1
        values_LN = np.full(shape, np.nan)
        for row in chosen:
            values_LN[row.layer or 0, row.head or 0] = row.value
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
    model (tokens_BT; source_BS, segments, ...), adds patterns, and with targets_BT and
    loss_weights_BT gradients; `reference`, a model, adds the drift of A and B from it (ConfigError
    as `drifts`); `induction` shows random tokens twice to a decoder or encoder.
    """
    rows: list[Row] = []
    if reference is not None:
        for circuit, drift_N in jax.device_get(drifts(reference, model)).items():
            rows += _by_head(circuit, {'drift': drift_N})
    matrices = jax.jit(circuit_matrices)(model)
    present = {circuit: a_NDD for circuit, a_NDD in matrices.items() if a_NDD is not None}
    numbers: dict[str, np.ndarray] = {'singular_values': np.empty(0)}
    for quantities in PROGRAMS if present else ():
        numbers |= jax.device_get(of_matrices(jnp.stack([*present.values()]), quantities))
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
    rows += _norms(model, 'parameter_norm')
    if batch is not None and 'targets_BT' in batch:
        rows += _norms(jax.jit(jax.grad(loss))(model, dict(batch)), 'gradient_norm')
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


def next_token_batch(model: Transformer, tokens_BT: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs of the model for tokens, and of a decoder as targets the tokens that follow."""
    if isinstance(model, Encoder | EncoderDecoder):
        return {'tokens_BT': tokens_BT}
    weights_BT = np.ones(tokens_BT.shape, np.float32)
    weights_BT[:, -1] = 0
    targets = {'targets_BT': np.roll(tokens_BT, -1, 1), 'loss_weights_BT': weights_BT}
    return {'tokens_BT': tokens_BT, **targets}


@functools.partial(jax.jit, static_argnames='quantities')
def of_matrices(a_PNDD: jax.Array, quantities: tuple[Callable, ...]) -> dict[str, jax.Array]:
    """Quantities of P circuits by name, each [P, N]."""
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


def _norms(model: Transformer, quantity: str) -> list[Row]:
    """The root of the sum of squares of every parameter, in the blocks by layer.

    Of 'blocks/attention/score/w_q_DNH' the site is 'attention' and the factor 'score/w_q_DNH'.
    """
    rows = []
    for prefix, stream in streams(model).items():
        layers = range(stream.config.num_layers)
        trees = [(layer, layer_of(stream.blocks, layer)) for layer in layers]
        for layer, tree in (*trees, (None, stream)):
            arrays = jax.device_get(nnx.to_pure_dict(nnx.state(tree)))
            for path, factor in traverse_util.flatten_dict(arrays, sep='/').items():
                site, _, name = path.partition('/')
                if layer is None and site in ('blocks', 'encoder'):
                    continue
                site, name = ('model', path) if layer is None else (site, name)
                size = float(np.linalg.norm(factor.ravel()))
                rows.append(Row(prefix + site, layer, None, name, quantity, size))
    return rows
