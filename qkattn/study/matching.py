"""Matching: solves one dimension of a model so that the model costs as much as the baseline.

Dimensions are integers, so a small difference in cost remains. d_ff then absorbs this residual.
"""

import bisect
import dataclasses

from qkattn.attention import registry
from qkattn.config import ModelConfig
from qkattn.errors import MatchError, SpecError
from qkattn.model import cost
from qkattn.model.sites import sites

# The search for a dimension stops below this multiple of its value at the baseline's shape.
SEARCH_LIMIT = 16
# The costs that can be made equal, and their units.
COSTS = {
    'total': 'parameters',
    'non_embedding': 'non-embedding parameters',
    'flops': 'FLOP per token',
    'cache': 'cached numbers per token',
}


def violated_constraint(config: ModelConfig) -> str | None:
    """Returns which constraint of its attention a model violates; None if it can be built."""
    try:
        for attention_spec in sites(config).values():
            registry.check(attention_spec())
    except SpecError as error:
        return f'cannot be built: {error}'
    return None


def uses_slices(config: ModelConfig) -> bool:
    """Returns whether heads of a model are slices of the stream, which need N H = D."""
    for attention_spec in sites(config).values():
        spec = attention_spec()
        score, _ = registry.find_score(spec.score)
        value, _ = registry.find_value(spec.value)
        if score.uses_slices or value.uses_slices:
            return True
    return False


