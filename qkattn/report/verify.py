"""Checks that reports and pages print what the logs of their studies give.

The chain from a log to a printed number:

    ledger.jsonl -> study.json, plan.jsonl, results.jsonl, documents.json    by their hashes
    metrics.jsonl, documents.json of a run -> results.jsonl                  see run_checks
    results.jsonl -> table.*, trials.csv, report.html, plots/*.json
                                                           made again, the same to nine digits
    study directory -> a page's headline                   made again
    claims.json -> claims.html, plots/*.json, the blocks of pages          made again
"""

import functools
import itertools
import math
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from qkattn.config import fingerprint_of
from qkattn.errors import ReportError
from qkattn.report import claim_results, documents, figure_data, gallery, run_checks
from qkattn.report.figures import figures
from qkattn.report.tables import headline
from qkattn.run import ledger
from qkattn.run.files import write_atomic
from qkattn.run.records import for_each_line, read_json
from qkattn.study.tuning import SCREENING
from qkattn.verdict import Study, load_findings

# What a change by hand may touch without being found.
NOT_COVERED = (
    'pictures: PNG and SVG files, and the drawings in report.html; the numbers behind them are',
    'times, throughput, provenance, and fingerprints of data, which are as the runs recorded them',
    'training records in metrics.jsonl, orphans.jsonl, log.txt, and runs that left no study.json',
    'checkpoints: that a logged loss is the loss of a model',
    'a study whose results, logs, report and ledger are all written again with matching hashes',
)

BLOCK = re.compile(r'(<!-- (headline|claims|verdicts): (\S+) -->\n)(.*?)(<!-- end -->)', re.DOTALL)
NUMBER = re.compile(r'\d+(?:[.,]\d+)*')
FLOAT = re.compile(r'\d+\.\d+(?:e[+-]?\d+)?')
DRAWING = re.compile(r'<svg.*?</svg>', re.DOTALL)


def check_study(directory: str | Path) -> int:
    """Checks the report of a study against its logs and returns how many numbers it prints.

    Raises:
      ReportError: the first difference, and where it is.
    """
    study, found = load_findings(directory)
    for problem in itertools.chain(study.problems, _of_runs(study), _unlike_its_ledger(study)):
        raise ReportError(f'{study.directory}: {problem}')
    drawn = figures(study, found)
    made = figure_data(drawn) | documents(study, found, drawn, {})
    return _check_files(study.directory, made, 'report', 'logs give')


def check_gallery(directory: str | Path) -> int:
    """Checks the gallery of a directory against its claims.json and returns how many numbers.

    Raises:
      ReportError: the first difference, and where it is.
      RunDirectoryError: claims.json was edited.
    """
    shown = gallery.read_gallery(directory)
    made = gallery.documents(shown, gallery.drawings(shown), {})
    return _check_files(shown.directory, made, 'claims', f'{claim_results.NAME} gives')


def _check_files(directory: Path, made: Mapping[str, str], script: str, source: str) -> int:
    """How many numbers the files of a directory have, which are what is `made`, by name."""
    count = 0
    for name, expected in made.items():
        path = directory / name
        if not path.is_file():
            raise ReportError(f'{path} does not exist; make it with python -m experiments.{script}')
        actual = path.read_text(encoding='utf-8', errors='replace')
        if place := difference(actual, expected):
            raise ReportError(f'{path} is not what its {source}, {place}')
        count += len(NUMBER.findall(DRAWING.sub('', actual)))
    return count


def check_page(path: str | Path, *, write: bool = False) -> int:
    """Checks the blocks of results in a Markdown page and returns how many there are.

    A block stands between `<!-- headline: DIRECTORY -->` (relative to the page) and `<!-- end -->`:
    the headline of a study, or `claims`, all of a directory's claims, or `verdicts`, a table of
    them. Those are empty where the directory has no claims.json.

    Args:
      write: replaces the blocks by what the directories give.

    Raises:
      ReportError: a block that its directory does not give.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f'page {str(path)!r} cannot be read: {error}.') from error

    def made(match: re.Match[str]) -> str:
        text = _BLOCKS[match[2]](path.parent / match[3], match[3])
        return f'{match[1]}{text}{match[5]}'

    expected = BLOCK.sub(made, text)
    if write and expected != text:
        write_atomic(path, expected)
    elif place := difference(text, expected):
        raise ReportError(f'{path} is not what its studies give, {place}')
    return len(BLOCK.findall(text))


def _headline(directory: Path, _: str) -> str:
    return headline(*load_findings(directory))


def _of_claims(made: Callable[[Path, str], str], directory: Path, base: str) -> str:
    return made(directory, base) if (directory / claim_results.NAME).is_file() else ''


_BLOCKS: Mapping[str, Callable[[Path, str], str]] = {
    'headline': _headline,
    'claims': functools.partial(_of_claims, gallery.claims_markdown),
    'verdicts': functools.partial(_of_claims, gallery.verdicts_markdown),
}


def _unlike_its_ledger(study: Study) -> Iterator[str]:
    """What the study declares that its ledger does not, and files that nobody has looked at."""
    declared = read_json(study.directory / 'study.json', {})
    kept = ledger.read(study.directory / ledger.NAME)
    if declared['base_hash'] != fingerprint_of(declared['base']):
        yield 'base_hash of study.json is not the hash of its base'
    if kept.declaration != ledger.digest(declared):
        yield f'study.json is not what the last declaration in {ledger.NAME} says'
    if kept.arms != {ledger.place(arm) for arm in declared['arms']}:
        yield f'study.json has other arms than {ledger.NAME}'
    if not any(run.stage != SCREENING and run.trials for run in study.runs):
        return
    if kept.looked_files != (files := ledger.digests(study.directory)):
        unlike = [name for name in files if kept.looked_files.get(name) != files[name]]
        yield (
            f'{" and ".join(unlike)} changed since the last look in {ledger.NAME}; restore what '
            'was edited, or make the report again where results were added'
        )


def _of_runs(study: Study) -> Iterator[str]:
    lines: dict[str, list[dict[str, Any]]] = {run.name: [] for run in study.runs}
    for_each_line(
        study.directory / 'results.jsonl', '', [], lambda line: lines[line['run']].append(line)
    )
    for run in study.runs:
        yield from run_checks.problems(study, run, lines[run.name])


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
