"""Checks that reports and pages match the logs of their studies.

These files are checked:

    study.json, plan.jsonl, results.jsonl, documents.json
                               by the hashes in ledger.jsonl
    plan.jsonl                 a run's name is the hash of its config
    results.jsonl              a run's trials are those of its config, and derived fields follow
                               from other fields; `experiments.verify` counts costs again
    table.md, table.csv, headlines of pages
                               made again from results.jsonl
    claims.json                decided again from results.jsonl by `experiments.claims`
    other blocks of pages      made again from claims.json
    numbers in sentences       made again from logs by `printed_numbers`

`load_study` compares results with metrics.jsonl, and losses with documents.json.

Hashes, results, counts, texts and verdicts have to be equal. Derived numbers have a tolerance,
because processors and numpy versions differ in the last bits of exp, log and sums. A number of
claims.json may differ by TOLERANCE (`near`), and a printed number by one unit in its last decimal
(`close`).
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

# The largest relative difference of derived numbers.
TOLERANCE = 1e-6
# Printed numbers: '8', '+0.0500', '1.5e-07', '< 0.001'.
PRINT = re.compile(r'(?:< )?[-+]?\d+(?:\.\d+)?(?:e[-+]?\d+)?')


def check_study(directory: str | Path) -> int:
    """Checks a study's report against its logs.

    Returns:
        The number of printed numbers.

    Raises:
        ReportError: The report differs. The message shows the first difference.
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


# Functions that make the text of blocks, by block name. A block of a Markdown page is
#
#     <!-- headline: ../experiments/results/fair_small -->
#     the text
#     <!-- end -->
#
# A function gets the directory twice: as a path, and as the page writes it, for links.
Blocks = Mapping[str, Callable[[Path, str], str]]
HEADLINE: Blocks = {'headline': lambda path, _: tables.headline(load_findings(path))}


def check_page(path: str | Path, blocks: Blocks = HEADLINE, *, write: bool = False) -> int:
    """Checks or writes the generated blocks of a Markdown page.

    A block is the text between `<!-- headline: DIRECTORY -->` and `<!-- end -->`.

    Args:
        path: The path of the page.
        blocks: The functions that make the text of blocks, by block name. Other blocks are ignored.
        write: Whether to write the blocks to the page instead of checking them.

    Returns:
        The number of blocks.

    Raises:
        ReportError: A block has no end, or is checked and differs. The message shows the first
            difference.
    """
    path = Path(path)
    page = read_page(path)
    block = _block_pattern(path, page, blocks)

    def regenerate(match: re.Match[str]) -> str:
        """Returns a block with new text between its two comments."""
        make_text = blocks[match['name']]
        directory = match['directory']  # relative to the page
        text = make_text(path.parent / directory, directory)
        return match['start'] + text + match['end']

    expected_page, num_blocks = block.subn(regenerate, page)
    if write:
        if expected_page != page:
            write_atomic(path, expected_page)
        return num_blocks
    first_difference = difference(page, expected_page)
    if first_difference is not None:
        raise ReportError(f'{path} does not match its studies, {first_difference}')
    return num_blocks


def _block_pattern(path: Path, page: str, blocks: Blocks) -> re.Pattern[str]:
    """Returns a regular expression that matches each block of a page, with its two comments.

    Its groups are `start` and `end`, the comments, and `name` and `directory` of the first.

    Args:
        path: The path of the page, for the error message.
        page: The text of the page.
        blocks: The valid names of blocks.

    Raises:
        ReportError: A block has no end.
    """
    names = '|'.join(blocks)
    start = rf'<!-- (?P<name>{names}): (?P<directory>\S+) -->\n'
    text = r'(?:(?!<!--).)*'  # without another comment
    block = re.compile(rf'(?P<start>{start}){text}(?P<end><!-- end -->)', re.DOTALL)

    starts_of_blocks = {match.start() for match in block.finditer(page)}
    for match in re.finditer(start, page):
        if match.start() not in starts_of_blocks:
            raise ReportError(
                f'{path}: the block {match["name"]}: {match["directory"]} has no <!-- end --> '
                'before the next comment; add it'
            )
    return block


