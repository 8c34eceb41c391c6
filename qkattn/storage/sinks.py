"""Sinks: where the numbers of a run go besides metrics.jsonl.

`train.sinks` names them: keys of SINKS, or import paths of classes of (directory, config, steps
done), with options. `write(step, values)` takes the values of X trials [X] by name, as in
'train/loss': nats/token, NaN of a trial that diverged. Steps never decrease, but those after the
steps done come again. `close()` also follows a failure. An error ends the sink, not the run.
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
from qkattn.config.calls import resolve, takes
from qkattn.config.imports import load_extra
from qkattn.errors import ConfigError
from qkattn.metrics import SPEEDS
from qkattn.storage import buckets
from qkattn.storage.files import below, read_whole, write_atomic

# SessionLog.START of TensorBoard's event.proto.
_SESSION_START = 1

log = logging.getLogger(__name__)


def trial_names(config: Config) -> list[str]:
    """A name for each trial, of the settings in which they differ; '' for a single one.

    Two seeds with one learning rate are 'seed=0' and 'seed=1'.
    """
    trials = config.trials.trials()
    differing = []
    for name in trials[0]:
        if len({trial[name] for trial in trials}) > 1:
            differing.append(name)
    return [','.join(f'{name}={trial[name]}' for name in differing) for trial in trials]


class TensorBoard:
    """Event files in tensorboard/ of the run directory, one series per trial."""

    package = 'tensorboardX'

    def __init__(self, directory: Path, config: Config, step: int):
        package = load_extra(self.package, 'tensorboard')
        events = package.event_file_writer
        self._scalar = package.summary.scalar
        self._event = events.event_pb2.Event
        self._writers = []
        for name in trial_names(config):
            path = below(directory, 'tensorboard')
            if name:
                path = below(path, name)
            path.mkdir(parents=True, exist_ok=True)
            # The name of the file has the second of the start, in which two starts may fall: the
            # step tells them apart. An EventsWriter, as a SummaryWriter would lose its queue by a
            # kill.
            writer = events.EventsWriter(str(path / 'events'), f'.{step}')
            # A session that starts here makes readers drop later steps of earlier files.
            writer.write_event(self._event(step=step + 1, session_log={'status': _SESSION_START}))
            self._writers.append(writer)

    def write(self, step: int, values: Mapping[str, np.ndarray]) -> None:
        now = time.time()
        for x, writer in enumerate(self._writers):
            for name, value_X in values.items():
                summary = self._scalar(name, float(value_X[x]))
                writer.write_event(self._event(wall_time=now, step=step, summary=summary))
            writer.flush()

    def close(self) -> None:
        for writer in self._writers:
            writer.close()


class WandB:
    """A run of Weights & Biases, also offline; a resumed run continues the same one."""

    package = 'wandb'

    def __init__(self, directory: Path, config: Config, step: int, *, project: str = 'qkattn'):
        wandb = load_extra(self.package, 'wandb')
        file = below(directory, 'wandb', 'id')
        if not file.exists():
            write_atomic(file, uuid.uuid4().hex)
        # What the names of values end in, by trial: '/seed=1', or nothing for a single trial.
        self._suffixes = [f'/{name}' if name else '' for name in trial_names(config)]
        self._run = wandb.init(
            project=project,
            name=directory.name,
            dir=str(directory),
            id=read_whole(file).decode(),
            resume='allow',
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


SINKS: dict[str, type[TensorBoard] | type[WandB]] = {'tensorboard': TensorBoard, 'wandb': WandB}


def check_sinks(names: Sequence[str]) -> None:
    """Raises ConfigError for a sink that is unknown, is none, or lacks its package."""
    for name in names:
        _resolve(name)


class Sinks:
    """The open sinks of a run; one that fails is dropped. ConfigError for SINKS in a bucket."""

    def __init__(self, config: Config, directory: Path):
        names = {_name_of(sink) for sink in config.train.sinks}
        local_names = sorted(names & SINKS.keys())
        if buckets.is_url(directory) and local_names:
            raise ConfigError(
                f'train.sinks: {", ".join(local_names)} cannot write to workdir={directory}; leave '
                'sinks out, or give a directory on a file system'
            )
        self._config = config
        self._directory = directory
        self._open: dict[str, Any] = {}

    def open(self, step: int) -> None:
        """Opens `train.sinks` at `step`."""
        for name in self._config.train.sinks:
            with self._guarded(name):
                cls, options = _resolve(name)
                self._open[name] = cls(self._directory, self._config, step, **options)

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes the values [X] of a record of metrics.jsonl."""
        num_trials = len(self._config.trials.trials())
        values = {}
        for name, value in record.items():
            if name in SPEEDS:
                # Of the whole run: a sink gets it for each trial.
                values[f'{record["kind"]}/{name}'] = np.full(num_trials, value)
            if name == 'trials' or np.ndim(value) != 1:
                continue
            if not any(isinstance(entry, str) for entry in value):
                values[f'{record["kind"]}/{name}'] = np.array(value, np.float64)
        for name, sink in list(self._open.items()):
            with self._guarded(name):
                sink.write(record['step'], values)

    def close(self) -> None:
        for name, sink in list(self._open.items()):
            with self._guarded(name):
                sink.close()

    @contextlib.contextmanager
    def _guarded(self, name: str) -> Iterator[None]:
        """A block that calls a sink; an error is logged, and the sink is called no more."""
        try:
            yield
        except Exception as error:
            self._open.pop(name, None)
            kind = type(error).__name__
            log.warning(
                'sink %s failed, and the run continues without it: %s: %s', name, kind, error
            )


def _name_of(sink: str) -> str:
    """The name of an entry of `train.sinks` without options: wandb of wandb(project="x")."""
    return sink.partition('(')[0]


def _resolve(sink: str) -> tuple[Any, dict[str, Any]]:
    """The class that an entry of `train.sinks` names, and its options; as `check_sinks`."""
    needs = 'a class of (directory, config, step) with write and close'
    cls, options = resolve(sink, SINKS, 'train.sinks', needs=needs, fits=_is_sink)
    name = _name_of(sink)
    if name in SINKS:
        load_extra(cls.package, name)
    return cls, options


def _is_sink(value: Any) -> bool:
    """Whether something imported can be called and used as a sink."""
    has_methods = all(callable(getattr(value, name, None)) for name in ('write', 'close'))
    return takes('directory', 'config', 'step')(value) and has_methods
