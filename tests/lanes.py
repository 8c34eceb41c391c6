"""Cases of parametrized tests, some of which are marked `slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def slow_except(quick: Collection[Any], cases: Iterable[Any]) -> list:
    """Returns the cases for `pytest.mark.parametrize`, and marks all but the quick ones `slow`.

    A usual run of the tests skips the slow cases.

    Args:
        quick: The cases that are not marked.
        cases: All cases. A case is a value, or a tuple if the test has several arguments.
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
