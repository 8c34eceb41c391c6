"""The difference of an arm from another one, over the seeds of all studies of a chain."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

from qkattn.stats import inference
from qkattn.verdict.codes import TEST, VALIDATION, Comparison
from qkattn.verdict.runs import Documents, Trial
from qkattn.verdict.trained_arm import TrainedArm


def compare(arm: TrainedArm, other: TrainedArm, margin: float) -> Comparison | None:
    """Compares the chosen trials of two arms, seed by seed; None if they share no seed.

    Earlier studies of the chain that compare both arms are pooled with their study: one sample of
    differences, stratified by study. All of them evaluate the same documents.

    The interval includes two more errors. That over documents is of the mean difference over all
    seeds; where losses over the same documents are missing, it is not known, and there is no
    interval and no test. The error of tuning bounds by how much the settings of an arm may miss
    their optimum: the true difference may be lower by the bound of the arm and higher by that of
    the other one. Of several studies it is the mean of their bounds, weighted by their seeds.
    """
    split = TEST if arm.split == other.split == TEST else VALIDATION
    own = _sample(arm, other, split)
    if not own.seeds:
        return None
    samples = [own]
    seeds_by_study: dict[str, int] = {}
    for study, (earlier_arm, earlier_other) in _earlier_pairs(arm, other).items():
        sample = _sample(earlier_arm, earlier_other, split)
        if sample.can_be_pooled_with(own):
            samples.append(sample)
            seeds_by_study[study] = len(sample.seeds)
    seeds: list[int] = []
    differences: list[float] = []
    strata: list[int] = []
    for stratum, sample in enumerate(samples):
        seeds += sample.seeds
        differences += (sample.arm_S - sample.other_S).tolist()
        strata += [stratum] * len(sample.seeds)
    arm_tuning = math.fsum(len(sample.seeds) * sample.arm_tuning for sample in samples)
    other_tuning = math.fsum(len(sample.seeds) * sample.other_tuning for sample in samples)
    difference = inference.paired(
        differences,
        margin,
        evaluation=_evaluation_error(samples),
        tuning=(arm_tuning / len(seeds), other_tuning / len(seeds)),
        strata=strata,
    )
    return Comparison(
        split,
        dict(sorted(zip(seeds, differences, strict=True))),
        difference,
        validation=float(np.mean(np.concatenate([sample.validation_S for sample in samples]))),
        correlation=_correlation(samples),
        num_documents=len(own.documents[0].names) if own.documents else None,
        pooled=seeds_by_study,
    )


def num_diverged(arm: TrainedArm, other: TrainedArm) -> tuple[int, int]:
    """How many trials of each of two arms diverged, in all studies that compare them."""
    pairs = [(arm, other), *_earlier_pairs(arm, other).values()]
    of_arm = sum(one.num_diverged for one, _ in pairs)
    of_other = sum(two.num_diverged for _, two in pairs)
    return of_arm, of_other


def _earlier_pairs(arm: TrainedArm, other: TrainedArm) -> dict[str, tuple[TrainedArm, TrainedArm]]:
    """Both arms in each earlier study that has them on the same splits, by its name, ascending."""
    pairs = {}
    for study in sorted(arm.earlier.keys() & other.earlier.keys()):
        earlier_arm = arm.earlier[study]
        earlier_other = other.earlier[study]
        if earlier_arm.split == arm.split and earlier_other.split == other.split:
            pairs[study] = (earlier_arm, earlier_other)
    return pairs


@dataclasses.dataclass(frozen=True, eq=False)
class _Sample:
    """Two arms of one study at the S seeds that both have; losses in nats/token."""

    seeds: list[int]
    arm_S: np.ndarray
    other_S: np.ndarray
    validation_S: np.ndarray  # differences on the validation split
    arm_tuning: float  # by how much the settings of each may miss their optimum
    other_tuning: float
    # By trial, those of the arm before those of the other one; empty where some are missing.
    documents: list[Documents]

    def can_be_pooled_with(self, own: '_Sample') -> bool:
        """Whether it has seeds that were evaluated on the documents of `own`."""
        if not self.seeds or bool(self.documents) != bool(own.documents):
            return False
        return not own.documents or self.documents[0].has_targets_of(own.documents[0])


def _sample(arm: TrainedArm, other: TrainedArm, split: str) -> _Sample:
    arm_trials = arm.by_seed
    other_trials = other.by_seed
    seeds = [seed for seed in arm_trials if seed in other_trials]

    def losses_S(side: TrainedArm, of_split: str) -> np.ndarray:
        losses = side.losses(of_split)
        return np.array([losses[seed] for seed in seeds], float)

    trials = [arm_trials[seed] for seed in seeds] + [other_trials[seed] for seed in seeds]
    return _Sample(
        seeds,
        losses_S(arm, split),
        losses_S(other, split),
        losses_S(arm, VALIDATION) - losses_S(other, VALIDATION),
        _tuning_error(arm),
        _tuning_error(other),
        _documents(trials, split),
    )


def _documents(trials: Sequence[Trial], split: str) -> list[Documents]:
    """The losses by document of each trial.

    Empty where a trial has none, where trials have other targets, and of a single document, whose
    difference has no error over documents.
    """
    documents = []
    for trial in trials:
        if split not in trial.documents:
            return []
        documents.append(trial.documents[split])
    if not documents or len(documents[0].names) < 2:
        return []
    if not all(each.has_targets_of(documents[0]) for each in documents):
        return []
    return documents


def _tuning_error(arm: TrainedArm) -> float:
    """Bound of the error of tuning in nats, summed over knobs; a knob without a bound adds 0."""
    return math.fsum(sweep.at_worst or 0.0 for sweep in arm.sweeps.values())


def _evaluation_error(samples: Sequence[_Sample]) -> tuple[float, float] | None:
    """Standard error over documents with its degrees of freedom; None if it is not known."""
    first = samples[0].documents
    if not first:
        return None
    differences = []  # in nats by document, [seeds, documents] of each study
    for sample in samples:
        nats_XC = np.array([trial.nats_C for trial in sample.documents])
        num_seeds = len(sample.seeds)
        differences.append(nats_XC[:num_seeds] - nats_XC[num_seeds:])
    return inference.evaluation_error(np.concatenate(differences), first[0].tokens_C)


def _correlation(samples: Sequence[_Sample]) -> float | None:
    """Pearson's of the losses of two arms over seeds, within each study; None without spread."""
    arm_S = np.concatenate([sample.arm_S - sample.arm_S.mean() for sample in samples])
    other_S = np.concatenate([sample.other_S - sample.other_S.mean() for sample in samples])
    if len(arm_S) < inference.MIN_PAIRS or np.ptp(arm_S) == 0 or np.ptp(other_S) == 0:
        return None
    return statistics.correlation(arm_S.tolist(), other_S.tolist())
