"""Values that read their Score: one owner, one count, one gradient, one cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import SCORES, AttentionSpec, registry
from qkattn.errors import SpecError
from tests.attention.layers import (
    SIZES,
    D,
    H,
    N,
    causal,
    error,
    make,
    stream,
    wide,
)

VARIANTS = [
    ('qk', 'k_is_v'),
    ('shared_qk', 'k_is_v'),
    ('qk', 'q_is_v'),
    ('qk', 'v_is_k_transposed'),
    ('shared_qk', 'v_is_k_transposed'),
    ('qk', 'o_is_v'),
    ('qk', 'o_is_k'),
    ('qk', 'o_is_q'),
    ('qk', 'subspace'),
    ('shared_qk', 'subspace'),
]
GAIN = 0.5  # a residual gain other than 1, which `subspace` applies as its step size


def transposed(w_DNH):
    return w_DNH.reshape(D, D).T.reshape(w_DNH.shape)


def outward(w_DKH):
    return jnp.moveaxis(jnp.repeat(w_DKH, N // w_DKH.shape[1], axis=1), 0, -1)


def inward(w_NHD, num_kv_heads):
    """The transpose of `outward`: heads of a group add up."""
    w_DNH = jnp.moveaxis(w_NHD, -1, 0)
    return w_DNH.reshape(D, num_kv_heads, -1, H).sum(2)


def lifted(variant, layer):
    """w_q, w_k, w_v, w_o of the standard layer that is the same function."""
    score, value = layer.score, layer.value
    q = score.w_q_DNH[...]
    k = q if variant[0] == 'shared_qk' else score.w_k_DKH[...]
    return {
        'k_is_v': lambda: (q, k, k, value.w_o_NHD[...]),
        'q_is_v': lambda: (q, k, q, value.w_o_NHD[...]),
        'v_is_k_transposed': lambda: (q, k, transposed(k), value.w_o_NHD[...]),
        'o_is_v': lambda: (q, k, value.w_v_DKH[...], outward(value.w_v_DKH[...])),
        'o_is_k': lambda: (q, k, value.w_v_DKH[...], outward(k)),
        'o_is_q': lambda: (q, k, value.w_v_DKH[...], outward(q)),
        'subspace': lambda: (q, k, k, GAIN * outward(k)),
    }[variant[1]]()


# From the gradients q, k, v, o of the standard layer: (owner, parameter, what it must receive).
SUMS = {
    ('qk', 'k_is_v'): ('score', 'w_k_DKH', lambda q, k, v, o: k + v),
    ('shared_qk', 'k_is_v'): ('score', 'w_q_DNH', lambda q, k, v, o: q + k + v),
    ('qk', 'q_is_v'): ('score', 'w_q_DNH', lambda q, k, v, o: q + v),
    ('qk', 'v_is_k_transposed'): ('score', 'w_k_DKH', lambda q, k, v, o: k + transposed(v)),
    ('shared_qk', 'v_is_k_transposed'): (
        'score',
        'w_q_DNH',
        lambda q, k, v, o: q + k + transposed(v),
    ),
    ('qk', 'o_is_v'): ('value', 'w_v_DKH', lambda q, k, v, o: v + inward(o, N)),
    ('qk', 'o_is_k'): ('score', 'w_k_DKH', lambda q, k, v, o: k + inward(o, N)),
    ('qk', 'o_is_q'): ('score', 'w_q_DNH', lambda q, k, v, o: q + inward(o, N)),
    ('qk', 'subspace'): ('score', 'w_k_DKH', lambda q, k, v, o: k + v + GAIN * inward(o, N)),
    ('shared_qk', 'subspace'): (
        'score',
        'w_q_DNH',
        lambda q, k, v, o: q + k + v + GAIN * inward(o, N),
    ),
}


STANDARD = (
    ('score', 'w_q_DNH'),
    ('score', 'w_k_DKH'),
    ('value', 'w_v_DKH'),
    ('value', 'w_o_NHD'),
)


def standard(matrices, **options):
    """A standard layer with these matrices."""
    layer = wide(make(('qk', 'vo'), seed=9, **options))
    for (circuit, name), matrix in zip(STANDARD, matrices, strict=True):
        getattr(getattr(layer, circuit), name)[...] = matrix
    return layer


def loss(layer, x_BTD):
    return jnp.sin(layer(x_BTD, causal())).sum()


@pytest.mark.parametrize('variant', VARIANTS, ids='/'.join)
def test_it_is_standard_attention_with_tied_parameters(variant):
    """The same output, and a gradient that sums those of all uses of the shared matrix."""
    with jax.enable_x64(True):
        layer, x_BTD = wide(make(variant, residual_gain=GAIN)), wide(stream())
        untied = standard(lifted(variant, layer))
        assert error(layer(x_BTD, causal()), untied(x_BTD, causal())) < 1e-12
        tied, apart = jax.grad(loss)(layer, x_BTD), jax.grad(loss)(untied, x_BTD)
        owner, name, total = SUMS[variant]
        parts = [
            getattr(getattr(apart, circuit), parameter)[...] for circuit, parameter in STANDARD
        ]
        got, want = getattr(getattr(tied, owner), name)[...], np.asarray(total(*parts))
        assert error(got, want) < 1e-12
        for part in parts:  # every use counts
            assert np.abs(part).max() > 1e-3 * np.abs(want).max()


def test_grouped_keys_are_the_only_cache_of_tied_values():
    cache = make(('qk', 'k_is_v'), num_kv_heads=2).cached(jnp.zeros((1, 1, D)))
    assert {name: a.shape for name, a in cache.items()} == {'k_BSKH': (1, 1, 2, H)}


def test_values_are_not_rotated_with_the_keys():
    with jax.enable_x64(True):
        x_BTD = wide(stream())
        tied = wide(make(('qk', 'k_is_v'), positions='rope'))
        matrices = lifted(('qk', 'k_is_v'), tied)
        want = standard(matrices, positions='rope')(x_BTD, causal())
        assert error(tied(x_BTD, causal()), want) < 1e-12
        assert error(standard(matrices)(x_BTD, causal()), want) > 1e-2


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
