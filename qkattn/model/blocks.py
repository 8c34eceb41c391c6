"""The parts of a transformer around attention: norm, MLP, block, and the stack of layers."""

from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import Attention
from qkattn.attention.spec import weight
from qkattn.config import ModelConfig


class Norm(nnx.Module):
    """(x - mean) / sd * gain + bias ('layernorm') or x / rms * gain ('rmsnorm'), in float32.

    Weights D, and D more for the bias of a layer norm with biases.
    Ba et al. 2016; Zhang & Sennrich 2019.
    """

    def __init__(self, config: ModelConfig):
        self.centered = config.norm == 'layernorm'
        self.g_D = nnx.Param(jnp.ones((config.d_model,), jnp.float32))
        biased = self.centered and config.biases
        self.b_D = nnx.Param(jnp.zeros((config.d_model,), jnp.float32)) if biased else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        wide_BTD = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
        if self.centered:
            wide_BTD = wide_BTD - wide_BTD.mean(-1, keepdims=True)
        scale_BT1 = jax.lax.rsqrt(jnp.square(wide_BTD).mean(-1, keepdims=True) + 1e-5)
        out_BTD = (wide_BTD * scale_BT1).astype(x_BTD.dtype) * self.g_D[...]
        return out_BTD if self.b_D is None else out_BTD + self.b_D[...]


class MLP(nnx.Module):
    """gelu(x W_in + b_in) W_out + b_out; weights 2 D F. Hendrycks & Gimpel 2016."""

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        D, F = config.d_model, config.mlp_width
        self.approximate = config.activation == 'gelu_tanh'
        self.w_in_DF = weight(key, 'w_in_DF', (D, F), D**-0.5)
        self.w_out_FD = weight(key, 'w_out_FD', (F, D), (2 * config.num_layers * F) ** -0.5)
        self.b_in_F = nnx.Param(jnp.zeros((F,), jnp.float32)) if config.biases else None
        self.b_out_D = nnx.Param(jnp.zeros((D,), jnp.float32)) if config.biases else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        hidden_BTF = x_BTD @ self.w_in_DF[...]
        if self.b_in_F is not None:
            hidden_BTF = hidden_BTF + self.b_in_F[...]
        out_BTD = jax.nn.gelu(hidden_BTF, self.approximate) @ self.w_out_FD[...]
        return out_BTD if self.b_out_D is None else out_BTD + self.b_out_D[...]


def drop(x_BTD: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout; the identity without a key."""
    if key is None or not rate:
        return x_BTD
    keep_BTD = jax.random.bernoulli(key, 1 - rate, x_BTD.shape)
    return jnp.where(keep_BTD, x_BTD / (1 - rate), 0)


class Block(nnx.Module):
    """x + attention(norm(x)), then x + mlp(norm(x)): pre-norm (Xiong et al. 2020)."""

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        self.dropout = config.dropout
        self.attention_norm = Norm(config)
        self.attention = Attention(config.attention, key=key)
        self.mlp_norm = Norm(config)
        self.mlp = MLP(config, key=key)

    def __call__(
        self, x_BTD: jax.Array, mask_BTS: jax.Array, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        attention_key, *keys = (
            [None] * 3 if dropout_key is None else jax.random.split(dropout_key, 3)
        )

        def attend(y_BTD: jax.Array) -> jax.Array:
            return self.attention(y_BTD, mask_BTS, dropout=self.dropout, dropout_key=attention_key)

        return self.around(attend, x_BTD, keys)

    def around(
        self, attend: Callable, x_BTD: jax.Array, keys: Sequence[jax.Array | None] = (None, None)
    ) -> jax.Array:
        """The block with `attend` (normed stream -> what is added) as its attention."""
        x_BTD = x_BTD + drop(attend(self.attention_norm(x_BTD)), self.dropout, keys[0])
        return x_BTD + drop(self.mlp(self.mlp_norm(x_BTD)), self.dropout, keys[1])


def stack_blocks(config: ModelConfig, *, key: jax.Array) -> Block:
    """L blocks as one, every parameter with a leading axis L."""
    return jax.vmap(lambda key: Block(config, key=key))(jax.random.split(key, config.num_layers))


def run_blocks(
    blocks: Block,
    x_BTD: jax.Array,
    mask_BTS: jax.Array,
    *,
    config: ModelConfig,
    dropout_key: jax.Array | None = None,
) -> jax.Array:
    """Passes x through the stack, layer after layer, in one scan."""

    def layer(x_BTD, inputs):
        block, key = inputs
        return block(x_BTD, mask_BTS, key), None

    if config.remat:
        layer = jax.checkpoint(layer, prevent_cse=False)
    keys = None if dropout_key is None else jax.random.split(dropout_key, config.num_layers)
    return jax.lax.scan(layer, x_BTD, (blocks, keys), unroll=config.unroll)[0]
