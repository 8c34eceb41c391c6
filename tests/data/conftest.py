import numpy as np
import pytest

from qkattn.config import DataConfig
from qkattn.data import cache
from qkattn.data.load import load, prepare
from qkattn.data.tokens import TokenDataset
from tests.data.datasets import SHARD_TOKENS, token_dataset, write_texts


class Numbers:
    name, vocab_size, separator = 'numbers', 65536, 0


@pytest.fixture(scope='session')
def numbers():
    """Makes datasets in which a token tells its position: numbers(train=100, validation=20)."""

    def make(**sizes: int) -> TokenDataset:
        splits = {split: np.arange(size, dtype=np.uint16) for split, size in sizes.items()}
        return token_dataset('numbers', Numbers(), splits)

    return make


@pytest.fixture(scope='session')
def stdlib(data_dir):
    return load(DataConfig(data_dir=data_dir))


@pytest.fixture
def warnings(monkeypatch):
    """The warnings about caches."""
    messages = []
    monkeypatch.setattr(cache.log, 'warning', lambda text, *args: messages.append(text % args))
    return messages


@pytest.fixture(scope='session')
def text(tmp_path_factory):
    """A folder of texts as a dataset."""
    root = tmp_path_factory.mktemp('text')
    path = str(write_texts(root / 'files'))
    return DataConfig(name='text', path=path, data_dir=str(root / 'cache'))


@pytest.fixture(scope='session')
def made(text, tmp_path_factory):
    """Its shards."""
    out = tmp_path_factory.mktemp('shards')
    prepare(text, str(out), shard_tokens=SHARD_TOKENS)
    return out
