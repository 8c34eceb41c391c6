"""Which variants the contract suite runs on: all, or those that `--variant=score/value` names.

A check of the Score alone asks for the fixture `score`. In others most variants are slow; quick are

variant  each Score and Value, docs/extend.md, and some pairs that share a projection
some     what compiles a program, or is the layer's work rather than a circuit's: every ninth
         variant of the documentation
"""

import contextlib
import functools
import itertools

import pytest

from qkattn.attention import SCORES, VALUES, parse_variant, registry
from qkattn.errors import SpecError
from qkattn.study import variant_catalogue
from tests.attention import examples
from tests.lanes import only


@functools.cache
def buildable_variants() -> list[tuple[str, str]]:
    """Every (score, value) of the registries that can be built at the reference size."""
    buildable = []
    for score, value in itertools.product(SCORES, VALUES):
        with contextlib.suppress(SpecError):
            registry.check(variant_catalogue.reference_spec(score, value))
            buildable.append((score, value))
    return buildable


def quick_variants(fixture: str) -> set[tuple[str, str]]:
    documented = variant_catalogue.documented_variants()
    if fixture == 'some':
        return {*documented[::9]}
    sharing = [(s, v) for s, v in buildable_variants()[::3] if VALUES[v].shares]
    return {*documented, *examples.VARIANTS, *sharing}


def pytest_generate_tests(metafunc):
    if not metafunc.module.__name__.endswith('test_contract'):
        return
    named = [_checked(text) for text in metafunc.config.getoption('--variant') or ()]
    every = named or [*buildable_variants(), *examples.VARIANTS]
    for fixture in {'variant', 'some'} & {*metafunc.fixturenames}:
        quick = named or quick_variants(fixture)
        cases = only([(pair,) for pair in quick], [(pair,) for pair in every])
        metafunc.parametrize(fixture, cases, ids=map('/'.join, every))
    if 'score' in metafunc.fixturenames:
        outside = [score for score, _ in examples.VARIANTS if score not in SCORES]
        metafunc.parametrize('score', dict(named) or [*SCORES, *outside])


def _checked(text: str) -> tuple[str, str]:
    try:
        score, value = parse_variant(text)
        registry.check(variant_catalogue.reference_spec(score, value))
    except SpecError as error:
        raise pytest.UsageError(f'--variant={text}: {error}') from error
    return score, value
