"""The arms of a trained study, with their results."""

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
    """The parts of an arm's difference from the baseline, and the difference in longer training.

    On shared seeds, the difference is `same_shape` + `reinvesting`. The parts are estimates without
    a verdict. A part is None if it cannot be estimated.
    """

    # The arm at the baseline's shape, minus the baseline.
    same_shape: Comparison | None = None
    # The arm minus the arm at the baseline's shape: what spending the saved parameters changes.
    reinvesting: Comparison | None = None
    # The arm minus the baseline, both trained longer.
    longer: Comparison | None = None


@dataclasses.dataclass(frozen=True)
class TrainedArm:
    """A variant at one size on one corpus, or a control of such an arm, with its results."""

    key: ArmKey
    baseline_key: ArmKey  # with the same size, corpus and length of training
    trials: tuple[Trial, ...]
    # The trials of the verdict run; without tuning, all trials.
    verdict_trials: tuple[Trial, ...]
    # The finished verdict trials; without tuning, the finished trials at the best settings.
    chosen: tuple[Trial, ...]
    tuning: Tuning | None = None
    # The comparison with the baseline. None for a baseline, and if no seed finished in both.
    comparison: Comparison | None = None
    verdict: Verdict | None = None  # None for baselines, for controls and without tuning
    remarks: tuple[Remark, ...] = ()  # about this arm alone
    yardstick: Yardstick | None = None  # what the arm has to beat, if it is a baseline
    parts: Decomposition = Decomposition()
    # The same arm in earlier studies, by study name. Seeds are pooled with these arms.
    earlier: Mapping[str, 'TrainedArm'] = dataclasses.field(default_factory=dict)
    settling: Settling | None = None  # whether the difference lasts in longer training

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
        return self.key == self.baseline_key

    @property
    def split(self) -> str:
        """The split of the arm's loss: TEST, or VALIDATION if a trial has no test loss."""
        test_loss = self.over_seeds('test_loss')
        return VALIDATION if test_loss is None else TEST

    @property
    def loss(self) -> Estimate | None:
        """The mean loss of the `chosen` trials on `split`, nats/token."""
        return self.over_seeds(f'{self.split}_loss')  # 'test_loss' or 'val_loss'

    def over_seeds(self, field: str) -> Estimate | None:
        """Returns the mean of a metric over the chosen trials; None if a trial lacks it.

        `field` is a name in `Trial.metrics`, such as 'val_loss'.
        """
        values = [trial.metrics.get(field) for trial in self.chosen]
        if not values or None in values:
            return None
        return estimate(values)

    @property
    def bleu(self) -> float | None:
        """The mean BLEU of the `chosen` trials on `split`; None if it was not measured."""
        bleu = self.over_seeds(f'{self.split}_bleu')
        return bleu.mean if bleu else None

    @property
    def by_seed(self) -> dict[int, Trial]:
        """The chosen trials by seed, ascending."""
        ascending = sorted(self.chosen, key=lambda trial: trial.seed)
        return {trial.seed: trial for trial in ascending}

    def losses(self, split: str) -> dict[int, float]:
        """Returns the losses of the chosen trials on TEST or VALIDATION, by seed; nats/token."""
        field = f'{split}_loss'  # 'test_loss' or 'val_loss'
        return {seed: trial.metrics[field] for seed, trial in self.by_seed.items()}

    @property
    def difference(self) -> Difference | None:
        """The difference from the baseline; None if the arm is not compared with it."""
        return self.comparison.difference if self.comparison else None

    @property
    def is_settled(self) -> bool:
        """Whether longer training confirms the difference from the baseline."""
        return self.settling is not None and self.settling.code is Length.SETTLED

    @property
    def example(self) -> Trial:
        """Any trial, for the config, parameter counts and costs that all trials share."""
        trials = self.chosen or self.verdict_trials or self.trials
        return trials[0]

    @property
    def num_diverged(self) -> int:
        """How many trials of the verdict run diverged."""
        diverged = [trial for trial in self.verdict_trials if not trial.finished]
        return len(diverged)

    @property
    def learning_rate(self) -> float | None:
        """The learning rate of the `chosen` trials; None if there are none."""
        return self.chosen[0].learning_rate if self.chosen else None

    @property
    def learning_rates(self) -> tuple[float, ...]:
        """The learning rates of all trials, ascending."""
        return tuple(sorted({trial.learning_rate for trial in self.trials}))

    @property
    def at_edge(self) -> bool:
        """Whether the best of several learning rates is the smallest or the largest."""
        rates = self.learning_rates  # ascending
        has_several = len(rates) > 1
        return has_several and self.learning_rate in (rates[0], rates[-1])

    @property
    def sweeps(self) -> Mapping[str, Sweep]:
        """The sweep of each screened knob, in the order of tuning."""
        return self.tuning.sweeps if self.tuning else {}

    @property
    def bounded_knobs(self) -> tuple[str, ...]:
        """The tuned knobs whose optimum has a lower and an upper bound."""
        return tuple(knob for knob, sweep in self.sweeps.items() if sweep.optimum_low is not None)

    @property
    def not_bracketed(self) -> tuple[str, ...]:
        """The tuned knobs whose best value is not shown to lie between worse values."""
        return tuple(knob for knob, sweep in self.sweeps.items() if not sweep.bracketed)

    @property
    def blocks(self) -> tuple[Remark, ...]:
        """The remarks that withhold the verdict of this arm."""
        return tuple(remark for remark in self.remarks if remark.blocks)

    @property
    def shortfalls(self) -> tuple[Remark, ...]:
        """The remarks that the arm does not beat its baseline's yardstick."""
        return tuple(remark for remark in self.remarks if remark.code in SHORT_ARM)

    @property
    def scales(self) -> bool:
        """Whether a scaling fit may use the arm's mean loss."""
        has_loss = bool(self.chosen)
        # If seeds diverged, the mean over the other seeds is biased low.
        has_diverged = self.num_diverged > 0
        # If a rule is broken, the settings may be bad and the loss too high.
        breaks_rule = bool(self.blocks)
        return has_loss and not has_diverged and not breaks_rule


