"""The catalogue of Scores and Values: their declarations, and what is measured on real layers."""

import dataclasses
import json
from collections.abc import Collection, Mapping
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import (
    SCORES,
    VALUES,
    Attention,
    AttentionSpec,
    Score,
    Value,
    registry,
    visible,
)
from qkattn.config import ModelConfig
from qkattn.config.calls import options_of
from qkattn.convert.conversions import CONVERSIONS
from qkattn.errors import ConversionError, SpecError
from qkattn.model import cost
from qkattn.model.sites import attention_spec

Kind = Literal['Score', 'Value']

# A power of two, N H = D, an even head size: a size at which every Score and Value can be built.
REFERENCE = ModelConfig(d_model=64, num_layers=1, num_heads=4, context=128)

BEGIN, END = '<!-- catalogue: python -m experiments.variants --markdown -->', '<!-- end -->'


@dataclasses.dataclass(frozen=True)
class Entry:
    """One Score or Value.

    Attributes:
      name: in the registry.
      variant: the (score, value) in which it is documented.
      options: keyword arguments of the class with their defaults.
      equation: A[n] or B[n].
      parameters: parameter count in letters.
      count: parameter count at the reference size.
      cache: floats per token in letters; of a Value, those beyond what its Score caches.
      rope: whether rotary positions may be used, for a Score.
      source: where the form comes from.
    """

    kind: Kind
    name: str
    variant: tuple[str, str]
    options: str
    equation: str
    parameters: str
    count: int
    cache: str
    rope: bool
    source: str


def entries() -> list[Entry]:
    """Every registered Score, then every Value."""
    return [_entry('Score', name) for name in SCORES] + [_entry('Value', name) for name in VALUES]


def documented_variants() -> list[tuple[str, str]]:
    """Every Score with `vo`, then every Value with its partner."""
    pairs = [(name, 'vo') for name in SCORES]
    return list(dict.fromkeys(pairs + [(cls.partner, name) for name, cls in VALUES.items()]))


def buildable_variants() -> list[tuple[str, str]]:
    """Every (score, value) of the registries that can be built at the reference size."""
    found = []
    for score in SCORES:
        for value in VALUES:
            try:
                registry.check(reference_spec(score, value))
            except SpecError:
                continue
            found.append((score, value))
    return found


def table(kind: Kind, names: Collection[str] | None = None) -> str:
    """A Markdown table of Scores or of Values.

    Args:
      names: which rows; None is all.
    """
    matrix = 'A[n]' if kind == 'Score' else 'B[n]'
    columns = [kind, matrix, 'parameters', 'cache, floats per token']
    rows = []
    for entry in entries():
        if entry.kind == kind and (names is None or entry.name in names):
            rows.append([f'`{entry.name}`', entry.equation, entry.parameters, entry.cache])
            if kind == 'Score':
                rows[-1].append('yes' if entry.rope else 'no')
    columns += ['RoPE'] if kind == 'Score' else []
    lines = [f'| {" | ".join(cells)} |' for cells in (columns, *rows)]
    lines.insert(1, '|---' * len(columns) + '|')
    return '\n'.join(lines).replace('*', '·')


def markdown() -> str:
    """The tables of all Scores and all Values."""
    return f'{table("Score")}\n\n{table("Value")}\n'


def equations() -> str:
    """JSON: by kind and name, the equation and the default options; reports read it without jax."""
    found: dict[str, Mapping[str, type[Score] | type[Value]]] = {'Score': SCORES, 'Value': VALUES}
    described = {
        kind: {
            name: {'equation': cls.equation, 'options': options_of(cls)}
            for name, cls in registered.items()
        }
        for kind, registered in found.items()
    }
    return json.dumps(described, indent=1)


def text() -> str:
    """The whole catalogue for a terminal, a paragraph per Score or Value."""
    lines = [
        f'reference: d_model D={REFERENCE.d_model}, heads N=K={REFERENCE.num_heads}, '
        f'head size H={attention_spec(REFERENCE).head_size}, context {REFERENCE.context}; '
        'FLOPs are those of a forward pass of a one-layer model',
    ]
    for entry in entries():
        score, value = entry.variant
        flops = cost.flops_per_token(dataclasses.replace(REFERENCE, score=score, value=value))
        beyond = '' if entry.kind == 'Score' else ' beyond those of the Score'
        lines += [
            '',
            f'{entry.kind} {entry.name}' + (f'({entry.options})' if entry.options else ''),
            f'  equation    {entry.equation}',
            f'  parameters  {entry.parameters} = {entry.count:,}',
            f'  FLOPs       {flops:,.0f} per token',
            f'  cache       {entry.cache} floats per token{beyond}',
            *([f'  RoPE        {"yes" if entry.rope else "no"}'] if entry.kind == 'Score' else []),
            f'  exact       {", ".join(exact(conversions(score, value))) or "no conversion"}',
            f'  source      {entry.source}',
        ]
    return '\n'.join(lines)


