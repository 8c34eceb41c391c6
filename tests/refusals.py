"""A check that bad input raises an error with a message of one line."""

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest

from qkattn.errors import ConfigError


@contextlib.contextmanager
def refused(says: str, error: type | tuple = ConfigError) -> Iterator[Any]:
    """Expects an error whose message is one line and matches the regular expression `says`."""
    with pytest.raises(error, match=says) as caught:
        yield caught
    assert '\n' not in str(caught.value)
