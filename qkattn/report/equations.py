"""The two matrices of an attention variant, by its name, from the stored catalogue of variants."""

import functools
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from qkattn.config.calls import parse_call
from qkattn.study import variant_tables


class Form(NamedTuple):
    """How a variant writes A[n] and B[n]."""

    name: str  # score/value, each with all of its options, those at their defaults included
    score: str | None  # equation of A[n]; None for a class outside the package
    value: str | None  # as `score`, of B[n]
    abridged: bool  # whether an option is left at its default


def form(config: Mapping[str, Any]) -> Form:
    """The form of the attention of a run's config, of its decoder if it has two."""
    texts = [config['model'][kind.lower()] for kind in _known()]
    (score, a, short), (value, b, brief) = map(_part, _known(), texts)
    return Form(f'{score}/{value}', a, b, short or brief)


def places(variant: str) -> tuple[int, int, str]:
    """The places of Score and Value in their registries, and what else the name says.

    That are options, and the import path of a class outside the package, whose place is 0.
    """
    found, rest = [], ''
    for known, text in zip(_known().values(), variant.partition('/')[::2], strict=True):
        name = re.match(r'\w*', text)[0]
        is_known = name in known and not text[len(name) :].startswith((':', '.'))
        found.append(list(known).index(name) if is_known else 0)
        rest += text[len(name) :] if is_known else text
    score, value = found
    return score, value, rest


def _part(kind: str, text: str) -> tuple[str, str | None, bool]:
    """Name with all options, equation, and whether `text` leaves an option out."""
    known = _known()[kind].get(text.partition('(')[0])
    if known is None:
        return text, None, False
    name, options = parse_call(text, kind)
    listed = ', '.join(f'{key}={value!r}' for key, value in (known['options'] | options).items())
    brief = bool(known['options'].keys() - options.keys())
    return name + (f'({listed})' if listed else ''), known['equation'], brief


@functools.cache
def _known() -> dict[str, dict[str, dict[str, Any]]]:
    return variant_tables.stored()
