"""Arms of a trained study: their trials, and means over the seeds of their verdict."""

import dataclasses
import statistics
from collections.abc import Mapping, Sequence

from qkattn.stats.inference import Difference, Estimate, estimate
from qkattn.stats.sweep import Sweep
from qkattn.study import tuning
from qkattn.study.arm_key import CONTROLS, LONGER, ArmKey
from qkattn.study.tuning import SCREENING, SINGLE, VERDICT, Tuning
from qkattn.verdict.codes import SHORT_ARM, TEST, VALIDATION, Comparison, Remark, Verdict
from qkattn.verdict.runs import Trial
from qkattn.verdict.settling import Length, Settling
from qkattn.verdict.trained_study import TrainedStudy, Yardstick


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """The parts of an arm's difference from the baseline, and whether it lasts.

    On shared seeds `same_shape` + `reinvesting` is the difference. The parts are estimates with
    95 % intervals, not corrected for their number, and give no verdict. A part is None while one of
    its arms lacks results or breaks a rule; an arm that is only known badly
    (`study_findings.UNSURE`) has a part.
    """

    # The control at the same shape, which has the baseline's sizes, minus the baseline.
    same_shape: Comparison | None = None
    # The arm minus that control: what spending the saved parameters adds.
    reinvesting: Comparison | None = None
    # The arm minus the baseline, both trained longer, as only decided arms are.
    longer: Comparison | None = None


@dataclasses.dataclass(frozen=True)
class TrainedArm:
    """One variant at one size on one corpus, at its tuned settings; or a control of it."""

    key: ArmKey
    group: ArmKey  # the key of its baseline: of its size, corpus and length of training
    trials: tuple[Trial, ...]
    verdict_trials: tuple[Trial, ...]  # those of the verdict run; without tuning, all
    chosen: tuple[Trial, ...]  # finished verdict_trials, without tuning only at the best setting
    tuning: Tuning | None = None
    # With the baseline; None for the baseline and if they share no seed that both finished.
    comparison: Comparison | None = None
    verdict: Verdict | None = None  # None for the baseline, controls and without tuning
    remarks: tuple[Remark, ...] = ()  # hygiene findings about this arm alone
    yardstick: Yardstick | None = None  # of a baseline, if it is recorded from its verdict run
    parts: Decomposition = Decomposition()  # of the difference of a primary arm
    # The same arm in earlier studies of the chain, by their name, where its seeds may be pooled.
    earlier: Mapping[str, 'TrainedArm'] = dataclasses.field(default_factory=dict)
    settling: Settling | None = None  # of the difference of a primary arm

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
    def is_baseline(self) -> bool:
        return self.key == self.group

    @property
    def split(self) -> str:
        """The split of its loss: TEST, or VALIDATION if a trial has no test loss."""
        return VALIDATION if self.over_seeds('test_loss') is None else TEST

    @property
    def loss(self) -> Estimate | None:
        """Mean over `chosen` on its split, nats/token."""
        return self.over_seeds(f'{self.split}_loss')

    def over_seeds(self, field: str) -> Estimate | None:
        """Mean of a metric over the chosen trials; None unless all have it."""
        values = [trial.metrics.get(field) for trial in self.chosen]
        if not values or None in values:
            return None
        return estimate(values)

    @property
    def bleu(self) -> float | None:
        mean = self.over_seeds(f'{self.split}_bleu')
        return mean.mean if mean else None

    @property
    def by_seed(self) -> dict[int, Trial]:
        """The chosen trials, by their seed, ascending."""
        ascending = sorted(self.chosen, key=lambda trial: trial.seed)
        return {trial.seed: trial for trial in ascending}

    def losses(self, split: str) -> dict[int, float]:
        """Losses of the chosen trials on a split (TEST or VALIDATION) by seed; nats/token."""
        return {seed: trial.metrics[f'{split}_loss'] for seed, trial in self.by_seed.items()}

    @property
    def difference(self) -> Difference | None:
        """From the baseline."""
        return self.comparison.difference if self.comparison else None

    @property
    def is_settled(self) -> bool:
        """Whether a longer training confirms the difference; else it holds at this length."""
        return self.settling is not None and self.settling.code is Length.SETTLED

    @property
    def example(self) -> Trial:
        """A trial with the config, parameter counts and costs that all trials share."""
        return (self.chosen or self.verdict_trials or self.trials)[0]

    @property
    def num_diverged(self) -> int:
        return sum(not trial.finished for trial in self.verdict_trials)

    @property
    def learning_rate(self) -> float | None:
        return self.chosen[0].learning_rate if self.chosen else None

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """All learning rates of its trials, ascending."""
        return tuple(sorted({trial.learning_rate for trial in self.trials}))

    @property
    def at_edge(self) -> bool:
        """Without tuning, whether the best of several learning rates is the first or last one."""
        rates = self.learning_rates
        return len(rates) > 1 and self.learning_rate in (rates[0], rates[-1])

    @property
    def sweeps(self) -> Mapping[str, Sweep]:
        """The sweep of each screened knob, in the order of tuning."""
        return self.tuning.sweeps if self.tuning else {}

    @property
    def bounded_knobs(self) -> tuple[str, ...]:
        """The tuned knobs whose optimum has an interval."""
        return tuple(knob for knob, sweep in self.sweeps.items() if sweep.optimum_low is not None)

    @property
    def not_bracketed(self) -> tuple[str, ...]:
        """The tuned knobs whose best value is not shown to have worse ones on both sides."""
        return tuple(knob for knob, sweep in self.sweeps.items() if not sweep.bracketed)

    @property
    def blocks(self) -> tuple[Remark, ...]:
        """The remarks that withhold the verdict of this arm."""
        return tuple(remark for remark in self.remarks if remark.blocks)

    @property
    def shortfalls(self) -> tuple[Remark, ...]:
        """In what it falls short of what its baseline has to beat; none of a baseline."""
        return tuple(remark for remark in self.remarks if remark.code in SHORT_ARM)

    @property
    def scales(self) -> bool:
        """Whether a scaling fit uses its mean loss.

        The mean over the seeds that did not diverge is biased towards lower losses, and a setting
        that is not the best one gives higher losses.
        """
        biased = self.num_diverged or self.blocks
        return bool(self.chosen) and not biased


