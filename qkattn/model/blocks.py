"""The parts of a transformer besides attention: norm, MLP, and the block of one layer."""

import functools
import zlib
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.attention import Attention, Mask, rms_norm
from qkattn.attention.parameters import initialization, project, weight
from qkattn.config import ModelConfig
from qkattn.model.sites import attention_spec

# A residual branch without its norm and dropout: x_BTD -> what is added to the stream.
Branch = Callable[[jax.Array], jax.Array]

NORM_EPSILON = 1e-5


class Norm(nnx.Module):
    """(x - mean) / sd * gain + bias ('layernorm') or x / rms * gain ('rmsnorm').

    Normalized in float32; gain and bias act in the dtype of x. Ba et al. 2016; Zhang & Sennrich
    2019.
    """

    def __init__(self, config: ModelConfig, *, gain: bool = True):
        self.centered = config.norm == 'layernorm'
        has_bias = self.centered and config.biases
        self.g_D = nnx.Param(jnp.ones((config.d_model,), jnp.float32)) if gain else None
        self.b_D = nnx.Param(jnp.zeros((config.d_model,), jnp.float32)) if has_bias else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        wide_BTD = x_BTD.astype(jnp.promote_types(x_BTD.dtype, jnp.float32))
        if self.centered:
            wide_BTD = wide_BTD - wide_BTD.mean(-1, keepdims=True)
        out_BTD = rms_norm(wide_BTD, epsilon=NORM_EPSILON).astype(x_BTD.dtype)
        if self.g_D is not None:
            out_BTD = out_BTD * self.g_D[...]
        if self.b_D is not None:
            out_BTD = out_BTD + self.b_D[...]
        return out_BTD


def gelu(x_BTF: jax.Array) -> jax.Array:
    """x Phi(x) with the normal distribution function Phi, in float32 or wider.

    From erf: with erfc, as in jax.nn.gelu, an MLP on a CPU takes 1.1 to 1.5 times as long.
    """
    wide_BTF = x_BTF.astype(jnp.promote_types(x_BTF.dtype, jnp.float32))
    return (0.5 * wide_BTF * (1 + jax.lax.erf(wide_BTF * 0.5**0.5))).astype(x_BTF.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    'gelu': gelu,
    'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
    'relu': jax.nn.relu,
    # The function of the gate, where the MLP has one.
    'geglu': gelu,
    'swiglu': jax.nn.silu,
    'reglu': jax.nn.relu,
}


