"""Which claims there are, that their studies can be built at every scale, and their training."""

import dataclasses
import itertools
import runpy

import pytest

from experiments.claims import declared, studies
from experiments.claims.claim import Claim, ClaimVerdict, Expectation
from experiments.claims.declared import d_two_in_a_row
from experiments.claims.protocol import SCALES
from qkattn.errors import ConfigError, ReportError
from qkattn.study.arms import build_arms
from tests.lanes import slow_except
from tests.processes import ROOT

CONFIGS = sorted((ROOT / 'configs/claims').glob('*.py'))


def test_claims_are_sorted_by_name():
    claims = declared.claims()
    assert list(claims) == sorted(claims)
    assert 'C1' in claims
    assert 'E3' in claims


def test_all_claims_are_chosen_by_default():
    assert declared.chosen([]) == list(declared.claims().values())


def test_claims_are_well_formed():
    claims = declared.claims()
    for name, claim in claims.items():
        assert claim.name == name
        assert claim.statement.endswith('.')
        assert claim.rule.endswith('.')
        assert 0 < len(claim.title) <= 65
        assert claim.title[-1] != '.'
        assert claim.checks or claim.expectations or claim.measures


def test_every_verdict_of_a_study_has_a_meaning():
    """A claim that studies decide says what each verdict means."""
    for name, claim in declared.claims().items():
        if claim.studies:
            for verdict in ClaimVerdict:
                assert claim.meaning_of(verdict), (name, verdict)


def test_every_condition_has_a_meaning():
    for name, claim in declared.claims().items():
        for contexts in claim.conditions:
            assert contexts in claim.meanings, name


def test_meanings_are_sentences_without_a_full_stop():
    for claim in declared.claims().values():
        for meaning in claim.meanings.values():
            assert 0 < len(meaning) <= 250
            assert meaning[-1] not in '. '
            assert '  ' not in meaning


MY_CLAIMS = """
from experiments.claims.claim import Claim

TEXTS = {'title': 'one', 'statement': 'One.', 'source': 's', 'rule': 'r.', 'checks': (list,)}
OF_ANOTHER_NAME = Claim(name='Z3', **TEXTS)
OF_A_DECLARED_NAME = Claim(name='C1', **TEXTS)
"""


@pytest.fixture
def my_claims(tmp_path, monkeypatch):
    """Makes `MY_CLAIMS` importable as the module my_claims."""
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / 'my_claims.py').write_text(MY_CLAIMS)


def test_claims_are_chosen_by_name_or_import_path(my_claims):
    chosen = declared.chosen(['my_claims:OF_ANOTHER_NAME', 'c1'])
    assert [claim.name for claim in chosen] == ['Z3', 'C1']


def test_an_import_path_of_something_else_is_refused(my_claims):
    message = 'my_claims:Claim.* is not a .*claims.claim.Claim'
    with pytest.raises(ConfigError, match=message):
        declared.chosen(['my_claims:Claim'])


def test_a_claim_with_the_name_of_a_declared_one_is_refused(my_claims):
    message = "my_claims:OF_A_DECLARED_NAME' has the name 'C1' of a declared"
    with pytest.raises(ConfigError, match=message):
        declared.chosen(['my_claims:OF_A_DECLARED_NAME'])


def test_a_claim_that_is_declared_twice_is_refused(monkeypatch):
    duplicate = dataclasses.replace(declared.claims()['C1'], title='again')
    monkeypatch.setattr(d_two_in_a_row, 'AGAIN', duplicate, raising=False)

    claims_without_cache = declared.claims.__wrapped__
    with pytest.raises(ConfigError, match="'C1' is declared twice, also in .*d_two_in_a_row"):
        claims_without_cache()


def test_a_claim_without_evidence_is_refused():
    message = 'claim Z9 has no evidence; give it checks, expectations'
    with pytest.raises(ConfigError, match=message):
        Claim(name='Z9', title='none', statement='None.', source='s', rule='r.')


TEXTS = {'title': 'one', 'statement': 'One.', 'source': 's', 'rule': 'r.', 'checks': (list,)}


def test_a_meaning_of_an_unknown_verdict_is_refused():
    message = "meanings of claim Z9 has the key 'true', which must be one of holds, holds only if, "
    with pytest.raises(ConfigError, match=message):
        Claim(name='Z9', **TEXTS, meanings={'true': 'drop it'})


def test_a_meaning_that_is_no_text_is_refused():
    message = r"meanings\['holds'\] of claim Z9 must be a text, not \('drop', 'it'\)"
    with pytest.raises(ConfigError, match=message):
        Claim(name='Z9', **TEXTS, meanings={'holds': ('drop', 'it')})


