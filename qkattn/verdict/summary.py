"""What a study's rows say: the trials behind each number, means and intervals over seeds."""

import dataclasses
import statistics
from collections.abc import Sequence

from qkattn.stats.inference import Estimate, estimate
from qkattn.study.tuning import SCREENING, SINGLE, VERDICT
from qkattn.verdict.load import Study
from qkattn.verdict.trials import Trial

__all__ = ['Estimate', 'Row', 'best_setting', 'estimate', 'summarise']


@dataclasses.dataclass(frozen=True)
class Row:
    """One variant at one size, at its tuned setting.

    `trials` are all its trials. `verdicts` are those that the row's numbers may come from: of its
    verdict run, never of a screening one; in a study without tuning, all. `chosen` are the trials
    among them that finished, without tuning those at the best setting (empty when every trial
    diverged or none has run). `val_loss` is nats/token.
    """

    variant: str
    size: str
    is_baseline: bool
    trials: tuple[Trial, ...]
    verdicts: tuple[Trial, ...]
    chosen: tuple[Trial, ...]
    val_loss: Estimate | None

    @property
    def place(self) -> tuple[str, str]:
        return self.variant, self.size

    @property
    def name(self) -> str:
        return f'{self.variant} at {self.size}'

    @property
    def screening(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.stage == SCREENING)

    @property
    def example(self) -> Trial:
        """A trial to read what all of the row share: config, parameters, costs."""
        return (self.chosen or self.verdicts or self.trials)[0]

    @property
    def learning_rate(self) -> float | None:
        return self.chosen[0].learning_rate if self.chosen else None

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """All learning rates that were run, ascending."""
        return tuple(sorted({trial.learning_rate for trial in self.trials}))

    @property
    def at_edge(self) -> bool:
        """Whether the best of several learning rates is the smallest or largest that was run.

        Of a study without tuning; with it, `Bowl.bracketed` says more.
        """
        rates = sorted({trial.learning_rate for trial in self.verdicts})
        return len(rates) > 1 and self.learning_rate in (rates[0], rates[-1])

    @property
    def num_diverged(self) -> int:
        return sum(not trial.finished for trial in self.verdicts)

    def over_seeds(self, field: str, scale: float = 1.0) -> Estimate | None:
        """`scale` times a number of the chosen trials; None unless every one of them has it."""
        values = [getattr(trial, field) for trial in self.chosen]
        return estimate([scale * v for v in values]) if values and None not in values else None

    def of_runs(self, field: str) -> list[float]:
        """A per-run number, once for each run that the row's `verdicts` ran in."""
        values = {trial.run: getattr(trial, field) for trial in self.verdicts}
        return [value for value in values.values() if value is not None]


def summarise(study: Study) -> tuple[Row, ...]:
    """One row per (size, variant) with results, in the study's order, the baseline first."""
    order = sorted(study.variants, key=lambda variant: variant != study.baseline)
    by_place: dict[tuple[str, str], list[Trial]] = {}
    for trial in study.trials:
        by_place.setdefault((trial.variant, trial.size), []).append(trial)
    return tuple(
        _row(study, tuple(by_place[variant, size]))
        for size in study.sizes
        for variant in order
        if (variant, size) in by_place
    )


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


def stopped_early(study: Study, trial: Trial) -> bool:
    """Whether the trial has trained for fewer steps than its config says."""
    return trial.num_steps < study.by_name[trial.run].config['train']['num_steps']


def _row(study: Study, trials: tuple[Trial, ...]) -> Row:
    own = tuple(t for t in trials if t.stage == (VERDICT if study.tuning else SINGLE))
    if study.tuning:
        chosen = tuple(t for t in own if t.finished and not stopped_early(study, t))
    else:
        chosen = best_setting(own)
    variant, size = trials[0].variant, trials[0].size
    return Row(
        variant=variant,
        size=size,
        is_baseline=variant == study.baseline,
        trials=trials,
        verdicts=own,
        chosen=chosen,
        val_loss=estimate([trial.val_loss for trial in chosen]) if chosen else None,
    )
