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

# A residual branch without its norm and dropout. It maps x_BTD to what is added to the stream.
Branch = Callable[[jax.Array], jax.Array]

NORM_EPSILON = 1e-5


class Norm(nnx.Module):
    """(x - mean) / sd * gain + bias ('layernorm') or x / rms * gain ('rmsnorm').

    The normalization is computed in float32 or wider, gain and bias in the dtype of x. Ba et al.
    2016; Zhang & Sennrich 2019.
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
    """Returns x Phi(x), where Phi is the normal distribution function, from float32 or wider.

    It uses erf. jax.nn.gelu uses erfc, with which an MLP on a CPU takes 1.1 to 1.5 times as long.
    """
    wide_BTF = x_BTF.astype(jnp.promote_types(x_BTF.dtype, jnp.float32))
    erf_BTF = jax.lax.erf(wide_BTF * 0.5**0.5)
    return (0.5 * wide_BTF * (1 + erf_BTF)).astype(x_BTF.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    'gelu': gelu,
    'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
    'relu': jax.nn.relu,
    # In an MLP with a gate, the function of the gate.
    'geglu': gelu,
    'swiglu': jax.nn.silu,
    'reglu': jax.nn.relu,
}


class MLP(nnx.Module):
    """f(x W_in + b_in) W_out + b_out, where f is GELU (Hendrycks & Gimpel 2016) or ReLU.

    With a gate it is (f(x W_gate + b_gate) * (x W_in + b_in)) W_out + b_out, and has 3 D F
    parameters. f is GELU, SiLU or ReLU in GEGLU, SwiGLU and ReGLU (Shazeer 2020, arXiv 2002.05202).
    """

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        D = config.d_model
        F = config.mlp_width
        gated = config.has_gate
        biased = config.biases
        self.activation = config.activation
        self.dropout = config.activation_dropout
        with initialization(config.init, config.init_mlp):
            self.w_in_DF = weight(key, 'w_in_DF', (D, F), std=D**-0.5)
            # This gain keeps the variance of the stream from growing with the number of branches.
            gain = config.num_branches**-0.5
            self.w_out_FD = weight(key, 'w_out_FD', (F, D), std=F**-0.5, gain=gain)
            self.w_gate_DF = weight(key, 'w_gate_DF', (D, F), std=D**-0.5) if gated else None
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
    """Sets each number to 0 with probability `rate`, and divides the others by 1 - rate.

    Without a key it returns x.
    """
    if key is None or not rate:
        return x_BTD
    keep_BTD = jax.random.bernoulli(key, 1 - rate, x_BTD.shape)
    return jnp.where(keep_BTD, x_BTD / (1 - rate), 0)


class Block(nnx.Module):
    """One layer: attention, then an MLP, each of them a residual branch f on the stream x.

    The stream after a branch is x + f(norm(x)) with pre-norm (Xiong et al. 2020), and
    norm(x + f(x)) with post-norm (Vaswani et al. 2017).
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
        # Keys for the attention probabilities and for the two branches.
        probability_key, *branch_keys = split_key(dropout_key, 3)
        branch = self.attention_branch(self.attention, mask, probability_key)
        return self.run_branches([branch], x_BTD, branch_keys)

    def attention_branch(
        self,
        attention: Attention,
        mask: Mask,
        key: jax.Array | None,
        y_BSD: jax.Array | None = None,
    ) -> Branch:
        """Returns the residual branch of an attention layer.

        Args:
          attention: the layer.
          mask: which positions are visible.
          key: the key for dropout of the attention probabilities. None is no dropout.
          y_BSD: what the layer attends to; by default the stream itself.
        """

        def branch(x_BTD: jax.Array) -> jax.Array:
            rate = self.config.probability_dropout
            return attention(x_BTD, mask, y_BSD=y_BSD, dropout=rate, dropout_key=key)

        return branch

    def at(self, layer: int | jax.Array) -> 'Block':
        """Returns a copy of the block that computes as layer number `layer`, counted from 0."""
        copy = jax.tree.map(lambda leaf: leaf, self)
        for name, module in vars(self).items():
            if isinstance(module, Attention):
                setattr(copy, name, module.at(layer))
        return copy

    def run_branches(
        self,
        attention_branches: Sequence[Branch],
        x_BTD: jax.Array,
        keys: Sequence[jax.Array | None] | None = None,
    ) -> jax.Array:
        """Returns the stream after the given attention branches and the MLP.

        A caller may replace the attention layers of the block. Decoding, for example, passes
        branches that attend to cached keys.

        Args:
          attention_branches: the branches that come before the MLP, one for each attention norm.
          x_BTD: the stream before the block.
          keys: a dropout key for each branch, and one for the MLP. None is no dropout.
        """
        if keys is None:
            keys = [None] * (len(attention_branches) + 1)
        *attention_keys, mlp_key = keys
        norms = self.attention_norms()
        for branch, norm, key in zip(attention_branches, norms, attention_keys, strict=True):
            x_BTD = self.add(branch, norm, x_BTD, key)

        # mlp_key is for dropout of the MLP's output, in `add`. Its hidden activations have another.
        hidden_key = None if mlp_key is None else jax.random.fold_in(mlp_key, 1)

        def mlp_branch(x_BTD: jax.Array) -> jax.Array:
            return self.mlp(x_BTD, hidden_key)

        return self.add(mlp_branch, self.mlp_norm, x_BTD, mlp_key)

    def attention_norms(self) -> list[Norm]:
        """Returns the norms of the attention layers, in the order of their branches."""
        return [self.attention_norm]

    def add(self, branch: Branch, norm: Norm, x_BTD: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns the stream after one residual branch, with its norm and dropout."""
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
        """Returns the stream after the layer.

        y_BSD is the encoder's output, and cross_mask says which of its positions are visible.
        """
        # Keys for the probabilities of both attention layers, then for the three branches.
        self_key, cross_key, *branch_keys = split_key(dropout_key, 5)
        self_branch = self.attention_branch(self.attention, mask, self_key)
        cross_branch = self.attention_branch(self.cross_attention, cross_mask, cross_key, y_BSD)
        return self.run_branches([self_branch, cross_branch], x_BTD, branch_keys)

    def attention_norms(self) -> list[Norm]:
        return [self.attention_norm, self.cross_norm]


def module_key(key: jax.Array, name: str) -> jax.Array:
    """Returns a key for a module whose parameters have the same names as those of another module.

    `weight` draws by key and parameter name, so the two modules need different keys. The key has a
    checksum of the module's name folded in. A small number would not do: fold_in(key, 1) equals
    the key of layer 1 that jax.random.split draws.
    """
    return jax.random.fold_in(key, zlib.crc32(name.encode()))


def split_key(key: jax.Array | None, count: int) -> Sequence[jax.Array | None]:
    """Splits a key into `count` keys; without a key, returns None `count` times."""
    if key is None:
        return [None] * count
    return list(jax.random.split(key, count))
