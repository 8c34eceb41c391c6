"""What a start of a run begins with: its compiled programs, its state and its time so far."""

import dataclasses
import logging
from pathlib import Path
from typing import Any

from qkattn.config import Config
from qkattn.data.tasks.rows import Rows
from qkattn.errors import CheckpointError
from qkattn.run.file_schemas import PROVENANCE, START
from qkattn.run.records import read_json, write_json
from qkattn.train import exported
from qkattn.train import program as programs
from qkattn.train.checkpoint import Checkpoints
from qkattn.train.program import Program

log = logging.getLogger(__name__)


@dataclasses.dataclass
class Clock:
    """Seconds of training steps over all starts of the run, and the speed of this start."""

    seconds: float
    tokens: int = 0
    here: float = 0.0

    def add(self, seconds: float, tokens: int) -> None:
        self.seconds += seconds
        self.here += seconds
        self.tokens += tokens

    @property
    def tokens_per_second(self) -> float | None:
        return self.tokens / self.here if self.here else None


def build_program(config: Config, directory: Path) -> Program:
    """Compiles; the lifting is chosen once per run, since the last bits depend on it."""
    params = None
    if config.train.init_from is not None:
        _, params = exported.load(config.train.init_from)
        exported.check(config.model, params, config.train.init_from)
    path = directory / 'lifting.json'
    if path.exists():
        return programs.build(config, read_json(path, {'lifting': str})['lifting'], params)
    program = programs.build(config, params=params)
    write_json(path, {'lifting': program.lifting, 'seconds_per_step': program.measured})
    return program


def restore(program: Program, checkpoints: Checkpoints, rows: Rows) -> tuple[dict, int, Clock]:
    """State, step and time of the newest sound checkpoint, or of a run that begins.

    Raises:
      CheckpointError: every checkpoint is damaged, or they belong to other data.
    """
    restored = checkpoints.restore(program.abstract_state)
    if restored is None:
        return program.init(), 0, Clock(0.0)
    state, record = restored
    if record['data'] != rows.identity():
        raise CheckpointError(
            f'{checkpoints.directory.parent} was trained on {record["data"]}, but the dataset is '
            f'{rows.identity()}; use the interpreter and the data of its first start, or another '
            'workdir'
        )
    step = int(state['step'])
    checkpoints.discard_after(step)
    log.info('resuming at step %s', f'{step:,}')
    return state, step, Clock(record['train_seconds'])


def software_of(directory: Path) -> dict[str, Any]:
    """The provenance of results; user and host stay in provenance.json."""
    start = read_json(directory / 'provenance.json', PROVENANCE)['starts'][-1]
    return {name: start[name] for name in START}
