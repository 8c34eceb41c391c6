"""The difference in loss between two arms, paired by seed."""

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
    """Estimates the loss of `arm` minus the loss of `other`, paired by seed.

    Seeds of earlier studies are pooled if the arms were evaluated on the same documents there. The
    interval covers three sources of error:

    - seeds: the spread of the differences within each study;
    - documents: the standard error over evaluated documents;
    - tuning: the true difference may be lower by the tuning bound of `arm`, or higher by the
      tuning bound of `other`. Bounds of several studies are averaged over seeds.

    Without losses by document, there is no interval and no test.

    Args:
        arm: The first arm.
        other: The second arm.
        margin: The largest difference that counts as none, nats/token.

    Returns:
        The comparison of the arms' chosen trials; None if the arms share no seed.
    """
    split = TEST if arm.split == other.split == TEST else VALIDATION
    own_sample = _sample(arm, other, split)
    if not own_sample.seeds:
        return None
    earlier_samples = _earlier_samples(arm, other, own_sample, split)
    samples = [own_sample, *earlier_samples.values()]

    validation_S = np.concatenate([sample.validation_S for sample in samples])
    num_documents = None
    if own_sample.documents_by_trial:
        # All trials have the same documents.
        num_documents = len(own_sample.documents_by_trial[0].names)
    return Comparison(
        split,
        differences=_difference_by_seed(samples),
        difference=_difference(samples, margin),
        validation=float(np.mean(validation_S)),
        correlation=_correlation(samples),
        num_documents=num_documents,
        pooled={study: len(sample.seeds) for study, sample in earlier_samples.items()},
    )


def num_diverged(arm: TrainedArm, other: TrainedArm) -> tuple[int, int]:
    """Counts the diverged trials of each of two arms, over all studies that compare them."""
    arm_diverged = arm.num_diverged
    other_diverged = other.num_diverged
    for earlier_arm, earlier_other in _earlier_pairs(arm, other).values():
        arm_diverged += earlier_arm.num_diverged
        other_diverged += earlier_other.num_diverged
    return arm_diverged, other_diverged


def _earlier_pairs(arm: TrainedArm, other: TrainedArm) -> dict[str, tuple[TrainedArm, TrainedArm]]:
    """Returns the two arms as trained by earlier studies, by study name.

    A study is left out if it lacks one of the arms or evaluates an arm on another split.
    """
    pairs = {}
    shared_studies = arm.earlier.keys() & other.earlier.keys()
    for study_name in sorted(shared_studies):
        earlier_arm = arm.earlier[study_name]
        earlier_other = other.earlier[study_name]
        if earlier_arm.split == arm.split and earlier_other.split == other.split:
            pairs[study_name] = (earlier_arm, earlier_other)
    return pairs


@dataclasses.dataclass(frozen=True, eq=False)
class _Sample:
    """Losses of two arms at the S seeds that both have in one study, nats/token."""

    seeds: list[int]
    arm_S: np.ndarray  # losses of the first arm
    other_S: np.ndarray  # losses of the second arm
    validation_S: np.ndarray  # differences on the validation split
    arm_tuning: float  # bound on the loss that better settings of the first arm could save
    other_tuning: float  # bound on the loss that better settings of the second arm could save
    # Losses by document: the S trials of the first arm, then the S trials of the second arm. Empty
    # if some are missing.
    documents_by_trial: list[Documents]

    def can_be_pooled_with(self, own: '_Sample') -> bool:
        """Returns whether the sample has seeds and was evaluated on the same documents as `own`."""
        if not self.seeds:
            return False
        has_documents = bool(self.documents_by_trial)
        own_has_documents = bool(own.documents_by_trial)
        if has_documents and own_has_documents:
            # All trials of a sample have the same documents.
            return self.documents_by_trial[0].has_targets_of(own.documents_by_trial[0])
        # If losses by document are missing, they have to be missing in both.
        return has_documents == own_has_documents


def _sample(arm: TrainedArm, other: TrainedArm, split: str) -> _Sample:
    """Returns the losses of two arms of one study on a split, at the seeds that both finished."""
    arm_trials = arm.by_seed
    other_trials = other.by_seed
    seeds = [seed for seed in arm_trials if seed in other_trials]
    trials = [arm_trials[seed] for seed in seeds]
    trials += [other_trials[seed] for seed in seeds]
    validation_S = _losses(arm, VALIDATION, seeds) - _losses(other, VALIDATION, seeds)
    return _Sample(
        seeds,
        arm_S=_losses(arm, split, seeds),
        other_S=_losses(other, split, seeds),
        validation_S=validation_S,
        arm_tuning=_tuning_error(arm),
        other_tuning=_tuning_error(other),
        documents_by_trial=_documents_by_trial(trials, split),
    )


