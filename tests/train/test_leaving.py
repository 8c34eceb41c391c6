"""A stop request before the first step of a start: nothing is saved, so nothing is waited for."""

import json
import signal

import pytest

from qkattn.errors import Stopped
from qkattn.run import leases
from qkattn.run.signals import EXIT_REQUEUE
from qkattn.train import program, train
from tests.experiments.conftest import RUN, STUDY
from tests.processes import start_python

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
        ('train', 'preparing data', signal.SIGINT),
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


def test_a_request_to_a_library_ends_before_the_first_step(tiny, tmp_path, monkeypatch):
    """A notebook outlives it."""
    build = program.build

    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGTERM)
        return build(*arguments, **options)

    monkeypatch.setattr(program, 'build', interrupted)
    with pytest.raises(Stopped, match='stopped with nothing to save'):
        train(tiny(model={'num_layers': 1, 'd_model': 16}), tmp_path / 'run')
    assert (tmp_path / 'run/metrics.jsonl').read_bytes() == b''
    assert not list((tmp_path / 'run/checkpoints').iterdir())
