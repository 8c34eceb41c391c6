"""Sinks: where the numbers of a run go besides metrics.jsonl.

`train.sinks` lists sinks: keys of SINKS, or import paths of classes, with options. A sink is built
as cls(directory, config, steps done) and has two methods.

    write(step, values)   values are {'train/loss': array [X] of nats/token, ...} with an entry per
                          trial, NaN for a trial that diverged. Steps never decrease within a start.
                          A run that resumes writes the steps after its steps done again.
    close()               is also called when the run fails.

If a sink raises an error, the run continues without it.
"""

import contextlib
import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from qkattn.config import Config, to_json
from qkattn.config.calls import accepts_arguments, resolve
from qkattn.config.imports import load_extra
from qkattn.errors import ConfigError
from qkattn.metrics import SPEEDS
from qkattn.storage import buckets
from qkattn.storage.files import join_without_links, read_whole, write_atomic

# SessionLog.START of TensorBoard's event.proto.
_SESSION_START = 1

log = logging.getLogger(__name__)


def trial_names(config: Config) -> list[str]:
    """Returns a name for each trial of a run, made of the settings in which the trials differ.

    A trial is one seed and one setting of the hyperparameters. Two seeds with one learning rate are
    called 'seed=0' and 'seed=1'. The name is '' if the run has a single trial.
    """
    trials = config.trials.trials()
    differing_settings = []
    for setting in trials[0]:
        distinct_values = {trial[setting] for trial in trials}
        if len(distinct_values) > 1:
            differing_settings.append(setting)

    names = []
    for trial in trials:
        parts = [f'{setting}={trial[setting]}' for setting in differing_settings]
        names.append(','.join(parts))
    return names