def _earlier_samples(
    arm: TrainedArm, other: TrainedArm, own_sample: _Sample, split: str
) -> dict[str, _Sample]:
    """Returns the losses of two arms in earlier studies that can be pooled, by study name."""
    samples = {}
    for study_name, (earlier_arm, earlier_other) in _earlier_pairs(arm, other).items():
        sample = _sample(earlier_arm, earlier_other, split)
        if sample.can_be_pooled_with(own_sample):
            samples[study_name] = sample
    return samples


def _difference_by_seed(samples: Sequence[_Sample]) -> dict[int, float]:
    """Returns the difference between two arms at each seed of all studies, seeds ascending."""
    seeds_and_differences: list[tuple[int, float]] = []
    for sample in samples:
        differences = (sample.arm_S - sample.other_S).tolist()
        seeds_and_differences += zip(sample.seeds, differences, strict=True)
    return dict(sorted(seeds_and_differences))


def _difference(samples: Sequence[_Sample], margin: float) -> inference.Difference:
    """Tests the mean difference between two arms, over the seeds of all studies.

    Args:
        samples: The losses of the arms, one sample for each study.
        margin: The largest difference that counts as none, nats/token.
    """
    differences: list[float] = []
    strata: list[int] = []  # the index of each seed's study
    for study_index, sample in enumerate(samples):
        differences += (sample.arm_S - sample.other_S).tolist()
        strata += [study_index] * len(sample.seeds)

    # Each study's tuning bound counts once for each of its seeds.
    num_seeds = len(differences)
    arm_tuning_sum = math.fsum(len(sample.seeds) * sample.arm_tuning for sample in samples)
    other_tuning_sum = math.fsum(len(sample.seeds) * sample.other_tuning for sample in samples)
    return inference.paired_test(
        differences,
        margin,
        evaluation=_evaluation_error(samples),
        tuning=(arm_tuning_sum / num_seeds, other_tuning_sum / num_seeds),
        strata=strata,
    )


def _losses(arm: TrainedArm, split: str, seeds: Sequence[int]) -> np.ndarray:
    """Returns the losses of an arm on a split at S seeds, nats/token."""
    loss_by_seed = arm.losses(split)
    return np.array([loss_by_seed[seed] for seed in seeds], float)


def _documents_by_trial(trials: Sequence[Trial], split: str) -> list[Documents]:
    """Returns the losses by document of each trial on a split; [] if they allow no standard error.

    A standard error needs at least two documents, and the same targets in every trial.
    """
    documents_by_trial: list[Documents] = []
    for trial in trials:
        if split not in trial.documents:
            return []
        documents_by_trial.append(trial.documents[split])
    if not documents_by_trial:
        return []

    first = documents_by_trial[0]
    have_same_targets = all(documents.has_targets_of(first) for documents in documents_by_trial)
    has_several_documents = len(first.names) > 1
    if not have_same_targets or not has_several_documents:
        return []
    return documents_by_trial


def _tuning_error(arm: TrainedArm) -> float:
    """Returns a bound on the loss that better settings could save, nats/token."""
    # `at_worst` bounds what a better value of one setting could save. None counts as 0.
    return math.fsum(sweep.at_worst or 0.0 for sweep in arm.sweeps.values())


def _evaluation_error(samples: Sequence[_Sample]) -> tuple[float, float] | None:
    """Returns the standard error over C documents, nats/token, and its degrees of freedom.

    Returns None without losses by document. All trials have the same documents.
    """
    first_sample = samples[0]
    if not first_sample.documents_by_trial:
        return None
    differences_by_study = []  # arrays of shape SC: S seeds, C documents
    for sample in samples:
        # The S trials of the first arm come before the S trials of the second arm.
        nats_by_trial = [documents.nats_C for documents in sample.documents_by_trial]
        num_seeds = len(sample.seeds)
        arm_nats_SC = np.array(nats_by_trial[:num_seeds])
        other_nats_SC = np.array(nats_by_trial[num_seeds:])
        differences_by_study.append(arm_nats_SC - other_nats_SC)
    differences_SC = np.concatenate(differences_by_study)
    tokens_C = first_sample.documents_by_trial[0].tokens_C
    return inference.evaluation_error(differences_SC, tokens_C)


def _correlation(samples: Sequence[_Sample]) -> float | None:
    """Returns Pearson's correlation over seeds between the losses of two arms.

    Losses are centered within each study. The result is None for fewer than 3 seeds, or if all
    losses of an arm are equal.
    """
    arm_S = np.concatenate([sample.arm_S - sample.arm_S.mean() for sample in samples])
    other_S = np.concatenate([sample.other_S - sample.other_S.mean() for sample in samples])
    has_few_seeds = len(arm_S) < inference.MIN_PAIRS
    has_equal_losses = np.ptp(arm_S) == 0 or np.ptp(other_S) == 0
    if has_few_seeds or has_equal_losses:
        return None
    return statistics.correlation(arm_S.tolist(), other_S.tolist())
