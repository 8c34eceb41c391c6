"""Times training and decoding beside other implementations, on the cores of this process.

python -m experiments.benchmark --suite=steps
python -m experiments.benchmark --suite=steps,study --scale=smoke  # a trial
"""

import importlib.metadata
import os
import shutil
from collections.abc import Iterable
from typing import Any

import jax
from absl import flags

from experiments.benchmark import record
from experiments.benchmark.suites import SCALES, SUITES, Scale, training_row, with_changes
from qkattn.errors import ConfigError
from qkattn.jobs import cli
from qkattn.jobs.machine import cpu, usable_cores
from qkattn.jobs.output import run_program
from qkattn.storage.files import check_directory
from qkattn.storage.run_directory import describe_start

SUITE = flags.DEFINE_list('suite', None, f'Suites to run, from {", ".join(SUITES)}.')
SCALE = flags.DEFINE_enum('scale', 'cpu', [*SCALES], 'Sizes; the times of smoke mean nothing.')
VARIANTS = flags.DEFINE_list('variants', None, "Variants to compare, as in 'qk/no_v'.")
OUT = cli.define_path(
    'out', None, f'Directory in which {record.FILE} is replaced; runs/benchmark/SUITES by default.'
)


def main() -> None:
    """Times the suites of --suite; writes and prints each group of rows once it is timed."""
    if not SUITE.value:
        raise ConfigError('--suite=NAME is required, e.g. --suite=steps')
    for name in SUITE.value:
        if name not in SUITES:
            raise ConfigError(f'unknown --suite={name}; known: {", ".join(SUITES)}')
    scale = SCALES[SCALE.value]
    if VARIANTS.value:
        scale = _with_variants(scale, VARIANTS.value)
    # The memory of the accelerator is for the processes of the race.
    jax.config.update('jax_platforms', 'cpu')
    out = OUT.value or f'runs/benchmark/{"-".join(SUITE.value)}'
    directory = check_directory(out, name='--out')

    machine = describe_machine()
    load_at_start = os.getloadavg()[0]
    groups: list[record.Group] = []
    for suite in SUITE.value:
        for group in SUITES[suite](scale):
            groups.append(group)
            # The file is complete after each group.
            load = {'start': load_at_start, 'end': os.getloadavg()[0]}
            record.write(directory, {'machine': machine, 'load': load}, groups)
            print(f'{record.table(group)}\n', flush=True)
    print(directory / record.FILE)


def _with_variants(scale: Scale, variants: Iterable[str]) -> Scale:
    """Returns a scale that compares qk/vo and the given variants only.

    Raises ConfigError for a variant that the models of the scale cannot have.
    """
    names = dict.fromkeys(['qk/vo', *variants])  # each once
    for name in names:
        try:
            # Building the row checks the variant.
            training_row(name, with_changes(scale.variants, name))
        except ValueError as error:
            raise ConfigError(f'--variants={name}: {error}') from error
    return scale._replace(names=tuple(names))


def describe_machine() -> dict[str, Any]:
    """Returns the software and hardware of this machine, for the record."""
    start = describe_start()
    # The metadata of torch are read without importing it.
    torch_versions = [torch.version for torch in importlib.metadata.distributions(name='torch')]
    torch_version = torch_versions[0] if torch_versions else None
    return {
        'platform': start['platform'],
        'python': start['python'],
        'git': start['git'],
        'versions': start['versions'] | {'torch': torch_version},
        'cpu': cpu(),
        'cores': len(usable_cores()),
        'accelerators': gpus(),
    }


def gpus() -> list[str]:
    """Returns the names of NVIDIA GPUs, without JAX, which would take their memory."""
    if not shutil.which('nvidia-smi'):
        return []
    query = ['nvidia-smi', '--query-gpu=name', '--format=csv,noheader']
    return run_program(query, capture_output=True).stdout.splitlines()


if __name__ == '__main__':
    cli.run(main)
