"""What is measured of one model: of its matrices, its attention, its parameters and gradients."""

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from qkattn.analysis.matrices import MATRIX_QUANTITIES, definiteness, drift, singular_values
from qkattn.analysis.patterns import (
    attention_patterns,
    induction_score,
    pattern_quantities,
    sites,
)
from qkattn.errors import ConfigError
from qkattn.model import Encoder, EncoderDecoder
from qkattn.model.stack import stacks_of
from qkattn.model.transformer import Transformer, inputs_of, loss

# Site, layer, and 'A' or 'B'.
Circuit = tuple[str, int, str]
# Rows of random tokens that are shown twice, for the induction score.
REPEATED_ROWS = 8
# What one program computes; the last one needs eigenvalues, see `matrices`.
PROGRAMS: tuple[tuple[Callable, ...], ...] = (
    (*(q for q in MATRIX_QUANTITIES.values() if q is not definiteness), singular_values),
    (definiteness,),
)
# The quantities of which `means` takes the mean.
MEAN_OF_MATRICES = ('norm', 'effective_rank', 'symmetric_share')
MEAN_OF_PATTERNS = ('entropy', 'logit_deviation', 'diagonal_mass', 'previous_token_mass')


@dataclasses.dataclass(frozen=True)
class Row:
    """One number.

    Attributes:
      site: 'attention', 'cross_attention', 'encoder/attention'; of parameters also 'mlp', 'model'
        (outside the blocks) and the like.
      layer, head: from 0; None of what has none.
      of: 'A' or 'B', the matrices of a head; 'pattern', its probabilities and logits; or the name
        of a parameter.
      quantity: what is measured, as in docs/analysis.md.
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
    spectra: dict[Circuit, np.ndarray]
    missing: list[Circuit]

    def values(self, quantity: str, of: str | None = None, site: str = 'attention') -> np.ndarray:
        """[L, N] of a quantity, or [L, 1] of one that has no heads; NaN in layers without it.

        Raises:
          KeyError: the quantity was not measured there.
        """
        at_site = [row for row in self.rows if row.site == site]
        chosen = [row for row in at_site if row.quantity == quantity and of in (None, row.of)]
        if not chosen:
            raise KeyError(f'no {quantity} of {of} at {site}')
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
    projections (QK-norm, RoPE) is left out of A, as are biases of both.

    Args:
      batch: inputs of the model (tokens_BT; source_BS, segments, ...), of which patterns are taken;
        with targets_BT and loss_weights_BT also gradients. None measures matrices and parameters.
      reference: model from which the drift of A and B is measured.
      induction: whether random tokens are shown twice to a decoder or encoder.

    Raises:
      ConfigError: as `drifts`.
    """
    rows: list[Row] = []
    if reference is not None:
        for circuit, drift_N in jax.device_get(drifts(reference, model)).items():
            rows += _by_head(circuit, {drift.__name__: drift_N})
    matrices = jax.jit(circuit_matrices)(model)
    present = {circuit: a_NDD for circuit, a_NDD in matrices.items() if a_NDD is not None}
    numbers: dict[str, np.ndarray] = {singular_values.__name__: np.empty(0)}
    for quantities in PROGRAMS if present else ():
        numbers |= jax.device_get(of_matrices(jnp.stack([*present.values()]), quantities))
    spectra = dict(zip(present, numbers.pop(singular_values.__name__), strict=True))
    for p, circuit in enumerate(present):
        rows += _by_head(circuit, {name: values_P[p] for name, values_P in numbers.items()})
    if inputs := inputs_of(batch or {}):
        for (site, layer), numbers_N in jax.device_get(_of_inputs(model, inputs)).items():
            rows += _by_head((site, layer, 'pattern'), numbers_N)
    if induction and (repeated := repeated_tokens(model)) is not None:
        period = repeated['tokens_BT'].shape[1] // 2
        for layer, score_N in enumerate(jax.device_get(_of_repeats(model, repeated, period))):
            rows += _by_head(('attention', layer, 'pattern'), {induction_score.__name__: score_N})
    rows += _norms(model, 'parameter_norm', nnx.to_pure_dict(nnx.state(model)))
    if batch is not None and 'targets_BT' in batch:
        rows += _norms(model, 'gradient_norm', gradients(model, dict(batch)))
    return Analysis(rows, spectra, [circuit for circuit in matrices if circuit not in spectra])