def _ledger_problems(study: TrainedStudy) -> Iterator[str]:
    """Yields a sentence for each difference of a study from its ledger."""
    if study.ledger.declaration != study.declaration:
        yield f'study.json is not what the last declaration in {ledger.NAME} says'
    if study.ledger.arms != set(study.arms):
        yield f'study.json has other arms than {ledger.NAME}'

    # A ledger records file digests at each look, a report on results beyond screening.
    has_results = any(run.stage != SCREENING and run.trials for run in study.runs)
    if not has_results:
        return
    recorded_digests = study.ledger.looked_files  # by file name
    actual_digests = ledger.file_digests(study.files)
    changed_files = []
    for name in {**recorded_digests, **actual_digests}:
        if recorded_digests.get(name) != actual_digests.get(name):
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
    """Yields a sentence for each run name or result that contradicts the run's config.

    A run has several trials, such as seeds.
    """
    for run in study.runs:
        if fingerprint_of(run.config) != run.name:
            yield f'run {run.name} of plan.jsonl is not the hash of its config'
        if not run.trials:
            continue
        # Seed, learning rate and weight decay of each trial.
        planned_trials = from_json(TrialsConfig, run.config['trials']).trials()
        finished_trials = [trial.trial for trial in run.trials]
        if finished_trials != planned_trials:
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
    """Yields (name, stored value, expected value) of fields that follow from other fields.

    If arms have the cost of the baseline, `study.match` is the kind of cost, `run.target` is the
    baseline's cost, and `run.residual` is the relative deviation of the arm's cost.
    """
    run = trial.run
    tokens_per_step = run.config['train']['batch_size'] * run.config['model']['context']
    expected_tokens = trial.num_steps * tokens_per_step
    yield 'num_tokens', trial.num_tokens, expected_tokens

    has_matched_arms = study.match is not None
    if has_matched_arms and run.target:
        total = trial.parameters['total']
        cost_by_kind = {
            'total': total,
            'non_embedding': total - trial.parameters['embedding'],
            'flops': trial.flops_per_token,
            'cache': trial.cache_floats_per_token,
        }
        cost = cost_by_kind[study.match]
        expected_residual = cost / run.target - 1
        yield 'residual', run.residual, expected_residual


def near(stored: float, number: float) -> bool:
    """Returns whether a stored number is `number`, up to TOLERANCE and rounding."""
    smaller = number * (1 - TOLERANCE)
    larger = number * (1 + TOLERANCE)
    return stored in (rounded(smaller), rounded(number), rounded(larger))


def close(printed: str, expected: str) -> bool:
    """Returns whether two printed numbers differ by at most one unit in the last decimal.

    For example, '0.082' and '0.083' are close, and so are '< 0.001' and '0.001'. Whole numbers have
    to be equal.
    """
    printed_number = Decimal(printed.removeprefix('< '))
    expected_number = Decimal(expected.removeprefix('< '))
    # The exponent of the last digit: -3 for '0.082', 0 for '82'.
    printed_exponent = int(printed_number.as_tuple().exponent)
    expected_exponent = int(expected_number.as_tuple().exponent)
    exponent = min(printed_exponent, expected_exponent)

    are_whole = exponent >= 0
    if are_whole:
        return printed_number == expected_number
    last_decimal = Decimal(1).scaleb(exponent)  # 10^exponent
    return abs(printed_number - expected_number) <= last_decimal


def difference(actual: str, expected: str, agree: Callable[[str, str], bool] = close) -> str | None:
    """Describes the first difference between two texts.

    Args:
        actual: The text to check.
        expected: The expected text.
        agree: A function of two printed numbers that returns whether they agree. Everything else
            has to be equal.

    Returns:
        A description such as "line 3: '0.081', expected '0.085'"; None if the texts agree.
    """
    actual_lines = actual.splitlines()
    expected_lines = expected.splitlines()
    pairs = zip(actual_lines, expected_lines, strict=False)
    for line_number, (line, expected_line) in enumerate(pairs, start=1):
        if not _lines_agree(line, expected_line, agree):
            # Show only the part of the line around the first difference.
            equal_length = len(os.path.commonprefix([line, expected_line]))
            start = max(equal_length - 20, 0)
            end = equal_length + 40
            return f'line {line_number}: {line[start:end]!r}, expected {expected_line[start:end]!r}'
    if len(actual_lines) != len(expected_lines):
        return f'it has {len(actual_lines)} lines, expected {len(expected_lines)}'
    return None


def _lines_agree(line: str, expected_line: str, agree: Callable[[str, str], bool]) -> bool:
    """Returns whether two lines have the same text, with numbers that are equal or `agree`."""
    text = PRINT.sub('0', line)
    expected_text = PRINT.sub('0', expected_line)
    if text != expected_text:
        return False
    numbers = PRINT.findall(line)
    expected_numbers = PRINT.findall(expected_line)
    for number, expected_number in zip(numbers, expected_numbers, strict=True):
        if number != expected_number and not agree(number, expected_number):
            return False
    return True
