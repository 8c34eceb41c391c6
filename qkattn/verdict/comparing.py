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
    """Compares the chosen trials of two arms, seed by seed. Returns None if they share no seed.

    If earlier studies of the chain compare both arms on the same documents, their seeds are pooled
    with those of this study. The differences form one sample, stratified by study.

    Besides the spread over seeds, the interval includes two errors:

    - The error over documents of the mean difference over all seeds. If losses over the same
      documents are missing, it is not known, and there is no interval and no test.
    - The error of tuning: a bound on how far the settings of an arm miss their optimum. The true
      difference may be lower by the bound of `arm` and higher by the bound of `other`. For several
      studies it is the mean of their bounds, weighted by their numbers of seeds.
    """
    split = TEST if arm.split == other.split == TEST else VALIDATION
    own_sample = _sample(arm, other, split)
    if not own_sample.seeds:
        return None
    samples = [own_sample]
    num_pooled: dict[str, int] = {}
    for study, (earlier_arm, earlier_other) in _earlier_pairs(arm, other).items():
        sample = _sample(earlier_arm, earlier_other, split)
        if sample.can_be_pooled_with(own_sample):
            samples.append(sample)
            num_pooled[study] = len(sample.seeds)

    # One sample of all seeds; the number of its study is the stratum of a seed.
    seeds: list[int] = []
    differences: list[float] = []
    strata: list[int] = []
    for stratum, sample in enumerate(samples):
        seeds += sample.seeds
        differences += (sample.arm_S - sample.other_S).tolist()
        strata += [stratum] * len(sample.seeds)
    sum_arm_tuning = math.fsum(len(sample.seeds) * sample.arm_tuning for sample in samples)
    sum_other_tuning = math.fsum(len(sample.seeds) * sample.other_tuning for sample in samples)
    difference = inference.paired_test(
        differences,
        margin,
        evaluation=_evaluation_error(samples),
        tuning=(sum_arm_tuning / len(seeds), sum_other_tuning / len(seeds)),
        strata=strata,
    )

    difference_by_seed = dict(sorted(zip(seeds, differences, strict=True)))
    validation_S = np.concatenate([sample.validation_S for sample in samples])
    num_documents = None
    if own_sample.documents:
        num_documents = len(own_sample.documents[0].names)
    return Comparison(
        split,
        difference_by_seed,
        difference,
        validation=float(np.mean(validation_S)),
        correlation=_correlation(samples),
        num_documents=num_documents,
        pooled=num_pooled,
    )


def num_diverged(arm: TrainedArm, other: TrainedArm) -> tuple[int, int]:
    """Returns how many trials of each of two arms diverged, over all studies that compare them."""
    pairs = [(arm, other), *_earlier_pairs(arm, other).values()]
    arm_diverged = 0
    other_diverged = 0
    for arm_in_study, other_in_study in pairs:
        arm_diverged += arm_in_study.num_diverged
        other_diverged += other_in_study.num_diverged
    return arm_diverged, other_diverged


def _earlier_pairs(arm: TrainedArm, other: TrainedArm) -> dict[str, tuple[TrainedArm, TrainedArm]]:
    """Returns both arms as earlier studies have trained them, by the name of the study, ascending.

    A study is left out if it lacks one of the arms, or evaluates an arm on another split.
    """
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
    arm_S: np.ndarray  # losses of the first arm
    other_S: np.ndarray  # losses of the second arm
    validation_S: np.ndarray  # differences on the validation split
    arm_tuning: float  # how far the settings of the first arm may miss their optimum
    other_tuning: float  # how far the settings of the second arm may miss their optimum
    # The losses by document: of each trial of the first arm, then of each trial of the second one.
    # Empty if some are missing.
    documents: list[Documents]

    def can_be_pooled_with(self, own: '_Sample') -> bool:
        """Returns whether the sample has seeds and was evaluated on the same documents as `own`."""
        if not self.seeds:
            return False
        if not self.documents or not own.documents:
            # Two samples without documents may be pooled, one with and one without may not.
            return not self.documents and not own.documents
        return self.documents[0].has_targets_of(own.documents[0])


