"""Arms of a study: their trials, and means and intervals over seeds."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from qkattn.stats.inference import Difference, Estimate, estimate
from qkattn.stats.sweep import Sweep
from qkattn.study import tuning
from qkattn.study.tuning import SCREENING, SINGLE, VERDICT, Tuning
from qkattn.verdict.codes import NotScaled, Place, Remark, Verdict
from qkattn.verdict.load import Study
from qkattn.verdict.runs import Trial


@dataclasses.dataclass(frozen=True)
class Arm:
    """One variant at one size, at its tuned settings.

    Attributes:
      trials: all of them.
      verdict_trials: the trials that results are taken from: those of the verdict run, never of a
        screening run; in a study without tuning, all.
      chosen: the finished trials of verdict_trials, without tuning only those at the best setting;
        empty if every trial diverged or none has run.
      val_loss: mean over `chosen`, nats/token.
      tuning: the state of its tuning; None in a study without tuning.
      differences: val loss minus the baseline's (nats/token), one for each shared seed; empty if no
        seed is shared.
      difference: their mean with its tests; of independent samples (`paired` False) if no seed is
        shared. None for the baseline and if either arm has no finished trial.
      verdict: None for the baseline and in a study without tuning.
      remarks: hygiene findings about this arm alone.
    """

    variant: str
    size: str
    is_baseline: bool
    trials: tuple[Trial, ...]
    verdict_trials: tuple[Trial, ...]
    chosen: tuple[Trial, ...]
    val_loss: Estimate | None
    tuning: Tuning | None = None
    differences: tuple[float, ...] = ()
    difference: Difference | None = None
    verdict: Verdict | None = None
    remarks: tuple[Remark, ...] = ()

    @property
    def place(self) -> Place:
        return self.variant, self.size

    @property
    def screening_trials(self) -> tuple[Trial, ...]:
        return tuple(trial for trial in self.trials if trial.stage == SCREENING)

    @property
    def example(self) -> Trial:
        """A trial that stands for all in what they share: config, parameter counts, costs."""
        return (self.chosen or self.verdict_trials or self.trials)[0]

    @property
    def learning_rate(self) -> float | None:
        return self.chosen[0].learning_rate if self.chosen else None

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """All learning rates of its trials, ascending."""
        return tuple(sorted({trial.learning_rate for trial in self.trials}))

    @property
    def at_edge(self) -> bool:
        """Whether the best of several learning rates is the smallest or the largest one.

        For a study without tuning; with tuning, see `not_bracketed`.
        """
        rates = {trial.learning_rate for trial in self.verdict_trials}
        return len(rates) > 1 and self.learning_rate in (min(rates), max(rates))

    @property
    def num_diverged(self) -> int:
        return sum(not trial.finished for trial in self.verdict_trials)

    @property
    def sweeps(self) -> Mapping[str, Sweep]:
        """The sweep of each screened knob, in the order of tuning."""
        return self.tuning.sweeps if self.tuning else {}

    @property
    def not_bracketed(self) -> tuple[str, ...]:
        """The tuned knobs whose best value has no worse one on both sides."""
        return tuple(knob for knob, sweep in self.sweeps.items() if not sweep.bracketed)

    @property
    def blocks(self) -> tuple[Remark, ...]:
        """The remarks that withhold the verdict of this arm."""
        return tuple(remark for remark in self.remarks if remark.blocks)

    @property
    def not_scaled(self) -> NotScaled | None:
        """Why its mean loss is not used in a scaling fit; None if it is.

        The mean over the seeds that did not diverge is biased towards lower losses, and a setting
        that is not the best one gives higher losses.
        """
        reasons = {
            NotScaled.NO_LOSSES: not self.chosen,
            NotScaled.DIVERGED: self.num_diverged,
            NotScaled.BLOCKED: self.blocks,
            NotScaled.NOT_BRACKETED: self.not_bracketed,
        }
        return next((reason for reason, holds in reasons.items() if holds), None)

    def over_seeds(self, field: str, scale: float = 1.0) -> Estimate | None:
        """Mean of `scale` times a metric over the chosen trials; None unless all have it."""
        values = [trial.metrics[field] for trial in self.chosen]
        return estimate([scale * v for v in values]) if values and None not in values else None

    def of_runs(self, field: str) -> list[float]:
        """A number that all trials of a run share, once for each run of `verdict_trials`."""
        values = {trial.run: getattr(trial, field) for trial in self.verdict_trials}
        return [value for value in values.values() if value is not None]


def arms_of(study: Study) -> tuple[Arm, ...]:
    """One arm per (size, variant) with results, in the study's order, the baseline first."""
    order = sorted(study.variants, key=lambda variant: variant != study.baseline)
    by_place: dict[Place, list[Trial]] = {}
    for trial in study.trials:
        by_place.setdefault(trial.place, []).append(trial)
    places = [(variant, size) for size in study.sizes for variant in order]
    return tuple(_arm(study, *p, tuple(by_place[p])) for p in places if p in by_place)


def best_setting(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The finished trials at the setting with the lowest mean val loss.

    A setting with a diverged seed is considered only if every setting has one: its mean is over
    the seeds that did not diverge, which is biased towards lower losses.
    """
    by_setting: dict[tuple, list[Trial]] = {}
    for trial in trials:
        by_setting.setdefault(trial.settings, []).append(trial)
    complete = [of for of in by_setting.values() if all(trial.finished for trial in of)]
    partial = [[trial for trial in of if trial.finished] for of in by_setting.values()]
    candidates = complete or list(filter(None, partial))
    return tuple(
        min(candidates, key=lambda of: statistics.fmean(t.val_loss for t in of), default=())
    )


def _arm(study: Study, variant: str, size: str, trials: tuple[Trial, ...]) -> Arm:
    own = tuple(t for t in trials if t.stage == (VERDICT if study.tuning else SINGLE))
    complete = tuple(t for t in own if t.finished and not t.stopped_early)
    chosen = complete if study.tuning else best_setting(own)
    return Arm(
        variant=variant,
        size=size,
        is_baseline=variant == study.baseline,
        trials=trials,
        verdict_trials=own,
        chosen=chosen,
        val_loss=estimate([trial.val_loss for trial in chosen]) if chosen else None,
        tuning=_tuning(study, trials) if study.tuning else None,
    )


def _tuning(study: Study, trials: Sequence[Trial]) -> Tuning:
    """The state of the tuning, from the results of the screening."""
    screening = [trial for trial in trials if trial.stage == SCREENING]
    own = dict(zip(tuning.KNOBS, (screening or trials)[0].at, strict=True))
    declared = study.tuning.grids.items()
    grids = {knob: values if len(values) > 1 else (own[knob],) for knob, values in declared}
    measured: dict[tuning.Settings, dict[int, float | None]] = {}
    for trial in screening:
        loss = trial.val_loss if trial.finished else None
        measured.setdefault(trial.at, {})[trial.seed] = loss
    return tuning.tune(grids, study.tuning, measured)
