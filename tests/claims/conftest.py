"""Committed studies, as directories of claims hold them."""

import shutil
from pathlib import Path

import pytest

from tests.studies import beat_yardsticks

RESULTS = Path(__file__).parents[2] / 'experiments/results'
CLAIMS = RESULTS / 'claims/cpu'


@pytest.fixture(scope='session')
def committed(tmp_path_factory):
    """The committed studies, as if all baselines had beaten their yardsticks."""
    path = tmp_path_factory.mktemp('committed') / 'results'
    shutil.copytree(RESULTS, path, ignore=shutil.ignore_patterns('*.png'))
    for declaration in path.rglob('study.json'):
        beat_yardsticks(declaration.parent)
    return path
