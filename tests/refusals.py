"""Bad input must be answered by one sentence."""

import contextlib
from collections.abc import Iterator

import pytest

from qkattn.errors import ConfigError


@contextlib.contextmanager
def refused(says: str, error: type | tuple = ConfigError) -> Iterator[None]:
    """Expects an error of one line that matches the regular expression."""
    with pytest.raises(error, match=says) as caught:
        yield
    assert '\n' not in str(caught.value)
