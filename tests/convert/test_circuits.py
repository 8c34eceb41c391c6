"""Conversions of layers keep the function exactly; where one is refused, it would not keep it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from examples.gauge_fixing import gauge_fix_qk, gauge_fix_vo
from qkattn.attention import Attention
from qkattn.config.variant import Variant
from qkattn.convert.circuits import truncate, truncate_vo
from qkattn.convert.conversions import parse_conversion
from qkattn.convert.factors import balanced_factors
from qkattn.convert.whole_layer import fold_gains, to_standard
from qkattn.errors import ConversionError
from qkattn.study.variant_catalogue import documented_variants
from tests.attention import examples
from tests.attention.layers import N, causal, error, make, stream
from tests.lanes import mostly_slow, slow_except
from tests.refusals import refused


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def cast(layer, dtype=jnp.float64) -> Attention:
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a), dtype), layer)


def layer_of(variant: str, **options) -> Attention:
    options = {'d_model': 64, 'head_size': 16, 'biases': True, **options}
    return cast(make(Variant.parse(variant), **options))


def apply_conversions(conversions: str, layer: Attention) -> Attention:
    """Applies exact conversions, such as 'merge unmerge(rank=5)', one after another."""
    for text in conversions.split(' '):
        conversion, options = parse_conversion(text)
        layer, lossy_error = conversion(layer, **options)
        assert lossy_error == 0
    return layer


def difference(converted: Attention, layer: Attention) -> float:
    """The largest relative error between the outputs of two layers."""
    leaves = jax.tree.leaves(layer)
    dtype = leaves[0].dtype if leaves else jnp.float64
    x_BTD = stream(d_model=layer.spec.d_model).astype(dtype)

    expected_BTD = np.asarray(layer(x_BTD, causal()))
    return error(converted(x_BTD, causal()), expected_BTD)


ROPE = {'positions': 'rope'}
GROUPED = {'num_kv_heads': 2}
ALIBI = {'positions': 'alibi', 'score_scale': 0.7}
NORMED = {'qk_norm': True, 'logit_cap': 2.0, 'positions': 'rope', 'score_scale': 0.7}

GAUGE_FIX_QK = 'examples.gauge_fixing:GAUGE_FIX_QK'
GAUGE_FIX_VO = 'examples.gauge_fixing:GAUGE_FIX_VO'

# Conversions, variant and options of a layer, and the variant that it is converted to (None: any).
EXACT_CONVERSIONS = [
    ('merge', 'qk/vo', ALIBI, 'merged/vo'),
    ('merge', 'pairwise/no_v', {}, 'merged/no_v'),
    ('merge unmerge', 'qk/vo', ALIBI, 'qk/vo'),
    ('merge unmerge(rank=5)', 'low_rank(rank=5)/vo', {}, 'low_rank(rank=5)/vo'),
    (GAUGE_FIX_QK, 'qk/vo', ALIBI | GROUPED, None),
    (GAUGE_FIX_QK, 'qk/vo', {'d_model': 16, **GROUPED}, None),  # d_model = head size
    ('merge_vo', 'qk/vo', NORMED, 'qk/merged_vo'),
    ('merge_vo', 'qk/k_is_v', ROPE, 'qk/merged_vo'),
    ('merge_vo unmerge_vo', 'qk/examples.hadamard:Hadamard', ROPE, 'qk/vo'),
    ('merge_vo unmerge_vo(rank=5)', 'merged/low_rank(rank=5)', {}, 'merged/low_rank(rank=5)'),
    ('merge_vo unmerge', 'qk/vo', {'d_model': 8}, 'qk/merged_vo'),  # d_model < head size
    (GAUGE_FIX_VO, 'qk/vo', NORMED | GROUPED, None),
    ('fold_double', 'double/double(size=70)', NORMED | GROUPED, 'qk/vo'),
    ('fold_double', 'double(which="k")/no_o', ROPE, 'qk/no_o'),
    ('gqa_to_latent', 'qk/vo', ALIBI | GROUPED, 'latent(size=64)/latent'),
    ('gqa_to_mha', 'qk/vo', NORMED | GROUPED, 'qk/vo'),
    ('fold_biases', 'qk/vo', ALIBI | GROUPED, 'qk/vo'),
    ('merge', 'qk/vo', {'normalizer': 'entmax15'}, 'merged/vo'),
    ('merge', 'qk/vo', {'normalizer': 'sigmoid', 'biases': False}, 'merged/vo'),
    ('merge_vo', 'shared_qk(key_norm=True)/vo', {}, 'shared_qk(key_norm=True)/merged_vo'),
    (f'merge_vo unmerge_vo {GAUGE_FIX_VO}', 'nonlinear_query/vo', {}, None),
]


@pytest.mark.parametrize(
    ('conversions', 'variant', 'options', 'expected_variant'),
    slow_except(EXACT_CONVERSIONS[12::4], EXACT_CONVERSIONS),
    ids=str,
)
def test_exact_conversions_keep_the_function(conversions, variant, options, expected_variant):
    assert_converted_exactly(conversions, layer_of(variant, **options), expected_variant)


def assert_converted_exactly(
    conversions: str, layer: Attention, expected_variant: str | None = None
) -> None:
    """Checks that conversions keep the outputs of an attention layer, in float64 and float32.

    Args:
        conversions: Names of conversions, such as 'merge unmerge', which are applied in order.
        layer: The layer to convert.
        expected_variant: The variant of attention of the converted layer. None allows any.
    """
    leaves_before = [np.asarray(leaf).copy() for leaf in jax.tree.leaves(layer)]

    for dtype, tolerance in ((jnp.float64, 1e-12), (jnp.float32, 1e-4)):
        original = cast(layer, dtype)
        converted = apply_conversions(conversions, cast(layer, dtype))

        assert difference(converted, original) < tolerance
        if expected_variant is not None:
            assert str(converted.spec.variant) == expected_variant
        for leaf in jax.tree.leaves(converted):
            assert leaf.dtype == dtype
        # `fold_biases` moves the biases of keys and values into other parameters.
        if conversions == 'fold_biases':
            assert not converted.score.b_k_KH[...].any()
            assert not converted.value.b_v_KH[...].any()

    # The original layer is unchanged.
    for leaf, leaf_before in zip(jax.tree.leaves(layer), leaves_before, strict=True):
        np.testing.assert_array_equal(leaf, leaf_before)


def test_keys_of_less_than_full_rank_are_gauge_fixed():
    layer = layer_of('qk/vo')
    head = 1
    # Two equal columns make W_K of this head singular.
    layer.score.w_k_DKH[:, head, 0] = layer.score.w_k_DKH[:, head, 1]

    assert_converted_exactly(GAUGE_FIX_QK, layer)


SCALED_AND_CAPPED = {'score_scale': 0.7, 'logit_cap': 3.0}
# Linear variants as (score, value).
LINEAR_PAIRS = [pair for pair in sorted(documented_variants()) if pair[0] != 'nonlinear_query']
LINEAR_PAIRS += examples.FOLDER_VARIANTS
LINEAR = [f'{score}/{value}' for score, value in LINEAR_PAIRS]
LINEAR += ['latent(size=20, query_size=9)/latent', "shared_qk(temperature='learned')/k_is_v"]
ROTATED = ['shared_qk/k_is_v', 'query_free/no_v', 'double/o_is_v', 'low_rank(rank=20)/vo']
LINEAR_CASES = [('qk/k_is_v', GROUPED)]
LINEAR_CASES += [(variant, SCALED_AND_CAPPED) for variant in LINEAR]
LINEAR_CASES += [(variant, options) for variant in ROTATED for options in (ROPE, NORMED)]


@pytest.mark.parametrize(('variant', 'options'), mostly_slow(LINEAR_CASES, every=16), ids=str)
def test_standard_attention_represents_every_linear_variant(variant, options):
    layer = layer_of(variant, **options)

    standard = to_standard(layer)

    assert standard.spec.score == 'qk'
    assert standard.spec.value == 'vo'
    # Without the option, each of the N heads has its own keys and values.
    assert standard.spec.num_kv_heads == options.get('num_kv_heads', N)
    assert difference(standard, layer) < 1e-12


def test_gains_and_biases_of_a_norm_fold_into_the_projections():
    """A norm multiplies by its gain and adds its bias before attention.

    Folding moves both into the matrices of attention: folded(x) = layer(gain * x + bias).
    """
    rng = np.random.default_rng(3)
    gain_D = 1 + rng.normal(size=64) / 3
    x_BTD = stream(d_model=64).astype(jnp.float64)
    layer_without_biases = layer_of('qk/vo', num_kv_heads=2, biases=False)
    layer_with_biases = layer_of('qk/vo', num_kv_heads=2, biases=True, **NORMED)

    for layer in (layer_without_biases, layer_with_biases):
        for bias_D in (np.zeros(64), rng.normal(size=64)):
            folded = fold_gains(layer, gain_D, bias_D)

            # The bias of the norm becomes biases of the projections.
            assert folded.spec.biases == (layer.spec.biases or bias_D.any())
            expected_BTD = np.asarray(layer(gain_D * x_BTD + bias_D, causal()))
            assert error(folded(x_BTD, causal()), expected_BTD) < 1e-12
            # Without folding, the layer gives another output for x.
            assert error(layer(x_BTD, causal()), expected_BTD) > 1e-2


def test_unmerged_factors_are_balanced():
    """W_Q^T W_Q and W_K^T W_K of each head are the same diagonal matrix."""
    score = apply_conversions('merge unmerge', layer_of('qk/vo', biases=False)).score

    q_gram_NHH = np.einsum('DNH,DNG->NHG', score.w_q_DNH, score.w_q_DNH)
    k_gram_NHH = np.einsum('DNH,DNG->NHG', score.w_k_DKH, score.w_k_DKH)
    off_diagonal_NHH = q_gram_NHH * (1 - np.eye(16))
    np.testing.assert_allclose(q_gram_NHH, k_gram_NHH, atol=1e-12)
    assert np.abs(off_diagonal_NHH).max() < 1e-12 * np.abs(q_gram_NHH).max()


def test_a_zero_matrix_has_zero_factors():
    left_ENR, right_DNR, relative_error = balanced_factors(np.zeros((2, 4, 4)), 3)

    assert relative_error == 0
    assert not left_ENR.any()
    assert not right_DNR.any()


@pytest.mark.parametrize('rank', [2, 15])
def test_truncation_has_the_error_of_eckart_young(rank):
    """Truncation gives the best approximation of a lower rank, and reports its relative error.

    In each head, the matrix W_Q W_K^T makes the logits and W_V W_O makes the output. By the
    theorem of Eckart and Young, the smallest error is the norm of the dropped singular values.
    """
    layer = layer_of('qk/vo', biases=False)

    qk_truncated, qk_error = truncate(layer, rank=rank)
    vo_truncated, vo_error = truncate_vo(layer, rank=rank)

    # `matrix` is the product of the two factors, for each of N heads.
    assert_best_approximation(
        exact_NDE=layer.score.scale * layer.score.matrix(),
        truncated_NDE=qk_truncated.score.scale * qk_truncated.score.matrix(),
        relative_error=qk_error,
        rank=rank,
    )
    assert_best_approximation(
        exact_NDE=layer.value.matrix(None),
        truncated_NDE=vo_truncated.value.matrix(None),
        relative_error=vo_error,
        rank=rank,
    )


def assert_best_approximation(exact_NDE, truncated_NDE, relative_error, rank):
    """Checks that the error is the norm of the singular values beyond `rank`."""
    s_NR = np.linalg.svd(exact_NDE, compute_uv=False)
    norm = np.linalg.norm(exact_NDE)
    smallest_error = np.linalg.norm(s_NR[:, rank:]) / norm
    actual_error = np.linalg.norm(truncated_NDE - exact_NDE) / norm

    assert relative_error == pytest.approx(smallest_error)
    assert relative_error == pytest.approx(actual_error)


def gauge_fix_both(layer: Attention) -> Attention:
    """Gauge-fixes both circuits of a layer."""
    fixed_layers = gauge_fix_vo(gauge_fix_qk([layer]))
    return fixed_layers[0]


def test_gauge_fixing_keeps_parameters_small():
    fixed = gauge_fix_both(layer_of('qk/vo', biases=False))

    assert np.abs(fixed.score.w_k_free_CKH[...]).max() < 4
    assert np.abs(fixed.value.w_o_NHC[...]).max() < 4


def test_gauge_fixing_removes_h_squared_parameters_per_head():
    H = 16
    layer = layer_of('qk/vo', biases=False, head_size=H)

    fixed = gauge_fix_both(layer)

    removed_by_qk = removed_by_vo = N * H**2
    assert num_parameters(layer) - num_parameters(fixed) == removed_by_qk + removed_by_vo


def num_parameters(layer: Attention) -> int:
    return sum(leaf.size for leaf in jax.tree.leaves(layer))


def layers_without_a_common_block(size_of_small_rows: float, dtype) -> list[Attention]:
    """Two layers: rows 0 to 15 are small in the first one, rows 16 to 31 in the second one."""
    layers = []
    for rows in (slice(0, 16), slice(16, 32)):
        layer = layer_of('qk/vo', d_model=32)
        layer.score.w_k_DKH[rows] = layer.score.w_k_DKH[rows] * size_of_small_rows
        layer.value.w_o_NHD[..., rows] = layer.value.w_o_NHD[..., rows] * size_of_small_rows
        layers.append(cast(layer, dtype))
    return layers


@pytest.mark.parametrize('gauge_fix', [gauge_fix_qk, gauge_fix_vo])
@pytest.mark.parametrize(
    ('size_of_small_rows', 'dtype'), [(1e-2, jnp.float32), (1e-5, jnp.float64)]
)
def test_a_small_block_is_gauge_fixed(gauge_fix, size_of_small_rows, dtype):
    # Any 16 of the 32 rows have rows that are small in one of the two layers.
    layers = layers_without_a_common_block(size_of_small_rows, dtype)

    fixed_layers = gauge_fix(layers)

    half_of_the_digits = jnp.finfo(dtype).eps ** 0.5
    for fixed, layer in zip(fixed_layers, layers, strict=True):
        assert difference(cast(fixed), cast(layer)) < half_of_the_digits


@pytest.mark.parametrize('gauge_fix', [gauge_fix_qk, gauge_fix_vo])
@pytest.mark.parametrize(
    ('size_of_small_rows', 'dtype'), [(1e-5, jnp.float32), (1e-9, jnp.float64)]
)
def test_a_block_too_close_to_singular_is_refused(gauge_fix, size_of_small_rows, dtype):
    # Any 16 of the 32 rows have rows that are tiny in one of the two layers.
    layers = layers_without_a_common_block(size_of_small_rows, dtype)

    with refused('too close to singular for float', ConversionError):
        gauge_fix(layers)


def test_a_refused_conversion_names_the_reason():
    """A conversion rewrites the matrices of attention, which not every variant allows.

    A case has the conversion, the variant score/value of the layer, its other settings, and the
    reason. The layer has 4 heads of size 16, and d_model is 64.
    """
    for conversion, variant, options, reason in (
        ('merge', 'qk/vo', ROPE, 'RoPE rotates'),
        ('merge', 'qk/vo', {'normalizer': 'sigmoid'}, 'normalizer=sigmoid does not'),
        ('gqa_to_latent', 'qk/vo', ROPE, 'rotate between the latent'),
        ('fold_biases', 'qk/vo', {'logit_cap': 2.0}, 'but logit_cap=2.0 does not'),
        ('merge', 'qk/k_is_v', {}, 'k_is_v shares a matrix of qk, which is replaced'),
        ('merge', 'shared_qk(self_mask=True)/vo', {}, 'masks the diagonal'),
        ('to_standard', 'nonlinear_query/vo', {}, 'is not bilinear'),
        ('unmerge', 'qk/vo', GROUPED, 'gqa_to_mha first'),
        ('unmerge_vo(rank=15)', 'qk/vo', {}, 'rank above 15'),
        (GAUGE_FIX_QK, 'merged/vo', {}, 'starts from the score qk'),
        ('fold_double', 'qk/vo', {}, 'no double projection to fold'),
        ('gqa_to_latent', 'qk/vo', {}, '= 128, wider than the stream'),
        ('to_standard', 'qk/low_rank(rank=20)', ROPE, 'size 16 would be widened to the 20'),
    ):
        layer = layer_of(variant, **options)
        with refused(reason, ConversionError):
            apply_conversions(conversion, layer)


def test_gains_fold_into_standard_attention_only():
    layer = layer_of('query_free/vo')

    with refused('starts from qk/vo', ConversionError):
        fold_gains(layer, gain_D=np.ones(64), bias_D=np.zeros(64))
