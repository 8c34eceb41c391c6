"""Which variants the contract suite runs on.

All of them, or those that `--variant=score/value` names, each of which may be an import path. A
check of the Score alone asks for the fixture `score` and runs once per Score. Of others, most
variants carry the mark `slow`. One that depends on both circuits asks for `variant`: quick is every
Score with `vo`, `qk` with every Value, every pair that shares a projection and a seeded sample of
the rest. One that depends on each circuit by itself asks for `shown`: quick are the variants of the
documentation, each Score and each Value once, and the examples of docs/extend.md. One that compiles
or lowers a program asks for `some`: quick is every ninth variant of the documentation.
"""

import functools
import random
import re

import pytest

from qkattn.attention import SCORES, VALUES, parse_variant, registry
from qkattn.errors import SpecError
from qkattn.study import catalogue
from tests.attention import examples
from tests.lanes import only

SAMPLE = 6

buildable_variants = functools.cache(catalogue.buildable_variants)


def quick_variants(fixture: str) -> set[tuple[str, str]]:
    documented, known = catalogue.documented_variants(), buildable_variants()
    if fixture == 'some':
        return {*documented[::9]}
    quick = {*documented, *examples.VARIANTS}
    if fixture == 'variant':
        quick.update((s, v) for s, v in known if v == 'vo' or VALUES[v].shares)
        rest = sorted({*known} - quick)
        quick.update(random.Random(0).sample(rest, min(SAMPLE, len(rest))))
    return quick


def pytest_generate_tests(metafunc):
    if not metafunc.module.__name__.endswith('test_contract'):
        return
    named = [_checked(text) for text in metafunc.config.getoption('--variant') or ()]
    every = named or [*buildable_variants(), *examples.VARIANTS]
    for fixture in {'variant', 'shown', 'some'} & {*metafunc.fixturenames}:
        quick = named or quick_variants(fixture)
        cases = only([(pair,) for pair in quick], [(pair,) for pair in every])
        metafunc.parametrize(fixture, cases, ids=map('/'.join, every))
    if 'score' in metafunc.fixturenames:
        metafunc.parametrize('score', dict(named) or SCORES)


def _checked(text: str) -> tuple[str, str]:
    try:
        score, value = parse_variant(text)
        registry.check(catalogue.reference_spec(score, value))
    except SpecError as error:
        raise pytest.UsageError(f'--variant={text}: {error}') from error
    return score, value


def pytest_terminal_summary(terminalreporter):
    """How many variants were held to the contract, and how many there are."""
    passed = (report.nodeid for report in terminalreporter.stats.get('passed', []))
    pattern = re.compile(r'test_contract\.py::test_\w+\[([^\]]+/[^\]]+?)(?:-[a-z_]+)?\]')
    done = {match[1] for nodeid in passed if (match := pattern.search(nodeid))}
    if done:
        terminalreporter.write_line(
            f'contract tests: {len(done)} variant{"s" * (len(done) != 1)} run, '
            f'{len(buildable_variants())} registered '
            f'({len(SCORES)} scores, {len(VALUES)} values)'
        )
