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
    causal,
    error,
    make,
    stream,
    wide,
)

R, G = 6, 4
VARIANT = (f'latent(size={R})', 'latent')
ROTARY = (f'latent(size={R}, query_size=10, rope_size={G})', 'latent')


def test_the_latent_is_the_only_cache():
    cache = make(VARIANT).cached(jnp.zeros((1, 1, D)))
    assert {name: a.shape for name, a in cache.items()} == {'latent_BSR': (1, 1, R)}
    cache = make(ROTARY, positions='rope').cached(jnp.zeros((1, 1, D)))
    assert sum(a.size for a in cache.values()) == R + G


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
        got = value.absorbed_output(o_BTNR, score, x_BTD)
        assert error(got, np.asarray(layer(x_BTD, causal()))) < 1e-12


def test_a_score_without_a_latent_is_refused():
    with pytest.raises(SpecError, match='qk has none to share; scores that have one are latent'):
        make(('qk', 'latent'))
