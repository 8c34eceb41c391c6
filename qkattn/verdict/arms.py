"""Arms of a study: their trials, means over seeds, and the difference of one from another."""

import dataclasses
import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from qkattn.stats import inference
from qkattn.stats.inference import Difference, Estimate, estimate
from qkattn.stats.sweep import Sweep
from qkattn.study import tuning
from qkattn.study.arm_key import CONTROLS, EQUAL_SHAPE, LONGER, ArmKey
from qkattn.study.tuning import SCREENING, SINGLE, VERDICT, Tuning
from qkattn.verdict.codes import TEST, VALIDATION, Comparison, NotScaled, Remark, Verdict
from qkattn.verdict.load import Study
from qkattn.verdict.runs import Documents, Trial


class Group(NamedTuple):
    """Arms that are compared with one baseline."""

    size: str
    corpus: str
    longer: bool


@dataclasses.dataclass(frozen=True)
class Arm:
    """One variant at one size on one corpus, at its tuned settings; or a control of it."""

    key: ArmKey
    is_baseline: bool  # of its size and corpus, at its length of training
    trials: tuple[Trial, ...]
    verdict_trials: tuple[Trial, ...]  # those of the verdict run; without tuning, all
    chosen: tuple[Trial, ...]  # finished verdict_trials, without tuning only at the best setting
    # Means over `chosen`, nats/token; None if there is none.
    val_loss: Estimate | None
    test_loss: Estimate | None
    tuning: Tuning | None = None
    # With the baseline; None for the baseline and if either arm has no finished trial.
    comparison: Comparison | None = None
    verdict: Verdict | None = None  # None for the baseline, controls and without tuning
    remarks: tuple[Remark, ...] = ()  # hygiene findings about this arm alone

    @property
    def variant(self) -> str:
        return self.key.variant

    @property
    def size(self) -> str:
        return self.key.size

    @property
    def corpus(self) -> str:
        return self.key.corpus

    @property
    def control(self) -> str | None:
        return self.key.control

    @property
    def group(self) -> Group:
        """What it shares with its baseline, as controls of equal shape do with the primary one."""
        return Group(self.size, self.corpus, self.control == LONGER)

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
        by_seed = {trial.seed: trial.documents.get(split) for trial in self.chosen}
        documents = [by_seed[seed] for seed in seeds or sorted(by_seed)]
        return [] if None in documents else [one for one in documents if one is not None]

    def reached(self, seeds: Collection[int]) -> bool:
        """Whether it has verdict trials with all of these seeds, diverged ones included."""
        return {trial.seed for trial in self.verdict_trials} >= set(seeds)

    def at(self, seeds: Collection[int]) -> 'Arm':
        """The arm with no other verdict trials than those of these seeds."""
        chosen = tuple(trial for trial in self.chosen if trial.seed in seeds)
        return dataclasses.replace(
            self,
            verdict_trials=tuple(trial for trial in self.verdict_trials if trial.seed in seeds),
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
        sweeps = self.sweeps.items()
        return tuple(knob for knob, s in sweeps if s.bracketed and s.at_worst is None)

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
        values = [trial.metrics.get(field) for trial in self.chosen]
        return estimate([scale * v for v in values]) if values and None not in values else None

    def of_runs(self, field: str) -> list[float]:
        """A number that all trials of a run share, once for each run of `verdict_trials`."""
        values = {trial.run: getattr(trial, field) for trial in self.verdict_trials}
        return [value for value in values.values() if value is not None]


def arms_of(study: Study) -> tuple[Arm, ...]:
    """One arm per arm key with results: size by size, corpus by corpus, primary arms first.

    Within these in the order of the study, the baseline first.
    """
    by_key: dict[ArmKey, list[Trial]] = {}
    for trial in study.trials:
        by_key.setdefault(trial.key, []).append(trial)

    def rank(key: ArmKey) -> tuple:
        kind = (None, *CONTROLS).index(key.control)
        corpus = study.corpora.index(key.corpus)
        return study.sizes.index(key.size), corpus, kind, key.variant != study.baseline

    declared = dict.fromkeys((*study.arms, *by_key))
    arms: dict[ArmKey, Arm] = {}
    for key in sorted((key for key in declared if key in by_key), key=rank):
        primary = arms.get(key._replace(control=None))
        arms[key] = _arm(study, key, tuple(by_key[key]), primary)
    return tuple(arms.values())


def best_setting(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The finished trials at the setting with the lowest mean val loss.

    One with a diverged seed, whose mean is biased, is considered only if every setting has one.
    """
    by_setting: dict[tuple, list[Trial]] = {}
    for trial in trials:
        by_setting.setdefault(trial.settings, []).append(trial)
    complete = [group for group in by_setting.values() if all(t.finished for t in group)]
    partial = [[t for t in group if t.finished] for group in by_setting.values()]
    return tuple(
        min(
            complete or list(filter(None, partial)),
            key=lambda group: statistics.fmean(t.val_loss for t in group),
            default=(),
        )
    )


def _arm(study: Study, key: ArmKey, trials: tuple[Trial, ...], primary: Arm | None) -> Arm:
    judged = tuple(t for t in trials if t.stage == (VERDICT if study.tuning else SINGLE))
    complete = tuple(t for t in judged if t.finished and not t.stopped_early)
    chosen = complete if study.tuning else best_setting(judged)
    return Arm(
        key=key,
        is_baseline=key.variant == study.baseline and key.control != EQUAL_SHAPE,
        trials=trials,
        verdict_trials=judged,
        chosen=chosen,
        val_loss=_mean(chosen, VALIDATION),
        test_loss=_mean(chosen, TEST),
        tuning=_tuning(study, key, trials, primary) if study.tuning else None,
    )


def _mean(chosen: Sequence[Trial], split: str) -> Estimate | None:
    """Mean loss on a split; None unless all trials have one."""
    losses = [trial.metrics[f'{split}_loss'] for trial in chosen]
    return estimate(losses) if losses and None not in losses else None


def _tuning(study: Study, key: ArmKey, trials: Sequence[Trial], primary: Arm | None) -> Tuning:
    """The state of the tuning, from the results of the screening; `primary` is not a control."""
    screening = [trial for trial in trials if trial.stage == SCREENING]
    of_arm = dict(zip(tuning.KNOBS, (screening or trials)[0].at, strict=True))
    grids = {knob: v if len(v) > 1 else (of_arm[knob],) for knob, v in study.grids.items()}
    if key.control == LONGER and primary and primary.sweeps:
        grids = tuning.grids_around(grids, primary.tuning.settings)
    measured: dict[tuning.Settings, dict[int, float | None]] = {}
    for trial in screening:
        loss = trial.val_loss if trial.finished else None
        measured.setdefault(trial.at, {})[trial.seed] = loss
    return tuning.tune(grids, study.tuning, measured)


# An arm and the one that it is compared with.
Pair = tuple[Arm, Arm]


def compare(
    pairs: Sequence[Pair], study: Study, resamples: int | None = inference.RESAMPLES
) -> Comparison | None:
    """Compares the chosen trials of the pairs; None if an arm has none, or no seed is shared.

    A single pair that shares no seed is compared unpaired. The interval includes the error over
    documents, taken as independent between corpora, and the error of tuning: the arm may be better
    than measured by what its own settings may be off, and worse by what the other's may be.

    Where a study has losses by document, and these arms have none over the same documents, the
    error over documents is not known: then there is no interval and no test.
    """
    if not pairs or not all(arm.chosen and other.chosen for arm, other in pairs):
        return None
    split = TEST if all(arm.split == other.split == TEST for arm, other in pairs) else VALIDATION
    losses = {s: [(a.losses(s), b.losses(s)) for a, b in pairs] for s in (TEST, VALIDATION)}
    seeds = sorted(set.intersection(*(set(arm) for pair in losses[split] for arm in pair)))
    if not seeds and len(pairs) > 1:
        return None
    error, df, number = _evaluation_error(pairs, seeds, split, study.has_documents)
    errors: dict[str, Any] = {
        'evaluation_error': error,
        'evaluation_df': df,
        'tuning': (_tuning_error([a for a, _ in pairs]), _tuning_error([b for _, b in pairs])),
        'resamples': resamples,
    }
    correlation = None
    if seeds:
        arm_S, other_S = (_means(losses[split], side, seeds) for side in (0, 1))
        differences = dict(zip(seeds, (arm_S - other_S).tolist(), strict=True))
        difference = inference.paired(list(differences.values()), study.margin, **errors)
        validation = [_means(losses[VALIDATION], side, seeds) for side in (0, 1)]
        if len(seeds) >= inference.MIN_PAIRS and np.ptp(arm_S) > 0 and np.ptp(other_S) > 0:
            correlation = statistics.correlation(arm_S.tolist(), other_S.tolist())
    else:
        differences = {}
        arm, other = (list(by_seed.values()) for by_seed in losses[split][0])
        difference = inference.welch(arm, other, study.margin, **errors)
        validation = [np.array(list(by_seed.values())) for by_seed in losses[VALIDATION][0]]
    confirmed = float(validation[0].mean() - validation[1].mean())
    return Comparison(split, differences, difference, confirmed, correlation, number)


def _means(losses: Sequence[tuple], side: int, seeds: Sequence[int]) -> np.ndarray:
    """The mean loss over the pairs of each seed, of the arms (0) or the others (1)."""
    return np.mean([[pair[side][seed] for seed in seeds] for pair in losses], axis=0)


def _tuning_error(arms: Sequence[Arm]) -> float:
    """Nats by which the settings may be off, the sum over knobs; where unbounded, none is known."""
    return statistics.fmean(sum(s.at_worst or 0.0 for s in arm.sweeps.values()) for arm in arms)


def _evaluation_error(
    pairs: Sequence[Pair], seeds: Sequence[int], split: str, expected: bool
) -> tuple[float | None, float | None, int | None]:
    """Standard error over documents, its degrees of freedom (Satterthwaite), number of documents.

    Of one document only, 0, None and None. Without losses by document, or if those of the two arms
    are of other targets, the error is None where losses by document are expected, else 0.
    """
    variances, dfs, number = [], [], 0
    for arm, other in pairs:
        sides = [arm.documents(split, seeds), other.documents(split, seeds)]
        if not all(sides) or not all(d.alike(sides[0][0]) for side in sides for d in side):
            return None if expected else 0.0, None, None
        if len(sides[0][0].names) < 2:
            return 0.0, None, None
        arm_SC, other_SC = (np.array([d.nats_C for d in side]) for side in sides)
        nats_SC = arm_SC - other_SC if seeds else (arm_SC.mean(0) - other_SC.mean(0))[None]
        error, df = inference.evaluation_error(nats_SC, sides[0][0].tokens_C)
        variances.append(error**2)
        dfs.append(df)
        number += nats_SC.shape[1]
    total = sum(variances)
    if not total:
        return 0.0, None, number
    df = total**2 / sum(v**2 / df for v, df in zip(variances, dfs, strict=True))
    return total**0.5 / len(pairs), df, number
