"""Options of Scores and Values keep the same contract as the registered forms."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import VALUES, Mask
from qkattn.attention.scores import key_latents
from qkattn.attention.values import value_latents
from tests.attention import examples, layers
from tests.attention import test_contract as contract
from tests.attention.layers import D, H, T, causal, error, in_float64, make, stream
from tests.lanes import mostly_slow, slow_except

ROWS = ((5, 0, 31, 7, 9, 30, 2, 3), *(tuple(range(8)),) * 3)
SCORE_OPTIONS = [
    'merged(init="product")',
    'low_rank(rank=1)',
    'low_rank(rank=32)',
    'shared_qk(key_norm=True)',
    'shared_qk(self_mask=True)',
    'shared_qk(temperature="learned")',
    'shared_qk(temperature=0.5, key_norm=True, self_mask=True)',
    'examples.symmetric_skew:SymmetricSkew(symmetric_rank=0, skew_rank=3)',
    'examples.symmetric_skew:SymmetricSkew(symmetric_rank=5, skew_rank=0)',
    'examples.symmetric_skew:SymmetricSkew(symmetric_rank=5, skew_rank=3)',
    f'examples.gauge_fixed:GaugeFixedQK(rows={ROWS})',
    'double(size=7, which="q")',
    'double(which="k", size=40)',
    'examples.collaborative:Collaborative(size=9)',
    'nonlinear_query(form="bottleneck")',
    'nonlinear_query(rank=5)',
    'latent(size=6)',
    'latent(size=6, query_size=10)',
]
VALUE_OPTIONS = [
    'merged_vo(init="product")',
    'low_rank(rank=3)',
    'low_rank(rank=20)',
    'examples.gauge_fixed:GaugeFixedVO(init="product")',
    f'examples.gauge_fixed:GaugeFixedVO(columns={ROWS})',
    'double(size=5)',
]
VARIANTS = [(s, 'vo') for s in SCORE_OPTIONS] + [('qk', v) for v in VALUE_OPTIONS]
ROTARY = [('latent(rope_size=4)', 'vo'), ('low_rank(rank=2)', 'vo')]
ROTARY += [('latent(rope_size=6, query_size=10, size=5)', 'vo'), ('qk', 'k_is_v')]
SCORES_OF_UNIT_LOGITS = [s for s in SCORE_OPTIONS if 'temperature=0.5' not in s and 'rows' not in s]
VARIANTS_WITH_OUTPUTS = [
    ('latent' if name == 'latent' else 'qk', name) for name in VALUES if name != 'no_vo'
]
VARIANTS_WITH_OUTPUTS += [
    ('qk', 'examples.gauge_fixed:GaugeFixedVO'),
    ('qk', 'examples.hadamard:Hadamard'),
    ('qk', 'examples.identity_start:OutputFromIdentity'),
]
VARIANTS_WITH_OUTPUTS += [('qk', 'low_rank(rank=3)'), ('qk', 'merged_vo(init="product")')]
# A Score, positions, and the number of key heads for all queries: 1 if absorbed, else 4.
LATENT_FORMS = [
    ('latent(size=24, query_size=10, rope_size=4)', 'rope', 4),
    ('latent(size=6)', 'none', 1),
]


@pytest.mark.parametrize('variant', mostly_slow([(pair,) for pair in VARIANTS], every=11))
def test_an_option_keeps_the_contract(variant):
    layers.assert_equals_oracle_in_float64(make(variant, biases=True))
    contract.test_a_layer_equals_the_oracle(variant)
    contract.test_a_circuit_has_as_many_parameters_as_it_declares(variant)


@pytest.mark.parametrize('variant', mostly_slow([(pair,) for pair in ROTARY], every=4))
def test_rotated_keys_keep_the_contract(variant):
    """With rotary positions ('rope'), a variant equals the slow reference, also in decoding."""
    layer = make(variant, positions='rope', biases=True)
    layers.assert_equals_oracle(layer, stream(), causal())
    contract.assert_cached_decoding_is_exact(layer)

    # Reversing the other tokens changes only their distances from the last token.
    x_BTD = stream()
    others_reversed_BTD = jnp.concatenate([x_BTD[:, -2::-1], x_BTD[:, -1:]], axis=1)
    last_BD = layer(x_BTD, causal())[:, -1]
    other_last_BD = layer(others_reversed_BTD, causal())[:, -1]
    assert error(last_BD, np.asarray(other_last_BD)) > 1e-3


@pytest.mark.parametrize(('d_model', 'num_heads'), slow_except([(64, 8)], [(64, 8), (512, 1)]))
@pytest.mark.parametrize('score', mostly_slow(SCORES_OF_UNIT_LOGITS, every=8))
def test_initial_logits_have_unit_standard_deviation(score, d_model, num_heads):
    contract.test_initial_logits_have_the_declared_standard_deviation(score, d_model, num_heads)


def test_another_standard_deviation_has_to_be_declared(monkeypatch):
    """A Score that declares a wrong standard deviation of its initial logits is refused.

    The Score `Cosine` of docs/extend.md declares 10 / sqrt(8) = 3.5, which is right. A copy
    declares 1.
    """
    # The import of `examples` has made the module `cosine` from the page.
    assert 'cosine' in examples.SOURCES
    cosine = sys.modules['cosine']

    class Undeclared(cosine.Cosine):
        """`Cosine` with the default declaration, 1."""

        def __init__(self, spec, *, key):
            super().__init__(spec, key=key)
            self.initial_logit_std = 1.0

    monkeypatch.setattr(cosine, 'Undeclared', Undeclared, raising=False)
    sizes = {'d_model': 64, 'num_heads': 8, 'num_kv_heads': 8, 'head_size': 8}
    layers.assert_initial_logits_are_as_declared('cosine:Cosine', **sizes)
    message = r'of cosine:Undeclared have the standard deviation 3\.\d+, not 1\.00; .* declare'
    with pytest.raises(AssertionError, match=message):
        layers.assert_initial_logits_are_as_declared('cosine:Undeclared', **sizes)


@pytest.mark.parametrize(
    'score',
    slow_except(
        ['shared_qk'],
        ['examples.collaborative:Collaborative', 'nonlinear_query', 'shared_qk', 'pairwise'],
    ),
)
def test_initial_logits_have_unit_standard_deviation_under_qk_norm(score):
    std = layers.initial_logit_std(score, d_model=256, num_seeds=1, head_size=64, qk_norm=True)
    assert 0.9 < std < 1.1


def test_the_scale_counts_rotary_channels():
    sizes = {'d_model': 256, 'num_heads': 4, 'head_size': 32, 'positions': 'rope'}
    std = layers.initial_logit_std('latent(rope_size=64)', 'vo', num_seeds=1, **sizes)
    assert 0.9 < std < 1.1


# Scores, with the mean and the standard deviation of logits of tokens with themselves.
DIAGONALS = [
    ('shared_qk(key_norm=True)', 32**0.5 / (1 + 1 / 8) ** 0.5, 0.7),
    ('neither', 32**0.5, 2**0.5),
    ('symmetric', 0.0, 2**0.5),
    ('neither_full', 256**0.5, 2**0.5),
    ('examples.symmetric_skew:SymmetricSkew(symmetric_rank=0)', 0.0, 0.0),
    ('pairwise', 0.0, 1.0),
]


@pytest.mark.parametrize(('score', 'mean', 'std'), slow_except(DIAGONALS[:3], DIAGONALS))
def test_initial_logits_of_tokens_with_themselves_are_as_documented(score, mean, std):
    sizes = {'d_model': 256, 'num_heads': 8, 'num_kv_heads': 8, 'head_size': 32}
    circuit = make((score, 'no_v'), moved=False, **sizes).score
    x_BTD = stream(64, d_model=256)
    q_BTNH = circuit.queries(x_BTD)
    k_BSNH = jnp.broadcast_to(circuit.keys(circuit.cached(x_BTD)), q_BTNH.shape)
    logits_BTN = np.asarray(circuit.scale * (q_BTNH * k_BSNH).sum(-1))
    assert abs(logits_BTN.mean() - mean) < 0.2
    assert abs(logits_BTN.std() - std) < 0.2


def test_a_temperature_divides_the_logits():
    cold = make(('shared_qk(temperature=4.0)', 'vo')).score
    plain = make(('shared_qk', 'vo')).score
    assert cold.scale == plain.scale / 4


def test_normed_keys_have_a_finite_gradient_at_zero():
    score = make(('shared_qk(key_norm=True)', 'vo')).score

    def sum_of_keys(y_BSD):
        return score.keys(score.cached(y_BSD)).sum()

    assert np.isfinite(jax.grad(sum_of_keys)(jnp.zeros((1, 1, D)))).all()


def test_normed_keys_have_no_matrix():
    score = make(('shared_qk(key_norm=True)', 'vo')).score
    assert not score.bilinear
    with pytest.raises(NotImplementedError, match='not bilinear'):
        score.matrix()


def test_fixed_rows_are_the_identity():
    score = make((f'examples.gauge_fixed:GaugeFixedQK(rows={ROWS})', 'vo')).score
    for n, fixed in enumerate(ROWS):
        np.testing.assert_array_equal(score.w_k_DKH[list(fixed), n], np.eye(H))

        # Free rows begin at the first fixed row and wrap around.
        first = fixed[0]
        all_rows = [d % D for d in range(first, first + D)]
        free = [d for d in all_rows if d not in fixed]
        np.testing.assert_array_equal(score.w_k_DKH[free, n], score.w_k_free_CKH[:, n])


def test_fixed_columns_are_the_identity():
    value = make(('qk', f'examples.gauge_fixed:GaugeFixedVO(columns={ROWS})')).value
    w_o_NHD = np.asarray(value.output_matrix(None))
    for n, fixed in enumerate(ROWS):
        w_o_HD = w_o_NHD[n]
        free = [d for d in range(D) if d not in fixed]
        np.testing.assert_array_equal(w_o_HD[:, fixed], np.eye(H))
        np.testing.assert_array_equal(w_o_HD[:, free], value.w_o_NHC[n])


def test_fixed_rows_go_round_the_stream_by_default():
    sizes = {'d_model': 10, 'num_heads': 3, 'num_kv_heads': 3, 'head_size': 4}
    score = make(('examples.gauge_fixed:GaugeFixedQK', 'vo'), **sizes).score
    assert score.rows == ((0, 1, 2, 3), (4, 5, 6, 7), (8, 9, 0, 1))


def test_a_head_of_all_channels_has_fixed_rows_only():
    score = make(
        ('examples.gauge_fixed:GaugeFixedQK', 'vo'), num_heads=1, num_kv_heads=1, head_size=D
    ).score
    np.testing.assert_array_equal(score.cached(stream())['k_BSKH'][:, :, 0], stream())


@pytest.mark.parametrize(
    ('score', 'positions', 'num_heads'), slow_except(LATENT_FORMS[1:], LATENT_FORMS)
)
def test_absorbed_and_written_out_keys_of_latents_are_the_same_attention(
    score, positions, num_heads, monkeypatch
):
    """Latent attention caches one latent per token, and attends to it in two equivalent forms.

    - Written out: keys and values are computed from the latent, for each of 4 heads.
    - Absorbed: W_K and W_V act on queries and outputs, and the latent is the only head.

    T queries and S keys take the absorbed form if T R H + T S R < S R H + T S H. Latents have R = 6
    or 24 channels, and heads have H = 8. `num_heads` is the number of key heads for T = S = 7.
    """
    with jax.enable_x64(True):
        layer, x_BTD = in_float64((make((score, 'latent'), positions=positions), stream()))
        cache = layer.cached(x_BTD)
        with monkeypatch.context() as patch:
            for module in (key_latents, value_latents):
                patch.setattr(module, 'absorbing_is_cheaper', lambda *_: False)
            written_out_BTD = layer(x_BTD)

        def assert_same_attention(queries_BTD, mask, num_heads):
            """Compares the outputs of these queries, and the number of key and value heads."""
            num_queries = queries_BTD.shape[1]
            _, k_BSKH = layer.score.queries_and_keys(queries_BTD, cache)
            v_BSKH, _ = layer.value.values_and_output(cache, layer.score, num_queries)
            assert k_BSKH.shape[2] == num_heads
            assert v_BSKH.shape[2] == num_heads
            got_BTD = layer.attend_to(queries_BTD, cache, mask)
            assert error(got_BTD, written_out_BTD[:, -num_queries:]) < 1e-12

        # All queries at once, then only the last query, which takes the absorbed form.
        last = Mask(causal=True, first_query=jnp.int32(T - 1))
        assert_same_attention(x_BTD, Mask(causal=True), num_heads)
        assert_same_attention(x_BTD[:, -1:], last, num_heads=1)

        # For each token, the cache has the latent and one key of `rope_size` rotated channels.
        cached_floats = sum(array.shape[-1] for array in cache.values())
        latent_size = layer.score.w_down_DR.shape[1]
        rope_size = layer.score.rope_size or 0
        assert cached_floats == latent_size + rope_size


@pytest.mark.parametrize(
    ('score', 'positions'),
    slow_except([('latent(size=6)', 'none')], [form[:2] for form in LATENT_FORMS]),
)
def test_keys_of_latents_with_biases_are_written_out(score, positions):
    layer = make((score, 'latent'), positions=positions, biases=True)
    _, k_BSKH = layer.score.queries_and_keys(stream()[:, -1:], layer.cached(stream()))
    assert k_BSKH.shape[2] == 4


def test_an_output_from_the_identity_starts_as_no_output_matrix():
    trained = make(('qk', 'examples.identity_start:OutputFromIdentity'), moved=False, biases=True)
    absent = make(('qk', 'no_o'), moved=False, biases=True)
    x_BTD = stream()
    np.testing.assert_array_equal(trained(x_BTD), absent(x_BTD))


def test_initial_outputs_have_the_residual_gain_as_standard_deviation():
    """The initial output of attention has the standard deviation `residual_gain`.

    Here each head attends to one unit-normal y. The y of different heads are independent.
    """
    d_model = 64
    gain = 0.25
    sizes = {'d_model': d_model, 'num_heads': 4, 'num_kv_heads': 4, 'head_size': 16}
    for variant in VARIANTS_WITH_OUTPUTS:
        layer = make(variant, moved=False, residual_gain=gain, **sizes)
        # The output is the sum of y[n] B[n] over heads n.
        B_NDE = layer.value.matrix(layer.score)
        # The variance of an output feature is the sum of squares of its weights.
        mean_variance = jnp.square(B_NDE).sum() / d_model
        std = float(jnp.sqrt(mean_variance))

        expected = gain
        if 'subspace' in variant:
            # B[n] = gain W_K[n] W_K[n]^T. The mean of its diagonal raises the variance by a factor
            # of 1 + H / D, with H = 16 channels of a head and D = 64 channels of the stream.
            expected = gain * (1 + 16 / 64) ** 0.5
        assert std == pytest.approx(expected, rel=0.1), variant
