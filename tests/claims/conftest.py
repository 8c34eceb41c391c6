"""Committed studies, as directories of claims hold them."""

import shutil
from pathlib import Path

import pytest

from tests.studies import beat_yardsticks

RESULTS = Path(__file__).parents[2] / 'experiments/results'


@pytest.fixture(scope='session')
def committed(tmp_path_factory):
    """The committed studies, as if all baselines had beaten their yardsticks."""
    path = tmp_path_factory.mktemp('committed') / 'results'
    shutil.copytree(RESULTS, path, ignore=shutil.ignore_patterns('*.png'))
    for declaration in path.rglob('study.json'):
        beat_yardsticks(declaration.parent)
    return path


@pytest.fixture
def swapped(committed, tmp_path):
    """fair_small with two of its arms swapped: shared_qk, plain and as in Reformer."""
    shutil.copytree(committed / 'fair_small', tmp_path / 'fair_small')
    one, other = (f'"variant": "{variant}"' for variant in (PLAIN, REFORMER))
    for name in ('plan.jsonl', 'results.jsonl'):
        path = tmp_path / 'fair_small' / name
        text = path.read_text().replace(one, '"-"').replace(other, one).replace('"-"', other)
        path.write_text(text)
    return tmp_path


PLAIN, REFORMER = 'shared_qk/vo', 'shared_qk(key_norm=True,self_mask=True)/vo'
