"""Holds what is printed against the logs: tables, report and README are what the files give.

Links of a chain, so that no number can stand anywhere that was not measured:

    plan.jsonl                                 a run's name is the hash of its config
    metrics.jsonl of a run -> results.jsonl   the last evaluation's measures are the results
    results.jsonl -> table.*, report.html      made again, they say the same, to nine digits
    study directory -> a page's headline       the block between its two marks is made again

Figures are left out: a drawing library may place a pixel otherwise.
"""

import math
import re
from collections.abc import Iterator
from pathlib import Path

from qkattn.config import fingerprint_of
from qkattn.errors import ReportError
from qkattn.report import documents
from qkattn.report.tables import headline
from qkattn.run.files import write_atomic
from qkattn.verdict.findings import find
from qkattn.verdict.load import Study, load_study
from qkattn.verdict.reading import json_lines

# What a run logs of the validation split as it trains.
MEASURES = ('val_loss', 'val_bits_per_byte', 'val_accuracy', 'val_solved')

BLOCK = re.compile(r'(<!-- headline: (\S+) -->\n)(.*?)(<!-- end -->)', re.DOTALL)
NUMBER = re.compile(r'\d+(?:[.,]\d+)*')
FLOAT = re.compile(r'\d+\.\d+(?:e[+-]?\d+)?')
_DRAWING = re.compile(r'<svg.*?</svg>', re.DOTALL)


def check_study(directory: str | Path) -> int:
    """Checks the reports of a study against its logs and returns how many numbers they print.

    Raises:
      ReportError: the first thing that differs, and where.
    """
    study = load_study(directory)
    if study.problems:
        raise ReportError(f'{study.directory}: {study.problems[0]}')
    for sentence in _unlike_their_logs(study):
        raise ReportError(f'{study.directory}: {sentence}')
    count = 0
    for name, wanted in documents(study).items():
        path = study.directory / name
        if not path.is_file():
            raise ReportError(f'{path} does not exist; make it with python -m experiments.report')
        found = path.read_text(encoding='utf-8')
        if place := _difference(found, wanted):
            raise ReportError(f'{path} is not what its logs give, {place}')
        count += len(NUMBER.findall(_DRAWING.sub('', found)))
    return count


def check_page(path: str | Path, *, write: bool = False) -> int:
    """Checks the headlines of a Markdown page and returns how many there are.

    A headline stands between `<!-- headline: DIRECTORY -->` (relative to the page) and
    `<!-- end -->`.

    Args:
      write: puts what the studies give in place of what stands there.

    Raises:
      ReportError: a headline that its study does not give.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f'page {str(path)!r} cannot be read: {error}.') from error

    def made(match: re.Match) -> str:
        study = load_study(path.parent / match[2])
        return f'{match[1]}{headline(study, find(study))}{match[4]}'

    wanted = BLOCK.sub(made, text)
    if write:
        write_atomic(path, wanted)
    elif place := _difference(text, wanted):
        raise ReportError(f'{path} is not what its studies give, {place}')
    return len(BLOCK.findall(text))


def _unlike_their_logs(study: Study) -> Iterator[str]:
    """Runs that are not what they say, and trials whose result is not their log's last entry."""
    for run in study.runs:
        if fingerprint_of(run.config) != run.name:
            yield f'run {run.name} of plan.jsonl is not the hash of its config'
        if not run.trials:
            continue
        path = study.directory / run.directory / 'metrics.jsonl'
        if not path.is_file():
            yield f'run {run.name} has results, but {path.name} is missing'
            continue
        problems: list[str] = []
        records = [record for _, record in json_lines(path, path.name, problems)]
        evaluations = [record for record in records if record['kind'] == 'eval']
        yield from (f'run {run.name}: {problem}' for problem in problems)
        if not evaluations or evaluations[-1]['step'] != run.trials[0].num_steps:
            yield f'run {run.name} was not evaluated at its last step'
            continue
        for name in MEASURES:
            logged = evaluations[-1][name] or [None] * len(run.trials)
            if len(logged) != len(run.trials):
                yield f'run {run.name} has {len(run.trials)} trials, but {len(logged)} logged'
                break
            for trial, value in zip(run.trials, logged, strict=True):
                if not _same(trial.metrics[name], value):
                    yield (
                        f'seed {trial.seed} of run {run.name} has {name} {trial.metrics[name]}, '
                        f'but {value} in its log'
                    )


def _same(result: float | None, logged: float | None) -> bool:
    if result is None or logged is None:
        return result is logged
    return math.isclose(result, logged, rel_tol=1e-9)


def _says_the_same(line: str, other: str) -> bool:
    """Whether only digits differ that are beyond what another build of numpy computes alike."""
    texts, numbers = zip(*((FLOAT.split(x), FLOAT.findall(x)) for x in (line, other)), strict=True)
    return texts[0] == texts[1] and all(
        math.isclose(float(a), float(b), rel_tol=1e-9) for a, b in zip(*numbers, strict=True)
    )


def _difference(found: str, wanted: str) -> str | None:
    """'line 3: 'a', but they give 'b'', or None where both are the same but for drawings."""
    lines = [_DRAWING.sub('', text).splitlines() for text in (found, wanted)]
    for number, (line, other) in enumerate(zip(*lines, strict=False), start=1):
        if line != other and not _says_the_same(line, other):
            at = next(
                (i for i, (a, b) in enumerate(zip(line, other, strict=False)) if a != b),
                min(len(line), len(other)),
            )
            part = slice(max(at - 20, 0), at + 40)
            return f'line {number}: {line[part]!r}, but they give {other[part]!r}'
    if len(lines[0]) != len(lines[1]):
        return f'it has {len(lines[0])} lines, but they give {len(lines[1])}'
    return None
