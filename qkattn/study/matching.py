"""Models of equal cost: one dimension is solved for, then d_ff absorbs the rounding residual."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

from qkattn.attention import registry
from qkattn.config import ModelConfig
from qkattn.errors import CoarseError, MatchError, SpecError
from qkattn.model import cost
from qkattn.model.sites import attention_spec, sites

# What absorbs a residual that no step of the destination takes.
_BY_D_FF = 'the destination d_ff (--config.destinations=\'("d_ff",)\')'

# The costs that can be made equal, and their units.
UNITS = {
    'total': 'parameters',
    'non_embedding': 'non-embedding parameters',
    'flops': 'FLOP per token',
    'cache': 'cached numbers per token',
}


@dataclasses.dataclass(frozen=True)
class Dimension:
    """An integer of the model's shape that is solved for."""

    name: str  # the field of ModelConfig
    step: int  # its values are multiples of this
    # The config at a value; the other dimensions stay, but d_ff scales with d_model, and so does
    # the head size unless it is set.
    at: Callable[[int], ModelConfig]

    def usable(self, multiple: int) -> bool:
        """Whether the variant can be built at step * multiple; some need e.g. powers of two."""
        return buildable(self.at(multiple * self.step))

    def next_usable(self, multiple: int) -> int | None:
        reach = range(multiple, 2 * multiple + 512 // self.step + 2)
        return next((m for m in reach if self.usable(m)), None)

    def last_usable(self, multiple: int) -> int | None:
        return next((m for m in range(multiple, 0, -1) if self.usable(m)), None)

    def neighbours(self, value: int) -> tuple[int | None, int | None]:
        """The nearest usable values below and above `value`."""
        below = self.last_usable((value - 1) // self.step)
        above = self.next_usable(value // self.step + 1)
        return below and below * self.step, above and above * self.step


def make_dimension(config: ModelConfig, name: str, which: str = 'total') -> Dimension:
    """The dimension `name` of `config`, as documented in `match`."""
    whole_heads = config.num_heads * (2 if config.positions == 'rope' else 1)
    if name == 'd_model':
        ratio = config.mlp_width / config.d_model

        def head_size(d_model: int) -> int | None:
            """Nearest to d_model / num_heads, even with rotary positions; None where it is that."""
            size = whole_heads // config.num_heads * max(1, round(d_model / whole_heads))
            return None if size * config.num_heads == d_model else size

        def at_width(d_model: int) -> ModelConfig:
            size = config.head_size or head_size(d_model)
            d_ff = max(1, round(ratio * d_model))
            return dataclasses.replace(config, d_model=d_model, d_ff=d_ff, head_size=size)

        # A cache follows N H, which moves in steps of the heads.
        coarse = which == 'cache' and not config.head_size
        return Dimension(name, whole_heads if coarse else 1, at_width)
    held: dict[str, Any] = {'d_ff': config.mlp_width}
    step = 1
    if name == 'num_heads':
        held['head_size'] = config.head_size or config.d_model // config.num_heads
        step = config.num_kv_heads or 1
    return Dimension(name, step, lambda v: dataclasses.replace(config, **{**held, name: v}))


def check_buildable(config: ModelConfig) -> None:
    """Raises MatchError with the constraint that the variant breaks, if any."""
    try:
        for spec in sites(config).values():
            registry.check(spec())
    except SpecError as error:
        raise MatchError(f'{variant_of(config)} cannot be built: {error}') from error


def buildable(config: ModelConfig) -> bool:
    try:
        check_buildable(config)
    except MatchError:
        return False
    return True


def variant_of(config: ModelConfig) -> str:
    """The variant in messages, with those of the other sites where they are set."""
    other = ('pattern', 'encoder_variant', 'cross_variant')
    fields = (f'{name}={getattr(config, name)}' for name in other if getattr(config, name))
    return '?'.join(filter(None, (str(config.variant), '&'.join(fields))))


@dataclasses.dataclass(frozen=True)
class Match:
    """A config whose cost equals a target."""

    config: ModelConfig  # with the destination and d_ff solved for
    parameters: dict[str, int]  # counts by group
    target: float | int  # in the unit of the cost that is made equal
    residual: float  # (cost - target) / target
    given: ModelConfig  # at the baseline's shape

    @property
    def widened(self) -> int:
        """What d_model received."""
        return self.config.d_model - self.given.d_model

    @property
    def fill(self) -> int:
        """What d_ff received beyond its ratio to d_model."""
        ratio = self.given.mlp_width / self.given.d_model
        return self.config.mlp_width - round(ratio * self.config.d_model)


def match(
    config: ModelConfig,
    target: float | int,
    *,
    which: str = 'total',
    fill: str | None = 'd_ff',
    tolerance: float = 1e-3,
    destination: str = 'd_model',
) -> Match:
    """Solves `destination`, then `fill`, so that the cost equals `target`.

    The destination takes the usable value nearest to the target; d_ff then absorbs the residual. If
    one unit of d_ff is too coarse for that, neighbouring numbers of heads or layers are tried,
    nearest first; with d_model, d_ff never absorbs more than half of one step of d_model.

    - 'd_model': d_ff keeps its ratio to d_model; the number of heads stays, and the head size is
      the integer nearest to d_model / num_heads (even with rotary positions) unless it is set. A
      variant that needs N H = D therefore moves in multiples of num_heads.
    - 'd_ff': all other dimensions stay; `fill` has no effect.
    - 'num_heads': the head size stays; so does num_kv_heads where it is set, which is the step.
    - 'num_layers': in an encoder-decoder the encoder keeps its depth if num_encoder_layers is set,
      and otherwise is as deep as the decoder.

    The cache does not depend on d_ff, so `fill` is off for it. A destination grows where the
    variant saves and shrinks where it costs: if a variant saves less than half a step, the
    destination would stay and d_ff would absorb everything, which is another destination, so it is
    refused.

    `config` is the variant at the baseline's shape. `target` is in parameters for `which` 'total'
    or 'non_embedding', FLOP per token for 'flops', cached numbers per token for 'cache'; see
    `cost.measured`. `fill` is 'd_ff', or None to accept the residual of the destination;
    `tolerance` is the largest |residual| accepted. MatchError if there is no such model, with the
    constraint; CoarseError if that is the size of a step.
    """
    if which == 'cache' and (config.kind == 'encoder' or destination == 'd_ff'):
        raise MatchError(f'no cache depends on {destination} of a model of kind={config.kind!r}')
    variant, unit = variant_of(config), UNITS[which]
    dimension = make_dimension(config, destination, which)
    if destination in ('num_heads', 'num_layers'):
        _check_movable(config, dimension)
    fills = bool(fill) and destination != 'd_ff' and which != 'cache'
    values = _values(config, dimension, target, which)
    tried: list[Match] = []
    for value in values if fills and destination != 'd_model' else values[:1]:
        candidate = dimension.at(value)
        if fills:
            missing = target - cost.measured(candidate, which)
            d_ff = candidate.mlp_width + round(missing / _one_width(candidate, which))
            if d_ff < 1:
                continue
            candidate = dataclasses.replace(candidate, d_ff=d_ff)
        residual = cost.measured(candidate, which) / target - 1
        tried.append(Match(candidate, cost.count(candidate), target, residual, config))
        met = abs(residual) <= tolerance
        if destination == 'd_model' or (met and destination != 'd_ff'):
            _check_moved(tried[-1], dimension, which, tolerance)
        if met:
            return tried[-1]
    at = f'{destination}={values[0]} (steps of {dimension.step})'
    if not tried:
        raise MatchError(f'{variant} has more than {target:.0f} {unit} at d_ff=1 and {at}')
    best = min(tried, key=lambda candidate: abs(candidate.residual))
    if fills or destination == 'd_ff':
        step = (dimension.step if destination == 'd_ff' else 1) * _one_width(best.config, which)
        coarse = f'one step of d_ff, at d_ff={best.config.mlp_width}, is {step:.0f}'
    else:
        coarse = f'{destination} alone is too coarse, and d_ff is fixed'
    raise CoarseError(
        f'{variant} reaches {target:.0f} {unit} only to {best.residual:+.3%} at {at}, above the '
        f'tolerance of {tolerance:.3%}: {coarse}'
    )


def _check_movable(config: ModelConfig, dimension: Dimension) -> None:
    """Raises if the number of heads has no usable value besides that of `config`."""
    check_buildable(config)
    if dimension.name == 'num_heads':
        given = config.num_heads
        others = range(1, 2 * given // dimension.step + 2)
        if not any(dimension.usable(m) for m in others if m * dimension.step != given):
            raise MatchError(f'{variant_of(config)} takes no other num_heads than {given}')


def _values(config: ModelConfig, dimension: Dimension, target: float, which: str) -> list[int]:
    """Values that may reach the target, nearest first."""

    @functools.cache
    def measured(multiple: int) -> float:
        return cost.measured(dimension.at(multiple * dimension.step), which)

    def reaches(multiple: int) -> bool:
        m = dimension.next_usable(multiple)
        return m is None or measured(m) >= target

    variant = variant_of(config)
    first, far = dimension.next_usable(1), dimension.next_usable(16)
    if None not in (first, far) and first != far and measured(first) == measured(far):
        raise MatchError(f'{dimension.name} changes nothing in the {UNITS[which]} of {variant}')
    # Outwards from the config's own value, then by bisection: every cost is a trace of the model.
    given = getattr(config, dimension.name) or config.mlp_width
    low, high, stride = 0, max(1, given // dimension.step), 1
    while not reaches(high):
        low, high, stride = high, high + stride, 2 * stride
    if low == 0:
        while high > stride and reaches(high - stride):
            high, stride = high - stride, 2 * stride
        low = max(high - stride, 0)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    below = dimension.last_usable(low)
    around = [m for m in (below, dimension.next_usable(high)) if m is not None]
    if not around:
        check_buildable(config)
        raise MatchError(f'{variant} has no {dimension.name} in steps of {dimension.step}')
    nearest = min(around, key=lambda m: abs(measured(m) - target))
    near = {m for m in range(max(1, nearest - 8), nearest + 9) if dimension.usable(m)}
    values = (m * dimension.step for m in {*around, *near})
    return sorted(values, key=lambda v: abs(v - nearest * dimension.step))


def _one_width(config: ModelConfig, which: str) -> float:
    """The cost of one more unit of d_ff."""
    wider = dataclasses.replace(config, d_ff=config.mlp_width + 1)
    return cost.measured(wider, which) - cost.measured(config, which)


def _check_moved(match: Match, dimension: Dimension, which: str, tolerance: float) -> None:
    """Raises unless the dimension grew where the variant saves and shrank where it costs."""
    name, variant = dimension.name, variant_of(match.given)
    given, value = (getattr(c, name) or c.mlp_width for c in (match.given, match.config))
    around = dimension.neighbours(given)
    gap = _cost_at(match.given, dimension, around, which) / match.target - 1
    if abs(gap) <= tolerance or (value - given) * gap < 0:
        return
    other = around[gap < 0]
    if other is None:
        raise MatchError(
            f'{variant} is {gap:+.2%} from the target and takes no {name} '
            f'{"above" if gap < 0 else "below"} {given}: use {_BY_D_FF}'
        )
    step = abs(cost.measured(dimension.at(other), which) / match.target - 1 - gap)
    raise CoarseError(
        f'{variant} is {gap:+.2%} from the target and one step of {name}, to {other}, {step:.2%}, '
        f'so {name} would {"stay at" if value == given else "become"} {value} and d_ff absorb it '
        f'all: use {_BY_D_FF}, or a baseline of another size'
    )


def _cost_at(
    config: ModelConfig, dimension: Dimension, around: tuple[int | None, int | None], which: str
) -> float:
    """The cost of `config`; where it cannot be built, between those of its neighbours."""
    if buildable(config) or None in around:
        check_buildable(config)
        return cost.measured(config, which)
    low, high = (math.log(cost.measured(dimension.at(value), which)) for value in around)
    left, given, right = map(math.log, (around[0], getattr(config, dimension.name), around[1]))
    return math.exp(low + (high - low) * (given - left) / (right - left))


def table(rows: dict[str, Match], equal: str | None = None) -> str:
    """Shape, parameters by group, residual, FLOPs and cache of each variant, as aligned text.

    `equal`: the cost that was made equal, as `which` of `match`, for a first line that states it.
    """
    groups = (*cost.GROUPS, 'total')
    shape = ('d_model', 'widened', 'd_ff', 'fill', 'heads', 'head_size', 'layers')
    lines = [['variant', *shape, *groups, 'residual', 'FLOP/token', 'cache/token']]
    for name, matched in rows.items():
        config = matched.config
        heads = config.num_heads, attention_spec(config).head_size, config.num_layers
        lines.append(
            [
                *(name, f'{config.d_model}', f'{matched.widened:+d}'),
                *(f'{config.mlp_width}', f'{matched.fill:+d}', *map(str, heads)),
                *(f'{matched.parameters[group]:,}' for group in groups),
                f'{matched.residual:+.4%}',
                f'{cost.flops_per_token(config):,.0f}',
                f'{cost.cache_floats_per_token(config):,}',
            ]
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    text = '\n'.join(
        '  '.join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])])
        for line in lines
    )
    return text if equal is None else f'equal: {UNITS[equal]}\n{text}'
