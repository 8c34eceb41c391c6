"""Training the studies of claims: each once, whatever becomes of the others."""

import pytest

from qkattn.claims import studies
from qkattn.claims.claim import Claim, Expectation, Measure
from qkattn.claims.results import Results
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


def record(directory, scale):
    (directory / 'measures/scale.txt').write_text(scale)
    RECORDED.append((directory.name, (directory.parent / 'last/results.jsonl').exists()))


def claim(name, study):
    measures = (Measure(study, lambda directory: [], record), Measure('own', lambda _: [], record))
    expected = tuple(Expectation(of, 'qk/no_o', 'worse') for of in (study, 'broken', 'last'))
    return Claim(name, 'a', 'A.', 'source', 'Rule.', expectations=expected, measures=measures)


@pytest.fixture
def small(monkeypatch):
    """study_of, which gives two small studies, the data of one of which do not exist."""

    def study_of(name, scale):
        if name == 'own':
            return None
        return Study(
            name=name,
            base=Config(
                model=ModelConfig(num_layers=1, num_heads=1, context=8),
                data=DataConfig(
                    name='multi30k' if name == 'broken' else 'stdlib',
                    path='/nowhere' if name == 'broken' else None,
                    eval_sequences=4,
                ),
                optimizer=OptimizerConfig(warmup_steps=0),
                train=TrainConfig(
                    num_steps=2,
                    batch_size=2,
                    steps_per_dispatch=1,
                    log_every=1,
                    eval_every=2,
                    checkpoint_every=2,
                    lifting='map',
                ),
                trials=TrialsConfig(seeds=(0,), learning_rates=(1e-3,)),
            ),
            variants=('qk/vo', 'qk/no_o'),
            sizes=(f'd_model={16 if scale == "smoke" else 24}',),
            match=None,
        )

    monkeypatch.setattr(studies, 'study_of', study_of)
    RECORDED.clear()


def test_studies_are_trained_once_and_measures_recorded_once(small, tmp_path):
    claims = [claim('Z1', 'first'), claim('Z2', 'first')]
    for _ in range(2):
        failed = studies.train(claims, 'smoke', tmp_path, 1)
        assert list(failed) == ['broken'] and 'multi30k' in str(failed['broken'])
        assert RECORDED == [('first', True), ('own', True)]
    results = Results(tmp_path)
    assert len(results.study('first').study.trials) == 2
    assert [results.has(name) for name in ('first', 'broken', 'own')] == [True, False, True]
    assert (tmp_path / 'own/measures/scale.txt').read_text() == 'smoke'
    recorded = results.provenance(claims[0].measures[1])
    assert recorded['seconds'] >= 0 and recorded['start']['devices']['count'] >= 1
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
    claims = [claim('Z1', 'first')]
    if others:
        assert studies.train(claims, 'smoke', tmp_path, 1)['last'] is error
        assert trained == ['first', 'broken', 'last']
    else:
        with pytest.raises(DiskError):
            studies.train(claims, 'smoke', tmp_path, 1)
        assert trained == ['first']
