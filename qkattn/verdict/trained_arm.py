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
    """The parts of an arm's difference from the baseline, and whether the difference lasts.

    On shared seeds, `same_shape` + `reinvesting` is the difference. The parts are estimates with
    95 % intervals. They are not corrected for their number and give no verdict. A part is None
    while one of its arms lacks results or breaks a rule. Rules in `study_findings.UNSURE` are an
    exception: an arm that breaks one of them still has an estimate.
    """

    # The same-shape control minus the baseline. The control has the baseline's dimensions.
    same_shape: Comparison | None = None
    # The arm minus the same-shape control: the effect of spending the saved parameters.
    reinvesting: Comparison | None = None
    # The arm minus the baseline, both trained longer. Only decided arms are trained longer.
    longer: Comparison | None = None


@dataclasses.dataclass(frozen=True)
class TrainedArm:
    """An arm with its results: a variant at one size on one corpus, or a control of one."""

    key: ArmKey
    # The key of the arm's baseline, which has the same size, corpus and length of training.
    baseline_key: ArmKey
    trials: tuple[Trial, ...]
    # The trials of the verdict run. Without tuning, all trials.
    verdict_trials: tuple[Trial, ...]
    # The finished ones of `verdict_trials`. Without tuning, only those at the best setting.
    chosen: tuple[Trial, ...]
    tuning: Tuning | None = None
    # The comparison with the baseline. None for the baseline, and if no seed finished in both.
    comparison: Comparison | None = None
    verdict: Verdict | None = None  # None for the baseline, for controls and without tuning
    remarks: tuple[Remark, ...] = ()  # those about this arm alone
    # What a baseline has to beat, if it was recorded from the baseline's verdict run.
    yardstick: Yardstick | None = None
    parts: Decomposition = Decomposition()  # of a primary arm's difference
    # The same arm in earlier studies of the chain with which its seeds may be pooled, by study.
    earlier: Mapping[str, 'TrainedArm'] = dataclasses.field(default_factory=dict)
    settling: Settling | None = None  # of a primary arm's difference

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
        return VALIDATION if self.over_seeds('test_loss') is None else TEST

    @property
    def loss(self) -> Estimate | None:
        """The mean loss of the `chosen` trials on `split`, nats/token."""
        return self.over_seeds(f'{self.split}_loss')

    def over_seeds(self, field: str) -> Estimate | None:
        """Returns the mean of a metric over the chosen trials; None unless all have it."""
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
        return {seed: trial.metrics[f'{split}_loss'] for seed, trial in self.by_seed.items()}

    @property
    def difference(self) -> Difference | None:
        """The difference from the baseline."""
        return self.comparison.difference if self.comparison else None

    @property
    def is_settled(self) -> bool:
        """Whether a longer training confirms the difference."""
        return self.settling is not None and self.settling.code is Length.SETTLED

    @property
    def example(self) -> Trial:
        """A trial with the config, parameter counts and costs that all trials share."""
        return (self.chosen or self.verdict_trials or self.trials)[0]

    @property
    def num_diverged(self) -> int:
        """How many trials of the verdict run diverged."""
        return sum(not trial.finished for trial in self.verdict_trials)

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
        """Whether the best of several learning rates is the smallest or the largest one."""
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
        """The remarks that the arm does not beat its baseline's yardstick."""
        return tuple(remark for remark in self.remarks if remark.code in SHORT_ARM)

    @property
    def scales(self) -> bool:
        """Whether a scaling fit may use the arm's mean loss.

        If a seed diverged, the mean over the others is biased low. If a rule blocks the arm, its
        settings may not be the best ones, so that its loss is too high.
        """
        is_biased = self.num_diverged > 0 or bool(self.blocks)
        return bool(self.chosen) and not is_biased


def with_baselines(
    arms: Sequence[TrainedArm],
) -> list[tuple[TrainedArm, TrainedArm | None]]:
    """Pairs each arm with its baseline, or with None if the baseline has no results."""
    arm_by_key = {arm.key: arm for arm in arms}
    return [(arm, arm_by_key.get(arm.baseline_key)) for arm in arms]


