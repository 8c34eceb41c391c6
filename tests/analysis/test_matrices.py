"""Quantities of matrices against values worked out by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.analysis import matrices

# Symmetric part [[1, 2], [2, -2]] of energy 13, skew part [[0, 1], [-1, 0]] of energy 2.
SPLIT = np.array([[1.0, 3.0], [1.0, -2.0]])
DIAGONAL = np.diag([3.0, 1.0, 0.0, 0.0])


def test_a_quantity_has_the_value_worked_out_by_hand():
    for quantity, matrix, expected in (
        ('norm', SPLIT, 15**0.5),
        ('symmetric_share', SPLIT, 13 / 15),
        ('symmetric_share', SPLIT - SPLIT.T, 0),
        # p = (3/4, 1/4): exp(H) = 4 / 3^(3/4).
        ('effective_rank', DIAGONAL, 4 / 3**0.75),
        ('effective_rank', np.ones((4, 4)), 1),
        ('singular_values', np.diag([1.0, -4, 2]), [4, 2, 1]),
    ):
        actual = getattr(matrices, quantity)(jnp.asarray(matrix, jnp.float32)[None])
        np.testing.assert_allclose(actual, [expected], atol=1e-6, err_msg=quantity)


def test_directionality_counts_what_exceeds_two_deviations():
    """Ten columns of norm 1 but one of norm 8, the rows of equal norm; then also one large row."""
    a_DD = np.eye(10)
    a_DD[:, 3] = 8 / 10**0.5
    mixed_DD = a_DD + np.eye(10)[7][:, None]
    norms = [np.linalg.norm(mixed_DD, axis=axis) for axis in (0, 1)]
    c, r = (np.maximum(n - n.mean() - 2 * n.std(ddof=1), 0).sum() for n in norms)
    all_NDD = jnp.asarray(np.stack([a_DD, a_DD.T, np.eye(10), 0 * a_DD, mixed_DD]), jnp.float32)
    expected = [1, -1, 0, np.nan, (c - r) / (c + r)]
    np.testing.assert_allclose(matrices.directionality(all_NDD), expected, atol=1e-5)


def test_drift_is_relative_to_the_reference():
    reference, other = jnp.array([[3.0, 0.0], [0.0, 4.0]]), jnp.array([[3.0, 1.0], [0.0, 4.0]])
    assert float(matrices.drift(reference, other)) == pytest.approx(0.2)
    assert float(matrices.drift(other, reference)) == pytest.approx(1 / 26**0.5)


def test_a_factor_on_a_matrix_changes_its_norm_alone_and_a_zero_matrix_has_nothing_else():
    a = np.random.default_rng(0).standard_normal((5, 5))
    for name, function in matrices.MATRIX_QUANTITIES.items():
        one, scaled, zero = (float(function(jnp.asarray(f * a, jnp.float32))) for f in (1, 7, 0))
        np.testing.assert_allclose(scaled, one * (7 if name == 'norm' else 1), 2e-4, err_msg=name)
        assert zero == 0 if name == 'norm' else np.isnan(zero)
