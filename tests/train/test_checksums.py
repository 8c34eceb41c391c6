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
def test_every_flipped_bit_and_every_swap_is_seen(dtype):
    """Also swaps of elements whose difference is a multiple of a high power of two: 1.0 and 2.0."""
    sound = example(dtype)
    step = 8 if dtype == 'bool' else 1  # a boolean has one bit
    cases = [sound, *(flipped(sound, bit) for bit in range(0, 8 * sound.nbytes, step))]
    assert len(set(jax.vmap(checksums.array_sum)(jnp.stack(cases)).tolist())) == len(cases)
    flat = np.ravel(sound).copy()
    flat[:6] = np.array([1, 2, 1, 0, 0, 1]).astype(flat.dtype)
    cases = [flat]
    for i, j in itertools.combinations(range(len(flat)), 2):
        if flat[i] != flat[j]:
            cases.append(flat.copy())
            cases[-1][[i, j]] = flat[[j, i]]
    assert len(set(jax.vmap(checksums.array_sum)(jnp.stack(cases)).tolist())) == len(cases) > 10


def test_swapped_rows_and_leaves_signs_lengths_and_keys_are_seen():
    a, b = example('float32'), example('float32')[::-1].copy()
    assert sums(a, b) == sums(b, a)[::-1] and len(set(sums(a, b))) == 2
    assert sums(np.float32(0.0)) != sums(np.float32(-0.0))
    assert sums(np.zeros(4, np.uint32)) != sums(np.zeros(5, np.uint32))
    nan = np.array([0x7FC00000, 0x7FC00001], np.uint32).view(np.float32)
    assert sums(nan[:1]) != sums(nan[1:])
    assert len({*sums(*jax.random.split(jax.random.key(0), 3))}) == 3


def test_the_sum_is_that_of_its_definition():
    def mixed(h):
        h ^= h >> 16
        h = h * 0x85EBCA6B % 2**32
        h ^= h >> 13
        h = h * 0xC2B2AE35 % 2**32
        return h ^ (h >> 16)

    bits = example('float32').view(np.uint32).ravel().tolist()
    total = sum(mixed(b ^ mixed(i)) for i, b in enumerate(bits)) % 2**32
    assert sums(example('float32')) == [total]
    wide = np.arange(6, dtype=np.uint64) << 30  # eight bytes count as two elements
    with jax.enable_x64(True):
        assert sums(wide) == sums(wide.view(np.uint32))


MESHES = (
    *({}, {'data': 2}, {'fsdp': 4}, {'trial': 2, 'data': 2, 'fsdp': 2}),
    *({'data': 2, 'tensor': 4}, {'trial': 8}),
)
SPLITS = [(('data', 'tensor'), None, 'fsdp'), ('trial', 'fsdp', 'tensor'), (None, None, None)]


@pytest.mark.parametrize('axes', only([(SPLITS[0],)], [(axes,) for axes in SPLITS]))
def test_sums_are_equal_on_every_mesh(axes):
    tree = {dtype: example(dtype, (8, 8, 8)) for dtype in DTYPES} | {'step': np.int32(7)}
    expected = sums(*tree.values())
    for sizes in MESHES:
        mesh = make_mesh(MeshConfig(**sizes))
        placed = [
            jax.device_put(a, NamedSharding(mesh, P(*axes) if a.ndim else P()))
            for a in tree.values()
        ]
        actual = checksums.sums(placed)
        assert actual.is_fully_replicated and len(actual.sharding.device_set) == mesh.size
        assert np.asarray(actual).tolist() == expected


def test_names_are_in_the_order_of_the_sums():
    tree = {'b': np.ones(2), 'a': {'d': np.zeros(2), 'c': np.int32(1)}}
    assert checksums.names(tree) == ['a/c', 'a/d', 'b']
