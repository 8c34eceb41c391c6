"""Configs of equal cost: one knob of the shape is solved for, a second one takes up the rest."""

import dataclasses
from collections.abc import Callable

import numpy as np

from qkattn.attention import registry
from qkattn.config import ModelConfig
from qkattn.errors import MatchError, SpecError
from qkattn.model import cost
from qkattn.model.sites import sites

# What is made equal, with the word for one unit of it.
UNITS = {
    'total': 'parameters',
    'non_embedding': 'non-embedding parameters',
    'flops': 'FLOP per token',
    'cache': 'cached numbers per token',
}
DESTINATIONS = ('d_model', 'd_ff', 'num_heads', 'num_layers')


@dataclasses.dataclass(frozen=True)
class Match:
    """A config whose cost equals a target.

    Attributes:
      config: with the destination and d_ff solved for.
      parameters: counted, by group.
      target: asked for, in the unit of what is equalised.
      residual: (measured - target) / target, of what was to be equal.
    """

    config: ModelConfig
    parameters: dict[str, int]
    target: float | int
    residual: float


@dataclasses.dataclass(frozen=True)
class Knob:
    """A whole number of the shape that is turned until the target is met.

    Attributes:
      name: the field of ModelConfig.
      step: its values are the multiples of this.
      at: the config at a value, every other size held or, for d_ff under d_model, in proportion.
    """

    name: str
    step: int
    at: Callable[[int], ModelConfig]

    def usable(self, multiple: int) -> bool:
        """Some cells allow few values, such as powers of two or one given by head_size."""
        try:
            _check_sites(self.at(multiple * self.step))
        except SpecError:
            return False
        return True

    def next_usable(self, multiple: int) -> int | None:
        reach = range(multiple, 2 * multiple + 512 // self.step + 2)
        return next((m for m in reach if self.usable(m)), None)


def match(
    config: ModelConfig,
    target: float | int,
    *,
    which: str = 'total',
    fill: str | None = 'd_ff',
    tolerance: float = 1e-3,
    multiple_of: int | None = None,
    destination: str = 'd_model',
) -> Match:
    """Solves `destination`, then the second knob, so that the measured cost equals `target`.

    The destination goes to the usable value nearest to the target; d_ff then takes up what is
    left. Where one step of d_ff is still too coarse, neighbouring values are tried, nearest first.

    - 'd_model': d_ff keeps the proportion to it that `config` has, the number of heads stays.
    - 'd_ff': nothing else moves, and `fill` has no part in it.
    - 'num_heads': the size of a head stays; so does num_kv_heads where it is given.
    - 'num_layers': in an encoder-decoder the encoder keeps its depth where num_encoder_layers is
      given, and else has as many layers as the decoder.

    A cache does not depend on d_ff, so `fill` is off for it. Heads and layers are coarse: where a
    variant saves less than half a step, they would stay and d_ff take everything, which is another
    destination and refused.

    Args:
      config: the variant; its value of the destination is only where the search starts.
      target: to reach, in parameters, FLOP per token or cached numbers per token.
      which: 'total' or 'non_embedding' parameters, 'flops' or 'cache', see `cost.measured`.
      fill: 'd_ff', or None to accept what the destination alone reaches.
      tolerance: largest |residual| accepted.
      multiple_of: step of the destination; None is the smallest that the config allows: of d_model
        num_heads, or 1 where head_size is set; of num_heads num_kv_heads where set; else 1.
      destination: the knob that takes what a variant saves, or gives what it costs.

    Raises:
      MatchError: names the constraint that stops the search.
    """
    _check_request(config, target, which, fill, destination)
    cell, unit = f'{config.score}/{config.value}', UNITS[which]
    knob = _knob(config, destination, multiple_of)
    if destination != 'd_model':
        _check_moves(config, knob)
    fills = bool(fill) and destination != 'd_ff' and which != 'cache'
    values = _values(config, knob, target, which)
    tried = []
    for value in values if fills else values[:1]:
        candidate = knob.at(value)
        if fills:
            left = target - cost.measured(candidate, which)
            d_ff = candidate.mlp_width + round(left / _one_width(candidate, which))
            if d_ff < 1:
                continue
            candidate = dataclasses.replace(candidate, d_ff=d_ff)
        residual = cost.measured(candidate, which) / target - 1
        tried.append(Match(candidate, cost.count(candidate), target, residual))
        if abs(residual) <= tolerance:
            if destination in ('num_heads', 'num_layers'):
                _check_moved(config, tried[-1], knob, which, tolerance)
            return tried[-1]
    if not tried:
        raise MatchError(
            f'{cell} has more than {target:.0f} {unit} at d_ff=1 and '
            f'{knob.name}={values[0]} (steps of {knob.step}): raise the target'
        )
    best = min(tried, key=lambda found: abs(found.residual))
    width = '' if knob.name == 'd_ff' else f', d_ff={best.config.mlp_width}'
    raise MatchError(
        f'{cell} reaches {target:.0f} {unit} only to {best.residual:+.3%} '
        f'({knob.name}={getattr(best.config, knob.name)} in steps of {knob.step}{width}), '
        f'above the tolerance of {tolerance:.3%}: {_reason(best, knob, which, fills)}'
    )


def _values(config: ModelConfig, knob: Knob, target: float, which: str) -> list[int]:
    """The values that may reach the target, nearest first."""

    def measured(multiple: int) -> float:
        return cost.measured(knob.at(multiple * knob.step), which)

    def reaches(multiple: int) -> bool:
        m = knob.next_usable(multiple)
        return m is None or measured(m) >= target

    cell = f'{config.score}/{config.value}'
    first, far = knob.next_usable(1), knob.next_usable(16)
    if None not in (first, far) and first != far and measured(first) == measured(far):
        raise MatchError(f'{knob.name} changes nothing in the {UNITS[which]} of {cell}')
    low, high = 0, 1
    while not reaches(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reaches(middle) else (middle, high)
    around = [next((m for m in range(low, 0, -1) if knob.usable(m)), None), knob.next_usable(high)]
    around = [m for m in around if m is not None]
    if not around:
        _check_buildable(config)
        raise MatchError(f'{cell} has no {knob.name} in steps of {knob.step}')
    nearest = min(around, key=lambda m: abs(measured(m) - target))
    near = {*around, *(m for m in range(max(1, nearest - 8), nearest + 9) if knob.usable(m))}
    return sorted((m * knob.step for m in near), key=lambda v: abs(v - nearest * knob.step))


def _knob(config: ModelConfig, destination: str, multiple_of: int | None) -> Knob:
    if destination == 'd_model':
        ratio = config.mlp_width / config.d_model

        def at_width(d_model: int) -> ModelConfig:
            d_ff = max(1, round(ratio * d_model))
            return dataclasses.replace(config, d_model=d_model, d_ff=d_ff)

        return Knob(
            destination, multiple_of or (1 if config.head_size else config.num_heads), at_width
        )
    held = {'d_ff': config.mlp_width}
    smallest = 1
    if destination == 'num_heads':
        held['head_size'] = config.head_size or config.d_model // config.num_heads
        smallest = config.num_kv_heads or 1
    return Knob(
        destination,
        multiple_of or smallest,
        lambda value: dataclasses.replace(config, **{**held, destination: value}),
    )


def _one_width(config: ModelConfig, which: str) -> float:
    """What one more unit of d_ff costs."""
    wider = dataclasses.replace(config, d_ff=config.mlp_width + 1)
    return cost.measured(wider, which) - cost.measured(config, which)


def _reason(best: Match, knob: Knob, which: str, fills: bool) -> str:
    if which == 'cache':
        return f'{knob.name} alone is too coarse, and d_ff changes nothing in the cache'
    if not fills and knob.name != 'd_ff':
        return f'{knob.name} alone is too coarse and the second knob is off (fill=None)'
    if knob.name == 'd_ff' and best.config.mlp_width == knob.step and best.residual > 0:
        return f'd_ff would have to fall below {knob.step}; choose another destination'
    step = (knob.step if knob.name == 'd_ff' else 1) * _one_width(best.config, which)
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
            raise MatchError(f'{name}={size!r} must be a whole number of at least 1')
    if which == 'cache':
        if config.kind == 'encoder':
            raise MatchError('an encoder keeps no cache that could be made equal')
        if destination == 'd_ff':
            raise MatchError('d_ff changes nothing in the cache, so it cannot be its destination')
    if not target > 0:
        raise MatchError(f'target={target} must be above 0')


def _check_moves(config: ModelConfig, knob: Knob) -> None:
    """Raises where the knob has no other value than the one that `config` gives it."""
    _check_buildable(config)
    if knob.name != 'num_heads':
        return
    given = config.num_heads
    others = range(1, 2 * given // knob.step + 2)
    if any(knob.usable(m) for m in others if m * knob.step != given):
        return
    try:
        _check_sites(knob.at(given + knob.step))
    except SpecError as error:
        raise MatchError(
            f'{config.score}/{config.value} takes no other num_heads than {given}: {error}'
        ) from error


def _check_moved(
    config: ModelConfig, found: Match, knob: Knob, which: str, tolerance: float
) -> None:
    """Raises where d_ff alone took up a gap that was meant for `knob`."""
    given = getattr(config, knob.name)
    gap = cost.measured(config, which) / found.target - 1
    if getattr(found.config, knob.name) != given or abs(gap) <= tolerance:
        return
    step = cost.measured(knob.at(given + knob.step), which) - cost.measured(config, which)
    raise MatchError(
        f'{config.score}/{config.value} is {gap:+.2%} from the target and one step of {knob.name} '
        f'{step / found.target:.2%}, so {knob.name} would stay at {given} and d_ff take it all: '
        'use the destination d_ff'
    )


def _check_buildable(config: ModelConfig) -> None:
    try:
        _check_sites(config)
    except SpecError as error:
        raise MatchError(f'{config.score}/{config.value} cannot be built: {error}') from error


def _check_sites(config: ModelConfig) -> None:
    for spec in sites(config).values():
        registry.check(spec())


def table(rows: dict[str, Match], equal: str | None = None) -> str:
    """Shape, parameters by group, residual, FLOPs and cache of each variant, as aligned text.

    `equal` is what was made equal, as `which` of `match`, for a first line that says so.
    """
    sizes = ('d_model', 'd_ff', 'heads', 'layers')
    groups = (*cost.GROUPS, 'total')
    lines = [('variant', *sizes, *groups, 'residual', 'FLOP/token', 'cache/token')]
    for name, found in rows.items():
        config = found.config
        shape = (config.d_model, config.mlp_width, config.num_heads, config.num_layers)
        lines.append(
            (
                name,
                *(str(size) for size in shape),
                *(f'{found.parameters[group]:,}' for group in groups),
                f'{found.residual:+.4%}',
                f'{cost.flops_per_token(config):,.0f}',
                f'{cost.cache_floats_per_token(config):,}',
            )
        )
    widths = np.array([[len(cell) for cell in line] for line in lines]).max(0)
    text = '\n'.join(
        '  '.join(
            cell.ljust(width) if i == 0 else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    )
    return text if equal is None else f'equal: {UNITS[equal]}\n{text}'
