"""What a model costs, counted on the real thing: weights, FLOPs, cache; and equal-weight configs.

Nothing here is a formula: weights are counted on the parameter tree, FLOPs on the traced
program, the cache on the arrays that a layer remembers, all by abstract evaluation.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.extend.core import ClosedJaxpr, Jaxpr, Literal

from qkattn.attention import registry
from qkattn.attention.spec import SpecError
from qkattn.config import ConfigError, ModelConfig
from qkattn.model import Decoder, EncoderDecoder, abstract_model

GROUPS = ('embedding', 'attention', 'mlp', 'norm')


class MatchError(ConfigError):
    """No configuration meets the weight target, and why."""


def abstract_params(config: ModelConfig) -> dict:
    """The parameter tree with shapes in place of arrays."""
    return nnx.to_pure_dict(nnx.state(abstract_model(config)))


def group_of(path: str) -> str:
    """The budget group of a parameter by its path, e.g. 'blocks/mlp/w_in_DF' -> 'mlp'."""
    *modules, name = path.split('/')
    if modules and modules[-1].endswith('norm'):
        return 'norm'
    for group in ('attention', 'mlp'):
        if any(module.endswith(group) for module in modules):
            return group
    if modules in ([], ['encoder']) and name.startswith(('w_embedding', 'w_position', 'w_output')):
        return 'embedding'
    raise ValueError(f'parameter {path} belongs to no budget group of {", ".join(GROUPS)}')


def count(config: ModelConfig) -> dict[str, int]:
    """Weights per group and their total, as counted on the parameter tree."""
    weights = dict.fromkeys(GROUPS, 0)
    leaves = jax.tree_util.tree_leaves_with_path(abstract_params(config))
    for path, leaf in leaves:
        path = jax.tree_util.keystr(path, simple=True, separator='/')
        weights[group_of(path)] += math.prod(leaf.shape)
    total = sum(math.prod(leaf.shape) for _, leaf in leaves)
    assert sum(weights.values()) == total, (weights, total)
    return {**weights, 'total': total}


def flops_per_token(config: ModelConfig) -> float:
    """Floating-point operations of all matrix products in one forward pass, per token.

    Counted on the traced program at the full context, two per multiply-add; masked positions are
    computed and count. A training step costs about three times as much. In an encoder-decoder, per
    target token, the encoding of a full source included.
    """
    inputs = {'tokens_BT': jax.ShapeDtypeStruct((1, config.context), jnp.int32)}
    if config.kind == 'encoder_decoder':
        inputs['source_BS'] = jax.ShapeDtypeStruct((1, config.encoder.context), jnp.int32)
    jaxpr = jax.make_jaxpr(lambda model, inputs: model(**inputs))(abstract_model(config), inputs)
    return _matmul_flops(jaxpr.jaxpr) / config.context


def _matmul_flops(jaxpr: Jaxpr) -> int:
    """Sums the dot_generals; a value computed twice is counted once, as the compiler merges it."""
    flops, values, seen = 0, {}, set()
    for equation in jaxpr.eqns:
        inputs = tuple(
            repr(v) if isinstance(v, Literal) else values.get(v, id(v)) for v in equation.invars
        )
        value = hash((equation.primitive.name, str(equation.params), inputs))
        values.update({out: (value, i) for i, out in enumerate(equation.outvars)})
        if value in seen:
            continue
        seen.add(value)
        if equation.primitive.name == 'dot_general':
            (contracted, _), _ = equation.params['dimension_numbers']
            left = equation.invars[0].aval.shape
            out = equation.outvars[0].aval.shape
            flops += 2 * math.prod(out) * math.prod(left[axis] for axis in contracted)
        repeats = equation.params['length'] if equation.primitive.name == 'scan' else 1
        for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=_is_jaxpr):
            if _is_jaxpr(inner):
                flops += repeats * _matmul_flops(getattr(inner, 'jaxpr', inner))
    return flops


def _is_jaxpr(value: object) -> bool:
    return isinstance(value, (Jaxpr, ClosedJaxpr))


def cache_floats_per_token(config: ModelConfig) -> int:
    """Numbers that decoding must keep per past token, over all layers.

    In an encoder-decoder, of one target token and one source token together; an encoder, which
    decodes nothing, keeps none.
    """
    if config.kind == 'encoder':
        return 0
    one_layer = abstract_model(dataclasses.replace(config, num_layers=1))
    y_BSD = jax.ShapeDtypeStruct((1, 1, config.d_model), jnp.float32)

    def remember(model: Decoder | EncoderDecoder, y_BSD: jax.Array) -> list[dict]:
        layer = jax.tree.map(lambda stacked: stacked[0], model.blocks)
        read = [layer.attention]
        if config.kind == 'encoder_decoder':
            read.append(layer.cross_attention)
        return [attention.remember(y_BSD) for attention in read]

    memories = jax.tree.leaves(jax.eval_shape(remember, one_layer, y_BSD))
    return config.num_layers * sum(math.prod(array.shape) for array in memories)


@dataclasses.dataclass(frozen=True)
class Match:
    """A config whose weights equal a target.

    Attributes:
      config: with d_model and d_ff solved for.
      weights: counted, by group.
      target: weights asked for.
      residual: (counted - target) / target, of the weights that were to be equal.
    """

    config: ModelConfig
    weights: dict[str, int]
    target: int
    residual: float


def matched_weights(weights: dict[str, int], which: str) -> int:
    """The count that is made equal: 'total', or 'non_embedding'."""
    return weights['total'] - (weights['embedding'] if which == 'non_embedding' else 0)


def match(
    config: ModelConfig,
    target: int,
    *,
    which: str = 'total',
    fill: str | None = 'd_ff',
    tolerance: float = 1e-3,
    multiple_of: int | None = None,
) -> Match:
    """Solves d_model, then the second knob, so that the counted weights equal `target`.

    d_model goes to the multiple of `multiple_of` nearest to the target with d_ff in the proportion
    that `config` has; d_ff then takes up what is left. Where one step of d_ff is still too coarse,
    neighbouring widths are tried, nearest proportion first.

    Args:
      config: the variant; its d_model is only where the search starts.
      target: weights to reach.
      which: 'total' or 'non_embedding'.
      fill: 'd_ff', or None to accept what d_model alone reaches.
      tolerance: largest |residual| accepted.
      multiple_of: step of d_model; None is num_heads, or 1 where head_size is set.

    Raises:
      MatchError: names the constraint that stops the search.
    """
    step = multiple_of or (1 if config.head_size else config.num_heads)
    ratio = config.mlp_width / config.d_model

    def at(d_model: int, d_ff: int | None = None) -> ModelConfig:
        width = max(1, round(ratio * d_model)) if d_ff is None else d_ff
        return dataclasses.replace(config, d_model=d_model, d_ff=width)

    def counted(candidate: ModelConfig) -> int:
        return matched_weights(count(candidate), which)

    def usable(m: int) -> bool:
        try:
            _check_sites(at(m * step))
        except SpecError:
            return False
        return True

    def next_usable(m: int) -> int | None:
        """Some cells allow few widths, such as powers of two or one given by head_size."""
        return next((k for k in range(m, 2 * m + 512 // step + 2) if usable(k)), None)

    def reaches(m: int) -> bool:
        k = next_usable(m)
        return k is None or counted(at(k * step)) >= target

    low, high = 0, 1
    while not reaches(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    around = [next((k for k in range(low, 0, -1) if usable(k)), None), next_usable(high)]
    around = [k for k in around if k is not None]
    if not around:
        try:
            _check_sites(config)
        except SpecError as error:
            raise MatchError(f'{config.score}/{config.value} cannot be built: {error}') from error
        raise MatchError(f'{config.score}/{config.value} has no width in steps of {step}')
    nearest = min(around, key=lambda k: abs(counted(at(k * step)) - target))
    steps = {*around, *(k for k in range(max(1, nearest - 8), nearest + 9) if usable(k))}
    widths = sorted((k * step for k in steps), key=lambda width: abs(width - nearest * step))
    tried = []
    for d_model in widths if fill else widths[:1]:
        candidate = at(d_model)
        if fill:
            base = counted(candidate)
            per_unit = counted(at(d_model, candidate.mlp_width + 1)) - base
            d_ff = candidate.mlp_width + round((target - base) / per_unit)
            if d_ff < 1:
                continue
            candidate = at(d_model, d_ff)
        weights = count(candidate)
        residual = matched_weights(weights, which) / target - 1
        tried.append(Match(candidate, weights, target, residual))
        if abs(residual) <= tolerance:
            return tried[-1]
    if not tried:
        raise MatchError(
            f'{config.score}/{config.value} has more than {target} weights at d_ff=1 and '
            f'd_model={widths[0]} (steps of {step}): raise the target'
        )
    best = min(tried, key=lambda found: abs(found.residual))
    reason = 'd_model alone is too coarse and the second knob is off (fill=None)'
    if fill:
        unit = 2 * config.num_layers * best.config.d_model
        reason = f'one step of d_ff is {unit} weights, {unit / target:.2%} of the target'
    raise MatchError(
        f'{config.score}/{config.value} reaches {target} weights only to {best.residual:+.3%} '
        f'(d_model={best.config.d_model} in steps of {step}, d_ff={best.config.mlp_width}), '
        f'above the tolerance of {tolerance:.3%}: {reason}'
    )


def _check_sites(config: ModelConfig) -> None:
    for spec in config.sites().values():
        registry.check(spec())


def table(rows: dict[str, Match]) -> str:
    """Weights by group, residual, FLOPs and cache of each variant, as aligned text."""
    header = (
        'variant',
        'd_model',
        'd_ff',
        *GROUPS,
        'total',
        'residual',
        'FLOP/token',
        'cache/token',
    )
    lines = [header]
    for name, found in rows.items():
        lines.append(
            (
                name,
                f'{found.config.d_model}',
                f'{found.config.mlp_width}',
                *(f'{found.weights[group]:,}' for group in (*GROUPS, 'total')),
                f'{found.residual:+.4%}',
                f'{flops_per_token(found.config):,.0f}',
                f'{cache_floats_per_token(found.config):,}',
            )
        )
    widths = np.array([[len(cell) for cell in line] for line in lines]).max(0)
    return '\n'.join(
        '  '.join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
