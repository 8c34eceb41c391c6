"""Sinks: loggers such as TensorBoard that receive a run's metrics besides metrics.jsonl.

`train.sinks` lists keys of SINKS or import paths of classes, with options. A sink is created by
cls(directory, config, step), where `step` steps were done before this start, and has the methods

    write(step, values)   `values` is {'train/loss': array [X], ...} for X trials, NaN for diverged
                          trials. Steps never decrease, but a resumed run repeats the steps after
                          its checkpoint.
    close()               Called at the end of the run, even if the run fails.

A sink that raises an error is dropped, and the run continues.
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

# SessionLog.START in TensorBoard's event.proto.
_SESSION_START = 1

log = logging.getLogger(__name__)


def trial_names(config: Config) -> list[str]:
    """Names each trial of a run by the settings in which the trials differ.

    Trials that differ in the seed are called 'seed=0', 'seed=1', ... A single trial is called ''.
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
    """Writes TensorBoard event files, one series per trial."""

    package = 'tensorboardX'

    def __init__(self, directory: Path, config: Config, step: int):
        """Opens an event file for each trial, below tensorboard/ in the run directory.

        `step` is the number of steps done before this start.
        """
        package = load_extra(self.package, 'tensorboard')
        self._make_summary = package.summary.scalar
        self._make_event = package.event_file_writer.event_pb2.Event
        # EventsWriter instead of SummaryWriter, which loses queued events if the process is killed.
        events_writer = package.event_file_writer.EventsWriter
        self._writers = []
        for name in trial_names(config):
            path = join_without_links(directory, 'tensorboard')
            if name:  # empty for a single trial
                path = join_without_links(path, name)
            path.mkdir(parents=True, exist_ok=True)
            # The name of the file ends in the time in seconds and this suffix, so that two starts
            # within a second have different files.
            writer = events_writer(str(path / 'events'), f'.{step}')
            # This event makes TensorBoard drop later steps that an earlier start has written.
            session_start = self._make_event(step=step + 1, session_log={'status': _SESSION_START})
            writer.write_event(session_start)
            self._writers.append(writer)

    def write(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        now = time.time()
        for trial, writer in enumerate(self._writers):
            for name, value_X in values.items():
                summary = self._make_summary(name, float(value_X[trial]))
                event = self._make_event(wall_time=now, step=step, summary=summary)
                writer.write_event(event)
            writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class WandB:
    """Logs to Weights & Biases, also offline; a resumed run continues its log."""

    package = 'wandb'

    def __init__(self, directory: Path, config: Config, step: int, *, project: str = 'qkattn'):
        """Starts the log of a run in a W&B project, or continues it."""
        wandb = load_extra(self.package, 'wandb')
        # A resumed run finds its log by the ID in this file.
        id_file = join_without_links(directory, 'wandb', 'id')
        if not id_file.exists():
            write_atomic(id_file, uuid.uuid4().hex)
        # Values are logged by trial, such as 'train/loss/seed=1'.
        self._suffixes = [f'/{name}' if name else '' for name in trial_names(config)]
        self._run = wandb.init(
            project=project,
            name=directory.name,
            dir=str(directory),
            id=read_whole(id_file).decode(),
            resume='allow',  # continues the log with this ID, or starts a log
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


# The built-in sinks, by name.
SINKS: dict[str, type[TensorBoard] | type[WandB]] = {'tensorboard': TensorBoard, 'wandb': WandB}


def check_sinks(names: Sequence[str]) -> None:
    """Raises ConfigError if an entry of `train.sinks` is unknown, no sink, or lacks its package."""
    for name in names:
        _resolve(name)


class Sinks:
    """The open sinks of a run; a sink that fails is dropped."""

    def __init__(self, config: Config, directory: Path):
        """Prepares the sinks of `train.sinks`, which `open` opens.

        Raises:
            ConfigError: The directory is in a bucket, and 'tensorboard' or 'wandb' is a sink.
        """
        built_in_names = set()
        for entry in config.train.sinks:  # such as 'wandb(project="x")'
            name = _without_options(entry)
            if name in SINKS:  # 'tensorboard' or 'wandb'
                built_in_names.add(name)
        # The built-in sinks can only write to a file system.
        if built_in_names and buckets.is_url(directory):
            names = ', '.join(sorted(built_in_names))
            raise ConfigError(
                f'train.sinks: {names} cannot write to workdir={directory}; '
                'leave sinks out, or give a directory on a file system'
            )
        self._config = config
        self._directory = directory
        self._open_sinks: dict[str, Any] = {}  # by entry of `train.sinks`

    def open(self, step: int) -> None:
        """Opens the sinks of `train.sinks`; `step` is the number of steps done."""
        for entry in self._config.train.sinks:
            with self._drop_on_error(entry):
                cls, options = _resolve(entry)
                self._open_sinks[entry] = cls(self._directory, self._config, step, **options)

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes the numbers in a record of metrics.jsonl to every sink.

        For two trials, {'kind': 'train', 'loss': [3.1, 3.2], 'mfu': 0.4} becomes
        {'train/loss': [3.1, 3.2], 'train/mfu': [0.4, 0.4]}. Strings, trial settings, and single
        numbers other than the metrics in SPEEDS are ignored.
        """
        num_trials = len(self._config.trials.trials())
        values = {}
        for name, value in record.items():
            if name == 'trials':  # trial settings
                continue
            label = f'{record["kind"]}/{name}'  # such as 'train/loss'
            is_by_trial = np.ndim(value) == 1
            if name in SPEEDS:  # such as 'mfu': one number, the same for all trials
                values[label] = np.full(num_trials, value)
            elif is_by_trial and not any(isinstance(item, str) for item in value):
                values[label] = np.array(value, np.float64)

        open_sinks = list(self._open_sinks.items())  # a copy, because failed sinks are removed
        for entry, sink in open_sinks:
            with self._drop_on_error(entry):
                sink.write(record['step'], values)

    def close(self) -> None:
        open_sinks = list(self._open_sinks.items())  # a copy, because failed sinks are removed
        for entry, sink in open_sinks:
            with self._drop_on_error(entry):
                sink.close()

    @contextlib.contextmanager
    def _drop_on_error(self, entry: str) -> Iterator[None]:
        """Catches an error of the block, logs a warning, and drops the sink."""
        try:
            yield
        except Exception as error:
            self._open_sinks.pop(entry, None)
            error_name = type(error).__name__
            log.warning(
                'sink %s failed, and the run continues without it: %s: %s', entry, error_name, error
            )


def _without_options(entry: str) -> str:
    """Returns the name in an entry of `train.sinks`: 'wandb' for 'wandb(project="x")'."""
    name, _, _ = entry.partition('(')
    return name


def _resolve(entry: str) -> tuple[Any, dict[str, Any]]:
    """Returns the class and options of an entry of `train.sinks`.

    'wandb(project="x")' gives (WandB, {'project': 'x'}).
    """
    requirement = 'a class of (directory, config, step) with write and close'
    # An entry names a built-in sink in SINKS, or a class by its import path.
    cls, options = resolve(entry, SINKS, 'train.sinks', needs=requirement, is_valid=_is_sink)
    name = _without_options(entry)
    if name in SINKS:
        load_extra(cls.package, name)  # raises if the sink's package is missing
    return cls, options


def _is_sink(imported: Any) -> bool:
    """Whether an imported object can be called as a sink's class and has a sink's methods."""
    can_write = callable(getattr(imported, 'write', None))
    can_close = callable(getattr(imported, 'close', None))
    takes_arguments = accepts_arguments('directory', 'config', 'step')
    return takes_arguments(imported) and can_write and can_close