class MLP(nnx.Module):
    """f(x W_in + b_in) W_out + b_out, where f is GELU (Hendrycks & Gimpel 2016) or ReLU.

    With a gate, (f(x W_gate + b_gate) * (x W_in + b_in)) W_out + b_out, where f is GELU, SiLU or
    ReLU: GEGLU, SwiGLU, ReGLU (Shazeer 2020, arXiv 2002.05202), 3 D F parameters.
    """

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        D = config.d_model
        F = config.mlp_width
        gated = config.has_gate
        biased = config.biases
        self.activation = config.activation
        self.dropout = config.activation_dropout
        with initialization(config.init, config.init_mlp):
            self.w_in_DF = weight(key, 'w_in_DF', (D, F), D**-0.5)
            self.w_out_FD = weight(key, 'w_out_FD', (F, D), F**-0.5, config.num_branches**-0.5)
            self.w_gate_DF = weight(key, 'w_gate_DF', (D, F), D**-0.5) if gated else None
        self.b_in_F = nnx.Param(jnp.zeros((F,), jnp.float32)) if biased else None
        self.b_out_D = nnx.Param(jnp.zeros((D,), jnp.float32)) if biased else None
        self.b_gate_F = nnx.Param(jnp.zeros((F,), jnp.float32)) if gated and biased else None

    def __call__(self, x_BTD: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        activation = ACTIVATIONS[self.activation]
        hidden_BTF = project(x_BTD, self.w_in_DF, self.b_in_F)
        if self.w_gate_DF is None:
            hidden_BTF = activation(hidden_BTF)
        else:
            gate_BTF = activation(project(x_BTD, self.w_gate_DF, self.b_gate_F))
            hidden_BTF = gate_BTF * hidden_BTF
        hidden_BTF = drop(hidden_BTF, self.dropout, dropout_key)
        return project(hidden_BTF, self.w_out_FD, self.b_out_D)


def drop(x_BTD: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Inverted dropout; the identity without a key."""
    if key is None or not rate:
        return x_BTD
    keep_BTD = jax.random.bernoulli(key, 1 - rate, x_BTD.shape)
    return jnp.where(keep_BTD, x_BTD / (1 - rate), 0)


class Block(nnx.Module):
    """One layer: attention, then an MLP, each a residual branch f on the stream x.

    x + f(norm(x)) (pre-norm, Xiong et al. 2020) or norm(x + f(x)) (post-norm, Vaswani et al. 2017).
    """

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        self.config = config
        self.attention_norm = Norm(config, gain=config.attention_gain)
        self.attention = Attention(attention_spec(config), key=key)
        self.mlp_norm = Norm(config)
        self.mlp = MLP(config, key=key)

    def __call__(
        self, x_BTD: jax.Array, mask: Mask, dropout_key: jax.Array | None = None
    ) -> jax.Array:
        probability_key, *branch_keys = split_key(dropout_key, 3)
        attend = self.attend(self.attention, mask, probability_key)
        return self.around([attend], x_BTD, branch_keys)

    def attend(
        self,
        attention: Attention,
        mask: Mask,
        key: jax.Array | None,
        y_BSD: jax.Array | None = None,
    ) -> Branch:
        """The branch of an attention, which attends to y_BSD where it is given.

        Probabilities are dropped with the key; None is no dropout.
        """

        def branch(x_BTD: jax.Array) -> jax.Array:
            rate = self.config.probability_dropout
            return attention(x_BTD, mask, y_BSD=y_BSD, dropout=rate, dropout_key=key)

        return branch

    def at(self, layer: int | jax.Array) -> 'Block':
        """The same block as layer number `layer`, from 0, of all layers."""
        copy = jax.tree.map(lambda leaf: leaf, self)
        for name, module in vars(self).items():
            if isinstance(module, Attention):
                setattr(copy, name, module.at(layer))
        return copy

    def around(
        self,
        attends: Sequence[Branch],
        x_BTD: jax.Array,
        keys: Sequence[jax.Array | None] | None = None,
    ) -> jax.Array:
        """The output of the block with `attends` as the branches of its attentions.

        In decoding, for example, they attend to cached keys. `keys` are those of the dropout on
        each branch, the MLP's last; None is no dropout.
        """
        if keys is None:
            keys = [None] * (len(attends) + 1)
        *attention_keys, mlp_key = keys
        norms = self.attention_norms()
        for attend, norm, key in zip(attends, norms, attention_keys, strict=True):
            x_BTD = self.add(attend, norm, x_BTD, key)

        inner_key = None if mlp_key is None else jax.random.fold_in(mlp_key, 1)

        def mlp(x_BTD: jax.Array) -> jax.Array:
            return self.mlp(x_BTD, inner_key)

        return self.add(mlp, self.mlp_norm, x_BTD, mlp_key)

    def attention_norms(self) -> list[Norm]:
        """The norms of the attentions, in the order of their branches."""
        return [self.attention_norm]

    def add(self, branch: Branch, norm: Norm, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        """One residual branch with its norm and dropout."""
        rate = self.config.dropout
        if self.config.norm_position == 'post':
            return norm(x_BTD + drop(branch(x_BTD), rate, key))
        return x_BTD + drop(branch(norm(x_BTD)), rate, key)


class CrossBlock(Block):
    """A Block that also cross-attends to the encoder's output, after its self-attention."""

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        super().__init__(config, key=key)
        self.cross_norm = Norm(config, gain=config.attention_gain)
        self.cross_attention = Attention(
            attention_spec(config.cross), key=module_key(key, 'cross_attention')
        )

    def __call__(
        self,
        x_BTD: jax.Array,
        mask: Mask,
        dropout_key: jax.Array | None = None,
        *,
        y_BSD: jax.Array | None = None,
        cross_mask: Mask | None = None,
    ) -> jax.Array:
        """As Block; y_BSD is the encoder's output, and cross_mask says what of it is visible."""
        probability_key, cross_probability_key, *branch_keys = split_key(dropout_key, 5)
        attends = [
            self.attend(self.attention, mask, probability_key),
            self.attend(self.cross_attention, cross_mask, cross_probability_key, y_BSD),
        ]
        return self.around(attends, x_BTD, branch_keys)

    def attention_norms(self) -> list[Norm]:
        return [self.attention_norm, self.cross_norm]


def module_key(key: jax.Array, name: str) -> jax.Array:
    """The key of a module whose parameters have the names of another module's.

    A checksum of the name is folded in: fold_in(key, 1) would be the key of layer 1, which
    jax.random.split draws.
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def split_key(key: jax.Array | None, count: int) -> Sequence[jax.Array | None]:
    """`count` keys; without a key, `count` times None."""
    if key is None:
        return [None] * count
    return list(jax.random.split(key, count))
