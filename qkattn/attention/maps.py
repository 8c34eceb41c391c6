"""Linear maps from the stream to heads; methods take the parameters' owner, a Score or Value."""

import dataclasses
from typing import Any

import jax

from qkattn.attention.parameters import composed, heads_of, homogeneous, project, slices_DNH

Cache = dict[str, jax.Array]


class Map:
    """x -> x M[n]. Unless a subclass caches its heads, the cache holds the stream itself."""

    def __call__(self, owner: Any, x_BTD: jax.Array) -> jax.Array:
        """x_BTKH, the heads."""
        raise NotImplementedError

    def cached(self, owner: Any, y_BSD: jax.Array) -> Cache:
        """The arrays by name from which `heads` are computed."""
        return {'x_BSD': y_BSD}

    def heads(self, owner: Any, cache: Cache) -> jax.Array:
        """The heads of cached positions."""
        return self(owner, cache['x_BSD'])

    def matrix(self, owner: Any) -> jax.Array:
        """M_DKH; (D+1) rows with biases."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True)
class Projection(Map):
    """x W[n] + b[n], with the parameters of these names; the heads are cached under `cached_as`.

    With `inner`, x is first projected to a latent that all heads share: inner(x) W[n] + b[n].
    """

    matrix_name: str
    bias_name: str
    cached_as: str = ''
    inner: 'Projection | None' = None

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
