"""Decides the claims: runs their checks and studies at a scale, and writes the verdicts.

python -m experiments.claims --list
python -m experiments.claims --scale=cpu --workdir=runs/claims --workers=auto    # all; resumes
python -m experiments.claims B2 C1 --scale=cpu --workdir=runs/claims
python -m experiments.claims --scale=gpu --dry_run                               # plan and cost
python -m experiments.claims --notrain --workdir=runs/claims --export=results/claims/cpu
"""

from pathlib import Path

from absl import flags

from qkattn.claims import declared, export, pages, studies
from qkattn.claims.claim import ClaimResult
from qkattn.claims.deciding import decide
from qkattn.claims.protocol import SCALES
from qkattn.claims.studies import Results
from qkattn.errors import ConfigError, ProcessError
from qkattn.jobs import cli, signals
from qkattn.jobs.display import waiting
from qkattn.storage.buckets import is_url
from qkattn.study import local_workers
from qkattn.train.program_cache import keep_programs

CLAIMS = flags.DEFINE_list('claims', None, 'Names of claims, as in B2,C1; all by default.')
LIST = flags.DEFINE_bool('list', False, 'List the claims, then stop.')
SCALE = flags.DEFINE_enum(
    'scale',
    'cpu',
    list(SCALES),
    'smoke: minutes, decides exact claims alone; cpu: hours on two cores; gpu: published sizes.',
)
WORKDIR = flags.DEFINE_string('workdir', None, 'Directory of the studies; the same one resumes.')
WORKERS = flags.DEFINE_string(
    'workers', '1', 'Workers on this machine, a number or auto, as in experiments.ablate.'
)
TRAIN = flags.DEFINE_bool('train', True, '--notrain decides on what the workdir has.')
DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Print the plan and its cost, then stop.')
EXPORT = flags.DEFINE_string(
    'export', None, 'Directory to keep the verdicts on all claims in, with the studies behind them.'
)


@signals.exit_on_signal()
def main() -> None:
    keep_programs()
    if CLAIMS.value == []:
        raise ConfigError('--claims is empty; give names as in B2,C1, or leave it out for all')
    claims = declared.chosen(CLAIMS.value or [])
    workers = local_workers.parse(WORKERS.value)
    if LIST.value:
        for claim in claims:
            print(f'{claim.name:<3} {claim.statement}')
        return
    if DRY_RUN.value:
        print(studies.costs(claims, SCALE.value))
        return
    names, directory = studies.names_of(claims), _directory()
    if WORKDIR.value is None and names:
        needing = ', '.join(claim.name for claim in claims if claim.studies)
        raise ConfigError(
            f'--workdir=DIRECTORY is required for {needing}; claims with checks alone need none'
        )
    if WORKDIR.value is None and EXPORT.value is not None:
        raise ConfigError('--export takes the studies of --workdir=DIRECTORY, which is missing')
    if WORKDIR.value is not None:
        studies.check_workdir(claims, SCALE.value, directory)
        _earlier(directory)
    failed = {}
    if TRAIN.value and names:
        failed = studies.train(claims, SCALE.value, directory, workers)
    studies.report(names, directory)
    results, decided = Results(directory), {}
    for claim in claims:
        with waiting(claim.name, 'deciding'):
            decided[claim.name] = decide(claim, SCALE.value, results)
        print(_text(decided[claim.name]), flush=True)
    if names:
        lacking = [name for name in names if not results.has(name)]
        there = f'{len(names) - len(lacking)} of {len(names)} studies have results'
        print(f'\n{there}' + (f'; none: {", ".join(lacking)}' if lacking else ''))
    if WORKDIR.value is not None:
        # Beside the claims of earlier commands.
        known = {claim.name: claim for claim in _earlier(directory)} | decided
        every = [known[name] for name in sorted(known)]
        print(f'verdicts: {export.write(directory, export.CLAIMS, every)}')
        if EXPORT.value is not None:
            for name, claim in declared.claims().items():
                decided[name] = decided.get(name) or decide(claim, SCALE.value, results)
            export.export([decided[name] for name in declared.claims()], results, EXPORT.value)
            print(f'exported to {pages.write_page(EXPORT.value)}')
    if failed:
        reasons = '; '.join(f'{name}: {reason}' for name, reason in failed.items())
        crashed = any(isinstance(reason, ProcessError) for reason in failed.values())
        raise (ProcessError if crashed else ConfigError)(
            f'{len(failed)} of {len(names)} studies could not be trained: {reasons}'
        )


def _directory() -> Path:
    """The workdir, which --notrain needs to exist; ConfigError for one that claims cannot use."""
    if WORKDIR.value is None:
        return Path()
    if is_url(WORKDIR.value):
        raise ConfigError(
            f'workdir={WORKDIR.value} is in a bucket; claims need a directory of a file system'
        )
    directory = Path(WORKDIR.value)
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f'workdir={directory} is a file; give a directory')
    if not TRAIN.value and not directory.exists():
        raise ConfigError(f'workdir={directory} does not exist, and --notrain trains nothing')
    return directory


def _earlier(directory: Path) -> list[ClaimResult]:
    """The claims of earlier commands on a workdir; ConfigError if they are of another scale."""
    if not (directory / export.CLAIMS).exists():
        return []
    advice = 'move it away: the studies beside it decide the claims again'
    earlier = list(export.read_claims(directory, advice))
    for claim in earlier:
        if claim.scale != SCALE.value:
            raise ConfigError(
                f'workdir={directory} holds claims at scale {claim.scale}; give another workdir, '
                f'or --scale={claim.scale}'
            )
    return earlier


def _text(claim: ClaimResult) -> str:
    """A claim with its verdict and the conditions of the verdict, line by line."""
    lines = [f'{claim.name:<3} {claim.verdict:<14} {claim.statement}', pages.decisive(claim)]
    lines += [f'holds for {claim.condition}'] if claim.condition else []
    lines += [f'would be decided by {claim.needed}'] if claim.needed else []
    return '\n      '.join(filter(None, [*lines, *claim.missing]))


if __name__ == '__main__':
    cli.run(main, positional=CLAIMS)
