"""Which variants the contract suite runs on.

Every Score with `vo`, `qk` with every Value, every pair that shares a projection and a seeded
sample of the rest are quick, and so are the examples of docs/extend.md; all other variants carry
the mark `slow`. `--variant=score/value` runs one variant, which may be named by import path.

A check of the Score alone asks for the fixture `score` and runs once per Score; one that depends on
both circuits asks for `variant`, and for `positions` where it is held at both kinds of them: one of
these is quick, in turns. One that depends on each circuit by itself asks for `documented`, of which
only the variants of the documentation are quick, each Score and each Value once, or for `shown`:
the examples too. One that compiles or lowers a program for each circuit asks for `some`: every
ninth variant of the documentation is quick.
"""

import functools
import itertools
import random
import re
from collections.abc import Collection

import pytest

from qkattn.attention import SCORES, VALUES, parse_variant, registry
from qkattn.errors import SpecError
from qkattn.study import catalogue
from tests.attention import examples

SAMPLE, SLOW = 6, pytest.mark.slow

buildable_variants = functools.cache(catalogue.buildable_variants)


def every_variant() -> list[tuple[str, str]]:
    return [*buildable_variants(), *examples.VARIANTS]


def variants(quick: Collection[tuple[str, str]]) -> list:
    return [
        pytest.param(pair, id='/'.join(pair), marks=() if pair in quick else SLOW)
        for pair in every_variant()
    ]


def placed(named: list[tuple[str, str]]) -> list:
    """Variants at both kinds of positions, of which the quick ones are rotary in turns."""
    quick = [pair for pair in every_variant() if pair in quick_variants()]
    rotary = [pair for pair in quick if registry.find_score(pair[0])[0].supports_rope]
    rotary = [pair for pair in rotary if pair[0] != 'latent'][::2]  # refused without rope_size
    chosen = {(pair, 'rope' if pair in rotary else 'alibi') for pair in quick}
    return [
        pytest.param(
            *one, id=f'{"/".join(one[0])}-{one[1]}', marks=() if named or one in chosen else SLOW
        )
        for one in itertools.product(named or every_variant(), ('rope', 'alibi'))
    ]


def quick_variants() -> set[tuple[str, str]]:
    known = buildable_variants()
    quick = {(s, v) for s, v in known if v == 'vo' or VALUES[v].shares}
    quick.update(catalogue.documented_variants())
    rest = sorted(set(known) - quick)
    return (
        quick | set(examples.VARIANTS) | set(random.Random(0).sample(rest, min(SAMPLE, len(rest))))
    )


def pytest_generate_tests(metafunc):
    if not metafunc.module.__name__.endswith('test_contract'):
        return
    named = metafunc.config.getoption('--variant')
    chosen = {
        'variant': quick_variants,
        'documented': catalogue.documented_variants,
        'shown': lambda: [*catalogue.documented_variants(), *examples.VARIANTS],
        'some': lambda: catalogue.documented_variants()[::9],
    }
    if 'positions' in metafunc.fixturenames:
        metafunc.parametrize(('variant', 'positions'), placed([_checked(x) for x in named or ()]))
        return
    for fixture in chosen.keys() & set(metafunc.fixturenames):
        pairs = [pytest.param(_checked(text), id=text) for text in named or ()]
        metafunc.parametrize(fixture, pairs or variants(chosen[fixture]()))
    if 'score' in metafunc.fixturenames:
        scores = dict.fromkeys(_checked(text)[0] for text in named) if named else SCORES
        metafunc.parametrize('score', scores)


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
