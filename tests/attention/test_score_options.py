"""Options of the scores: held to the same contract as the registered forms, or refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import AttentionSpec, registry
from qkattn.errors import SpecError
from tests.attention import test_contract as contract
from tests.attention.layers import (
    SIZES,
    D,
    H,
    N,
    T,
    assert_equals_oracle_in_float64,
    causal,
    error,
    initial_logit_std,
    make,
    stream,
)
from tests.lanes import thinned

VARIANTS = [
    'merged(init="product")',
    'low_rank(rank=1)',
    'low_rank(rank=32)',
    'shared_qk(key_norm=True)',
    'shared_qk(self_mask=True)',
    'shared_qk(temperature="learned")',
    'shared_qk(temperature=0.5, key_norm=True, self_mask=True)',
    'symmetric_skew(symmetric_rank=0, skew_rank=3)',
    'symmetric_skew(symmetric_rank=5, skew_rank=0)',
    'symmetric_skew(symmetric_rank=5, skew_rank=3)',
    'double(size=7, which="q")',
    'double(which="k", size=40)',
    'collaborative(size=9)',
    'nonlinear_query(form="bottleneck")',
    'nonlinear_query(rank=5)',
    'latent(size=6)',
    'latent(size=6, query_size=10)',
]

ROTARY = ['latent(rope_size=4)', 'latent(rope_size=6, query_size=10, size=5)', 'low_rank(rank=2)']


@pytest.mark.parametrize('score', thinned(VARIANTS, every=2))
def test_an_option_keeps_the_contract(score):
    assert_equals_oracle_in_float64(make((score, 'vo'), biases=True))
    contract.test_it_equals_the_oracle((score, 'vo'))
    contract.test_the_parameter_count_is_as_declared((score, 'vo'))


@pytest.mark.parametrize('score', ROTARY)
def test_an_option_keeps_its_meaning_under_rotation(score):
    contract.test_rotary_positions_equal_the_complex_form(score)
    layer = make((score, 'vo'), positions='rope')
    near, far = (layer(stream(), causal()), layer(stream()[:, ::-1], causal()))
    assert error(near[:, -1], np.asarray(far[:, -1])) > 1e-3  # positions are told apart


@pytest.mark.parametrize(
    ('d_model', 'num_heads'), [(64, 8), pytest.param(512, 1, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(
    'score', thinned([v for v in VARIANTS if 'temperature=0.5' not in v], every=2)
)
def test_initial_logits_have_unit_standard_deviation(score, d_model, num_heads):
    contract.test_initial_logits_have_unit_standard_deviation(score, d_model, num_heads)


def test_rotary_channels_are_part_of_the_scale():
    sizes = {'d_model': 256, 'num_heads': 4, 'head_size': 32, 'positions': 'rope'}
    assert 0.9 < initial_logit_std('latent(rope_size=64)', 'vo', num_seeds=1, **sizes) < 1.1


@pytest.mark.parametrize(('which', 'other'), [('q', 'k'), ('k', 'q')])
def test_a_double_projection_leaves_the_other_side_as_in_qk(which, other):
    double, qk = (make((s, 'vo'), moved=False).score for s in (f'double(which={which!r})', 'qk'))
    left = {'q': 'w_q_DNH', 'k': 'w_k_DKH'}[other]
    np.testing.assert_array_equal(getattr(double, left)[...], getattr(qk, left)[...])
    assert getattr(double, f'w_{other}_outer_DR') is None
    assert getattr(double, f'w_{which}_outer_DR').shape == (D, D)


def test_rotary_latents_can_be_cached():
    contract.test_cached_decoding_equals_the_whole(('latent(rope_size=4)', 'vo'), 'rope')


def self_logits(score: str, d_model: int = 256) -> np.ndarray:
    """Initial logits of tokens with themselves."""
    sizes = {'d_model': d_model, 'num_heads': 8, 'num_kv_heads': 8, 'head_size': d_model // 8}
    circuit = make((score, 'no_v'), moved=False, **sizes).score
    x_BTD = stream(64, d_model=d_model)
    q_BTNH, k_BSNH = circuit.queries(x_BTD), circuit.keys(circuit.cached(x_BTD))
    k_BSNH = jnp.broadcast_to(k_BSNH, q_BTNH.shape)
    return np.asarray(circuit.scale * (q_BTNH * k_BSNH).sum(-1))


@pytest.mark.parametrize(
    ('score', 'mean', 'std'),
    [
        ('shared_qk(key_norm=True)', 32**0.5 / (1 + 1 / 8) ** 0.5, 0.7),
        ('neither', 32**0.5, 2**0.5),
        ('neither_full', 256**0.5, 2**0.5),
        ('symmetric', 0.0, 2**0.5),
        ('symmetric_skew(symmetric_rank=0)', 0.0, 0.0),
        ('pairwise', 0.0, 1.0),
    ],
)
def test_the_diagonal_is_as_documented(score, mean, std):
    logits = self_logits(score)
    assert abs(logits.mean() - mean) < 0.2, logits.mean()
    assert abs(logits.std() - std) < 0.2, logits.std()


def test_key_norm_makes_keys_of_length_one():
    score = make(('shared_qk(key_norm=True)', 'vo'), biases=True).score
    k_BSNH = score.keys(score.cached(stream()))
    np.testing.assert_allclose(jnp.linalg.norm(k_BSNH, axis=-1), 1.0, rtol=1e-5)
    with pytest.raises(NotImplementedError, match='not bilinear'):
        score.matrix()
    score = make(('shared_qk(key_norm=True)', 'vo')).score
    gradient = jax.grad(lambda y: score.keys(score.cached(y)).sum())(jnp.zeros((1, 1, D)))
    assert np.isfinite(gradient).all()


def test_a_token_hides_from_itself_only_beside_others():
    layer, x_BTD = make(('shared_qk(self_mask=True)', 'no_vo')), stream()
    out_BTD = layer(x_BTD, causal())
    # no_vo copies the stream: the first token can read nobody else, the second only the first.
    np.testing.assert_allclose(out_BTD[:, 0], x_BTD[:, 0], rtol=1e-5)
    np.testing.assert_allclose(out_BTD[:, 1], x_BTD[:, 0], rtol=1e-5)


def test_a_temperature_divides_the_logits():
    cold, plain = (make((f'shared_qk(temperature={t})', 'vo')).score for t in (4.0, None))
    assert cold.scale == plain.scale / 4
    learned = make(('shared_qk(temperature="learned")', 'vo'), moved=False).score
    heat_N = jnp.arange(1.0, N + 1)
    before_NDE = learned.matrix()
    learned.g_temperature_N[...] = heat_N
    np.testing.assert_allclose(learned.matrix(), heat_N[:, None, None] * before_NDE, rtol=1e-5)


def test_nonlinear_queries_are_not_linear():
    score = make(('nonlinear_query', 'vo')).score
    x_BTD = stream()
    q_BTNH = score.queries(x_BTD)
    assert error(score.queries(2 * x_BTD), np.asarray(2 * q_BTNH)) > 1e-2
    with pytest.raises(NotImplementedError, match='not bilinear'):
        score.matrix()
    score.g_out_D[...] = jnp.zeros(D)
    np.testing.assert_allclose(score.queries(x_BTD), x_BTD.reshape(2, T, N, H) / 2)


@pytest.mark.parametrize(
    ('score', 'change', 'message'),
    [
        ('merged(init="svd")', {}, "init='svd'.*must be one of 'dense', 'product'"),
        ('low_rank(rank=0)', {}, 'rank=0.*from 1 to d_model=32'),
        ('low_rank(rank=33)', {}, 'rank=33.*from 1 to d_model=32'),
        ('low_rank(rank=2.0)', {}, r'rank=2\.0.*whole number'),
        ('low_rank(rank=True)', {}, 'rank=True.*whole number'),
        ('shared_qk(key_norm=1)', {}, 'key_norm=1.*must be one of False, True'),
        ('shared_qk(self_mask="yes")', {}, "self_mask='yes'.*must be one of False, True"),
        ('shared_qk(temperature=0)', {}, "temperature=0.*above 0, 'learned' or None"),
        ('shared_qk(temperature="free")', {}, "temperature='free'.*above 0"),
        ('symmetric_skew(symmetric_rank=33)', {}, 'symmetric_rank=33.*from 0 to d_model=32'),
        ('symmetric_skew(skew_rank=17)', {}, 'skew_rank=17.*d_model // 2=16'),
        ('symmetric_skew(symmetric_rank=0, skew_rank=0)', {}, 'above 0'),
        ('double(size=0)', {}, 'size=0.*of at least 1'),
        ('double(which="v")', {}, "which='v'.*'q', 'k', 'both'"),
        ('collaborative(size=-1)', {}, 'size=-1.*of at least 1'),
        ('nonlinear_query(form="linear")', {}, "form='linear'.*'residual', 'bottleneck'"),
        ('nonlinear_query(rank=0)', {}, 'rank=0.*of at least 1'),
        ('latent(size=64)', {}, 'size=64.*from 1 to d_model=32'),
        ('latent(query_size=0)', {}, 'query_size=0.*from 1 to d_model=32'),
        ('latent(rope_size=4)', {}, 'rope_size=4.*needs positions=rope, not none'),
        ('neither', {'head_size': 16}, 'neither uses slices'),
        ('nonlinear_query', {'head_size': 16}, 'nonlinear_query uses slices'),
        ('gauge_fixed', {'head_size': 64}, 'head_size=64 must be at most d_model=32'),
        ('gauge_fixed(rows=((0, 1),))', {}, 'for each of num_kv_heads=4 heads, head_size=8'),
        ('latent', {'positions': 'rope'}, r'positions=rope needs latent\(rope_size=G\)'),
        ('latent(rope_size=5)', {'positions': 'rope'}, 'rope_size=5.*even'),
        ('low_rank(rank=3)', {'positions': 'rope'}, 'rank=3.*even'),
        ('full_size', {'positions': 'rope', 'd_model': 33}, 'd_model=33 must be even'),
        *(
            (score, {'positions': 'rope'}, f'{score} has no rotary form')
            for score in (
                'symmetric',
                'symmetric_skew',
                'gauge_fixed',
                'collaborative',
                'query_free_full',
                'neither_full',
            )
        ),
    ],
)
def test_what_cannot_be_built_is_refused_in_one_sentence(score, change, message):
    with pytest.raises(SpecError, match=message) as refusal:
        registry.check(AttentionSpec(score=score, **{**SIZES, **change}))
    assert score.partition('(')[0] in str(refusal.value) and '\n' not in str(refusal.value)


def test_normed_keys_cannot_be_values():
    make(('shared_qk', 'k_is_v'))
    with pytest.raises(SpecError, match='value k_is_v .* cannot be used with .* not bilinear'):
        make(('shared_qk(key_norm=True)', 'k_is_v'))


@pytest.mark.parametrize('score', ['symmetric', 'pairwise'])
def test_tied_scores_do_not_share_their_queries(score):
    with pytest.raises(SpecError, match='uses the query projection'):
        make((score, 'q_is_v'))
