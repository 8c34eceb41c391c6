"""Committed studies, as directories of claims hold them."""

import shutil
from pathlib import Path

import pytest

RESULTS = Path(__file__).parents[2] / 'experiments/results'


@pytest.fixture(scope='session')
def committed():
    """The directory of committed studies."""
    return RESULTS


@pytest.fixture
def swapped(tmp_path):
    """fair_small with two of its arms swapped: shared_qk, plain and as in Reformer."""
    shutil.copytree(RESULTS / 'fair_small', tmp_path / 'fair_small')
    one, other = (f'"variant": "{variant}"' for variant in (PLAIN, REFORMER))
    for name in ('plan.jsonl', 'results.jsonl'):
        path = tmp_path / 'fair_small' / name
        text = path.read_text().replace(one, '"-"').replace(other, one).replace('"-"', other)
        path.write_text(text)
    return tmp_path


PLAIN, REFORMER = 'shared_qk/vo', 'shared_qk(key_norm=True,self_mask=True)/vo'
