"""Models of equal cost: one dimension is solved for, then d_ff absorbs the rounding residual."""

import dataclasses
import functools
import math
import typing
from collections.abc import Callable
from typing import Any

from qkattn.attention import registry
from qkattn.config import ModelConfig
from qkattn.config.study_config import Destination
from qkattn.errors import MatchError, SpecError
from qkattn.model import cost
from qkattn.model.sites import attention_spec, sites


@dataclasses.dataclass(frozen=True)
class Dimension:
    """An integer of the model's shape that is solved for.

    Attributes:
      name: the field of ModelConfig.
      step: its values are multiples of this.
      at: the config at a value; the other dimensions stay, but d_ff scales with d_model, and so
        does the head size unless it is set.
    """

    name: str
    step: int
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


def make_dimension(
    config: ModelConfig, name: str, multiple_of: int | None = None, which: str = 'total'
) -> Dimension:
    """The dimension `name` of `config`, as documented in `matching.match`."""
    if name == 'd_model':
        ratio = config.mlp_width / config.d_model

        def at_width(d_model: int) -> ModelConfig:
            d_ff, size = max(1, round(ratio * d_model)), _head_size(config, d_model)
            return dataclasses.replace(config, d_model=d_model, d_ff=d_ff, head_size=size)

        # A cache follows N H, which moves in steps of the heads.
        coarse = which == 'cache' and not config.head_size
        return Dimension(name, multiple_of or (whole_heads(config) if coarse else 1), at_width)
    held: dict[str, Any] = {'d_ff': config.mlp_width}
    smallest = 1
    if name == 'num_heads':
        held['head_size'] = config.head_size or config.d_model // config.num_heads
        smallest = config.num_kv_heads or 1
    return Dimension(
        name,
        multiple_of or smallest,
        lambda value: dataclasses.replace(config, **{**held, name: value}),
    )


def whole_heads(config: ModelConfig) -> int:
    """The step of d_model with which d_model / num_heads is a head size."""
    return config.num_heads * (2 if config.positions == 'rope' else 1)


def _head_size(config: ModelConfig, d_model: int) -> int | None:
    """Nearest to d_model / num_heads, even with rotary positions; None where it is exactly that."""
    if config.head_size:
        return config.head_size
    even = whole_heads(config) // config.num_heads
    size = even * max(1, round(d_model / whole_heads(config)))
    return None if size * config.num_heads == d_model else size


def buildable(config: ModelConfig) -> bool:
    try:
        check_sites(config)
    except SpecError:
        return False
    return True


def check_buildable(config: ModelConfig) -> None:
    try:
        check_sites(config)
    except SpecError as error:
        raise MatchError(f'{variant_of(config)} cannot be built: {error}') from error