def arms_of(study: TrainedStudy) -> tuple[TrainedArm, ...]:
    """Returns the arms of a study that have results.

    They are ordered by size, then by corpus. At each size and corpus, primary arms come first, then
    the controls of each kind. The baseline leads each of these groups. The others follow in the
    order of the study.
    """
    trials_by_key: dict[ArmKey, list[Trial]] = {}
    for trial in study.trials:
        trials_by_key.setdefault(trial.run.key, []).append(trial)
    # Arms that are trained longer are not declared. They follow the declared arms.
    in_order_of_study = dict.fromkeys([*study.arms, *trials_by_key])
    with_results = [key for key in in_order_of_study if key in trials_by_key]
    controls = (None, *CONTROLS)  # the values of `key.control`; a primary arm has None

    def rank(key: ArmKey) -> tuple[int, int, int, bool]:
        """Returns the sort key of an arm. False, for the baseline, sorts before True."""
        return (
            study.sizes.index(key.size),
            study.corpora.index(key.corpus),
            controls.index(key.control),
            key.variant != study.baseline,
        )

    arm_by_key: dict[ArmKey, TrainedArm] = {}
    for key in sorted(with_results, key=rank):
        # The primary arm of a control has a lower rank, so it is there already.
        primary = arm_by_key.get(key._replace(control=None))
        arm_by_key[key] = _trained_arm(study, key, trials_by_key[key], primary)
    return tuple(arm_by_key.values())


def _trained_arm(
    study: TrainedStudy, key: ArmKey, trials: Sequence[Trial], primary: TrainedArm | None
) -> TrainedArm:
    """Builds an arm from its trials. For a control, `primary` is the arm that it controls."""
    # The trials that decide: those of the verdict run, or all trials of an untuned study.
    stage = VERDICT if study.tuned else SINGLE
    verdict_trials = tuple(trial for trial in trials if trial.run.stage == stage)
    if study.tuned:
        chosen = tuple(trial for trial in verdict_trials if trial.finished)
    else:
        chosen = _at_best_setting(verdict_trials)

    # What the arm has to beat, if it is a baseline. It may have been recorded from an earlier
    # verdict run of the baseline. Then it says nothing about these trials.
    yardstick = (study.yardsticks or {}).get(key)
    verdict_runs = {trial.run.name for trial in verdict_trials}
    if yardstick is not None and yardstick.run not in verdict_runs:
        yardstick = None

    # An arm that is trained longer has a baseline that is trained longer, too.
    control_of_baseline = LONGER if key.control == LONGER else None
    return TrainedArm(
        key=key,
        baseline_key=ArmKey(study.baseline, key.size, key.corpus, control_of_baseline),
        trials=tuple(trials),
        verdict_trials=verdict_trials,
        chosen=chosen,
        tuning=_tuning(study, key, trials, primary) if study.tuned else None,
        yardstick=yardstick,
    )


def _at_best_setting(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """Returns the finished trials at the setting with the lowest mean validation loss.

    If a seed diverged at a setting, the mean over the others is biased low. Such a setting is
    considered only if seeds diverged at every setting.
    """
    trials_by_setting: dict[tuning.Settings, list[Trial]] = {}
    for trial in trials:
        trials_by_setting.setdefault(trial.settings, []).append(trial)
    complete: list[list[Trial]] = []
    partial: list[list[Trial]] = []
    for trials_at_setting in trials_by_setting.values():
        finished = [trial for trial in trials_at_setting if trial.finished]
        if len(finished) == len(trials_at_setting):
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
    """Repeats the tuning of an arm from the results of its screening.

    Tuning starts from a grid of values for each setting (knob):

    - A knob that is tuned has the grid of the study.
    - A knob that is not tuned has a grid of one value, that of the arm's trials.
    - An arm that is trained longer has grids around the tuned settings of its `primary` arm.
    """
    screening = [trial for trial in trials if trial.run.stage == SCREENING]
    first_trial = (screening or trials)[0]
    grids: dict[str, tuple[float, ...]] = {}
    for knob, value in zip(tuning.KNOBS, first_trial.settings, strict=True):
        is_tuned = len(study.grids[knob]) > 1
        grids[knob] = study.grids[knob] if is_tuned else (value,)
    is_trained_longer = key.control == LONGER
    if is_trained_longer and primary and primary.sweeps:
        grids = tuning.grids_around(grids, primary.tuning.settings)

    # Losses by settings and seed; None for a diverged trial.
    losses: dict[tuning.Settings, dict[int, float | None]] = {}
    for trial in screening:
        loss_of_seed = losses.setdefault(trial.settings, {})
        loss_of_seed[trial.seed] = trial.val_loss if trial.finished else None
    return tuning.tune(grids, study.tuning, losses, study.base.optimizer.decay)
