"""What the machine can do at most: products and copies of large arrays."""

import jax
import jax.numpy as jnp

from qkattn.benchmark.work import Work


def product(size: int, dtype: str) -> Work:
    """C = A B of square matrices; 2 size^3 FLOPs a step."""
    a, b = (
        jax.random.normal(key, (size, size)).astype(dtype)
        for key in jax.random.split(jax.random.key(0))
    )
    multiply = jax.jit(jnp.dot)

    def run(calls: int) -> None:
        for _ in range(calls):
            out = multiply(a, b)
        out.block_until_ready()

    return Work(run, 1, {'flops': 2 * size**3})


def copy(megabytes: int) -> Work:
    """y <- 2 x, of `megabytes` each: as many bytes read as written."""
    x = jnp.ones(megabytes * 2**18, jnp.float32)
    double = jax.jit(lambda x: 2 * x)

    def run(calls: int) -> None:
        for _ in range(calls):
            y = double(x)
        y.block_until_ready()

    return Work(run, 1, {'bytes': 2 * x.nbytes})
