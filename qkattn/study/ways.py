"""Ways to use the cores of a machine for a study: processes x cores of each, and which is chosen.

    workers.json   {machine, ways: [{processes, seconds_per_step}], processes, ...} of a study

With R runs of equal length left and s seconds a step in each of P processes that run at once, a way
takes time proportional to ceil(R / P) s.
"""

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from qkattn.errors import ConfigError
from qkattn.run import cores
from qkattn.run.records import read_json, write_json

NAME = 'workers.json'
AUTO = 'auto'
_SCHEMA = {
    'machine': {'cpu': str, 'cores': int},
    'ways': [{'processes': int, 'seconds_per_step': float}],
    'processes': int,
    'peak_bytes': int,
    'seconds': float,
}
_CLEAR = 1.25
_ADVICE = 'remove it: the same command then measures again'


def parse(text: str) -> int | None:
    """The value of --workers: a number, or None for 'auto'."""
    if text == AUTO:
        return None
    if text.isascii() and text.isdecimal() and int(text) > 0:
        return int(text)
    raise ConfigError(f'--workers={text} must be {AUTO} or a number of at least 1')


def machine() -> dict[str, Any]:
    """What a measurement depends on."""
    return {'cpu': cores.cpu(), 'cores': len(cores.usable())}


def candidates(number: int, most: int) -> list[int]:
    """Numbers of processes to compare on this number of cores; at most `most`."""
    groups = {number // 4, number // 2} if number >= 4 else set()
    return sorted({min(way, most) for way in {1, number} | groups})


def makespan(processes: int, seconds_per_step: float, runs: int) -> float:
    """Proportional to the time that `runs` equal runs take."""
    return math.ceil(runs / processes) * seconds_per_step


def chosen(seconds_per_step: Mapping[int, float], runs: int) -> int:
    """The number of processes that finishes `runs` first; the smaller one of equal ones."""
    return min(sorted(seconds_per_step), key=lambda p: makespan(p, seconds_per_step[p], runs))


def is_clear(seconds_per_step: Mapping[int, float], runs: int) -> bool:
    """Whether the best is so much faster than the next that another round would not change it."""
    best, *others = sorted(makespan(p, s, runs) for p, s in seconds_per_step.items())
    return not others or others[0] > _CLEAR * best


def text(seconds_per_step: Mapping[int, float], number: int, runs: int) -> str:
    """The choice with its figures in a sentence."""
    best = chosen(seconds_per_step, runs)
    parts = [f'{count(p)} {s / p:.3g} s per step' for p, s in sorted(seconds_per_step.items())]
    cores_text = count(number, 'core')
    return f'{count(best)} on {cores_text}; measured: {", ".join(parts)}'


def record(
    study: Path,
    seconds_per_step: Mapping[int, float],
    processes: int,
    peak: int,
    seconds: float,
) -> None:
    """Writes workers.json."""
    ways = [{'processes': p, 'seconds_per_step': s} for p, s in sorted(seconds_per_step.items())]
    content = {'machine': machine(), 'ways': ways, 'processes': processes}
    write_json(study / NAME, content | {'peak_bytes': peak, 'seconds': seconds})


def recorded(study: Path) -> dict[str, Any] | None:
    """workers.json, if it was measured on a machine like this one."""
    path = study / NAME
    if not path.exists():
        return None
    found = read_json(path, _SCHEMA, _ADVICE)
    return found if found['machine'] == machine() else None


def speedup(found: Mapping[str, Any]) -> float:
    """Steps per second of the recorded choice, as a multiple of one process on all cores."""
    rates = {way['processes']: way['processes'] / way['seconds_per_step'] for way in found['ways']}
    return rates[found['processes']] / rates[1]


def at_most(wanted: int, limits: Sequence[tuple[int, str]]) -> tuple[int, str | None]:
    """`wanted` workers within (number, what there is) of each limit, and the sentence of a cut."""
    least, reason = min(limits, key=lambda limit: limit[0])
    if wanted <= least:
        return wanted, None
    return least, f'--workers={wanted}: there {reason}, so {count(least, "worker")} will do'


def count(number: int, word: str = 'process') -> str:
    """'1 process', '2 cores', ..."""
    return f'{number} {word}{("es" if word.endswith("s") else "s") if number != 1 else ""}'