def means(
    model: Transformer,
    inputs: Mapping[str, Any] | None = None,
    rows_B: jax.Array | None = None,
) -> dict[str, jax.Array]:
    """Attention in a few numbers: means over sites, layers and heads; traceable by jit and vmap.

    MEAN_OF_MATRICES of A[n] as 'qk_norm', of B[n] as 'ov_norm', and MEAN_OF_PATTERNS for these
    inputs as 'attention_entropy'. 'qk_factor_norm' and 'ov_factor_norm' are those of all parameters
    of the score and of the value of a layer. NaN for what the attention does not have; no inputs,
    no patterns. `rows_B` is False for rows whose patterns do not count; None is all.
    """
    results: dict[str, jax.Array] = {}
    layers = [layer for layers in sites(model).values() for layer in layers]
    present = {c: a_NDD for c, a_NDD in circuit_matrices(model).items() if a_NDD is not None}
    numbers = {}
    if present:  # all in one array, as `matrices` asks for
        a_PNDD = jnp.stack([*present.values()])
        numbers = {name: MATRIX_QUANTITIES[name](a_PNDD) for name in MEAN_OF_MATRICES}
    for circuit, matrix, part in (('qk', 'A', 'score'), ('ov', 'B', 'value')):
        indices = [p for p, (*_, which) in enumerate(present) if which == matrix]
        for name in MEAN_OF_MATRICES:
            results[f'{circuit}_{name}'] = _mean(numbers[name][p] for p in indices)
        results[f'{circuit}_factor_norm'] = _mean(_norm(getattr(layer, part)) for layer in layers)
    if inputs is None:
        return results
    rows_B11 = True if rows_B is None else rows_B[:, None, None]
    measured = [
        (pattern_quantities(site), pattern._replace(mask_BTS=pattern.mask_BTS & rows_B11))
        for (site, _), pattern in attention_patterns(model, inputs).items()
    ]
    for name in MEAN_OF_PATTERNS:
        results[f'attention_{name}'] = _mean(
            chosen[name](pattern) for chosen, pattern in measured if name in chosen
        )
    return results


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

    Raises:
      ConfigError: the models differ in layers, heads or d_model.
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
    """tokens_BT of uniform random tokens r_1 .. r_H r_1 .. r_H, T <= context; None where T < 4.

    H <= window, so that a query sees the token after its previous occurrence. None of an
    encoder-decoder, too, whose targets follow a source.
    """
    config = model.config
    half = min(config.context // 2, config.window or config.context)
    if half < 2 or isinstance(model, EncoderDecoder):
        return None
    r_BH = np.random.default_rng(0).integers(0, config.vocab_size, (REPEATED_ROWS, half))
    return {'tokens_BT': np.tile(r_BH, 2)}


def next_token_batch(model: Transformer, tokens_BT: np.ndarray) -> dict[str, np.ndarray]:
    """Inputs of the model for tokens, and of a decoder as targets the tokens that follow."""
    if isinstance(model, Encoder | EncoderDecoder):
        return {'tokens_BT': tokens_BT}
    targets_BT = np.roll(tokens_BT, -1, 1)
    weights_BT = np.ones(tokens_BT.shape, np.float32)
    weights_BT[:, -1] = 0
    return {'tokens_BT': tokens_BT, 'targets_BT': targets_BT, 'loss_weights_BT': weights_BT}


@jax.jit
def gradients(model: Transformer, batch: Mapping[str, jax.Array]) -> dict:
    """The gradient of `loss`, nats per target, as a parameter tree."""
    graph, params = nnx.split(model)
    grads = jax.grad(lambda params: loss(nnx.merge(graph, params), batch))(params)
    return nnx.to_pure_dict(grads)


@functools.partial(jax.jit, static_argnames='quantities')
def of_matrices(a_PNDD: jax.Array, quantities: tuple[Callable, ...]) -> dict[str, jax.Array]:
    """Quantities of P circuits by name, each [P, N]."""
    return {quantity.__name__: quantity(a_PNDD) for quantity in quantities}


@jax.jit
def _of_inputs(model: Transformer, inputs: Mapping[str, Any]) -> dict[tuple[str, int], dict]:
    """Every quantity [N] by site and layer."""
    results = {}
    for (site, layer), pattern in attention_patterns(model, inputs).items():
        chosen = pattern_quantities(site)
        results[site, layer] = {name: quantity(pattern) for name, quantity in chosen.items()}
    return results


@functools.partial(jax.jit, static_argnames='period')
def _of_repeats(model: Transformer, inputs: Mapping[str, Any], period: int) -> list[jax.Array]:
    patterns = attention_patterns(model, inputs)
    return [induction_score(pattern, period) for pattern in patterns.values()]


def _by_head(key: Circuit, numbers: Mapping[str, np.ndarray]) -> list[Row]:
    return [
        Row(*key[:2], head, key[2], name, float(value))
        for name, values_N in numbers.items()
        for head, value in enumerate(values_N)
    ]


def _norms(model: Transformer, quantity: str, tree: dict) -> list[Row]:
    """The root of the sum of squares of every array of a tree with the model's parameter paths.

    Of 'blocks/attention/score/w_q_DNH' the site is 'attention', the factor 'score/w_q_DNH', and
    there is one norm a layer; what is outside the blocks has no layer.
    """
    rows = []
    for path, leaf in jax.tree_util.tree_leaves_with_path(jax.device_get(tree)):
        parts = jax.tree_util.keystr(path, simple=True, separator='/').split('/')
        prefix, *rest = ('encoder/', *parts[1:]) if parts[0] == 'encoder' else ('', *parts)
        if rest[0] != 'blocks':
            size = float(np.linalg.norm(leaf.ravel()))
            rows.append(Row(f'{prefix}model', None, None, '/'.join(rest), quantity, size))
            continue
        period, number = len(stacks_of((model.encoder if prefix else model).blocks)), 0
        if period > 1:
            number = int(rest.pop(1).removeprefix('stack_'))
        for row, weights in enumerate(leaf):
            layer, size = number + row * period, float(np.linalg.norm(weights.ravel()))
            rows.append(Row(prefix + rest[1], layer, None, '/'.join(rest[2:]), quantity, size))
    return rows


def _mean(values: Iterable[jax.Array]) -> jax.Array:
    flat = [jnp.ravel(value) for value in values]
    return jnp.concatenate(flat).mean() if flat else jnp.float32(jnp.nan)


def _norm(circuit: Any) -> jax.Array:
    squares = [(leaf.astype(jnp.float32) ** 2).sum() for leaf in jax.tree.leaves(circuit)]
    return jnp.sqrt(sum(squares, jnp.float32(0)))
