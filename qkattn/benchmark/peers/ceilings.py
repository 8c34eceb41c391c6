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
    """x <- -x in place, of `megabytes`: as many bytes are read as are written."""
    x = jnp.ones(megabytes * 2**18, jnp.float32)
    negate = jax.jit(jnp.negative, donate_argnums=0)  # in new memory, page faults would count

    def run(calls: int) -> None:
        nonlocal x
        for _ in range(calls):
            x = negate(x)
        x.block_until_ready()

    return Work(run, 1, {'bytes': 2 * x.nbytes})
