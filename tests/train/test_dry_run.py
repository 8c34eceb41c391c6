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


def test_pods_by_their_names():
    for name, devices in (('v5p-2x4x4', 32), ('V6e-16x16', 256), ('tpu7x-4x4x4', 128)):
        assert Pod(name).devices == devices
    assert Pod('a100_80gb-16x8').chips == 128
    for name in (
        'a3-2x8',
        'cluster',
        'v5p-64',
        'v5p-4x4',
        'v5p-4x0x4',
        'h100-8',
        'h100-2x8;touch x',
    ):
        with refused(
            f'--dry_run={name} must be a chip and a shape, as in v5p-2x4x4 and .* v4, v5e'
        ):
            Pod(name)


@pytest.fixture(scope='module')
def described(tiny):
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
def data_parallel(described):
    return described(data=8)


def test_memory_is_that_of_the_shardings(described):
    run = described(data=2, fsdp=2, tensor=2, model={'qk_norm': True})
    D, N, H, F, V, T = 32, 2, 16, 128, 256, 16
    matrices = 4 * D * N * H / (2 * 2) + 2 * D * F / (2 * 2)
    norms = 2 * D / 2 + 2 * H / 2  # H of the gains of queries and keys is split over tensor
    parameters = matrices + norms + 2 * V * D / (2 * 2) + T * D / 2 + D / 2
    assert run.memory['parameters'] == 4 * parameters
    assert 0 <= run.memory['optimizer state'] - 8 * parameters <= 4 * 2  # counters
    assert run.memory['batch'] == 2 * 2 * T * (4 + 4 + 4)  # 2 steps, 2 of 8 rows, 3 arrays
    assert run.capacity == 80 * 10**9 and 'WARNING' not in dry_run.text(run)


def test_fsdp_splits_the_state_and_leaves_the_work_as_it_is(described, data_parallel):
    run, whole, kind = described(fsdp=8), data_parallel, 'gradients and temporaries'
    assert whole.memory['parameters'] == 4 * whole.parameters == 8 * run.memory['parameters']
    assert run.memory[kind] < whole.memory[kind]
    assert run.flops == whole.flops and run.tokens == 8 * 16
    assert run.flops == pytest.approx(whole.parameters * 6 * 16, rel=0.5)  # 6 N per token
    assert run.seconds == pytest.approx(run.flops / 989e12)


@pytest.mark.skipif(importlib.util.find_spec('libtpu') is None, reason='libtpu is absent')
def test_a_tpu_slice_is_compiled_by_its_own_compiler(described):
    run = described('v5p-2x2x2', data=8)
    assert run.compiler == 'XLA for TPU v5p:2x2x2 (libtpu)' and run.memory['program'] > 0
    assert run.memory['parameters'] == 4 * run.parameters


def test_warnings_name_what_falls_back_and_a_program_that_does_not_fit(described, monkeypatch):
    monkeypatch.setitem(CHIPS, 'h100', dataclasses.replace(CHIPS['h100'], hbm=300_000))
    kernel = 'attention of 16 queries to 16 keys by einsum: contexts are below 256'
    page = dry_run.text(described(tensor=8, model={'num_heads': 4, 'head_size': 8}))
    assert kernel in page.splitlines()
    assert 'WARNING the program DOES NOT FIT' in page and max(map(len, page.splitlines())) <= 100
    assert 'N=4 does not divide over tensor=8; split over H' in ' '.join(page.split())


def test_a_mesh_or_pod_that_does_not_fit_is_refused(described, monkeypatch):
    # A schedule from outside computes, with which JAX would start on the devices that there are.
    monkeypatch.setattr(dry_run, 'check_parts', lambda *_: pytest.fail('it computes'))
    assert len(jax.devices()) == 8
    for mesh, pod, message in (
        ({}, '1x8', 'has 1 device, but --dry_run=h100-1x8 has 8; .* multiply to 8$'),
        ({'data': 8, 'tensor': 2}, '2x8', 'has 16 devices, more than the 8 fake ones of this proc'),
    ):
        with refused(message):
            described(f'h100-{pod}', **mesh)


def test_the_log_is_a_table_with_a_row_per_run(data_parallel, tmp_path):
    path, run = tmp_path / 'log.csv', data_parallel
    for _ in range(2):
        dry_run.append_to_log(run, path)
    first, second = csv.DictReader(path.read_text().splitlines())
    assert first == second and first['run'] == f'h100-1x8 data=8 1 x {run.parameters}'
    assert (first['compiler'], first['devices']) == (run.compiler, '8')
    assert float(first['state_gb']) == pytest.approx(12 * run.parameters / 1e9, rel=1e-3)
    assert float(first['model_tflop']) == pytest.approx(run.flops / 1e12, rel=1e-5)
