"""Committed studies, as directories of claims hold them."""

import shutil

import pytest

from tests.studies import RESULTS, beat_yardsticks

CLAIMS = RESULTS / 'claims/cpu'
USED = ('fair_small', 'quickstart', 'claims/cpu/lm_added')


@pytest.fixture(scope='session')
def committed(tmp_path_factory):
    """Committed studies, as if all baselines had beaten their yardsticks."""
    path = tmp_path_factory.mktemp('committed') / 'results'
    for name in USED:
        shutil.copytree(RESULTS / name, path / name, ignore=shutil.ignore_patterns('*.png'))
        beat_yardsticks(path / name)
    return path
