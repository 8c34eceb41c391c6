"""Copies of committed studies, in the layout of a directory of claims."""

import shutil

import pytest

from tests.studies import RESULTS, beat_yardsticks

CLAIMS = RESULTS / 'claims/cpu'
USED = ('fair_small', 'quickstart', 'claims/cpu/lm_added')


@pytest.fixture(scope='session')
def committed(tmp_path_factory):
    """A copy of committed studies in which every baseline beats its yardstick."""
    path = tmp_path_factory.mktemp('committed') / 'results'
    for name in USED:
        shutil.copytree(RESULTS / name, path / name, ignore=shutil.ignore_patterns('*.png'))
        beat_yardsticks(path / name)
    return path
