"""Runs on 8 devices that use many features at once, as on a pod, at a small size."""

import shutil

import numpy as np
import pytest

from qkattn.storage.metrics_log import read_metrics
from qkattn.train.loop import train
from tests.data.test_token_formats import END, ids_of_documents, write_llm_c
from tests.runs import SMALL

# The largest difference between losses, which are a few nats. In float32, it comes from sums in
# another order. In bfloat16, each device also rounds the sum over its own rows. A rounding changes
# a number by up to 2^-9 of itself. The bound allows two roundings: 2 * 2^-9 = 2^-8.
BOUNDS = {'float32': 1e-5, 'bfloat16': 2**-8}


@pytest.fixture
def config_with_shards(tiny, tmp_path):
    """A function make(mesh, model, train, ...) that makes a config of many features at once.

    The data are 20 shards, files of token ids in the format of llm.c. By default, a run has two
    trials, rematerialization, and logits in chunks. It trains 8 steps of 16 rows.
    """
    directory = tmp_path / 'shards'
    ids = ids_of_documents(0, 100)
    # The data have only eight different tokens, so that a model learns within a few steps.
    ids = np.where(ids == END, END, ids % 8 + 1).astype(np.uint16)
    # A shard has at most ten rows. Its last document may continue in the next shard.
    for index, shard in enumerate(np.array_split(ids, 20)):
        write_llm_c(directory / f'part_train_{index:06}.bin', shard)
    write_llm_c(directory / 'part_val_000000.bin', ids[:600])
    data = {
        'name': 'tokens',
        'path': str(directory),
        'data_dir': str(tmp_path / 'cache'),
        'documents': f'id={END}',
        'eval_sequences': 16,
    }

    def make(mesh, model, train={}, **sections):  # noqa: B006 (never changed)
        model = {'vocab_size': END + 1, 'remat': 'full'} | model
        train = {'num_steps': 8, 'batch_size': 16, 'accumulation': 2, 'logits_chunk': 8} | train
        return tiny(model=model, data=data, train=train, mesh=mesh, **sections)

    return make


def losses_of(run):
    """Returns the losses of all trials in each training record and each evaluation, in order."""
    losses = []
    for record in read_metrics(run / 'metrics.jsonl'):
        is_training = record['kind'] == 'train'
        losses.append(record['loss'] if is_training else record['val_loss'])
    return losses


def assert_close(run, expected, bound):
    """Asserts that the losses of two runs differ by at most `bound`, and that they fall.

    In every trial, the loss falls by more than 0.5 nats.
    """
    losses = losses_of(run)
    expected_losses = losses_of(expected)
    decrease = np.subtract(expected_losses[0], expected_losses[-1])
    assert decrease.min() > 0.5
    for loss, expected_loss in zip(losses, expected_losses, strict=True):
        assert loss == pytest.approx(expected_loss, abs=bound)


@pytest.mark.slow
def test_a_bfloat16_run_on_a_mesh_has_the_losses_of_one_device(config_with_shards, tmp_path):
    """In bfloat16, each device rounds its own sums, so losses may differ by up to 2^-8 nats."""
    model = SMALL | {'compute_dtype': 'bfloat16'}
    steps = {'num_steps': 4}
    trials = {'seeds': (0,)}
    one_device = config_with_shards({}, model, steps, trials=trials)
    eight_devices = config_with_shards({'data': 2, 'fsdp': 4}, model, steps, trials=trials)

    train(one_device, tmp_path / 'one')
    train(eight_devices, tmp_path / 'eight')

    assert BOUNDS['bfloat16'] == 2**-8
    assert_close(tmp_path / 'eight', tmp_path / 'one', bound=BOUNDS['bfloat16'])


@pytest.mark.slow
@pytest.mark.parametrize('dtype', BOUNDS)
def test_a_run_resumed_on_another_mesh_has_the_losses_of_one_device(
    config_with_shards, tmp_path, dtype
):
    """Eight devices have the same losses as one device, even if a run resumes on another mesh.

    Rounding may change losses by up to BOUNDS[dtype].
    """
    model = {'compute_dtype': dtype, 'biases': True, 'dropout': 0.1}
    one_device = config_with_shards({}, model)
    eight_devices = config_with_shards({'data': 4, 'fsdp': 2}, model)
    other_mesh = config_with_shards({'trial': 2, 'data': 2, 'fsdp': 2}, model)

    train(one_device, tmp_path / 'one')
    train(eight_devices, tmp_path / 'eight')
    assert_close(tmp_path / 'eight', tmp_path / 'one', BOUNDS[dtype])

    # A run of 8 steps has the checkpoints 4 and 8. The copy has neither checkpoint 8 nor results,
    # so it resumes at step 4.
    after_step_4 = shutil.ignore_patterns('result.json', '8')
    shutil.copytree(tmp_path / 'eight', tmp_path / 'resumed', ignore=after_step_4)
    train(other_mesh, tmp_path / 'resumed')
    assert_close(tmp_path / 'resumed', tmp_path / 'one', BOUNDS[dtype])
