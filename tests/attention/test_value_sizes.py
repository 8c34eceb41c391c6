"""Parameters, cache and initial outputs of the Values."""

import jax
import jax.numpy as jnp
import pytest

from tests.attention.layers import D, H, N, make

M = D * N * H  # parameters of one projection


@pytest.mark.parametrize(
    ('variant', 'count', 'floats'),
    [
        ('qk/merged_vo', 2 * M + N * D * D, N * H + D),
        ('merged/merged_vo', 2 * N * D * D, D),
        ('key_free/merged_vo', M + N * D * D, D),
        ('qk/low_rank(rank=3)', 2 * M + 2 * D * N * 3, N * H + N * 3),
        ('qk/gauge_fixed', 4 * M - N * H * H, 2 * N * H),
        ('qk/double(size=5)', 3 * M + D * 5 + 5 * N * H, 2 * N * H),
        ('qk/double', 4 * M + D * D, 2 * N * H),
        ('qk/hadamard', 3 * M + D, 2 * N * H),
        ('qk/k_is_v', 3 * M, N * H),
        ('shared_qk/k_is_v', 2 * M, N * H),
        ('qk/q_is_v', 3 * M, 2 * N * H),
        ('qk/v_is_k_transposed', 3 * M, 2 * N * H),
        ('qk/o_is_v', 3 * M, 2 * N * H),
        ('qk/o_is_k', 3 * M, 2 * N * H),
        ('qk/o_is_q', 3 * M, 2 * N * H),
        ('qk/subspace', 2 * M, N * H),
        ('shared_qk/subspace', M, N * H),
        ('latent(size=6)/latent', 2 * M + D * 6 + 2 * 6 * N * H, 6),
    ],
)
def test_nothing_is_stored_or_cached_twice(variant, count, floats):
    layer = make(tuple(variant.split('/')))
    assert sum(leaf.size for leaf in jax.tree.leaves(layer)) == count
    assert sum(a.size for a in layer.cached(jnp.zeros((1, 1, D))).values()) == floats


@pytest.mark.parametrize(
    ('d_model', 'num_heads', 'gain'),
    [(64, 4, 0.25), pytest.param(256, 1, 1.0, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize(
    'variant',
    [
        *(f'qk/{value}' for value in ('vo', 'no_v', 'no_o', 'merged_vo', 'gauge_fixed', 'double')),
        *(f'qk/low_rank(rank={rank})' for rank in (3, 20)),
        *(f'qk/{value}' for value in ('hadamard', 'o_is_v', 'k_is_v', 'q_is_v', 'o_is_k')),
        *('qk/merged_vo(init="product")', 'qk/o_is_q', 'qk/v_is_k_transposed'),
        *('latent/latent', 'qk/subspace'),
    ],
)
def test_initial_outputs_have_the_residual_gain_as_standard_deviation(
    variant, d_model, num_heads, gain
):
    """For heads that each attend to a unit-normal y of their own."""
    sizes = {'d_model': d_model, 'num_heads': num_heads, 'num_kv_heads': num_heads}
    head_size = d_model // 4 if variant == 'qk/gauge_fixed' else d_model // num_heads
    score, value = variant.split('/')
    layer = make((score, value), moved=False, head_size=head_size, residual_gain=gain, **sizes)
    std = float(jnp.sqrt(jnp.square(layer.value.matrix(layer.score)).sum() / d_model))
    # subspace has no matrix of its own: the size of its output is what W_K gives.
    expected = gain * (1 + head_size / d_model) ** 0.5 if value == 'subspace' else gain
    assert std == pytest.approx(expected, rel=0.1)
