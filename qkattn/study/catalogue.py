"""The catalogue of Scores and Values, read off the classes themselves."""

import dataclasses
import inspect
import re

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import SCORES, VALUES, Attention, AttentionSpec, Score, registry, visible
from qkattn.config import ModelConfig
from qkattn.convert import CONVERSIONS
from qkattn.errors import ConversionError, SpecError
from qkattn.model import cost
from qkattn.model.sites import attention_spec

# Small enough to trace in no time; every cell that needs a power of two or even sizes exists.
REFERENCE = ModelConfig(d_model=64, num_layers=1, num_heads=4, context=128)

BEGIN, END = '<!-- catalogue: python -m experiments.variants --markdown -->', '<!-- end -->'


@dataclasses.dataclass(frozen=True)
class Entry:
    """One Score or Value.

    Attributes:
      name: in the registry, with the options that the reference form is given.
      options: keyword arguments that the class takes, with defaults.
      equation, weights, source: from the class.
      cache: floats per token in letters, from the arrays that it remembers.
      rope: whether rotary positions may be used; None for a Value, which they do not touch.
      counted: weights of the circuit at the reference size.
      flops: forward FLOPs per token of the reference model with this circuit.
      exact: conversions of that cell that keep its function, as measured.
    """

    name: str
    options: str
    equation: str
    weights: str
    source: str
    cache: str
    rope: bool | None
    counted: int
    flops: float
    exact: list[str]


def partner(name: str, cls: type) -> tuple[str, str]:
    """The cell (score, value) in which a circuit is shown: beside the standard other one."""
    if name in SCORES and SCORES[name] is cls:
        return name, 'vo'
    return cls.partner, name


def entries(*, measure: bool = False) -> list[Entry]:
    """Every registered Score, then every Value; with their exact conversions where measured."""
    return [_entry(n, c, measure) for known in (SCORES, VALUES) for n, c in known.items()]


def _entry(name: str, cls: type, measure: bool) -> Entry:
    score, value = partner(name, cls)
    model = dataclasses.replace(REFERENCE, score=score, value=value)
    is_score = issubclass(cls, Score)
    layer = jax.eval_shape(lambda: Attention(attention_spec(model), key=jax.random.key(0)))
    circuit = layer.score if is_score else layer.value
    return Entry(
        name=name,
        options=_options(cls),
        equation=cls.equation,
        weights=circuit.parameter_count,
        source=cls.source,
        cache=_cache(attention_spec(model), is_score),
        rope=cls.supports_rope if is_score else None,
        counted=sum(leaf.size for leaf in jax.tree.leaves(circuit)),
        flops=cost.flops_per_token(model),
        exact=exact(conversions(score, value)) if measure else [],
    )


def _options(cls: type) -> str:
    parameters = list(inspect.signature(cls.__init__).parameters.values())[2:]
    return ', '.join(
        p.name if p.default is p.empty else f'{p.name}={p.default!r}'
        for p in parameters
        if p.name != 'key'
    )


def _cache(spec: AttentionSpec, is_score: bool) -> str:
    """'K*H' from {'k_BSKH': ...}: the letters after B and S, as many as are held."""
    layer = jax.eval_shape(lambda: Attention(spec, key=jax.random.key(0)))
    y_BSD = jax.ShapeDtypeStruct((1, 1, spec.d_model), jnp.float32)
    keys = jax.eval_shape(lambda layer, y: layer.score.cached(y), layer, y_BSD)
    both = jax.eval_shape(lambda layer, y: layer.cached(y), layer, y_BSD)
    held = keys if is_score else {name: a for name, a in both.items() if name not in keys}
    terms = [re.search(r'_BS([A-Z]+)$', name)[1] for name in held]
    return ' + '.join('*'.join(term) for term in terms) or '0'


