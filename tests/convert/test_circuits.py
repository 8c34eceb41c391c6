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
    """Applies conversions, written as on the command line and separated by spaces."""
    for text in conversions.split(' '):
        conversion, options = parse_conversion(text)
        layer, lost = conversion(layer, **options)
        assert lost == 0
    return layer


def difference(converted: Attention, layer: Attention) -> float:
    """Largest difference of the two layers' outputs, relative to the largest output."""
    leaves = jax.tree.leaves(layer)
    dtype = leaves[0].dtype if leaves else jnp.float64
    x_BTD = stream(d_model=layer.spec.d_model).astype(dtype)
    return error(converted(x_BTD, causal()), np.asarray(layer(x_BTD, causal())))


ROPE = {'positions': 'rope'}
GROUPED = {'num_kv_heads': 2}
ALIBI = {'positions': 'alibi', 'score_scale': 0.7}
NORMED = {'qk_norm': True, 'logit_cap': 2.0, 'positions': 'rope', 'score_scale': 0.7}

GAUGE_FIX_QK = 'examples.gauge_fixing:GAUGE_FIX_QK'
GAUGE_FIX_VO = 'examples.gauge_fixing:GAUGE_FIX_VO'

# Conversions, the source and its options, the variant of the target.
EXACT_CONVERSIONS = [
    ('merge', 'qk/vo', ALIBI, 'merged/vo'),
    ('merge', 'pairwise/no_v', {}, 'merged/no_v'),
    ('merge unmerge', 'qk/vo', ALIBI, 'qk/vo'),
    ('merge unmerge(rank=5)', 'low_rank(rank=5)/vo', {}, 'low_rank(rank=5)/vo'),
    (GAUGE_FIX_QK, 'qk/vo', ALIBI | GROUPED, None),
    (GAUGE_FIX_QK, 'qk/vo', {'d_model': 16, **GROUPED}, None),  # no free rows
    ('merge_vo', 'qk/vo', NORMED, 'qk/merged_vo'),
    ('merge_vo', 'qk/k_is_v', ROPE, 'qk/merged_vo'),
    ('merge_vo unmerge_vo', 'qk/examples.hadamard:Hadamard', ROPE, 'qk/vo'),
    ('merge_vo unmerge_vo(rank=5)', 'merged/low_rank(rank=5)', {}, 'merged/low_rank(rank=5)'),
    ('merge_vo unmerge', 'qk/vo', {'d_model': 8}, 'qk/merged_vo'),  # a rank above d_model
    (GAUGE_FIX_VO, 'qk/vo', NORMED | GROUPED, None),
    ('fold_double', 'double/double(size=70)', NORMED | GROUPED, 'qk/vo'),
    ('fold_double', 'double(which="k")/no_o', ROPE, 'qk/no_o'),
    ('gqa_to_latent', 'qk/vo', ALIBI | GROUPED, 'latent(size=64)/latent'),
    ('gqa_to_mha', 'qk/vo', NORMED | GROUPED, 'qk/vo'),
    ('fold_biases', 'qk/vo', ALIBI | GROUPED, 'qk/vo'),
    ('merge', 'qk/vo', {'normalizer': 'entmax15'}, 'merged/vo'),
    ('merge', 'qk/vo', {'normalizer': 'sigmoid', 'biases': False}, 'merged/vo'),
    ('merge_vo', 'shared_qk(key_norm=True)/vo', {}, 'shared_qk(key_norm=True)/merged_vo'),
    (f'merge_vo unmerge_vo {GAUGE_FIX_VO}', 'nonlinear_query/vo', {}, None),  # keeps any Score
]


@pytest.mark.parametrize(
    ('conversions', 'source', 'options', 'variant'),
    slow_except(EXACT_CONVERSIONS[12::4], EXACT_CONVERSIONS),
    ids=str,
)
def test_the_target_computes_the_same_function(conversions, source, options, variant):
    assert_converted_exactly(conversions, layer_of(source, **options), variant)


def assert_converted_exactly(
    conversions: str, layer: Attention, variant: str | None = None
) -> None:
    """The converted layer computes the same in both precisions; the source is left unchanged."""
    before = [np.asarray(a).copy() for a in jax.tree.leaves(layer)]
    for dtype, tolerance in ((jnp.float64, 1e-12), (jnp.float32, 1e-4)):
        converted = apply_conversions(conversions, cast(layer, dtype))
        assert variant in (None, str(converted.spec.variant))
        assert {a.dtype for a in jax.tree.leaves(converted)} == {np.dtype(dtype)}
        assert difference(converted, cast(layer, dtype)) < tolerance
    for a, b in zip(jax.tree.leaves(layer), before, strict=True):
        np.testing.assert_array_equal(a, b)
    if conversions == 'fold_biases':
        assert not converted.score.b_k_KH[...].any()
        assert not converted.value.b_v_KH[...].any()


def test_keys_of_less_than_full_rank_are_gauge_fixed():
    layer = layer_of('qk/vo')
    layer.score.w_k_DKH[:, 1, 0] = layer.score.w_k_DKH[:, 1, 1]
    assert_converted_exactly(GAUGE_FIX_QK, layer)


SCALED_AND_CAPPED = {'score_scale': 0.7, 'logit_cap': 3.0}
LINEAR = ['/'.join(pair) for pair in sorted(documented_variants()) if pair[0] != 'nonlinear_query']
LINEAR += ['/'.join(pair) for pair in examples.FOLDER_VARIANTS]
LINEAR += ['latent(size=20, query_size=9)/latent', "shared_qk(temperature='learned')/k_is_v"]
ROTATED = ['shared_qk/k_is_v', 'query_free/no_v', 'double/o_is_v', 'low_rank(rank=20)/vo']
STANDARD = [('qk/k_is_v', GROUPED), *((variant, SCALED_AND_CAPPED) for variant in LINEAR)]
STANDARD += [(variant, options) for variant in ROTATED for options in (ROPE, NORMED)]


