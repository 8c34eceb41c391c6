"""Runs in a bucket: killed and resumed they equal local ones; damaged checkpoints are found."""

import dataclasses
import functools
import json
import logging
import os
import signal
import subprocess
import sys
import textwrap
import time

import jax
import numpy as np
import pytest

from qkattn import pretrained
from qkattn.config import MeshConfig, to_json
from qkattn.errors import CheckpointError, ConfigError, InUseError
from qkattn.metrics import TIMES
from qkattn.storage.files import as_path
from qkattn.storage.records import read_metrics
from qkattn.train import exported, train
from tests.compiled_programs import FLAGS
from tests.jobs.jobs import ended, start_job
from tests.processes import ROOT

ONE_DEVICE = FLAGS.replace('device_count=8', 'device_count=1')

RUN = """
    import json, sys
    from qkattn.config import Config, from_json
    from qkattn.jobs import bootstrap
    from qkattn.train import train
    bootstrap.start()
    train(from_json(Config, json.loads(sys.argv[2])), sys.argv[1])
"""


@pytest.fixture(scope='module')
def small(tiny):
    return tiny(model={'d_model': 8, 'num_layers': 1}, trials={'seeds': (0,)})


@pytest.fixture(scope='module')
def local(small, tmp_path_factory):
    """The undisturbed run, on a disk."""
    path = tmp_path_factory.mktemp('local') / 'run'
    return path, train(small, path)


def start(config, workdir: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, '-c', textwrap.dedent(RUN), workdir, json.dumps(to_json(config))],
        env={**os.environ, 'PYTHONPATH': str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def require_equal(there: str, local) -> None:
    """Requires the parameters, metrics and results of the run at `there` to be the local ones."""
    path, _ = local
    (_, step, one), (_, expected, other) = map(exported.load_stack, (as_path(there), path))
    assert step == expected
    jax.tree.map(np.testing.assert_array_equal, one, other)
    drop = {*TIMES}
    one, other = (
        [
            {k: v for k, v in record.items() if k not in drop}
            for record in read_metrics(as_path(at) / 'metrics.jsonl')
        ]
        for at in (there, path)
    )
    assert one[:-1] == other[:-1] and [r['step'] for r in one] == [r['step'] for r in other]


def test_a_run_in_a_bucket_equals_the_local_one(bucket, small, local):
    train(small, 'gs://runs/a')
    require_equal('gs://runs/a', local)
    steps = {name.split('/')[2] for name in bucket.names('runs', 'a/checkpoints/')}
    assert steps == {p.name for p in (local[0] / 'checkpoints').iterdir() if p.is_dir()}
    assert not as_path('gs://runs/a/lock').exists()
    assert train(small, 'gs://runs/a')[0]['val_loss'] == local[1][0]['val_loss']


@pytest.mark.slow
def test_killed_and_resumed_it_equals_the_local_one(bucket, small, local):
    for checkpoint in ('4', '8'):
        process = start(small, 'gs://runs/a')
        try:
            while not is_committed(bucket, checkpoint):
                assert process.poll() is None, process.stderr.read()
                time.sleep(0.005)
            if checkpoint == '4':
                with pytest.raises(InUseError, match=f'in use by process {process.pid} on '):
                    train(small, 'gs://runs/a')
            process.send_signal(signal.SIGKILL)
        finally:
            process.kill()
            process.communicate()
        assert as_path('gs://runs/a/lock').exists()
        assert not as_path('gs://runs/a/result.json').exists()
    train(small, 'gs://runs/a')
    require_equal('gs://runs/a', local)


def is_committed(bucket, step: str) -> bool:
    return f'a/checkpoints/{step}/commit_success.txt' in bucket.names('runs')


@pytest.mark.slow
def test_unfinished_and_damaged_checkpoints_are_left_behind(bucket, small, local, caplog):
    train(small, 'gs://runs/a')
    before = 'a/checkpoints/'
    for name in ('commit_success.txt', '_CHECKPOINT_METADATA'):
        del bucket.buckets['runs'][f'{before}12/{name}']
    for name in bucket.names('runs', f'{before}8/state/ocdbt.process_0/d/'):
        data = bytearray(bucket.read('runs', name))
        data[len(data) // 2] ^= 1
        bucket.put('runs', name, bytes(data))
    bucket.put('runs', f'{before}4/metrics/metrics', b'{')
    bucket.put('runs', f'{before}4/commit_success.txt', b'')
    del bucket.buckets['runs']['a/result.json']
    caplog.clear()
    with caplog.at_level(logging.ERROR, 'qkattn'), pytest.raises(CheckpointError, match='damaged'):
        train(small, 'gs://runs/a')
    assert bucket.names('runs', f'{before}12') == []
    assert [r.getMessage().split(' (')[0] for r in caplog.records if r.levelname == 'ERROR'] == [
        'checkpoint 4 is damaged',
        'checkpoint 8 is damaged',
    ]
    assert bucket.names('runs', f'{before}4.damaged/')


def test_parameters_are_exported_to_a_bucket_and_trained_from_there(bucket, small, local, tmp_path):
    model, params = pretrained.load_any(local[0])
    for directory in ('gs://runs/exported', tmp_path / 'exported'):
        assert exported.save(directory, model, params, origin={}) == as_path(directory)
    assert bucket.names('runs') == ['exported/model.safetensors', 'exported/qkattn.json']
    for name in ('model.safetensors', 'qkattn.json'):
        there = bucket.read('runs', f'exported/{name}')
        assert there == (tmp_path / 'exported' / name).read_bytes()
    found, again = pretrained.load_any('gs://runs/exported')
    assert found == model
    jax.tree.map(np.testing.assert_array_equal, again, params)
    with pytest.raises(ConfigError, match='gs://runs/exported already holds parameters'):
        exported.save('gs://runs/exported', model, params, origin={})
    with pytest.raises(ConfigError, match='gs://runs/absent holds neither'):
        exported.load('gs://runs/absent')


@pytest.mark.slow
def test_a_killed_job_of_two_processes_resumes_in_a_bucket(bucket, small, tmp_path):
    config = dataclasses.replace(small, mesh=MeshConfig(data=2))
    train(config, tmp_path / 'local')
    job = start_job(RUN, 2, 'gs://runs/a', json.dumps(to_json(config)), XLA_FLAGS=ONE_DEVICE)
    while not is_committed(bucket, '4'):
        assert all(process.poll() is None for process in job), ended(job)
        time.sleep(0.01)
    for process in job:
        process.kill()
    ended(job)
    job = start_job(RUN, 2, 'gs://runs/a', json.dumps(to_json(config)), XLA_FLAGS=ONE_DEVICE)
    assert [code for code, _, _ in ended(job, 300)] == [0, 0]
    (_, step, one), (_, expected, other) = map(
        exported.load_stack, (as_path('gs://runs/a'), tmp_path / 'local')
    )
    assert step == expected
    jax.tree.map(functools.partial(np.testing.assert_allclose, atol=1e-5), one, other)
    steps = [record['step'] for record in read_metrics(as_path('gs://runs/a/metrics.jsonl'))]
    assert steps == [r['step'] for r in read_metrics(tmp_path / 'local/metrics.jsonl')]
