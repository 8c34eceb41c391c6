"""From the start of experiments.train to its first step, without and with a compilation cache."""

import re
import tempfile
from pathlib import Path

from qkattn.benchmark import commands
from qkattn.benchmark.measurement import Measurement
from qkattn.benchmark.session import Session
from qkattn.benchmark.targets import WHOLE

# Settings of char_lm_cpu, and how often a start is repeated.
SHORT = {
    **{'data.eval_sequences': 12, 'optimizer.warmup_steps': 2, 'train.num_steps': 20},
    **{'train.eval_every': 20, 'train.checkpoint_every': 20},
}
SCALES = {
    'cpu': (commands.RECIPE, 3),
    'gpu': (commands.RECIPE, 3),
    'smoke': (commands.SMALL, 1),
}
_COMPILED = re.compile(r'.*Finished XLA compilation of .* in ([\d.]+) sec')
PARTS = (
    *(WHOLE, 'interpreter and imports', 'data', 'tracing and initialization'),
    *('compiling, or reading compiled programs', 'first step and the rest'),
)


def run(session: Session) -> None:
    settings, repeats = SCALES[session.scale.name]

    def both() -> tuple[list[Measurement], list[Measurement]]:
        cold, warm = [], []
        for _ in range(repeats):
            with tempfile.TemporaryDirectory() as directory:
                cold.append(_split(settings, Path(directory), 'cold'))
                warm.append(_split(settings, Path(directory), 'warm'))
        # The first start of several prepares data and reads files into memory.
        return _rows(cold[repeats > 1 :]), _rows(warm[repeats > 1 :])

    found: dict[str, list[Measurement]] = {}

    def rows(which: str) -> list[Measurement]:
        if not found:
            found['cold'], found['warm'] = both()
        return found[which]

    commands.record(session, 'without compiled programs', lambda: rows('cold'), WHOLE)
    commands.record(session, 'with a warm compilation cache', lambda: rows('warm'), WHOLE)


def _split(settings: dict, directory: Path, workdir: str) -> list[float]:
    """Seconds until the first step of a start was done, and its PARTS."""
    done = commands.run(
        *('train', '--config=char_lm_cpu', f'--workdir={directory / workdir}', '--verbosity=-1'),
        *commands.overrides({**settings, **SHORT}),
        environment={
            'JAX_COMPILATION_CACHE_DIR': str(directory / 'compiled'),
            'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
            'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
            'JAX_LOG_COMPILES': '1',
        },
    )
    whole, phases = done.first_step, done.phases
    before = [line for at, line in done.lines if at <= whole]
    compiled = sum(float(found[1]) for line in before if (found := _COMPILED.match(line)))
    imports, data = done.first_phase, phases['preparing data']
    built = phases['compiling'] + phases['initializing'] - compiled
    return [whole, imports, data, built, compiled, whole - imports - data - built - compiled]


def _rows(starts: list[list[float]]) -> list[Measurement]:
    columns = zip(*starts, strict=True)
    return [Measurement(name, {}, rounds) for name, rounds in zip(PARTS, columns, strict=True)]
