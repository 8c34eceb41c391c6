"""Values that own their matrices: the options, sizes and relations of each."""

import jax
import numpy as np
import pytest
import scipy.linalg

from qkattn.attention import Attention, AttentionSpec, registry
from qkattn.attention.scores.rank import fixed_slices
from qkattn.attention.values.hadamard import factors, transform
from qkattn.errors import SpecError
from tests.attention.layers import (
    SIZES,
    D,
    H,
    N,
    assert_equals_oracle_in_float64,
    error,
    make,
    stream,
    wide,
)
from tests.lanes import only, thinned

COLUMNS = ((5, 0, 31, 7, 9, 30, 2, 3), *(tuple(range(8)),) * 3)
FORMS = [  # beside the registered ones, which the contract tests cover
    'merged_vo(init="product")',
    'low_rank(rank=3)',
    'low_rank(rank=20)',
    'gauge_fixed(init="product")',
    f'gauge_fixed(columns={COLUMNS})',
    'double(size=5)',
    'hadamard(odd="dct")',
]


def fresh(value: str, **options) -> Attention:
    return make(('qk', value), moved=False, **options)


@pytest.mark.parametrize(
    ('value', 'biases', 'num_kv_heads'),
    thinned([(value, *how) for how in ((True, 2), (False, N)) for value in FORMS], every=2),
)
def test_it_equals_the_oracle(value, biases, num_kv_heads):
    layer = make(('qk', value), biases=biases, num_kv_heads=num_kv_heads)
    assert_equals_oracle_in_float64(layer)


def test_merged_and_gauge_fixed_contain_the_standard_pair():
    """Product initialization is that of `vo`: the same function under the same key."""
    with jax.enable_x64(True):
        want_NDE = wide(fresh('vo')).value.matrix(None)
        merged = wide(fresh('merged_vo(init="product")'))
        fixed = wide(fresh('gauge_fixed(init="product")'))
        assert error(merged.value.matrix(None), np.asarray(want_NDE)) < 1e-6
        assert error(fixed.value.matrix(None), np.asarray(want_NDE)) < 1e-4
        assert np.linalg.matrix_rank(merged.value.matrix(None), tol=1e-5).tolist() == [H] * N
        dense_NDE = fresh('merged_vo').value.matrix(None)
        assert np.linalg.matrix_rank(dense_NDE, tol=1e-5).tolist() == [D] * N


def test_the_block_is_the_identity_and_the_rest_is_free():
    for value, columns in (
        ('gauge_fixed', fixed_slices(fresh('vo').spec, N)),
        (f'gauge_fixed(columns={COLUMNS})', COLUMNS),
    ):
        circuit = make(('qk', value)).value
        w_o_NHD = np.asarray(circuit.output_matrix(None))
        for w_o_HD, fixed in zip(w_o_NHD, columns, strict=True):
            np.testing.assert_array_equal(w_o_HD[:, fixed], np.eye(H))
        free = [[d for d in range(D) if d not in fixed] for fixed in columns]
        got = np.stack([w[:, f] for w, f in zip(w_o_NHD, free, strict=True)])
        np.testing.assert_array_equal(got, circuit.w_o_NHC[...])


def test_heads_wrap_around_the_stream():
    spec = AttentionSpec(d_model=10, num_heads=3, num_kv_heads=3, head_size=4)
    assert fixed_slices(spec, 3) == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 0, 1))


@pytest.mark.parametrize('d_model', [8, 32, 256])
def test_the_transform_is_that_of_hadamard(d_model):
    T_DE = scipy.linalg.hadamard(d_model) / d_model**0.5
    assert np.abs(transform(d_model) - T_DE).max() < 1e-15


@pytest.mark.parametrize('d_model', only([8, 12], [8, 12, 20, 24]))
def test_other_widths_write_by_the_transform(d_model):
    options = {'d_model': d_model, 'head_size': d_model // N, 'biases': True}
    with jax.enable_x64(True):
        value = wide(make(('qk', 'hadamard(odd="dct")'), **options)).value
        x_BTD = wide(stream(d_model=d_model))
        want = x_BTD @ transform(d_model) * value.g_o_D[...] + value.b_o_D[...]
        got = value.output(x_BTD.reshape(2, -1, N, d_model // N), None, x_BTD)
        assert error(got, want) < 1e-12
        w_o_NHD = (transform(d_model) * value.g_o_D[...]).reshape(N, -1, d_model)
        B_NDE = np.einsum('DNH,NHE->NDE', value.w_v_DKH[...], w_o_NHD)
        assert error(value.matrix(None)[:, :d_model], B_NDE) < 1e-12


@pytest.mark.parametrize('d_model', [12, 33, 40, 96, 768])
def test_the_transform_is_orthogonal_where_no_hadamard_matrix_is(d_model):
    T_DE = transform(d_model)
    assert np.abs(T_DE @ T_DE.T - np.eye(d_model)).max() < 1e-12
    twos = d_model & -d_model
    assert np.kron(scipy.linalg.hadamard(twos), np.eye(d_model // twos)).shape == T_DE.shape
    # Every output reads every head: no block of the transform is zero.
    heads = next(n for n in range(2, d_model + 1) if d_model % n == 0)
    assert (np.abs(T_DE.reshape(heads, -1, d_model)).max(1) > 1e-3).all()
    left, right = factors(768)
    assert len(left) * len(right) == 768 and max(len(left), len(right)) <= 48


@pytest.mark.parametrize(
    ('value', 'change', 'message'),
    [
        (
            'merged_vo(init="other")',
            {},
            r"merged_vo\(init='other'\) must be one of 'dense', 'product'",
        ),
        ('low_rank(rank=0)', {}, r'low_rank\(rank=0\) must be a whole number from 1 to d_model=32'),
        ('low_rank(rank=2.5)', {}, r'low_rank\(rank=2.5\) must be a whole number'),
        ('double(size=0)', {}, r'double\(size=0\) must be a whole number'),
        ('gauge_fixed', {'num_heads': 1, 'num_kv_heads': 1, 'head_size': D}, 'below d_model'),
        ('gauge_fixed(init="x")', {}, "must be one of 'dense', 'product'"),
        ('gauge_fixed(columns=((0, 1),))', {}, 'for each of num_heads=4 heads, head_size=8'),
        (f'gauge_fixed(columns={((0,) * 8,) * 4})', {}, 'different columns below d_model=32'),
        ('hadamard', {'head_size': 16}, 'hadamard uses slices'),
        ('hadamard', {'d_model': 24, 'head_size': 6}, 'power of two, not 24; the nearest are 16'),
        ('hadamard(odd="no")', {}, "must be one of 'refuse', 'dct'"),
    ],
)
def test_bad_options_are_refused_in_one_sentence(value, change, message):
    with pytest.raises(SpecError, match=message) as refusal:
        registry.check(AttentionSpec(value=value, **{**SIZES, **change}))
    assert '\n' not in str(refusal.value)
