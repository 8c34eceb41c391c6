"""Sinks: what they are given, what is refused, and what becomes of one that fails."""

import dataclasses
import json
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from qkattn.config import Config, TrainConfig, TrialsConfig, fingerprint
from qkattn.errors import ConfigError
from qkattn.storage.files import as_path
from qkattn.storage.sinks import Sinks, check_sinks, trial_names

# Four trials: two seeds with two learning rates each.
CONFIG = Config(trials=TrialsConfig(seeds=(0, 1), learning_rates=(1e-3, 2e-3)))
LAST_TRIAL = 'seed=1,learning_rate=0.002'
WRITING_SINK = 'tests.storage.test_sinks:WritingSink'


def open_sinks(directory: Path, *sinks: str, config: Config = CONFIG, step: int = 0) -> Sinks:
    """Opens the sinks of a run that starts at `step`."""
    config = dataclasses.replace(config, train=TrainConfig(sinks=sinks))
    opened = Sinks(config, directory)
    # A record that comes before the sinks are open is dropped.
    opened.write({'kind': 'train', 'step': step, 'loss': np.ones(4)})
    opened.open(step)
    return opened


def read_events(path: Path) -> Iterator[Any]:
    """Yields the events in a TensorBoard file. The test is skipped without tensorboardX."""
    tensorboardx = pytest.importorskip('tensorboardX')
    content = path.read_bytes()
    offset = 0
    while offset < len(content):
        # A record is the length (8 bytes), a checksum (4), the event, and a checksum (4).
        (length,) = struct.unpack_from('Q', content, offset)
        start = offset + 8 + 4
        end = start + length
        event = content[start:end]
        yield tensorboardx.proto.event_pb2.Event.FromString(event)
        offset = end + 4


def tensorboard_values(directory: Path) -> dict[str, dict[int, float]]:
    """Reads the event files of a trial like TensorBoard.

    Each start of a run writes an event file. A resumed run may repeat steps of an earlier file.

    Returns:
        {name: {step: value}}, such as {'train/loss': {1: 4.1, 2: 4.0}}.
    """
    series: dict[str, dict[int, float]] = {}
    # From the oldest to the newest.
    paths = sorted(directory.glob('events.*'), key=lambda path: path.stat().st_mtime_ns)
    for path in paths:
        for event in read_events(path):
            # Each start writes this event with its first step, and replaces later values.
            if event.HasField('session_log'):
                for values in series.values():
                    for step in list(values):
                        if step >= event.step:
                            del values[step]
            for value in event.summary.value:
                values = series.setdefault(value.tag, {})
                # Apart from that, each step has one value.
                assert event.step not in values
                values[event.step] = value.simple_value
    return series


class WritingSink:
    """A sink that writes what it is given as JSON lines to the file `written`."""

    def __init__(self, directory, config, step, *, fails_at=None):
        self.file = (directory / 'written').open('a')
        self.fails_at = fails_at

    def write(self, step, values):
        if step == self.fails_at:
            raise OSError('no room')
        lists = {name: list(value_X) for name, value_X in values.items()}
        self.file.write(json.dumps([step, lists]) + '\n')

    def close(self):
        self.file.write('"closed"\n')
        self.file.close()


def read_written(directory: Path) -> list[Any]:
    """The lines that a `WritingSink` has written."""
    lines = (directory / 'written').read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.parametrize('sinks', [(WRITING_SINK,), ('tensorboard',), ('wandb(project="x")',)])
def test_sinks_do_not_change_the_fingerprint(sinks):
    config = dataclasses.replace(CONFIG, train=TrainConfig(sinks=sinks))
    without_sinks = dataclasses.replace(CONFIG, train=TrainConfig())
    assert fingerprint(config) == fingerprint(without_sinks)


def test_a_sink_gets_the_values_of_the_trials_until_it_is_closed(tmp_path):
    """A sink, such as TensorBoard, receives the records of a run.

    The run has four trials. The sink of this test writes [step, {KIND/NAME: values}] to a file.
    """
    sinks = open_sinks(tmp_path, WRITING_SINK)

    sinks.write({'kind': 'train', 'step': 2, 'loss': np.arange(4.0)})
    # The second trial has no loss, because it has diverged.
    final_record = {
        'kind': 'final',
        'step': 2,
        'val_loss': [1.5, None, 2.5, 3.5],
        'val_bleu_signature': [None, 'nrefs:1', 'nrefs:1', 'nrefs:1'],
        'trials': CONFIG.trials.trials(),
        'eval_tokens': 7,
        'none': None,
    }
    sinks.write(final_record)
    sinks.close()

    train_line, final_line, last_line = read_written(tmp_path)
    assert train_line == [2, {'train/loss': [0, 1, 2, 3]}]
    # Sinks get only the lists of numbers. NaN stands for the trial that has diverged.
    nan = pytest.approx(np.nan, nan_ok=True)
    assert final_line == [2, {'final/val_loss': [1.5, nan, 2.5, 3.5]}]
    assert last_line == 'closed'


