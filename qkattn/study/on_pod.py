"""What the runs of a study take of a pod: a dry run of each model, on any machine."""

from collections.abc import Sequence

from qkattn.config import Study
from qkattn.jobs.display import waiting
from qkattn.jobs.output import text_table
from qkattn.study.arms import PlannedArm, row_title
from qkattn.study.plan import PlannedRun, fewest_runs
from qkattn.train import dry_run
from qkattn.train.chips import GB


def described_arms(study: Study, arms: Sequence[PlannedArm], topology: str) -> str:
    """Returns a table of memory and FLOPs on a pod, with a row for each model of a study.

    Of each model, the run with the most trials is compiled. Notes on the programs and warnings
    follow the table. Raises ConfigError as `dry_run.describe` does.

    Args:
      study: the study.
      arms: its arms.
      topology: the name of the pod, such as 'h100-1x8'; see `dry_run.Pod`.
    """
    largest_runs = _largest_runs(fewest_runs(study, arms))
    keys = [run.arm.key for run in largest_runs]
    rows: list[list[str]] = []
    arms_of_note: dict[str, list[str]] = {}  # titles of arms by note
    for run in largest_runs:
        title = row_title(run.arm.key, keys)
        with waiting(study.name, f'compiling {title}'):
            description = dry_run.describe(run.config, topology)
        memory = sum(description.memory.values())
        state = description.memory['parameters'] + description.memory['optimizer state']
        rows.append(
            [
                title,
                f'{description.trials}',
                f'{description.tokens:,}',
                f'{state / GB:.3g}',
                f'{memory / GB:.3g}',
                f'{memory / description.capacity:.1%}',
                f'{description.flops / 1e12:.3g}',
                f'{1e3 * description.seconds:.3g}',
            ]
        )
        for note in description.notes:
            arms_of_note.setdefault(note, []).append(title)

    # Each column has a title, and whether it is flush left. '|' is a line break in a title.
    titles = [('arm', True)]
    names = ('trials', 'tokens|per step', 'state|GB', 'memory|GB', 'of HBM', 'TFLOP', 'ms at|peak')
    titles += [(name, False) for name in names]
    lines = [text_table(titles, rows), 'state, memory and TFLOP are per device, and of one step']
    for note, titles_of_arms in arms_of_note.items():
        applies_to_all = len(titles_of_arms) == len(rows)
        lines.append(note if applies_to_all else f'{", ".join(titles_of_arms)}: {note}')
    return '\n'.join(lines)


def _largest_runs(planned: Sequence[PlannedRun]) -> list[PlannedRun]:
    """Returns the run with the most trials of each model, in the order of the plan."""
    largest: dict[object, PlannedRun] = {}
    for run in planned:
        earlier = largest.setdefault(run.config.model, run)
        if len(run.config.trials.trials()) > len(earlier.config.trials.trials()):
            largest[run.config.model] = run
    return list(largest.values())
