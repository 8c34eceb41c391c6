"""Arms of a study: their trials, means over seeds, and the difference of one from another."""

import dataclasses
import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from qkattn.stats import inference
from qkattn.stats.inference import Difference, Estimate, estimate
from qkattn.stats.sweep import Sweep
from qkattn.study import tuning
from qkattn.study.arm_key import CONTROLS, LONGER, ArmKey
from qkattn.study.tuning import SCREENING, SINGLE, VERDICT, Tuning
from qkattn.verdict.codes import SHORT_ARM, TEST, VALIDATION, Comparison, Remark, Verdict
from qkattn.verdict.load import Study, Yardstick
from qkattn.verdict.runs import Documents, Trial
from qkattn.verdict.settling import Settling


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """The parts of an arm's difference from the baseline, and whether it lasts.

    On shared seeds `removing` (its control of equal shape minus the baseline) + `reinvesting` (the
    arm minus that control) is the difference; `longer` is that of both trained longer, which only
    decided arms are. These are estimates with 95 % intervals, not corrected for their number, and
    give no verdict. A part is None while one of its arms lacks results or breaks a rule; an arm
    that is only known badly (`findings.UNSURE`) has a part.
    """

    removing: Comparison | None = None
    reinvesting: Comparison | None = None
    longer: Comparison | None = None


@dataclasses.dataclass(frozen=True)
class Arm:
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
    earlier: Mapping[str, 'Arm'] = dataclasses.field(default_factory=dict)
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
        return estimate(values) if values and None not in values else None

    @property
    def bleu(self) -> float | None:
        mean = self.over_seeds(f'{self.split}_bleu')
        return mean.mean if mean else None

    @property
    def by_seed(self) -> dict[int, Trial]:
        """`chosen`, seeds ascending."""
        return {trial.seed: trial for trial in sorted(self.chosen, key=lambda trial: trial.seed)}

    def losses(self, split: str) -> dict[int, float]:
        """Losses of `chosen` on a split by seed, ascending; nats/token."""
        return {seed: trial.metrics[f'{split}_loss'] for seed, trial in self.by_seed.items()}

    @property
    def difference(self) -> Difference | None:
        """From the baseline."""
        return self.comparison.difference if self.comparison else None

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


def with_baselines(arms: Sequence[Arm]) -> list[tuple[Arm, Arm | None]]:
    """Every arm with its baseline."""
    by_key = {arm.key: arm for arm in arms}
    return [(arm, by_key.get(arm.group)) for arm in arms]


def arms_of(study: Study) -> tuple[Arm, ...]:
    """One arm per arm key with results: size by size, corpus by corpus, primary arms first.

    Within these in the order of the study, the baseline first.
    """
    by_key: dict[ArmKey, list[Trial]] = {}
    for trial in study.trials:
        by_key.setdefault(trial.run.key, []).append(trial)

    def rank(key: ArmKey) -> tuple:
        kind = (None, *CONTROLS).index(key.control)
        corpus = study.corpora.index(key.corpus)
        return study.sizes.index(key.size), corpus, kind, key.variant != study.baseline

    declared = dict.fromkeys((*study.arms, *by_key))
    arms: dict[ArmKey, Arm] = {}
    for key in sorted((key for key in declared if key in by_key), key=rank):
        trials = by_key[key]
        primary = arms.get(key._replace(control=None))
        stage = VERDICT if study.tuned else SINGLE
        judged = tuple(trial for trial in trials if trial.run.stage == stage)
        finished = tuple(trial for trial in judged if trial.finished)
        longer = LONGER if key.control == LONGER else None
        yardstick = (study.yardsticks or {}).get(key)
        of_run = yardstick and yardstick.run in {trial.run.name for trial in judged}
        arms[key] = Arm(
            key=key,
            group=ArmKey(study.baseline, key.size, key.corpus, longer),
            trials=tuple(trials),
            verdict_trials=judged,
            chosen=finished if study.tuned else _best_setting(judged),
            tuning=_tuning(study, key, trials, primary) if study.tuned else None,
            yardstick=yardstick if of_run else None,
        )
    return tuple(arms.values())