class TensorBoard:
    """Writes event files into tensorboard/ of the run directory, one series per trial."""

    package = 'tensorboardX'

    def __init__(self, directory: Path, config: Config, step: int):
        """Opens an event file for each trial, below tensorboard/ in the run directory.

        `step` is the number of steps that the run has done before this start.
        """
        package = load_extra(self.package, 'tensorboard')
        self._scalar = package.summary.scalar  # makes the summary of a number
        self._event = package.event_file_writer.event_pb2.Event
        # tensorboardX has SummaryWriter, too. It keeps events in a queue, and loses them if the
        # process is killed.
        events_writer = package.event_file_writer.EventsWriter
        self._writers = []
        for name in trial_names(config):
            path = join_without_links(directory, 'tensorboard')
            if name:  # '' is the name of the only trial of a run
                path = join_without_links(path, name)
            path.mkdir(parents=True, exist_ok=True)
            # The library adds the time in seconds to the name of the file. The suffix makes the
            # names of two starts in the same second differ.
            writer = events_writer(str(path / 'events'), f'.{step}')
            # An earlier start may have written later steps, which this one writes again. This event
            # tells TensorBoard to drop them.
            session_start = self._event(step=step + 1, session_log={'status': _SESSION_START})
            writer.write_event(session_start)
            self._writers.append(writer)

    def write(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        now = time.time()
        for trial, writer in enumerate(self._writers):
            for name, value_X in values.items():
                summary = self._scalar(name, float(value_X[trial]))
                event = self._event(wall_time=now, step=step, summary=summary)
                writer.write_event(event)
            writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class WandB:
    """Logs to a run of Weights & Biases, also offline; a run that resumes continues its log."""

    package = 'wandb'

    def __init__(self, directory: Path, config: Config, step: int, *, project: str = 'qkattn'):
        """Starts or continues the log of a run in a project of Weights & Biases."""
        wandb = load_extra(self.package, 'wandb')
        # A run that resumes finds its log by the id in this file.
        id_file = join_without_links(directory, 'wandb', 'id')
        if not id_file.exists():
            write_atomic(id_file, uuid.uuid4().hex)
        # The name of a value ends in the name of its trial, as in 'train/loss/seed=1'.
        self._suffixes = [f'/{name}' if name else '' for name in trial_names(config)]
        self._run = wandb.init(
            project=project,
            name=directory.name,
            dir=str(directory),
            id=read_whole(id_file).decode(),
            resume='allow',  # continues the log with this id, or starts one
            config=to_json(config),
            settings=wandb.Settings(console='off'),
        )

    def write(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        logged = {}
        for name, value_X in values.items():
            for suffix, value in zip(self._suffixes, value_X, strict=True):
                logged[name + suffix] = float(value)
        self._run.log(logged, step=step)

    def close(self) -> None:
        self._run.finish()


# The sinks of the package, by name.
SINKS: dict[str, type[TensorBoard] | type[WandB]] = {'tensorboard': TensorBoard, 'wandb': WandB}


def check_sinks(names: Sequence[str]) -> None:
    """Raises ConfigError for a name that is unknown, is not a sink, or whose package is missing."""
    for name in names:
        _resolve(name)


class Sinks:
    """The open sinks of a run; a sink that fails is dropped."""

    def __init__(self, config: Config, directory: Path):
        """Checks that the sinks of `train.sinks` can write to the run directory; `open` opens them.

        Raises ConfigError for 'tensorboard' or 'wandb' if the directory is in a bucket. These
        packages only write to a file system.
        """
        names = {_name_of(sink) for sink in config.train.sinks}
        local_names = sorted(names & SINKS.keys())
        if buckets.is_url(directory) and local_names:
            raise ConfigError(
                f'train.sinks: {", ".join(local_names)} cannot write to workdir={directory}; leave '
                'sinks out, or give a directory on a file system'
            )
        self._config = config
        self._directory = directory
        self._open: dict[str, Any] = {}  # by entry of `train.sinks`

    def open(self, step: int) -> None:
        """Opens the sinks of `train.sinks`; `step` steps are done."""
        for name in self._config.train.sinks:
            with self._guarded(name):
                cls, options = _resolve(name)
                self._open[name] = cls(self._directory, self._config, step, **options)

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes the numbers of a record of metrics.jsonl to every sink, an array [X] for X trials.

        For two trials, {'kind': 'train', 'loss': [3.1, 3.2], 'mfu': 0.4} becomes
        {'train/loss': [3.1, 3.2], 'train/mfu': [0.4, 0.4]}. Fields of other forms are left out:
        texts, the settings of the trials, and single numbers that are no speeds.
        """
        num_trials = len(self._config.trials.trials())
        values = {}
        for name, value in record.items():
            if name == 'trials':  # the settings of the trials
                continue
            label = f'{record["kind"]}/{name}'  # such as 'train/loss'
            is_list = np.ndim(value) == 1
            if name in SPEEDS:
                values[label] = np.full(num_trials, value)
            elif is_list and not any(isinstance(entry, str) for entry in value):
                values[label] = np.array(value, np.float64)

        # A copy, because a sink that fails is removed in the loop.
        for name, sink in list(self._open.items()):
            with self._guarded(name):
                sink.write(record['step'], values)

    def close(self) -> None:
        for name, sink in list(self._open.items()):
            with self._guarded(name):
                sink.close()

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """A block that calls a sink. If the sink fails, logs the error and drops the sink."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            error_name = type(error).__name__
            log.warning(
                'sink %s failed, and the run continues without it: %s: %s', name, error_name, error
            )


def _name_of(sink: str) -> str:
    """Returns an entry of `train.sinks` without its options: 'wandb' for 'wandb(project="x")'."""
    return sink.partition('(')[0]


def _resolve(sink: str) -> tuple[Any, dict[str, Any]]:
    """Returns the class and the options of an entry of `train.sinks`.

    'wandb(project="x")' -> (WandB, {'project': 'x'}). Raises ConfigError as `check_sinks` does.
    """
    description_of_sink = 'a class of (directory, config, step) with write and close'
    cls, options = resolve(sink, SINKS, 'train.sinks', needs=description_of_sink, is_valid=_is_sink)
    name = _name_of(sink)
    if name in SINKS:
        load_extra(cls.package, name)  # raises if the package of the sink is missing
    return cls, options


def _is_sink(value: Any) -> bool:
    """Whether an imported object takes (directory, config, step) and has the methods of a sink."""
    can_write = callable(getattr(value, 'write', None))
    can_close = callable(getattr(value, 'close', None))
    takes_arguments = accepts_arguments('directory', 'config', 'step')
    return takes_arguments(value) and can_write and can_close