def with_baselines(
    arms: Sequence[TrainedArm],
) -> list[tuple[TrainedArm, TrainedArm | None]]:
    """Every arm with its baseline, which is None if it has no results."""
    by_key = {arm.key: arm for arm in arms}
    return [(arm, by_key.get(arm.group)) for arm in arms]


def arms_of(study: TrainedStudy) -> tuple[TrainedArm, ...]:
    """One arm per arm key with results: size by size, corpus by corpus, primary arms first.

    Within these in the order of the study, the baseline first.
    """
    trials_by_key: dict[ArmKey, list[Trial]] = {}
    for trial in study.trials:
        trials_by_key.setdefault(trial.run.key, []).append(trial)
    kinds = (None, *CONTROLS)

    def rank(key: ArmKey) -> tuple[int, int, int, bool]:
        return (
            study.sizes.index(key.size),
            study.corpora.index(key.corpus),
            kinds.index(key.control),
            key.variant != study.baseline,
        )

    in_order_of_study = dict.fromkeys((*study.arms, *trials_by_key))
    with_results = [key for key in in_order_of_study if key in trials_by_key]
    arms: dict[ArmKey, TrainedArm] = {}
    for key in sorted(with_results, key=rank):
        primary = arms.get(key._replace(control=None))
        arms[key] = _trained_arm(study, key, trials_by_key[key], primary)
    return tuple(arms.values())


def _trained_arm(
    study: TrainedStudy, key: ArmKey, trials: Sequence[Trial], primary: TrainedArm | None
) -> TrainedArm:
    """An arm with its trials; `primary` is the arm of the same variant that is no control."""
    stage = VERDICT if study.tuned else SINGLE
    verdict_trials = tuple(trial for trial in trials if trial.run.stage == stage)
    if study.tuned:
        chosen = tuple(trial for trial in verdict_trials if trial.finished)
    else:
        chosen = _at_best_setting(verdict_trials)
    # The baseline of an arm that is trained longer is trained longer, too.
    longer = LONGER if key.control == LONGER else None
    yardstick = (study.yardsticks or {}).get(key)
    if yardstick and yardstick.run not in {trial.run.name for trial in verdict_trials}:
        yardstick = None
    return TrainedArm(
        key=key,
        group=ArmKey(study.baseline, key.size, key.corpus, longer),
        trials=tuple(trials),
        verdict_trials=verdict_trials,
        chosen=chosen,
        tuning=_tuning(study, key, trials, primary) if study.tuned else None,
        yardstick=yardstick,
    )


def _at_best_setting(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The finished trials at the setting with the lowest mean validation loss.

    A setting with a diverged seed, whose mean over the others is biased, is considered only if
    every setting has one.
    """
    by_setting: dict[tuning.Settings, list[Trial]] = {}
    for trial in trials:
        by_setting.setdefault(trial.settings, []).append(trial)
    complete: list[list[Trial]] = []
    partial: list[list[Trial]] = []
    for of_setting in by_setting.values():
        finished = [trial for trial in of_setting if trial.finished]
        if len(finished) == len(of_setting):
            complete.append(finished)
        elif finished:
            partial.append(finished)
    candidates = complete or partial
    if not candidates:
        return ()

    def mean_loss(finished: Sequence[Trial]) -> float:
        return statistics.fmean(trial.val_loss for trial in finished)

    best = min(candidates, key=mean_loss)
    return tuple(best)


def _tuning(
    study: TrainedStudy, key: ArmKey, trials: Sequence[Trial], primary: TrainedArm | None
) -> Tuning:
    """How far the screening of an arm has got, from its results.

    The grids are those of the study. A setting that is not tuned has the value of the arm's
    trials. An arm that is trained longer is tuned around the settings of its `primary` arm.
    """
    screening = [trial for trial in trials if trial.run.stage == SCREENING]
    first = (screening or trials)[0]
    grids = dict(study.grids)
    for knob, value in zip(tuning.KNOBS, first.settings, strict=True):
        if len(grids[knob]) <= 1:
            grids[knob] = (value,)
    if key.control == LONGER and primary and primary.sweeps:
        grids = tuning.grids_around(grids, primary.tuning.settings)
    losses: dict[tuning.Settings, dict[int, float | None]] = {}  # by seed; None if it diverged
    for trial in screening:
        of_setting = losses.setdefault(trial.settings, {})
        of_setting[trial.seed] = trial.val_loss if trial.finished else None
    return tuning.tune(grids, study.tuning, losses, study.base.optimizer.decay)
