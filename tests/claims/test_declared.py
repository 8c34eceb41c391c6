"""Which claims there are, and that their studies can be built at every scale."""

import dataclasses
import runpy
import sys
from pathlib import Path

import pytest

from qkattn.claims import declared, protocol
from qkattn.claims.claim import Claim, Expectation, Speaks
from qkattn.claims.protocol import SCALES
from qkattn.claims.studies import study_of
from qkattn.config import from_config_dict
from qkattn.errors import ConfigError
from qkattn.study.arms import build_arms
from qkattn.study.tuning import screening_seeds

FILE = """
from qkattn.claims.claim import Claim, exact

def check():
    return [exact('one', 1, 1)]

CLAIM = Claim(name='{}', title='one', statement='One.', source='s', rule='r.', checks=(check,))
"""
CONFIGS = sorted((Path(__file__).parents[2] / 'configs/claims').glob('*.py'))


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """A directory that is searched for claims beside the one of the package."""
    monkeypatch.setattr(declared, '__path__', [*declared.__path__, str(tmp_path)])
    monkeypatch.syspath_prepend(tmp_path)
    declared.claims.cache_clear()
    yield tmp_path
    declared.claims.cache_clear()
    for name in [name for name in sys.modules if name.startswith(f'{declared.__name__}.z')]:
        del sys.modules[name]


def test_claims_are_in_order_and_well_formed():
    claims = declared.claims()
    assert list(claims) == sorted(claims) and {'C1', 'E3'} <= claims.keys()
    for name, claim in claims.items():
        assert claim.name == name and claim.statement.endswith('.') and claim.rule.endswith('.')
        assert 0 < len(claim.title) <= 65 and claim.title[-1] != '.'
        assert claim.checks or claim.expectations or claim.measures
    assert declared.chosen([]) == list(claims.values())


def test_claims_are_found_in_files_and_by_import_path(folder):
    (folder / 'z1_one.py').write_text(FILE.format('Z1'))
    (folder / 'my_claims.py').write_text(FILE.format('Z3'))
    assert declared.chosen(['z1'])[0].checks[0]()[0].speaks == Speaks.FOR
    assert [claim.name for claim in declared.chosen(['my_claims:CLAIM', 'C1'])] == ['Z3', 'C1']
    with pytest.raises(ConfigError, match=r'my_claims:check.* is not a qkattn.claims.claim.Claim'):
        declared.chosen(['my_claims:check'])
    (folder / 'z2_one.py').write_text(FILE.format('C1'))
    declared.claims.cache_clear()
    with pytest.raises(ConfigError, match="'C1' is declared twice, also in .*z2_one"):
        declared.claims()


@pytest.mark.parametrize('name', ['C11', 'c1x'])
def test_the_claim_most_like_an_unknown_one_is_named(name):
    with pytest.raises(ConfigError, match=f"unknown claim {name!r}, did you mean 'C1'?"):
        declared.chosen([name])


def test_an_expectation_of_another_relation_or_shape_is_refused():
    for fields, name in (({'relation': 'no_worse'}, 'relation'), ({'at': 'equal'}, 'at')):
        with pytest.raises(ConfigError, match=f"{name}='.*' of an expectation must be one of"):
            Expectation(**{'study': 'lm', 'variant': 'qk/no_v', 'relation': 'better'} | fields)


def test_the_studies_of_a_claim_are_listed_once():
    texts = dict.fromkeys(('name', 'title', 'statement', 'source', 'rule'), 'Z')
    expected = tuple(Expectation(name, 'qk/no_o', 'worse') for name in ('a', 'b', 'a'))
    assert Claim(**texts, expectations=expected).studies == ('a', 'b')


@pytest.mark.parametrize('scale', SCALES)
def test_studies_have_the_arms_that_claims_expect(scale):
    for name, claim in declared.claims().items():
        for expected in claim.expected_at(scale):
            study = study_of(expected.study, scale)
            for variant in filter(None, (expected.variant, expected.versus)):
                bare, _, destination = variant.partition(' [')
                assert bare in study.variants, (name, variant)
                assert destination.strip(']') in (*study.destinations, ''), (name, variant)


@pytest.mark.parametrize(
    'scale',
    ['smoke', *(pytest.param(scale, marks=pytest.mark.slow) for scale in ('cpu', 'gpu'))],
)
@pytest.mark.parametrize('path', CONFIGS, ids=lambda path: path.stem)
def test_studies_are_matched_and_screened_by_other_seeds(path, scale):
    study = from_config_dict(runpy.run_path(str(path))['get_config'](scale))
    assert study.name == path.stem
    assert bool(study.tuning.seeds) == (scale != 'smoke' and study.name != 'nonlinear_untuned')
    if study.tuning.seeds:
        assert not {*study.base.trials.seeds} & {*screening_seeds(study.tuning)}
    for arm in build_arms(study) if study.match else ():
        assert arm.key.control is not None or abs(arm.match.residual) <= study.tolerance


def test_fields_of_a_protocol():
    config = protocol.translator('cpu', num_heads=4)
    assert config.model == dataclasses.replace(protocol.translator('cpu').model, num_heads=4)
    assert protocol.protocol('cpu')['controls'].longer is None
    assert protocol.protocol('cpu', longer=True)['controls'].longer == 4
    with pytest.raises(ConfigError, match="scale='huge' must be one of smoke, cpu, gpu"):
        protocol.language_model('huge')
