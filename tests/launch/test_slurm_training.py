"""Training under launch/slurm.sbatch on a private Slurm: preempted, killed, requeued, finished."""

import json
import os
import re
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from qkattn.config import Config, from_json
from qkattn.run.records import read_json, read_metrics
from tests.experiments.conftest import STUDY
from tests.launch.slurm import ROOT, Jobs
from tests.train.test_resume import final_state, outcome

NODES = 2
RUN = """
from qkattn.config import *

def get_config():
    return to_config_dict(
        Config(
            model=ModelConfig(d_model=16, num_layers=1, num_heads=2, context=16),
            data=DataConfig(eval_sequences=8),
            optimizer=OptimizerConfig(warmup_steps=2),
            train=TrainConfig(num_steps=2000, batch_size=4, steps_per_dispatch=1, log_every=10,
                              eval_every=500, checkpoint_every=500, lifting='map'),
        )
    )
"""


@pytest.fixture
def training(cluster, tmp_path, data_dir):
    """Jobs that train for real, on one CPU device per process."""
    jobs = Jobs(cluster, tmp_path, Path(sys.prefix))
    jobs.environment |= {
        'PYTHONPATH': str(ROOT),
        'QKATTN_DATA': data_dir,
        'JAX_PLATFORMS': 'cpu',
        'XLA_FLAGS': '--xla_backend_optimization_level=0',
    }
    return jobs


@pytest.mark.slow
def test_a_preempted_run_is_requeued_and_ends_bitwise_equal(training):
    (training.directory / 'run.py').write_text(RUN)

    def submit(workdir: str) -> str:
        flags = ('--config=run.py', f'--config.mesh.data={NODES}', f'--workdir={workdir}')
        return training.submit(f'--nodes={NODES}', '--', 'train', *flags)

    undisturbed = submit('undisturbed')
    assert training.cluster.end(undisturbed) == ('COMPLETED', '0:0', 0), training.log(undisturbed)
    job = submit('preempted')
    metrics = training.directory / 'preempted/metrics.jsonl'
    training.cluster.wait(job, lambda _: metrics.exists() and metrics.read_bytes().count(b'\n') > 5)
    training.preempt(job)
    stopped = len(read_metrics(metrics))
    assert training.cluster.end(job) == ('COMPLETED', '0:0', 1), training.log(job)
    log = training.log(job)
    print(log)
    assert 'DUE TO PREEMPTION' in log and 'restart 1' in log and f'job {job} is done' in log
    assert re.search(r'0: .*resuming at step ', log)
    directories = [training.directory / name for name in ('undisturbed', 'preempted')]
    assert stopped < len(read_metrics(metrics))
    assert outcome(directories[0]) == outcome(directories[1])
    config = from_json(Config, read_json(directories[0] / 'config.json', {})['config'])
    states = [final_state(config, directory) for directory in directories]
    jax.tree.map(np.testing.assert_array_equal, *states)


@pytest.mark.slow
def test_a_study_of_an_array_survives_the_kill_of_a_worker(training):
    (training.directory / 'study.py').write_text(STUDY)
    flags = ('--config=study.py', '--workdir=study', '--lease_expiry=8')
    array = training.submit('--workers=3', '--', 'ablate', *flags)
    leases = training.directory / 'study/leases'

    def holders() -> list[dict]:
        return [json.loads(path.read_text()) for path in leases.glob('*.*') if path.stat().st_size]

    training.cluster.wait(f'{array}_1', lambda _: len(holders()) >= 2)
    os.kill(holders()[0]['pid'], signal.SIGKILL)
    ends = [training.cluster.end(f'{array}_{worker}') for worker in (1, 2, 3)]
    logs = [training.log(f'{array}_{worker}') for worker in (1, 2, 3)]
    assert {state for state, _, _ in ends} == {'COMPLETED'}, logs
    assert sorted(restarts for _, _, restarts in ends) == [0, 0, 1], logs
    study = training.directory / 'study'
    plan = [json.loads(line) for line in (study / 'plan.jsonl').read_text().splitlines()]
    for planned in plan:
        records = read_metrics(study / planned['directory'] / 'metrics.jsonl')
        steps = [record['step'] for record in records if record['kind'] == 'train']
        assert steps == list(range(5, 41, 5)), planned
    trials = [json.loads(line) for line in (study / 'results.jsonl').read_text().splitlines()]
    assert len(trials) == sum(planned['trials'] for planned in plan) == 6
    assert (study / 'report.html').exists()
