"""Settings of JAX for all tests, and fixtures. There are eight fake CPU devices.

Programs are compiled without LLVM's optimizations, because tests compile far more than they
compute. Compiled programs are kept in a directory for each type of machine. All workers of pytest
and later runs of the tests use it. If an entry cannot be read, the program is compiled again.
"""

import os

from tests.compiled_programs import FLAGS, programs_directory

os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(programs_directory()))
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
# Tracebacks in programs would take two thirds of the time of a lowering.
os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '0'
# Processes that tests start inherit the flags. Flags given twice would give another cache key.
os.environ['XLA_FLAGS'] = os.environ.get('XLA_FLAGS', '').removesuffix(FLAGS) + FLAGS
os.environ.setdefault('JAX_PLATFORMS', 'cpu')

import dataclasses
import functools
import gc
import resource
from pathlib import Path

import jax
import pytest

from qkattn.config import Config, DataConfig, from_json
from qkattn.data.load import load
from qkattn.storage import run_directory
from qkattn.train.program_cache import keep_programs
from tests.fixtures import bucket, chromium, outside, unread  # noqa: F401, fixtures
from tests.runs import built_once, programs_kept, small_run  # noqa: F401, fixtures

# Scripts call this too, and some tests run scripts in this process.
keep_programs()

# Every run asks git for the commit of this checkout, with three processes. Here the first answer is
# kept.
PACKAGE = Path(run_directory.__file__).resolve().parents[1]
git_state = run_directory.git_state
cached_git_state = functools.cache(git_state)


def git_state_asked_once(directory=run_directory.PACKAGE):
    if directory.is_relative_to(PACKAGE):
        return dict(cached_git_state(directory))
    return git_state(directory)


run_directory.git_state = git_state_asked_once

# Parts of a run that may come from outside the package and have contract tests.
CONTRACTS = ('dataset', 'tokenizer', 'task', 'optimizer', 'schedule', 'metric')


def pytest_addoption(parser):
    """Adds --variant, --dataset and so on, which choose what contract tests run on."""
    values = {'variant': 'score/value'}
    for kind in CONTRACTS:
        values[kind] = 'this name or import path'
    for kind, value in values.items():
        about = f'run contract tests on {value} only; repeatable'
        parser.addoption(f'--{kind}', action='append', help=about)


def pytest_collection_finish():
    """Makes the garbage collector run rarely. By default it takes a seventh of the time."""
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture
def cudnn(monkeypatch):
    """Lets JAX lower cuDNN's attention for a Hopper GPU, without running it."""
    module = 'jax._src.cudnn.fused_attention_stablehlo'
    monkeypatch.setattr(f'{module}.check_cudnn_version', lambda: 91000)
    monkeypatch.setattr(f'{module}.check_compute_capability', lambda least: True)
    monkeypatch.setattr(f'{module}.is_cuda_compute_capability_equal', lambda one: one == '9.0')


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
    """A directory with the default dataset, prepared once."""
    path = tmp_path_factory.mktemp('data')
    load(DataConfig(data_dir=str(path)))
    return str(path)


@pytest.fixture(scope='session')
def tiny(data_dir):
    """A function that makes the config of a run which trains within seconds.

    The run trains two seeds for 12 steps, and evaluates and saves a checkpoint every 4 steps. For
    example, `tiny(train={'num_steps': 8})` replaces a field of the section `train`.
    """
    settings = {
        'model': {'d_model': 32, 'num_layers': 2, 'num_heads': 2, 'context': 16},
        'data': {'data_dir': data_dir, 'eval_sequences': 8},
        'optimizer': {'warmup_steps': 2},
        'train': {
            'num_steps': 12,
            'batch_size': 8,
            'accumulation': 2,
            'steps_per_dispatch': 1,  # steps in one call of a compiled program
            'log_every': 1,
            'eval_every': 4,
            'checkpoint_every': 4,
            'lifting': 'map',  # the trials are computed one after another
        },
        'trials': {'seeds': (0, 1), 'learning_rates': (1e-2,)},
    }

    def make(**sections) -> Config:
        config = from_json(Config, settings)
        for name, fields in sections.items():
            section = dataclasses.replace(getattr(config, name), **fields)
            config = dataclasses.replace(config, **{name: section})
        return config

    return make


@pytest.fixture
def study_dir(tmp_path):
    return tmp_path / 'study'


GIB = 2**30
memory_limit = 2 * GIB  # bytes


@pytest.fixture(autouse=True, scope='module')
def compiled_programs_are_dropped():
    """Drops compiled programs after a module of tests, if the process has used over 2 GiB.

    Below this limit programs are kept, because other modules use most small programs again.
    """
    global memory_limit
    yield
    # ru_maxrss is in KiB on Linux.
    peak_memory = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if peak_memory > memory_limit:
        jax.clear_caches()
        # The peak never falls. So the next limit is half a GiB above the present peak.
        memory_limit = peak_memory + GIB // 2
