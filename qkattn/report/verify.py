"""Checks that reports and pages print what the logs of their studies give.

The chain from a log to a printed number:

    ledger.jsonl -> study.json, plan.jsonl, results.jsonl, documents.json    by their hashes
    plan.jsonl     a run's name is the hash of its config, its trials are the config's, in order
    results.jsonl  tokens and residual follow from the other fields, parameter counts, FLOPs and
                   the cache from the config (which `experiments.verify` counts again)
    results.jsonl -> table.md, table.csv, a page's headline                  made again
    results.jsonl -> claims.json                             decided again (experiments.claims)
    claims.json -> the blocks of pages                                       made again
    logs -> sentences of pages, by docs/numbers.toml (`printed_numbers`)     made again

`load_study` compares results with the last evaluation and the final record of metrics.jsonl, and
losses with the sums of documents.json. A stored study has the files of the first lines in a zip
archive (`qkattn.study.stored`).

What a run logged, and what only copies or counts it, is compared exactly: hashes, results, counts,
texts and verdicts. Derived numbers are not the same everywhere: processors and versions of numpy
round exp, log and sums differently, and a fit carries the last bits to the ninth digit. So a number
of claims.json agrees with the one made again, x, if one within TOLERANCE of x is stored like that
(`near`), and a printed one if it is one apart in its last decimal (`close`).
"""

import itertools
import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path

from qkattn.config import TrialsConfig, fingerprint_of, from_json
from qkattn.errors import ReportError
from qkattn.report import tables
from qkattn.report.printed_numbers import read_page
from qkattn.report.prose import rounded
from qkattn.storage import ledger
from qkattn.storage.files import read_whole, write_atomic
from qkattn.study.tuning import SCREENING
from qkattn.verdict import TrainedStudy, load_findings
from qkattn.verdict.runs import Trial

# Relative, of derived numbers.
TOLERANCE = 1e-6
# A number as it is printed: '8', '+0.0500', '1.5e-07', '< 0.001'.
PRINT = re.compile(r'(?:< )?[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?')


def check_study(directory: str | Path) -> int:
    """Checks the report of a study against its logs and returns how many numbers it prints.

    ReportError names the first difference, and where it is.
    """
    findings = load_findings(directory)
    study = findings.study
    for problem in itertools.chain(study.problems, _run_problems(study), _ledger_problems(study)):
        raise ReportError(f'{study.directory}: {problem}')
    count = 0
    for name, text in tables.files(findings).items():
        path = study.directory / name
        if not path.is_file():
            raise ReportError(f'{path} does not exist; make it with python -m experiments.report')
        actual = read_whole(path).decode(errors='replace')
        first_difference = difference(actual, text)
        if first_difference is not None:
            raise ReportError(f'{path} does not match its logs, {first_difference}')
        count += len(PRINT.findall(actual))
    return count


# By name of a block, what makes its text. A block of a Markdown page stands between
# `<!-- NAME: DIRECTORY -->` and `<!-- end -->`; its text is a function of the directory and of its
# path as the page writes it.
Blocks = Mapping[str, Callable[[Path, str], str]]
HEADLINE: Blocks = {'headline': lambda path, _: tables.headline(load_findings(path))}


def check_page(path: str | Path, blocks: Blocks = HEADLINE, *, write: bool = False) -> int:
    """Checks the blocks of results in a Markdown page and returns how many there are.

    `write` replaces blocks by what their directories give; else ReportError names the first line
    that its directory does not give.
    """
    path = Path(path)
    text = read_page(path)
    names = '|'.join(blocks)
    start = rf'<!-- (?P<name>{names}): (?P<directory>\S+) -->\n'
    block = re.compile(rf'(?P<start>{start}).*?(?P<end><!-- end -->)', re.DOTALL)

    def made_again(match: re.Match[str]) -> str:
        directory = match['directory']
        content = blocks[match['name']](path.parent / directory, directory)
        return match['start'] + content + match['end']

    expected, count = block.subn(made_again, text)
    first_difference = difference(text, expected)
    if write and expected != text:
        write_atomic(path, expected)
    elif first_difference is not None:
        raise ReportError(f'{path} does not match its studies, {first_difference}')
    return count