def conversion_table() -> str:
    """Measured errors of every conversion of every documented variant."""
    lines = [
        'largest relative change of the output, float64; - where the conversion is refused',
        *(
            f'{circuit}: {", ".join(n for n, c in CONVERSIONS.items() if c.circuit == circuit)}'
            for circuit in ('QK', 'OV', 'both')
        ),
        '',
    ]
    for score, value in documented_variants():
        done = {n: e for n, e in conversions(score, value).items() if isinstance(e, float)}
        words = ', '.join(f'{n} {e:.0e}' for n, e in done.items())
        lines.append(f'{f"{score}/{value}":32s} {words or "-"}')
    return '\n'.join(lines)


def conversions(score: str, value: str) -> dict[str, float | str]:
    """The effect of each conversion on a layer of this variant with random parameters.

    Returns:
      By name of the conversion: the largest relative change of the layer's output, in float64, or
      the message with which the conversion is refused.
    """
    with jax.enable_x64(True):
        spec = reference_spec(score, value)
        leaves, tree = jax.tree.flatten(Attention(spec, key=jax.random.key(0)))
        keys = jax.random.split(jax.random.key(1), max(1, len(leaves)))
        leaves = [
            a.astype(jnp.float64) + 0.1 * jax.random.normal(k, a.shape, jnp.float64)
            for a, k in zip(leaves, keys, strict=False)
        ]
        layer = jax.tree.unflatten(tree, leaves)
        x_BTD = jax.random.normal(jax.random.key(2), (2, 9, spec.d_model), jnp.float64)
        mask_BTS = visible(9, 9, causal=True)
        want = layer(x_BTD, mask_BTS)
        out: dict[str, float | str] = {}
        for name, conversion in CONVERSIONS.items():
            if conversion.takes_norm:
                continue
            try:
                converted, _ = conversion(layer, **conversion.example)
            except ConversionError as error:
                out[name] = str(error)
                continue
            got = converted(x_BTD, mask_BTS)
            out[name] = float(jnp.abs(got - want).max() / jnp.abs(want).max())
        return out


def exact(errors: dict[str, float | str]) -> list[str]:
    """The conversions that keep the function."""
    return [n for n, e in errors.items() if isinstance(e, float) and e < 1e-9]


def letters(circuit: nnx.Module, spec: AttentionSpec) -> dict[str, int]:
    """The sizes of the letters in `parameter_count`, from the spec and the parameters' axes.

    Raises:
      ValueError: a parameter's name gives a letter another size than the spec or another parameter.
    """
    sizes = spec.letters
    for path, leaf in jax.tree_util.tree_leaves_with_path(nnx.to_pure_dict(nnx.state(circuit))):
        name = path[-1].key
        for letter, size in zip(name.rsplit('_', 1)[1], leaf.shape, strict=True):
            if sizes.setdefault(letter, size) != size:
                raise ValueError(f'{name}: {letter} is {size} here and {sizes[letter]} elsewhere')
    return sizes


def reference_spec(score: str, value: str) -> AttentionSpec:
    """The attention layer of this variant at the reference size."""
    return attention_spec(dataclasses.replace(REFERENCE, score=score, value=value))


def _entry(kind: Kind, name: str) -> Entry:
    is_score = kind == 'Score'
    cls = SCORES[name] if is_score else VALUES[name]
    variant = (name, 'vo') if is_score else (VALUES[name].partner, name)
    spec = reference_spec(*variant)
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    circuit = layer.score if is_score else layer.value
    return Entry(
        kind=kind,
        name=name,
        variant=variant,
        options=', '.join(f'{k}={v!r}' for k, v in options_of(cls).items()),
        equation=cls.equation,
        parameters=circuit.parameter_count,
        count=sum(leaf.size for leaf in jax.tree.leaves(circuit)),
        cache=_cache(layer, is_score),
        rope=SCORES[variant[0]].supports_rope,
        source=cls.source,
    )


def _cache(layer: Attention, is_score: bool) -> str:
    """'K*H' from {'k_BSKH': ...}: the letters after B and S of all cached arrays."""
    y_BSD = jax.ShapeDtypeStruct((1, 1, layer.spec.d_model), jnp.float32)
    keys, both = jax.eval_shape(
        lambda layer, y: (layer.score.cached(y), layer.cached(y)), layer, y_BSD
    )
    names = keys if is_score else [name for name in both if name not in keys]
    terms = [name.rpartition('_BS')[2] for name in names]
    return ' + '.join('*'.join(term) for term in terms) or '0'
