"""Where a conversion is refused, the same weights would not be the same function."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import Attention
from qkattn.attention.rope import rotate
from qkattn.convert import layer as convert
from qkattn.errors import ConversionError
from tests.attention.test_contract import N, T, stream
from tests.convert.test_layer import GROUPED, ROPE, difference, layer_of, symmetric_merged


@pytest.fixture(autouse=True)
def float64():
    with jax.enable_x64(True):
        yield


def under(layer: Attention, **options) -> Attention:
    """The same weights with other options of the layer, whatever that does to the function."""
    new = Attention(dataclasses.replace(layer.spec, **options), key=jax.random.key(0))
    return jax.tree.unflatten(jax.tree.structure(new), jax.tree.leaves(layer))


def test_a_change_of_head_basis_does_not_commute_with_rope():
    layer = layer_of('qk', 'vo', biases=False)
    fixed = convert.gauge_fix_qk(layer, pivot=True)
    assert difference(fixed, layer) < 1e-12
    logits = [rotated_logits(under(a, **ROPE).score) for a in (fixed, layer)]
    assert np.linalg.norm(logits[0] - logits[1]) / np.linalg.norm(logits[1]) > 0.3
    assert difference(under(fixed, **ROPE), under(layer, **ROPE)) > 1e-2
    # while that of the values does
    fixed = convert.gauge_fix_vo(layer, pivot=False)
    assert difference(under(fixed, **ROPE), under(layer, **ROPE)) < 1e-12


def test_one_matrix_has_no_room_for_a_rotation():
    layer = layer_of('qk', 'vo', biases=False)
    merged = convert.merge(layer)
    got, want = rotated_logits(merged.score), rotated_logits(layer.score)
    assert np.linalg.norm(got - want) / np.linalg.norm(want) > 0.3


def rotated_logits(score):
    x_BTD = stream(d_model=64).astype(jnp.float64)
    q_BTNH, k_BSKH = score.queries(x_BTD), score.keys(score.cached(x_BTD))
    q_BTNH, k_BSKH = (rotate(a, jnp.arange(T)) for a in (q_BTNH, k_BSKH))
    k_BSNH = jnp.repeat(k_BSKH, N // k_BSKH.shape[2], axis=2)
    return score.scale * np.einsum('BTNH,BSNH->BNTS', q_BTNH, k_BSNH)


def test_the_bias_of_the_keys_matters_under_rope_and_under_a_cap():
    layer = layer_of('qk', 'vo')
    folded = convert.fold_biases(layer)
    layer.score.b_k_KH[...] = folded.score.b_k_KH[...] + 1.0
    assert difference(convert.fold_biases(layer), layer) < 1e-12
    assert difference(under(folded, **ROPE), under(layer, **ROPE)) > 1e-2
    assert difference(under(folded, logit_cap=1.0), under(layer, logit_cap=1.0)) > 1e-2


def refusals():
    rope, norm = layer_of('qk', 'vo', **ROPE), layer_of('qk', 'vo', qk_norm=True)
    for name in ('merge', 'unmerge', 'gauge_fix_qk', 'to_symmetric', 'to_shared'):
        yield f'{name} rope', getattr(convert, name), rope, 'RoPE rotates queries and keys between'
        yield f'{name} norm', getattr(convert, name), norm, 'QK-norm divides'
    yield 'collaborative rope', convert.to_collaborative, rope, 'RoPE rotates'
    yield 'latent rope', convert.gqa_to_latent, rope, 'rotate between the latent'
    yield 'b_K rope', convert.fold_biases, rope, 'RoPE rotates'
    capped = layer_of('qk', 'vo', logit_cap=2.0)
    yield 'b_K cap', convert.fold_biases, capped, 'but logit_cap=2.0 does not'
    yield 'merge cap', convert.merge, capped, 'but logit_cap=2.0 does not'
    tied = layer_of('qk', 'k_is_v')
    yield 'tied', convert.merge, tied, 'k_is_v reads a matrix of qk, which merge replaces'
    hidden = layer_of('shared_qk(self_mask=True)', 'vo')
    yield 'self mask', convert.merge, hidden, 'hides each query from itself'
    yield 'self mask lift', convert.to_standard, hidden, 'hides each query from itself'
    normed = layer_of('shared_qk(key_norm=True)', 'vo')
    yield 'key norm', convert.merge, normed, 'is not bilinear'
    yield 'key norm lift', convert.to_standard, normed, 'is not bilinear'
    yield 'nonlinear', convert.to_standard, layer_of('nonlinear_query', 'vo'), 'is not bilinear'
    yield 'grouped', convert.unmerge, layer_of('qk', 'vo', **GROUPED), 'gqa_to_mha first'
    yield 'grouped vo', convert.unmerge_vo, layer_of('qk', 'vo', **GROUPED), 'gqa_to_mha first'
    yield 'rank', convert.unmerge, layer_of('merged', 'vo'), 'rank above 16'
    yield 'rank vo', convert.unmerge_vo, layer_of('qk', 'merged_vo'), 'rank above 16'
    yield 'not symmetric', convert.to_symmetric, layer_of('qk', 'vo'), 'A\\[n\\] is not symmetric'
    indefinite = symmetric_merged([1] * 9 + [-1] * 7)
    yield 'not definite', convert.to_shared, indefinite, 'negative eigenvalues'
    wide_one = symmetric_merged([1] * 17)
    yield 'symmetric of higher rank', convert.to_symmetric, wide_one, 'rank above head_size=16'
    yield 'other score', convert.gauge_fix_qk, layer_of('merged', 'vo'), 'starts from the score qk'
    yield 'other value', convert.gauge_fix_vo, layer_of('qk', 'no_v'), 'starts from the value vo'
    yield 'no double', convert.fold_double, layer_of('qk', 'vo'), 'no double projection to fold'
    free = layer_of('query_free', 'vo')
    yield 'gains', lambda a: convert.fold_gains(a, np.ones(64)), free, 'starts from qk/vo'
    yield 'wide latent', convert.gqa_to_latent, layer_of('qk', 'vo'), '= 128, wider than the stream'
    widened = layer_of('qk', 'low_rank(rank=20)', **ROPE)
    yield 'widened', convert.to_standard, widened, 'queries of width 16 would be widened to the 20'
    partly = layer_of('latent(size=20, rope_size=4)', 'latent', **ROPE)
    yield 'partly rotated', convert.to_standard, partly, 'rotates 4 of 20 channels'
    singular = layer_of('qk', 'vo')
    singular.score.w_k_DKH[:, 1, 0] = singular.score.w_k_DKH[:, 1, 1]
    yield 'singular', convert.gauge_fix_qk, singular, 'key head 1 cannot be inverted'


def test_refusals_name_the_reason_in_one_sentence():
    for name, transform, layer, reason in refusals():
        with pytest.raises(ConversionError, match=reason) as refusal:
            transform(layer)
        assert '\n' not in str(refusal.value), name
