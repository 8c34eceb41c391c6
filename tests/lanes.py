"""Cases of parametrized tests, some of which are marked `slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list:
    """Returns the cases for `pytest.mark.parametrize`, with all marked `slow` but the quick ones.

    A usual run of the tests leaves out what is marked `slow`.

    Args:
        quick: Those of the cases that are tried in every run.
        cases: The values of an argument. A tuple has the values of several arguments.
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
