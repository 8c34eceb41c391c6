"""Options of the survival suite: launch/test.sh -m slow tests/survival --kills=100."""

import os
import random

import pytest


def pytest_addoption(parser):
    parser.addoption('--kills', type=int, default=100, help='disturbances of each kind of run')
    parser.addoption('--survival_seed', type=int, help='of the random moments; default: any')


@pytest.fixture
def rng(request):
    """Random numbers of a test; their seed is printed where it fails."""
    seed = request.config.getoption('--survival_seed', None) or int.from_bytes(os.urandom(4))
    print(f'--survival_seed={seed}')
    return random.Random(f'{seed} {request.node.name}')
