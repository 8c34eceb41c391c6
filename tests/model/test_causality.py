"""The loss at a position of a decoder does not depend on later tokens, whatever the variant."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from qkattn.attention import SCORES, VALUES
from qkattn.config import ModelConfig
from qkattn.model import build
from qkattn.model.transformer import loss
from tests.attention import examples
from tests.lanes import slow_except

T = 4
REGISTERED = [(score, 'vo') for score in SCORES]
REGISTERED += [(cls.partner, value) for value, cls in VALUES.items() if value != 'vo']
QUICK = [('qk', 'vo'), ('latent', 'latent')]


@pytest.mark.parametrize(('score', 'value'), slow_except(QUICK, [*REGISTERED, *examples.VARIANTS]))
def test_a_loss_has_no_gradient_by_the_embeddings_of_later_tokens(score, value):
    """The loss at position t depends on every token up to t, and on none after it.

    `score` names how attention computes logits, and `value` how it computes outputs.
    """
    config = ModelConfig(
        score=score,
        value=value,
        d_model=8,
        num_layers=1,
        num_heads=2,
        d_ff=8,
        context=T,
        vocab_size=T,
        tied_embeddings=False,
    )
    model = build(config, key=jax.random.key(0))
    # The token at position s is s, so only position s uses row s of the embedding.
    tokens_BT = jnp.arange(T)[None]

    def embedding_gradient(loss_weights_T):
        """The gradient of the weighted losses by the embedding of each token."""
        batch = {
            'tokens_BT': tokens_BT,
            'targets_BT': jnp.roll(tokens_BT, -1),
            'loss_weights_BT': loss_weights_T[None],
        }
        return jax.grad(loss)(model, batch).w_embedding_VD[...]

    with jax.disable_jit():  # variants share operations, but no whole program
        # Row t of the identity selects the loss at position t.
        gradient_TSD = jax.vmap(embedding_gradient)(jnp.eye(T))

    # The loss at position t depends on token s where any channel has a gradient.
    depends_TS = np.abs(gradient_TSD).max(-1) > 0
    is_causal_TS = np.tri(T, dtype=bool)  # s <= t
    np.testing.assert_array_equal(depends_TS, is_causal_TS)
