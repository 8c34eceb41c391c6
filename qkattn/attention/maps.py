"""Linear maps from the stream to heads, whose parameters belong to a Score or Value."""

import dataclasses
from typing import Any

import jax

from qkattn.attention.parameters import composed, heads_of, homogeneous, project, slices_DNH

# The arrays [B, S, ...] that decoding caches, by name.
Cache = dict[str, jax.Array]


class Map:
    """A linear map x -> x M[n] from the stream to heads.

    The methods take the Score or Value that owns the parameters. By default, the cache holds the
    stream.
    """

    def __call__(self, owner: Any, x_BTD: jax.Array) -> jax.Array:
        """Returns the heads x_BTKH."""
        raise NotImplementedError

    def cached(self, owner: Any, y_BSD: jax.Array) -> Cache:
        """Returns the arrays by name from which `heads` computes the heads of y."""
        return {'x_BSD': y_BSD}

    def heads(self, owner: Any, cache: Cache) -> jax.Array:
        """Returns the heads of the cached tokens."""
        return self(owner, cache['x_BSD'])

    def matrix(self, owner: Any) -> jax.Array:
        """Returns M_DKH; with biases it has D + 1 rows and acts on (x, 1)."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Projection(Map):
    """x W[n] + b[n]; with `inner`, inner(x) W[n] + b[n]."""

    matrix_name: str  # the owner's attribute with W
    bias_name: str  # the owner's attribute with b
    cached_as: str = ''  # the name of the heads in the cache
    inner: 'Projection | None' = None  # projects x to a latent that all heads share

    def __call__(self, owner: Any, x_BTD: jax.Array) -> jax.Array:
        if self.inner is not None:
            x_BTD = self.inner(owner, x_BTD)
        return project(x_BTD, *self._parameters(owner))

    def cached(self, owner: Any, y_BSD: jax.Array) -> Cache:
        return {self.cached_as: self(owner, y_BSD)}

    def heads(self, owner: Any, cache: Cache) -> jax.Array:
        return cache[self.cached_as]

    def matrix(self, owner: Any) -> jax.Array:
        if self.inner is None:
            return homogeneous(*self._parameters(owner))
        return composed(self.inner.matrix(owner), *self._parameters(owner))

    def _parameters(self, owner: Any) -> tuple[jax.Array, jax.Array | None]:
        return getattr(owner, self.matrix_name), getattr(owner, self.bias_name)


class _Slices(Map):
    """x P[n], the n-th slice of the stream."""

    def __call__(self, owner: Any, x_BTD: jax.Array) -> jax.Array:
        return heads_of(x_BTD, owner.spec.num_heads)

    def matrix(self, owner: Any) -> jax.Array:
        return slices_DNH(owner.spec)


class _Stream(Map):
    """x itself, as the only head."""

    def __call__(self, owner: Any, x_BTD: jax.Array) -> jax.Array:
        return x_BTD[:, :, None, :]


SLICES = _Slices()
STREAM = _Stream()
