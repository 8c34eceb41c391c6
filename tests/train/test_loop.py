"""A run from its directory to its results: stopped, lost or damaged, it ends as if undisturbed."""

import dataclasses
import functools
import json
import math
import shutil
import signal
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from qkattn import data
from qkattn.config import MeshConfig, TrainConfig, to_json
from qkattn.data import pipeline
from qkattn.data.tasks.task_registry import rows_of
from qkattn.errors import CheckpointError, ConfigError, Lost, Stopped
from qkattn.jobs.display import Progress
from qkattn.jobs.signals import EXIT_REQUEUE
from qkattn.metrics import TIMES, bits_per_byte
from qkattn.storage import leases
from qkattn.storage.metrics_log import read_metrics
from qkattn.storage.records import read_json, with_checksum
from qkattn.train import loop, program, results
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.clock import PARTS
from qkattn.train.loop import Divergences, pauses, train
from qkattn.train.trials import Stack
from tests.experiments.conftest import RUN, STUDY
from tests.lanes import only
from tests.processes import start_python
from tests.storage.test_sinks import events
from tests.train.conftest import PAIRS

pytestmark = pytest.mark.usefixtures('programs_kept')


def outcome(workdir: Path) -> dict:
    """Everything of a finished run that must not depend on interruptions."""
    records = read_metrics(workdir / 'metrics.jsonl')
    trial_results = read_json(workdir / 'result.json', [{}])
    kept = ('trial', 'status', 'val_loss', 'test_loss', 'num_tokens')
    return {
        'metrics': records,
        'documents': (workdir / 'documents.json').read_text(),
        'results': [{k: r[k] for k in kept} for r in trial_results],
    }


def final_state(config, workdir: Path) -> list[np.ndarray]:
    built = program.build(config, 'map')
    checkpoints = Checkpoints(workdir / 'checkpoints')
    state, _ = checkpoints.restore(built.abstract_state)
    checkpoints.close()
    return [np.asarray(leaf) for leaf in jax.tree.leaves(state)]


def at_dispatch(number: int, call):
    """A function `lost` that calls `call` after that many dispatches; what it returns is lost."""
    asked = iter(range(1, 1000))
    return lambda: bool(call()) if next(asked) == number else False


@pytest.fixture(scope='module')
def trained(data_dir, tmp_path_factory):
    """A finished run, by its config: (its directory, its results)."""
    return functools.cache(
        lambda config: (path := tmp_path_factory.mktemp('trained') / 'run', train(config, path))
    )


@pytest.fixture
def unfinished(small, trained, tmp_path):
    """Its config, a copy of the run in `tmp_path` whose results were lost, and those results."""
    path, trial_results = trained(small())
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    (tmp_path / 'result.json').unlink()
    return small(), tmp_path, trial_results


# A run that ends


@pytest.mark.parametrize(
    'name', only(['masked'], ['masked', 'translation', 'causal probe', 'labelling probe'])
)
def test_a_run_leaves_plausible_results_and_the_same_ones_again(task, name, tmp_path):
    config = task(name)
    first, second = (train(config, tmp_path / which) for which in 'ab')
    for a, b in zip(first, second, strict=True):
        assert {key for key in a if a[key] != b[key]} <= TIMES.keys() <= a.keys()
        # Not their sum: devices may be without work because the input is late.
        assert all(0 <= a[part] < a['train_seconds'] for part in PARTS)
        assert any(a[part] for part in PARTS)
    metrics = [(tmp_path / which / 'metrics.jsonl').read_text() for which in 'ab']
    assert metrics[0] == metrics[1]
    probe, translation, rows = 'probe' in name, name == 'translation', rows_of(config)
    for result in first:
        assert result['status'] == 'finished'
        for split in rows.splits[1:]:
            prefix = {'validation': 'val', 'test': 'test'}[split]
            loss, size = result[f'{prefix}_loss'], result[f'{prefix}_bits_per_byte']
            assert 0.3 < loss < 1.3 * math.log(config.model.vocab_size)
            assert 0 <= result[f'{prefix}_accuracy'] <= 1 and 0 <= result[f'{prefix}_solved'] <= 1
            want = None if probe else bits_per_byte(loss, rows.bytes_per_token(split))
            assert size == (want and pytest.approx(want))
        assert (result['data']['unigram_bits_per_byte'] is None) == probe
        assert result['data']['unigram_loss'] == pytest.approx(rows.unigram_nats('validation'))
        names = {key for key in result if 'bleu' in key or 'exact' in key}
        assert names == (
            {'val_bleu', 'val_bleu_signature', 'val_exact_match'} if translation else set()
        )
        if translation:
            assert result['val_num_sentences'] == 6 and 0 <= result['val_bleu'] <= 100
            assert result['test_loss'] is result['test_accuracy'] is None
            assert result['eval_tokens'] == sum(len(de) + 1 for _, de in PAIRS[24:])
        if name == 'masked':
            assert result['eval_tokens'] == 8 * round(0.15 * 16)
        floats = 0 if config.model.kind == 'encoder' else 64 if translation else 32
        assert result['cache_floats_per_token'] == floats
    assert first[0]['val_loss'] != first[1]['val_loss']
    evaluated = [r for r in read_metrics(tmp_path / 'a/metrics.jsonl') if r['kind'] == 'eval']
    assert [r['step'] for r in evaluated] == [4, 8]
    for field in ('val_loss', 'val_accuracy', 'val_solved'):
        assert evaluated[-1][field] == [result[field] for result in first]


