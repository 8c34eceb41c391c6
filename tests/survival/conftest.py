"""Options of the survival suite, and its counts at the end.

launch/test.sh -m slow tests/survival --kills=100 --survival_seed=7
"""

import os
import random

import pytest


def pytest_addoption(parser):
    parser.addoption('--kills', type=int, default=100, help='disturbances of each kind of run')
    parser.addoption('--survival_seed', type=int, help='of the random moments; default: any')


def pytest_terminal_summary(terminalreporter):
    """Prints what tests have recorded, also those of other workers."""
    reports = [report for reports in terminalreporter.stats.values() for report in reports]
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
def record(request):
    """record(text): prints a text at the end of the session."""
    return lambda text: request.node.user_properties.append((request.node.name, text))


@pytest.fixture
def rng(request, record):
    """Random numbers of a test; their seed is printed."""
    seed = request.config.getoption('--survival_seed', None)
    seed = int.from_bytes(os.urandom(4)) if seed is None else seed
    record(f'--survival_seed={seed}')
    return random.Random(f'{seed} {request.node.name}')


@pytest.fixture
def kills(request):
    return request.config.getoption('--kills', 100)
