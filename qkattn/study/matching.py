"""Matching: solves one dimension of a model so that it costs as much as the baseline.

Dimensions are integers, so a small difference in cost remains. A change of d_ff makes up for it.
"""

import bisect
import dataclasses

from qkattn.attention import registry
from qkattn.config import ModelConfig
from qkattn.errors import MatchError, SpecError
from qkattn.model import cost
from qkattn.model.sites import sites

# Values of a dimension are searched below this multiple of the value at the baseline's shape.
SEARCH_LIMIT = 16
# The costs that can be made equal, and their units.
COSTS = {
    'total': 'parameters',
    'non_embedding': 'non-embedding parameters',
    'flops': 'FLOP per token',
    'cache': 'cached numbers per token',
}


def violated_constraint(config: ModelConfig) -> str | None:
    """Returns why the attention of a model cannot be built; None if it can."""
    try:
        for make_spec in sites(config).values():  # of each group of attention layers
            registry.check(make_spec())
    except SpecError as error:
        return f'cannot be built: {error}'
    return None


def uses_slices(config: ModelConfig) -> bool:
    """Returns whether attention heads of a model are slices of the residual stream."""
    for make_spec in sites(config).values():  # of each group of attention layers
        spec = make_spec()
        score_class, _ = registry.find_score(spec.score)
        value_class, _ = registry.find_value(spec.value)
        if score_class.uses_slices or value_class.uses_slices:
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Dimension:
    """A dimension of a model, such as d_model, whose value is solved for a given cost."""

    config: ModelConfig  # the variant at the baseline's shape
    name: str  # the field: 'd_model', 'd_ff', 'num_heads' or 'num_layers'
    which: str = 'total'  # the cost, one of COSTS

    @property
    def baseline_value(self) -> int:
        """The value at the baseline's shape."""
        value = getattr(self.config, self.name)
        # d_ff may be None, which means a default width.
        return value or self.config.mlp_width

    @property
    def step(self) -> int:
        """The step between values to try."""
        if self.name == 'num_heads':
            return self.config.num_kv_heads or 1  # num_kv_heads divides num_heads
        # The cache grows with the head size, which has one value for each multiple of this width.
        if self.name == 'd_model' and self.which == 'cache' and not self.config.head_size:
            return self.smallest_width
        return 1

    @property
    def head_size_step(self) -> int:
        """The step between valid head sizes. Rotary positions need an even head size."""
        return 2 if self.config.positions == 'rope' else 1

    @property
    def smallest_width(self) -> int:
        """The smallest valid d_model if num_heads * head_size = d_model."""
        return self.config.num_heads * self.head_size_step

    def resized(self, value: int) -> ModelConfig:
        """Returns the model at another value of this dimension.

        Other dimensions change with it as `match` describes.
        """
        config = self.config
        if self.name == 'd_model':
            return self._at_width(value)
        if self.name == 'd_ff':
            return dataclasses.replace(config, d_ff=value)
        if self.name == 'num_heads':
            head_size = config.head_size or config.d_model // config.num_heads
            return dataclasses.replace(
                config, num_heads=value, head_size=head_size, d_ff=config.mlp_width
            )
        return dataclasses.replace(config, num_layers=value, d_ff=config.mlp_width)

    def _at_width(self, d_model: int) -> ModelConfig:
        """Returns the model at another d_model, with the same num_heads and d_ff / d_model."""
        config = self.config
        d_ff_per_d_model = config.mlp_width / config.d_model
        d_ff = max(1, round(d_ff_per_d_model * d_model))
        head_size = config.head_size
        if not head_size:
            # The valid head size nearest to d_model / num_heads.
            num_steps = max(1, round(d_model / self.smallest_width))
            head_size = num_steps * self.head_size_step
            if head_size * config.num_heads == d_model:
                head_size = None  # means d_model / num_heads
        return dataclasses.replace(config, d_model=d_model, d_ff=d_ff, head_size=head_size)

    def cost(self, value: int) -> float:
        """Returns the cost of the model at a value of this dimension."""
        return cost.measured(self.resized(value), self.which)

    def first_usable(self, values: range) -> int | None:
        """Returns the first of `values` at which the variant can be built, or None.

        For example, some variants can only be built at powers of two.
        """
        for value in values:
            if violated_constraint(self.resized(value)) is None:
                return value
        return None

    def next_toward(self, target: float, value: int) -> int | None:
        """Returns the usable value next to `value` in the direction of the target cost.

        Returns None if there is no such value above 0 and below SEARCH_LIMIT * `baseline_value`.
        """
        if self.cost(value) < target:
            limit = SEARCH_LIMIT * self.baseline_value
            return self.first_usable(range(value + self.step, limit, self.step))
        return self.first_usable(range(value - self.step, 0, -self.step))

    def nearest(self, target: float) -> int:
        """Returns the usable value whose cost is nearest to `target`.

        A value is usable if the variant can be built there, and below SEARCH_LIMIT times
        `baseline_value`. The cost grows with the value, so the search bisects the values.

        Raises:
            MatchError: The cost does not depend on this dimension.
        """
        start = self.baseline_value
        limit = SEARCH_LIMIT * start
        next_value = self.first_usable(range(start + self.step, limit, self.step))
        if next_value is not None and self.cost(next_value) == self.cost(start):
            raise MatchError(f'has the same cost at any {self.name}')

        # Find the first value that reaches the target. All larger values reach it too.
        upper_bound = start
        while not self._reaches(target, upper_bound):
            upper_bound *= 2
        candidates = range(self.step, upper_bound + 1, self.step)
        first_index = bisect.bisect_left(
            candidates, True, key=lambda value: self._reaches(target, value)
        )
        first_reaching = candidates[first_index]

        # Choose between the usable values on both sides of the target.
        below = self.first_usable(range(first_reaching - self.step, 0, -self.step))
        at_or_above = self.first_usable(range(first_reaching, limit, self.step))
        neighbours = [value for value in (below, at_or_above) if value is not None]
        return min(neighbours, key=lambda value: abs(self.cost(value) - target))

    def _reaches(self, target: float, value: int) -> bool:
        """Returns whether the first usable value from `value` upwards costs `target` or more.

        Returns True if there is no such value, so that the search ends.
        """
        limit = SEARCH_LIMIT * self.baseline_value
        usable = self.first_usable(range(value, limit, self.step))
        return usable is None or self.cost(usable) >= target