def check_movable(config: ModelConfig, dimension: Dimension) -> None:
    """Raises if the dimension has no usable value besides that of `config`."""
    check_buildable(config)
    if dimension.name != 'num_heads':
        return
    given = config.num_heads
    others = range(1, 2 * given // dimension.step + 2)
    if any(dimension.usable(m) for m in others if m * dimension.step != given):
        return
    try:
        check_sites(dimension.at(given + dimension.step))
    except SpecError as error:
        raise MatchError(
            f'{variant_of(config)} takes no other num_heads than {given}: {error}'
        ) from error


def check_sites(config: ModelConfig) -> None:
    for spec in sites(config).values():
        registry.check(spec())


def variant_of(config: ModelConfig) -> str:
    """The variant in messages, with those of the other sites where they are set."""
    other = ('pattern', 'encoder_variant', 'cross_variant')
    fields = (f'{name}={getattr(config, name)}' for name in other if getattr(config, name))
    return '?'.join(filter(None, (str(config.variant), '&'.join(fields))))


# The costs that can be made equal, and their units.
UNITS = {
    'total': 'parameters',
    'non_embedding': 'non-embedding parameters',
    'flops': 'FLOP per token',
    'cache': 'cached numbers per token',
}
DESTINATIONS = typing.get_args(Destination)


@dataclasses.dataclass(frozen=True)
class Match:
    """A config whose cost equals a target.

    Attributes:
      config: with the destination and d_ff solved for.
      parameters: counts by group.
      target: in the unit of the cost that is made equal.
      residual: (cost - target) / target.
      given: the config at the baseline's shape.
    """

    config: ModelConfig
    parameters: dict[str, int]
    target: float | int
    residual: float
    given: ModelConfig

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
    multiple_of: int | None = None,
    destination: str = 'd_model',
    baseline: ModelConfig | None = None,
) -> Match:
    """Solves `destination`, then `fill`, so that the cost equals `target`.

    The destination takes the usable value nearest to the target; d_ff then absorbs the residual. If
    one unit of d_ff is too coarse for that, neighbouring numbers of heads or layers are tried,
    nearest first; with d_model, d_ff never absorbs more than half of one step of d_model.

    - 'd_model': d_ff keeps its ratio to d_model; the number of heads stays, and the head size is
      the integer nearest to d_model / num_heads (even with rotary positions) unless it is set. A
      variant that needs N H = D therefore moves in multiples of num_heads.
    - 'd_ff': all other dimensions stay; `fill` has no effect.
    - 'num_heads': the head size stays; so does num_kv_heads where it is set.
    - 'num_layers': in an encoder-decoder the encoder keeps its depth if num_encoder_layers is set,
      and otherwise is as deep as the decoder.

    The cache does not depend on d_ff, so `fill` is off for it. A destination grows where the
    variant saves and shrinks where it costs: if a variant saves less than half a step, the
    destination would stay and d_ff would absorb everything, which is another destination, so it is
    refused.

    Args:
      config: the variant at the baseline's shape.
      target: in parameters, FLOP per token or cached numbers per token.
      which: 'total' or 'non_embedding' parameters, 'flops' or 'cache', see `cost.measured`.
      fill: 'd_ff', or None to accept the residual of the destination.
      tolerance: largest |residual| accepted.
      multiple_of: step of the destination; None is the smallest that the config allows:
        num_kv_heads for num_heads if set; num_heads for d_model if caches are made equal and
        head_size is not set; otherwise 1.
      destination: the dimension that receives what the variant saves, or gives what it costs.
      baseline: the config that costs `target`; with it, a refusal names widths that would do.

    Raises:
      MatchError: no such model; names the constraint.
    """
    _check_request(config, target, which, fill, destination)
    variant, unit = variant_of(config), UNITS[which]
    dimension = make_dimension(config, destination, multiple_of, which)
    if destination in ('num_heads', 'num_layers'):
        check_movable(config, dimension)
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
            _check_moved(tried[-1], dimension, which, tolerance, baseline)
        if met:
            return tried[-1]
    if not tried:
        raise MatchError(
            f'{variant} has more than {target:.0f} {unit} at d_ff=1 and '
            f'{dimension.name}={values[0]} (steps of {dimension.step}): raise the target'
        )
    best = min(tried, key=lambda candidate: abs(candidate.residual))
    width = '' if dimension.name == 'd_ff' else f', d_ff={best.config.mlp_width}'
    widths = _widths(config, baseline, dimension, which, tolerance)
    raise MatchError(
        f'{variant} reaches {target:.0f} {unit} only to {best.residual:+.3%} '
        f'({dimension.name}={getattr(best.config, dimension.name)} in steps of '
        f'{dimension.step}{width}), above the tolerance of {tolerance:.3%}: '
        f'{_reason(best, dimension, which, fills)}'
        f'{widths and f"; use {widths}a larger tolerance"}'
    )


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
    near = {
        *around,
        *(m for m in range(max(1, nearest - 8), nearest + 9) if dimension.usable(m)),
    }
    values = (m * dimension.step for m in near)
    return sorted(values, key=lambda v: abs(v - nearest * dimension.step))


def _one_width(config: ModelConfig, which: str) -> float:
    """The cost of one more unit of d_ff."""
    wider = dataclasses.replace(config, d_ff=config.mlp_width + 1)
    return cost.measured(wider, which) - cost.measured(config, which)


def _reason(best: Match, dimension: Dimension, which: str, fills: bool) -> str:
    if which == 'cache':
        return f'{dimension.name} alone is too coarse, and d_ff changes nothing in the cache'
    if not fills and dimension.name != 'd_ff':
        return f'{dimension.name} alone is too coarse and d_ff is fixed (fill=None)'
    if dimension.name == 'd_ff' and best.config.mlp_width == dimension.step and best.residual > 0:
        return f'd_ff would have to fall below {dimension.step}; choose another destination'
    step = (dimension.step if dimension.name == 'd_ff' else 1) * _one_width(best.config, which)
    return f'one step of d_ff is {step:.0f} {UNITS[which]}, {step / best.target:.2%} of the target'


