"""Checks that reports and pages print what the logs of their studies give.

The chain from a log to a printed number:

    ledger.jsonl -> study.json, plan.jsonl, results.jsonl, documents.json    by their hashes
    metrics.jsonl, documents.json of a run -> results.jsonl                  see run_checks
    results.jsonl -> table.md, table.csv, a page's headline                made again
    results.jsonl -> claims.json                           decided again, see qkattn.claims.export
    claims.json -> the blocks of pages                                     made again

A stored study has the files of the first two lines in another form (`qkattn.study.stored`).

What a run logged, and what only copies or counts it, is compared exactly: hashes, results, counts,
words and verdicts. Derived numbers are not the same everywhere: vector instructions of
processors, and versions of numpy, round exp, log and sums differently, and a bootstrapped fit
carries the last bits to the ninth digit. They are stored to six digits or fewer, and a stored one
agrees with the one made again, x, if it is what a number within TOLERANCE of x rounds to:

    claims.json            by its rows, whose x is at hand (`near`)
    tables, pages          by their text: prints that are one unit of their last digit apart agree
                           if that of six digits is meant, or if a number of the findings lies at
                           the boundary between both (`same_print`), as '< 0.001' beside '0.001'

This is about what is stored. No test of what the program computes has a wider tolerance for it.
"""

import dataclasses
import functools
import itertools
import math
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import pandas as pd

from qkattn.config import fingerprint_of
from qkattn.errors import ReportError
from qkattn.report import run_checks, tables
from qkattn.report.prose import DIGITS, rounded
from qkattn.storage import ledger
from qkattn.storage.files import write_atomic
from qkattn.storage.records import for_each_line, read_json
from qkattn.study.tuning import SCREENING
from qkattn.verdict import Findings, Study, load_findings

TOLERANCE = 1e-6  # relative, of derived numbers

# What a change by hand may touch without being found.
NOT_COVERED = (
    'pictures: PNG files; the numbers behind them are',
    'times, throughput, provenance, and fingerprints of data, which are as the runs recorded them',
    'training records in metrics.jsonl, orphans.jsonl, log.txt, and runs that left no study.json',
    'checkpoints: that a logged loss is the loss of a model',
    'yardsticks.json: losses of n-grams, by position and with shuffled sources, as recorded',
    'a study whose results, logs, report and ledger are all written again with matching hashes',
)

NUMBER = re.compile(r'\d+(?:[.,]\d+)*')
PRINT = re.compile(r'(?:< )?[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?')
WIDTH = re.compile(r'([ -])\1+')
PLAIN = {'&lt;': '<', r'\textless{}': '<', r'\ensuremath{-}': '-'}  # signs of HTML and LaTeX


def check_study(directory: str | Path) -> int:
    """Checks the report of a study against its logs and returns how many numbers it prints.

    ReportError names the first difference, and where it is.
    """
    study, found = load_findings(directory)
    for problem in itertools.chain(study.problems, _of_runs(study), _unlike_its_ledger(study)):
        edited = ' and '.join(_changed_files(study))
        note = f' ({edited} changed since the last look)' if edited not in problem else ''
        raise ReportError(f'{study.directory}: {problem}{note}')
    made = {
        'table.md': tables.report_markdown(study, found),
        'table.csv': tables.csv_table(study, found),
    }
    at_boundary = boundaries(lambda: [(study, found)])
    count = 0
    for name, expected in made.items():
        path = study.directory / name
        if not path.is_file():
            raise ReportError(f'{path} does not exist; make it with python -m experiments.report')
        actual = path.read_text(encoding='utf-8', errors='replace')
        if place := difference(actual, expected, at_boundary):
            raise ReportError(f'{path} is not what its logs give, {place}')
        count += len(NUMBER.findall(actual))
    return count


class Block(NamedTuple):
    """What stands between `<!-- NAME: DIRECTORY -->` and `<!-- end -->` in a Markdown page."""

    text: Callable[[Path, str], str]  # of the directory and its path as the page has it
    study: str = '.'  # where, below the directory, the study lies whose derived numbers are printed


HEADLINE = {'headline': Block(lambda directory, _: tables.headline(*load_findings(directory)))}


def check_page(
    path: str | Path, more: Mapping[str, Block] = MappingProxyType({}), *, write: bool = False
) -> int:
    """Checks the blocks of results in a Markdown page and returns how many there are.

    `more` are blocks by name, beside `headline`, that of a study. `write` replaces blocks by what
    their directories give; else ReportError names one that its directory does not give.
    """
    path = Path(path)
    try:
        text = path.read_text(encoding='utf-8')
    except (OSError, UnicodeDecodeError) as error:
        raise ReportError(f'page {str(path)!r} cannot be read: {error}.') from error

    blocks = HEADLINE | dict(more)
    names = '|'.join(blocks)
    block = re.compile(rf'(<!-- ({names}): (\S+) -->\n)(.*?)(<!-- end -->)', re.DOTALL)

    def made(match: re.Match[str]) -> str:
        return f'{match[1]}{blocks[match[2]].text(path.parent / match[3], match[3])}{match[5]}'

    def studies() -> Iterator[tuple[Study, Findings]]:
        for match in block.finditer(text):
            directory = path.parent / match[3] / blocks[match[2]].study
            if (directory / 'study.json').is_file():
                yield load_findings(directory)

    expected = block.sub(made, text)
    if write and expected != text:
        write_atomic(path, expected)
    elif place := difference(text, expected, boundaries(studies)):
        raise ReportError(f'{path} is not what its studies give, {place}')
    return len(block.findall(text))


