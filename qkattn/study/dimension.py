"""A dimension of a model's shape that is solved for, and the values at which a variant is built."""

import dataclasses
from collections.abc import Callable
from typing import Any

from qkattn.attention import registry
from qkattn.config import ModelConfig
from qkattn.errors import MatchError, SpecError
from qkattn.model.sites import sites


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
    return '?'.join(filter(None, (f'{config.score}/{config.value}', '&'.join(fields))))