def test_the_display_gets_the_logged_losses_and_the_count_of_what_follows(
    small, tmp_path, monkeypatch
):
    losses, follows, phases, phase = {}, [], Counter(), Progress.phase
    monkeypatch.setattr(Progress, 'update', lambda _, step, loss: losses.update({step: loss}))
    monkeypatch.setattr(Progress, 'begin', lambda _, step, **counts: follows.append(counts))
    monkeypatch.setattr(
        Progress, 'phase', lambda self, name: phases.update([name]) or phase(self, name)
    )
    train(small(), tmp_path)
    records = read_metrics(tmp_path / 'metrics.jsonl')
    logged = {record['step']: record['loss'] for record in records if record['kind'] == 'train'}
    assert {step: loss.tolist() for step, loss in losses.items()} == logged
    assert list(logged) == list(range(1, 13))
    assert follows == [{'evaluating': 4, 'saving': 3}]
    assert phases & Counter(follows[0]) == follows[0] and phases['evaluating'] == 4
    uneven = TrainConfig(num_steps=10, eval_every=4, checkpoint_every=4)
    assert pauses(uneven, 0, ('train', 'validation', 'test')) == {'evaluating': 4, 'saving': 3}
    assert pauses(uneven, 4, ('train', 'validation')) == {'evaluating': 2, 'saving': 2}


def test_a_finished_run_returns_its_results_and_is_not_touched(small, trained):
    path, trial_results = trained(small())
    before = {p: p.stat().st_mtime_ns for p in (path / 'checkpoints').rglob('*')}
    assert train(small(), path) == trial_results
    assert before == {p: p.stat().st_mtime_ns for p in (path / 'checkpoints').rglob('*')}
    with pytest.raises(ConfigError, match=r'train.num_steps: 12 -> 16'):
        train(small(train={'num_steps': 16}), path)


def test_a_validation_after_the_last_step_is_not_repeated(small, tmp_path, monkeypatch):
    splits, evaluate, want = [], Stack.evaluate, ['validation'] * 3 + ['test']
    monkeypatch.setattr(Stack, 'evaluate', lambda *args: splits.append(args[1]) or evaluate(*args))
    trial_results = train(small(), tmp_path)
    assert splits == want
    (tmp_path / 'result.json').unlink()
    again = train(small(), tmp_path)
    assert splits == [*want, 'validation', 'test']
    for first, second in zip(trial_results, again, strict=True):
        assert all(first[name] == second[name] for name in ('val_loss', 'test_loss'))


def test_attention_metrics_are_logged_and_nothing_else_changes(small, tmp_path):
    sizes = {'num_layers': 1, 'd_model': 16, 'score': 'nonlinear_query', 'context': 8}
    short = {'num_steps': 3, 'eval_every': 3, 'checkpoint_every': 3}
    for name in ('off', 'on'):
        mesh = {'data': min(2, jax.device_count())}
        fields = short | {'attention_metrics': name == 'on'}
        train(small(model=sizes, train=fields, mesh=mesh), tmp_path / name)
    off, on = (read_metrics(tmp_path / name / 'metrics.jsonl') for name in ('off', 'on'))
    extra = on[-2].keys() - off[-2].keys()
    assert [{n: v for n, v in r.items() if n not in extra} for r in on] == off
    assert not TrainConfig().attention_metrics
    # What a score does not have is null.
    assert on[-2]['qk_effective_rank'] == [None, None] and None not in on[-2]['ov_effective_rank']
    assert all(0 < value < 1 for value in on[-2]['attention_diagonal_mass'])


# A run that is stopped or lost