@pytest.mark.parametrize(('variant', 'options'), mostly_slow(STANDARD, every=16), ids=str)
def test_standard_attention_represents_every_linear_variant(variant, options):
    layer = layer_of(variant, **options)
    target = to_standard(layer)
    assert (target.spec.score, target.spec.value) == ('qk', 'vo')
    assert target.spec.num_kv_heads == options.get('num_kv_heads', N)
    assert difference(target, layer) < 1e-12


def test_gains_and_biases_of_a_norm_fold_into_the_projections():
    rng = np.random.default_rng(3)
    gain_D = 1 + rng.normal(size=64) / 3
    x_BTD = stream(d_model=64).astype(jnp.float64)
    for options in ({'biases': False}, {'biases': True, **NORMED}):
        layer = layer_of('qk/vo', num_kv_heads=2, **options)
        for bias_D in (np.zeros(64), rng.normal(size=64)):
            # The folded layer maps x to what the layer itself maps gain * x + bias to.
            folded = fold_gains(layer, gain_D, bias_D)
            assert folded.spec.biases == (options['biases'] or bias_D.any())
            expected = np.asarray(layer(x_BTD * gain_D + bias_D, causal()))
            assert error(folded(x_BTD, causal()), expected) < 1e-12
            assert error(layer(x_BTD, causal()), expected) > 1e-2


def test_unmerged_factors_are_balanced():
    score = apply_conversions('merge unmerge', layer_of('qk/vo', biases=False)).score
    q_NHH, k_NHH = (np.einsum('DNH,DNG->NHG', w, w) for w in (score.w_q_DNH, score.w_k_DKH))
    np.testing.assert_allclose(q_NHH, k_NHH, atol=1e-12)
    assert np.abs(q_NHH * (1 - np.eye(16))).max() < 1e-12 * np.abs(q_NHH).max()


def test_a_zero_matrix_has_zero_factors():
    left_ENR, right_DNR, lost = balanced_factors(np.zeros((2, 4, 4)), 3)
    assert lost == 0
    assert not left_ENR.any()
    assert not right_DNR.any()


@pytest.mark.parametrize('rank', [2, 15])
def test_truncation_has_the_error_of_eckart_young(rank):
    layer = layer_of('qk/vo', biases=False)
    score, lost_qk = truncate(layer, rank=rank)
    value, lost_vo = truncate_vo(layer, rank=rank)
    qk = [member.score.scale * member.score.matrix() for member in (layer, score)]
    vo = [member.value.matrix(None) for member in (layer, value)]
    # The best approximation of a rank leaves out the smallest singular values.
    for (exact_NDE, cut_NDE), lost in ((qk, lost_qk), (vo, lost_vo)):
        s_NR = np.linalg.svd(exact_NDE, compute_uv=False)
        assert lost == pytest.approx(np.linalg.norm(s_NR[:, rank:]) / np.linalg.norm(exact_NDE))
        assert lost == pytest.approx(np.linalg.norm(cut_NDE - exact_NDE) / np.linalg.norm(s_NR))


def test_gauge_fixing_keeps_parameters_small():
    (fixed,) = gauge_fix_vo(gauge_fix_qk([layer_of('qk/vo', biases=False)]))
    for free in (fixed.score.w_k_free_CKH, fixed.value.w_o_NHC):
        assert np.abs(free[...]).max() < 4


def test_gauge_fixing_removes_h_squared_parameters_a_head():
    layer = layer_of('qk/vo', biases=False)
    (fixed,) = gauge_fix_vo(gauge_fix_qk([layer]))
    before, after = (sum(a.size for a in jax.tree.leaves(x)) for x in (layer, fixed))
    assert before - after == 2 * N * 16 * 16


def test_layers_without_a_common_invertible_block_are_refused_by_the_precision():
    """Gauge fixing inverts one block of rows, at the same place in all layers.

    The first layer has small entries in rows 0 to 15, the second in rows 16 to 31: whichever rows
    are taken, one layer's block is small. float64 has digits for smaller ones than float32.
    """
    for size_of_small_rows, dtype, is_refused in (
        (1e-2, jnp.float32, False),
        (1e-5, jnp.float32, True),
        (1e-5, jnp.float64, False),
        (1e-9, jnp.float64, True),
    ):
        layers = []
        for half in (slice(0, 16), slice(16, 32)):
            layer = layer_of('qk/vo', d_model=32)
            layer.score.w_k_DKH[half] = layer.score.w_k_DKH[half] * size_of_small_rows
            layer.value.w_o_NHD[..., half] = layer.value.w_o_NHD[..., half] * size_of_small_rows
            layers.append(cast(layer, dtype))
        for gauge_fix in (gauge_fix_qk, gauge_fix_vo):
            if is_refused:
                with refused('too close to singular for float', ConversionError):
                    gauge_fix(layers)
            else:
                for fixed, layer in zip(gauge_fix(layers), layers, strict=True):
                    assert difference(cast(fixed), cast(layer)) < jnp.finfo(dtype).eps ** 0.5


def test_a_refusal_names_the_reason_in_one_sentence():
    # The conversion, the variant and the options of the layer, and what the refusal says.
    for conversion, source, options, reason in (
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
        with refused(reason, ConversionError):
            apply_conversions(conversion, layer_of(source, **options))
    with refused('starts from qk/vo', ConversionError):
        fold_gains(layer_of('query_free/vo'), np.ones(64), np.zeros(64))
