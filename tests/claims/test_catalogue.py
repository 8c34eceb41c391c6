"""Which claims there are, and how they are named."""

import sys

import pytest

from qkattn.claims import catalogue, declared
from qkattn.claims.claim import Claim, Expectation, exact
from qkattn.claims.decided import Speaks
from qkattn.claims.protocol import SCALES
from qkattn.claims.rules import AS_REPORTED, RELATIONS
from qkattn.claims.studies import study_of
from qkattn.errors import ConfigError

FILE = """
from qkattn.claims.claim import Claim, exact

def check():
    return [exact('one', 1, 1)]

CLAIM = Claim('{}', 'one', 'One is one.', 'arithmetic', 'Holds if it does.', checks=(check,))
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory that is searched for claims beside the one of the package."""
    monkeypatch.setattr(declared, '__path__', [*declared.__path__, str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)
    catalogue.declared.cache_clear()
    yield tmp_path
    catalogue.declared.cache_clear()
    for name in [name for name in sys.modules if name.startswith(f'{declared.__name__}.z')]:
        del sys.modules[name]


def test_claims_are_in_order_and_well_formed():
    claims = catalogue.declared()
    assert list(claims) == sorted(claims) and {'C1', 'E3'} <= claims.keys()
    for name, claim in claims.items():
        assert claim.name == name and claim.statement.endswith('.') and claim.rule.endswith('.')
        assert {of.relation for of in claim.expectations} <= {AS_REPORTED, *RELATIONS}
        assert 0 < len(claim.title) <= 65 and claim.title[-1] != '.'
        assert claim.checks or claim.expectations or claim.measures


def test_an_expectation_of_another_relation_or_shape_is_refused():
    for fields, name in (({'relation': 'no_worse'}, 'relation'), ({'at': 'equal'}, 'at')):
        with pytest.raises(ConfigError, match=f"{name}='.*' of an expectation must be one of"):
            Expectation(
                **{'study': 'lm_dropped', 'variant': 'qk/no_v', 'relation': 'better'} | fields
            )


def test_a_claim_that_is_added_is_listed(folder):
    (folder / 'z1_one.py').write_text(FILE.format('Z1'))
    assert catalogue.chosen(['z1'])[0].checks[0]()[0].speaks == Speaks.FOR


def test_a_claim_that_is_declared_twice_is_refused(folder):
    (folder / 'z2_one.py').write_text(FILE.format('C1'))
    with pytest.raises(ConfigError, match="'C1' is declared twice, also in .*z2_one"):
        catalogue.declared()


def test_a_claim_may_live_outside_the_package(folder):
    (folder / 'my_claims.py').write_text(FILE.format('Z3'))
    assert [of.name for of in catalogue.chosen(['my_claims:CLAIM', 'C1'])] == ['Z3', 'C1']
    with pytest.raises(ConfigError, match=r'my_claims:check.* is not a qkattn.claims.claim.Claim'):
        catalogue.chosen(['my_claims:check'])


def test_no_names_are_all_claims():
    assert catalogue.chosen([]) == list(catalogue.declared().values())


@pytest.mark.parametrize('name', ['C11', 'c1x'])
def test_the_claim_most_like_an_unknown_one_is_named(name):
    with pytest.raises(ConfigError, match=f"unknown claim {name!r}, did you mean 'C1'?"):
        catalogue.chosen([name])


def test_an_exact_row_speaks_by_its_tolerance():
    assert exact('rank', 3, 3, D=4).context == {'D': '4'}
    said = [exact('error', value, 0, 1e-3).speaks for value in (1e-3, 2e-3, -2e-3)]
    assert said == [Speaks.FOR, Speaks.AGAINST, Speaks.AGAINST]


def test_the_studies_of_a_claim_are_listed_once():
    expected = tuple(Expectation(name, 'qk/no_o', 'worse') for name in ('a', 'b', 'a'))
    claim = Claim('Z', 't', 's', 's', 'r', expectations=expected)
    assert claim.studies == ('a', 'b')


@pytest.mark.parametrize('scale', SCALES)
def test_studies_have_the_arms_that_claims_expect(scale):
    for name, claim in catalogue.declared().items():
        for of in claim.expected_at(scale):
            study = study_of(of.study, scale)
            for variant in filter(None, (of.variant, of.versus)):
                bare, _, destination = variant.partition(' [')
                assert bare in study.variants, (name, variant)
                assert destination.strip(']') in (*study.destinations, ''), (name, variant)
