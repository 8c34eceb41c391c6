"""A run as on a pod, at a small size: what is tested apart elsewhere, at once on 8 devices."""

import shutil

import numpy as np
import pytest

from qkattn.storage.metrics_log import read_metrics
from qkattn.train.loop import train
from tests.data.test_token_formats import END, ids_of_documents, write_llm_c
from tests.runs import SMALL

# The largest difference in a loss of a few nats. In float32 it is that of sums in another order. In
# bfloat16, which rounds by up to 2^-9, devices round the sums over their own rows before these are
# added, so a gradient differs by about 2^-9 of itself. The losses then differ by less than two such
# roundings: a step along a gradient that is off by 2^-9 is off by 2^-9 of what it gains.
BOUNDS = {'float32': 1e-5, 'bfloat16': 2**-8}


@pytest.fixture
def sharded(tiny, tmp_path):
    """A run on many shards of llm.c, with accumulation, remat and chunks of logits."""
    path = tmp_path / 'shards'
    ids = ids_of_documents(0, 100)
    ids = np.where(ids == END, END, ids % 8 + 1).astype(np.uint16)  # which a few steps can learn
    # Ten rows a shard or fewer, and documents that go on in the next one.
    for index, shard in enumerate(np.array_split(ids, 20)):
        write_llm_c(path / f'part_train_{index:06}.bin', shard)
    write_llm_c(path / 'part_val_000000.bin', ids[:600])
    data = {
        'name': 'tokens',
        'path': str(path),
        'data_dir': str(tmp_path / 'cache'),
        'documents': f'id={END}',
        'eval_sequences': 16,
    }

    def make(mesh, model, train={}, **sections):  # noqa: B006 (never changed)
        model = {'vocab_size': END + 1, 'remat': 'full'} | model
        train = {'num_steps': 8, 'batch_size': 16, 'accumulation': 2, 'logits_chunk': 8} | train
        return tiny(model=model, data=data, train=train, mesh=mesh, **sections)

    return make


def losses(path):
    """The losses of all trials, in each record of training and of evaluation."""
    records = read_metrics(path / 'metrics.jsonl')
    return [record.get('loss') or record['val_loss'] for record in records]


def assert_close(path, other, bound):
    """The losses of two runs differ by at most `bound`, and both runs learn."""
    other_losses = losses(other)
    assert np.subtract(other_losses[0], other_losses[-1]).min() > 0.5
    for loss, expected in zip(losses(path), other_losses, strict=True):
        assert loss == pytest.approx(expected, abs=bound)


@pytest.mark.slow
def test_on_a_mesh_a_run_in_bfloat16_has_the_losses_of_one_device(sharded, tmp_path):
    model = SMALL | {'compute_dtype': 'bfloat16'}
    steps = {'num_steps': 4}
    trials = {'seeds': (0,)}
    train(sharded({}, model, steps, trials=trials), tmp_path / 'one')
    train(sharded({'data': 2, 'fsdp': 4}, model, steps, trials=trials), tmp_path / 'eight')
    assert_close(tmp_path / 'eight', tmp_path / 'one', BOUNDS['bfloat16'])


@pytest.mark.slow
@pytest.mark.parametrize('dtype', BOUNDS)
def test_resumed_on_another_mesh_a_run_has_the_losses_of_one_device(sharded, tmp_path, dtype):
    """The model has biases and dropout as well, and the second mesh an axis of trials."""
    model = {'compute_dtype': dtype, 'biases': True, 'dropout': 0.1}
    train(sharded({}, model), tmp_path / 'one')
    train(sharded({'data': 4, 'fsdp': 2}, model), tmp_path / 'eight')
    assert_close(tmp_path / 'eight', tmp_path / 'one', BOUNDS[dtype])

    # As it was at step 4, the run goes on.
    after_step_4 = shutil.ignore_patterns('result.json', '8')
    shutil.copytree(tmp_path / 'eight', tmp_path / 'resumed', ignore=after_step_4)
    train(sharded({'trial': 2, 'data': 2, 'fsdp': 2}, model), tmp_path / 'resumed')
    assert_close(tmp_path / 'resumed', tmp_path / 'one', BOUNDS[dtype])
