"""The text of a dry run: a description of a run on its devices as tables."""

import csv
import math
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from qkattn.errors import ConfigError
from qkattn.train.hlo import KINDS
from qkattn.train.topology import Description

WIDTH = 100
ASSUMPTIONS = (
    'Lower bounds: matrix products at the peak rate of the chip, every operand and result of a '
    'kernel moved once through HBM, collectives as rings over all links of the chip in one '
    'direction, without latency. A step takes at least the largest of the three, and their sum '
    'where nothing overlaps. Evaluation, decoding and checkpoints come on top.'
)
FAKE = (
    'On fake CPU devices, sums of which a slice is kept are counted as all-reduces, which '
    'compilers for TPUs and GPUs turn into reduce-scatters of half the traffic; temporaries and '
    'bytes of HBM are those of the CPU compiler, which fuses less and computes bfloat16 in float32.'
)


def text(run: Description) -> str:
    """The description as a page of at most 100 columns."""
    return '\n'.join(_lines(run))


def _lines(run: Description) -> Iterator[str]:
    mesh = ' '.join(f'{axis}={size}' for axis, size in run.mesh.items())
    yield from _wrapped(run.where)
    yield f'compiled by {run.compiler}'
    yield f'mesh {mesh}'
    for sentence in run.program:
        yield from _wrapped(sentence)
    for warning in run.warnings:
        yield from _wrapped(f'WARNING {warning}')
    yield ''
    yield f'{"parameters":<34}{run.parameters:>20,}  of {_counted(run.trials, "trial")} each'
    yield f'{"tokens":<34}{run.tokens:>20,}  per step'
    yield ''
    yield f'{"memory per device":<34}{"bytes":>20}'
    for kind, size in run.memory.items():
        yield f'{kind:<34}{size:>20,}  {size_text(size)}'
    total = float(sum(run.memory.values()))
    of = (
        '' if run.capacity is None else f' of {size_text(run.capacity)}, {total / run.capacity:.1%}'
    )
    yield f'{"total":<34}{total:>20,.0f}  {size_text(total)}{of}'
    yield ''
    yield f'{"work per device and step":<34}'
    yield f'{"FLOPs of the compiled program":<34}{run.flops:>20,.0f}'
    yield f'{"FLOPs of the model x 3, shared out":<34}{run.model_flops:>20,.0f}'
    yield f'{"bytes of HBM":<34}{run.bytes_accessed:>20,.0f}  {size_text(run.bytes_accessed)}'
    yield ''
    yield (
        f'{"collectives per device and step":<34}{"bytes":>20}  {"":<12}{"count":>9}{"devices":>9}'
        + ('  at least' if run.seconds else '')
    )
    for row in run.collectives:
        name = f'{row.kind} over {row.axes or "itself"}'
        sizes = f'{row.size:>20,.0f}  {size_text(row.size):<12}'
        spent = f'  {seconds_text(row.seconds):>8}' if run.seconds and row.seconds else ''
        yield f'{name:<34}{sizes}{row.count:>9,.4g}{row.group:>9,}{spent}'
    total = sum(row.size for row in run.collectives)
    yield f'{"total":<34}{total:>20,.0f}  {size_text(total)}'
    if run.seconds:
        yield ''
        yield f'{"time of a step, at least":<34}'
        for limit, seconds in run.seconds.items():
            yield f'{limit:<34}{seconds_text(seconds):>20}'
        for name, together in (('all overlapped', max), ('nothing overlapped', sum)):
            seconds = together(run.seconds.values())
            yield f'{name:<34}{seconds_text(seconds):>20}  {run.tokens / seconds:,.0f} tokens/s'
        yield ''
        yield from _wrapped(ASSUMPTIONS)
    if 'fake' in run.compiler:
        yield from _wrapped(FAKE)


def check_log(path: str | Path) -> None:
    """ConfigError if `log` cannot append to a path; a device may have no end to read up to."""
    path = Path(path)
    if not path.parent.is_dir() or (path.exists() and not path.is_file()):
        raise ConfigError(
            f'--dry_run_log={path} must be a CSV file, or a name for one in a directory that exists'
        )


def log(run: Description, path: str | Path) -> None:
    """Appends the description to a CSV file, sizes in GB (1e9 bytes) and times in ms.

    The first column names the row by pod, mesh and stack.

    Raises:
      ConfigError: a file of other columns, or one that cannot be written.
    """
    row: dict[str, Any] = {
        'run': f'{run.name} {_mesh(run)} {run.trials} x {run.parameters}',
        'compiler': run.compiler,
        'devices': math.prod(run.mesh.values()),
        'tokens': run.tokens,
        'state_gb': (run.memory['parameters'] + run.memory['optimizer state']) / 1e9,
        'memory_gb': sum(run.memory.values()) / 1e9,
        'tflop': run.flops / 1e12,
        'model_tflop': run.model_flops / 1e12,
        **{f'{kind}_gb': 0.0 for kind in KINDS},
        'collectives': sum(row.count for row in run.collectives),
        **{f'{limit}_ms': 1e3 * seconds for limit, seconds in run.seconds.items()},
    }
    for one in run.collectives:
        row[f'{one.kind}_gb'] += one.size / 1e9
    check_log(path)
    header = ','.join(row) + '\n'
    try:
        with open(path, 'a+', newline='', errors='replace') as file:
            file.seek(0)
            if file.readline(len(header)) not in ('', header):
                raise ConfigError(f'--dry_run_log={path} is another table; give another file')
            writer = csv.DictWriter(file, row, lineterminator='\n')
            if not file.seek(0, os.SEEK_END):
                writer.writeheader()
            writer.writerow({k: f'{v:.6g}' if isinstance(v, float) else v for k, v in row.items()})
    except OSError as error:
        raise ConfigError(f'--dry_run_log={path} cannot be written: {error.strerror}') from error


def _mesh(run: Description) -> str:
    """The axes that split anything."""
    return ' '.join(f'{axis}={n}' for axis, n in run.mesh.items() if n > 1) or 'data=1'


def size_text(size: float) -> str:
    """Bytes in the unit that suits them."""
    unit = min(int(math.log(max(size, 1), 1024)), 4)
    return f'{size / 1024**unit:,.{2 if unit else 0}f} {("B", "KiB", "MiB", "GiB", "TiB")[unit]}'


def seconds_text(seconds: float) -> str:
    """Seconds in the unit that suits them."""
    for unit, name in ((1.0, 's'), (1e-3, 'ms')):
        if seconds >= unit:
            return f'{seconds / unit:,.3g} {name}'
    return f'{seconds * 1e6:,.3g} us' if seconds > 1e-8 else '0 us'


def _counted(count: int, noun: str) -> str:
    return f'{count:,} {noun}{"s" * (count != 1)}'


def _wrapped(sentence: str) -> list[str]:
    return textwrap.wrap(sentence, WIDTH, subsequent_indent='  ')
