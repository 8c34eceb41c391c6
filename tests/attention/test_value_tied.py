"""Values that read their Score: one owner, one count, one gradient, one cache."""

import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import SCORES, AttentionSpec, registry
from qkattn.errors import SpecError
from tests.attention import test_contract as contract
from tests.attention.layers import SIZES, D, H, error, make, stream


def test_grouped_keys_are_the_only_cache_of_tied_values():
    cache = make(('qk', 'k_is_v'), num_kv_heads=2).cached(jnp.zeros((1, 1, D)))
    assert {name: a.shape for name, a in cache.items()} == {'k_BSKH': (1, 1, 2, H)}


def test_values_are_not_rotated_with_the_keys():
    contract.assert_rotation_is_the_complex_form(('qk', 'k_is_v'))


@pytest.mark.parametrize(
    ('which', 'score'),
    [(w, s) for w in ('key', 'query') for s, c in SCORES.items() if w in c.shareable],
)
def test_a_shareable_projection_computes_keys_or_queries(which, score):
    circuit = make((score, 'vo'), biases=True).score
    y_BSD = stream()
    w_DKH, b_KH = circuit.shared(which)
    got = circuit.keys(circuit.cached(y_BSD)) if which == 'key' else circuit.queries(y_BSD)
    want = np.einsum('BSD,DKH->BSKH', y_BSD, w_DKH[...]) + np.asarray(b_KH[...])
    assert error(got, want) < 1e-5


@pytest.mark.parametrize(
    ('score', 'value', 'message'),
    [
        (
            'merged',
            'k_is_v',
            'k_is_v uses the key projection of its score, and merged has none',
        ),
        ('merged', 'q_is_v', 'uses the query projection.*scores that have one are qk, shared_qk'),
        ('key_free', 'subspace', 'uses the key projection.*scores that have one are qk'),
        ('merged', 'o_is_k', 'uses the key projection'),
        ('shared_qk', 'q_is_v', 'is the key matrix: write k_is_v in place of q_is_v'),
        ('shared_qk', 'o_is_q', 'is the key matrix: write o_is_k in place of o_is_q'),
    ],
)
def test_a_score_without_the_projection_is_refused_in_one_sentence(score, value, message):
    with pytest.raises(SpecError, match=message) as refusal:
        registry.check(AttentionSpec(score=score, value=value, **SIZES))
    assert '\n' not in str(refusal.value)


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'num_kv_heads': 2}, 'num_kv_heads must be num_heads=4, not 2'),
        ({'head_size': 4}, 'v_is_k_transposed uses slices'),
    ],
)
def test_a_transposed_key_matrix_must_be_square(change, message):
    with pytest.raises(SpecError, match=message):
        registry.check(AttentionSpec(value='v_is_k_transposed', **{**SIZES, **change}))
