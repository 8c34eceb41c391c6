"""Checks that reports and pages print what the logs of their studies give.

The chain from a log to a printed number:

    ledger.jsonl -> study.json, plan.jsonl, results.jsonl, documents.json    by their hashes
    plan.jsonl     a run's name is the hash of its config, and its results are the config's trials
    results.jsonl  tokens and residual follow from the other fields; parameter counts, FLOPs and
                   the cache follow from the config (`experiments.verify` counts them again)
    results.jsonl -> table.md, table.csv, a page's headline                  made again
    results.jsonl -> claims.json                             decided again (experiments.claims)
    claims.json -> the blocks of pages                                       made again
    logs -> sentences of pages, by docs/numbers.toml (`printed_numbers`)     made again

`load_study` compares results with the last evaluation and the final record of metrics.jsonl, and
losses with the sums of documents.json. A stored study has the files of the first lines in a zip
archive (`qkattn.study.stored`).

Most content is compared exactly: hashes, results, counts, texts and verdicts. Derived numbers are
not: processors and versions of numpy round exp, log and sums differently, and a fit carries the
last bits to the ninth digit. A number of claims.json may therefore differ by TOLERANCE before it is
rounded (`near`), and a printed number by one unit in its last decimal (`close`).
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

# How far derived numbers may differ, relative to their size.
TOLERANCE = 1e-6
# A number as it is printed: '8', '+0.0500', '1.5e-07', '< 0.001'.
PRINT = re.compile(r'(?:< )?[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?')


def check_study(directory: str | Path) -> int:
    """Checks the report of a study against its logs and returns how many numbers it prints.

    Raises ReportError at the first difference, which it shows with its file and line.
    """
    findings = load_findings(directory)
    study = findings.study
    problems = itertools.chain(study.problems, _run_problems(study), _ledger_problems(study))
    first_problem = next(problems, None)
    if first_problem is not None:
        raise ReportError(f'{study.directory}: {first_problem}')

    num_printed = 0
    for name, expected in tables.files(findings).items():
        path = study.directory / name
        if not path.is_file():
            raise ReportError(f'{path} does not exist; make it with python -m experiments.report')
        actual = read_whole(path).decode(errors='replace')
        first_difference = difference(actual, expected)
        if first_difference is not None:
            raise ReportError(f'{path} does not match its logs, {first_difference}')
        num_printed += len(PRINT.findall(actual))
    return num_printed


# A block of a Markdown page is text that a function makes from the logs in a directory:
#
#     <!-- headline: ../experiments/results/fair_small -->
#     the text
#     <!-- end -->
#
# This mapping has the function of each name of a block, here 'headline'. It takes the path of the
# directory, and the directory as the page writes it, which links in the text need.
Blocks = Mapping[str, Callable[[Path, str], str]]
HEADLINE: Blocks = {'headline': lambda path, _: tables.headline(load_findings(path))}


def check_page(path: str | Path, blocks: Blocks = HEADLINE, *, write: bool = False) -> int:
    """Checks that the blocks of a Markdown page are what their studies give, or writes them.

    A block is the text between `<!-- headline: DIRECTORY -->` and `<!-- end -->`.

    Args:
        path: The path of the page.
        blocks: The functions that make the text of blocks, by name. Other blocks stay as they are.
        write: Whether to write the page with its blocks made again. Otherwise they are compared
            with the page.

    Returns the number of blocks. Raises ReportError if the page differs and is not to be written.
    The error shows the first line that differs.
    """
    path = Path(path)
    page = read_page(path)
    names = '|'.join(blocks)
    start = rf'<!-- (?P<name>{names}): (?P<directory>\S+) -->\n'
    block = re.compile(rf'(?P<start>{start}).*?(?P<end><!-- end -->)', re.DOTALL)

    def make_again(match: re.Match[str]) -> str:
        """Returns a block with its text made again between the two comments."""
        make_text = blocks[match['name']]
        directory = match['directory']  # relative to the page
        text = make_text(path.parent / directory, directory)
        return match['start'] + text + match['end']

    expected_page, num_blocks = block.subn(make_again, page)
    if write:
        if expected_page != page:
            write_atomic(path, expected_page)
        return num_blocks
    first_difference = difference(page, expected_page)
    if first_difference is not None:
        raise ReportError(f'{path} does not match its studies, {first_difference}')
    return num_blocks


def _ledger_problems(study: TrainedStudy) -> Iterator[str]:
    """Yields a sentence for each way in which a study differs from its ledger.

    The ledger records what the study declared. It also records each look, which is a report on
    results beyond screening, with the digests of the study's files at that time.
    """
    if study.ledger.declaration != study.declaration:
        yield f'study.json is not what the last declaration in {ledger.NAME} says'
    if study.ledger.arms != set(study.arms):
        yield f'study.json has other arms than {ledger.NAME}'

    # Without results beyond screening there was no look to compare with.
    has_results = any(run.stage != SCREENING and run.trials for run in study.runs)
    if not has_results:
        return
    digests_then = study.ledger.looked_files
    digests_now = ledger.file_digests(study.files)
    all_files = {**digests_then, **digests_now}  # then or now; a missing file has no digest
    changed_files = []
    for name in all_files:
        if digests_then.get(name) != digests_now.get(name):
            changed_files.append(name)
    if not changed_files:
        return

    altered_runs = ''
    for run, look in study.altered.items():
        altered_runs += f'run {run} is not what look {look} saw; '
    yield (
        f'{" and ".join(changed_files)} changed since the last look in {ledger.NAME}; '
        f'{altered_runs}restore what was edited, or make the report again where results were added'
    )


def _run_problems(study: TrainedStudy) -> Iterator[str]:
    """Yields a sentence for each way in which a run's results contradict its config or each other.

    The name of a run is the hash of its config. The config describes the trials of the run. A trial
    is one seed with one setting of the hyperparameters, and has one result.
    """
    for run in study.runs:
        if fingerprint_of(run.config) != run.name:
            yield f'run {run.name} of plan.jsonl is not the hash of its config'
        if not run.trials:
            continue
        planned_trials = from_json(TrialsConfig, run.config['trials']).trials()
        if [trial.trial for trial in run.trials] != planned_trials:
            yield f'run {run.name} has results that are not the trials of its config in their order'
            continue
        for trial in run.trials:
            for field, stored, expected in _derived_fields(study, trial):
                if not math.isclose(stored, expected, rel_tol=1e-9, abs_tol=1e-12):
                    yield (
                        f'seed {trial.seed} of run {run.name} has {field} {stored}, '
                        f'which is {expected} by its other fields'
                    )


def _derived_fields(study: TrainedStudy, trial: Trial) -> Iterator[tuple[str, float, float]]:
    """Yields (name, stored value, expected value) of the fields that follow from other fields.

    The number of tokens follows from the number of steps. In a study whose arms match in a quantity
    such as FLOPs, the residual is the relative distance of this quantity from its target.
    """
    run = trial.run
    tokens_per_step = run.config['train']['batch_size'] * run.config['model']['context']
    yield 'num_tokens', trial.num_tokens, trial.num_steps * tokens_per_step

    if study.match is not None and run.target:
        total = trial.parameters['total']
        cost_by_quantity = {
            'total': total,
            'non_embedding': total - trial.parameters['embedding'],
            'flops': trial.flops_per_token,
            'cache': trial.cache_floats_per_token,
        }
        cost = cost_by_quantity[study.match]
        yield 'residual', run.residual, cost / run.target - 1


def near(stored: float, number: float) -> bool:
    """Returns whether `stored` is the rounded form of a number within TOLERANCE of `number`."""
    lowest = number * (1 - TOLERANCE)
    highest = number * (1 + TOLERANCE)
    return stored in (rounded(lowest), rounded(number), rounded(highest))


def close(printed: str, expected: str) -> bool:
    """Returns whether two printed numbers differ by at most one unit in the last decimal.

    Two values that agree in all but the last bits may round apart by one unit: '0.082' and '0.083'
    are close, and so are '< 0.001' and '0.001'. Whole numbers are counts, and must be equal.
    """
    printed_number = Decimal(printed.removeprefix('< '))
    expected_number = Decimal(expected.removeprefix('< '))
    # The power of ten of the last digit: -3 for '0.082', 0 for a count.
    printed_exponent = int(printed_number.as_tuple().exponent)
    expected_exponent = int(expected_number.as_tuple().exponent)
    exponent = min(printed_exponent, expected_exponent)  # that of the more precise number

    are_counts = exponent >= 0
    if are_counts:
        return printed_number == expected_number
    one_unit = Decimal(1).scaleb(exponent)  # 10^exponent: 0.001 for -3
    return abs(printed_number - expected_number) <= one_unit


def difference(actual: str, expected: str, agree: Callable[[str, str], bool] = close) -> str | None:
    """Describes the first difference between two texts, or returns None if the texts agree.

    The description is, for example, "line 3: '0.081', expected '0.085'".

    Args:
        actual: The text to check.
        expected: The text that it is compared with.
        agree: Returns whether two printed numbers agree. Everything else has to be equal.
    """
    actual_lines = actual.splitlines()
    expected_lines = expected.splitlines()
    pairs = zip(actual_lines, expected_lines, strict=False)
    for number, (line, expected_line) in enumerate(pairs, start=1):
        if not _lines_agree(line, expected_line, agree):
            # Lines may be long: show 20 characters before the first difference and 40 after it.
            equal_length = len(os.path.commonprefix([line, expected_line]))
            start = max(equal_length - 20, 0)
            end = equal_length + 40
            return f'line {number}: {line[start:end]!r}, expected {expected_line[start:end]!r}'
    if len(actual_lines) != len(expected_lines):
        return f'it has {len(actual_lines)} lines, expected {len(expected_lines)}'
    return None


def _lines_agree(line: str, expected: str, agree: Callable[[str, str], bool]) -> bool:
    """Returns whether two lines have equal text, and numbers that are equal or `agree`."""
    text = PRINT.sub('0', line)
    expected_text = PRINT.sub('0', expected)
    if text != expected_text:
        return False
    pairs = zip(PRINT.findall(line), PRINT.findall(expected), strict=True)
    return all(number == other or agree(number, other) for number, other in pairs)
