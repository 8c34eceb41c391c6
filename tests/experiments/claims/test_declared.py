"""Which claims there are, that their studies can be built at every scale, and their training."""

import dataclasses
import itertools
import runpy

import pytest

from experiments.claims import declared, studies
from experiments.claims.claim import Claim, Expectation
from experiments.claims.declared import d_two_in_a_row
from experiments.claims.protocol import SCALES
from qkattn.errors import ConfigError, ReportError
from qkattn.study.arms import build_arms
from tests.lanes import slow_except
from tests.processes import ROOT

CONFIGS = sorted((ROOT / 'configs/claims').glob('*.py'))


def test_claims_are_sorted_by_name_and_all_are_chosen_by_default():
    claims = declared.claims()
    assert list(claims) == sorted(claims)
    assert {'C1', 'E3'} <= claims.keys()
    assert declared.chosen([]) == list(claims.values())


def test_claims_are_well_formed():
    claims = declared.claims()
    for name, claim in claims.items():
        assert claim.name == name
        assert claim.statement.endswith('.')
        assert claim.rule.endswith('.')
        assert 0 < len(claim.title) <= 65
        assert claim.title[-1] != '.'
        assert claim.checks or claim.expectations or claim.measures


MY_CLAIMS = """
from experiments.claims.claim import Claim

TEXTS = {'title': 'one', 'statement': 'One.', 'source': 's', 'rule': 'r.', 'checks': (list,)}
OF_ANOTHER_NAME = Claim(name='Z3', **TEXTS)
OF_A_DECLARED_NAME = Claim(name='C1', **TEXTS)
"""


@pytest.fixture
def my_claims(tmp_path, monkeypatch):
    """A module my_claims of two claims that can be imported."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'my_claims.py').write_text(MY_CLAIMS)


def test_claims_are_chosen_by_name_or_import_path(my_claims):
    chosen = declared.chosen(['my_claims:OF_ANOTHER_NAME', 'c1'])
    assert [claim.name for claim in chosen] == ['Z3', 'C1']


def test_an_import_path_of_something_else_is_refused(my_claims):
    with pytest.raises(ConfigError, match='my_claims:Claim.* is not a .*claims.claim.Claim'):
        declared.chosen(['my_claims:Claim'])


def test_a_claim_with_the_name_of_a_declared_one_is_refused(my_claims):
    sentence = "my_claims:OF_A_DECLARED_NAME' has the name 'C1' of a declared"
    with pytest.raises(ConfigError, match=sentence):
        declared.chosen(['my_claims:OF_A_DECLARED_NAME'])


def test_a_claim_that_is_declared_twice_is_refused(monkeypatch):
    again = dataclasses.replace(declared.claims()['C1'], title='again')
    monkeypatch.setattr(d_two_in_a_row, 'AGAIN', again, raising=False)
    with pytest.raises(ConfigError, match="'C1' is declared twice, also in .*d_two_in_a_row"):
        declared.claims.__wrapped__()


def test_a_claim_without_evidence_is_refused():
    with pytest.raises(ConfigError, match='claim Z9 has no evidence; give it checks, expectations'):
        Claim(name='Z9', title='none', statement='None.', source='s', rule='r.')


def test_an_expectation_of_another_relation_or_shape_is_refused():
    for field, value in (('relation', 'no_worse'), ('at', 'equal')):
        fields = {'study': 'lm', 'variant': 'qk/no_v', 'relation': 'better', field: value}
        with pytest.raises(ConfigError, match=f"{field}='{value}' of an expectation must be one"):
            Expectation(**fields)
    with pytest.raises(ConfigError, match="relation='as_reported' needs reported="):
        Expectation('lm', 'qk/no_v', 'as_reported')


@pytest.mark.parametrize('scale', SCALES)
def test_studies_have_the_arms_that_claims_expect(scale):
    for name, claim in declared.claims().items():
        for expected in claim.expected_at(scale):
            study = studies.studies_of([claim], scale)[expected.study]
            for variant in expected.variants:
                # Where a study spends saved parameters in two ways: 'qk/no_o [d_ff]'.
                bare, _, destination = variant.partition(' [')
                assert bare in study.variants, (name, variant)
                assert destination.strip(']') in (*study.destinations, ''), (name, variant)


QUICK = [(path, 'smoke') for path in CONFIGS[::6]]


@pytest.mark.parametrize(
    ('path', 'scale'),
    slow_except(QUICK, itertools.product(CONFIGS, ('smoke', 'cpu', 'gpu'))),
    ids=lambda value: getattr(value, 'stem', value),
)
def test_a_study_of_the_claims_is_tuned_unless_small_or_named_untuned(path, scale):
    study = runpy.run_path(str(path))['get_config'](scale)
    assert study.name == path.stem
    assert bool(study.tuning.seeds) == (scale != 'smoke' and 'untuned' not in study.name)
    assert build_arms(study)


def test_a_damaged_study_does_not_keep_others_from_their_reports(tmp_path, monkeypatch, caplog):
    written = []

    def write_report(path):
        if path.name == 'lm_added':
            raise ReportError('study.json is damaged')
        written.append(path.name)

    # Both studies belong to claim E2; the first is damaged.
    monkeypatch.setattr(studies, 'write_report', write_report)
    for name in ('lm_added', 'lm_untuned'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'results.jsonl').write_text('{}')
    studies.report(declared.chosen(['E2']), tmp_path)
    assert written == ['lm_untuned']
    assert 'no report of study lm_added: study.json is damaged' in caplog.text


def test_each_study_of_the_claims_is_trained_once(tmp_path, monkeypatch):
    """Yardsticks are recorded at scale cpu, of untuned studies too, since claim E2 reads them."""
    trained = []
    recorded = []

    def train_nothing(config, directory, *options):
        trained.append(directory.name)

    monkeypatch.setattr(studies.local_workers, 'run', train_nothing)
    monkeypatch.setattr(
        studies.yardsticks, 'record_finished', lambda path: recorded.append(path.name)
    )
    claims = declared.chosen(['B3', 'B8', 'E3', 'C6'])
    studies.train(studies.studies_of(claims, 'smoke'), 'smoke', tmp_path, 1)
    assert trained == ['translation_cross', 'masked_lm', 'lm_sharing', 'lm_dropped']
    assert not recorded
    studies.train(studies.studies_of(declared.chosen(['E2']), 'cpu'), 'cpu', tmp_path, 1)
    assert recorded == trained[4:] == ['lm_added', 'lm_untuned']
