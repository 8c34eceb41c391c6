"""Checks that reports and pages print what the logs of their studies give.

The chain from a log to a printed number:

    ledger.jsonl -> study.json, plan.jsonl, results.jsonl, documents.json    by their hashes
    plan.jsonl     a run's name is the hash of its config, its trials are the config's, in order
    results.jsonl  tokens and residual follow from the other fields, parameter counts, FLOPs and
                   the cache from the config (which `experiments.verify` counts again)
    results.jsonl -> table.md, table.csv, a page's headline                  made again
    results.jsonl -> claims.json                             decided again (experiments.claims)
    claims.json -> the blocks of pages                                       made again
    logs -> sentences of pages, by docs/numbers.toml, see `check_numbers`    made again

`load_study` compares results with the last evaluation and the final record of metrics.jsonl, and
losses with the sums of documents.json. A stored study has the files of the first lines in a zip
archive (`qkattn.study.stored`).

What a run logged, and what only copies or counts it, is compared exactly: hashes, results, counts,
texts and verdicts. Derived numbers are not the same everywhere: processors and versions of numpy
round exp, log and sums differently, and a fit carries the last bits to the ninth digit. So a number
of claims.json agrees with the one made again, x, if one within TOLERANCE of x is stored like that
(`near`), and a printed one if it is one apart in its last decimal (`close`).
"""

import ast
import itertools
import math
import os
import re
import tomllib
from collections.abc import Callable, Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import pandas as pd

from qkattn.config import TrialsConfig, fingerprint_of, from_json
from qkattn.errors import ReportError
from qkattn.report import tables
from qkattn.report.prose import one_line, rounded
from qkattn.storage import ledger
from qkattn.storage.files import read_whole, write_atomic
from qkattn.storage.records import parse_json
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
    text = _page(path := Path(path))
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


# What numbers.toml says of a sentence: its page, its text, and where the text is from.
ENTRIES = {'logged': ('page', 'text', 'log'), 'external': ('page', 'text', 'source')}


def check_numbers(path: str | Path) -> dict[str, int]:
    """Checks the sentences of a numbers.toml; returns how many there are of each kind.

        [[logged]]
        page = "docs/recipes.md"
        log = "experiments/results/char_lm_cpu/result.json"
        text = "**{log[0][val_loss]:.4f}** nats"      # a format string of the parsed log

        [[external]]
        page = "docs/recipes.md"
        text = "1.88 nats/character"
        source = "https://github.com/karpathy/nanoGPT"

    A page has to contain the text, whatever its line breaks. A log is JSON, JSON Lines (a list), or
    CSV: rows by their first column, or a list where that names several rows alike. A percentage is
    written with a space. Of a Python file only the docstring is a page. ReportError if an entry is
    malformed, or its page does not contain it.
    """
    path = Path(path)
    root = path.parents[1]
    try:
        content = tomllib.loads(read_whole(path).decode())
    except (OSError, ValueError) as error:
        raise ReportError(f'{path} cannot be read: {error}') from error
    for kind, entries in content.items():
        for number, entry in enumerate(entries, start=1):
            where = f'{path}, [[{kind}]] entry {number}'
            if sorted(entry) != sorted(ENTRIES.get(kind, ())):
                valid = [f'[[{kind}]] of {", ".join(names)}' for kind, names in ENTRIES.items()]
                raise ReportError(f'{where} has {", ".join(entry)}; valid: {" and ".join(valid)}')
            page, text, source = (entry[name] for name in ENTRIES[kind])
            try:
                text = text.format(log=_log(root / source)) if kind == 'logged' else text
            except (OSError, ValueError, LookupError, TypeError) as error:
                about = f'cannot be made from {source} ({error!r}); correct the entry'
                raise ReportError(f'{where} {about}') from error
            text = one_line(re.sub(r'(?<=\d)%', ' %', text))
            if text not in one_line(_page(root / page)):
                raise ReportError(
                    f'{page} does not contain {text!r}, which is what {source} gives; correct the '
                    f'page, or {where}'
                )
    return {kind: len(content.get(kind, ())) for kind in ENTRIES}


def _log(path: Path) -> Any:
    text = read_whole(path).decode()
    if path.suffix == '.jsonl':
        return [parse_json(line) for line in text.splitlines()]
    if path.suffix != '.csv':
        return parse_json(text)
    table = pd.read_csv(path)
    names = table[table.columns[0]]
    rows = table.to_dict('records')
    return dict(zip(names, rows, strict=True)) if names.is_unique else rows


def _page(path: Path) -> str:
    try:
        text = read_whole(path).decode()
        return ast.get_docstring(ast.parse(text)) or '' if path.suffix == '.py' else text
    except (OSError, ValueError, SyntaxError) as error:
        raise ReportError(f'page {str(path)!r} cannot be read: {error}.') from error


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
