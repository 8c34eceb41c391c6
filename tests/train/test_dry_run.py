"""Dry runs: memory by the shardings, FLOPs, what falls back, and what does not fit."""

import contextlib
import csv
import dataclasses
import importlib.util
import math

import jax
import pytest

from qkattn.config import MeshConfig
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.train import dry_run
from qkattn.train.pods import CHIPS, pod_of


@pytest.fixture(scope='module')
def on_pod(tiny):
    """Describes a run of one trial of one layer on a host of 8 GPUs."""
    assert len(jax.devices()) == 8  # JAX has started

    def make(mesh, pod='h100-1x8', **model):
        config = tiny(
            trials={'seeds': (0,)},
            model={'tied_embeddings': False, 'num_layers': 1, **model},
            train={'accumulation': 1, 'steps_per_dispatch': 2, 'log_every': 2, 'lifting': 'auto'},
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(dry_run, 'without_cache', contextlib.nullcontext)
            return dry_run.describe(dataclasses.replace(config, mesh=mesh), pod_of(pod))

    return make


@pytest.fixture(scope='module')
def data_parallel(on_pod):
    return on_pod(MeshConfig(data=8))


def test_memory_is_that_of_the_shardings(on_pod):
    run = on_pod(MeshConfig(data=2, fsdp=2, tensor=2), qk_norm=True)
    D, L, N, H, F, V, T = 32, 1, 2, 16, 128, 256, 16
    attention, mlp = 4 * D * N * H / (2 * 2), 2 * D * F / (2 * 2)
    norms = 2 * D / 2 + 2 * H / 2  # H of the gains of queries and keys is split over tensor
    embeddings = 2 * V * D / (2 * 2) + T * D / 2
    parameters = L * (attention + mlp + norms) + embeddings + D / 2
    assert run.memory['parameters'] == 4 * parameters
    counters = 4 * 2
    assert 0 <= run.memory['optimizer state'] - 8 * parameters <= counters
    assert run.memory['batch'] == 2 * 2 * T * (4 + 4 + 4)  # 2 steps, 2 of 8 rows, 3 arrays
    assert run.capacity == 80 * 10**9 and not run.warnings


def test_fsdp_splits_the_state_and_leaves_the_work_as_it_is(on_pod, data_parallel):
    run, whole = on_pod(MeshConfig(fsdp=8)), data_parallel
    assert whole.memory['parameters'] == 4 * whole.parameters == 8 * run.memory['parameters']
    kind = 'gradients and temporaries'
    assert run.memory[kind] < whole.memory[kind]
    assert run.flops == whole.flops and run.tokens == 8 * 16
    assert run.flops == pytest.approx(whole.parameters * 6 * 16, rel=0.5)  # 6 N per token
    assert run.seconds == pytest.approx(run.flops / 989e12)


@pytest.mark.slow
def test_tensor_splits_the_logits(on_pod):
    whole = on_pod(MeshConfig(data=2, fsdp=4), vocab_size=8192)
    split = on_pod(MeshConfig(data=2, fsdp=2, tensor=2), vocab_size=8192)
    kind = 'gradients and temporaries'
    assert split.memory[kind] < 1.1 * whole.memory[kind]


@pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None, reason="libtpu is absent: pip install -e '.[tpu]'"
)
def test_a_tpu_slice_is_compiled_by_its_own_compiler(tiny):
    config = tiny(
        model={'tied_embeddings': False}, train={'accumulation': 1}, trials={'seeds': (0,)}
    )
    run = dry_run.describe(dataclasses.replace(config, mesh=MeshConfig(data=8)), pod_of('v5p-16'))
    assert run.compiler == 'XLA for TPU v5p (libtpu)' and run.memory['program'] > 0
    assert run.memory['parameters'] == 4 * run.parameters and not run.warnings


def test_warnings_name_what_falls_back_and_a_program_that_does_not_fit(on_pod, monkeypatch):
    small = dataclasses.replace(CHIPS['h100'], hbm=300_000)
    monkeypatch.setitem(CHIPS, 'h100', small)
    run = on_pod(MeshConfig(tensor=8), num_heads=4, head_size=8)
    too_large, *fallbacks = run.warnings
    assert too_large.startswith('the program DOES NOT FIT')
    assert any('N=4 does not divide over tensor=8; split over H' in text for text in fallbacks)
    page = dry_run.text(run)
    assert 'WARNING the program DOES NOT FIT' in page
    assert max(map(len, page.splitlines())) <= 100


@pytest.mark.parametrize(
    ('mesh', 'pod', 'message'),
    [
        (MeshConfig(), '1x8', "has 1 device, but topology 'h100-1x8' has 8; .*mesh.data=8$"),
        (MeshConfig(fsdp=4), '1x8', 'has 4 devices.* --config.mesh.data=2$'),
        (MeshConfig(tensor=16), '1x8', r'has 16 devices.*mesh.data=8 --config.mesh.tensor=1$'),
        (MeshConfig(), '4x8', 'mesh.data=32 --config.train.batch_size=32$'),
        (MeshConfig(data=8, tensor=2), '2x8', 'with 8 CPU devices, .* needs 16; run it in a proc'),
    ],
)
def test_a_mesh_or_pod_that_does_not_fit_is_refused(on_pod, mesh, pod, message):
    with pytest.raises(ConfigError, match=message):
        on_pod(mesh, f'h100-{pod}')


def test_more_fake_devices_than_a_process_may_have_are_refused(on_pod, monkeypatch):
    monkeypatch.setattr(dry_run, 'MOST_FAKE_DEVICES', 4)
    with pytest.raises(ConfigError, match='has 8 devices, more than the 4 fake ones of a process'):
        on_pod(MeshConfig(data=8))


def test_without_a_topology_the_present_devices_are_described(tiny, monkeypatch):
    monkeypatch.setattr(dry_run, 'without_cache', contextlib.nullcontext)
    config = dataclasses.replace(tiny(model={'num_layers': 1}), mesh=MeshConfig(trial=2, data=2))
    run = dry_run.describe(config)
    parameters = cost.count(config.model)['total']
    assert run.where == '8 devices (cpu)' and math.prod(run.mesh.values()) == 4
    assert run.trials == 2 and run.memory['parameters'] == 4 * parameters
    kernel = 'attention of 16 queries to 16 keys by einsum: contexts are below 256'
    assert run.seconds is run.capacity is None and kernel in dry_run.text(run).splitlines()


def test_the_log_is_a_table_with_a_row_per_run(data_parallel, tmp_path):
    path, run = tmp_path / 'log.csv', data_parallel
    for _ in range(2):
        dry_run.append_to_log(run, path)
    with path.open() as file:
        first, second = csv.DictReader(file)
    assert first == second and first['run'] == f'h100-1x8 data=8 1 x {run.parameters}'
    assert (first['compiler'], first['devices']) == (run.compiler, '8')
    assert float(first['state_gb']) == pytest.approx(12 * run.parameters / 1e9, rel=1e-3)
    assert float(first['model_tflop']) == pytest.approx(run.flops / 1e12, rel=1e-5)
