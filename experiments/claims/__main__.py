"""Decides the claims: runs their checks and studies at a scale, and writes the verdicts.

python -m experiments.claims --list
python -m experiments.claims --scale=cpu --workdir=runs/claims  # all; resumes
python -m experiments.claims B2 C1 --scale=cpu --workdir=runs/claims
python -m experiments.claims --scale=gpu --dry_run  # plan and cost
python -m experiments.claims --notrain --workdir=runs/claims --export=claims_cpu
"""

from collections.abc import Container, Iterable
from pathlib import Path

from absl import flags

from experiments.claims import declared, export, pages, studies
from experiments.claims.claim import Claim, ClaimResult
from experiments.claims.deciding import decide
from experiments.claims.protocol import SCALES
from experiments.claims.studies import Results
from qkattn.errors import ConfigError
from qkattn.jobs import cli, signals
from qkattn.jobs.display import waiting
from qkattn.storage.buckets import is_url
from qkattn.storage.files import as_path, check_directory
from qkattn.study import local_workers
from qkattn.train.program_cache import keep_programs

CLAIMS = flags.DEFINE_list('claims', None, 'Names of claims, as in B2,C1; all by default.')
LIST = flags.DEFINE_bool('list', False, 'List the claims, then stop.')
SCALE = flags.DEFINE_enum(
    'scale',
    'cpu',
    list(SCALES),
    'smoke: minutes, decides exact claims only; cpu: days on two cores; gpu: published sizes.',
)
WORKDIR = cli.define_path('workdir', None, 'Directory of the studies; the same one resumes.')
WORKERS = flags.DEFINE_string(
    'workers', '1', 'Workers on this machine, a number or auto, as in experiments.ablate.'
)
TRAIN = flags.DEFINE_bool('train', True, '--notrain decides on what the workdir has.')
DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Print the plan and its cost, then stop.')
EXPORT = cli.define_path(
    'export',
    None,
    'Directory to export the verdicts on all claims to, with the studies behind them.',
)


@signals.exit_on_signal(cli.is_dry_run)
def main() -> None:
    """Trains the studies of claims, then decides the claims; flags leave out steps."""
    keep_programs()
    claims = _chosen_claims()
    workers = local_workers.parse(WORKERS.value)
    if LIST.value:
        for claim in claims:
            print(f'{claim.name:<3} {claim.statement}')
        return

    configs = studies.studies_of(claims, SCALE.value)
    if DRY_RUN.value:
        print(studies.costs(configs))
        return
    directory = _directory_of_studies()
    studies.check_workdir(configs, SCALE.value, directory)
    _check_studies_exist(claims, configs, directory)
    if TRAIN.value:
        if configs:
            print(studies.costs(configs), flush=True)
        studies.train(configs, SCALE.value, directory, workers)
    studies.report(claims, directory)

    results = Results(directory)
    decided = _decide_and_print(claims, results)
    if EXPORT.value is not None:
        export.export(decided, results, EXPORT.value)
        page = pages.write_page(EXPORT.value)
        print(f'exported to {page}')


def _chosen_claims() -> list[Claim]:
    """Returns the claims that --claims names; all without the flag.

    Raises:
        ConfigError: --claims is empty or has an unknown name, or --export does not fit.
    """
    names = CLAIMS.value  # None without the flag
    if names is not None and not names:
        raise ConfigError('--claims is empty; give names as in B2,C1, or leave it out for all')
    if EXPORT.value:
        if names:
            raise ConfigError(f'--export={EXPORT.value} exports all claims; leave out their names')
        check_directory(EXPORT.value, name='--export')
    return declared.chosen(names or [])


def _decide_and_print(claims: Iterable[Claim], results: Results) -> list[ClaimResult]:
    """Decides claims from the results of their studies, and prints each one once it is decided."""
    decided = []
    for claim in claims:
        with waiting(claim.name, 'deciding'):
            result = decide(claim, SCALE.value, results)
        print(_text(result), flush=True)
        decided.append(result)
    return decided


def _directory_of_studies() -> Path:
    """Returns --workdir, which must be on a file system, and must exist with --notrain."""
    workdir = cli.required(WORKDIR)
    if is_url(workdir):
        raise ConfigError(f'workdir={workdir} is in a bucket; claims need one on a file system')
    directory = as_path(workdir)
    if not TRAIN.value and not directory.is_dir():
        raise ConfigError(f'workdir={workdir} is not a directory, and --notrain trains nothing')
    return directory


def _check_studies_exist(claims: Iterable[Claim], configs: Container[str], directory: Path) -> None:
    """Raises ConfigError if a study has neither a config nor a subdirectory of `directory`."""
    for claim in claims:
        for name in claim.studies:
            if name in configs or (directory / name).is_dir():
                continue
            trained = sorted(file.parent.name for file in directory.glob('*/study.json'))
            raise ConfigError(
                f'claim {claim.name}: configs/claims has no study {name!r}, and {directory} '
                f'has only {", ".join(trained) or "no study"} of experiments.ablate'
            )


def _text(claim: ClaimResult) -> str:
    """Formats a claim: a line with its verdict, then an indented line for each reason."""
    lines = [f'{claim.name:<3} {claim.verdict:<14} {claim.statement}']
    evidence = pages.decisive(claim)
    if evidence:
        lines.append(evidence)
    if claim.condition:
        lines.append(f'only if {claim.condition}')
    if claim.meaning:
        lines.append(f'means: {claim.meaning}')
    if claim.needed:
        lines.append(f'needs {claim.needed}')
    lines.extend(claim.missing)
    return '\n      '.join(lines)


if __name__ == '__main__':
    cli.run(main, positional=CLAIMS)
