"""Runs the scripts as a user does, in a process, on a study that takes seconds."""

import contextlib
import logging
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
from absl import app, flags
from flax import nnx

from qkattn.__main__ import main
from qkattn.config import ModelConfig
from qkattn.jobs.display import Progress
from qkattn.model import build
from qkattn.train import exported

STUDY = """
from qkattn.config import *

def get_config():
    return to_config_dict(
        Study(
            name='small',
            base=Config(
                model=ModelConfig(num_layers=1, num_heads=2, context=16),
                data=DataConfig(eval_sequences=8),
                optimizer=OptimizerConfig(warmup_steps=2),
                train=TrainConfig(num_steps=40, batch_size=4, steps_per_dispatch=5, log_every=5,
                                  eval_every=10, checkpoint_every=10, lifting='map'),
                trials=TrialsConfig(seeds=(0, 1, 2)),
            ),
            variants=('qk/vo', 'shared_qk/vo'),
            sizes=('d_model=32',),
            tolerance=5e-3,
            controls=ControlsConfig(equal_shape=False, longer=None),
        )
    )
"""

RUN = """
from qkattn.config import *

def get_config():
    return to_config_dict(Config())
"""


@pytest.fixture
def files(tmp_path, tmp_path_factory, monkeypatch):
    """Changes to a directory that has only study.py and run.py. All tests share one data cache."""
    (tmp_path / 'study.py').write_text(STUDY)
    (tmp_path / 'run.py').write_text(RUN)
    monkeypatch.chdir(tmp_path)
    shared_data = tmp_path_factory.getbasetemp() / 'scripts-data'
    monkeypatch.setenv('QKATTN_DATA', str(shared_data))


def save_model(path: Path, config: ModelConfig) -> None:
    """Saves a freshly initialized model as exported parameters."""
    model = build(config, key=jax.random.key(0))
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    exported.save(path, config, params, origin={})


@contextlib.contextmanager
def added_flags_removed():
    """Removes the flags that a script defines in the block, and restores the package's logger.

    Flags are global, in `flags.FLAGS`. Without this, the next script in this process could not
    define a flag of the same name.
    """
    app.define_help_flags()  # otherwise a script in the block would define these flags
    flags_before = set(flags.FLAGS)
    logger = logging.getLogger('qkattn')
    handlers = logger.handlers[:]
    level = logger.level
    propagate = logger.propagate
    try:
        yield
    finally:
        for flag in set(flags.FLAGS) - flags_before:
            delattr(flags.FLAGS, flag)
        flags.FLAGS.unparse_flags()  # the next script reads its own command line
        logger.handlers = handlers
        logger.level = level
        logger.propagate = propagate


@pytest.fixture
def script_here(files, monkeypatch, capsys):
    """A function that runs a qkattn command in this process, and returns a CompletedProcess.

    For example, script_here('ablate', '--flag=1') runs `qkattn ablate --flag=1`. The working
    directory has the configs study.py and run.py.
    """
    # An installed script does not import from the working directory, which is '' in sys.path.
    installed_path = [path for path in sys.path if path]
    monkeypatch.setattr(sys, 'path', installed_path)

    def run(*arguments: str) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, 'argv', ['/bin/qkattn', *arguments])
        code = 0  # if the script returns without SystemExit
        with added_flags_removed():
            try:
                main()
            except SystemExit as stopped:
                code = stopped.code or 0  # SystemExit(None) also means success
        output, errors = capsys.readouterr()
        return subprocess.CompletedProcess(arguments, code, output, errors)

    return run


@pytest.fixture
def printed(script_here):
    """A function that runs a qkattn command that must succeed, and returns its standard output."""

    def run(*command: str) -> str:
        done = script_here(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def refusal(script_here, monkeypatch):
    """A function that runs a qkattn command that must be refused, and returns the message.

    A refusal has exit code 2, and prints one line on standard error without a traceback. For
    example, refusal('ablate', '--flag=1') runs `qkattn ablate --flag=1`.
    """
    # The progress display would write more lines to standard error.
    monkeypatch.setattr(Progress, 'tick', lambda display: None)

    def run(*command: str) -> str:
        completed = script_here(*command)
        errors = completed.stderr

        # If an assertion fails, pytest shows what the command printed.
        assert completed.returncode == 2, errors
        assert 'Traceback' not in errors, errors

        lines = [line for line in errors.splitlines() if line]
        assert len(lines) == 1, errors
        return lines[0]

    return run
