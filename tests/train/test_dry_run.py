"""Dry runs: names of pods, memory by the shardings, FLOPs, what falls back or does not fit."""

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
def test_a_name_of_a_pod_gives_its_devices(name, num_devices):
    assert Pod(name).devices == num_devices


@pytest.mark.parametrize(
    'name',
    ['a3-2x8', 'cluster', 'v5p-64', 'v5p-4x4', 'v5p-4x0x4', 'h100-8', 'h100-2x8;touch x'],
)
def test_a_name_of_no_pod_is_refused(name):
    message = f'--dry_run={name} must be a chip and a shape, as in v5p-2x4x4 and .* v4, v5e'
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
def test_sizes_are_in_the_largest_unit_that_they_fill(num_bytes, size):
    assert dry_run._size_text(num_bytes) == size


@pytest.fixture(scope='module')
def describe_run(tiny):
    """Describes a run of one trial of one layer, on a host of 8 GPUs."""

    def make(topology='h100-1x8', model={}, **mesh):  # noqa: B006 (never changed)
        model = {'tied_embeddings': False, 'num_layers': 1} | model
        train = {'accumulation': 1, 'steps_per_dispatch': 2, 'log_every': 2, 'lifting': 'auto'}
        config = tiny(trials={'seeds': (0,)}, model=model, train=train, mesh=mesh)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dry_run, 'without_cache', contextlib.nullcontext)
            return dry_run.describe(config, topology)

    return make


@pytest.fixture(scope='module')
def data_parallel(describe_run):
    return describe_run(data=8)


def test_memory_is_that_of_the_shardings(describe_run):
    run = describe_run(data=2, fsdp=2, tensor=2, model={'qk_norm': True})
    D, N, H, F, V, T = 32, 2, 16, 128, 256, 16
    matrices = 4 * D * N * H / (2 * 2) + 2 * D * F / (2 * 2)
    norms = 2 * D / 2 + 2 * H / 2  # H of the gains of queries and keys is split over tensor
    parameters = matrices + norms + 2 * V * D / (2 * 2) + T * D / 2 + D / 2
    assert run.memory['parameters'] == 4 * parameters
    assert 0 <= run.memory['optimizer state'] - 8 * parameters <= 4 * 2  # counters
    assert run.memory['batch'] == 2 * 2 * T * (4 + 4 + 4)  # 2 steps, 2 of 8 rows, 3 arrays
    assert run.capacity == 80 * 10**9 and 'WARNING' not in dry_run.text(run)


@pytest.fixture(scope='module')
def fully_sharded(describe_run):
    return describe_run(fsdp=8)


@pytest.mark.slow
def test_fsdp_splits_the_state(fully_sharded, data_parallel):
    assert data_parallel.memory['parameters'] == 4 * data_parallel.parameters
    assert data_parallel.memory['parameters'] == 8 * fully_sharded.memory['parameters']
    content = 'gradients and temporaries'
    assert fully_sharded.memory[content] < data_parallel.memory[content]


@pytest.mark.slow
def test_fsdp_does_not_change_tokens_and_flops(fully_sharded, data_parallel):
    run = fully_sharded
    assert run.flops == data_parallel.flops
    assert run.tokens == 8 * 16
    assert run.flops == pytest.approx(data_parallel.parameters * 6 * 16, rel=0.5)  # 6 N per token
    assert run.seconds == pytest.approx(run.flops / 989e12)


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is absent')
def test_a_tpu_slice_is_compiled_by_its_own_compiler(describe_run):
    run = describe_run('v5p-2x2x2', data=8)
    assert run.compiler == 'XLA for TPU v5p:2x2x2 (libtpu)' and run.memory['program'] > 0
    assert run.memory['parameters'] == 4 * run.parameters


def test_a_program_that_does_not_fit_or_falls_back_is_warned_of(describe_run, monkeypatch):
    monkeypatch.setitem(CHIPS, 'h100', dataclasses.replace(CHIPS['h100'], hbm=300_000))
    kernel = 'attention of 16 queries to 16 keys by einsum: contexts are below 256'
    page = dry_run.text(describe_run(tensor=8, model={'num_heads': 4, 'head_size': 8}))
    assert kernel in page.splitlines()
    assert 'WARNING the program DOES NOT FIT' in page and max(map(len, page.splitlines())) <= 100
    assert 'N=4 does not divide over tensor=8; split over H' in ' '.join(page.split())


def test_a_mesh_or_pod_that_does_not_fit_is_refused(describe_run, monkeypatch):
    # A schedule from outside computes, with which JAX would start on the devices that there are.
    monkeypatch.setattr(dry_run, 'check_parts', lambda *_: pytest.fail('it computes'))
    assert len(jax.devices()) == 8
    for mesh, pod, message in (
        ({}, '1x8', 'has 1 device, but --dry_run=h100-1x8 has 8; .* multiply to 8$'),
        ({'data': 8, 'tensor': 2}, '2x8', 'has 16 devices, more than the 8 fake ones of this proc'),
    ):
        with refused(message):
            describe_run(f'h100-{pod}', **mesh)


def test_the_log_is_a_table_with_a_row_per_run(data_parallel, tmp_path):
    path = tmp_path / 'log.csv'
    run = data_parallel
    for _ in range(2):
        dry_run.append_to_log(run, path)
    first, second = csv.DictReader(path.read_text().splitlines())
    assert first == second and first['run'] == f'h100-1x8 data=8 1 x {run.parameters}'
    assert (first['compiler'], first['devices']) == (run.compiler, '8')
    assert float(first['state_gb']) == pytest.approx(12 * run.parameters / 1e9, rel=1e-3)
    assert float(first['model_tflop']) == pytest.approx(run.flops / 1e12, rel=1e-5)
