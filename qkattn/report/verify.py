"""Checks that reports and pages print what the logs of their studies give.

The chain from a log to a printed number:

    plan.jsonl                                 a run's name is the hash of its config
    metrics.jsonl of a run -> results.jsonl   the last evaluation's metrics are the results
    results.jsonl -> table.*, report.html      made again, they are the same to nine digits
    study directory -> a page's headline       the block between its two marks is made again

Figures are left out: a drawing library may place a pixel differently.
"""

import itertools
import math
import re
from collections.abc import Iterator
from pathlib import Path

from qkattn.config import fingerprint_of
from qkattn.errors import ReportError
from qkattn.metrics import LOGGED
from qkattn.report import documents
from qkattn.report.figures import figures
from qkattn.report.tables import headline
from qkattn.run.files import write_atomic
from qkattn.verdict import Study, find, load_study
from qkattn.verdict.reading import for_each_line
from qkattn.verdict.runs import PlannedRun

BLOCK = re.compile(r'(<!-- headline: (\S+) -->\n)(.*?)(<!-- end -->)', re.DOTALL)
NUMBER = re.compile(r'\d+(?:[.,]\d+)*')
FLOAT = re.compile(r'\d+\.\d+(?:e[+-]?\d+)?')
DRAWING = re.compile(r'<svg.*?</svg>', re.DOTALL)


def check_study(directory: str | Path) -> int:
    """Checks the report of a study against its logs and returns how many numbers it prints.

    Raises:
      ReportError: the first difference, and where it is.
    """
    study = load_study(directory)
    unlike = (problem for run in study.runs for problem in _unlike_its_log(study, run))
    for problem in itertools.chain(study.problems, unlike):
        raise ReportError(f'{study.directory}: {problem}')
    found = find(study)
    count = 0
    for name, expected in documents(study, found, figures(study, found), {}).items():
        path = study.directory / name
        if not path.is_file():
            raise ReportError(f'{path} does not exist; make it with python -m experiments.report')
        actual = path.read_text(encoding='utf-8')
        if place := difference(actual, expected):
            raise ReportError(f'{path} is not what its logs give, {place}')
        count += len(NUMBER.findall(DRAWING.sub('', actual)))
    return count


def check_page(path: str | Path, *, write: bool = False) -> int:
    """Checks the headlines of a Markdown page and returns how many there are.

    A headline stands between `<!-- headline: DIRECTORY -->` (relative to the page) and
    `<!-- end -->`.

    Args:
      write: replaces the headlines by what the studies give.

    Raises:
      ReportError: a headline that its study does not give.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f'page {str(path)!r} cannot be read: {error}.') from error

    def made(match: re.Match[str]) -> str:
        study = load_study(path.parent / match[2])
        return f'{match[1]}{headline(study, find(study))}{match[4]}'

    expected = BLOCK.sub(made, text)
    if write and expected != text:
        write_atomic(path, expected)
    elif place := difference(text, expected):
        raise ReportError(f'{path} is not what its studies give, {place}')
    return len(BLOCK.findall(text))


def _unlike_its_log(study: Study, run: PlannedRun) -> Iterator[str]:
    """What a run is that its plan does not say, and results that are not its log's last entry."""
    if fingerprint_of(run.config) != run.name:
        yield f'run {run.name} of plan.jsonl is not the hash of its config'
    if not run.trials:
        return
    path = study.directory / run.directory / 'metrics.jsonl'
    if not path.is_file():
        yield f'run {run.name} has results, but {path.name} is missing'
        return
    problems: list[str] = []
    records: list[dict] = []
    for_each_line(path, path.name, problems, records.append)
    evaluations = [record for record in records if record['kind'] == 'eval']
    yield from (f'run {run.name}: {problem}' for problem in problems)
    if not evaluations or evaluations[-1]['step'] != run.trials[0].num_steps:
        yield f'run {run.name} was not evaluated at its last step'
        return
    for name in LOGGED:
        logged = evaluations[-1][name] or [None] * len(run.trials)
        if len(logged) != len(run.trials):
            yield f'run {run.name} has {len(run.trials)} trials, but {len(logged)} logged'
            return
        for trial, value in zip(run.trials, logged, strict=True):
            result = trial.metrics[name]
            both = result is not None and value is not None
            if not (math.isclose(result, value, rel_tol=1e-9) if both else result is value):
                about = f'seed {trial.seed} of run {run.name} has {name} {result}'
                yield f'{about}, but {value} in its log'


def _same(line: str, other: str) -> bool:
    """Whether lines differ only in digits that another build of numpy may compute differently."""
    texts, numbers = zip(*((FLOAT.split(x), FLOAT.findall(x)) for x in (line, other)), strict=True)
    return texts[0] == texts[1] and all(
        math.isclose(float(a), float(b), rel_tol=1e-9) for a, b in zip(*numbers, strict=True)
    )


def difference(actual: str, expected: str) -> str | None:
    """'line 3: 'a', expected 'b'', or None where both are the same but for drawings."""
    lines, others = (DRAWING.sub('', text).splitlines() for text in (actual, expected))
    for number, (line, other) in enumerate(zip(lines, others, strict=False), start=1):
        if line != other and not _same(line, other):
            pairs = zip(line, other, strict=False)
            length = min(len(line), len(other))
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), length)
            part = slice(max(at - 20, 0), at + 40)
            return f'line {number}: {line[part]!r}, expected {other[part]!r}'
    if len(lines) != len(others):
        return f'it has {len(lines)} lines, expected {len(others)}'
    return None
