"""experiments.benchmark: what it refuses before anything runs, and its smallest run."""

import json

import pytest

from qkattn.benchmark.suites import steps
from qkattn.benchmark.suites.suite_registry import SUITES

WRONG = {
    '': '--suite=NAME is required, e.g. --suite=smoke',
    '--suite=stepz': "unknown --suite=stepz, did you mean 'steps'? known are steps, ",
    '--suite=cpu,gpu': '--suite=cpu,gpu names 2 collections; run one',
    '--suite=steps --scale=cup': "unknown --scale=cup, did you mean 'cpu'? known are cpu, gpu,",
    '--suite=steps --peers=torhc': "unknown --peers=torhc, did you mean 'torch'? known are torch,",
    '--suite=steps --peers=flax,torch': "benchmark needs the package torch: pip install -e '.[be",
    '--suite=steps --cores=0': '--cores=0 must be a whole number from 1 to ',
    '--suite=steps --cores=1,9999': '--cores=9999 must be a whole number from 1 to ',
    '--suite=steps --widths=x': '--widths=x must be a whole number from 1',
    '--suite=steps --dtypes=float16': 'unknown --dtypes=float16, did you mean ',
    '--suite=steps --variants=qk/voo': '--variants=qk/voo: model: unknown value ',
    '--suite=steps --variants=qk': "--variants=qk: variant 'qk' must be written score/value",
}


@pytest.mark.parametrize('given', WRONG)
def test_what_cannot_run_is_refused(given, script_here, tmp_path, monkeypatch):
    # As where torch is not installed.
    monkeypatch.setitem(steps.NEEDS, 'torch', ('torch_that_is_absent', 'benchmark'))
    expected = WRONG[given].replace('package torch', 'package torch_that_is_absent')
    done = script_here('benchmark', *given.split())
    assert done.returncode == 2 and done.stderr.count('\n') == 1
    assert done.stderr.startswith(expected[:60])
    assert not (tmp_path / 'runs').exists()


@pytest.mark.slow
def test_the_smallest_run_measures_every_row(script, tmp_path):
    done = script('benchmark', '--suite=smoke', '--cores=1', '--out=out')
    assert done.returncode == 0, done.stderr
    document = json.loads((tmp_path / 'out/benchmark.json').read_text())
    rows = [row for group in document['groups'] for row in group['rows']]
    assert len(rows) > 15
    assert {group['suite'] for group in document['groups']} == {*SUITES}
    assert not [row['name'] for row in rows if not row['rounds'] or 'failed' in row['extra']]
    again = script('benchmark', '--suite=smoke', '--cores=1', '--out=out')
    assert again.returncode == 0 and again.stderr.count(': measured before') == len(
        document['groups']
    )
