"""Which claims there are, that their studies can be built at every scale, and their training."""

import dataclasses
import runpy
from pathlib import Path

import pytest

from qkattn.claims import declared, studies
from qkattn.claims.claim import Claim, Expectation, Measure
from qkattn.claims.declared import d_two_in_a_row
from qkattn.claims.protocol import SCALES
from qkattn.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Study,
    TrainConfig,
    TrialsConfig,
    from_config_dict,
)
from qkattn.errors import ConfigError, DiskError, ProcessError
from qkattn.storage.records import START
from qkattn.study.arms import build_arms
from qkattn.study.tuning import screening_seeds

CONFIGS = sorted((Path(__file__).parents[2] / 'configs/claims').glob('*.py'))


def test_claims_are_in_order_and_well_formed():
    claims = declared.claims()
    assert list(claims) == sorted(claims) and {'C1', 'E3'} <= claims.keys()
    for name, claim in claims.items():
        assert claim.name == name and claim.statement.endswith('.') and claim.rule.endswith('.')
        assert 0 < len(claim.title) <= 65 and claim.title[-1] != '.'
        assert claim.checks or claim.expectations or claim.measures
    assert declared.chosen([]) == list(claims.values())


def test_claims_are_chosen_by_name_or_import_path(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    text = "Claim(name='Z3', title='one', statement='One.', source='s', rule='r.')"
    (tmp_path / 'my_claims.py').write_text(
        f'from qkattn.claims.claim import Claim\n\nCLAIM = {text}\n'
    )
    assert [claim.name for claim in declared.chosen(['my_claims:CLAIM', 'c1'])] == ['Z3', 'C1']
    with pytest.raises(ConfigError, match=r'my_claims:Claim.* is not a qkattn.claims.claim.Claim'):
        declared.chosen(['my_claims:Claim'])
    again = dataclasses.replace(declared.claims()['C1'], title='again')
    monkeypatch.setattr(d_two_in_a_row, 'AGAIN', again, raising=False)
    with pytest.raises(ConfigError, match="'C1' is declared twice, also in .*d_two_in_a_row"):
        declared.claims.__wrapped__()


def test_an_expectation_of_another_relation_or_shape_is_refused():
    for fields, name in (({'relation': 'no_worse'}, 'relation'), ({'at': 'equal'}, 'at')):
        with pytest.raises(ConfigError, match=f"{name}='.*' of an expectation must be one of"):
            Expectation(**{'study': 'lm', 'variant': 'qk/no_v', 'relation': 'better'} | fields)


@pytest.mark.parametrize('scale', SCALES)
def test_studies_have_the_arms_that_claims_expect(scale):
    for name, claim in declared.claims().items():
        for expected in claim.expected_at(scale):
            study = studies.study_of(expected.study, scale)
            for variant in expected.variants:
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


EVERY = dict.fromkeys(('steps_per_dispatch', 'log_every'), 1)
EVERY |= dict.fromkeys(('num_steps', 'batch_size', 'eval_every', 'checkpoint_every'), 2)


@pytest.fixture
def small(monkeypatch):
    """study_of, which gives small studies, the data of one of which do not exist."""

    def study_of(name, scale):
        broken = {'name': 'multi30k', 'path': '/nowhere'} if name == 'broken' else {}
        base = Config(
            model=ModelConfig(num_layers=1, num_heads=1, context=8),
            data=DataConfig(**{'name': 'stdlib', 'eval_sequences': 4} | broken),
            optimizer=OptimizerConfig(warmup_steps=0),
            train=TrainConfig(lifting='map', **EVERY),
            trials=TrialsConfig(seeds=(0,), learning_rates=(1e-3,)),
        )
        variants = ('qk/vo', 'qk/no_o')
        study = Study(name=name, base=base, variants=variants, sizes=('d_model=16',), match=None)
        return None if name == 'own' else study

    monkeypatch.setattr(studies, 'study_of', study_of)


def trained_claim(record):
    """A claim of three studies, the second of which cannot be trained, and of what is recorded."""
    expected = tuple(Expectation(s, 'qk/no_o', 'worse') for s in ('first', 'broken', 'last'))
    return Claim(
        **dict.fromkeys(('name', 'title', 'statement', 'source', 'rule'), 'A.'),
        expectations=expected,
        measures=(Measure('own', lambda _: [], record),),
    )


def test_studies_are_trained_once_and_then_measures_recorded_once(small, tmp_path):
    recorded = []

    def record(scale):
        recorded.append((tmp_path / 'last/results.jsonl').exists())
        return {'scale': scale}

    claims = [trained_claim(record), trained_claim(record)]
    assert claims[0].studies == ('first', 'broken', 'last', 'own')
    for _ in range(2):
        failed = studies.train(claims, 'smoke', tmp_path, 1)
        assert list(failed) == ['broken'] and 'multi30k' in str(failed['broken'])
        assert recorded == [True]
    results = studies.Results(tmp_path)
    assert len(results.study('first').study.trials) == 2
    assert [results.has(name) for name in ('first', 'broken', 'own')] == [True, False, True]
    kept = results.recorded('own')
    assert kept['scale'] == 'smoke' and kept['seconds'] >= 0
    assert kept['start'].keys() == START.keys()  # no user, no host, no path


@pytest.mark.parametrize('error', [ProcessError('workers died'), DiskError('full')])
def test_what_stops_the_other_studies(error, small, tmp_path, monkeypatch):
    trained = []

    def run(study, *args):
        trained.append(study.name)
        raise error

    monkeypatch.setattr(studies.local_workers, 'run', run)
    claim = trained_claim(lambda scale: {})
    if isinstance(error, ProcessError):
        assert studies.train([claim], 'smoke', tmp_path, 1)['last'] is error
        assert trained == ['first', 'broken', 'last']
    else:
        with pytest.raises(DiskError):
            studies.train([claim], 'smoke', tmp_path, 1)
        assert trained == ['first']