def with_baselines(
    arms: Sequence[TrainedArm],
) -> list[tuple[TrainedArm, TrainedArm | None]]:
    """Pairs each arm with its baseline, or with None if `arms` does not contain the baseline."""
    arm_by_key = {arm.key: arm for arm in arms}
    return [(arm, arm_by_key.get(arm.baseline_key)) for arm in arms]


def arms_of(study: TrainedStudy) -> tuple[TrainedArm, ...]:
    """Returns the arms of a study that have results.

    Arms are ordered by size, corpus and kind of control. In each group, the baseline is first, and
    the other arms are in the order of the study.
    """
    trials_by_key: dict[ArmKey, list[Trial]] = {}
    for trial in study.trials:
        trials_by_key.setdefault(trial.run.key, []).append(trial)
    # Each arm once, in this order. Arms that are trained longer have trials but are not declared.
    all_keys = dict.fromkeys([*study.arms, *trials_by_key])
    keys_with_results = [key for key in all_keys if key in trials_by_key]
    arm_by_key: dict[ArmKey, TrainedArm] = {}
    for key in _sorted_keys(study, keys_with_results):
        primary = None
        if key.control is not None:
            # The arm that is controlled sorts before its control, so it has been added.
            primary = arm_by_key.get(key._replace(control=None))
        arm_by_key[key] = _trained_arm(study, key, trials_by_key[key], primary)
    return tuple(arm_by_key.values())


def _sorted_keys(study: TrainedStudy, keys: Sequence[ArmKey]) -> list[ArmKey]:
    """Sorts arms by size, corpus and kind of control, with the baseline first in each group.

    Arms that are equal in all of these keep their order.
    """
    control_order = (None, *CONTROLS)  # `key.control` is None for an arm that is not a control

    def sort_key(key: ArmKey) -> tuple[int, int, int, bool]:
        return (
            study.sizes.index(key.size),
            study.corpora.index(key.corpus),
            control_order.index(key.control),
            key.variant != study.baseline,  # False, for the baseline, sorts first
        )

    return sorted(keys, key=sort_key)


