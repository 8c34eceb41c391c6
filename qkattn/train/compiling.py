"""What is said while a program is traced and compiled."""

import contextlib
import logging
from collections.abc import Iterator


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
