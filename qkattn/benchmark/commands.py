"""Commands of qkattn as a user starts them, and where their time goes."""

import collections
import dataclasses
import functools
import logging
import os
import re
import subprocess
import sys
import tempfile
import time
import types
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkattn.benchmark.measurement import Measurement
from qkattn.benchmark.session import Session
from qkattn.benchmark.targets import TRAINING
from qkattn.run.records import parse_json

Rows = Callable[[], Sequence[Measurement]]

log = logging.getLogger(__name__)

_PHASE = re.compile(r'.*: (\w[\w ]*) took ([\d.]+) s$')
_STEP = re.compile(r'.*: step [\d,]+/')


class Failed(RuntimeError):
    """A command that has not ended with 0."""


@dataclasses.dataclass(frozen=True)
class Finished:
    """A command that has ended with 0.

    Attributes:
      seconds: of the whole process.
      lines: seconds since its start, and what it then wrote to standard error.
    """

    seconds: float
    lines: Sequence[tuple[float, str]]

    @property
    def phases(self) -> Mapping[str, float]:
        """Seconds by phase, summed."""
        found: dict[str, float] = collections.defaultdict(float)
        for _, line in self.lines:
            if phase := _PHASE.match(line):
                found[phase[1]] += float(phase[2])
        return found

    @property
    def first_phase(self) -> float:
        """Seconds until the first phase began: the interpreter and the imports."""
        for at, line in self.lines:
            if phase := _PHASE.match(line):
                return at - float(phase[2])
        raise Failed('no phase was logged')

    @property
    def first_step(self) -> float:
        """Seconds until the first step was done, as the display says."""
        for at, line in self.lines:
            if _STEP.match(line):
                return at
        raise Failed('no step was shown')


def run(
    script: str, *flags: str, environment: Mapping[str, str] = types.MappingProxyType({})
) -> Finished:
    """Runs `python -m experiments.SCRIPT`; raises Failed where it does not end with 0."""
    root = str(Path(__file__).parents[2])
    own = {**os.environ, 'PYTHONPATH': root, 'QKATTN_LOG': 'DEBUG', **environment}
    command = [sys.executable, '-m', f'experiments.{script}', *flags]
    pipes = {'stdout': subprocess.DEVNULL, 'stderr': subprocess.PIPE}
    start, lines = time.perf_counter(), []
    with subprocess.Popen(command, env=own, text=True, **pipes) as process:  # type: ignore[call-overload]
        for line in process.stderr:
            lines.append((time.perf_counter() - start, line.rstrip()))
    if process.returncode:
        last = lines[-1][1] if lines else ''
        raise Failed(f'{script} has ended with {process.returncode}: {last}')
    return Finished(time.perf_counter() - start, lines)


# Settings of char_lm_cpu on text that needs no network.
RECIPE = {'data.name': 'stdlib', 'data.tokenizer': 'bytes', 'model.vocab_size': 256}
SMALL = {
    **RECIPE,
    **{'model.num_layers': 1, 'model.d_model': 16, 'model.num_heads': 2, 'model.context': 8},
}


def overrides(settings: Mapping[str, object]) -> list[str]:
    return [f'--config.{name}={value}' for name, value in settings.items()]


@functools.lru_cache
def trained(scale: str) -> dict[str, Any]:
    """The result of a real run."""
    steps, every = (40, 20) if scale == 'smoke' else (1000, 200)
    settings = {
        **(SMALL if scale == 'smoke' else RECIPE),
        **{'train.num_steps': steps, 'train.eval_every': every, 'train.checkpoint_every': every},
        **{'data.eval_sequences': 96, 'optimizer.warmup_steps': 10},
    }
    with tempfile.TemporaryDirectory() as directory:
        run('train', '--config=char_lm_cpu', f'--workdir={directory}', *overrides(settings))
        return parse_json((Path(directory) / 'result.json').read_bytes())[0]


def record(session: Session, title: str, rows: Rows, reference: str) -> None:
    """A group measured by commands; of one that fails, its reason."""

    def found() -> Sequence[Measurement]:
        try:
            return rows()
        except Failed as error:
            log.warning('%s', error)
            return [Measurement(reference, {}, [], {'failed': str(error)})]

    session.record(title, found, reference=reference)


def loop_rows(scale: str, parts: Mapping[str, str]) -> list[Measurement]:
    """Seconds per step of a real run: of training, and of its parts by their fields in results."""
    result = trained(scale)
    fields = {TRAINING: 'train_seconds', **parts}
    return [Measurement(n, {}, [result[f] / result['num_steps']]) for n, f in fields.items()]
