"""Runs on 8 devices that use many features at once, as on a pod, at a small size."""

import shutil

import numpy as np
import pytest

from qkattn.storage.metrics_log import read_metrics
from qkattn.train.loop import train
from tests.data.test_token_formats import END, ids_of_documents, write_llm_c
from tests.runs import SMALL

# The largest difference between losses, which are a few nats. In float32, it comes from sums in
# another order. In bfloat16, which rounds by up to 2^-9, each device rounds the sum over its own
# rows. A gradient then differs by about 2^-9 of itself, and a loss by less than two roundings.
BOUNDS = {'float32': 1e-5, 'bfloat16': 2**-8}


@pytest.fixture
def config_with_shards(tiny, tmp_path):
    """A function make(mesh, model, train, ...) that makes a config that uses many features at once.

    The data are many shards of llm.c, files of token ids. By default a run has two trials,
    rematerialization, and logits in chunks of 8 positions. By default it has 8 steps of 16 rows in
    2 microbatches.
    """
    directory = tmp_path / 'shards'
    ids = ids_of_documents(0, 100)
    # Only eight different tokens, so that a few steps can learn them.
    ids = np.where(ids == END, END, ids % 8 + 1).astype(np.uint16)
    # A shard has at most ten rows, and its last document goes on in the next shard.
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
    """The losses of all trials, from each training record and each evaluation, in order."""
    losses = []
    for record in read_metrics(run / 'metrics.jsonl'):
        is_training = record['kind'] == 'train'
        losses.append(record['loss'] if is_training else record['val_loss'])
    return losses


def assert_close(run, expected, bound):
    """Asserts that the losses of two runs differ by at most `bound`, and that both runs learn.

    A run learns if the loss of every trial falls by more than 0.5 nats.
    """
    losses = losses_of(run)
    expected_losses = losses_of(expected)
    decrease = np.subtract(expected_losses[0], expected_losses[-1])
    assert decrease.min() > 0.5
    for loss, expected_loss in zip(losses, expected_losses, strict=True):
        assert loss == pytest.approx(expected_loss, abs=bound)


@pytest.mark.slow
def test_a_bfloat16_run_on_a_mesh_has_the_losses_of_one_device(config_with_shards, tmp_path):
    """In bfloat16, each device rounds its own sums to 8 bits. So losses agree only to 2^-8."""
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
    """Eight devices have the losses of one device, also if a run resumes on another mesh.

    BOUNDS has the largest difference of losses by dtype, which is due to rounding.
    """
    model = {'compute_dtype': dtype, 'biases': True, 'dropout': 0.1}
    one_device = config_with_shards({}, model)
    eight_devices = config_with_shards({'data': 4, 'fsdp': 2}, model)
    other_mesh = config_with_shards({'trial': 2, 'data': 2, 'fsdp': 2}, model)

    train(one_device, tmp_path / 'one')
    train(eight_devices, tmp_path / 'eight')
    assert_close(tmp_path / 'eight', tmp_path / 'one', BOUNDS[dtype])

    # A run of 8 steps has checkpoints of the steps 4 and 8. Without the checkpoint of step 8 and
    # the results, the copy resumes at step 4.
    after_step_4 = shutil.ignore_patterns('result.json', '8')
    shutil.copytree(tmp_path / 'eight', tmp_path / 'resumed', ignore=after_step_4)
    train(other_mesh, tmp_path / 'resumed')
    assert_close(tmp_path / 'resumed', tmp_path / 'one', BOUNDS[dtype])
