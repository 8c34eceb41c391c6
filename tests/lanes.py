"""Cases of a parametrized test, of which some are quick and the others carry the mark `slow`."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


def only(quick: Collection[Any], cases: Iterable[Any]) -> list:
    """All of `cases`, of which those in `quick` are quick; a tuple holds several arguments."""
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=() if case in quick else pytest.mark.slow,
        )
        for case in cases
    ]


def thinned(cases: Iterable[Any], every: int) -> list:
    """All of `cases`, of which every `every`-th is quick."""
    cases = list(cases)
    return only(cases[::every], cases)
