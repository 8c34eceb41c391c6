"""Which steps are traced, and what is refused; the profiler itself is called once."""

import contextlib
import types

import pytest

from qkattn.errors import ConfigError, Lost
from qkattn.train import trace
from qkattn.train.loop import train
from qkattn.train.trace import Trace


@pytest.mark.parametrize(
    ('directory', 'steps', 'since', 'expected'),
    [
        ('out', None, 0, [('start', 4), ('stop', 10)]),
        ('out', None, 12, [('start', 16), ('stop', 18)]),
        ('out', None, 18, [('start', 18), ('stop', 18)]),
        ('out', '1:1', 0, [('start', 0), ('stop', 2)]),
        ('out', '6:9', 0, [('start', 4), ('stop', 10)]),
        ('out', '19:20', 6, [('start', 18), ('stop', 18)]),
        (None, None, 0, []),
    ],
)
def test_the_dispatches_of_the_steps_are_traced(
    tiny, monkeypatch, directory, steps, since, expected
):
    config, calls, done = tiny(train={'num_steps': 20, 'steps_per_dispatch': 2}), [], since
    profiler = types.SimpleNamespace(
        start_trace=lambda *_, **__: calls.append(('start', done)),
        stop_trace=lambda: calls.append(('stop', done)),
    )
    monkeypatch.setattr(trace.jax, 'profiler', profiler)
    monkeypatch.setattr(trace.Path, 'rglob', lambda *_: [trace.Path(__file__)])
    progress = types.SimpleNamespace(phase=lambda _: contextlib.nullcontext())
    with contextlib.closing(Trace(directory, steps)) as tracing:
        tracing.begin(config, since, progress)
        for done in range(since, 20, 2):
            tracing.at(done, None)
    assert calls == expected


@pytest.mark.parametrize('steps', ['5', '0:3', '5:3', '1:2:3', '', 'a:b', '-1:3'])
def test_malformed_steps_are_refused(steps):
    with pytest.raises(ConfigError, match=f'--profile_steps={steps} must be FIRST:LAST'):
        Trace('out', steps)


def test_what_cannot_be_traced_is_refused(tiny, tmp_path):
    def check(*arguments, resumed=False, finished=False):
        Trace(*arguments).check(tiny(), resumed=resumed, finished=finished)

    with pytest.raises(ConfigError, match='--profile_steps=1:2 needs --profile'):
        check(None, '1:2')
    with pytest.raises(ConfigError, match='--profile_steps=1:13 must lie in 1:12'):
        check(str(tmp_path), '1:13')
    with pytest.raises(ConfigError, match='gs://b/x must be a directory on a file system'):
        check('gs://b/x')
    (tmp_path / 'file').touch()
    with pytest.raises(ConfigError, match='holds files; give an empty directory'):
        check(str(tmp_path))
    with pytest.raises(ConfigError, match=r'file cannot be used \(File exists\)'):
        check(str(tmp_path / 'file'))
    with pytest.raises(ConfigError, match='the run is finished'):
        check(str(tmp_path / 'new'), finished=True)
    check(str(tmp_path), resumed=True)
    check(str(tmp_path / 'new'))
    with pytest.raises(ConfigError, match='--profile_steps=3:5 must lie in 4:12, the steps left'):
        Trace('out', '3:5').begin(tiny(), 3, None)


@pytest.mark.slow
def test_a_run_is_traced_also_once_it_resumes(tiny, tmp_path, caplog):
    config = tiny(model={'num_layers': 1, 'd_model': 16}, trials={'seeds': (0,)})
    caplog.set_level('INFO', 'qkattn')
    lost = iter(range(12))
    with pytest.raises(Lost):
        train(
            config, tmp_path / 'run', trace=Trace(f'{tmp_path}/trace'), lost=lambda: next(lost) == 7
        )
    train(config, tmp_path / 'run', trace=Trace(f'{tmp_path}/trace', '9:9'))
    messages = [record.message for record in caplog.records if 'trace from' in record.message]
    assert ['step 3 on' in messages[0], 'step 9 on' in messages[1]] == [True, True]
    assert len(list((tmp_path / 'trace').rglob('*.xplane.pb'))) == 2
