import contextlib

import pytest

from qkattn.train import program
from qkattn.train.compiling import without_cache


@pytest.fixture
def evaluation_only(monkeypatch):
    """Programs whose training step does nothing, so that only the evaluation is compiled."""
    monkeypatch.setattr(program, 'train_steps', lambda *_: lambda state, hyper, batch: (state, {}))


@pytest.fixture
def without_rematerialization(capfd):
    """A context in which XLA must not warn of an involuntary rematerialization."""

    @contextlib.contextmanager
    def compiling():
        with without_cache():
            yield
        assert 'rematerialization' not in capfd.readouterr().err

    return compiling
