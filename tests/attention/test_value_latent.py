"""The value side of latent attention, which reads the latent that its Score caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import attend
from qkattn.errors import SpecError
from tests.attention.layers import (
    D,
    T,
    assert_equals_oracle_in_float64,
    causal,
    error,
    make,
    stream,
    wide,
)

R, G = 6, 4
VARIANT = (f'latent(size={R})', 'latent')
ROTARY = (f'latent(size={R}, query_size=10, rope_size={G})', 'latent')


@pytest.mark.parametrize('biases', [False, True], ids=['plain', 'biases'])
def test_it_equals_the_oracle(biases):
    with jax.enable_x64(True):
        assert_equals_oracle_in_float64(make(VARIANT, biases=biases))


def test_the_latent_is_the_only_cache():
    cache = make(VARIANT).cached(jnp.zeros((1, 1, D)))
    assert {name: a.shape for name, a in cache.items()} == {'latent_BSR': (1, 1, R)}
    cache = make(ROTARY, positions='rope').cached(jnp.zeros((1, 1, D)))
    assert sum(a.size for a in cache.values()) == R + G


def test_the_down_projection_receives_both_gradients():
    with jax.enable_x64(True):
        layer, x_BTD = wide(make(VARIANT)), wide(stream())
        untied = wide(make(('qk', 'vo'), seed=9))
        down, score, value = layer.score.w_down_DR[...], layer.score, layer.value
        untied.score.w_q_DNH[...] = score.w_q_DNH[...]
        untied.score.w_k_DKH[...] = jnp.einsum('DR,RNH->DNH', down, score.w_k_RNH[...])
        untied.value.w_v_DKH[...] = jnp.einsum('DR,RNH->DNH', down, value.w_up_v_RNH[...])
        untied.value.w_o_NHD[...] = value.w_o_NHD[...]

        def loss(layer):
            return jnp.sin(layer(x_BTD, causal())).sum()

        assert float(loss(layer)) == pytest.approx(float(loss(untied)), rel=1e-12)
        own, parts = jax.grad(loss)(layer), jax.grad(loss)(untied)
        by_keys = jnp.einsum('DNH,RNH->DR', parts.score.w_k_DKH[...], score.w_k_RNH[...])
        by_values = jnp.einsum('DNH,RNH->DR', parts.value.w_v_DKH[...], value.w_up_v_RNH[...])
        assert error(own.score.w_down_DR[...], np.asarray(by_keys + by_values)) < 1e-12
        assert np.abs(by_keys).max() > 1e-3 and np.abs(by_values).max() > 1e-3


@pytest.mark.parametrize('biases', [False, True], ids=['plain', 'biases'])
def test_the_absorbed_form_is_the_same_attention(biases):
    """One key head and one value head, both the latent: what a decoder would run."""
    with jax.enable_x64(True):
        layer, x_BTD = wide(make(VARIANT, biases=biases)), wide(stream())
        score, value = layer.score, layer.value
        cache = layer.cached(x_BTD)
        v_BS1R = value.absorbed_values(cache, score)
        assert v_BS1R.shape == (2, T, 1, R)
        o_BTNR = attend(
            score.absorbed_queries(x_BTD),
            score.absorbed_keys(cache),
            v_BS1R,
            causal(),
            scale=score.scale,
        )
        got = value.absorbed_output(o_BTNR, score)
        assert error(got, np.asarray(layer(x_BTD, causal()))) < 1e-12


def test_a_score_without_a_latent_is_refused():
    with pytest.raises(SpecError, match='qk has none to share; scores that have one are latent'):
        make(('qk', 'latent'))