@dataclasses.dataclass(frozen=True)
class Dimension:
    """A dimension of a model that matching solves for, such as d_model.

    Other fields follow its value; `match` lists them.
    """

    config: ModelConfig  # the variant at the baseline's shape
    name: str  # the field: 'd_model', 'd_ff', 'num_heads' or 'num_layers'
    which: str = 'total'  # the cost that is made equal, one of COSTS

    @property
    def baseline_value(self) -> int:
        """The value at the baseline's shape."""
        return getattr(self.config, self.name) or self.config.mlp_width

    @property
    def step(self) -> int:
        """The step between valid values."""
        if self.name == 'num_heads':
            return self.config.num_kv_heads or 1
        # The cache grows with num_heads * head_size. A head size that follows d_model is an
        # integer, so the cache does not grow between multiples of the smallest width.
        if self.name == 'd_model' and self.which == 'cache' and not self.config.head_size:
            return self.smallest_width
        return 1

    @property
    def head_size_step(self) -> int:
        """The step between valid head sizes: rotary positions need even ones."""
        return 2 if self.config.positions == 'rope' else 1

    @property
    def smallest_width(self) -> int:
        """The smallest d_model that divides into heads of a valid size."""
        return self.config.num_heads * self.head_size_step

    def resized(self, value: int) -> ModelConfig:
        """Returns the model at another value of this dimension.

        Other dimensions follow, so that the variant stays comparable; `match` says how.
        """
        config = self.config
        if self.name == 'd_model':
            return self._at_width(value)
        if self.name == 'd_ff':
            return dataclasses.replace(config, d_ff=value)
        # For heads and layers, the width of the MLP stays. d_ff=None would stand for a width that
        # follows d_model, so the width is set.
        if self.name == 'num_heads':
            head_size = config.head_size or config.d_model // config.num_heads
            return dataclasses.replace(
                config, num_heads=value, head_size=head_size, d_ff=config.mlp_width
            )
        return dataclasses.replace(config, num_layers=value, d_ff=config.mlp_width)

    def _at_width(self, d_model: int) -> ModelConfig:
        """Returns the model at another d_model, with the same number of heads and ratio of d_ff."""
        config = self.config
        d_ff = max(1, round(config.mlp_width / config.d_model * d_model))
        head_size = config.head_size
        if not head_size:
            nearest = self.head_size_step * max(1, round(d_model / self.smallest_width))
            # head_size=None stands for d_model / num_heads. It stays if that is the nearest size.
            head_size = None if nearest * config.num_heads == d_model else nearest
        return dataclasses.replace(config, d_model=d_model, d_ff=d_ff, head_size=head_size)

    def cost(self, value: int) -> float:
        """Returns the cost of the model at a value of this dimension."""
        return cost.measured(self.resized(value), self.which)

    def first_usable(self, values: range) -> int | None:
        """Returns the first of `values` at which the variant can be built; None if there is none.

        Some variants need a power of two, for example.
        """
        for value in values:
            if violated_constraint(self.resized(value)) is None:
                return value
        return None

    def next_toward(self, target: float, value: int) -> int | None:
        """Returns the next usable value after `value`, in the direction in which `target` lies.

        The direction is up if `value` costs less than `target`, and down otherwise. Returns None if
        there is no usable value above 0 and below SEARCH_LIMIT times the baseline's value.
        """
        if self.cost(value) < target:
            limit = SEARCH_LIMIT * self.baseline_value
            return self.first_usable(range(value + self.step, limit, self.step))
        return self.first_usable(range(value - self.step, 0, -self.step))

    def nearest(self, target: float) -> int:
        """Returns the usable value whose cost is nearest to `target`.

        A value is usable if the variant can be built there. For example, some variants need a power
        of two. Costs grow with the value, so the search has three steps:

        1. Double an upper bound until it costs `target` or more.
        2. Bisect the values up to the bound for the first one that costs `target` or more.
        3. Return that value or the usable value below it, whichever has the nearer cost.

        Values of SEARCH_LIMIT times the baseline's value or more are not tried. Raises MatchError
        if the cost does not depend on this dimension.
        """
        start = self.baseline_value
        limit = SEARCH_LIMIT * start

        # Costs grow, so two equal neighbours mean that the cost does not depend on the value.
        next_value = self.first_usable(range(start + self.step, limit, self.step))
        if next_value is not None and self.cost(next_value) == self.cost(start):
            raise MatchError(f'has the same cost at any {self.name}')

        upper = start
        while not self._reaches(target, upper):
            upper *= 2

        # The target is reached at the last candidates, but not at the first ones.
        candidates = range(self.step, upper + 1, self.step)
        first_index = bisect.bisect_left(
            candidates, True, key=lambda value: self._reaches(target, value)
        )
        reaching = candidates[first_index]

        below = self.first_usable(range(reaching - self.step, 0, -self.step))
        at_or_above = self.first_usable(range(reaching, limit, self.step))
        neighbours = [value for value in (below, at_or_above) if value is not None]
        return min(neighbours, key=lambda value: abs(self.cost(value) - target))

    def _reaches(self, target: float, value: int) -> bool:
        """Returns whether the model costs `target` or more at `value`.

        If `value` is not usable, the next usable value above it counts. If there is none, the
        search has to end, so the target counts as reached.
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
    """Solves the dimension `destination` of a model, then d_ff, so that the cost equals `target`.

    The destination gets the usable value whose cost is nearest to the target. d_ff then absorbs the
    residual, which is at most half a step of the destination. The other dimensions follow:

    - 'd_model': d_ff keeps its ratio to d_model. The number of heads stays. If the head size is not
      set, it becomes the integer nearest to d_model / num_heads (an even one with rotary
      positions). So a variant that needs N H = D moves in multiples of num_heads.
    - 'd_ff': all other dimensions stay, and `fill` has no effect.
    - 'num_heads': the head size stays. If num_kv_heads is set, it stays too and is the step.
    - 'num_layers': in an encoder-decoder, the encoder keeps its depth if num_encoder_layers is set.
      Otherwise it becomes as deep as the decoder.

    The cache does not depend on d_ff, so `fill` has no effect on it. If a variant saves or costs
    less than half a step, the destination would stay and d_ff would absorb everything. That is
    another destination, so it is refused.

    Args:
        config: The variant at the baseline's shape. It has to be buildable there.
        target: The baseline's cost: parameters, FLOP per token or cached numbers per token.
        which: The cost that is made equal, one of COSTS; see `cost.measured`.
        fill: 'd_ff', or None to accept the residual of the destination.
        tolerance: The largest |residual| that is accepted, as a fraction.
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
    solved = dimension.resized(value)
    cost_before_fill = dimension.cost(value)
    target_in_words = f'{target:.0f} {COSTS[which]}'

    # Then d_ff, from what one more unit of it costs (0 for a cache).
    wider = dataclasses.replace(solved, d_ff=solved.mlp_width + 1)
    cost_of_unit = cost.measured(wider, which) - cost_before_fill
    if fill and destination != 'd_ff' and cost_of_unit:
        d_ff = solved.mlp_width + round((target - cost_before_fill) / cost_of_unit)
        if d_ff < 1:
            raise MatchError(f'has more than {target_in_words} at d_ff=1 and {destination}={value}')
        solved = dataclasses.replace(solved, d_ff=d_ff)

    # Refuse a model in which only d_ff has changed, or that misses the target.
    gap = cost_before_fill / target - 1
    is_unchanged = destination != 'd_ff' and value == dimension.baseline_value
    if is_unchanged and abs(gap) > tolerance:
        raise MatchError(_why_unchanged(dimension, target))
    residual = cost.measured(solved, which) / target - 1
    if abs(residual) > tolerance:
        sizes = f'{destination}={value}'
        if destination != 'd_ff':
            sizes += f' and d_ff={solved.mlp_width}'
        is_rounded = fill is not None or destination == 'd_ff'
        if is_rounded and abs(residual) < cost_of_unit / target:
            sizes += f', as each unit of d_ff is {cost_of_unit / target:.2%}'
        raise MatchError(
            f'reaches {target_in_words} only to {100 * residual:+.3g}%, at {sizes}; choose '
            f'another size, or a tolerance above {tolerance:g}'
        )
    return solved


def _why_unchanged(dimension: Dimension, target: float) -> str:
    """Says why a dimension stays at the baseline's value, although the cost there is not `target`.

    For example, the cost is 7% below the target at d_model=96, and 8% above it at the next usable
    value, d_model=104. So d_model stays at 96. The sentence gives both differences, and the reason
    why there is no value between. It has no subject, like the errors of `match`:

        is -7.00% from the target at d_model=96 and +8.00% at d_model=104, and no other d_model is
        nearer, so d_ff would absorb it all: d_model moves in steps of 8, as ...
    """
    name = dimension.name
    value = dimension.baseline_value
    gap = dimension.cost(value) / target - 1
    here = f'is {gap:+.2%} from the target at {name}={value}'
    no_other = f'no other {name} is nearer, so d_ff would absorb it all'

    next_value = dimension.next_toward(target, value)
    if next_value is None:
        # The variant cannot be built at any further value. Say why at the one beside this value.
        sentence = f'{here}, and {no_other}'
        beside = value + dimension.step if gap < 0 else value - dimension.step
        if beside > 0:
            sentence += f': at {name}={beside} it {violated_constraint(dimension.resized(beside))}'
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
