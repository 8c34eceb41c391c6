import pytest

from qkattn.config import DataConfig
from qkattn.data import cache
from qkattn.data.load import load


@pytest.fixture(scope='session')
def stdlib(data_dir):
    return load(DataConfig(data_dir=data_dir))


@pytest.fixture
def warnings(monkeypatch):
    """The warnings about caches."""
    messages = []
    monkeypatch.setattr(cache.log, 'warning', lambda text, *args: messages.append(text % args))
    return messages
