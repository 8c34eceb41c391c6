import pytest

from qkattn.config import DataConfig
from qkattn.data import cache
from qkattn.data.load import load


@pytest.fixture(scope='session')
def stdlib(data_dir):
    """The tokens of Python's standard library, in bytes."""
    return load(DataConfig(data_dir=data_dir))


@pytest.fixture
def cache_warnings(monkeypatch):
    """A list of the warnings about caches so far."""
    messages = []
    monkeypatch.setattr(cache.log, 'warning', lambda text, *args: messages.append(text % args))
    return messages
