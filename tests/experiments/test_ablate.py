"""An ablation from the command line: results, report, resume, a variant from outside."""

import re

import pytest

from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import read_json
from tests.lanes import only
from tests.processes import other_modes, umask
from tests.studies import read_lines
from tests.test_readme import README, between


@pytest.mark.parametrize('workers', only([1], [1, 2]))
def test_an_ablation_runs_skips_what_is_done_and_takes_an_outside_variant(
    script_here, tmp_path, monkeypatch, workers
):
    flags = ('--config=study.py', '--workdir=out')
    with umask(0o002):
        first = script_here('ablate', *flags, f'--workers={workers}')
    assert first.returncode == 0, first.stderr
    assert workers == 1 or 'small: workers on this machine: 2' in first.stderr
    assert not other_modes(tmp_path / 'out', 0o002)
    assert 'orbax' not in first.stderr and 'Traceback' not in first.stderr
    out = tmp_path / 'out'
    results = read_lines(out / 'results.jsonl')
    assert [(r['variant'], r['trial']['seed']) for r in results] == [
        (variant, seed) for variant in ('qk/vo', 'shared_qk/vo') for seed in (0, 1, 2)
    ]
    assert all(r['status'] == 'finished' and r['val_bits_per_byte'] < 9 for r in results)
    assert all(abs(r['residual']) <= 5e-3 and r['data']['fingerprints'] for r in results)
    assert 'hostname' not in results[0]['provenance']
    assert (out / 'report.html').stat().st_size > 10_000
    assert 'shared_qk/vo' in first.stdout and 'report:' in first.stdout
    report = first.stdout.split('study small')[1].split('all columns')[0]
    assert max(map(len, report.splitlines())) <= 100

    finished = [*out.glob('runs/*/result.json')]
    written = [path.stat().st_mtime_ns for path in finished]
    code = between(README, '<!-- example: signed_diagonal.py -->\n```python', '```')
    (tmp_path / 'signed_diagonal.py').write_text(code)
    variants = '("qk/vo", "shared_qk/vo", "signed_diagonal:SignedDiagonal/vo")'
    monkeypatch.syspath_prepend(tmp_path)
    second = script_here('ablate', *flags, f'--config.variants={variants}')
    assert second.returncode == 0, second.stderr
    assert [path.stat().st_mtime_ns for path in finished] == written and len(written) == 2
    for path in finished:  # each by one of the workers; now not even opened
        assert len(read_json(path.with_name('provenance.json'), {})['starts']) == 1
    results = read_lines(out / 'results.jsonl')
    assert len(results) == 9 and results[-1]['variant'] == 'signed_diagonal:SignedDiagonal/vo'
    assert len(read_metrics(next(out.glob('runs/signed*')) / 'metrics.jsonl')) == 13


def test_a_dry_run_prints_the_runs_and_writes_nothing(printed, tmp_path):
    text = printed('ablate', '--config=study.py', '--dry_run')
    assert 'small: 2 arms' in text and 'residual' in text
    # 3 trials of 40 steps of 4 rows of 16 tokens, for each of two runs.
    assert re.search(r'\ntotal +2 +6 +1.54e\+04 .* 0:00', text)
    assert {p.name for p in tmp_path.iterdir() if p.suffix != '.py'} <= {'__pycache__'}
