"""The value side of latent attention, which reads the latent that its Score caches."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import Mask, attend
from qkattn.attention.scores import key_latents
from qkattn.attention.values import value_latents
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
from tests.lanes import only

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


PLACED = [('latent(size=24)', 'rope'), ('latent(size=6)', 'none')]
FORMS = [*PLACED, ('latent(size=24)', 'none'), ('latent(size=6)', 'rope')]


@pytest.mark.parametrize(('score', 'positions'), only(PLACED, FORMS))
def test_the_form_with_fewer_products_is_the_same_attention(score, positions, monkeypatch):
    """R = 24 > H: absorbed for one query of seven keys; R = 6 < H: for all queries."""
    if positions == 'rope':
        score = score.replace(')', ', rope_size=4)')
    with jax.enable_x64(True):
        layer, x_BTD = wide((make((score, 'latent'), positions=positions), stream()))
        cache = layer.cached(x_BTD)
        with monkeypatch.context() as patch:
            for module in (key_latents, value_latents):
                patch.setattr(module, 'absorbing_is_cheaper', lambda *_: False)
            full_BTD = layer(x_BTD)
        last = Mask(causal=True, first_query=jnp.int32(T - 1))
        heads = []
        for z_BTD, mask in ((x_BTD, Mask(causal=True)), (x_BTD[:, -1:], last)):
            _, k_BSKH = layer.score.queries_and_keys(z_BTD, cache)
            v_BSKH, _ = layer.value.values_and_output(cache, layer.score, z_BTD.shape[1])
            heads.append((k_BSKH.shape[2], v_BSKH.shape[2]))
            got_BTD = layer.attend_to(z_BTD, cache, mask)
            assert error(got_BTD, full_BTD[:, -z_BTD.shape[1] :]) < 1e-12
        written_out = make((score, 'latent'), positions=positions, biases=True)
    assert heads == [(1, 1) if '6' in score else (4, 4), (1, 1)]
    with_biases = written_out.score.queries_and_keys(stream()[:, -1:], written_out.cached(stream()))
    assert with_biases[1].shape[2] == 4


def test_a_score_without_a_latent_is_refused():
    with pytest.raises(SpecError, match='qk has none to share; scores that have one are latent'):
        make(('qk', 'latent'))
