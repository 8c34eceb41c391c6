"""Dry runs: names of pods, memory and FLOPs per device, warnings and refusals."""

import contextlib
import csv
import dataclasses
import importlib.util

import jax
import pytest

from qkattn.train import dry_run
from qkattn.train.dry_run import CHIPS, Pod
from tests.refusals import refused


@pytest.mark.parametrize(
    ('name', 'num_devices'),
    [('v5p-2x4x4', 32), ('V6e-16x16', 256), ('tpu7x-4x4x4', 128), ('a100_80gb-16x8', 128)],
)
def test_a_pod_name_gives_the_number_of_devices(name, num_devices):
    assert Pod(name).devices == num_devices


@pytest.mark.parametrize(
    'name',
    [
        pytest.param('a3-2x8', id='unknown chip'),
        pytest.param('cluster', id='no shape'),
        pytest.param('v5p-64', id='one side'),
        pytest.param('v5p-4x4', id='two sides of three'),
        pytest.param('v5p-4x0x4', id='a side of zero'),
        pytest.param('h100-8', id='no number of hosts'),
        pytest.param('h100-2x8;touch x', id='a shell command'),
    ],
)
def test_an_invalid_pod_name_is_refused(name):
    message = (
        f'--dry_run={name} must be a chip and a shape, as in v5p-2x4x4 and .*; chips are v4, v5e'
    )
    with refused(message):
        Pod(name)


@pytest.mark.parametrize(
    ('num_bytes', 'size'),
    [
        (0, '0 B'),
        (1023, '1,023 B'),
        (1024, '1.00 KiB'),
        (3 * 2**29, '1.50 GiB'),
        (2**51, '2,048.00 TiB'),
    ],
)
def test_a_size_is_shown_in_the_largest_unit_that_fits(num_bytes, size):
    assert dry_run._size_text(num_bytes) == size


@pytest.fixture(scope='module')
def describe_run(tiny):
    """A function that describes a dry run, which compiles a run for a pod, but trains nothing.

    The run has one trial, a model of one layer, and 2 steps per dispatch. The pod 'h100-1x8' has 1
    host of 8 GPUs. Further keyword arguments are sizes of mesh axes, as in
    describe_run(data=2, fsdp=4).
    """

    def describe(pod='h100-1x8', model={}, **mesh):  # noqa: B006 (never changed)
        model = {'tied_embeddings': False, 'num_layers': 1} | model
        train = {'accumulation': 1, 'steps_per_dispatch': 2, 'log_every': 2, 'lifting': 'auto'}
        config = tiny(trials={'seeds': (0,)}, model=model, train=train, mesh=mesh)
        with pytest.MonkeyPatch.context() as patch:
            # A dry run switches the cache of compiled programs off. Here it stays on, to be fast.
            patch.setattr(dry_run, 'without_cache', contextlib.nullcontext)
            return dry_run.describe(config, pod)

    return describe


@pytest.fixture(scope='module')
def data_parallel(describe_run):
    return describe_run(data=8)


def parameters_per_device(D, N, H, F, V, T, fsdp, tensor):
    """Returns the number of parameters on each device, for a decoder of one layer with QK-norm.

    The mesh axis fsdp splits an array along D or V. The mesh axis tensor splits N, H, F or V.
    """
    both = fsdp * tensor
    attention = 4 * D * N * H / both  # W_Q, W_K, W_V and W_O
    mlp = 2 * D * F / both
    layer_norms = 2 * D / fsdp
    qk_norms = 2 * H / tensor
    embedding_and_output = 2 * V * D / both
    positions = T * D / fsdp
    final_norm = D / fsdp
    layer = attention + mlp + layer_norms + qk_norms
    return layer + embedding_and_output + positions + final_norm


def test_memory_follows_from_the_shardings(describe_run):
    """A device holds its share of the parameters, of the optimizer state and of the batch.

    The mesh has data=2, fsdp=2 and tensor=2, so 2 * 2 * 2 = 8 devices.
    """
    model = {
        'd_model': 32,  # D
        'num_heads': 2,  # N
        'head_size': 16,  # H
        'd_ff': 128,  # F
        'vocab_size': 256,  # V
        'context': 16,  # T
        'qk_norm': True,
    }
    run = describe_run('h100-1x8', data=2, fsdp=2, tensor=2, model=model)

    num_parameters = parameters_per_device(D=32, N=2, H=16, F=128, V=256, T=16, fsdp=2, tensor=2)
    bytes_per_parameter = 4
    assert run.memory['parameters'] == bytes_per_parameter * num_parameters

    # AdamW keeps two moments for each parameter, and up to two counters of 4 bytes.
    bytes_of_moments = 2 * bytes_per_parameter * num_parameters
    bytes_of_counters = run.memory['optimizer state'] - bytes_of_moments
    assert 0 <= bytes_of_counters <= 2 * 4

    # The program takes the batches of 2 steps, of 8 rows of 16 tokens each. Rows are split over
    # data=2 and fsdp=2.
    num_steps = 2
    rows_per_device = 8 / (2 * 2)
    tokens_per_row = 16
    bytes_per_token = 4 + 4 + 4  # token, target and weight
    bytes_per_step = rows_per_device * tokens_per_row * bytes_per_token
    assert run.memory['batch'] == num_steps * bytes_per_step

    # An H100 has 80 GB. The run takes far less, so there is no warning.
    assert run.capacity == 80 * 10**9
    assert 'WARNING' not in dry_run.text(run)


