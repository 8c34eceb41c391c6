"""Cases of a parametrized test, of which some are quick and the others carry the mark `slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list:
    """All of `cases`, marked slow but for those in `quick`; a tuple holds several arguments."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in cases
    ]


def mostly_slow(cases: Iterable[Any], every: int) -> list:
    """All of `cases`, marked slow but for every `every`-th."""
    cases = list(cases)
    return slow_except(cases[::every], cases)
