"""A stream whose reader has gone, as that of `... | head`."""

import os
from collections.abc import Iterator
from typing import TextIO

import pytest


@pytest.fixture
def unread() -> Iterator[TextIO]:
    reading, writing = os.pipe()
    os.close(reading)
    with open(writing, 'w') as stream:
        yield stream
