"""Which variants the contract suite runs on: all, or those that `--variant=score/value` names.

A check of only the Score asks for the fixture `score` or `some_score`. Checks with `score` are
cheap, so all are quick. Other checks are slow, except for these:

variant     one variant of each kind of factorization
some        what compiles a program, or is the layer's work rather than a circuit's: every ninth
            variant of the documentation
some_score  every fourth Score
"""

import contextlib
import functools
import itertools

import pytest

from qkattn.attention import SCORES, VALUES, parse_variant, registry
from qkattn.errors import SpecError
from qkattn.study import variant_catalogue
from tests.attention import examples
from tests.lanes import mostly_slow, slow_except

# A variant of each kind of factorization, one of examples/ and two of docs/extend.md among them.
QUICK = {
    ('qk', 'vo'),
    ('merged', 'vo'),
    ('shared_qk', 'vo'),
    ('query_free', 'vo'),
    ('double', 'vo'),
    ('latent', 'latent'),
    ('pairwise', 'v_is_k_transposed'),
    ('qk', 'no_v'),
    ('qk', 'no_o'),
    ('qk', 'k_is_v'),
    ('qk', 'o_is_k'),
    ('qk', 'merged_vo'),
    ('examples.gauge_fixed:GaugeFixedQK', 'vo'),
    ('qk', 'gated:Gated'),
    ('cosine:Cosine', 'vo'),
}


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
    """The variants on which tests with this fixture, 'variant' or 'some', are quick."""
    if fixture == 'variant':
        return QUICK
    return set(variant_catalogue.documented_variants()[::9])


def pytest_generate_tests(metafunc):
    """Parametrizes the contract tests by the variants of --variant, or by all if none is given.

    A variant is a pair of a Score and a Value. The fixtures `variant` and `some` are variants. The
    fixtures `score` and `some_score` are Scores.
    """
    if not metafunc.module.__name__.endswith('test_contract'):
        return
    # Without --variant, `named` is empty. Named variants are all quick.
    named = [_checked(text) for text in metafunc.config.getoption('--variant') or ()]
    variants = named or [*buildable_variants(), *examples.VARIANTS]
    for fixture in ('variant', 'some'):
        if fixture in metafunc.fixturenames:
            quick = named or quick_variants(fixture)
            # Each case is a tuple of arguments. The only argument is the variant.
            quick_cases = [(variant,) for variant in quick]
            cases = slow_except(quick_cases, [(variant,) for variant in variants])
            metafunc.parametrize(fixture, cases, ids=map('/'.join, variants))

    # The Scores of the variants, each once.
    if named:
        scores = list(dict.fromkeys(score for score, _ in named))
    else:
        outside = [score for score, _ in examples.VARIANTS if score not in SCORES]
        scores = [*SCORES, *outside]
    if 'score' in metafunc.fixturenames:
        metafunc.parametrize('score', scores)
    if 'some_score' in metafunc.fixturenames:
        metafunc.parametrize('some_score', mostly_slow(scores, every=1 if named else 4))


def _checked(text: str) -> tuple[str, str]:
    """Parses 'score/value' from --variant. A variant that cannot be built is a usage error."""
    try:
        score, value = parse_variant(text)
        registry.check(variant_catalogue.reference_spec(score, value))
    except SpecError as error:
        raise pytest.UsageError(f'--variant={text}: {error}') from error
    return score, value
