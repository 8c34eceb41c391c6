"""Runs an ablation at equal cost, alone or with other workers, and writes its report.

python -m experiments.ablate --config=fair_small --dry_run  # plan and cost
python -m experiments.ablate --config=fair_small --dry_run --measure  # time
python -m experiments.ablate --config=fair_small --workdir=runs/fair_small

The same command resumes. Started several times, on one or more machines that share the directory,
each worker trains runs that no other worker holds a lease on.
"""

import importlib
import logging

from absl import flags

from qkattn.config import Study
from qkattn.errors import ConfigError
from qkattn.jobs import agreement, bootstrap, cli, signals
from qkattn.jobs.display import waiting
from qkattn.storage.files import check_directory
from qkattn.storage.run_directory import git_state
from qkattn.study import local_workers, plan, worker, yardsticks
from qkattn.study.arms import PlannedArm, build_arms, table
from qkattn.study.on_pod import described_arms
from qkattn.train.dry_run import Pod
from qkattn.train.program_cache import keep_programs

log = logging.getLogger('qkattn.ablate')

CONFIG = cli.define_config(Study)
WORKDIR = cli.define_path('workdir', None, 'Study directory; the same directory resumes.')
DRY_RUN = cli.define_dry_run(
    'Only print arms, runs, trials, tokens and FLOPs of the plan; compiles nothing.'
)
MEASURE = flags.DEFINE_bool(
    'measure', False, 'With --dry_run, also time a few steps of each size on this machine.'
)
WORKERS = flags.DEFINE_string(
    'workers',
    '1',
    'Workers on this machine, each with its own cores or GPUs: a number, or auto for one per mesh '
    'of GPUs, or else per core, as far as memory allows. 1 is this process itself.',
)


@signals.exit_on_signal(cli.is_dry_run)
@bootstrap.in_job
def main() -> None:
    """Trains the arms of a study and writes its report; with --dry_run, only prints the plan."""
    keep_programs()
    config = cli.read_config(CONFIG)
    workers = local_workers.parse(WORKERS.value)
    if workers != 1 and bootstrap.start().num_processes > 1:
        raise ConfigError(
            f'--workers={WORKERS.value} is for a single process; in a job of several, all '
            'processes form one worker, and launchers start more'
        )
    is_dry_run_without_pod = DRY_RUN.value == cli.COUNT
    if MEASURE.value and not is_dry_run_without_pod:
        raise ConfigError('--measure needs --dry_run without a pod')
    if DRY_RUN.value is not None:
        _dry_run(config)
        return
    workdir = cli.required(WORKDIR)
    arms = _build_and_print_arms(config)
    print(f'\n{plan.estimate(config, arms)}', flush=True)
    path = local_workers.run(config, workdir, arms, workers)
    if not agreement.is_process_0():
        return
    is_tuned = bool(config.tuning.seeds)
    if is_tuned:
        # Verdicts need them, and only a tuned study has verdicts.
        yardsticks.record_finished(path)
    with waiting(config.name, 'writing the report'):
        # Imported here, because workers do not need matplotlib and pandas.
        report = importlib.import_module('qkattn.report')
        text = report.show_report(path)
    print(f'\n{text}')


def _dry_run(config: Study) -> None:
    """Checks a study, then prints its arms and what they cost.

    Without a pod, the cost is in trials, tokens and FLOPs; for a pod, in time and memory.
    """
    pod = None if DRY_RUN.value == cli.COUNT else DRY_RUN.value
    if pod is not None:
        Pod(pod)  # raises ConfigError for an unknown pod
    arms = _build_and_print_arms(config)
    path = None
    if WORKDIR.value is not None:
        path = check_directory(cli.required(WORKDIR))
    warnings = worker.check_start(config, arms, path)
    if pod is not None:
        # The text includes the warnings.
        print(f'\n{described_arms(config, arms, pod)}')
        return
    print(f'\n{plan.estimate(config, arms, measure=MEASURE.value)}')
    for warning in warnings:
        print(f'WARNING {warning}')


def _build_and_print_arms(config: Study) -> list[PlannedArm]:
    """Builds the arms of a study and prints them; warns if uncommitted files withhold verdicts."""
    with waiting(config.name, 'matching parameters'):
        arms = build_arms(config)
    num_arms = '1 arm' if len(arms) == 1 else f'{len(arms)} arms'
    print(f'{config.name}: {num_arms}\n{table(arms, config.match)}', flush=True)
    is_tuned = bool(config.tuning.seeds)  # otherwise the study has no verdicts
    if is_tuned and git_state()['dirty']:
        log.warning('files are changed or untracked, which withholds verdicts: commit them first')
    return arms


if __name__ == '__main__':
    cli.run(main)
