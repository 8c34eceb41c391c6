"""Measures on a committed study."""

import json
import os
import re
import shutil

import pytest

from qkattn.claims.decided import Speaks
from qkattn.claims.measures import crossover, drift, factor_norms
from qkattn.claims.measures.curves import early, growth
from qkattn.claims.measures.untuned import at_one_rate
from qkattn.claims.results import load
from qkattn.errors import RunDirectoryError
from tests.claims.conftest import PLAIN

pytestmark = pytest.mark.stored


def counts(study):
    """Differences that change, verdicts that turn, verdicts gained or lost; what the first say."""
    rows = early(study)
    assert {row.x for row in rows} == {0.5} and {row.context['arms'] for row in rows} == {'8'}
    assert [row.speaks for row in rows[1:]] == [Speaks.BESIDE] * 2
    return *(row.value for row in rows), rows[0].speaks


def test_what_changes_after_an_early_reading_is_counted_by_fraction(committed, tmp_path):
    changed, turned, gained, said = counts(committed / 'fair_small')
    assert changed >= 1 and said == Speaks.FOR and turned == 0
    study = tmp_path / 'early'
    shutil.copytree(committed / 'fair_small', study)
    for run in load(study).study.runs:
        if run.key.variant == 'qk/k_is_v' and run.stage == 'verdict':
            path = study / run.directory / 'metrics.jsonl'
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            for line in lines:
                if line['kind'] == 'eval' and line['step'] == 250 and run.key.control is None:
                    line['val_loss'] = [loss - 1 for loss in line['val_loss']]
            path.write_text(''.join(json.dumps(line) + '\n' for line in lines))
    results = study / 'results.jsonl'
    os.utime(results, ns=(results.stat().st_mtime_ns + 1,) * 2)
    # qk/k_is_v is better until it is annealed, then worse.
    assert counts(study)[:2] == (changed + 1, 1)


def test_growth_is_the_last_difference_minus_the_first(committed):
    (row,) = growth(committed / 'fair_small', PLAIN)
    found = load(committed / 'fair_small').found
    (arm,) = (a for a in found.controls if (a.variant, a.control) == (PLAIN, 'equal_shape'))
    baseline = found.arms[0]
    last = arm.val_loss.mean - baseline.val_loss.mean
    first = last - row.value
    assert row.context == {
        'model': 'decoder',
        'size': 'd_model=48',
        'corpus': 'stdlib',
        'steps': '500',
    }
    assert 0.01 < first < 0.5 and row.low < row.value < row.high


def test_untuned_differences_are_paired_over_seeds_at_a_rate(committed):
    (row,) = at_one_rate(committed / 'quickstart', 'merged/vo')
    assert (row.x, row.context['baseline']) == (0.004, 'untuned')
    arm, baseline = (of for of in load(committed / 'quickstart').found.arms[:2][::-1])
    assert (arm.variant, baseline.variant) == ('merged/vo', 'qk/vo')
    assert row.value == pytest.approx(arm.test_loss.mean - baseline.test_loss.mean)
    assert (row.low, row.high) == pytest.approx((arm.difference.low, arm.difference.high))


def test_the_lowest_rate_of_both_decides(committed, tmp_path):
    """Seed 2 of both arms at twice the rate: two curves' points, of two seeds and of one."""
    study = tmp_path / 'two_rates'
    shutil.copytree(committed / 'quickstart', study)
    path = study / 'results.jsonl'
    text = path.read_text()
    changed = re.sub(r'("learning_rate": )0.004(?=[^{}]*"seed": 2)', r'\g<1>0.008', text)
    changed = re.sub(r'("seed": 2[^{}]*"learning_rate": )0.004', r'\g<1>0.008', changed)
    assert changed.count('0.008') > text.count('0.008')
    path.write_text(changed)
    rows = at_one_rate(study, 'merged/vo')
    assert [row.x for row in rows] == [0.004, 0.008]
    assert rows[0].speaks != Speaks.BESIDE and rows[1].speaks == Speaks.BESIDE
    assert rows[0].low is not None and rows[1].low is None


@pytest.mark.parametrize('measure', [crossover, drift, factor_norms])
def test_a_damaged_file_is_named(measure, tmp_path):
    path = tmp_path / measure.FILE
    path.parent.mkdir()
    assert measure.read(tmp_path) == []
    for text, reason in {
        '{"a"': 'it is not JSON',
        '{"crc32": 1}': 'checksum',
        '{}': 'field',
    }.items():
        path.write_text(text)
        with pytest.raises(RunDirectoryError, match=f'{path} is damaged .*{reason}.*; restore it'):
            measure.read(tmp_path)


@pytest.mark.parametrize('measure', [crossover, drift])
def test_an_altered_number_is_found(measure, committed, tmp_path):
    path = tmp_path / measure.FILE
    path.parent.mkdir()
    (name,) = (committed / 'claims/cpu').glob(f'*/{measure.FILE}')
    text = name.read_text()
    path.write_text(text)
    assert len(measure.read(tmp_path)) > 10
    path.write_text(re.sub(r'0\.(\d)', r'0.5\1', text, count=1))
    with pytest.raises(RunDirectoryError, match='its checksum is not that of its content'):
        measure.read(tmp_path)
