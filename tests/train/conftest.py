import pytest

from qkattn.train import program


@pytest.fixture
def evaluation_only(monkeypatch):
    """Programs whose training step does nothing, so that only the evaluation is compiled."""
    monkeypatch.setattr(program, 'train_steps', lambda *_: lambda state, hyper, batch: (state, {}))
