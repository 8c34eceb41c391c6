"""Runs in a bucket: killed and resumed they equal local ones; damaged checkpoints are named."""

import dataclasses
import functools
import json
import time

import jax
import numpy as np
import pytest

from qkattn.config import MeshConfig, to_json
from qkattn.convert.loading import load_any
from qkattn.errors import CheckpointError, ConfigError, InUseError
from qkattn.metrics import TIMES
from qkattn.storage.files import as_path
from qkattn.storage.metrics_log import read_metrics
from qkattn.train import exported, train
from tests.compiled_programs import FLAGS
from tests.jobs.jobs import ended, start_job
from tests.processes import start_python

ONE_DEVICE = FLAGS.replace('device_count=8', 'device_count=1')
URL = 'gs://runs/a'
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


def require_equal(local, compare=np.testing.assert_array_equal) -> None:
    """Requires parameters and metrics of the run in the bucket to be those of the local one."""
    (_, step, one), (_, expected, other) = map(exported.load_stack, (as_path(URL), local))
    assert step == expected
    jax.tree.map(compare, one, other)
    there, here = (
        [{k: v for k, v in record.items() if k not in TIMES} for record in read_metrics(path)]
        for path in (as_path(URL) / 'metrics.jsonl', local / 'metrics.jsonl')
    )
    assert [r['step'] for r in there] == [r['step'] for r in here]
    assert compare is not np.testing.assert_array_equal or there[:-1] == here[:-1]


def until_saved(bucket, step: str, processes) -> None:
    """Waits for a checkpoint of running processes."""
    while f'a/checkpoints/{step}/commit_success.txt' not in bucket.names('runs'):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.005)


def test_a_run_in_a_bucket_equals_the_local_one(bucket, small, local):
    train(small, URL)
    require_equal(local[0])
    steps = {name.split('/')[2] for name in bucket.names('runs', 'a/checkpoints/')}
    assert steps == {p.name for p in (local[0] / 'checkpoints').iterdir() if p.is_dir()}
    assert not as_path(f'{URL}/lock').exists()
    assert train(small, URL)[0]['val_loss'] == local[1][0]['val_loss']


@pytest.mark.slow
def test_killed_and_resumed_it_equals_the_local_one(bucket, small, local):
    for checkpoint in ('4', '8'):
        process = start_python(RUN, URL, json.dumps(to_json(small)))
        try:
            until_saved(bucket, checkpoint, [process])
            if checkpoint == '4':
                with pytest.raises(InUseError, match=f'in use by process {process.pid} on '):
                    train(small, URL)
        finally:
            process.kill()
            process.communicate()
        assert as_path(f'{URL}/lock').exists() and not as_path(f'{URL}/result.json').exists()
    train(small, URL)
    require_equal(local[0])


@pytest.mark.slow
def test_a_killed_job_of_two_processes_resumes_in_a_bucket(bucket, small, tmp_path):
    config = dataclasses.replace(small, mesh=MeshConfig(data=2))
    train(config, tmp_path / 'local')
    job = start_job(RUN, 2, URL, json.dumps(to_json(config)), XLA_FLAGS=ONE_DEVICE)
    until_saved(bucket, '4', job)
    for process in job:
        process.kill()
    ended(job)
    job = start_job(RUN, 2, URL, json.dumps(to_json(config)), XLA_FLAGS=ONE_DEVICE)
    assert [code for code, _, _ in ended(job, 300)] == [0, 0]
    require_equal(tmp_path / 'local', functools.partial(np.testing.assert_allclose, atol=1e-5))


@pytest.mark.slow
def test_unfinished_and_damaged_checkpoints_are_left_behind(bucket, small, caplog):
    train(small, URL)
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
    with pytest.raises(CheckpointError, match='damaged'):
        train(small, URL)
    assert bucket.names('runs', f'{before}12') == []
    assert [r.getMessage().split(' (')[0] for r in caplog.records if r.levelname == 'ERROR'] == [
        'checkpoint 4 is damaged',
        'checkpoint 8 is damaged',
    ]
    assert bucket.names('runs', f'{before}4.damaged/')


def test_parameters_are_exported_to_a_bucket_and_read_from_there(bucket, local, tmp_path):
    model, params = load_any(local[0])
    for directory in ('gs://runs/exported', tmp_path / 'exported'):
        assert exported.save(directory, model, params, origin={}) == as_path(directory)
    assert bucket.names('runs') == ['exported/model.safetensors', 'exported/qkattn.json']
    for name in ('model.safetensors', 'qkattn.json'):
        there = bucket.read('runs', f'exported/{name}')
        assert there == (tmp_path / 'exported' / name).read_bytes()
    loaded, again = load_any('gs://runs/exported')
    assert loaded == model
    jax.tree.map(np.testing.assert_array_equal, again, params)
    with pytest.raises(ConfigError, match='gs://runs/exported already holds parameters'):
        exported.save('gs://runs/exported', model, params, origin={})
    with pytest.raises(ConfigError, match='gs://runs/absent holds neither'):
        exported.load('gs://runs/absent')