@pytest.fixture(scope='module')
def fully_sharded(describe_run):
    return describe_run(fsdp=8)


@pytest.mark.slow
def test_fsdp_splits_the_state(fully_sharded, data_parallel):
    """With fsdp=8, each of 8 devices holds an eighth of the parameters.

    `data_parallel` is a dry run with the mesh data=8, where each device holds all parameters.
    """
    bytes_per_number = 4
    bytes_of_parameters = bytes_per_number * data_parallel.parameters
    assert data_parallel.memory['parameters'] == bytes_of_parameters
    assert data_parallel.memory['parameters'] == 8 * fully_sharded.memory['parameters']
    content = 'gradients and temporaries'
    assert fully_sharded.memory[content] < data_parallel.memory[content]


@pytest.mark.slow
def test_fsdp_does_not_change_tokens_and_flops(fully_sharded, data_parallel):
    """Both data=8 and fsdp=8 split a batch of 8 rows over 8 devices, so each computes one row.

    fsdp=8 also splits the parameters.
    """
    batch_size = 8
    context = 16
    run = fully_sharded
    assert run.tokens == batch_size * context
    assert run.flops == data_parallel.flops

    # A token takes about 6 FLOPs per parameter. A row has `context` tokens.
    flops_per_device = 6 * data_parallel.parameters * context
    assert run.flops == pytest.approx(flops_per_device, rel=0.5)

    # The time of a step is computed for the peak rate of an H100.
    peak_flops_of_h100 = 989e12
    assert run.seconds == pytest.approx(run.flops / peak_flops_of_h100)


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is absent')
def test_a_tpu_slice_is_compiled_by_its_own_compiler(describe_run):
    run = describe_run('v5p-2x2x2', data=8)
    assert run.compiler == 'XLA for TPU v5p:2x2x2 (libtpu)'
    assert run.memory['program'] > 0
    assert run.memory['parameters'] == 4 * run.parameters


def test_the_page_says_what_does_not_fit_or_falls_back(describe_run, monkeypatch):
    """The page of a dry run warns if the program does not fit into a device's memory.

    The page also names arrays that are split along another axis than the preferred one.
    """
    # The program needs more than 300 kB per device.
    small_chip = dataclasses.replace(CHIPS['h100'], hbm=300_000)
    monkeypatch.setitem(CHIPS, 'h100', small_chip)

    page = dry_run.text(describe_run(tensor=8, model={'num_heads': 4, 'head_size': 8}))

    lines = page.splitlines()
    assert all(len(line) <= 100 for line in lines)
    assert 'WARNING the program DOES NOT FIT' in page

    # The context of the run is 16, so attention uses the kernel `einsum`.
    assert 'attention of 16 queries to 16 keys by einsum: contexts are below 256' in lines

    # N = 4 heads cannot be split over 8 devices, but the head size H = 8 can. Lines are joined,
    # because the note may fill two of them.
    page_on_one_line = ' '.join(page.split())
    assert 'N=4 does not divide over tensor=8; split over H' in page_on_one_line


@pytest.mark.parametrize(
    ('mesh', 'pod', 'message'),
    [
        pytest.param(
            {},
            'h100-1x8',
            'has 1 device, but --dry_run=h100-1x8 has 8; .* multiply to 8$',
            id='the mesh is smaller than the pod',
        ),
        pytest.param(
            {'data': 8, 'tensor': 2},
            'h100-2x8',
            'has 16 devices, more than the 8 fake ones of this process',
            id='the pod has more devices than the process',
        ),
    ],
)
def test_a_mesh_or_pod_of_the_wrong_size_is_refused(describe_run, monkeypatch, mesh, pod, message):
    """A pod needs as many devices as its mesh. h100-1x8 is 1 host of 8 GPUs.

    A fake CPU device stands for each GPU. This process has 8 of them.
    """
    assert len(jax.devices()) == 8
    # The refusal comes before `check_parts`, which may import code that starts JAX.
    monkeypatch.setattr(dry_run, 'check_parts', lambda *_: pytest.fail('it computes'))
    with refused(message):
        describe_run(pod, **mesh)


def test_a_log_whose_last_line_is_not_complete_is_refused(tmp_path):
    """A row that is appended to it would continue the last line."""
    path = tmp_path / 'log.csv'
    path.write_text(dry_run.LOG_COLUMNS)
    with refused(f'--dry_run_log={path} must end with a line break'):
        dry_run.check_log(path)

    path.write_text(f'{dry_run.LOG_COLUMNS}\n')
    dry_run.check_log(path)


def test_the_log_has_a_row_per_dry_run(data_parallel, tmp_path):
    """Each call of `append_to_log` appends a row to a CSV file.

    `data_parallel` is a dry run of one trial for the pod 'h100-1x8', with the mesh data=8.
    """
    path = tmp_path / 'log.csv'
    run = data_parallel

    dry_run.append_to_log(run, path)
    dry_run.append_to_log(run, path)

    first, second = csv.DictReader(path.read_text().splitlines())
    assert second == first
    num_trials = 1
    assert first['run'] == f'h100-1x8 data=8 {num_trials} x {run.parameters}'
    assert first['compiler'] == run.compiler
    assert first['devices'] == '8'

    # The state has 3 numbers of 4 bytes per parameter: the parameter and AdamW's two moments.
    state_gb = 3 * 4 * run.parameters / 1e9
    assert float(first['state_gb']) == pytest.approx(state_gb, rel=1e-3)
    assert float(first['model_tflop']) == pytest.approx(run.flops / 1e12, rel=1e-5)