def test_a_signal_saves_after_the_step_and_the_run_resumes_bitwise(tiny, trained, tmp_path):
    config = tiny(
        model={'dropout': 0.1, 'num_layers': 1, 'd_model': 16}, optimizer={'name': 'muon'}
    )
    for step in (3, 6):
        stop = at_dispatch(3, lambda: signal.raise_signal(signal.SIGTERM))
        with pytest.raises(Stopped, match=f'stopped at step {step} of 12, state saved'):
            train(config, tmp_path, lost=stop)
        assert (tmp_path / f'checkpoints/{step}').exists()
        assert read_metrics(tmp_path / 'metrics.jsonl')[-1]['step'] == step
    train(config, tmp_path)
    straight = trained(config)[0]
    assert outcome(tmp_path) == outcome(straight)
    states = (final_state(config, path) for path in (tmp_path, straight))
    jax.tree.map(np.testing.assert_array_equal, *states)


def test_a_lost_run_saves_nothing_more_and_can_be_gone_on_with(small, trained, outside):
    """A run that another process has taken over is let go; its sinks get every record once."""
    sinks = ('tensorboard', 'csv_sink:CsvSink(digits=17)')
    config, path = small(train={'sinks': sinks}), outside / 'run'
    with pytest.raises(Lost, match='taken over at step 7'):  # checkpoints are every four
        train(config, path, lost=at_dispatch(7, lambda: True))
    assert not (path / 'result.json').exists()
    assert sorted(p.name for p in (path / 'checkpoints').iterdir()) == ['4']
    train(config, path)
    assert outcome(path) == outcome(trained(small())[0])
    logged = {
        f'{record["step"]},{record["kind"]}/{name},{trial}': value
        for record in read_metrics(path / 'metrics.jsonl')
        for name, values in record.items()
        if isinstance(values, list) and name != 'trials'
        for trial, value in enumerate(values)
    }
    lines = (path / 'log.csv').read_text().splitlines()
    assert len(lines) == len(logged)
    assert {key: float(value) for key, _, value in (x.rpartition(',') for x in lines)} == logged
    for trial in (0, 1):
        for name, values in events(path / f'tensorboard/seed={trial}').items():
            want = {step: logged[f'{step},{name},{trial}'] for step in values}
            assert values == pytest.approx(want, rel=1e-6)
            steps = {'train': range(1, 13), 'eval': (4, 8, 12), 'final': (12,)}
            assert list(values) == list(steps[name.partition('/')[0]])


