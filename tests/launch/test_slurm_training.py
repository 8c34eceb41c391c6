"""Training under launch/slurm.sbatch on a private Slurm: preempted, killed, requeued, finished."""

import contextlib
import os
import re
import signal
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from qkattn.train.exported import load_stack
from tests.launch.launchers import ROOT
from tests.launch.slurm import Jobs
from tests.train.test_loop import outcome

RUN = """
from qkattn.config import *

def get_config():
    return to_config_dict(Config(
        model=ModelConfig(d_model=16, num_layers=1, num_heads=2, context=16),
        data=DataConfig(eval_sequences=8),
        optimizer=OptimizerConfig(warmup_steps=2),
        train=TrainConfig(num_steps=2000, batch_size=4, steps_per_dispatch=1, log_every=10,
                          eval_every=500, checkpoint_every=500, lifting='map'),
        mesh=MeshConfig(data=2),
    ))
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


def process_of(job: str, rank: int) -> int:
    """The number of the process that trains as a rank of a job."""
    wanted = {f'SLURM_JOB_ID={job}'.encode(), f'SLURM_PROCID={rank}'.encode()}
    for path in Path('/proc').glob('[0-9]*'):
        with contextlib.suppress(OSError):
            variables = (path / 'environ').read_bytes().split(b'\0')
            program, *_ = (path / 'cmdline').read_bytes().split(b'\0')
            if wanted <= set(variables) and program.endswith(b'/python'):
                return int(path.name)
    raise AssertionError(f'job {job} has no process {rank}')


@pytest.mark.slow
def test_a_run_of_two_nodes_that_is_preempted_and_crashes_ends_bitwise_equal(training):
    (training.directory / 'run.py').write_text(RUN)

    def submit(workdir: str) -> str:
        flags = ('--config=run.py', f'--workdir={workdir}')
        return training.submit('--nodes=2', '--', 'train', *flags)

    undisturbed = submit('undisturbed')
    assert training.cluster.end(undisturbed) == ('COMPLETED', '0:0', 0), training.log(undisturbed)
    job = submit('disturbed')
    metrics = training.directory / 'disturbed/metrics.jsonl'

    def lines() -> int:
        return metrics.read_bytes().count(b'\n') if metrics.exists() else 0

    def steps_on() -> None:
        before = lines()
        training.cluster.wait(job, lambda _: lines() > before + 5)

    steps_on()
    training.preempt(job)
    steps_on()
    os.kill(process_of(job, 1), signal.SIGKILL)
    steps_on()
    state, code, restarts = training.cluster.end(job)
    log = training.log(job)
    print(log)
    # At least: srun's delayed signals to the killed step can reach the next one, of the same name,
    # because the test shortens the two minutes in between.
    assert (state, code) == ('COMPLETED', '0:0') and restarts >= 2, log
    assert 'DUE TO PREEMPTION' in log and len(re.findall(r'^0: resuming at step ', log, re.M)) >= 2
    assert 'process 1 on 127.0.0.2 ended with exit code 137' in log
    assert f'job {job} crashed (1 of at most 4 times) and is requeued' in log
    assert f'job {job} is done' in log
    directories = [training.directory / name for name in ('undisturbed', 'disturbed')]
    assert outcome(directories[0]) == outcome(directories[1])
    states = [load_stack(directory)[2] for directory in directories]
    jax.tree.map(np.testing.assert_array_equal, *states)