def match(
    config: ModelConfig,
    target: float | int,
    *,
    which: str = 'total',
    fill: str | None = 'd_ff',
    tolerance: float = 1e-3,
    destination: str = 'd_model',
) -> ModelConfig:
    """Resizes a model so that its cost equals `target`.

    The dimension `destination` gets the value whose cost is nearest to the target. d_ff then makes
    up for the remaining difference. The other dimensions depend on the destination:

    - 'd_model': num_heads and the ratio d_ff / d_model stay. If head_size is not set, it becomes
      the integer nearest to d_model / num_heads (an even integer with rotary positions).
    - 'd_ff': all other dimensions stay, and `fill` has no effect.
    - 'num_heads': the head size stays. If num_kv_heads is set, it stays, and num_heads is a
      multiple of it.
    - 'num_layers': if num_encoder_layers is not set, the encoder becomes as deep as the decoder.

    The cost 'cache' does not depend on d_ff, so `fill` has no effect on it. A model in which only
    d_ff changes is refused if its destination is another dimension.

    Args:
        config: The variant at the baseline's shape.
        target: The baseline's cost: parameters, FLOP per token or cached numbers per token.
        which: The cost to match, one of COSTS; see `cost.measured`.
        fill: 'd_ff', or None to leave d_ff as it is.
        tolerance: The largest accepted |cost / target - 1|.
        destination: The dimension to solve for.

    Raises:
        MatchError: There is no such model. The message is a sentence without its subject.
    """
    violation = violated_constraint(config)
    if violation is not None:
        raise MatchError(violation)

    # Solve the destination.
    dimension = Dimension(config, destination, which)
    value = dimension.nearest(target)
    matched = dimension.resized(value)
    cost_before_fill = dimension.cost(value)
    target_text = f'{target:.0f} {COSTS[which]}'

    # Solve d_ff. The cost is linear in d_ff.
    wider = dataclasses.replace(matched, d_ff=matched.mlp_width + 1)
    cost_per_unit = cost.measured(wider, which) - cost_before_fill
    absorbs = bool(fill and cost_per_unit)  # whether d_ff makes up for a difference
    if absorbs and destination != 'd_ff':
        d_ff = matched.mlp_width + round((target - cost_before_fill) / cost_per_unit)
        if d_ff < 1:
            raise MatchError(f'has more than {target_text} at d_ff=1 and {destination}={value}')
        matched = dataclasses.replace(matched, d_ff=d_ff)

    # Refuse a model in which only d_ff has changed.
    gap = cost_before_fill / target - 1
    is_unchanged = destination != 'd_ff' and value == dimension.baseline_value
    if is_unchanged and abs(gap) > tolerance:
        raise MatchError(_why_unchanged(dimension, target, absorbs))

    # Refuse a model that misses the target.
    residual = cost.measured(matched, which) / target - 1
    if abs(residual) > tolerance:
        sizes = f'{destination}={value}'
        if destination != 'd_ff':
            sizes += f' and d_ff={matched.mlp_width}'
        is_d_ff_rounded = fill is not None or destination == 'd_ff'
        share_of_unit = cost_per_unit / target
        if is_d_ff_rounded and abs(residual) < share_of_unit:
            sizes += f', as each unit of d_ff is {share_of_unit:.2%}'
        raise MatchError(
            f'reaches {target_text} only to {100 * residual:+.3g}%, at {sizes}; choose '
            f'another size, or a tolerance above {tolerance:g}'
        )
    return matched