@pytest.mark.parametrize('step', only([8], [8, 12]))
def test_a_request_during_an_evaluation_saves_and_the_next_start_evaluates_first(
    step, small, tmp_path, trained, monkeypatch
):
    """Also where the next start is stopped or killed in that evaluation, or right after it."""
    config, real = small(data={'eval_sequences': 24}), pipeline.eval_batches
    straight = trained(config)[0]
    splits, stop_in = [], None

    def stopped(rows, split, **options):
        splits.append(split)
        for number, batch in enumerate(real(rows, split, **options)):
            if len(splits) == stop_in:
                signal.raise_signal(signal.SIGTERM)
            assert len(splits) != stop_in or number == 0, 'the evaluation goes on'
            yield batch

    monkeypatch.setattr(pipeline, 'eval_batches', stopped)
    for stop_in in (step // 4, 1, 1):  # noqa: B007 (read by the batches)
        splits.clear()
        with pytest.raises(Stopped, match=f'stopped at step {step} of 12, state saved'):
            train(config, tmp_path)
        last = read_metrics(tmp_path / 'metrics.jsonl')[-1]
        assert (last['kind'], last['step']) == ('train', step)
        assert max(int(p.name) for p in (tmp_path / 'checkpoints').iterdir()) == step
    stop_in, lost, record = None, [], results.eval_record
    monkeypatch.setattr(results, 'eval_record', lambda *a: lost.append(1) or record(*a))
    with pytest.raises(Lost):
        train(config, tmp_path, lost=lambda: bool(lost))
    assert read_metrics(tmp_path / 'metrics.jsonl')[-1]['kind'] == 'eval'
    train(config, tmp_path)
    assert outcome(tmp_path) == outcome(straight)


def test_a_request_to_a_library_ends_before_the_first_step(small, tmp_path, monkeypatch):
    """A notebook outlives it."""
    build = program.build
    monkeypatch.setattr(
        program, 'build', lambda *args: signal.raise_signal(signal.SIGTERM) or build(*args)
    )
    with pytest.raises(Stopped, match='stopped with nothing to save'):
        train(small(), tmp_path / 'run')
    assert (tmp_path / 'run/metrics.jsonl').read_bytes() == b''
    assert not list((tmp_path / 'run/checkpoints').iterdir())


# A script whose program, or whose data, take long in native code, where Python runs no handlers.
SCRIPT = """
    import hashlib, runpy, sys
    from qkattn.data.tasks.language import LanguageRows
    from qkattn.train import program

    def endless(*arguments, **options):
        print('working', flush=True)
        hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)

    name, phase, *flags = sys.argv[1:]
    if phase == 'compiling':
        program.train_steps = lambda *arguments: endless
    else:
        LanguageRows.open = endless
    sys.argv = [name, *flags]
    runpy.run_module(f'experiments.{name}', run_name='__main__')
"""


@pytest.mark.parametrize(
    ('name', 'phase', 'stop'),
    [
        pytest.param('train', 'preparing data', signal.SIGINT, marks=pytest.mark.slow),
        ('ablate', 'compiling', signal.SIGTERM),
    ],
)
def test_a_signal_before_the_first_step_ends_a_script_at_once(
    name, phase, stop, tmp_path, data_dir, monkeypatch
):
    monkeypatch.setenv('QKATTN_DATA', data_dir)
    config, workdir = tmp_path / 'config.py', tmp_path / 'out'
    config.write_text(STUDY if name == 'ablate' else RUN)
    process = start_python(SCRIPT, name, phase, f'--config={config}', f'--workdir={workdir}')
    try:
        assert any(line == 'working\n' for line in process.stdout), process.stderr.read()
        process.send_signal(stop)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == EXIT_REQUEUE, errors
    assert 'stopped with nothing to save' in errors and 'Traceback' not in errors
    for pattern in ('[1-9]*/state', 'result.json', '*.tmp'):
        assert not list(workdir.rglob(pattern))
    assert all(path.read_bytes() == b'' for path in workdir.rglob('metrics.jsonl'))
    for path in workdir.rglob('*.json'):
        json.loads(path.read_bytes())
    if name == 'ablate':
        assert list((workdir / 'leases').iterdir()) and not leases.holders(workdir / 'leases')


# A run that is resumed


def test_a_damaged_checkpoint_is_named_and_the_one_before_used(unfinished, trained, caplog):
    config, path, _ = unfinished
    damage(path / 'checkpoints' / '12')
    train(config, path)
    assert outcome(path) == outcome(trained(config)[0])
    assert 'checkpoint 12 is damaged' in caplog.text
    (path / 'result.json').unlink()
    for step in (path / 'checkpoints').iterdir():
        damage(step)
    with pytest.raises(CheckpointError, match='every checkpoint in .* is damaged'):
        train(config, path)


def damage(step: Path) -> None:
    """Flips one bit in the middle of the largest array file."""
    files = [p for p in (step / 'state').rglob('*') if p.is_file()]
    largest = max(files, key=lambda p: p.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


def test_metrics_that_were_changed_before_a_resume_are_named(unfinished):
    config, path, _ = unfinished
    metrics = path / 'metrics.jsonl'
    metrics.write_bytes(metrics.read_bytes().replace(b'1', b'2', 1))
    with pytest.raises(ConfigError, match=r'metrics\.jsonl.*restore the file from a copy or use'):
        train(config, path)
    assert sorted(p.name for p in (path / 'checkpoints').iterdir()) == ['12', '8']


def test_metrics_that_are_changed_while_a_run_trains_are_named_at_its_end(small, tmp_path):
    def change():
        with (tmp_path / 'metrics.jsonl').open('r+b') as file:
            file.seek(20)
            file.write(b'9')

    with pytest.raises(ConfigError, match=r'metrics\.jsonl, line 1 .*; restore the file from'):
        train(small(), tmp_path, lost=at_dispatch(7, change))
    assert not (tmp_path / 'result.json').exists() and (tmp_path / 'checkpoints/12').exists()


def test_a_run_of_an_earlier_version_resumes_without_what_its_checkpoint_lacks(unfinished, trained):
    config, path, _ = unfinished
    shutil.rmtree(path / 'checkpoints/12')
    file = path / 'checkpoints/8/record/metadata'
    record = json.loads(file.read_text())
    assert record.pop('crc32') and record.pop('metrics')['lines'] == 10
    for name in ('diverged_at', 'evaluated', *PARTS):
        del record[name]
    file.write_text(json.dumps(with_checksum(record)))
    train(config, path)
    assert outcome(path) == outcome(trained(config)[0])


def test_a_run_killed_before_its_results_were_written_repeats_no_record(unfinished, trained):
    config, path, _ = unfinished
    assert read_metrics(path / 'metrics.jsonl')[-1]['kind'] == 'final'
    (path / 'documents.json').unlink()
    train(config, path)
    assert outcome(path) == outcome(trained(config)[0])


def test_other_data_is_refused(unfinished, monkeypatch):
    config, path, _ = unfinished
    real = data.tokens.TokenDataset.identity
    monkeypatch.setattr(
        data.tokens.TokenDataset, 'identity', lambda self: {**real(self), 'version': 'other'}
    )
    changed = r'other data than the present dataset \(version: "\S+" -> "other"\); use'
    with pytest.raises(CheckpointError, match=changed):
        train(config, path)


@pytest.mark.parametrize(
    ('pattern', 'mesh'),
    [
        (None, MeshConfig(data=2, tensor=2)),
        pytest.param('qk/vo,qk/no_v', MeshConfig(data=2, fsdp=2, tensor=2), marks=pytest.mark.slow),
    ],
)
def test_a_run_restores_onto_another_mesh(tiny, trained, tmp_path, pattern, mesh):
    """The config hash leaves the mesh out; losses go on as they would have, to rounding."""
    layers = {'num_layers': 3, 'pattern': pattern} if pattern else {'num_layers': 1}
    config = tiny(model={'d_model': 16, **layers})
    path, want = trained(config)
    shutil.copytree(path, tmp_path, dirs_exist_ok=True)
    (tmp_path / 'result.json').unlink()
    shutil.rmtree(tmp_path / 'checkpoints' / '12')
    got = train(dataclasses.replace(config, mesh=mesh), tmp_path)
    for g, w in zip(got, want, strict=True):
        assert abs(g['val_loss'] - w['val_loss']) < 1e-4


def test_a_diverged_trial_is_recorded_with_its_step_also_when_it_was_resumed(small, tmp_path):
    config = small(trials={'seeds': (0,), 'learning_rates': (1e-2, 1e30)}, train={'num_steps': 8})
    with pytest.raises(Lost):
        train(config, tmp_path, lost=at_dispatch(6, lambda: True))
    assert [p.name for p in (tmp_path / 'checkpoints').iterdir()] == ['4']
    fine, diverged = train(config, tmp_path)
    losses = {r['step']: r['loss'] for r in read_metrics(tmp_path / 'metrics.jsonl') if 'loss' in r}
    first = min(step for step, (_, loss) in losses.items() if loss is None)
    assert 1 < first < 4 and losses[first][0] is not None
    assert (fine['status'], fine['diverged_at']) == ('finished', None)
    assert (diverged['status'], diverged['diverged_at']) == ('diverged', first)


def test_the_step_of_a_divergence_is_counted_within_a_dispatch():
    nan = np.nan
    known = Divergences(np.array([True, True, False, False]), [None, None, 2, None])
    known.add(6, np.array([[1.0, 1.0, nan, nan], [1.0, nan, nan, nan], [1.0, nan, nan, nan]]))
    known.add(9, np.array([[1.0, nan, nan, nan]] * 3))
    assert known.record() == [None, 5, 2, None]  # the last one diverged before steps were kept
    assert Divergences(np.array([False])).record() == [None]


def test_processes_with_other_settings_or_another_directory_are_refused(
    tiny, tmp_path, monkeypatch
):
    config = tiny()
    loop.require_same_settings(config)
    other = to_json(dataclasses.replace(config, mesh=MeshConfig(data=2)))
    monkeypatch.setattr(loop.agreement, 'from_all', lambda mine: [mine, mine, other])
    with pytest.raises(ConfigError, match=r'process 2 has other settings .* \(mesh.data: 1 -> 2\)'):
        loop.require_same_settings(config)
    monkeypatch.setattr(loop, 'SEEN_WITHIN', 0.0)
    monkeypatch.setattr(loop.agreement, 'from_all', lambda mine: [[True, '/a'], mine])
    with pytest.raises(ConfigError, match=f'workdir={tmp_path} of process 1 is not /a of process'):
        loop.require_shared(tmp_path)
    (tmp_path / 'config.json').touch()
    loop.require_shared(tmp_path)


@pytest.mark.parametrize('field', ['name', 'schedule'])
def test_an_unknown_optimizer_is_refused_before_anything_is_written(tiny, tmp_path, field):
    with pytest.raises(ConfigError, match=f"unknown optimizer.{field} 'best'; known are"):
        train(tiny(optimizer={field: 'best'}), tmp_path / 'run')
    assert not (tmp_path / 'run').exists()