def _best_setting(trials: Sequence[Trial]) -> tuple[Trial, ...]:
    """The finished trials at the setting with the lowest mean val loss.

    One with a diverged seed, whose mean is biased, is considered only if every setting has one.
    """
    by_setting: dict[tuning.Settings, list[Trial]] = {}
    for trial in trials:
        by_setting.setdefault(trial.at, []).append(trial)
    complete = [group for group in by_setting.values() if all(t.finished for t in group)]
    partial = [[t for t in group if t.finished] for group in by_setting.values()]
    return tuple(
        min(
            complete or list(filter(None, partial)),
            key=lambda group: statistics.fmean(t.val_loss for t in group),
            default=(),
        )
    )


def _tuning(study: Study, key: ArmKey, trials: Sequence[Trial], primary: Arm | None) -> Tuning:
    """The state of the tuning, from the results of the screening; `primary` is not a control."""
    screening = [trial for trial in trials if trial.run.stage == SCREENING]
    of_arm = dict(zip(tuning.KNOBS, (screening or trials)[0].at, strict=True))
    grids = {knob: v if len(v) > 1 else (of_arm[knob],) for knob, v in study.grids.items()}
    if key.control == LONGER and primary and primary.sweeps:
        grids = tuning.grids_around(grids, primary.tuning.settings)
    measured: dict[tuning.Settings, dict[int, float | None]] = {}
    for trial in screening:
        loss = trial.val_loss if trial.finished else None
        measured.setdefault(trial.at, {})[trial.seed] = loss
    return tuning.tune(grids, study.tuning, measured, study.base.optimizer.decay)


def _pairs(arm: Arm, other: Arm) -> dict[str | None, tuple[Arm, Arm]]:
    """Both arms in their study, under None, and in each earlier one that has both, by its name."""
    pairs: dict[str | None, tuple[Arm, Arm]] = {None: (arm, other)}
    for name in arm.earlier.keys() & other.earlier.keys():
        pair = arm.earlier[name], other.earlier[name]
        if [one.split for one in pair] == [arm.split, other.split]:
            pairs[name] = pair
    return dict(sorted(pairs.items(), key=lambda item: item[0] or ''))


def num_diverged(arm: Arm, other: Arm) -> tuple[int, int]:
    """How many trials of two arms diverged, in all studies that `compare` pools."""
    pairs = _pairs(arm, other).values()
    return sum(one.num_diverged for one, _ in pairs), sum(two.num_diverged for _, two in pairs)


def compare(arm: Arm, other: Arm, study: Study) -> Comparison | None:
    """Compares the chosen trials of two arms, seed by seed; None if they share no seed.

    The seeds of earlier studies of the chain that compare them, too, are pooled with those of the
    study: one sample of differences, stratified by study. The interval includes the error over
    documents and the error of tuning: the arm may be better than measured by its own error of
    tuning, and worse by that of the other arm. The settings of each study may miss their optimum by
    the bound of that study, so a mean over all seeds by the mean of these bounds, weighted by the
    seeds. All studies evaluate the same documents, whose differences are means over all seeds.
    Without losses over the same documents the error over documents is not known: then there is no
    interval and no test.
    """
    split = TEST if arm.split == other.split == TEST else VALIDATION
    samples = {name: _sample(*pair, split) for name, pair in _pairs(arm, other).items()}
    if not (own := samples[None]).seeds:
        return None
    pooled = [one for name, one in samples.items() if name is None or one.fits(own)]
    strata = [number for number, one in enumerate(pooled) for _ in one.seeds]
    differences = [value for one in pooled for value in one.differences]
    num_seeds = len(differences)
    tuned = [
        math.fsum(len(one.seeds) * one.tuning[side] for one in pooled) / num_seeds
        for side in range(2)
    ]
    difference = inference.paired(
        differences,
        study.margin,
        evaluation=_evaluation_error(pooled),
        tuning=(tuned[0], tuned[1]),
        strata=strata,
    )
    seeds = [seed for one in pooled for seed in one.seeds]
    by_seed = dict(sorted(zip(seeds, differences, strict=True)))
    documents = own.documents
    return Comparison(
        split,
        by_seed,
        difference,
        validation=float(np.mean(np.concatenate([one.validation_S for one in pooled]))),
        correlation=_correlation(pooled),
        num_documents=len(documents[0].names) if documents else None,
        pooled={
            name: len(one.seeds) for name, one in samples.items() if name and one in pooled[1:]
        },
    )