def _ledger_problems(study: TrainedStudy) -> Iterator[str]:
    """A sentence for each declaration not in the ledger, and one for files changed since a look.

    Only a study with results beyond screening has been looked at.
    """
    if study.ledger.declaration != study.declaration:
        yield f'study.json is not what the last declaration in {ledger.NAME} says'
    if study.ledger.arms != set(study.arms):
        yield f'study.json has other arms than {ledger.NAME}'
    if not any(run.stage != SCREENING and run.trials for run in study.runs):
        return
    digests_then = study.ledger.looked_files
    digests_now = ledger.digests(study.files)
    changed = []
    for name in {**digests_then, **digests_now}:
        if digests_then.get(name) != digests_now.get(name):
            changed.append(name)
    if changed:
        altered = [
            f'run {run} is not what look {look} saw; ' for run, look in study.altered.items()
        ]
        yield (
            f'{" and ".join(changed)} changed since the last look in {ledger.NAME}; '
            f'{"".join(altered)}restore what was edited, or make the report again where results '
            'were added'
        )


def _run_problems(study: TrainedStudy) -> Iterator[str]:
    """A sentence for each run whose results are not those of its plan or of each other."""
    for run in study.runs:
        if fingerprint_of(run.config) != run.name:
            yield f'run {run.name} of plan.jsonl is not the hash of its config'
        if not run.trials:
            continue
        planned = from_json(TrialsConfig, run.config['trials']).trials()
        if [trial.trial for trial in run.trials] != planned:
            yield f'run {run.name} has results that are not the trials of its config in their order'
            continue
        for trial in run.trials:
            for field, number, expected in _derived(study, trial):
                if not math.isclose(number, expected, rel_tol=1e-9, abs_tol=1e-12):
                    yield (
                        f'seed {trial.seed} of run {run.name} has {field} {number}, '
                        f'which is {expected} by its other fields'
                    )


def _derived(study: TrainedStudy, trial: Trial) -> Iterator[tuple[str, float, float]]:
    """Fields of a result that follow from others: name, stored number, number that follows.

    The residual is the relative distance of a matched quantity from its target.
    """
    run = trial.run
    tokens_of_a_step = run.config['train']['batch_size'] * run.config['model']['context']
    yield 'num_tokens', trial.num_tokens, trial.num_steps * tokens_of_a_step
    if study.match is not None and run.target:
        total = trial.parameters['total']
        measured = {
            'total': total,
            'non_embedding': total - trial.parameters['embedding'],
            'flops': trial.flops_per_token,
            'cache': trial.cache_floats_per_token,
        }[study.match]
        yield 'residual', run.residual, measured / run.target - 1


def near(stored: float, number: float) -> bool:
    """Whether a number within TOLERANCE of `number` is stored as `stored`."""
    return stored in {rounded(number * (1 + shift)) for shift in (-TOLERANCE, 0, TOLERANCE)}


def close(printed: str, expected: str) -> bool:
    """Whether two prints of a number differ by one in the last decimal at most; counts not at all.

    So far goes what rounds in another way, as '0.082' and '0.083', or '< 0.001' and '0.001'.
    """
    a = Decimal(printed.removeprefix('< '))
    b = Decimal(expected.removeprefix('< '))
    # The exponent of the last digit: -3 of '0.082', 0 of a count.
    exponent = min(int(number.as_tuple().exponent) for number in (a, b))
    allowed = Decimal(1).scaleb(exponent) if exponent < 0 else 0
    return abs(a - b) <= allowed


def difference(actual: str, expected: str, agree: Callable[[str, str], bool] = close) -> str | None:
    """The first difference between two texts: "line 3: 'a', expected 'b'"; None if they agree.

    They agree if they are equal but for numbers, and numbers at the same place are equal or
    `agree`.
    """
    actual_lines = actual.splitlines()
    expected_lines = expected.splitlines()
    pairs = zip(actual_lines, expected_lines, strict=False)
    for number, (line, expected_line) in enumerate(pairs, start=1):
        if not _lines_agree(line, expected_line, agree):
            equal_length = len(os.path.commonprefix([line, expected_line]))
            shown = slice(max(equal_length - 20, 0), equal_length + 40)
            return f'line {number}: {line[shown]!r}, expected {expected_line[shown]!r}'
    if len(actual_lines) != len(expected_lines):
        return f'it has {len(actual_lines)} lines, expected {len(expected_lines)}'
    return None


def _lines_agree(line: str, expected: str, agree: Callable[[str, str], bool]) -> bool:
    """Whether two lines are equal but for numbers that `agree`."""
    if PRINT.sub('0', line) != PRINT.sub('0', expected):
        return False
    pairs = zip(PRINT.findall(line), PRINT.findall(expected), strict=True)
    return all(number == other or agree(number, other) for number, other in pairs)
