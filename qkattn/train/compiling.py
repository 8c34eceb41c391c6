"""What is said while a program is traced and compiled."""

import contextlib
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator

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
def standard_error() -> Iterator[Callable[[], str]]:
    """Keeps what libraries write to file descriptor 2; yields a function that returns it."""
    sys.stderr.flush()
    with tempfile.TemporaryFile() as kept:
        original = os.dup(2)
        os.dup2(kept.fileno(), 2)

        def text() -> str:
            kept.seek(0)
            return kept.read().decode(errors='replace')

        try:
            yield text
        finally:
            os.dup2(original, 2)
            os.close(original)


@contextlib.contextmanager
def without_cache() -> Iterator[None]:
    """Compiles afresh: XLA warns while it compiles."""
    enabled = jax.config.jax_enable_compilation_cache  # type: ignore[attr-defined]
    jax.config.update('jax_enable_compilation_cache', False)
    compilation_cache.reset_cache()  # JAX decides once whether it uses the cache
    try:
        yield
    finally:
        jax.config.update('jax_enable_compilation_cache', enabled)
        compilation_cache.reset_cache()
