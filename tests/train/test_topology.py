"""Dry runs: names of pods, what is read from compiled programs, memory by the shardings."""

import contextlib
import csv
import dataclasses
import functools
import importlib.util
import math
import os

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.config import MeshConfig
from qkattn.errors import ConfigError
from qkattn.model import cost
from qkattn.train import dry_run, hlo, program, topology
from qkattn.train.pods import CHIPS, FAMILIES, chip_of, pod_of


@pytest.mark.parametrize(
    ('name', 'shape', 'devices', 'hosts'),
    [
        ('v5p-64', (2, 4, 4), 32, 8),  # 64 TensorCores, 2 per chip, 4 chips per host
        ('v5p-8192', (16, 16, 16), 4096, 1024),
        ('v4-8', (2, 2, 1), 4, 1),
        ('v5p-2x4x4', (2, 4, 4), 32, 8),
        ('v6e-256', (16, 16), 256, 64),
        ('v5e-8', (2, 4), 8, 1),
        ('v5litepod-16', (4, 4), 16, 4),
        ('tpu7x-128', (4, 4, 4), 128, 16),  # 64 chips of 2 devices
        ('a3-16x8', (16, 8), 128, 16),
        ('A4-2x4', (2, 4), 8, 2),
    ],
)
def test_names_of_pods(name, shape, devices, hosts):
    pod = pod_of(name)
    assert (pod.shape, pod.devices, pod.hosts) == (shape, devices, hosts)


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('v5q-64', r"'v5q-64' is unknown; did you mean v5p-64\?"),
        ('b3-16x8', r"'b3-16x8' is unknown; did you mean a3-16x8\?"),
        ('v44-4', r"'v44-4' is unknown; did you mean v4-64\?"),
        ('a3x-8', r"'a3x-8' is unknown; did you mean a3-16x8\?"),
        ('a3-2x8;touch x', r"'a3-2x8;touch x' is unknown; did you mean a3-16x8\?"),
        ('v5p-1' + '0' * 18, r'the closest is v5p-12288$'),
        ('cluster', r"'cluster' is unknown; names are v4, v5e, .*, as in v5p-64 .*, as in a3-16x8"),
        ('v5p-63', r'have 8, 16, 32, 64, 128 or a multiple of 128 up to 12,288 .* is v5p-64$'),
        ('v6e-100', r'have 1, 4, 8, 16, 32, 64, 128, 256 chips; the closest is v6e-128$'),
        ('v5p-3x4x4', r'does not exist: .* the closest is v5p-64$'),
        ('a3-16', r'must be hosts x GPUs of a host, as in a3-16x8'),
        ('a3-16x9', r'1 to 4,096 hosts of 1, 2, 4 or 8 GPUs'),
    ],
)
def test_a_pod_that_does_not_exist_is_answered_with_what_is_valid(name, message):
    with pytest.raises(ConfigError, match=message):
        pod_of(name)


def test_every_chip_and_family_has_its_source():
    assert all(chip.source.startswith('https://') for chip in CHIPS)
    assert all(family.source.startswith('https://') for family in FAMILIES.values())
    assert {family.chip for family in FAMILIES.values()} == set(CHIPS)


@pytest.mark.parametrize(
    ('kind', 'name'),
    [('TPU v5 lite', 'v5e'), ('TPU v5', 'v5p'), ('TPU v6 lite', 'v6e'), ('TPU7x', 'tpu7x')]
    + [('NVIDIA H100 80GB HBM3', 'H100'), ('NVIDIA A100-SXM4-80GB', 'A100 80GB'), ('cpu', None)],
)
def test_the_chip_of_a_device_kind(kind, name):
    chip = chip_of(kind)
    assert (chip and chip.name) == name


def compiled(function, mesh, specs, shapes, out):
    """The text of a jitted function of float32 arrays."""
    arguments = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
        for spec, shape in zip(specs, shapes, strict=True)
    ]
    return jax.jit(function, out_shardings=NamedSharding(mesh, out)).lower(*arguments).compile()


