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

# A residual branch: a function from x_BTD to the update of the stream, without norm and dropout.
Branch = Callable[[jax.Array], jax.Array]

NORM_EPSILON = 1e-5


class Norm(nnx.Module):
    """LayerNorm (Ba et al. 2016) or RMSNorm (Zhang & Sennrich 2019).

    'layernorm' is (x - mean) / sd * gain + bias, and 'rmsnorm' is x / rms * gain. The normalization
    is computed in float32 or wider, gain and bias in the dtype of x.
    """

    def __init__(self, config: ModelConfig, *, gain: bool = True):
        D = config.d_model
        self.centered = config.norm == 'layernorm'
        has_bias = self.centered and config.biases
        self.g_D = nnx.Param(jnp.ones((D,), jnp.float32)) if gain else None
        self.b_D = nnx.Param(jnp.zeros((D,), jnp.float32)) if has_bias else None

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """Returns the normalized stream, in the dtype of x."""
        # The mean and the RMS are computed in float32 or wider.
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
    """Exact GELU, x (1 + erf(x / sqrt(2))) / 2, computed in float32 or wider.

    Faster on a CPU than jax.nn.gelu, which uses erfc.
    """
    wide_BTF = x_BTF.astype(jnp.promote_types(x_BTF.dtype, jnp.float32))
    erf_BTF = jax.lax.erf(wide_BTF * 0.5**0.5)
    return (0.5 * wide_BTF * (1 + erf_BTF)).astype(x_BTF.dtype)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    'gelu': gelu,
    'gelu_tanh': functools.partial(jax.nn.gelu, approximate=True),
    'relu': jax.nn.relu,
    # Activations of the gate in an MLP with a gate.
    'geglu': gelu,
    'swiglu': jax.nn.silu,
    'reglu': jax.nn.relu,
}


class MLP(nnx.Module):
    """f(x W_in + b_in) W_out + b_out, where f is GELU (Hendrycks & Gimpel 2016) or ReLU.

    With a gate: (f(x W_gate + b_gate) * (x W_in + b_in)) W_out + b_out, where f is GELU (GEGLU),
    SiLU (SwiGLU) or ReLU (ReGLU) (Shazeer 2020, arXiv 2002.05202).
    """

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        D = config.d_model
        F = config.mlp_width
        has_gate = config.has_gate
        has_biases = config.biases
        self.activation = config.activation
        self.dropout = config.activation_dropout
        with initialization(config.init, config.init_mlp):
            self.w_in_DF = weight(key, 'w_in_DF', (D, F), std=D**-0.5)
            gain = config.residual_gain
            self.w_out_FD = weight(key, 'w_out_FD', (F, D), std=F**-0.5, gain=gain)
            self.w_gate_DF = weight(key, 'w_gate_DF', (D, F), std=D**-0.5) if has_gate else None
        self.b_in_F = nnx.Param(jnp.zeros((F,), jnp.float32)) if has_biases else None
        self.b_out_D = nnx.Param(jnp.zeros((D,), jnp.float32)) if has_biases else None
        has_gate_bias = has_gate and has_biases
        self.b_gate_F = nnx.Param(jnp.zeros((F,), jnp.float32)) if has_gate_bias else None

    def __call__(self, x_BTD: jax.Array, dropout_key: jax.Array | None = None) -> jax.Array:
        """Returns the output of the MLP; without a key there is no dropout."""
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
    """Dropout: zeros each element with probability `rate` and divides the rest by 1 - rate.

    Without a key there is no dropout.
    """
    if key is None or not rate:
        return x_BTD
    keep_BTD = jax.random.bernoulli(key, 1 - rate, x_BTD.shape)
    return jnp.where(keep_BTD, x_BTD / (1 - rate), 0)


