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

TOLERANCE = 1e-6  # relative, of derived numbers

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
        if place := difference(actual, text):
            raise ReportError(f'{path} does not match its logs, {place}')
        count += len(PRINT.findall(actual))
    return count


# The text between `<!-- NAME: DIRECTORY -->` and `<!-- end -->` in a Markdown page, of the
# directory and of its path as written; by name.
Blocks = Mapping[str, Callable[[Path, str], str]]
HEADLINE: Blocks = {'headline': lambda path, _: tables.headline(load_findings(path))}


def check_page(path: str | Path, blocks: Blocks = HEADLINE, *, write: bool = False) -> int:
    """Checks the blocks of results in a Markdown page and returns how many there are.

    `write` replaces blocks by what their directories give; else ReportError names one that its
    directory does not give.
    """
    text = read_page(path := Path(path))
    marks = rf'<!-- ({"|".join(blocks)}): (\S+) -->\n'
    block = re.compile(rf'({marks})(.*?)(<!-- end -->)', re.DOTALL)

    def made(match: re.Match[str]) -> str:
        start, name, directory, _, end = match.groups()
        return start + blocks[name](path.parent / directory, directory) + end

    expected = block.sub(made, text)
    if write and expected != text:
        write_atomic(path, expected)
    elif place := difference(text, expected):
        raise ReportError(f'{path} does not match its studies, {place}')
    return len(block.findall(text))


def _ledger_problems(study: TrainedStudy) -> Iterator[str]:
    """Declarations that are not in the ledger, and files that changed since a look."""
    if study.ledger.declaration != study.declaration:
        yield f'study.json is not what the last declaration in {ledger.NAME} says'
    if study.ledger.arms != set(study.arms):
        yield f'study.json has other arms than {ledger.NAME}'
    judged = any(run.stage != SCREENING and run.trials for run in study.runs)
    looked = study.ledger.looked_files
    files = ledger.digests(study.files)
    unlike = [name for name in {**looked, **files} if looked.get(name) != files.get(name)]
    if judged and unlike:
        altered = [f'run {run} is not what look {n} saw; ' for run, n in study.altered.items()]
        yield (
            f'{" and ".join(unlike)} changed since the last look in {ledger.NAME}; '
            f'{"".join(altered)}restore what was edited, or make the report again where results '
            'were added'
        )


def _run_problems(study: TrainedStudy) -> Iterator[str]:
    """Runs whose results are not those of their plan or of each other."""
    for run in study.runs:
        if fingerprint_of(run.config) != run.name:
            yield f'run {run.name} of plan.jsonl is not the hash of its config'
        if not run.trials:
            continue
        trials = [trial.trial for trial in run.trials]
        if trials != from_json(TrialsConfig, run.config['trials']).trials():
            yield f'run {run.name} has results that are not the trials of its config in their order'
            continue
        for trial in run.trials:
            for name, number, expected in _derived(study, trial):
                if not math.isclose(number, expected, rel_tol=1e-9, abs_tol=1e-12):
                    about = f'seed {trial.seed} of run {run.name} has {name} {number}'
                    yield f'{about}, which is {expected} by its other fields'


def _derived(study: TrainedStudy, trial: Trial) -> Iterator[tuple[str, float, float]]:
    """Names and numbers of a result, and those that its other fields and its config give."""
    total = trial.parameters['total']
    run = trial.run
    tokens = run.config['train']['batch_size'] * run.config['model']['context']  # of a step
    yield 'num_tokens', trial.num_tokens, trial.num_steps * tokens
    if study.match is not None and run.target:
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


def close(one: str, other: str) -> bool:
    """Whether two prints of a number differ by one in the last decimal at most; counts not at all.

    So far goes what rounds in another way, as '0.082' and '0.083', or '< 0.001' and '0.001'.
    """
    a, b = (Decimal(text.removeprefix('< ')) for text in (one, other))
    last = min(int(x.as_tuple().exponent) for x in (a, b))
    return abs(a - b) <= (Decimal(1).scaleb(last) if last < 0 else 0)


def difference(actual: str, expected: str, agree: Callable[[str, str], bool] = close) -> str | None:
    """'line 3: 'a', expected 'b'', or None if texts are equal, and numbers are or `agree`."""
    lines = actual.splitlines()
    others = expected.splitlines()
    for number, (line, other) in enumerate(zip(lines, others, strict=False), start=1):
        prints = zip(PRINT.findall(line), PRINT.findall(other), strict=False)
        if PRINT.sub('0', line) != PRINT.sub('0', other) or not all(
            one == two or agree(one, two) for one, two in prints
        ):
            at = len(os.path.commonprefix([line, other]))
            part = slice(max(at - 20, 0), at + 40)
            return f'line {number}: {line[part]!r}, expected {other[part]!r}'
    if len(lines) != len(others):
        return f'it has {len(lines)} lines, expected {len(others)}'
    return None