@dataclasses.dataclass(frozen=True, eq=False)
class _Sample:
    """Two arms of one study at the seeds that both have."""

    seeds: list[int]
    arm_S: np.ndarray  # losses
    other_S: np.ndarray
    validation_S: np.ndarray  # differences on the validation split
    tuning: tuple[float, float]  # the errors of tuning of both
    # Losses by document of the arm, then of the other one; empty where some are missing, or where
    # they are not of the same targets.
    documents: list[Documents]

    @property
    def differences(self) -> list[float]:
        return (self.arm_S - self.other_S).tolist()

    def fits(self, other: '_Sample') -> bool:
        """Whether it has seeds, evaluated on the documents of another sample."""
        if not self.seeds or bool(self.documents) != bool(other.documents):
            return False
        return not self.documents or self.documents[0].alike(other.documents[0])


def _sample(arm: Arm, other: Arm, split: str) -> _Sample:
    sides = [(one.losses(split), one.losses(VALIDATION), one.by_seed) for one in (arm, other)]
    seeds = [seed for seed in sides[0][0] if seed in sides[1][0]]
    losses_S, validation_S = (
        [np.array([side[place][seed] for seed in seeds], float) for side in sides]
        for place in range(2)
    )
    documents = [by_seed[seed].documents.get(split) for _, _, by_seed in sides for seed in seeds]
    known = [one for one in documents if one is not None]
    is_whole = len(known) == len(documents) > 0 and len(known[0].names) > 1
    if not is_whole or not all(one.alike(known[0]) for one in known):
        known = []
    return _Sample(
        seeds,
        losses_S[0],
        losses_S[1],
        validation_S[0] - validation_S[1],
        (_tuning_error(arm), _tuning_error(other)),
        known,
    )


def _tuning_error(arm: Arm) -> float:
    """Bound of the error of tuning in nats, summed over knobs; a knob without a bound adds 0."""
    return math.fsum(sweep.at_worst or 0.0 for sweep in arm.sweeps.values())


def _evaluation_error(samples: Sequence[_Sample]) -> tuple[float, float] | None:
    """Standard error over documents with its degrees of freedom; None if it is not known."""
    first = samples[0].documents
    if not first:
        return None
    differences = []
    for sample in samples:
        nats_SC = np.array([one.nats_C for one in sample.documents])
        number = len(sample.seeds)
        differences.append(nats_SC[:number] - nats_SC[number:])
    return inference.evaluation_error(np.concatenate(differences), first[0].tokens_C)


def _correlation(samples: Sequence[_Sample]) -> float | None:
    """Pearson's of the losses of two arms over seeds, within each study; None without spread."""
    arm_S = np.concatenate([one.arm_S - one.arm_S.mean() for one in samples])
    other_S = np.concatenate([one.other_S - one.other_S.mean() for one in samples])
    if len(arm_S) < inference.MIN_PAIRS or np.ptp(arm_S) == 0 or np.ptp(other_S) == 0:
        return None
    return statistics.correlation(arm_S.tolist(), other_S.tolist())
