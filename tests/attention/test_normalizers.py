"""What takes the place of softmax: the oracle, masks, decoding, gradients, refusals."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from qkattn.attention import NORMALIZERS, attend, registry
from tests.attention import examples, layers  # noqa: F401, the normalizer `rectified`
from tests.attention import test_contract as contract
from tests.attention.layers import causal, make, stream
from tests.lanes import slow_except

NAMES = [*NORMALIZERS, 'sigmoid(bias=-1.5)', 'rectified:Rectified']
QUICK = ('softmax', 'sigmoid', 'entmax15')
SIMPLEX = ('softmax', 'entmax15', 'sparsemax')
QKVO = ('qk', 'vo')


@pytest.mark.parametrize('name', slow_except(QUICK, NAMES))
def test_a_layer_with_the_normalizer_equals_the_oracle(name):
    layer = make(QKVO, normalizer=name, biases=True, num_kv_heads=2)
    layers.assert_equals_oracle(layer, stream(), contract.mask_of_lengths((7, 5), causal=True))
    layers.assert_equals_oracle_in_float64(layer)


@pytest.mark.parametrize('name', slow_except(QUICK, NAMES))
def test_decoding_from_a_cache_equals_attention_over_the_whole_sequence(name):
    layer = make(QKVO, normalizer=name, biases=True, num_kv_heads=2)
    contract.assert_cached_decoding_is_exact(layer)


@pytest.mark.parametrize('name', NAMES)
def test_probabilities_are_those_of_the_slow_form(name):
    """A normalizer gives the same probabilities as its plain numpy form.

    A normalizer, such as softmax, turns the logits of a query into probabilities. The plain form
    gets only the visible keys.
    """
    # Rows are queries, columns are keys.
    logits_and_visible_keys = [
        ([0, 0, 0, 0], [1, 1, 1, 1]),  # four equal logits
        ([3, -2, 0.5, 3], [1, 1, 0, 1]),  # a hidden key
        ([1e3, -1e3, 0, 999.7], [1, 1, 1, 1]),  # logits of very different sizes
        ([-1e4, -9e3, 7, 2], [0, 1, 0, 0]),  # a single visible key
    ]
    s_TS = np.array([logits_S for logits_S, _ in logits_and_visible_keys])
    mask_TS = np.array([visible_S for _, visible_S in logits_and_visible_keys], bool)
    normalizer = registry.find_normalizer(name)
    # `simplex` says that probabilities sum to 1.
    assert normalizer.simplex == (name in SIMPLEX)

    with jax.enable_x64(True):
        # As in a layer, the logits of hidden keys are far below all others.
        hidden_logit = jnp.finfo(float).min / 2
        masked_s_TS = jnp.where(mask_TS, s_TS, hidden_logit)
        p_TS = np.asarray(normalizer(masked_s_TS, jnp.asarray(mask_TS)))

    # Hidden keys have the probability 0. Visible keys have the probability of the plain form.
    assert np.all(p_TS[~mask_TS] == 0)
    for t in range(len(s_TS)):
        visible_S = mask_TS[t]
        want_of_visible = normalizer.reference(s_TS[t, visible_S])
        np.testing.assert_allclose(p_TS[t, visible_S], want_of_visible, rtol=1e-12, atol=1e-15)
        if normalizer.simplex:
            np.testing.assert_allclose(want_of_visible.sum(), 1, rtol=1e-12)


@pytest.mark.parametrize('name', slow_except(QUICK, NAMES))
def test_gradients_are_those_of_finite_differences(name):
    """Entmax and sparsemax have differentiation rules of their own."""
    normalizer = registry.find_normalizer(name)
    mask_TS = jnp.ones((3, 5), bool)
    with jax.enable_x64(True):
        s_TS = jax.random.normal(jax.random.key(1), (3, 5), jnp.float64)
        check_grads(lambda s_TS: normalizer(s_TS, mask_TS), (s_TS,), order=1, atol=1e-6)


@pytest.mark.parametrize('name', ['entmax15', 'sparsemax'])
@pytest.mark.parametrize('S', slow_except([384], [384, 1024]))
def test_one_key_far_above_many_has_all_probability(name, S):
    """Entmax and sparsemax give exactly 0 to keys whose logits are far below the largest.

    If one key has all probability, small changes of logits change nothing. So the gradient is 0.
    """
    normalizer = registry.find_normalizer(name)
    mask_S = jnp.ones(S, bool)
    largest = S // 2
    s_S = jax.random.normal(jax.random.key(0), (S,)).at[largest].set(9.0)
    p_S, pull_back = jax.vjp(lambda s_S: normalizer(s_S, mask_S), s_S)
    gradient_S = pull_back(s_S)[0]

    np.testing.assert_array_equal(p_S > 0, np.arange(S) == largest)
    np.testing.assert_allclose(p_S.sum(), 1, rtol=1e-6)
    np.testing.assert_allclose(gradient_S, 0, atol=1e-6)


@pytest.mark.parametrize('name', slow_except(QUICK, NAMES))
def test_a_query_without_visible_keys_is_finite(name):
    """A query that sees no key gives no NaN, neither in the output nor in gradients."""
    x_BTNH = 1 + stream().reshape(2, 7, 4, 8)
    blind_query = 2
    mask_BTS = causal().at[:, blind_query].set(False)
    normalizer = registry.find_normalizer(name)

    def loss(q_BTNH, k_BSKH, v_BSKH):
        o_BTNH = attend(q_BTNH, k_BSKH, v_BSKH, mask_BTS, scale=1.0, normalizer=normalizer)
        return jnp.square(o_BTNH).sum(), o_BTNH

    gradients, o_BTNH = jax.grad(loss, (0, 1, 2), has_aux=True)(x_BTNH, x_BTNH, x_BTNH)
    for gradient in gradients:
        assert np.isfinite(gradient).all()

    # If probabilities must sum to 1, all are equal, so the output is the mean of the values.
    # Otherwise all probabilities are 0, and the output is 0.
    want_BNH = x_BTNH.mean(1) if name in SIMPLEX else jnp.zeros((2, 4, 8))
    np.testing.assert_allclose(o_BTNH[:, blind_query], want_BNH, atol=1e-6)
