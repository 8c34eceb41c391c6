"""What an attention layer is told about itself, and how its weights are drawn."""

import dataclasses
import zlib
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx

from qkattn.errors import SpecError


@dataclasses.dataclass(frozen=True, kw_only=True)
class AttentionSpec:
    """Sizes and options of one attention layer.

    Attributes:
      score: name of a Score, e.g. 'qk', with options as in 'low_rank(rank=8)', or an import path.
      value: name of a Value, likewise.
      d_model: D, width of the residual stream.
      num_heads: N, query heads.
      num_kv_heads: K, key and value heads of the circuits that have them; divides N.
      head_size: H, width of one head.
      biases: whether every projection adds a bias.
      residual_gain: factor on the initial standard deviation of the last matrix of the OV circuit,
        1/sqrt(2 L) in a network of L layers (Radford et al. 2019, section 2.3).
      positions: what tells positions apart inside the layer: 'rope', 'alibi' or 'none' (positions
        that are added to the stream are the model's matter).
      qk_norm: queries and keys are divided by their root mean square and multiplied by a learned
        gain (Henry et al. 2020; Dehghani et al. 2023), before they are rotated.
      score_scale: factor on the logits beside the Score's own scale.
      logit_cap: c in c tanh(logit / c) (Gemma 2, 2024); None is off.
      window: a query reads at most this many positions, itself included; None is all.
    """

    score: str = 'qk'
    value: str = 'vo'
    d_model: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    biases: bool = False
    residual_gain: float = 1.0
    positions: Literal['none', 'rope', 'alibi'] = 'none'
    qk_norm: bool = False
    score_scale: float = 1.0
    logit_cap: float | None = None
    window: int | None = None

    def __post_init__(self) -> None:
        for field in ('d_model', 'num_heads', 'num_kv_heads', 'head_size'):
            number = getattr(self, field)
            if not isinstance(number, int) or number < 1:
                raise SpecError(f'{field}={number!r} must be a whole number of at least 1')
        if self.num_heads % self.num_kv_heads:
            raise SpecError(
                f'num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}'
            )
        if self.positions not in ('none', 'rope', 'alibi'):
            raise SpecError(f'positions={self.positions!r} must be none, rope or alibi')
        if not self.score_scale > 0:
            raise SpecError(f'score_scale={self.score_scale} must be above 0')
        if self.logit_cap is not None and not self.logit_cap > 0:
            raise SpecError(f'logit_cap={self.logit_cap} must be above 0, or None')
        if self.window is not None and self.window < 1:
            raise SpecError(f'window={self.window} must be at least 1, or None')

    @property
    def letters(self) -> dict[str, int]:
        """The sizes by the letters that array names wear."""
        return {
            'D': self.d_model,
            'E': self.d_model,
            'N': self.num_heads,
            'K': self.num_kv_heads,
            'H': self.head_size,
        }


def weight(key: jax.Array, name: str, shape: tuple[int, ...], std: float) -> nnx.Param:
    """A normal(0, std^2) matrix.

    The key is folded with the parameter's name, so that two factorizations which share a tensor
    (same name, same shape) start from the same numbers under the same seed.
    """
    own_key = jax.random.fold_in(key, zlib.crc32(name.encode()))
    return nnx.Param(std * jax.random.normal(own_key, shape, jnp.float32))


def bias(spec: AttentionSpec, shape: tuple[int, ...]) -> nnx.Param | None:
    """A zero vector where the spec has biases, else None."""
    return nnx.Param(jnp.zeros(shape, jnp.float32)) if spec.biases else None


def project(x_BTD: jax.Array, w_DNH: jax.Array, b_NH: jax.Array | None = None) -> jax.Array:
    """x W + b: contracts the last axis of x with the first of W, whatever the others are."""
    out = jnp.tensordot(x_BTD, w_DNH[...], axes=1)
    return out if b_NH is None else out + b_NH[...]


def homogeneous(w_DNH: jax.Array, b_NH: jax.Array | None) -> jax.Array:
    """[W; b]: W acting on (x, 1), so that a biased projection is again one matrix."""
    return w_DNH[...] if b_NH is None else jnp.concatenate([w_DNH[...], b_NH[...][None]])


def heads_of(x_BTD: jax.Array, num_heads: int) -> jax.Array:
    """Cuts the stream into N consecutive slices: [B, T, D] -> [B, T, N, D / N]."""
    return x_BTD.reshape(*x_BTD.shape[:-1], num_heads, -1)


def slices_DNH(spec: AttentionSpec) -> jax.Array:
    """The constant selectors P with heads_of(x) = x P, as one matrix per head."""
    d_model, num_heads = spec.d_model, spec.num_heads
    identity_DNH = jnp.eye(d_model).reshape(d_model, num_heads, -1)
    if not spec.biases:
        return identity_DNH
    return jnp.concatenate([identity_DNH, jnp.zeros_like(identity_DNH[:1])])


def grouped(w_DKH: jax.Array, num_heads: int) -> jax.Array:
    """Repeats each of K heads N/K times: query head n reads key head n // (N/K)."""
    return jnp.repeat(w_DKH, num_heads // w_DKH.shape[1], axis=1)


def require_slices(spec: AttentionSpec, who: str) -> None:
    """Raises unless the heads are slices of the stream, N H = D."""
    if spec.num_heads * spec.head_size != spec.d_model:
        raise SpecError(
            f'{who} uses slices of the stream as heads, so num_heads * head_size must equal '
            f'd_model={spec.d_model}, not {spec.num_heads} * {spec.head_size}'
        )
