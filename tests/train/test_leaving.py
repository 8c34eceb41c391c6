"""A stop request where no step is trained: a start leaves at once, or saves what it evaluates."""

import json
import signal

import pytest

from qkattn.data import pipeline
from qkattn.errors import Lost, Stopped
from qkattn.jobs.signals import EXIT_REQUEUE
from qkattn.storage import leases
from qkattn.storage.metrics_log import read_metrics
from qkattn.train import program, results, train
from tests.experiments.conftest import RUN, STUDY
from tests.lanes import only
from tests.processes import start_python
from tests.train.test_resume import outcome

# A script whose program, or whose data, take long in native code, where Python runs no handlers.
SCRIPT = """
    import hashlib, runpy, sys
    from qkattn.data.tasks.language import LanguageRows
    from qkattn.train import program

    def endless(*arguments, **options):
        print('working', flush=True)
        hashlib.pbkdf2_hmac('sha256', b'', b'', 2**31 - 1)

    name, place, *flags = sys.argv[1:]
    if place == 'compiling':
        program.train_steps = lambda *arguments: endless
    else:
        LanguageRows.open = endless
    sys.argv = [name, *flags]
    runpy.run_module(f'experiments.{name}', run_name='__main__')
"""


@pytest.mark.parametrize(
    ('name', 'place', 'stop'),
    [
        pytest.param('train', 'preparing data', signal.SIGINT, marks=pytest.mark.slow),
        ('ablate', 'compiling', signal.SIGTERM),
    ],
)
def test_a_signal_before_the_first_step_leaves_at_once(
    name, place, stop, tmp_path, data_dir, monkeypatch
):
    monkeypatch.setenv('QKATTN_DATA', data_dir)
    config, workdir = tmp_path / 'config.py', tmp_path / 'out'
    config.write_text(STUDY if name == 'ablate' else RUN)
    process = start_python(SCRIPT, name, place, f'--config={config}', f'--workdir={workdir}')
    try:
        line = process.stdout.readline()
        while line and line != 'working\n':
            line = process.stdout.readline()
        assert line, process.stderr.read()
        process.send_signal(stop)
        _, errors = process.communicate(timeout=120)
    finally:
        process.kill()
    assert process.returncode == EXIT_REQUEUE, errors
    assert 'stopped with nothing to save; the same command resumes' in errors
    assert 'Traceback' not in errors
    assert not list(workdir.rglob('[1-9]*/state')) and not list(workdir.rglob('result.json'))
    assert all(path.read_bytes() == b'' for path in workdir.rglob('metrics.jsonl'))
    assert not list(workdir.rglob('*.tmp'))
    for path in workdir.rglob('*.json'):
        json.loads(path.read_bytes())
    if name == 'ablate':
        assert list((workdir / 'leases').iterdir()) and not leases.holders(workdir / 'leases')


def test_a_request_to_a_library_ends_before_the_first_step(tiny, tmp_path, built_once, monkeypatch):
    """A notebook outlives it."""

    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGTERM)
        return built_once(*arguments, **options)

    monkeypatch.setattr(program, 'build', interrupted)
    with pytest.raises(Stopped, match='stopped with nothing to save'):
        train(tiny(model={'num_layers': 1, 'd_model': 16}), tmp_path / 'run')
    assert (tmp_path / 'run/metrics.jsonl').read_bytes() == b''
    assert not list((tmp_path / 'run/checkpoints').iterdir())


@pytest.mark.parametrize('step', only([8], [8, 12]))
def test_a_request_during_an_evaluation_saves_and_the_next_start_evaluates_first(
    step, tiny, tmp_path, monkeypatch
):
    """Also where the next start is stopped or killed in that evaluation, or right after it."""
    config, real = (
        tiny(model={'num_layers': 1, 'd_model': 16}, data={'eval_sequences': 24}),
        pipeline.eval_batches,
    )
    compiled = program.build(config)
    monkeypatch.setattr(program, 'build', lambda *_, **__: compiled)
    train(config, tmp_path / 'straight')
    places, stop_in = [], None

    def stopped(rows, split, **options):
        places.append(split)
        for number, batch in enumerate(real(rows, split, **options)):
            if len(places) == stop_in:
                signal.raise_signal(signal.SIGTERM)
            assert len(places) != stop_in or number == 0, 'the evaluation goes on'
            yield batch

    monkeypatch.setattr(pipeline, 'eval_batches', stopped)
    run = tmp_path / 'run'
    for stop_in in (step // 4, 1, 1):  # noqa: B007 (read by the batches)
        places.clear()
        with pytest.raises(Stopped, match=f'stopped at step {step} of 12, state saved'):
            train(config, run)
        last = read_metrics(run / 'metrics.jsonl')[-1]
        assert (last['kind'], last['step']) == ('train', step)
        assert max(int(p.name) for p in (run / 'checkpoints').iterdir()) == step
    stop_in = None
    record = results.of_evaluation
    monkeypatch.setattr(results, 'of_evaluation', lambda *a: lost.append(1) or record(*a))
    lost = []
    with pytest.raises(Lost):
        train(config, run, lost=lambda: bool(lost))
    assert read_metrics(run / 'metrics.jsonl')[-1]['kind'] == 'eval'
    train(config, run)
    assert outcome(run) == outcome(tmp_path / 'straight')
