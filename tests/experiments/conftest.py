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
    """study.py and run.py alone in the working directory; the data of all tests elsewhere."""
    (tmp_path / 'study.py').write_text(STUDY)
    (tmp_path / 'run.py').write_text(RUN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv('QKATTN_DATA', str(tmp_path_factory.getbasetemp() / 'scripts-data'))


def save_model(path: Path, config: ModelConfig) -> None:
    """Exported parameters of a model as it is at initialization."""
    model = build(config, key=jax.random.key(0))
    params = jax.tree.map(np.asarray, nnx.to_pure_dict(nnx.state(model)))
    exported.save(path, config, params, origin={})


@contextlib.contextmanager
def added_flags_removed():
    """Removes the flags and log handlers that the block adds: scripts define the same names."""
    app.define_help_flags()
    known = set(flags.FLAGS)
    logger = logging.getLogger('qkattn')
    handlers = logger.handlers[:]
    level = logger.level
    propagate = logger.propagate
    try:
        yield
    finally:
        for flag in set(flags.FLAGS) - known:
            delattr(flags.FLAGS, flag)
        flags.FLAGS.unparse_flags()
        logger.handlers = handlers
        logger.level = level
        logger.propagate = propagate


@pytest.fixture
def script_here(files, monkeypatch, capsys):
    """script_here('ablate', '--flag=1', ...) -> what `qkattn ablate --flag=1` gives, in process."""
    monkeypatch.setattr(sys, 'path', [path for path in sys.path if path])

    def run(*arguments: str) -> subprocess.CompletedProcess:
        monkeypatch.setattr(sys, 'argv', ['/bin/qkattn', *arguments])
        code = 0
        with added_flags_removed():
            try:
                main()
            except SystemExit as stopped:
                code = stopped.code or 0
        return subprocess.CompletedProcess(arguments, code, *capsys.readouterr())

    return run


@pytest.fixture
def printed(script_here):
    """What a script prints that succeeds."""

    def run(*command: str) -> str:
        done = script_here(*command)
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture
def refusal(script_here, monkeypatch):
    """The one sentence of a script that refuses its settings."""
    monkeypatch.setattr(Progress, 'tick', lambda display: None)  # shows waits

    def run(*command: str) -> str:
        done = script_here(*command)
        assert done.returncode == 2 and 'Traceback' not in done.stderr, done.stderr
        (sentence,) = filter(None, done.stderr.splitlines())
        return sentence

    return run
