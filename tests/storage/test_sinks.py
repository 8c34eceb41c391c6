"""Sinks: what they are given, what is refused, and what becomes of one that fails."""

import dataclasses
import json
import struct
import sys
from pathlib import Path

import numpy as np
import pytest

from qkattn.config import Config, TrainConfig, TrialsConfig, fingerprint
from qkattn.errors import ConfigError
from qkattn.storage.files import as_path
from qkattn.storage.sinks import Sinks, check_sinks, trial_names

CONFIG = Config(trials=TrialsConfig(seeds=(0, 1), learning_rates=(1e-3, 2e-3)))
WRITING_SINK = 'tests.storage.test_sinks:WritingSink'
NO_SINK = 'is not a class of .directory, config, step. with write'


def open_sinks(directory: Path, *names: str, config: Config = CONFIG, step: int = 0) -> Sinks:
    """The opened sinks of a run that starts at a step; a record written before is not kept."""
    config = dataclasses.replace(config, train=TrainConfig(sinks=names))
    assert fingerprint(config) == fingerprint(dataclasses.replace(config, train=TrainConfig()))
    sinks = Sinks(config, directory)
    sinks.write({'kind': 'train', 'step': step, 'loss': np.ones(4)})  # not open yet
    sinks.open(step)
    return sinks


def tensorboard_values(directory: Path) -> dict[str, dict[int, float]]:
    """{name: {step: value}} of the event files of a trial, as TensorBoard reads them."""
    tensorboardx = pytest.importorskip('tensorboardX')
    series: dict[str, dict[int, float]] = {}
    for path in sorted(directory.glob('events.*'), key=lambda path: path.stat().st_mtime_ns):
        content = path.read_bytes()
        offset = 0
        while offset < len(content):
            (length,) = struct.unpack_from('Q', content, offset)
            record = content[offset + 12 : offset + 12 + length]
            event = tensorboardx.proto.event_pb2.Event.FromString(record)
            offset += 16 + length
            if event.HasField('session_log'):
                for name, values in series.items():
                    series[name] = {s: v for s, v in values.items() if s < event.step}
            for value in event.summary.value:
                assert event.step not in series.setdefault(value.tag, {})
                series[value.tag][event.step] = value.simple_value
    return series


class WritingSink:
    """A sink that writes what it is given as JSON lines to the file `written`."""

    def __init__(self, directory, config, step, *, fails_at=None):
        self.file = (directory / 'written').open('a')
        self.fails_at = fails_at

    def write(self, step, values):
        if step == self.fails_at:
            raise OSError('no room')
        lists = {name: list(v_X) for name, v_X in values.items()}
        self.file.write(json.dumps([step, lists]) + '\n')

    def close(self):
        self.file.write('"closed"\n')
        self.file.close()


def test_a_sink_gets_the_values_of_the_trials_until_it_is_closed(tmp_path):
    sinks = open_sinks(tmp_path, WRITING_SINK)
    sinks.write({'kind': 'train', 'step': 2, 'loss': np.arange(4.0)})
    final = {'val_loss': [1.5, None, 2.5, 3.5], 'trials': CONFIG.trials.trials(), 'eval_tokens': 7}
    final['val_bleu_signature'] = [None, *['nrefs:1'] * 3]  # no number, and the first has diverged
    sinks.write({'kind': 'final', 'step': 2, **final, 'none': None})
    sinks.close()
    written = [json.loads(line) for line in (tmp_path / 'written').read_text().splitlines()]
    losses = {'final/val_loss': [1.5, pytest.approx(np.nan, nan_ok=True), 2.5, 3.5]}
    assert written == [[2, {'train/loss': [0, 1, 2, 3]}], [2, losses], 'closed']


def test_a_sink_gets_a_speed_of_the_run_for_each_trial(tmp_path):
    sinks = open_sinks(tmp_path, WRITING_SINK)
    sinks.write({'kind': 'train', 'step': 2, 'tokens_per_second': 3.5, 'mfu': 0.25})
    sinks.close()
    written = json.loads((tmp_path / 'written').read_text().splitlines()[0])
    assert written == [2, {'train/tokens_per_second': [3.5] * 4, 'train/mfu': [0.25] * 4}]


def test_a_sink_that_fails_is_dropped(tmp_path, caplog):
    sinks = open_sinks(tmp_path, f'{WRITING_SINK}(fails_at=1)', 'tensorboard')
    for step in (1, 2):
        sinks.write({'kind': 'train', 'step': step, 'loss': np.full(4, step)})
    sinks.close()
    assert not (tmp_path / 'written').read_text()
    assert caplog.text.count('failed, and the run continues without it: OSError: no room') == 1
    trial = tmp_path / 'tensorboard' / 'seed=1,learning_rate=0.002'
    assert tensorboard_values(trial) == {'train/loss': {1: 1.0, 2: 2.0}}
    assert trial_names(Config()) == ['']


def test_a_resumed_run_repeats_no_event(tmp_path):
    for start, end in ((0, 6), (4, 8)):  # the first start is killed
        sinks = open_sinks(tmp_path, 'tensorboard', config=Config(), step=start)
        for step in range(start + 1, end + 1):
            sinks.write({'kind': 'train', 'step': step, 'loss': [start + step / 10]})
    values = tensorboard_values(tmp_path / 'tensorboard')['train/loss']
    assert list(values) == [1, 2, 3, 4, 5, 6, 7, 8]
    np.testing.assert_allclose([values[4], values[5]], [0.4, 4.5], rtol=1e-6)


@pytest.mark.parametrize(
    ('name', 'sentence'),
    [
        ('tensorbord', "unknown train.sinks 'tensorbord', did you mean 'tensorboard'"),
        ('tensorboard(port=1)', "tensorboard has no option 'port'"),
        ('no_such_module:Sink', "no module named 'no_such_module'"),
        ('types:SimpleNamespace', NO_SINK),
        ('tests.storage.test_sinks:tensorboard_values', NO_SINK),
        ('tensorboard', 'needs the package tensorboardX: pip install'),
        ('wandb(project="x")', 'needs the package wandb: pip install'),
    ],
)
def test_a_sink_that_cannot_be_opened_is_refused(name, sentence, monkeypatch):
    for package in ('tensorboardX', 'wandb') if 'needs the package' in sentence else ():
        monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError, match=sentence):
        check_sinks([name])


def test_a_sink_with_options_is_refused_in_a_bucket_too(bucket):
    config = Config(train=TrainConfig(sinks=('tensorboard()', 'wandb(project="x")')))
    with pytest.raises(ConfigError, match='^train.sinks: tensorboard, wandb cannot write to'):
        Sinks(config, as_path('gs://runs/x'))


def test_wandb_continues_the_run_of_its_directory_offline(tmp_path, monkeypatch):
    wandb = pytest.importorskip('wandb', reason='wandb is not installed')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')
    ids = []
    for start in (0, 2):
        sinks = open_sinks(tmp_path, 'wandb(project="x")', step=start)
        ids.append((wandb.run.id, wandb.run.project, wandb.run.config['model']['d_model']))
        for step in (start + 1, start + 2):  # a step is logged when the next one begins
            sinks.write({'kind': 'train', 'step': step, 'loss': np.full(4, step)})
        summary = wandb.run.summary
        assert summary['train/loss/seed=1,learning_rate=0.002'] == start + 1
        sinks.close()
    assert ids[0] == ids[1] == ((tmp_path / 'wandb/id').read_text(), 'x', 128)
    assert len(list(tmp_path.glob('wandb/offline-run-*/*.wandb'))) == 2