def _trained_arm(
    study: TrainedStudy, key: ArmKey, trials: Sequence[Trial], primary: TrainedArm | None
) -> TrainedArm:
    """Builds an arm from its trials. For a control, `primary` is the arm that it controls."""
    # Without tuning, each run of an arm has the stage SINGLE.
    verdict_stage = VERDICT if study.tuned else SINGLE
    verdict_trials = tuple(trial for trial in trials if trial.run.stage == verdict_stage)
    if study.tuned:
        chosen = tuple(trial for trial in verdict_trials if trial.finished)
    else:
        chosen = _at_best_setting(verdict_trials)

    # Only baselines have a yardstick. One that was recorded from another run is left out.
    yardstick = study.yardsticks.get(key) if study.yardsticks else None
    verdict_runs = {trial.run.name for trial in verdict_trials}
    if yardstick is not None and yardstick.run not in verdict_runs:
        yardstick = None

    # An arm that is trained longer is compared with a baseline that is trained longer.
    is_trained_longer = key.control == LONGER
    baseline_control = LONGER if is_trained_longer else None
    return TrainedArm(
        key=key,
        baseline_key=key._replace(variant=study.baseline, control=baseline_control),
        trials=tuple(trials),
        verdict_trials=verdict_trials,
        chosen=chosen,
        tuning=_tuning(study, key, trials, primary) if study.tuned else None,
        yardstick=yardstick,
    )


def _at_best_setting(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Returns the finished trials with the settings of the lowest mean validation loss.

    Settings with diverged trials count only if there are no others, as their means are too low.
    """
    trials_by_settings: dict[tuning.Settings, list[Trial]] = {}
    for trial in trials:
        trials_by_settings.setdefault(trial.settings, []).append(trial)

    # The finished trials of each setting, in one of two lists.
    all_finished: list[list[Trial]] = []
    some_diverged: list[list[Trial]] = []
    for trials_at_settings in trials_by_settings.values():
        finished = [trial for trial in trials_at_settings if trial.finished]
        num_diverged = len(trials_at_settings) - len(finished)
        if num_diverged == 0:
            all_finished.append(finished)
        elif finished:
            some_diverged.append(finished)
    candidates = all_finished or some_diverged
    if not candidates:
        return ()

    def mean_loss(trials_at_settings: Sequence[Trial]) -> float:
        return statistics.fmean(trial.val_loss for trial in trials_at_settings)

    best = min(candidates, key=mean_loss)
    return tuple(best)


def _tuning(
    study: TrainedStudy, key: ArmKey, trials: Sequence[Trial], primary: TrainedArm | None
) -> Tuning:
    """Recomputes the tuning of an arm from the losses in its screening runs.

    Args:
        key: The key of the arm.
        trials: The trials of the arm.
        primary: For an arm that is trained longer, the same arm at the usual length.
    """
    screening_trials = [trial for trial in trials if trial.run.stage == SCREENING]
    # A knob that is not tuned has the same value in all trials of the arm.
    any_trial = screening_trials[0] if screening_trials else trials[0]
    grids: dict[str, tuple[float, ...]] = {}
    for knob, value in zip(tuning.KNOBS, any_trial.settings, strict=True):
        is_tuned = len(study.grids[knob]) > 1
        grids[knob] = study.grids[knob] if is_tuned else (value,)
    # Longer training starts from grids around the settings tuned at the usual length.
    is_trained_longer = key.control == LONGER
    if is_trained_longer and primary and primary.sweeps:
        grids = tuning.grids_around(grids, primary.tuning.settings)

    # Losses by settings and seed; None for a diverged trial.
    losses: dict[tuning.Settings, dict[int, float | None]] = {}
    for trial in screening_trials:
        loss_by_seed = losses.setdefault(trial.settings, {})
        loss_by_seed[trial.seed] = trial.val_loss if trial.finished else None
    return tuning.tune(
        grids, limits=study.tuning, measured=losses, decay=study.base.optimizer.decay
    )