def _check_request(
    config: ModelConfig, target: float, which: str, fill: str | None, destination: str
) -> None:
    for name, value, known in (
        ('which', which, (*UNITS,)),
        ('fill', fill, ('d_ff', None)),
        ('destination', destination, DESTINATIONS),
    ):
        if value not in known:
            raise MatchError(f'{name}={value!r} must be one of {", ".join(map(str, known))}')
    for name in ('d_model', 'num_heads', 'num_kv_heads', 'head_size', 'num_layers', 'd_ff'):
        size = getattr(config, name)
        if size is not None and (not isinstance(size, int) or size < 1):
            raise MatchError(f'{name}={size!r} must be an integer of at least 1')
    if which == 'cache':
        if config.kind == 'encoder':
            raise MatchError("which='cache' needs a decoder: an encoder keeps no cache")
        if destination == 'd_ff':
            raise MatchError(
                "destination='d_ff' changes nothing in the cache; choose another destination"
            )
    if not target > 0:
        raise MatchError(f'target={target} must be above 0')


def _check_moved(
    found: Match, dimension: Dimension, which: str, tolerance: float, baseline: ModelConfig | None
) -> None:
    """Raises unless the dimension grew where the variant saves and shrank where it costs."""
    name = dimension.name
    given, value = (getattr(c, name) or c.mlp_width for c in (found.given, found.config))
    around = dimension.neighbours(given)
    gap = _cost_at(found.given, dimension, around, which) / found.target - 1
    if abs(gap) <= tolerance or (value - given) * gap < 0:
        return
    other = around[gap < 0]
    if other is None:
        raise MatchError(
            f'{variant_of(found.given)} is {gap:+.2%} from the target and takes no {name} '
            f'{"above" if gap < 0 else "below"} {given}: use the destination d_ff'
        )
    step = abs(cost.measured(dimension.at(other), which) / found.target - 1 - gap)
    widths = _widths(found.given, baseline, dimension, which, tolerance)
    raise MatchError(
        f'{variant_of(found.given)} is {gap:+.2%} from the target and one step of {name}, to '
        f'{other}, {step:.2%}, so {name} would {"stay at" if value == given else "become"} {value} '
        f'and d_ff absorb it all: use {widths}the destination d_ff'
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


def _widths(
    config: ModelConfig,
    baseline: ModelConfig | None,
    dimension: Dimension,
    which: str,
    tolerance: float,
) -> str:
    """The nearest d_model of the baseline at which the variant is matched, as a remedy."""
    if baseline is None or dimension.name != 'd_model' or which == 'cache':
        return ''
    stride = 1 if baseline.head_size else whole_heads(baseline)
    at = make_dimension(baseline, 'd_model').at
    for away in range(1, 13):
        for d_model in (baseline.d_model + away * stride, baseline.d_model - away * stride):
            if d_model < stride or not buildable(at(d_model)):
                continue
            target = cost.measured(at(d_model), which)
            try:
                match(dimension.at(d_model), target, which=which, tolerance=tolerance)
            except MatchError:
                continue
            return f'a baseline with d_model={d_model} or '
    return ''


def table(rows: dict[str, Match], equal: str | None = None) -> str:
    """Shape, parameters by group, residual, FLOPs and cache of each variant, as aligned text.

    `equal`: the cost that was made equal, as `which` of `match`, for a first line that states it.
    """
    groups = (*cost.GROUPS, 'total')
    shape = ('d_model', 'widened', 'd_ff', 'fill', 'heads', 'head_size', 'layers')
    lines = [['variant', *shape, *groups, 'residual', 'FLOP/token', 'cache/token']]
    for name, matched in rows.items():
        config = matched.config
        lines.append(
            [
                name,
                f'{config.d_model}',
                f'{matched.widened:+d}',
                f'{config.mlp_width}',
                f'{matched.fill:+d}',
                f'{config.num_heads}',
                f'{attention_spec(config).head_size}',
                f'{config.num_layers}',
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
