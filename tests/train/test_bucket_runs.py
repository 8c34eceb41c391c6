"""Runs in a bucket equal local ones; damaged checkpoints are named, parameters exported."""

import jax
import numpy as np
import pytest

from qkattn.errors import CheckpointError, ConfigError
from qkattn.metrics import TIMES
from qkattn.storage.files import as_path
from qkattn.storage.metrics_log import read_metrics
from qkattn.train import exported
from qkattn.train.loop import train

URL = 'gs://runs/a'


@pytest.fixture(scope='module')
def small(tiny):
    return tiny(model={'d_model': 8, 'num_layers': 1}, trials={'seeds': (0,)})


@pytest.fixture(scope='module')
def local(small, tmp_path_factory):
    """The undisturbed run, on a disk."""
    path = tmp_path_factory.mktemp('local') / 'run'
    return path, train(small, path)


def test_a_run_in_a_bucket_equals_the_local_one(bucket, small, local):
    train(small, URL)
    (_, step, one), (_, expected, other) = map(exported.load_stack, (as_path(URL), local[0]))
    assert step == expected
    jax.tree.map(np.testing.assert_array_equal, one, other)
    there, here = (
        [{k: v for k, v in record.items() if k not in TIMES} for record in read_metrics(path)]
        for path in (as_path(URL) / 'metrics.jsonl', local[0] / 'metrics.jsonl')
    )
    assert there[:-1] == here[:-1] and [r['step'] for r in there] == [r['step'] for r in here]
    steps = {name.split('/')[2] for name in bucket.names('runs', 'a/checkpoints/')}
    assert steps == {p.name for p in (local[0] / 'checkpoints').iterdir() if p.is_dir()}
    assert not as_path(f'{URL}/lock').exists()
    assert train(small, URL)[0]['val_loss'] == local[1][0]['val_loss']


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
    model, params = exported.load(local[0])
    for directory in ('gs://runs/exported', tmp_path / 'exported'):
        assert exported.save(directory, model, params, origin={}) == as_path(directory)
    assert bucket.names('runs') == ['exported/model.safetensors', 'exported/qkattn.json']
    for name in ('model.safetensors', 'qkattn.json'):
        there = bucket.read('runs', f'exported/{name}')
        assert there == (tmp_path / 'exported' / name).read_bytes()
    loaded, again = exported.load('gs://runs/exported')
    assert loaded == model
    jax.tree.map(np.testing.assert_array_equal, again, params)
    with pytest.raises(ConfigError, match='gs://runs/exported already holds parameters'):
        exported.save('gs://runs/exported', model, params, origin={})
    with pytest.raises(ConfigError, match='gs://runs/absent holds neither'):
        exported.load('gs://runs/absent')
