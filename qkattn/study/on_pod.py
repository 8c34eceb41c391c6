"""Memory and FLOPs of a study's runs on a pod, from a dry run on any machine."""

from collections.abc import Sequence

from qkattn.config import Study
from qkattn.jobs.display import waiting
from qkattn.jobs.output import text_table
from qkattn.study.arms import PlannedArm, row_title
from qkattn.study.plan import PlannedRun, fewest_runs
from qkattn.train import dry_run
from qkattn.train.chips import GB


def described_arms(study: Study, arms: Sequence[PlannedArm], topology: str) -> str:
    """Returns a table of memory and FLOPs on a pod, with notes below.

    The table has a row for each model. Its run with the most trials is compiled.

    Args:
        study: The study.
        arms: The arms of the study.
        topology: The name of the pod, such as 'h100-1x8'; see `dry_run.Pod`.

    Raises:
        ConfigError: As in `dry_run.describe`.
    """
    largest_runs = _largest_runs(fewest_runs(study, arms))
    keys = [run.arm.key for run in largest_runs]
    rows: list[list[str]] = []
    arms_by_note: dict[str, list[str]] = {}  # titles of arms
    for run in largest_runs:
        title = row_title(run.arm.key, keys)
        with waiting(study.name, f'compiling {title}'):
            description = dry_run.describe(run.config, topology)
        memory = sum(description.memory.values())  # bytes
        state = description.memory['parameters'] + description.memory['optimizer state']
        milliseconds = 1e3 * description.seconds
        row = [
            title,
            f'{description.trials}',
            f'{description.tokens:,}',
            f'{state / GB:.3g}',
            f'{memory / GB:.3g}',
            f'{memory / description.capacity:.1%}',
            f'{description.flops / 1e12:.3g}',
            f'{milliseconds:.3g}',
        ]
        rows.append(row)
        for note in description.notes:
            arms_by_note.setdefault(note, []).append(title)

    # Pairs (title, whether the column is left-aligned). '|' is a line break.
    columns = [('arm', True)]
    names = ('trials', 'tokens|per step', 'state|GB', 'memory|GB', 'of HBM', 'TFLOP', 'ms at|peak')
    columns += [(name, False) for name in names]
    lines = [text_table(columns, rows), 'state, memory and TFLOP are per device, and of one step']
    for note, arms_with_note in arms_by_note.items():
        is_of_all_arms = len(arms_with_note) == len(rows)
        if not is_of_all_arms:
            note = f'{", ".join(arms_with_note)}: {note}'
        lines.append(note)
    return '\n'.join(lines)


def _largest_runs(planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Returns for each model the run with the most trials."""
    # The model of the arm, because settings that are tuned change neither memory nor FLOPs.
    largest: dict[object, PlannedRun] = {}  # by model
    most_trials: dict[object, int] = {}  # of its largest run, by model
    for run in planned:
        model = run.arm.model
        num_trials = len(run.config.trials.trials())
        if num_trials > most_trials.get(model, 0):
            largest[model] = run
            most_trials[model] = num_trials
    return list(largest.values())
