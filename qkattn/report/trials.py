"""Every trained model of a study as one row of tidy data, for an analysis of one's own."""

from typing import Any

import pandas as pd

from qkattn.metrics import result_fields
from qkattn.study.tuning import KNOBS
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study
from qkattn.verdict.runs import PlannedRun, Trial


def trials_csv(study: Study, found: Findings) -> str:
    """CSV with one row per trial, in the order of the plan: arm, settings, end, metrics, run.

    Numbers are unrounded, in the unit of the result files; an empty field where there is no such
    number. What no trial has is left out. `chosen` is 1 for the trials that the results of
    an arm are the mean of.
    """
    chosen = {id(trial) for arm in (*found.arms, *found.controls) for trial in arm.chosen}
    rows = [
        _row(run, trial) | {'chosen': int(id(trial) in chosen), 'directory': run.directory}
        for run in study.runs
        for trial in run.trials
    ]
    table = pd.DataFrame(rows, dtype=object)
    optional = ('diverged_at', *result_fields())
    unmeasured = [name for name in optional if table[name].isna().all()]
    return table.drop(columns=unmeasured).to_csv(index=False, lineterminator='\n')


def _row(run: PlannedRun, trial: Trial) -> dict[str, Any]:
    return {
        **trial.place._asdict(),
        **{name: getattr(trial, name) for name in ('stage', 'knob', 'seed')},
        **dict(zip(KNOBS, trial.at, strict=True)),
        **{
            name: getattr(trial, name)
            for name in ('status', 'diverged_at', 'num_steps', 'num_tokens')
        },
        'parameters': trial.parameters['total'],
        **{name: getattr(trial, name) for name in ('target_parameters', 'residual')},
        **trial.metrics,
        'run': run.name,
    }