def _unlike_its_ledger(study: Study) -> Iterator[str]:
    """What the study declares that its ledger does not, and files that nobody has looked at."""
    declared = read_json(study.directory / 'study.json', {})
    kept = ledger.read(study.directory / ledger.NAME)
    if declared['base_hash'] != fingerprint_of(declared['base']):
        yield 'base_hash of study.json is not the hash of its base'
    if kept.declaration != ledger.digest(declared):
        yield f'study.json is not what the last declaration in {ledger.NAME} says'
    if kept.arms != {ledger.arm_key(arm) for arm in declared['arms']}:
        yield f'study.json has other arms than {ledger.NAME}'
    if unlike := _changed_files(study):
        altered = [f'run {run} is not what look {n} saw; ' for run, n in study.altered.items()]
        yield (
            f'{" and ".join(unlike)} changed since the last look in {ledger.NAME}; '
            f'{"".join(altered)}restore what was edited, or make the report again where results '
            'were added'
        )


def _changed_files(study: Study) -> list[str]:
    """The files that are not those of the last look, if there was one on more than screening."""
    if not any(run.stage != SCREENING and run.trials for run in study.runs):
        return []
    looked, files = study.ledger.looked_files if study.ledger else {}, ledger.digests(study.files)
    return [name for name in {**looked, **files} if looked.get(name) != files.get(name)]


def _of_runs(study: Study) -> Iterator[str]:
    lines: dict[str, list[dict[str, Any]]] = {run.name: [] for run in study.runs}
    for_each_line(
        study.files / 'results.jsonl', '', [], lambda line: lines[line['run']].append(line)
    )
    for run in study.runs:
        yield from run_checks.problems(study, run, lines[run.name])


def near(stored: float, number: float) -> bool:
    """Whether a number within TOLERANCE of `number` is stored as `stored`."""
    return stored in {rounded(number * (1 + shift)) for shift in (-TOLERANCE, 0, TOLERANCE)}


def same_print(one: str, other: str, at_boundary: Callable[[float], bool]) -> bool:
    """Whether two prints of a derived number differ as those of two machines may.

    `at_boundary` says whether a number lies where rounding goes from one print to the other.
    """
    texts = [text.removeprefix('< ') for text in (one, other)]
    a, b = map(float, texts)
    if a == b:
        return one.startswith('<') == other.startswith('<') or at_boundary(a)
    is_count = a.is_integer() and b.is_integer()
    # Large numbers keep all digits before the point.
    last_bits = TOLERANCE if min(abs(a), abs(b)) >= 10 ** (DIGITS - 1) else 1e-9
    if math.isclose(a, b, rel_tol=last_bits) and not is_count:
        return True
    low, high = sorted(map(Decimal, texts), key=abs)
    last = min(int(x.as_tuple().exponent) for x in (low, high))
    if abs(high - low) > Decimal(1).scaleb(last):
        return False
    has_all_digits = low.adjusted() - last + 1 >= DIGITS and not is_count
    return has_all_digits or at_boundary(float(low + high) / 2)


def boundaries(
    studies: Callable[[], Iterable[tuple[Study, Findings]]],
) -> Callable[[float], bool]:
    """A function that tells whether a number of the findings lies at a boundary, to TOLERANCE.

    Powers of ten do not count: fractions are printed in percent, and prefixes stand for thousands.
    """

    @functools.cache
    def logarithms() -> list[float]:
        numbers = {x for pair in studies() for x in _numbers((pair[1], tables.frame(*pair)))}
        return [math.log10(abs(x)) for x in numbers if x and math.isfinite(x)]

    def at_boundary(boundary: float) -> bool:
        if not boundary:
            return False
        place = math.log10(abs(boundary))
        apart = (abs(math.remainder(x - place, 1)) for x in logarithms())
        return any(x <= math.log10(1 + TOLERANCE) for x in apart)

    return at_boundary


def _numbers(value: Any) -> Iterator[float]:
    """All numbers of dataclasses, mappings, sequences and tables within each other."""
    if isinstance(value, float):
        yield value
    elif dataclasses.is_dataclass(value):
        yield from _numbers(vars(value))
    elif isinstance(value, Mapping):
        yield from _numbers([*value.values()])
    elif isinstance(value, list | tuple | pd.DataFrame):
        for part in value.to_numpy().ravel() if isinstance(value, pd.DataFrame) else value:
            yield from _numbers(part)


def _same(line: str, other: str, at_boundary: Callable[[float], bool]) -> bool:
    """Whether two lines differ in nothing but numbers that `same_print` takes for one."""
    for sign, plain in PLAIN.items():
        line, other = line.replace(sign, plain), other.replace(sign, plain)
    prints = [PRINT.findall(x) for x in (line, other)]
    # A table is as wide as its numbers.
    texts = [WIDTH.sub(r'\1', PRINT.sub('0', x)) for x in (line, other)]
    return texts[0] == texts[1] and all(
        a == b or same_print(a, b, at_boundary) for a, b in zip(*prints, strict=True)
    )


def difference(
    actual: str, expected: str, at_boundary: Callable[[float], bool] | None = None
) -> str | None:
    """'line 3: 'a', expected 'b'', or None where both are the same.

    `at_boundary`, of `same_print`, is for texts of derived numbers; without it all are exact.
    """
    lines, others = actual.splitlines(), expected.splitlines()
    for number, (line, other) in enumerate(zip(lines, others, strict=False), start=1):
        if line != other and not (at_boundary and _same(line, other, at_boundary)):
            pairs = zip(line, other, strict=False)
            length = min(len(line), len(other))
            at = next((i for i, (a, b) in enumerate(pairs) if a != b), length)
            part = slice(max(at - 20, 0), at + 40)
            return f'line {number}: {line[part]!r}, expected {other[part]!r}'
    if len(lines) != len(others):
        return f'it has {len(lines)} lines, expected {len(others)}'
    return None
