import contextlib

import pytest

from qkattn.train import program, train
from qkattn.train.compiling import without_cache

BUILD = program.build  # before any test replaces it


@pytest.fixture
def evaluation_only(monkeypatch):
    """Programs whose training step does nothing, so that only the evaluation is compiled."""
    monkeypatch.setattr(program, 'train_steps', lambda *_: lambda state, hyper, batch: (state, {}))


@pytest.fixture(scope='session')
def built_once():
    """`program.build`, which builds a config's programs once for all tests."""
    kept = {}

    def once(config, lifting=None, params=None):
        if params is not None:
            return BUILD(config, lifting, params)
        key = config, lifting or config.train.lifting
        if key not in kept:
            kept[key] = BUILD(config, lifting)
        return kept[key]

    return once


@pytest.fixture
def programs_kept(built_once, monkeypatch):
    """Later starts of a run, in this process, take the programs of the first one."""
    monkeypatch.setattr(program, 'build', built_once)


@pytest.fixture(scope='session')
def small_run(tiny, built_once, tmp_path_factory):
    """The config of a finished run, quick to compile, and its directory, which tests only read."""
    config = tiny(model={'num_layers': 1, 'd_model': 16})
    path = tmp_path_factory.mktemp('small') / 'run'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, 'build', built_once)
        train(config, path)
    return config, path


@pytest.fixture
def without_rematerialization(capfd):
    """A context in which XLA must not warn of an involuntary rematerialization."""

    @contextlib.contextmanager
    def compiling():
        with without_cache():
            yield
        assert 'rematerialization' not in capfd.readouterr().err

    return compiling