class Block(nnx.Module):
    """A transformer layer: attention, then an MLP, as residual branches of the stream x.

    A branch f gives x + f(norm(x)) with pre-norm (Xiong et al. 2020), and norm(x + f(x)) with
    post-norm (Vaswani et al. 2017).
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
        """Returns the stream after the layer; without a key there is no dropout."""
        # `probability_key` drops attention probabilities, the others the outputs of a branch.
        probability_key, attention_key, mlp_key = split_key(dropout_key, 3)
        attend = functools.partial(
            self.attention,
            mask=mask,
            dropout=self.config.probability_dropout,
            dropout_key=probability_key,
        )
        x_BTD = self.add_branch(attend, self.attention_norm, x_BTD, attention_key)
        return self.add_mlp(x_BTD, mlp_key)

    def at(self, layer: int | jax.Array) -> 'Block':
        """Returns a copy of the block for layer number `layer`, counted from 0."""
        # A tree map makes further modules with the same arrays, so `self` stays as it is.
        copy = jax.tree.map(lambda leaf: leaf, self)
        for name, module in vars(self).items():
            if isinstance(module, Attention):
                setattr(copy, name, module.at(layer))
        return copy

    def add_mlp(self, x_BTD: jax.Array, key: jax.Array | None = None) -> jax.Array:
        """Returns the stream after the MLP; without a key there is no dropout."""
        # `key` drops outputs of the MLP, and `hidden_key` its activations.
        hidden_key = None if key is None else jax.random.fold_in(key, 1)
        mlp = functools.partial(self.mlp, dropout_key=hidden_key)
        return self.add_branch(mlp, self.mlp_norm, x_BTD, key)

    def add_branch(
        self, branch: Branch, norm: Norm, x_BTD: jax.Array, key: jax.Array | None = None
    ) -> jax.Array:
        """Returns the stream after a residual branch with its norm.

        `key` drops outputs of the branch; without a key there is no dropout.
        """
        rate = self.config.dropout
        if self.config.norm_position == 'post':
            return norm(x_BTD + drop(branch(x_BTD), rate, key))
        return x_BTD + drop(branch(norm(x_BTD)), rate, key)


class CrossBlock(Block):
    """A decoder layer: self-attention, cross-attention to the encoder's output, then an MLP."""

    def __init__(self, config: ModelConfig, *, key: jax.Array):
        super().__init__(config, key=key)
        self.cross_norm = Norm(config, gain=config.attention_gain)
        cross_key = module_key(key, 'cross_attention')
        self.cross_attention = Attention(attention_spec(config.cross), key=cross_key)

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

        Args:
            x_BTD: The stream before the layer.
            mask: The mask of self-attention.
            dropout_key: The key of all dropout. None is no dropout.
            y_BSD: The encoder's output.
            cross_mask: The mask of cross-attention.
        """
        # Two keys for attention probabilities, then one for each of the three branches.
        keys = split_key(dropout_key, 5)
        self_probability_key, cross_probability_key, self_key, cross_key, mlp_key = keys
        rate = self.config.probability_dropout
        attend_to_self = functools.partial(
            self.attention, mask=mask, dropout=rate, dropout_key=self_probability_key
        )
        attend_to_source = functools.partial(
            self.cross_attention,
            mask=cross_mask,
            y_BSD=y_BSD,
            dropout=rate,
            dropout_key=cross_probability_key,
        )
        x_BTD = self.add_branch(attend_to_self, self.attention_norm, x_BTD, self_key)
        x_BTD = self.add_branch(attend_to_source, self.cross_norm, x_BTD, cross_key)
        return self.add_mlp(x_BTD, mlp_key)


def module_key(key: jax.Array, name: str) -> jax.Array:
    """Returns a key for the module `name`.

    `weight` draws by key and parameter name, so modules with the same parameter names need
    different keys.
    """
    # Not a small number, as fold_in(key, 1) is one of the keys of jax.random.split(key).
    checksum = zlib.crc32(name.encode())
    return jax.random.fold_in(key, checksum)


def split_key(key: jax.Array | None, count: int) -> Sequence[jax.Array | None]:
    """Splits a key into `count` keys; None gives `count` times None."""
    if key is None:
        return [None] * count
    return list(jax.random.split(key, count))
