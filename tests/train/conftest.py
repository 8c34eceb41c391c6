import contextlib

import jax
import pytest
from jax.experimental.compilation_cache import compilation_cache

from qkattn.train import program


@pytest.fixture
def evaluation_only(monkeypatch):
    """Programs whose training step does nothing, so that only the evaluation is compiled."""
    monkeypatch.setattr(program, 'train_steps', lambda *_: lambda state, hyper, batch: (state, {}))


@pytest.fixture
def without_rematerialization(capfd):
    """A context in which XLA must not warn of an involuntary rematerialization.

    XLA warns while it compiles, so that no program may come from the persistent cache.
    """

    @contextlib.contextmanager
    def compiling():
        enabled = jax.config.jax_enable_compilation_cache
        jax.config.update('jax_enable_compilation_cache', False)
        compilation_cache.reset_cache()  # JAX decides once whether it uses the cache
        try:
            yield
        finally:
            jax.config.update('jax_enable_compilation_cache', enabled)
            compilation_cache.reset_cache()
        assert 'rematerialization' not in capfd.readouterr().err

    return compiling
