"""The language model: causality, padding, ties, depth."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.config import ModelConfig
from qkattn.model import Decoder

CONFIG = ModelConfig(d_model=32, num_layers=2, num_heads=4, context=12, vocab_size=50)
TOKENS = jax.random.randint(jax.random.key(1), (2, 12), 0, 50)


def make(**fields) -> Decoder:
    return Decoder(dataclasses.replace(CONFIG, **fields), key=jax.random.key(0))


@pytest.mark.parametrize('positions', ['learned', 'none'])
def test_no_logit_depends_on_a_later_position(positions):
    model = make(positions=positions)

    def logits_of(rows_TD, t):
        """Logits at t when every token looks up its own row, so that rows stand for positions."""
        model = make(positions=positions, vocab_size=12)
        model.w_embedding_VD[...] = rows_TD
        return model(jnp.arange(12)[None])[0, t, 0]

    rows_TD = jax.random.normal(jax.random.key(2), (12, 32))
    gradient_TD = jax.grad(logits_of)(rows_TD, 5)
    assert jnp.all(gradient_TD[6:] == 0)
    assert jnp.all(jnp.abs(gradient_TD[1:6]).max(-1) > 0)
    assert model(TOKENS).shape == (2, 12, 50)


def test_padding_is_never_read():
    model = make()
    valid_BT = jnp.arange(12)[None] >= jnp.array([[3], [0]])
    other = jnp.where(valid_BT, TOKENS, 7)
    got, want = (model(tokens, valid_BT=valid_BT) for tokens in (other, TOKENS))
    np.testing.assert_array_equal(np.asarray(got)[valid_BT], np.asarray(want)[valid_BT])
    assert np.isfinite(got).all()


def test_positions_matter_only_when_learned():
    same = jnp.full((1, 12), 3)
    assert np.ptp(np.asarray(make(positions='none')(same))[0, :, 0]) < 1e-5
    assert np.ptp(np.asarray(make()(same))[0, :, 0]) > 1e-2


def test_untied_output_has_its_own_matrix():
    tied, untied = make(), make(tied_embeddings=False)
    assert tied.w_output_DV is None
    untied.w_output_DV[...] = tied.w_embedding_VD[...].T
    np.testing.assert_allclose(untied(TOKENS), tied(TOKENS), atol=1e-5)


@pytest.mark.parametrize('norm', ['layernorm', 'rmsnorm'])
def test_norms_give_unit_scale(norm):
    model = make(norm=norm)
    x_BTD = 5 + 3 * jax.random.normal(jax.random.key(3), (2, 4, 32))
    out = np.asarray(model.final_norm(x_BTD))
    np.testing.assert_allclose((out**2).mean(-1), 1, atol=1e-4)
    assert (np.abs(out.mean(-1)).max() < 1e-5) == (norm == 'layernorm')


def test_a_sequence_longer_than_the_context_is_refused():
    with pytest.raises(ValueError, match='13 tokens do not fit into model.context=12'):
        make()(jnp.zeros((1, 13), int))


def test_layers_are_drawn_apart():
    w = make().blocks.attention.score.w_q_DNH[...]
    assert w.shape == (2, 32, 4, 8)
    assert jnp.abs(w[0] - w[1]).max() > 0.01


def test_a_deep_stack_keeps_its_scale_at_birth():
    logits = make(num_layers=24, scan_unroll=1)(TOKENS)
    assert 0.5 < float(logits.std()) < 2
