"""Cases of parametrized tests, some of which are marked `slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list:
    """Marks the cases slow that are not in `quick`.

    A case that is a tuple has several arguments.
    """
    params = []
    for case in cases:
        arguments = case if isinstance(case, tuple) else (case,)
        marks = () if case in quick else pytest.mark.slow
        params.append(pytest.param(*arguments, marks=marks))
    return params


def mostly_slow(cases: Iterable[Any], every: int) -> list:
    """Marks the cases slow, except the first and each `every`-th after it."""
    cases = list(cases)
    return slow_except(cases[::every], cases)
