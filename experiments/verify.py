"""Checks the numbers of committed reports and pages against the logs.

python -m experiments.verify          # all studies under experiments/results
python -m experiments.verify --write  # writes blocks of results into pages
"""

import functools
from pathlib import Path
from typing import Any

from absl import flags

from experiments.benchmark import record
from experiments.claims import export
from experiments.claims.pages import BLOCKS
from qkattn.config import Config, ModelConfig, from_json
from qkattn.errors import ConfigError, ReportError, SpecError
from qkattn.jobs import cli
from qkattn.model import cost
from qkattn.report import ledger_history, printed_numbers, verify
from qkattn.report.prose import counted
from qkattn.storage.files import as_path
from qkattn.verdict import load_findings

ROOT = Path(__file__).parents[1]

COMMITTED = ROOT / 'experiments/results'  # not part of an installation
RESULTS = cli.define_path(
    'results',
    str(COMMITTED) if COMMITTED.is_dir() else None,
    'Directory of study directories; by default the committed ones.',
)
PAGES = cli.define_paths(
    'pages',
    [str(path) for path in (*ROOT.glob('README.md'), *sorted((ROOT / 'docs').glob('*.md')))],
    'Markdown pages, at least one of them with a block of results; --pages= checks none.',
)
WRITE = flags.DEFINE_bool('write', False, 'Write the blocks of results before checking them.')
OF_PAGES = {**verify.HEADLINE, **BLOCKS, 'benchmark': record.block}


@functools.cache
def _costs(model: ModelConfig) -> dict[str, Any]:
    """Computes the costs of a model, by the names of their fields in results."""
    return {
        'parameters': cost.count(model),
        'flops_per_token': cost.flops_per_token(model),
        'cache_floats_per_token': cost.cache_floats_per_token(model),
    }


def check_costs(directory: Path) -> int:
    """Recomputes parameters, FLOPs and cache size of every run.

    Returns:
        The number of runs.

    Raises:
        ReportError: A result has other numbers.
    """
    study = load_findings(directory).study
    runs = [run for run in study.runs if run.trials]
    for run in runs:
        try:
            config = from_json(Config, run.config)
            cost_by_name = _costs(config.model)
        except (ConfigError, SpecError) as error:
            raise ReportError(f'{directory}: run {run.name}: {error}') from error
        for name, expected in cost_by_name.items():
            for trial in run.trials:
                recorded = getattr(trial, name)
                if recorded != expected:
                    raise ReportError(
                        f'{directory}: seed {trial.seed} of run {run.name} has {name} '
                        f'{recorded}, but its config gives {expected}'
                    )
    return len(runs)


def main() -> None:
    """Checks studies, claims and pages against the logs; with --write, writes pages before."""
    for page in PAGES.value:
        if not Path(page).is_file():
            raise ConfigError(f'--pages: {page!r} is not a file')
    if RESULTS.value is None:
        raise ConfigError('--results=DIRECTORY is required: an installation has no results')
    if WRITE.value:
        num_blocks = sum(verify.check_page(page, OF_PAGES, write=True) for page in PAGES.value)
        print(f'{counted(num_blocks, "block")} of results written')
    results = as_path(RESULTS.value)
    _check_studies(results)
    print(ledger_history.check_ledgers(results))
    for path in sorted(results.glob(f'claims/*/{export.CLAIMS}')):
        num_rows = export.check(path.parent)
        print(
            f'claims at {path.parent.name} scale: {counted(num_rows, "row")} of {path.name} agree '
            'with the studies and the checks'
        )
    if PAGES.value:
        _check_pages(PAGES.value)


def _check_studies(results: Path) -> None:
    """Checks the numbers and costs of all studies below a directory; prints their counts."""
    study_files = sorted([*results.glob('*/study.json'), *results.glob('claims/*/*/study.json')])
    if not study_files:
        raise ReportError(f'--results={RESULTS.value} contains no study directory')
    for study_file in study_files:
        study = study_file.parent
        num_runs = check_costs(study)
        num_numbers = verify.check_study(study)
        print(
            f'{study.name}: {num_numbers:,} numbers agree with the logs, the costs of '
            f'{counted(num_runs, "run")} with the configs'
        )


def _check_pages(pages: list[str]) -> None:
    """Checks the result blocks of pages, and docs/numbers.toml; prints the counts."""
    num_blocks_by_page = {page: verify.check_page(page, OF_PAGES) for page in pages}
    if sum(num_blocks_by_page.values()) == 0:
        raise ReportError(f'--pages={",".join(num_blocks_by_page)} contain no block of results')
    for page, num_blocks in num_blocks_by_page.items():
        if num_blocks:
            print(f'{Path(page).name}: {counted(num_blocks, "block")} checked against the results')
    num_by_kind = printed_numbers.check_numbers(ROOT / 'docs/numbers.toml')
    num_checked = num_by_kind['logged'] + num_by_kind['decided']
    print(
        f'numbers.toml: {counted(num_checked, "sentence")} checked against logs and code, '
        f'{num_by_kind["external"]} with a source elsewhere, {num_by_kind["stated"]} with a reason'
    )


if __name__ == '__main__':
    cli.run(main)
