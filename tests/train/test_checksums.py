"""Checksums that are equal on every mesh, and differ after any damage to an array."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from qkattn.config import MeshConfig
from qkattn.train import checksums
from qkattn.train.sharding import make_mesh
from tests.lanes import only

DTYPES = ('bool', 'int8', 'int32', 'uint8', 'uint32', 'float16', 'bfloat16', 'float32')
QUICK = ('bool', 'int32', 'bfloat16')  # one, four and two bytes


def sums(*arrays) -> list[int]:
    return np.asarray(checksums.sums([jnp.asarray(a) for a in arrays])).tolist()


def example(dtype: str, shape=(4, 8)) -> np.ndarray:
    values = np.random.default_rng(0).normal(size=shape) * 100
    return (values > 0) if dtype == 'bool' else values.astype(jnp.dtype(dtype))


def flipped(a: np.ndarray, bit: int) -> np.ndarray:
    """The array with one bit of its bytes inverted."""
    content = bytearray(a.tobytes())
    content[bit // 8] ^= 1 << bit % 8
    return np.frombuffer(bytes(content), a.dtype).reshape(a.shape)


@pytest.mark.parametrize('dtype', only(QUICK, DTYPES))
def test_every_flipped_bit_is_seen(dtype):
    sound = example(dtype)
    step = 8 if dtype == 'bool' else 1  # a boolean has one bit
    damaged = [flipped(sound, bit) for bit in range(0, 8 * sound.nbytes, step)]
    found = jax.vmap(checksums.array_sum)(jnp.stack([sound, *damaged]))
    assert len(set(found.tolist())) == 1 + len(damaged)


@pytest.mark.parametrize('dtype', only(QUICK, DTYPES))
def test_swapped_elements_are_seen(dtype):
    """Also those whose difference is a multiple of a high power of two, as 1.0 and 2.0."""
    flat = np.ravel(example(dtype)).copy()
    flat[:6] = np.array([1, 2, 1, 0, 0, 1]).astype(flat.dtype)
    cases = [flat]
    for i, j in itertools.combinations(range(len(flat)), 2):
        if flat[i] != flat[j]:
            cases.append(flat.copy())
            cases[-1][[i, j]] = flat[[j, i]]
    found = jax.vmap(checksums.array_sum)(jnp.stack(cases)).tolist()
    assert len(set(found)) == len(cases) > 10


def test_swapped_rows_leaves_signs_and_shapes_are_seen():
    a, b = example('float32'), example('float32')[::-1].copy()
    assert sums(a, b) == sums(b, a)[::-1] and len(set(sums(a, b))) == 2
    assert sums(np.float32(0.0)) != sums(np.float32(-0.0))
    assert sums(a) != sums(a[:, ::-1].copy())
    assert sums(np.zeros(4, np.uint32)) != sums(np.zeros(5, np.uint32))
    nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert sums(nan[:1]) != sums(nan[1:])


def test_scalars_and_keys_have_sums():
    keys = jax.random.split(jax.random.key(0), 3)
    assert len({*sums(*keys)}) == 3
    assert sums(np.int32(3)) == sums(np.uint32(3)) != sums(np.int32(4))


def test_eight_bytes_count_as_two_elements():
    wide = np.arange(6, dtype=np.uint64) << 30
    with jax.enable_x64(True):
        assert sums(wide) == sums(wide.view(np.uint32))


def test_the_sum_is_that_of_its_definition():
    def mixed(h):
        h ^= h >> 16
        h = h * 0x85EBCA6B % 2**32
        h ^= h >> 13
        h = h * 0xC2B2AE35 % 2**32
        return h ^ (h >> 16)

    bits = example('float32').view(np.uint32).ravel().tolist()
    assert sums(example('float32')) == [
        sum(mixed(b ^ mixed(i)) for i, b in enumerate(bits)) % 2**32
    ]


MESHES = [
    MeshConfig(),
    MeshConfig(data=2),
    MeshConfig(fsdp=4),
    MeshConfig(trial=2, data=2, fsdp=2),
    MeshConfig(data=2, tensor=4),
    MeshConfig(trial=8),
]


SPLITS = [(('data', 'tensor'), None, 'fsdp'), ('trial', 'fsdp', 'tensor'), (None, None, None)]


@pytest.mark.parametrize('axes', only([(SPLITS[0],)], [(axes,) for axes in SPLITS]))
def test_sums_are_equal_on_every_mesh(axes):
    tree = {dtype: example(dtype, (8, 8, 8)) for dtype in DTYPES} | {'step': np.int32(7)}
    want = sums(*tree.values())
    for config in MESHES:
        mesh = make_mesh(config)
        placed = [
            jax.device_put(a, NamedSharding(mesh, P(*axes) if a.ndim else P()))
            for a in tree.values()
        ]
        found = checksums.sums(placed)
        assert found.is_fully_replicated and len(found.sharding.device_set) == mesh.size
        assert np.asarray(found).tolist() == want


def test_names_are_in_the_order_of_the_sums():
    tree = {'b': np.ones(2), 'a': {'d': np.zeros(2), 'c': np.int32(1)}}
    assert checksums.names(tree) == ['a/c', 'a/d', 'b'] == list(checksums.crc32s(tree))