def _sample(arm: TrainedArm, other: TrainedArm, split: str) -> _Sample:
    """Collects the losses of two arms of one study at the S seeds that finished in both.

    `split` is the split that decides. Losses on the validation split are collected as well.
    """
    arm_trials = arm.by_seed
    other_trials = other.by_seed
    seeds = [seed for seed in arm_trials if seed in other_trials]
    trials = [arm_trials[seed] for seed in seeds] + [other_trials[seed] for seed in seeds]
    validation_S = _losses(arm, VALIDATION, seeds) - _losses(other, VALIDATION, seeds)
    return _Sample(
        seeds,
        arm_S=_losses(arm, split, seeds),
        other_S=_losses(other, split, seeds),
        validation_S=validation_S,
        arm_tuning=_tuning_error(arm),
        other_tuning=_tuning_error(other),
        documents=_documents(trials, split),
    )


def _losses(arm: TrainedArm, split: str, seeds: Sequence[int]) -> np.ndarray:
    """Returns the losses of an arm on a split at S seeds, nats/token."""
    loss_by_seed = arm.losses(split)
    return np.array([loss_by_seed[seed] for seed in seeds], float)


def _documents(trials: Sequence[Trial], split: str) -> list[Documents]:
    """Returns the losses by document of each trial; [] if they give no error over documents.

    Such an error needs losses by document of every trial, on the same targets, and at least two
    documents.
    """
    by_trial: list[Documents] = []
    for trial in trials:
        if split not in trial.documents:
            return []
        by_trial.append(trial.documents[split])
    if not by_trial:
        return []
    first = by_trial[0]
    have_same_targets = all(documents.has_targets_of(first) for documents in by_trial)
    has_several_documents = len(first.names) > 1
    return by_trial if have_same_targets and has_several_documents else []


def _tuning_error(arm: TrainedArm) -> float:
    """Returns the bound of the error of tuning in nats, summed over the tuned settings.

    A setting whose optimum has no bound adds 0.
    """
    return math.fsum(sweep.at_worst or 0.0 for sweep in arm.sweeps.values())


def _evaluation_error(samples: Sequence[_Sample]) -> tuple[float, float] | None:
    """Returns the standard error over documents, nats/token, and its degrees of freedom.

    Returns None if there are no losses by document.
    """
    first_documents = samples[0].documents
    if not first_documents:
        return None
    differences = []  # for each study, the difference of each seed in nats, by document
    for sample in samples:
        # The first trials are those of the first arm, the last ones those of the second arm.
        nats_XC = np.array([documents.nats_C for documents in sample.documents])
        num_seeds = len(sample.seeds)
        arm_nats_SC = nats_XC[:num_seeds]
        other_nats_SC = nats_XC[num_seeds:]
        differences.append(arm_nats_SC - other_nats_SC)
    differences_SC = np.concatenate(differences)
    tokens_C = first_documents[0].tokens_C  # all trials are evaluated on the same targets
    return inference.evaluation_error(differences_SC, tokens_C)


def _correlation(samples: Sequence[_Sample]) -> float | None:
    """Returns Pearson's correlation over seeds of the losses of two arms, within each study.

    Returns None for fewer than 3 seeds, or if the losses of an arm are all equal.
    """
    arm_S = np.concatenate([sample.arm_S - sample.arm_S.mean() for sample in samples])
    other_S = np.concatenate([sample.other_S - sample.other_S.mean() for sample in samples])
    if len(arm_S) < inference.MIN_PAIRS or np.ptp(arm_S) == 0 or np.ptp(other_S) == 0:
        return None
    return statistics.correlation(arm_S.tolist(), other_S.tolist())
