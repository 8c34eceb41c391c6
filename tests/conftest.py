"""Eight fake CPU devices for the whole test run; a test uses as many as its mesh needs.

Programs are compiled without LLVM's optimizations: the tests compile far more than they compute.
Compiled programs are kept between test runs and shared by the workers of one, in a directory per
machine type. JAX keys them by program, flags and version; an unreadable entry is compiled again.
"""

import os

from tests.compiled_programs import FLAGS, programs_directory

os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(programs_directory()))
os.environ['JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS'] = '0'
os.environ['JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES'] = '-1'
os.environ['JAX_TRACEBACK_IN_LOCATIONS_LIMIT'] = '0'  # two thirds of the time of a lowering
# Once: they are part of the key of a compiled program, and processes that tests start inherit them.
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

# As scripts do, which some tests run in this process.
keep_programs()

# The commit of this checkout, asked once: every run would start three processes of git.
PACKAGE = Path(run_directory.__file__).resolve().parents[1]
git_state = run_directory.git_state
own_state = functools.cache(git_state)
run_directory.git_state = lambda directory=run_directory.PACKAGE: (
    dict(own_state(directory)) if directory.is_relative_to(PACKAGE) else git_state(directory)
)

# Parts of a run that may come from outside the package and have contract tests.
CONTRACTS = ('dataset', 'tokenizer', 'task', 'optimizer', 'schedule', 'metric')


def pytest_addoption(parser):
    kinds = {'variant': 'score/value'} | dict.fromkeys(CONTRACTS, 'this name or import path')
    for kind, noun in kinds.items():
        about = f'run contract tests on {noun} only; repeatable'
        parser.addoption(f'--{kind}', action='append', help=about)


def pytest_collection_finish():
    """What is loaded by now stays, and tracing leaves few cycles: collecting takes a seventh."""
    gc.freeze()
    gc.set_threshold(50_000)


@pytest.fixture
def cudnn(monkeypatch):
    """JAX lowers cuDNN's attention for a Hopper GPU that is not there; nothing can run."""
    module = 'jax._src.cudnn.fused_attention_stablehlo'
    monkeypatch.setattr(f'{module}.check_cudnn_version', lambda: 91000)
    monkeypatch.setattr(f'{module}.check_compute_capability', lambda least: True)
    monkeypatch.setattr(f'{module}.is_cuda_compute_capability_equal', lambda one: one == '9.0')


@pytest.fixture(scope='session')
def data_dir(tmp_path_factory):
    """The default dataset, prepared once."""
    path = tmp_path_factory.mktemp('data')
    load(DataConfig(data_dir=str(path)))
    return str(path)


@pytest.fixture(scope='session')
def tiny(data_dir):
    """A run of two trials, accumulation on; fields are replaced as in tiny(train={...})."""

    def make(**sections) -> Config:
        settings = {
            'model': {'d_model': 32, 'num_layers': 2, 'num_heads': 2, 'context': 16},
            'data': {'data_dir': data_dir, 'eval_sequences': 8},
            'optimizer': {'warmup_steps': 2},
            'train': {
                **{'num_steps': 12, 'batch_size': 8, 'accumulation': 2, 'steps_per_dispatch': 1},
                **{'log_every': 1, 'eval_every': 4, 'checkpoint_every': 4, 'lifting': 'map'},
            },
            'trials': {'seeds': (0, 1), 'learning_rates': (1e-2,)},
        }
        config = from_json(Config, settings)
        for name, fields in sections.items():
            section = dataclasses.replace(getattr(config, name), **fields)
            config = dataclasses.replace(config, **{name: section})
        return config

    return make


@pytest.fixture
def study_dir(tmp_path):
    return tmp_path / 'study'


held_after_dropping = 2**31 - 2**29  # bytes, when programs were last dropped


@pytest.fixture(autouse=True, scope='module')
def compiled_programs_are_dropped():
    """Drops them at 2 GiB, and after each half GiB more: not all memory comes back.

    Dropping them after every module costs a sixth of the time: most small programs recur.
    """
    global held_after_dropping
    yield
    most_held = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if most_held > held_after_dropping + 2**29:
        jax.clear_caches()
        held_after_dropping = most_held
