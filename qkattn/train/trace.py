"""A trace of chosen training steps, by jax.profiler."""

import logging
import re
import tempfile
from pathlib import Path
from typing import Any

import jax

from qkattn.config import Config
from qkattn.errors import ConfigError
from qkattn.jobs import agreement
from qkattn.jobs.display import Progress
from qkattn.storage import buckets

SKIPPED, TRACED = 2, 3
"""Dispatches before the trace, and of it, where no steps are named."""

log = logging.getLogger(__name__)


class Trace:
    """Traces the dispatches of the chosen steps, in process 0; none without a directory."""

    def __init__(self, directory: str | None = None, steps: str | None = None):
        """Takes --profile, and --profile_steps: 'FIRST:LAST', counted from 1, both included.

        Raises:
          ConfigError: steps without a directory or of another form, or a directory in a bucket.
        """
        self._flag, self._steps = f'--profile_steps={steps}', None
        if steps is not None:
            if directory is None:
                raise ConfigError(f'{self._flag} needs --profile=DIRECTORY')
            parts = re.fullmatch(r'(\d+):(\d+)', steps)
            if not parts or not 1 <= int(parts[1]) <= int(parts[2]):
                raise ConfigError(f'{self._flag} must be FIRST:LAST with 1 <= FIRST <= LAST')
            self._steps = int(parts[1]), int(parts[2])
        if buckets.is_url(directory or ''):
            raise ConfigError(f'--profile={directory} must be a directory on a file system')
        self._directory = None if directory is None else Path(directory)
        self._from = self._to = -1
        self._first: int | None = None
        self._progress: Progress | None = None

    def check(self, config: Config, *, resumed: bool, finished: bool) -> None:
        """Raises ConfigError where the run cannot be traced, before anything compiles.

        A run that resumes may have a trace of an earlier start in the directory.
        """
        if (directory := self._directory) is None:
            return
        if finished:
            raise ConfigError(f'--profile={directory}: the run is finished; give another workdir')
        if self._steps and self._steps[1] > config.train.num_steps:
            raise ConfigError(f'{self._flag} must lie in 1:{config.train.num_steps}')
        try:
            directory.mkdir(parents=True, exist_ok=True)
            if not resumed and any(directory.iterdir()):
                raise ConfigError(f'--profile={directory} holds files; give an empty directory')
            with tempfile.TemporaryFile(dir=directory):
                pass
        except OSError as error:
            raise ConfigError(f'--profile={directory} cannot be used ({error.strerror})') from error

    def begin(self, config: Config, step: int, progress: Progress) -> None:
        """Takes the steps done so far; raises ConfigError if the chosen ones are among them."""
        each, num_steps = config.train.steps_per_dispatch, config.train.num_steps
        if self._directory is None or not agreement.owner():
            return
        self._progress = progress
        if self._steps is None:
            self._from = max(step, min(step + SKIPPED * each, num_steps - each))
            self._to = self._from + TRACED * each
        elif self._steps[0] <= step:
            raise ConfigError(f'{self._flag} must lie in {step + 1}:{num_steps}, the steps left')
        else:
            self._from, self._to = (self._steps[0] - 1) // each * each, self._steps[1]

    def at(self, step: int, state: Any) -> None:
        """Starts or ends the trace between two dispatches, after `step` steps."""
        if self._first is None and self._from <= step < self._to:
            jax.block_until_ready(state)
            jax.profiler.start_trace(self._directory, create_perfetto_trace=True)
            self._first = step + 1
        elif self._first is not None and step >= self._to:
            jax.block_until_ready(state)
            self.close()

    def close(self) -> None:
        """Writes the trace, if one has begun."""
        if self._first is None:
            return
        first, self._first, self._to = self._first, None, -1
        with self._progress.phase('writing the trace'):
            jax.profiler.stop_trace()
        file = max(self._directory.rglob('perfetto_trace.json.gz'), key=lambda p: p.stat().st_mtime)
        log.info('trace from step %s on: open %s at https://ui.perfetto.dev', f'{first:,}', file)
        log.info('  or `pip install xprof` and run `xprof --logdir=%s`', self._directory)
