import contextlib

import pytest

from qkattn.train import program
from qkattn.train.compiling import without_cache


@pytest.fixture
def evaluation_only(monkeypatch):
    """Programs whose training step does nothing, so that only the evaluation is compiled."""
    monkeypatch.setattr(program, 'train_steps', lambda *_: lambda state, hyper, batch: (state, {}))


@pytest.fixture(scope='module')
def kept() -> dict:
    """The programs of a module, by config and lifting."""
    return {}


@pytest.fixture
def programs_kept(kept, monkeypatch):
    """Later starts of a run, in this process, take the programs of the first one."""
    build = program.build

    def once(config, lifting=None, params=None):
        if params is not None:
            return build(config, lifting, params)
        key = config, lifting or config.train.lifting
        if key not in kept:
            kept[key] = build(config, lifting)
        return kept[key]

    monkeypatch.setattr(program, 'build', once)


@pytest.fixture
def without_rematerialization(capfd):
    """A context in which XLA must not warn of an involuntary rematerialization."""

    @contextlib.contextmanager
    def compiling():
        with without_cache():
            yield
        assert 'rematerialization' not in capfd.readouterr().err

    return compiling
