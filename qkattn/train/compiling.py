"""Contexts in which a program is traced and compiled."""

import contextlib
import logging
from collections.abc import Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache


@contextlib.contextmanager
def messages(logger: logging.Logger) -> Iterator[list[str]]:
    """Keeps the messages of a logger, which are not printed."""
    found: list[str] = []

    def keep(record: logging.LogRecord) -> bool:
        found.append(record.getMessage())
        return False

    level = logger.level
    logger.setLevel(logging.INFO)
    logger.addFilter(keep)
    try:
        yield found
    finally:
        logger.removeFilter(keep)
        logger.setLevel(level)


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Compiles afresh, without the programs that earlier processes have kept."""
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update('jax_enable_compilation_cache', False)
    compilation_cache.reset_cache()  # JAX decides once whether it uses the cache
    try:
        yield
    finally:
        jax.config.update('jax_enable_compilation_cache', enabled)
        compilation_cache.reset_cache()
