"""An ablation from the command line: results, report, resume, a variant from outside."""

import json

from qkattn import runlog

OUTSIDE = '''
"""Keys and queries from one matrix, the queries turned by a signed diagonal."""
import jax
import jax.numpy as jnp
from flax import nnx
from qkattn.attention.score import SharedQK

class SignedDiagonal(SharedQK):
    equation = 'W[n] L[n] W[n]^T'
    weights = 'D*N*H + N*H'
    source = 'this test'

    def __init__(self, spec, *, key):
        super().__init__(spec, key=key)
        self.w_diagonal_NH = nnx.Param(jnp.ones((spec.num_heads, spec.head_size)))

    def queries(self, x_BTD):
        return super().queries(x_BTD) * self.w_diagonal_NH[...]

    def remember(self, y_BSD):
        return {'k_BSNH': super().queries(y_BSD)}

    def matrix(self):
        w_DNH = self.w_q_DNH[...]
        return jnp.einsum('DNH,NH,ENH->NDE', w_DNH, self.w_diagonal_NH[...], w_DNH)
'''


def test_an_ablation_runs_skips_what_is_done_and_takes_an_outside_variant(script, tmp_path):
    flags = ('--config=study.py', '--workdir=out')
    first = script('ablate', *flags)
    assert first.returncode == 0, first.stderr
    assert 'orbax' not in first.stderr and 'Traceback' not in first.stderr
    out = tmp_path / 'out'
    results = [json.loads(line) for line in (out / 'results.jsonl').read_text().splitlines()]
    assert [(r['variant'], r['trial']['seed']) for r in results] == [
        ('qk/vo', 0),
        ('qk/vo', 1),
        ('shared_qk/vo', 0),
        ('shared_qk/vo', 1),
    ]
    assert all(r['status'] == 'finished' and r['val_bits_per_byte'] < 9 for r in results)
    assert all(abs(r['residual']) <= 5e-3 and r['data']['fingerprints'] for r in results)
    assert 'hostname' not in results[0]['provenance']
    assert (out / 'report.html').stat().st_size > 10_000
    assert 'shared_qk/vo' in first.stdout and 'report:' in first.stdout

    (cell,) = out.glob('cells/qk-vo-*')
    written = (cell / 'result.json').stat().st_mtime_ns
    (tmp_path / 'outside_score.py').write_text(OUTSIDE)
    variants = '("qk/vo", "shared_qk/vo", "outside_score:SignedDiagonal/vo")'
    second = script('ablate', *flags, f'--config.variants={variants}', path=[str(tmp_path)])
    assert second.returncode == 0, second.stderr
    assert (cell / 'result.json').stat().st_mtime_ns == written
    assert len(runlog.read_json(cell / 'provenance.json')['starts']) == 1  # not even opened
    results = [json.loads(line) for line in (out / 'results.jsonl').read_text().splitlines()]
    assert len(results) == 6 and results[-1]['variant'] == 'outside_score:SignedDiagonal/vo'
    assert len(runlog.read_metrics(next(out.glob('cells/outside*')) / 'metrics.jsonl')) == 6


def test_a_dry_run_prints_the_cells_and_writes_nothing(script, tmp_path):
    done = script('ablate', '--config=study.py', '--dry_run')
    assert done.returncode == 0, done.stderr
    assert 'small: 2 cells of 2 trials' in done.stdout and 'residual' in done.stdout
    assert sorted(p.name for p in tmp_path.iterdir() if p.suffix != '.py') in ([], ['__pycache__'])
