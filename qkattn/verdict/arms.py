"""Arms of a study: their trials, and means and intervals over seeds."""

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

from qkattn.stats.inference import Difference, Estimate, estimate
from qkattn.stats.sweep import Sweep
from qkattn.study import tuning
from qkattn.study.place import CONTROLS, EQUAL_SHAPE, LONGER, Place
from qkattn.study.tuning import SCREENING, SINGLE, VERDICT, Tuning
from qkattn.verdict.codes import TEST, VALIDATION, Comparison, NotScaled, Remark, Verdict
from qkattn.verdict.documents import Documents
from qkattn.verdict.load import Study
from qkattn.verdict.runs import Trial


class Group(NamedTuple):
    """Arms that are compared with one baseline."""

    size: str
    corpus: str
    longer: bool


@dataclasses.dataclass(frozen=True)
class Arm:
    """One variant at one size on one corpus, at its tuned settings; or a control of it.

    Attributes:
      is_baseline: of its size and corpus, at its length of training.
      trials: all of them.
      verdict_trials: the trials that results are taken from: those of the verdict run, never of a
        screening run; in a study without tuning, all.
      chosen: the finished trials of verdict_trials, without tuning only those at the best setting;
        empty if every trial diverged or none has run.
      val_loss, test_loss: mean over `chosen`, nats/token; None if they are empty, and without test
        losses.
      tuning: the state of its tuning; None in a study without tuning.
      comparison: with the baseline; None for the baseline and if either arm has no finished trial.
      verdict: None for the baseline, for controls and in a study without tuning.
      remarks: hygiene findings about this arm alone.
    """

    place: Place
    is_baseline: bool
    trials: tuple[Trial, ...]
    verdict_trials: tuple[Trial, ...]
    chosen: tuple[Trial, ...]
    val_loss: Estimate | None
    test_loss: Estimate | None
    tuning: Tuning | None = None
    comparison: Comparison | None = None
    verdict: Verdict | None = None
    remarks: tuple[Remark, ...] = ()

    @property
    def variant(self) -> str:
        return self.place.variant

    @property
    def size(self) -> str:
        return self.place.size

    @property
    def corpus(self) -> str:
        return self.place.corpus

    @property
    def control(self) -> str | None:
        return self.place.control

    @property
    def group(self) -> Group:
        """What it shares with its baseline: size, corpus, length of training."""
        return group_of(self.place)

    @property
    def split(self) -> str:
        """The split of its loss: TEST, or VALIDATION if a trial has no test loss."""
        return VALIDATION if self.test_loss is None else TEST

    @property
    def loss(self) -> Estimate | None:
        """Mean over `chosen` on its split, nats/token."""
        return self.val_loss if self.test_loss is None else self.test_loss

    @property
    def difference(self) -> Difference | None:
        """From the baseline."""
        return self.comparison.difference if self.comparison else None

    @property
    def differences(self) -> tuple[float, ...]:
        """From the baseline, one for each shared seed."""
        return tuple(self.comparison.differences.values()) if self.comparison else ()

    def losses(self, split: str) -> dict[int, float]:
        """Losses of `chosen` on a split by seed, ascending; nats/token."""
        ascending = sorted(self.chosen, key=lambda trial: trial.seed)
        return {trial.seed: trial.metrics[f'{split}_loss'] for trial in ascending}

    def documents(self, split: str, seeds: Sequence[int] = ()) -> list[Documents]:
        """Losses by document on a split, of these seeds (none: of all); [] if one has none."""
        own = {trial.seed: trial for trial in self.chosen}
        found = [own[seed].documents.get(split) for seed in seeds or sorted(own)]
        return [] if None in found else [of for of in found if of is not None]

    def reached(self, seeds: Collection[int]) -> bool:
        """Whether it has verdict trials with all of these seeds, diverged ones included."""
        return {trial.seed for trial in self.verdict_trials} >= set(seeds)

    def at(self, seeds: Collection[int]) -> 'Arm':
        """The arm with no other verdict trials than those of these seeds."""
        chosen = tuple(trial for trial in self.chosen if trial.seed in seeds)
        own = tuple(trial for trial in self.verdict_trials if trial.seed in seeds)
        return dataclasses.replace(
            self,
            verdict_trials=own,
            chosen=chosen,
            val_loss=_mean(chosen, VALIDATION),
            test_loss=_mean(chosen, TEST),
        )

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
        """The tuned knobs whose best value is not shown to have worse ones on both sides."""
        return tuple(knob for knob, sweep in self.sweeps.items() if not sweep.bracketed)

    @property
    def unbounded(self) -> tuple[str, ...]:
        """The tuned knobs, bracketed, whose optimum the sweep does not bound."""
        return tuple(
            knob
            for knob, sweep in self.sweeps.items()
            if sweep.bracketed and sweep.at_worst is None
        )

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
            NotScaled.NOT_BRACKETED: self.not_bracketed,
            NotScaled.BLOCKED: self.blocks,
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


