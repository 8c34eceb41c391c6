"""Initial values: a slice of one draw per name and seed, which variants share."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention.parameters import weight
from qkattn.config import ModelConfig
from qkattn.model import build
from tests.attention.layers import H, N, by_path, error, make

KEY = jax.random.key(0)
GROUPS = {
    'init_embedding': {'w_embedding_VD', 'w_position_TD', 'w_output_DV'},
    'init_qk': {'w_q_DNH', 'w_k_DKH'},
    'init_vo': {'w_v_DKH', 'w_o_NHD'},
    'init_mlp': {'w_in_DF', 'w_out_FD'},
}
SIZES = {'d_model': 8, 'num_layers': 2, 'num_heads': 2, 'context': 4, 'vocab_size': 16}
SIZES |= {'tied_embeddings': False, 'biases': True}


def draw(shape, key=KEY, name='w'):
    """The initial values of a parameter with standard deviation 1."""
    return np.asarray(weight(key, name, shape, 1.0)[...])


@pytest.mark.parametrize('larger', [(9, 3, 7), (5, 4, 7), (5, 3, 8), (64, 8, 33)])
def test_an_entry_depends_on_its_indices_and_not_on_the_shape(larger):
    corner = draw(larger)[:5, :3, :7]
    np.testing.assert_array_equal(corner, draw((5, 3, 7)))


def test_entries_are_standard_normal():
    w = draw((64, 64, 16))
    # Standard errors: 1/256, 1/362, 0.038.
    assert abs(w.mean()) < 0.02
    assert abs(w.std() - 1) < 0.02
    assert abs((w**4).mean() - 3) < 0.2


def test_entries_are_independent():
    """Initial values are uncorrelated between entries, parameters and seeds.

    A product of two independent standard normal values has mean 0 and standard deviation 1.
    """
    w = draw((64, 64, 16))
    pairs = [
        (w, np.roll(w, 1, axis=0)),  # neighbours along each axis
        (w, np.roll(w, 1, axis=1)),
        (w, np.roll(w, 1, axis=2)),
        (w, draw(w.shape, name='v')),  # another parameter
        (w, draw(w.shape, key=jax.random.key(1))),  # another seed
        (w[:32, 32:], w[32:, :32].swapaxes(0, 1)),  # two corners of one array
    ]
    for first, second in pairs:
        standard_error = first.size**-0.5  # of the mean product
        assert abs((first * second).mean()) < 5 * standard_error


def initial_parameters(**settings):
    """Initial parameters of a small model by path, as in 'blocks.attention.score.w_q_DNH'."""
    return by_path(build(ModelConfig(**SIZES | settings), key=KEY))


def parameter_name(path):
    return path.rpartition('.')[2]


@pytest.mark.parametrize('kind', ['decoder', 'encoder_decoder'])
def test_a_factor_scales_the_matrices_of_its_group(kind):
    """Each of four settings multiplies the initial values of its matrices in GROUPS.

    For example, init_qk multiplies W_Q and W_K.
    """
    before = initial_parameters(kind=kind)
    names = {parameter_name(path) for path in before}
    matrices = {name for name in names if name.startswith('w_')}
    assert matrices == set.union(*GROUPS.values())

    for factor, scaled_names in GROUPS.items():
        doubled = initial_parameters(kind=kind, **{factor: 2.0})
        for path, after in doubled.items():
            is_scaled = parameter_name(path) in scaled_names
            want = 2 * before[path] if is_scaled else before[path]
            np.testing.assert_array_equal(after, want, err_msg=path)


def test_the_initialization_of_nanogpt_is_normal_with_its_standard_deviations():
    """Matrices have the standard deviation 0.02, gains are 1 and biases are 0.

    The last matrix of each residual branch has 0.02 / sqrt(number of branches).
    """
    num_branches = 2 * SIZES['num_layers']  # attention and MLP of each layer
    for path, w in initial_parameters(init='nanogpt').items():
        name = parameter_name(path)
        if name.startswith('w_'):
            std = 0.02
            if name in ('w_o_NHD', 'w_out_FD'):
                std = 0.02 / num_branches**0.5
            mean_square = ((w / std) ** 2).mean()
            standard_error = (2 / w.size) ** 0.5  # of the mean square of normal values
            assert abs(mean_square - 1) < 5 * standard_error, path
        elif name.startswith('g_'):
            assert np.all(w == 1), path
        else:
            assert np.all(w == 0), path


@pytest.mark.parametrize('num_kv_heads', [2, 4])
def test_frozen_is_initially_qk(num_kv_heads):
    options = {'num_kv_heads': num_kv_heads, 'moved': False}
    standard = make(('qk', 'vo'), **options)
    frozen = make(('examples.frozen:Frozen', 'vo'), **options)
    np.testing.assert_array_equal(frozen.score.matrix(), standard.score.matrix())


@pytest.mark.parametrize('num_kv_heads', [2, 4])
def test_a_gauge_fixed_product_is_initially_that_of_its_factors(num_kv_heads):
    options = {'num_kv_heads': num_kv_heads, 'moved': False}
    _, B_NDE = make(('qk', 'vo'), **options).matrix()
    fixed = make(('qk', 'examples.gauge_fixed:GaugeFixedVO(init="product")'), **options)
    # The inverse of a random block limits the precision.
    assert error(fixed.value.matrix(None), B_NDE) < 1e-3


def test_merged_matrices_are_initially_products_of_the_standard_factors():
    """With init="product", merged matrices start as the products of the standard factors.

    `merged` has one matrix in place of W_Q W_K^T, and `merged_vo` has one in place of W_V W_O.
    """
    standard = make(('qk', 'vo'), moved=False)
    merged = make(('merged(init="product")', 'merged_vo(init="product")'), moved=False)

    # Logits are scale * x A[n] y^T, and the scales of the two Scores differ.
    A_NDE, B_NDE = standard.matrix()
    want_logits_NDE = np.asarray(standard.score.scale * A_NDE)
    logits_NDE = merged.score.scale * merged.score.matrix()
    np.testing.assert_allclose(logits_NDE, want_logits_NDE, atol=1e-6)
    assert error(merged.value.matrix(None), B_NDE) < 1e-6

    # In each of N heads, a product of factors with H channels has the rank H.
    for matrix_NDE in merged.matrix():
        ranks_N = np.linalg.matrix_rank(matrix_NDE, tol=1e-5)
        np.testing.assert_array_equal(ranks_N, [H] * N)


def test_variants_start_from_the_same_shared_tensors():
    """Variants of attention start from the same values in the tensors that the variants share.

    `query_free` has no W_Q, and `double(which="q")` has another W_Q.
    """
    standard = make(('qk', 'vo'), moved=False)
    query_free = make(('query_free', 'vo'), moved=False)
    double = make(('double(which="q")', 'vo'), moved=False)
    w_k_DKH = standard.score.w_k_DKH[...]
    w_o_NHD = standard.value.w_o_NHD[...]
    w_v_DKH = standard.value.w_v_DKH[...]

    # Tensors of the same name are equal across variants.
    np.testing.assert_array_equal(query_free.score.w_k_DKH[...], w_k_DKH)
    np.testing.assert_array_equal(double.score.w_k_DKH[...], w_k_DKH)
    np.testing.assert_array_equal(query_free.value.w_o_NHD[...], w_o_NHD)

    # Tensors of different names are different.
    assert jnp.abs(w_k_DKH - w_v_DKH).max() > 0.01
