"""Conversions keep the function where they say so; where they refuse, they would not keep it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import Attention
from qkattn.convert import layer as convert
from qkattn.errors import ConversionError
from tests.attention.test_contract import N, causal, error, make, stream


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def wide(tree, dtype=jnp.float64):
    return jax.tree.map(lambda a: jnp.asarray(np.asarray(a), dtype), tree)


def layer_of(*cell, dtype=jnp.float64, **options) -> Attention:
    options = {'d_model': 64, 'head_size': 16, 'biases': True, **options}
    return wide(make(cell, **options), dtype)


def difference(got: Attention, want: Attention) -> float:
    """Of the outputs, relative to the largest."""
    leaves = jax.tree.leaves(want)
    dtype = leaves[0].dtype if leaves else jnp.float64
    x_BTD = stream(d_model=want.spec.d_model).astype(dtype)
    return error(got(x_BTD, causal()), np.asarray(want(x_BTD, causal())))


def low_rank_merged(rank: int, **options) -> Attention:
    """`merged` whose A[n] have that rank, biases included."""
    layer = layer_of('merged', 'vo', **options)
    draw = jax.random.split(jax.random.key(8))
    size = layer.spec.d_model
    left_ENR = jax.random.normal(draw[0], (size + 1, N, rank), jnp.float64)
    right_DNR = jax.random.normal(draw[1], (size, N, rank), jnp.float64) / size
    A_ENF = jnp.einsum('ENR,DNR->END', left_ENR, right_DNR)
    layer.score.w_qk_DNE[...] = A_ENF[:-1]
    layer.score.b_q_NE[...] = A_ENF[-1]
    return layer


def symmetric_merged(signs) -> Attention:
    """`merged` without biases whose A[n] are symmetric with eigenvalues of these signs."""
    layer = layer_of('merged', 'vo', biases=False)
    w_DNR = jax.random.normal(jax.random.key(8), (64, N, len(signs)), jnp.float64) / 8
    A_DNE = jnp.einsum('DNR,R,ENR->DNE', w_DNR, jnp.asarray(signs, jnp.float64), w_DNR)
    layer.score.w_qk_DNE[...] = (A_DNE + jnp.transpose(A_DNE, (2, 1, 0))) / 2
    return layer


ROPE = {'positions': 'rope'}
GROUPED = {'num_kv_heads': 2}
ALIBI = {'positions': 'alibi', 'score_scale': 0.7}
NORMED = {'qk_norm': True, 'logit_cap': 2.0, 'positions': 'rope', 'score_scale': 0.7}

# what -> (conversion, source, cell of the target)
EXACT = {
    'merge': (convert.merge, lambda **o: layer_of('qk', 'vo', **ALIBI, **o), 'merged/vo'),
    'merge grouped': (convert.merge, lambda **o: layer_of('qk', 'vo', **GROUPED, **o), 'merged/vo'),
    'merge pairwise': (convert.merge, lambda **o: layer_of('pairwise', 'no_v', **o), 'merged/no_v'),
    'unmerge qk': (
        lambda a: convert.unmerge(convert.merge(a)),
        lambda **o: layer_of('qk', 'vo', **ALIBI, **o),
        'qk/vo',
    ),
    'unmerge': (convert.unmerge, lambda **o: wide(low_rank_merged(16), **o), 'qk/vo'),
    'unmerge to rank 5': (
        lambda a: convert.unmerge(a, 5),
        lambda **o: wide(low_rank_merged(5), **o),
        'low_rank(rank=5)/vo',
    ),
    'gauge_fix_qk': (
        convert.gauge_fix_qk,
        lambda **o: layer_of('qk', 'vo', **ALIBI, **o),
        'gauge_fixed/vo',
    ),
    'gauge_fix_qk grouped': (
        convert.gauge_fix_qk,
        lambda **o: layer_of('qk', 'vo', **GROUPED, **o),
        'gauge_fixed/vo',
    ),
    'gauge_fix_qk pivoted': (
        lambda a: convert.gauge_fix_qk(a, pivot=True),
        lambda **o: layer_of('qk', 'vo', **GROUPED, **o),
        'qk/vo',
    ),
    'to_symmetric': (
        convert.to_symmetric,
        lambda **o: wide(symmetric_merged([1] * 9 + [-1] * 7), **o),
        'symmetric/vo',
    ),
    'to_symmetric of shared': (
        convert.to_symmetric,
        lambda **o: layer_of('shared_qk', 'no_v', **o),
        'symmetric/no_v',
    ),
    'to_shared': (
        convert.to_shared,
        lambda **o: wide(symmetric_merged([1] * 16), **o),
        'shared_qk/vo',
    ),
    'to_collaborative': (
        convert.to_collaborative,
        lambda **o: layer_of('qk', 'vo', **ALIBI, **GROUPED, **o),
        'collaborative/vo',
    ),
    'merge_vo': (convert.merge_vo, lambda **o: layer_of('qk', 'vo', **NORMED, **o), 'qk/merged_vo'),
    'merge_vo grouped': (
        convert.merge_vo,
        lambda **o: layer_of('qk', 'vo', **GROUPED, **ROPE, **o),
        'qk/merged_vo',
    ),
    'merge_vo tied': (
        convert.merge_vo,
        lambda **o: layer_of('qk', 'k_is_v', **ROPE, **o),
        'qk/merged_vo',
    ),
    'unmerge_vo': (
        lambda a: convert.unmerge_vo(convert.merge_vo(a)),
        lambda **o: layer_of('qk', 'hadamard', **ROPE, **o),
        'qk/vo',
    ),
    'unmerge_vo to rank 5': (
        lambda a: convert.unmerge_vo(convert.merge_vo(a), 5),
        lambda **o: layer_of('merged', 'low_rank(rank=5)', **o),
        'merged/low_rank(rank=5)',
    ),
    'gauge_fix_vo': (
        lambda a: convert.gauge_fix_vo(a, pivot=False),
        lambda **o: layer_of('qk', 'vo', **NORMED, **o),
        'qk/gauge_fixed',
    ),
    'gauge_fix_vo pivoted': (
        convert.gauge_fix_vo,
        lambda **o: layer_of('qk', 'vo', **ROPE, **GROUPED, **o),
        None,
    ),
    'fold_double': (
        convert.fold_double,
        lambda **o: layer_of('double', 'double(size=70)', **NORMED, **GROUPED, **o),
        'qk/vo',
    ),
    'fold_double score': (
        convert.fold_double,
        lambda **o: layer_of('double(which="k")', 'no_o', **ROPE, **o),
        'qk/no_o',
    ),
    'fold_double value': (
        convert.fold_double,
        lambda **o: layer_of('merged', 'double(size=9)', **o),
        'merged/vo',
    ),
    'gqa_to_mha': (
        convert.gqa_to_mha,
        lambda **o: layer_of('qk', 'vo', **NORMED, **GROUPED, **o),
        'qk/vo',
    ),
    'gqa_to_latent': (
        convert.gqa_to_latent,
        lambda **o: layer_of('qk', 'vo', **ALIBI, **GROUPED, **o),
        'latent(size=64)/latent',
    ),
    'fold_biases': (
        convert.fold_biases,
        lambda **o: layer_of('qk', 'vo', **ALIBI, **GROUPED, **o),
        'qk/vo',
    ),
    'fold_biases of values': (
        lambda a: convert.fold_biases(a, keys=False),
        lambda **o: layer_of('qk', 'vo', **NORMED, **o),
        'qk/vo',
    ),
}


@pytest.mark.parametrize('name', EXACT)
def test_the_target_computes_the_same_to_the_last_digits(name):
    transform, source, cell = EXACT[name]
    layer = source()
    before = [np.asarray(a).copy() for a in jax.tree.leaves(layer)]
    target = transform(layer)
    if cell is not None:
        assert f'{target.spec.score}/{target.spec.value}' == cell
    assert difference(target, layer) < 1e-12
    for a, b in zip(jax.tree.leaves(layer), before, strict=True):
        np.testing.assert_array_equal(a, b)


FLOAT32 = ('merge', 'unmerge', 'gauge_fix_qk', 'gauge_fix_qk pivoted', 'to_symmetric', 'merge_vo')
FLOAT32 += ('unmerge_vo', 'gauge_fix_vo', 'gauge_fix_vo pivoted', 'fold_double', 'gqa_to_latent')


@pytest.mark.parametrize('name', FLOAT32)
def test_float32_layers_stay_float32_and_near(name):
    transform, source, _ = EXACT[name]
    layer = source(dtype=jnp.float32)
    target = transform(layer)
    assert {a.dtype for a in jax.tree.leaves(target)} == {np.dtype('float32')}
    assert difference(target, layer) < 1e-4


CELLS = [
    *((s, 'vo') for s in ('merged', 'shared_qk', 'symmetric', 'pairwise', 'symmetric_skew')),
    *((s, 'vo') for s in ('query_free', 'key_free', 'query_free_full', 'neither_full')),
    *((s, 'vo') for s in ('low_rank(rank=6)', 'full_size', 'gauge_fixed', 'frozen', 'double')),
    ('collaborative', 'vo'),
    ('latent(size=20, query_size=9)', 'latent'),
    ("shared_qk(temperature='learned')", 'k_is_v'),
    ('neither', 'no_vo'),
    *(('qk', v) for v in ('vo', 'no_v', 'no_o', 'merged_vo', 'low_rank(rank=5)', 'gauge_fixed')),
    *(('qk', v) for v in ('double', 'hadamard', 'k_is_v', 'q_is_v', 'v_is_k_transposed')),
    *(('qk', v) for v in ('o_is_v', 'o_is_k', 'o_is_q', 'low_rank(rank=20)')),
    ('shared_qk', 'subspace'),
]


@pytest.mark.parametrize('cell', CELLS, ids='/'.join)
def test_standard_attention_holds_every_linear_cell(cell):
    layer = layer_of(*cell, score_scale=0.7, logit_cap=3.0)
    target = convert.to_standard(layer)
    assert (target.spec.score, target.spec.value) == ('qk', 'vo')
    assert difference(target, layer) < 1e-12


@pytest.mark.parametrize(
    'cell',
    [
        ('qk', 'k_is_v'),
        ('shared_qk', 'k_is_v'),
        ('shared_qk', 'subspace'),
        ('query_free', 'no_v'),
        ('double', 'o_is_v'),
        ('qk', 'low_rank(rank=5)'),
        ('low_rank(rank=20)', 'vo'),
    ],
    ids='/'.join,
)
@pytest.mark.parametrize('options', [ROPE, NORMED], ids=['rope', 'rope, norm and cap'])
def test_lifts_hold_under_rope_and_qk_norm(cell, options):
    layer = layer_of(*cell, **options)
    assert difference(convert.to_standard(layer), layer) < 1e-12


def test_lifts_keep_few_key_heads():
    layer = layer_of('qk', 'k_is_v', num_kv_heads=2)
    target = convert.to_standard(layer)
    assert target.spec.num_kv_heads == 2
    assert difference(target, layer) < 1e-12


@pytest.mark.parametrize('biases', [False, True], ids=['plain', 'biases'])
@pytest.mark.parametrize('options', [{}, NORMED], ids=['plain', 'rope, norm and cap'])
def test_gains_and_biases_of_the_norm_fold_into_the_projections(biases, options):
    layer = layer_of('qk', 'vo', **{'biases': biases, 'num_kv_heads': 2, **options})
    draw = np.random.default_rng(3)
    gain_D, bias_D = 1 + draw.normal(size=64) / 3, draw.normal(size=64)
    x_BTD = stream(d_model=64).astype(jnp.float64)
    for bias in (None, bias_D):
        folded = convert.fold_gains(layer, gain_D, bias)
        assert folded.spec.biases == (biases or bias is not None)
        seen_BTD = x_BTD * gain_D + (0 if bias is None else bias)
        want = np.asarray(layer(seen_BTD, causal()))
        assert error(folded(x_BTD, causal()), want) < 1e-12
        assert error(layer(x_BTD, causal()), want) > 1e-2


def test_merged_biases_of_values_go_into_the_output_bias():
    folded = convert.fold_biases(layer_of('qk', 'vo'))
    assert np.abs(folded.value.b_v_KH[...]).max() == np.abs(folded.score.b_k_KH[...]).max() == 0
    assert np.abs(folded.value.b_o_D[...]).max() > 0.01


def test_unmerged_factors_are_balanced():
    layer = convert.unmerge(convert.merge(layer_of('qk', 'vo', biases=False)))
    q_DNH, k_DNH = layer.score.w_q_DNH[...], layer.score.w_k_DKH[...]
    for w_DNH in (q_DNH, k_DNH):
        gram_NHH = np.einsum('DNH,DNG->NHG', w_DNH, w_DNH)
        off_NHH = gram_NHH * (1 - np.eye(16))
        assert np.abs(off_NHH).max() < 1e-12 * np.abs(gram_NHH).max()
    np.testing.assert_allclose((q_DNH**2).sum(0), (k_DNH**2).sum(0), rtol=1e-11)
    other = layer_of('qk', 'vo', biases=False).score
    assert (q_DNH**2).sum() + (k_DNH**2).sum() < (
        (other.w_q_DNH[...] ** 2).sum() + (other.w_k_DKH[...] ** 2).sum()
    )


@pytest.mark.parametrize('rank', [2, 8, 15])
def test_truncation_loses_what_eckart_and_young_say(rank):
    layer = layer_of('qk', 'vo', biases=False)
    target, lost = convert.truncate(layer, rank)
    want_NDE = layer.score.scale * np.asarray(layer.score.matrix())
    got_NDE = target.score.scale * np.asarray(target.score.matrix())
    s_NR = np.linalg.svd(want_NDE, compute_uv=False)
    np.testing.assert_allclose(lost.frobenius_N, np.sqrt((s_NR[:, rank:] ** 2).sum(-1)), rtol=1e-9)
    cut_N = np.linalg.norm(got_NDE - want_NDE, axis=(1, 2))
    np.testing.assert_allclose(lost.frobenius_N, cut_N, rtol=1e-9)
    assert lost.relative == pytest.approx(np.linalg.norm(cut_N) / np.linalg.norm(want_NDE))
    assert lost.measured == pytest.approx(lost.relative, rel=0.15)
    assert difference(target, layer) > 1e-2
    with pytest.raises(ConversionError, match=f'rank above {rank}'):
        convert.unmerge(layer, rank)
    target, lost = convert.truncate_vo(layer, rank)
    cut_N = np.linalg.norm(
        np.asarray(target.value.matrix(None)) - layer.value.matrix(None), axis=(1, 2)
    )
    np.testing.assert_allclose(lost.frobenius_N, cut_N, rtol=1e-9)
    assert lost.measured == pytest.approx(lost.relative, rel=0.15)
    with pytest.raises(ConversionError, match=f'rank above {rank}'):
        convert.unmerge_vo(layer, rank)


def test_a_higher_rank_than_needed_is_padded_with_zeros():
    layer = layer_of('qk', 'vo', d_model=8, head_size=16)
    target = convert.unmerge(convert.merge_vo(layer))
    assert difference(target, layer) < 1e-12


@pytest.mark.parametrize('which', ['qk', 'vo'])
def test_pivoting_keeps_numbers_small(which):
    layer = layer_of('qk', 'vo', biases=False)
    if which == 'qk':
        plain = convert.gauge_fix_qk(layer).score.w_k_free_CKH[...]
        pivoted = convert.gauge_fix_qk(layer, pivot=True).score.w_k_DKH[...]
    else:
        plain = convert.gauge_fix_vo(layer, pivot=False).value.w_o_NHC[...]
        pivoted = convert.gauge_fix_vo(layer).value.w_o_NHC[...]
    assert np.abs(pivoted).max() < 4 < np.abs(plain).max()


def weights(layer):
    return sum(a.size for a in jax.tree.leaves(layer))


def test_gauge_fixing_removes_h_squared_weights_a_head_on_each_side():
    layer = layer_of('qk', 'vo', biases=False)
    both = convert.gauge_fix_vo(convert.gauge_fix_qk(layer))
    assert weights(layer) - weights(both) == 2 * N * 16 * 16
    assert difference(both, layer) < 1e-12
