"""Options of the survival suite, and its counts at the end.

launch/test.sh -m slow tests/survival --kills=100 --survival_seed=7
"""

import dataclasses
import os
import random

import pytest


def pytest_addoption(parser):
    parser.addoption('--kills', type=int, default=100, help='disturbances of each kind of run')
    parser.addoption('--survival_seed', type=int, help='of the random moments; default: any')


def pytest_terminal_summary(terminalreporter):
    """Prints what tests have recorded, also those of other workers."""
    reports = [r for found in terminalreporter.stats.values() for r in found]
    lines = [
        f'{name}: {value}'
        for report in reports
        if getattr(report, 'when', None) == 'call'
        for name, value in report.user_properties
    ]
    if lines:
        terminalreporter.section('survival')
        for line in lines:
            terminalreporter.write_line(line)


@pytest.fixture
def rng(request):
    """Random numbers of a test; their seed is printed."""
    seed = request.config.getoption('--survival_seed', None)
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    request.node.user_properties.append((request.node.name, f'--survival_seed={seed}'))
    return random.Random(f'{seed} {request.node.name}')


@pytest.fixture
def counts(request):
    """counts(seen): prints counts at the end of the session."""

    def count(seen):
        text = ', '.join(f'{name} {number}' for name, number in sorted(seen.items()))
        request.node.user_properties.append((request.node.name, text))

    return count


@pytest.fixture
def kills(request):
    return request.config.getoption('--kills', 100)


@pytest.fixture(scope='module')
def small(tiny):
    """A run of two trials with dropout and two optimizers, of one layer."""
    config = tiny(
        model={'dropout': 0.1, 'num_layers': 1, 'd_model': 16},
        optimizer={'name': 'muon'},
        train={'num_steps': 60, 'eval_every': 6, 'checkpoint_every': 4},
    )

    def make(count: int):
        """For a job of `count` processes of one device each."""
        return dataclasses.replace(config, mesh=dataclasses.replace(config.mesh, data=count))

    return make