@pytest.fixture(scope='module')
def mesh():
    return jax.make_mesh((4, 2), ('data', 'tensor'), axis_types=(AxisType.Auto,) * 2)


def totals(work):
    """Count and bytes by kind and size of the groups."""
    table = {}
    for one in work.collectives:
        key = one.kind, one.groups.shape[1]
        count, size = table.get(key, (0, 0))
        table[key] = count + one.times, size + one.times * one.size
    return table


def test_a_sum_inside_of_scans_counts_as_often_as_it_runs(mesh):
    """5 x 3 sums of 64 x 32 floats over data."""

    def body(carry, _):
        inner = lambda c, _: (jax.lax.psum(jnp.sin(c), 'data'), None)  # noqa: E731
        return jax.lax.scan(inner, carry, length=3)[0], None

    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False)
    def sums(x):
        return jax.lax.scan(body, x, length=5)[0]

    work = hlo.read(compiled(sums, mesh, [P()], [(64, 32)], P()).as_text(), 8)
    assert totals(work) == {('all-reduce', 4): (15, 15 * 64 * 32 * 4)}
    assert work.unknown_loops == 0


def test_gathered_and_scattered_arrays_count_whole(mesh):
    @functools.partial(jax.shard_map, mesh=mesh, in_specs=P('data'), out_specs=P('data'))
    def step(w):  # [16, 8] of [64, 8]
        whole = jax.lax.all_gather(w, 'data', tiled=True)
        return jax.lax.psum_scatter(jnp.sin(whole), 'data', tiled=True)

    work = hlo.read(compiled(step, mesh, [P('data')], [(64, 8)], P('data')).as_text(), 8)
    assert totals(work) == {
        ('all-gather', 4): (1, 64 * 8 * 4),
        ('reduce-scatter', 4): (1, 64 * 8 * 4),
    }
    assert {tuple(row) for one in work.collectives for row in one.groups.tolist()} == {
        (0, 2, 4, 6),
        (1, 3, 5, 7),
    }


def test_flops_and_bytes_of_a_loop_count_every_iteration(mesh):
    def products(w, x):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, w)[0]

    args = [P(), P('data')], [(7, 64, 64), (512, 64)], P('data')
    work = hlo.read(compiled(products, mesh, *args).as_text(), 8)
    matmul = 7 * 2 * 128 * 64 * 64  # 512 rows over 4 devices
    assert matmul <= work.flops <= 1.05 * matmul
    once = compiled(products, mesh, *args).cost_analysis()
    assert once['flops'] < 0.2 * matmul  # XLA's own count
    assert 3 * once['bytes accessed'] < work.bytes_accessed < 7 * once['bytes accessed']


