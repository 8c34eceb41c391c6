"""An ablation from the command line: results, report, resume, a variant from outside."""

import json
import os
import signal
import time

import pytest

from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import read_json
from tests.processes import other_modes, umask
from tests.test_readme import README, between


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_an_ablation_runs_skips_what_is_done_and_takes_an_outside_variant(
    script_here, tmp_path, monkeypatch
):
    flags = ('--config=study.py', '--workdir=out')
    with umask(0o002):
        first = script_here('ablate', *flags, '--workers=2')
    assert first.returncode == 0, first.stderr
    assert 'small: 2 of 2 runs done' in first.stderr
    assert not other_modes(tmp_path / 'out', 0o002)
    assert 'orbax' not in first.stderr and 'Traceback' not in first.stderr
    out = tmp_path / 'out'
    results = lines(out / 'results.jsonl')
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

    (run,) = out.glob('runs/qk-vo-*')
    written = (run / 'result.json').stat().st_mtime_ns
    code = between(README, '<!-- example: signed_diagonal.py -->\n```python', '```')
    (tmp_path / 'signed_diagonal.py').write_text(code)
    variants = '("qk/vo", "shared_qk/vo", "signed_diagonal:SignedDiagonal/vo")'
    monkeypatch.syspath_prepend(tmp_path)
    second = script_here('ablate', *flags, f'--config.variants={variants}')
    assert second.returncode == 0, second.stderr
    assert (run / 'result.json').stat().st_mtime_ns == written
    assert len(read_json(run / 'provenance.json', {})['starts']) == 1  # not even opened
    results = lines(out / 'results.jsonl')
    assert len(results) == 9 and results[-1]['variant'] == 'signed_diagonal:SignedDiagonal/vo'
    assert len(read_metrics(next(out.glob('runs/signed*')) / 'metrics.jsonl')) == 13


def test_a_dry_run_prints_the_runs_and_writes_nothing(script_here, tmp_path):
    done = script_here('ablate', '--config=study.py', '--dry_run')
    assert done.returncode == 0, done.stderr
    assert 'small: 2 arms' in done.stdout and 'residual' in done.stdout
    # 3 trials of 40 steps of 4 rows of 16 tokens, for each of two runs.
    assert '2 runs     6 trials  1.54e+04 tokens' in done.stdout and 'about 0:00' in done.stdout
    assert {p.name for p in tmp_path.iterdir() if p.suffix != '.py'} <= {'__pycache__'}


# Screening, verdict and the untuned study above stack three trials each: one program per variant.
TUNED = (
    '--config=study.py',
    '--config.base.data.name=recall(pairs=2)',  # rows without documents
    '--config.base.model.context=7',
    '--config.base.train.eval_every=5',
    '--config.base.train.checkpoint_every=5',
    '--config.base.trials.learning_rates=(2e-3,4e-3,8e-3)',
    '--config.tuning.seeds=(10,)',
    '--config.tuning.max_points=3',
    '--config.tuning.max_seeds=2',
)


@pytest.mark.slow
def test_two_workers_and_a_kill_leave_every_run_exactly_once(start, script_here, tmp_path):
    out = tmp_path / 'shared'
    flags = (*TUNED, '--workdir=shared', '--lease_expiry=40')
    workers = [start('ablate', *flags), start('ablate', *flags)]
    victim = killed_in_the_middle_of_a_run(out, workers)
    workers.remove(victim)
    stdout, errors = workers[0].communicate(timeout=900)
    assert workers[0].returncode == 0, errors
    assert 'report:' in stdout

    plan, results = lines(out / 'plan.jsonl'), lines(out / 'results.jsonl')
    assert [c['stage'] for c in plan if c['variant'] == 'qk/vo'][-1] == 'verdict'
    assert [r['run'] for r in results] == [c['run'] for c in plan for _ in range(c['trials'])]
    starts = []
    for run in plan:
        directory = out / run['directory']
        steps = [r['step'] for r in read_metrics(directory / 'metrics.jsonl')]
        assert sorted(set(steps)) == list(range(5, 45, 5))
        # An evaluation and its training record share a step, the last one with the final record.
        assert len(steps) == 8 + 8 + 1
        starts.append(len(read_json(directory / 'provenance.json', {})['starts']))
    assert sorted(starts)[-1] == 2 and sorted(starts)[:-1] == [1] * (len(plan) - 1)

    alone = script_here('ablate', *TUNED, '--workdir=alone')
    assert alone.returncode == 0, alone.stderr
    assert [(r['run'], r['trial'], r['val_loss']) for r in results] == [
        (r['run'], r['trial'], r['val_loss']) for r in lines(tmp_path / 'alone' / 'results.jsonl')
    ]


def killed_in_the_middle_of_a_run(out, workers):
    """Kills -9 the worker of the first run that has saved a checkpoint, and returns it.

    Its lease is made to look expired, so that nobody has to wait for that.
    """
    deadline = time.monotonic() + 600
    while time.monotonic() < deadline:
        for saved in out.glob('runs/*/checkpoints/[0-9]*'):
            run = saved.parents[1]
            if (run / 'result.json').exists():
                continue
            pid = int((run / 'lock').read_text().split()[1])
            (victim,) = [worker for worker in workers if worker.pid == pid]
            victim.send_signal(signal.SIGSTOP)
            os.waitpid(pid, os.WUNTRACED)
            if (run / 'result.json').exists():  # it finished in the meantime
                victim.send_signal(signal.SIGCONT)
                continue
            victim.kill()
            victim.communicate()
            for lease in (out / 'leases').iterdir():
                if read_json(lease, {})['pid'] == pid:
                    os.utime(lease, (0, 0))
            return victim
        assert all(worker.poll() is None for worker in workers), workers[0].communicate()
        time.sleep(0.01)
    raise AssertionError('no run has saved a checkpoint')
