"""Numbers as the report prints them."""

import math
from collections.abc import Iterable

from qkattn.stats.inference import Difference, Estimate

NONE = '-'


def si(value: float | None, digits: int = 3) -> str:
    """`value` with `digits` significant digits and a decimal prefix, 1234567 -> '1.23M'."""
    if value is None:
        return NONE
    if value == 0:
        return '0'
    prefixes = ('', 'k', 'M', 'G', 'T', 'P', 'E')
    rounded = float(f'{value:.{digits - 1}e}')
    index = min(max(int(math.floor(math.log10(abs(rounded)) / 3)), 0), len(prefixes) - 1)
    scaled = rounded / 1000**index
    decimals = max(digits - 1 - int(math.floor(math.log10(abs(scaled)))), 0)
    text = f'{scaled:.{decimals}f}'
    if not index and '.' in text:
        text = text.rstrip('0').rstrip('.')
    return text + prefixes[index]


def mean_sd(value: Estimate | None, decimals: int) -> str:
    """'2.1000 ± 0.0300', without the sd where there is one value only."""
    if value is None:
        return NONE
    mean = f'{value.mean:.{decimals}f}'
    return mean if value.sd is None else f'{mean} ± {value.sd:.{decimals}f}'


def interval(difference: Difference | None, decimals: int = 4) -> str:
    """'+0.0500 [-0.0245, +0.1245]', without the interval where there is none."""
    if difference is None:
        return NONE
    mean = f'{difference.mean:+.{decimals}f}'
    if difference.low is None:
        return mean
    return f'{mean} [{difference.low:+.{decimals}f}, {difference.high:+.{decimals}f}]'


def p_value(p: float | None) -> str:
    """'0.021', '< 0.001'."""
    if p is None:
        return NONE
    return '< 0.001' if p < 0.001 else f'{p:.3f}'


def listed(names: Iterable[object]) -> str:
    """'a', 'a and b', 'a, b and c'."""
    *first, last = map(str, names)
    return f'{", ".join(first)} and {last}' if first else last


def counted(number: int, noun: str) -> str:
    """'1 seed', '8 seeds'."""
    return f'{number:,} {noun}{"s" * (number != 1)}'


def span(numbers: Iterable[int]) -> str:
    """'8', '4-8' from the smallest to the largest, 'no'."""
    ordered = sorted(numbers)
    return '-'.join(map(str, dict.fromkeys((*ordered[:1], *ordered[-1:])))) or 'no'


def words(name: str) -> str:
    """A field as words: 'learning_rate' -> 'learning rate'."""
    return name.replace('_', ' ')
