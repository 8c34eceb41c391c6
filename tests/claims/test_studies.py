"""Training the studies of claims: each once, whatever becomes of the others."""

import pytest

from qkattn.claims import studies
from qkattn.claims.claim import Claim, Expectation, Measure
from qkattn.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimizerConfig,
    Study,
    TrainConfig,
    TrialsConfig,
)
from qkattn.errors import DiskError, ProcessError
from qkattn.storage.records import START

RECORDED = []
EVERY = dict.fromkeys(('steps_per_dispatch', 'log_every'), 1)
EVERY |= dict.fromkeys(('num_steps', 'batch_size', 'eval_every', 'checkpoint_every'), 2)


def record(directory, scale):
    RECORDED.append((directory.name, (directory.parent / 'last/results.jsonl').exists()))
    return {'scale': scale}


def claim(name):
    texts = dict.fromkeys(('title', 'statement', 'source', 'rule'), 'A.')
    measures = tuple(Measure(study, lambda _: [], 'a', record) for study in ('first', 'own'))
    expected = tuple(Expectation(s, 'qk/no_o', 'worse') for s in ('first', 'broken', 'last'))
    return Claim(name=name, **texts, expectations=expected, measures=measures)


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
    RECORDED.clear()


def test_studies_are_trained_once_and_measures_recorded_once(small, tmp_path):
    claims = [claim('Z1'), claim('Z2')]
    for _ in range(2):
        failed = studies.train(claims, 'smoke', tmp_path, 1)
        assert list(failed) == ['broken'] and 'multi30k' in str(failed['broken'])
        assert RECORDED == [('first', True), ('own', True)]
    results = studies.Results(tmp_path)
    assert len(results.study('first').study.trials) == 2
    assert [results.has(name) for name in ('first', 'broken', 'own')] == [True, False, True]
    recorded = results.recorded(claims[0].measures[1])
    assert recorded['scale'] == 'smoke' and recorded['seconds'] >= 0
    assert recorded['start'].keys() == START.keys()  # no user, no host, no path


@pytest.mark.parametrize(
    ('error', 'others'), [(ProcessError('workers died'), True), (DiskError('full'), False)]
)
def test_what_stops_the_other_studies(small, tmp_path, monkeypatch, error, others):
    trained = []

    def run(study, *args, **options):
        trained.append(study.name)
        raise error

    monkeypatch.setattr(studies.local_workers, 'run', run)
    if others:
        assert studies.train([claim('Z1')], 'smoke', tmp_path, 1)['last'] is error
        assert trained == ['first', 'broken', 'last']
    else:
        with pytest.raises(DiskError):
            studies.train([claim('Z1')], 'smoke', tmp_path, 1)
        assert trained == ['first']