def group_of(place: Place) -> Group:
    """What an arm shares with its baseline: an equal-shape control has that of the primary arms."""
    return Group(place.size, place.corpus, place.control == LONGER)


def arms_of(study: Study) -> tuple[Arm, ...]:
    """One arm per place with results: size by size, corpus by corpus, primary arms first.

    Within these in the order of the study, the baseline first.
    """
    by_place: dict[Place, list[Trial]] = {}
    for trial in study.trials:
        by_place.setdefault(trial.place, []).append(trial)

    def rank(place: Place) -> tuple:
        kind = (None, *CONTROLS).index(place.control)
        corpus = study.corpora.index(place.corpus)
        return study.sizes.index(place.size), corpus, kind, place.variant != study.baseline

    declared = dict.fromkeys((*study.arms, *by_place))
    places = sorted((place for place in declared if place in by_place), key=rank)
    arms: dict[Place, Arm] = {}
    for place in places:
        primary = arms.get(place._replace(control=None))
        arms[place] = _arm(study, place, tuple(by_place[place]), primary)
    return tuple(arms.values())


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


def _arm(study: Study, place: Place, trials: tuple[Trial, ...], primary: Arm | None) -> Arm:
    own = tuple(t for t in trials if t.stage == (VERDICT if study.tuning else SINGLE))
    complete = tuple(t for t in own if t.finished and not t.stopped_early)
    chosen = complete if study.tuning else best_setting(own)
    return Arm(
        place=place,
        is_baseline=place.variant == study.baseline and place.control != EQUAL_SHAPE,
        trials=trials,
        verdict_trials=own,
        chosen=chosen,
        val_loss=_mean(chosen, VALIDATION),
        test_loss=_mean(chosen, TEST),
        tuning=_tuning(study, place, trials, primary) if study.tuning else None,
    )


def _mean(chosen: Sequence[Trial], split: str) -> Estimate | None:
    """Mean loss on a split; None unless all trials have one."""
    losses = [trial.metrics[f'{split}_loss'] for trial in chosen]
    return estimate(losses) if losses and None not in losses else None


def _tuning(study: Study, place: Place, trials: Sequence[Trial], primary: Arm | None) -> Tuning:
    """The state of the tuning, from the results of the screening; `primary` is not a control."""
    screening = [trial for trial in trials if trial.stage == SCREENING]
    own = dict(zip(tuning.KNOBS, (screening or trials)[0].at, strict=True))
    declared = study.tuning.grids.items()
    grids = {knob: values if len(values) > 1 else (own[knob],) for knob, values in declared}
    if place.control == LONGER and primary and primary.sweeps:
        grids = tuning.grids_around(grids, primary.tuning.settings)
    measured: dict[tuning.Settings, dict[int, float | None]] = {}
    for trial in screening:
        loss = trial.val_loss if trial.finished else None
        measured.setdefault(trial.at, {})[trial.seed] = loss
    return tuning.tune(grids, study.tuning, measured)
