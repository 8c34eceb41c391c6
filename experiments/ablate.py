"""Runs an ablation at equal cost, alone or with other workers, and writes its report.

python -m experiments.ablate --config=configs/fair_small.py --workdir=runs/fair_small

The same command resumes. Started several times, on one or more machines that share the directory,
each worker trains runs that no other worker holds a lease on.
"""

import math

from absl import flags

from qkattn import report
from qkattn.config import Study
from qkattn.distributed import agreement, bootstrap
from qkattn.errors import ConfigError
from qkattn.run import cli, leases, signals
from qkattn.run.progress import waiting
from qkattn.study import estimate, worker
from qkattn.study.arms import build_arms, table
from qkattn.train.program_cache import keep_programs

CONFIG = cli.define_config(Study)
WORKDIR = flags.DEFINE_string('workdir', None, 'Study directory; the same directory resumes.')
DRY_RUN = flags.DEFINE_bool('dry_run', False, 'Print the plan and its cost, then stop.')
EXPIRY = flags.DEFINE_float(
    'lease_expiry', leases.EXPIRY, 'Seconds without a heartbeat before a worker counts as dead.'
)
ACCEPT_CHANGES = flags.DEFINE_bool(
    'accept_changes', False, 'Continue a study with other settings; its ledger lists them.'
)


@signals.leaving_at_once()
@bootstrap.in_job
def main() -> None:
    keep_programs()
    config = cli.read_config(CONFIG)
    if not 0 < EXPIRY.value < math.inf:
        raise ConfigError(f'--lease_expiry={EXPIRY.value} must be above 0 seconds and finite')
    with waiting(config.name, 'matching parameters'):
        arms = build_arms(config)
    print(f'{config.name}: {len(arms)} arms\n{table(arms, config.match)}', flush=True)
    if DRY_RUN.value:
        print(f'\n{estimate.text(config, arms)}')
        return
    if WORKDIR.value is None:
        raise ConfigError('--workdir=DIRECTORY is required')
    path = worker.run(
        config,
        WORKDIR.value,
        command=cli.command('ablate'),
        expiry=EXPIRY.value,
        accept_changes=ACCEPT_CHANGES.value,
    )
    if not agreement.owner():
        return
    with waiting(config.name, 'writing the report'):
        text = report.show_report(path)
    print(f'\n{text}')


if __name__ == '__main__':
    cli.run(main)