def conversions(score: str, value: str) -> dict[str, float | str]:
    """What each conversion does to a layer of this cell, with parameters drawn at random.

    Returns:
      By name: the largest relative change of the layer's output, in float64, or the sentence with
      which the conversion is refused.
    """
    with jax.enable_x64(True):
        spec = attention_spec(dataclasses.replace(REFERENCE, score=score, value=value))
        layer = Attention(spec, key=jax.random.key(0))
        leaves, tree = jax.tree.flatten(layer)
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


def exact(measured: dict[str, float | str]) -> list[str]:
    """The conversions that kept the function."""
    return [n for n, e in measured.items() if isinstance(e, float) and e < 1e-9]


def conversion_table() -> str:
    """Measured errors of every conversion of every circuit beside the standard other one."""
    lines = [
        'largest relative change of the output, float64; - where the conversion is refused',
        *(
            f'{circuit}: {", ".join(n for n, c in CONVERSIONS.items() if c.circuit == circuit)}'
            for circuit in ('QK', 'OV', 'both')
        ),
        '',
    ]
    for entry_name, cls in (*SCORES.items(), *VALUES.items()):
        cell = partner(entry_name, cls)
        done = {n: e for n, e in conversions(*cell).items() if isinstance(e, float)}
        words = ', '.join(f'{n} {e:.0e}' for n, e in done.items())
        lines.append(f'{"/".join(cell):32s} {words or "-"}')
    return '\n'.join(lines)


def letters(circuit: nnx.Module, spec: AttentionSpec) -> dict[str, int]:
    """What the letters of `weights` stand for: sizes of the spec, and axes of the parameters.

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


def markdown() -> str:
    """The tables of the README."""
    out = []
    for kind, known in (('Score', SCORES), ('Value', VALUES)):
        letter = 'A[n]' if kind == 'Score' else 'B[n]'
        head = f'| {kind} | {letter} | weights | cache, floats per token |'
        rule = '|---|---|---|---|'
        if kind == 'Score':
            head, rule = head + ' RoPE |', rule + '---|'
        out += [head, rule]
        for entry in (e for e in entries() if e.name in known and _is(kind, e)):
            row = f'| `{entry.name}` | {entry.equation} | {entry.weights} | {entry.cache} |'
            out.append(row + (f' {"yes" if entry.rope else "no"} |' if kind == 'Score' else ''))
        out.append('')
    return '\n'.join(out).replace('*', '·')


def _is(kind: str, entry: Entry) -> bool:
    return (entry.rope is not None) == (kind == 'Score')


def text() -> str:
    """The whole catalogue for a terminal, a paragraph per circuit."""
    lines = [
        f'reference: d_model D={REFERENCE.d_model}, heads N=K={REFERENCE.num_heads}, '
        f'head size H={attention_spec(REFERENCE).head_size}, context {REFERENCE.context}; '
        'FLOPs are those of a forward pass of the one-layer model with the circuit',
    ]
    for entry in entries(measure=True):
        kind = 'Value' if entry.rope is None else 'Score'
        name = f'{entry.name}({entry.options})' if entry.options else entry.name
        lines += [
            '',
            f'{kind} {name}',
            f'  equation  {entry.equation}',
            f'  weights   {entry.weights} = {entry.counted:,}',
            f'  FLOPs     {entry.flops:,.0f} per token',
            f'  cache     {entry.cache} floats per token'
            + ('' if kind == 'Score' else ' beyond what the Score holds'),
            *([f'  RoPE      {"yes" if entry.rope else "no"}'] if kind == 'Score' else []),
            f'  exact     {", ".join(entry.exact) or "no conversion"}',
            f'  source    {entry.source}',
        ]
    return '\n'.join(lines)


def cells() -> list[tuple[str, str]]:
    """Every (score, value) of the registries that can be built at the reference size."""
    found = []
    for score in SCORES:
        for value in VALUES:
            spec = attention_spec(dataclasses.replace(REFERENCE, score=score, value=value))
            try:
                registry.check(spec)
            except SpecError:
                continue
            found.append((score, value))
    return found