@pytest.mark.parametrize(('field', 'value'), [('relation', 'no_worse'), ('at', 'equal')])
def test_an_expectation_with_an_unknown_value_is_refused(field, value):
    fields = {'study': 'lm', 'variant': 'qk/no_v', 'relation': 'better'}
    fields[field] = value
    with pytest.raises(ConfigError, match=f"{field}='{value}' of an expectation must be one"):
        Expectation(**fields)


def test_an_expectation_as_reported_needs_the_reported_range():
    with pytest.raises(ConfigError, match="relation='as_reported' needs reported="):
        Expectation('lm', 'qk/no_v', relation='as_reported')


@pytest.mark.parametrize('scale', SCALES)
def test_studies_have_the_arms_that_claims_expect(scale):
    """Every variant in an expectation of a claim is trained by the study of the expectation."""
    for name, claim in declared.claims().items():
        configs = studies.studies_of([claim], scale)
        for expected in claim.expected_at(scale):
            study = configs[expected.study]
            for variant in expected.variants:
                # In 'qk/no_o [d_ff]', d_ff is the destination of the saved parameters.
                bare_variant, _, rest = variant.partition(' [')
                destination = rest.strip(']')
                assert bare_variant in study.variants, (name, variant)
                if destination:
                    assert destination in study.destinations, (name, variant)


QUICK = [(path, 'smoke') for path in CONFIGS[::6]]
ALL = list(itertools.product(CONFIGS, ('smoke', 'cpu', 'gpu')))


@pytest.mark.parametrize(
    ('path', 'scale'),
    slow_except(QUICK, ALL),
    ids=lambda value: getattr(value, 'stem', value),
)
def test_studies_are_tuned_except_smoke_runs_and_untuned_ones(path, scale):
    get_config = runpy.run_path(str(path))['get_config']
    study = get_config(scale)

    should_be_tuned = scale != 'smoke' and 'untuned' not in study.name
    is_tuned = bool(study.tuning.seeds)
    assert is_tuned == should_be_tuned
    assert study.name == path.stem
    assert build_arms(study)


def test_a_damaged_study_does_not_keep_others_from_their_reports(tmp_path, monkeypatch, caplog):
    """Each study of a claim gets a report, even if the report of an earlier study fails.

    Claim E2 has the studies lm_added and lm_untuned.
    """
    reported_studies = []

    def write_report(path):
        """Replaces write_report, and fails for lm_added."""
        if path.name == 'lm_added':
            raise ReportError('study.json is damaged')
        reported_studies.append(path.name)

    monkeypatch.setattr(studies, 'write_report', write_report)
    # Only studies with results get a report.
    for name in ('lm_added', 'lm_untuned'):
        (tmp_path / name).mkdir()
        (tmp_path / name / 'results.jsonl').write_text('{}')

    studies.report(declared.chosen(['E2']), tmp_path)

    assert reported_studies == ['lm_untuned']
    assert 'no report of study lm_added: study.json is damaged' in caplog.text


@pytest.fixture
def trained(monkeypatch):
    """Collects the names of studies that would be trained. Nothing is trained."""
    names = []

    def train_nothing(config, directory, *options):
        names.append(directory.name)

    monkeypatch.setattr(studies.local_workers, 'run', train_nothing)
    return names


@pytest.fixture
def with_yardsticks(monkeypatch):
    """Collects the names of studies whose yardsticks would be recorded. None is computed."""
    names = []

    def record_nothing(directory):
        names.append(directory.name)

    monkeypatch.setattr(studies.yardsticks, 'record_finished', record_nothing)
    return names


def test_each_study_of_several_claims_is_trained_once(trained, with_yardsticks, tmp_path):
    claims = declared.chosen(['B3', 'B8', 'E3', 'C6'])
    configs = studies.studies_of(claims, 'smoke')

    studies.train(configs, 'smoke', tmp_path, workers=1)

    assert trained == ['translation_long', 'masked_lm', 'lm_sharing', 'lm_dropped']
    assert with_yardsticks == []  # because the scale is smoke


def test_yardsticks_of_untuned_studies_are_recorded_too(trained, with_yardsticks, tmp_path):
    """Claim E2 needs the yardsticks of lm_untuned, which is not tuned."""
    configs = studies.studies_of(declared.chosen(['E2']), 'cpu')

    studies.train(configs, 'cpu', tmp_path, workers=1)

    assert trained == ['lm_added', 'lm_untuned']
    assert with_yardsticks == ['lm_added', 'lm_untuned']