def test_a_sink_gets_a_speed_of_the_run_for_each_trial(tmp_path):
    """The four trials of the run are trained together, so they have one speed."""
    sinks = open_sinks(tmp_path, WRITING_SINK)

    sinks.write({'kind': 'train', 'step': 2, 'tokens_per_second': 3.5, 'mfu': 0.25})
    sinks.close()

    # The sink has written [step, values], and a last line when it was closed.
    first_line, _ = read_written(tmp_path)
    step, values = first_line
    assert step == 2
    assert values == {
        'train/tokens_per_second': [3.5, 3.5, 3.5, 3.5],
        'train/mfu': [0.25, 0.25, 0.25, 0.25],
    }


def test_a_sink_that_fails_is_dropped(tmp_path, caplog):
    """A sink, such as TensorBoard, receives the records of a run.

    The first of two sinks fails at step 1. This sink is then neither called nor closed.
    """
    sinks = open_sinks(tmp_path, f'{WRITING_SINK}(fails_at=1)', 'tensorboard')

    # The loss of the run's four trials equals the step.
    for step in (1, 2):
        sinks.write({'kind': 'train', 'step': step, 'loss': np.full(4, step)})
    sinks.close()

    # A write at step 2 and a close would each have added a line.
    assert not read_written(tmp_path)
    warning = 'failed, and the run continues without it: OSError: no room'
    assert caplog.text.count(warning) == 1

    # The other sink continues.
    values = tensorboard_values(tmp_path / 'tensorboard' / LAST_TRIAL)
    assert values == {'train/loss': {1: 1.0, 2: 2.0}}


def test_a_single_trial_has_no_name():
    assert trial_names(Config()) == ['']


def test_a_resumed_run_repeats_no_event(tmp_path):
    """A run is killed at step 6, and resumes after step 4. TensorBoard shows each step once."""

    def write_losses(first_step, last_step, offset):
        """Starts the run at `first_step`. The loss at each step is `offset` + step."""
        sinks = open_sinks(tmp_path, 'tensorboard', config=Config(), step=first_step - 1)
        for step in range(first_step, last_step + 1):
            sinks.write({'kind': 'train', 'step': step, 'loss': [offset + step]})

    write_losses(first_step=1, last_step=6, offset=0)
    # The run is killed, so its sinks are not closed.
    write_losses(first_step=5, last_step=8, offset=100)

    # From step 5 on, the losses are from the second start.
    values = tensorboard_values(tmp_path / 'tensorboard')['train/loss']
    assert values == {1: 1, 2: 2, 3: 3, 4: 4, 5: 105, 6: 106, 7: 107, 8: 108}


NOT_A_SINK = 'is not a class of .directory, config, step. with write'


@pytest.mark.parametrize(
    ('name', 'message'),
    [
        ('tensorbord', "unknown train.sinks 'tensorbord', did you mean 'tensorboard'"),
        ('tensorboard(port=1)', "tensorboard has no option 'port'"),
        ('no_such_module:Sink', "no module named 'no_such_module'"),
        ('types:SimpleNamespace', NOT_A_SINK),
        ('tests.storage.test_sinks:tensorboard_values', NOT_A_SINK),
    ],
)
def test_a_sink_that_cannot_be_opened_is_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        check_sinks([name])


@pytest.mark.parametrize(
    ('name', 'package'), [('tensorboard', 'tensorboardX'), ('wandb(project="x")', 'wandb')]
)
def test_a_sink_whose_package_is_missing_is_refused(name, package, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)  # an import of the package fails
    with pytest.raises(ConfigError, match=f'needs the package {package}: pip install'):
        check_sinks([name])


def test_a_sink_with_options_is_refused_in_a_bucket_too(bucket):
    config = Config(train=TrainConfig(sinks=('tensorboard()', 'wandb(project="x")')))
    with pytest.raises(ConfigError, match='^train.sinks: tensorboard, wandb cannot write to'):
        Sinks(config, as_path('gs://runs/x'))


def test_wandb_continues_the_run_of_its_directory_offline(tmp_path, monkeypatch):
    """Weights & Biases (wandb) logs a run under an ID, which is stored in the run's directory.

    The run starts at step 0, and resumes at step 2. Each start has two steps.
    """
    wandb = pytest.importorskip('wandb', reason='wandb is not installed')
    monkeypatch.setenv('WANDB_MODE', 'offline')
    monkeypatch.setenv('WANDB_SILENT', 'true')

    run_ids = []
    for start in (0, 2):
        sinks = open_sinks(tmp_path, 'wandb(project="x")', step=start)
        run_ids.append(wandb.run.id)
        assert wandb.run.project == 'x'
        # The default config has d_model = 128.
        assert wandb.run.config['model']['d_model'] == 128

        # The loss of the run's four trials equals the step.
        for step in (start + 1, start + 2):
            sinks.write({'kind': 'train', 'step': step, 'loss': np.full(4, step)})
        # wandb logs a step when the next one begins, so the second step is not logged yet.
        assert wandb.run.summary[f'train/loss/{LAST_TRIAL}'] == start + 1
        sinks.close()

    # Both starts use the stored ID. Offline, wandb writes a file for each start.
    stored_id = (tmp_path / 'wandb/id').read_text()
    assert run_ids == [stored_id, stored_id]
    files = list(tmp_path.glob('wandb/offline-run-*/*.wandb'))
    assert len(files) == 2