@pytest.mark.parametrize(
    ('written', 'groups'),
    [
        ('replica_groups={{0,2},{1,3}}, x', [[0, 2], [1, 3]]),
        ('replica_groups={}, x', [[0, 1, 2, 3, 4, 5, 6, 7]]),
        ('replica_groups=[2,4]<=[8], x', [[0, 1, 2, 3], [4, 5, 6, 7]]),
        ('replica_groups=[2,4]<=[4,2]T(1,0), x', [[0, 2, 4, 6], [1, 3, 5, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'a'}, x", [[0, 4], [1, 5], [2, 6], [3, 7]]),
        ("replica_groups=mesh['a'=2,'b'=4] {'b':(2)2}", [[0, 1], [2, 3], [4, 5], [6, 7]]),
        (
            "replica_groups=mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'b'}, x",
            [[0, 2, 4, 6], [1, 3, 5, 7]],
        ),
        ('source_target_pairs={{0,1},{1,0}}, x', [[0, 1], [1, 0]]),
    ],
)
def test_notations_of_groups(written, groups):
    assert hlo._groups(written, 8).tolist() == groups


# What compilers of accelerators write: collectives that start and end, a collective in three parts
# that overlaps with other work, a sum fused with the slice that is kept, loops without a count.
# ruff: noqa: E501
ACCELERATOR = """HloModule m

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%all-reduce-scatter (p: f32[8,16]) -> f32[2,16] {
  %p = f32[8,16]{1,0} parameter(0)
  %all-reduce.1 = f32[8,16]{1,0} all-reduce(%p), replica_groups={{0,1,2,3}}, to_apply=%add
  ROOT %kept = f32[2,16]{1,0} slice(%all-reduce.1), slice={[0:2], [0:16]}
}

%starts (p: f32[2,16]) -> f32[8,16] {
  %p = f32[2,16]{1,0} parameter(0)
  %all-gather.5 = f32[8,16]{1,0} all-gather(%p), channel_id=8, replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %custom-call = f32[8,16]{1,0} custom-call(%all-gather.5), custom_call_target="AsyncCollectiveStart"
}

%ends (p: f32[2,16]) -> f32[8,16] {
  %p = f32[2,16]{1,0} parameter(0)
  %all-gather.6 = f32[8,16]{1,0} all-gather(%p), channel_id=8, replica_groups={{0,1,2,3}}, dimensions={0}, frontend_attributes={chain_id="0"}
  ROOT %custom-call = f32[8,16]{1,0} custom-call(%p, %all-gather.6), custom_call_target="AsyncCollectiveDone"
}

%body (state: (s32[], f32[2,16])) -> (s32[], f32[2,16]) {
  %state = (s32[], f32[2,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %one = s32[] constant(1)
  %next = s32[] add(%i, %one)
  %x = f32[2,16]{1,0} get-tuple-element(%state), index=1
  %started = f32[8,16]{1,0} fusion(%x), kind=kCustom, calls=%starts
  %ended = f32[8,16]{1,0} fusion(%x), kind=kCustom, calls=%ends
  %all-gather-start = (f32[2,16]{1,0}, f32[8,16]{1,0}) all-gather-start(%x), replica_groups={{0,1,2,3}}, dimensions={0}
  %all-gather-done = f32[8,16]{1,0} all-gather-done(%all-gather-start)
  %y = f32[2,16]{1,0} fusion(%all-gather-done), kind=kCustom, calls=%all-reduce-scatter
  ROOT %out = (s32[], f32[2,16]{1,0}) tuple(%next, %y)
}

%condition (state: (s32[], f32[2,16])) -> pred[] {
  %state = (s32[], f32[2,16]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %bound = s32[] constant(6)
  ROOT %less = pred[] compare(%i, %bound), direction=LT
}

ENTRY %main (x: f32[2,16]) -> (s32[], f32[2,16]) {
  %x = f32[2,16]{1,0} parameter(0)
  %zero = s32[] constant(0)
  %init = (s32[], f32[2,16]{1,0}) tuple(%zero, %x)
  ROOT %loop = (s32[], f32[2,16]{1,0}) while(%init), condition=%condition, body=%body
}
"""


def test_programs_of_accelerators():
    work = hlo.read(ACCELERATOR, 4)
    whole = 8 * 16 * 4
    assert totals(work) == {
        ('reduce-scatter', 4): (6, 6 * whole),
        ('all-gather', 4): (12, 12 * whole),
    }
    unbounded = ACCELERATOR.replace('%bound = s32[] constant(6)', '%bound = s32[] add(%i, %i)')
    work = hlo.read(unbounded, 4)
    assert work.unknown_loops == 1 and totals(work)['reduce-scatter', 4] == (1, whole)


@pytest.fixture(scope='module')
def on_pod(tiny):
    """Describes a run of one trial of one layer on a host of 8 GPUs."""
    assert len(jax.devices()) == 8  # JAX has started

    def make(mesh, pod='h100-1x8', **model):
        fields = {'tied_embeddings': False, 'num_layers': 1, **model}
        config = tiny(
            trials={'seeds': (0,)},
            model=fields,
            train={'accumulation': 1, 'steps_per_dispatch': 2, 'log_every': 2, 'lifting': 'auto'},
        )
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(topology, 'without_cache', contextlib.nullcontext)
            return topology.describe(dataclasses.replace(config, mesh=mesh), pod_of(pod))

    return make


@pytest.fixture(scope='module')
def data_parallel(on_pod):
    return on_pod(MeshConfig(data=8))


def test_a_data_parallel_step_sums_the_gradients(data_parallel):
    run = data_parallel
    gradients = 4 * run.parameters
    (row,) = run.collectives
    assert (row.kind, row.axes, row.group) == ('all-reduce', 'data', 8)
    # The loss, its weights and the like are scalars.
    assert gradients <= row.size <= gradients + 64
    seconds = 2 * 7 / 8 * row.size / 450e9
    assert row.seconds == pytest.approx(seconds) and run.seconds['links'] == pytest.approx(seconds)
    assert run.model_flops < run.flops < 2 * run.model_flops
    assert run.memory['parameters'] == gradients and run.tokens == 8 * 16


@pytest.mark.skipif(
    importlib.util.find_spec('libtpu') is None, reason="libtpu is absent: pip install -e '.[tpu]'"
)
def test_a_tpu_slice_is_compiled_by_its_own_compiler(tiny):
    config = tiny(
        model={'tied_embeddings': False}, train={'accumulation': 1}, trials={'seeds': (0,)}
    )
    run = topology.describe(dataclasses.replace(config, mesh=MeshConfig(data=8)), pod_of('v5p-16'))
    gradients = 4 * run.parameters
    assert run.compiler == 'XLA for TPU v5p (libtpu)' and run.memory['program'] > 0
    assert gradients <= sum(row.size for row in run.collectives) <= gradients + 64
    assert run.memory['parameters'] == gradients and not run.warnings


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


def test_fsdp_moves_parameters_and_no_activations(on_pod, data_parallel):
    run = on_pod(MeshConfig(fsdp=8))
    parameters = 4 * run.parameters
    # Gathered for the forward and for the backward pass; gradients summed.
    assert sum(row.size for row in run.collectives) < 3 * parameters
    assert {row.kind for row in run.collectives} == {'all-gather', 'all-reduce'}
    assert run.flops < data_parallel.flops
    kind = 'gradients and temporaries'
    assert run.memory[kind] < data_parallel.memory[kind]


@pytest.mark.slow
def test_tensor_splits_the_logits(on_pod):
    whole = on_pod(MeshConfig(data=2, fsdp=4), vocab_size=8192)
    split = on_pod(MeshConfig(data=2, fsdp=2, tensor=2), vocab_size=8192)
    kind = 'gradients and temporaries'
    assert split.memory[kind] < 1.1 * whole.memory[kind]
    assert split.flops < 1.5 * whole.flops


def test_what_does_not_fit_or_falls_back_is_warned_of(on_pod, monkeypatch):
    small = dataclasses.replace(FAMILIES['h100'].chip, hbm=300_000)
    family = dataclasses.replace(FAMILIES['h100'], chip=small)
    monkeypatch.setitem(FAMILIES, 'h100', family)
    run = on_pod(MeshConfig(tensor=8), num_heads=4, head_size=8)
    too_large, *fallbacks = run.warnings
    assert 'DOES NOT FIT' in too_large and '300,000' not in too_large
    assert any('N=4 does not divide over tensor=8; split over H' in text for text in fallbacks)
    page = dry_run.text(run)
    assert 'WARNING the program DOES NOT FIT' in page
    assert max(map(len, page.splitlines())) <= 100


XLA_SAYS = (
    b'W1122 07:56:38.242188 31691 spmd_partitioner.cc:656] [SPMD] Involuntary full '
    b'rematerialization. The compiler cannot go from sharding {devices=[1,4]<=[4]} to '
    b'{devices=[4,1]<=[4]} efficiently for HLO operation %all-reduce = bf16[8] all-reduce(%x)\n'
)


def test_an_involuntary_rematerialization_is_warned_of(on_pod, monkeypatch):
    lower = program.lower

    class Lowered:
        def __init__(self, *arguments):
            self.lowered = lower(*arguments)

        def compile(self, **options):
            os.write(2, XLA_SAYS)  # as XLA does, beside sys.stderr
            return self.lowered.compile(**options)

    monkeypatch.setattr(program, 'lower', Lowered)
    (warning,) = on_pod(MeshConfig(data=8)).warnings
    assert '1 array whole' in warning and warning.endswith('rematerialization): %all-reduce')


@pytest.mark.parametrize(
    ('mesh', 'message'),
    [
        (MeshConfig(), "has 1 device, but topology 'h100-1x8' has 8; .*--config.mesh.data=8$"),
        (MeshConfig(fsdp=4), 'has 4 devices.* --config.mesh.data=2$'),
        (MeshConfig(tensor=16), 'has 16 devices.* --config.mesh.data=8 --config.mesh.tensor=1$'),
    ],
)
def test_a_mesh_has_as_many_devices_as_the_pod(on_pod, mesh, message):
    with pytest.raises(ConfigError, match=message):
        on_pod(mesh)


def test_more_fake_devices_than_a_process_has_are_refused(on_pod, monkeypatch):
    with pytest.raises(
        ConfigError, match='with 8 CPU devices, but the dry run needs 16; run it in'
    ):
        on_pod(MeshConfig(data=8, tensor=2), 'h100-2x8')
    monkeypatch.setattr(topology, 'MOST_FAKE_DEVICES', 4)
    with pytest.raises(ConfigError, match='has 8 devices, more than the 4 fake ones of a process'):
        on_pod(MeshConfig(data=8))


def test_the_advice_has_a_batch_that_divides(tiny):
    with pytest.raises(ConfigError, match='--config.mesh.data=32 --config.train.batch_size=64$'):
        topology.describe(tiny(), pod_of('v5p-64'))  # 2 microbatches of 4 rows


def test_links_between_hosts_are_the_network():
    pod = pod_of('a3-2x4')
    within = hlo.Collective('all-gather', np.arange(8).reshape(2, 4), 4000, 1)
    assert topology._link_seconds(within, pod) == pytest.approx(3 / 4 * 4000 / 450e9)
    across = hlo.Collective('all-reduce', np.arange(8)[None], 4000, 1)
    # 100 GB/s per host of 8 GPUs, 12.5 per GPU; 4 GPUs of a host share the load.
    assert topology._link_seconds(across, pod) == pytest.approx(2 * 7 / 8 * 4000 / (4 * 12.5e9))


def test_without_a_topology_the_present_devices_are_described(tiny, monkeypatch):
    monkeypatch.setattr(topology, 'without_cache', contextlib.nullcontext)
    config = dataclasses.replace(tiny(model={'num_layers': 1}), mesh=MeshConfig(trial=2, data=2))
    run = topology.describe(config)
    parameters = cost.count(config.model)['total']
    assert run.where == '8 devices (cpu)' and math.prod(run.mesh.values()) == 4
    assert run.trials == 2 and run.memory['parameters'] == 4 * parameters
    # Trials exchange nothing but the metrics, which every process gets.
    assert {row.axes for row in run.collectives} == {'data', 'trial'}
    assert all(row.size <= 64 for row in run.collectives if 'trial' in row.axes)
    page = dry_run.text(run)
    assert run.seconds == {} and 'time of a step' not in page
    kernel = 'attention of 16 queries to 16 keys by einsum: contexts are below 256'
    assert kernel in page.splitlines()


def test_the_log_is_a_table_with_a_row_per_run(data_parallel, tmp_path):
    path, run = tmp_path / 'log.csv', data_parallel
    for _ in range(2):
        dry_run.log(run, path)
    with path.open() as file:
        first, second = csv.DictReader(file)
    assert first == second and first['run'] == f'h100-1x8 data=8 1 x {run.parameters}'
    assert float(first['all-reduce_gb']) == pytest.approx(run.collectives[0].size / 1e9, rel=1e-5)
    assert float(first['state_gb']) == pytest.approx(12 * run.parameters / 1e9, rel=1e-3)
    assert first['all-gather_gb'] == '0' and float(first['links_ms']) > 0
    path.write_text('run,other\n')
    with pytest.raises(ConfigError, match='is another table; give another file'):
        dry_run.log(run, path)
