"""What a study's rows say: best learning rate, means and intervals over seeds, paired differences.

Everything printed, plotted or put into HTML is computed here, once.
"""

import dataclasses
import statistics
from collections.abc import Sequence

import numpy as np
from scipy import stats

from qkattn.report.load import Study
from qkattn.report.records import Trial

LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class Estimate:
    """Mean over n values; sd (n - 1 in the denominator) and t interval only when n >= 2."""

    mean: float
    n: int
    sd: float | None
    low: float | None
    high: float | None


def estimate(values: Sequence[float]) -> Estimate:
    """Mean of `values`, with sd and 95 % t interval of the mean when there are two or more."""
    mean, n = statistics.fmean(values), len(values)
    if n < 2:
        return Estimate(mean, n, None, None, None)
    sd = float(np.std(values, ddof=1))
    half = float(stats.t.ppf(0.5 + LEVEL / 2, n - 1)) * sd / n**0.5
    return Estimate(mean, n, sd, mean - half, mean + half)


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant at one size, at its best learning rate.

    `trials` are all its trials, `chosen` the finished ones at the best setting (empty when every
    trial diverged). `val_loss` is nats/token; `difference` is val loss minus the baseline's at the
    same size, paired by seed, and None for the baseline and where no seed is shared.
    """

    variant: str
    size: str
    is_baseline: bool
    trials: tuple[Trial, ...]
    chosen: tuple[Trial, ...]
    val_loss: Estimate | None
    difference: Estimate | None

    @property
    def example(self) -> Trial:
        """A trial to read what all of the row share: config, weights, costs."""
        return self.chosen[0] if self.chosen else self.trials[0]

    @property
    def learning_rate(self) -> float | None:
        return self.chosen[0].learning_rate if self.chosen else None

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """All learning rates that were run, ascending."""
        return tuple(sorted({trial.learning_rate for trial in self.trials}))

    @property
    def at_edge(self) -> bool:
        """Whether the best of several learning rates is the smallest or largest that was run."""
        rates = self.learning_rates
        return len(rates) > 1 and self.learning_rate in (rates[0], rates[-1])

    @property
    def num_diverged(self) -> int:
        return sum(not trial.finished for trial in self.trials)

    def over_seeds(self, field: str, scale: float = 1.0) -> Estimate | None:
        """`scale` times a number of the chosen trials; None unless every one of them has it."""
        values = [getattr(trial, field) for trial in self.chosen]
        return estimate([scale * v for v in values]) if values and None not in values else None

    def of_cells(self, field: str) -> list[float]:
        """A per-cell number, once for each cell the row's trials ran in."""
        values = {trial.cell: getattr(trial, field) for trial in self.trials}
        return [value for value in values.values() if value is not None]


def summarise(study: Study) -> tuple[Row, ...]:
    """One row per (size, variant) with results, in the study's order, the baseline first."""
    order = sorted(study.variants, key=lambda variant: variant != study.baseline)
    rows = []
    for size in study.sizes:
        baseline: dict[int, Trial] = {}
        for variant in order:
            trials = tuple(t for t in study.trials if (t.variant, t.size) == (variant, size))
            if not trials:
                continue
            row = _row(trials, variant == study.baseline, baseline)
            if row.is_baseline:
                baseline = {trial.seed: trial for trial in row.chosen}
            rows.append(row)
    return tuple(rows)


def best_setting(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The finished trials at the setting with the lowest mean val loss.

    A setting at which a seed diverged is considered only when no setting finished all its seeds:
    its mean would be one over the lucky seeds.
    """
    by_setting: dict[tuple, list[Trial]] = {}
    for trial in trials:
        by_setting.setdefault(trial.settings, []).append(trial)
    finished = {s: tuple(t for t in ts if t.finished) for s, ts in by_setting.items()}
    complete = [ts for s, ts in finished.items() if len(ts) == len(by_setting[s])]
    candidates = complete or [ts for ts in finished.values() if ts]
    if not candidates:
        return ()
    return min(candidates, key=lambda ts: statistics.fmean(t.val_loss for t in ts))


def paired_difference(chosen: Sequence[Trial], baseline: dict[int, Trial]) -> Estimate | None:
    """Val loss minus the baseline's (nats/token) over the seeds that both finished."""
    differences = [
        trial.val_loss - baseline[trial.seed].val_loss for trial in chosen if trial.seed in baseline
    ]
    return estimate(differences) if differences else None


def _row(trials: tuple[Trial, ...], is_baseline: bool, baseline: dict[int, Trial]) -> Row:
    chosen = best_setting(trials)
    return Row(
        variant=trials[0].variant,
        size=trials[0].size,
        is_baseline=is_baseline,
        trials=trials,
        chosen=chosen,
        val_loss=estimate([trial.val_loss for trial in chosen]) if chosen else None,
        difference=None if is_baseline else paired_difference(chosen, baseline),
    )