def _why_unchanged(dimension: Dimension, target: float, absorbs: bool) -> str:
    """Says why no other value of a dimension is nearer to the target cost than the baseline's.

    For example, the nearest usable values are d_model=96, 7% below the target, and d_model=104, 8%
    above it:

        is -7.00% from the target at d_model=96 and +8.00% at d_model=104, and no other d_model is
        nearer, so d_ff would absorb it all: d_model moves in steps of 8, as ...

    Args:
        dimension: The dimension.
        target: The target cost.
        absorbs: Whether d_ff makes up for the difference.
    """
    name = dimension.name
    value = dimension.baseline_value
    gap = dimension.cost(value) / target - 1  # such as -0.07
    here = f'is {gap:+.2%} from the target at {name}={value}'
    no_other = f'no other {name} is nearer'
    if absorbs:
        no_other += ', so d_ff would absorb it all'

    next_value = dimension.next_toward(target, value)
    if next_value is None:
        # Say why the variant cannot be built at the value beside this one.
        sentence = f'{here}, and {no_other}'
        beside = value + dimension.step if gap < 0 else value - dimension.step
        if beside > 0:
            violation = violated_constraint(dimension.resized(beside))  # 'cannot be built: ...'
            sentence += f': at {name}={beside} it {violation}'
        return sentence

    next_gap = dimension.cost(next_value) / target - 1
    sentence = f'{here} and {next_gap:+.2%} at {name}={next_value}, and {no_other}'
    step = abs(next_value - value)
    is_smallest_step = name == 'd_model' and step == dimension.smallest_width
    if is_smallest_step and uses_slices(dimension.config):
        sentence += (
            f': d_model moves in steps of {step}, as heads that are slices of the stream need '
            'num_heads * head_size = d_model'
        )
        if dimension.head_size_step > 1:
            sentence += ', and rotary positions an even head_size'
    return sentence
