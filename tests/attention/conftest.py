"""Which cells the contract suite runs on.

Every score with `vo`, `qk` with every value, every pair that shares a matrix and a seeded sample of
the rest are quick; all other variants are marked `slow`. `--variant=score/value` runs one variant,
which may be named by import path.
"""

import dataclasses
import random

import pytest

from qkattn.attention import VALUES, parse_variant, registry
from qkattn.errors import SpecError
from qkattn.model.sites import attention_spec
from qkattn.study import catalogue

SAMPLE = 12


def shares(value: str) -> bool:
    return bool(VALUES[value].shares)


def cells() -> list:
    known = catalogue.cells()
    quick = {
        (s, v)
        for s, v in known
        if v == 'vo' or (s, v) == catalogue.partner(v, VALUES[v]) or shares(v)
    }
    rest = sorted(set(known) - quick)
    quick |= set(random.Random(0).sample(rest, min(SAMPLE, len(rest))))
    return [
        pytest.param(cell, id='/'.join(cell), marks=() if cell in quick else pytest.mark.slow)
        for cell in known
    ]


def pytest_generate_tests(metafunc):
    if metafunc.module.__name__.endswith('test_contract'):
        named = metafunc.config.getoption('--variant')
        chosen = [pytest.param(_checked(c), id=c) for c in named] if named else cells()
        metafunc.parametrize('cell', chosen)


def _checked(text: str) -> tuple[str, str]:
    try:
        score, value = parse_variant(text)
        registry.check(
            attention_spec(dataclasses.replace(catalogue.REFERENCE, score=score, value=value))
        )
    except SpecError as error:
        raise pytest.UsageError(f'--variant={text}: {error}') from error
    return score, value
