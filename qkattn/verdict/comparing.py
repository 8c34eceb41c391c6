"""The difference of an arm from another one, over the seeds of all studies of a chain."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

import numpy as np

from qkattn.stats import inference
from qkattn.verdict.codes import TEST, VALIDATION, Comparison
from qkattn.verdict.runs import Documents
from qkattn.verdict.trained_arm import TrainedArm


def _pairs(arm: TrainedArm, other: TrainedArm) -> dict[str | None, tuple[TrainedArm, TrainedArm]]:
    """Both arms in their study, under None, and in each earlier one that has both, by its name."""
    pairs: dict[str | None, tuple[TrainedArm, TrainedArm]] = {None: (arm, other)}
    for name in arm.earlier.keys() & other.earlier.keys():
        pair = arm.earlier[name], other.earlier[name]
        if [one.split for one in pair] == [arm.split, other.split]:
            pairs[name] = pair
    return dict(sorted(pairs.items(), key=lambda item: item[0] or ''))


def num_diverged(arm: TrainedArm, other: TrainedArm) -> tuple[int, int]:
    """How many trials of two arms diverged, in all studies that `compare` pools."""
    pairs = _pairs(arm, other).values()
    return sum(one.num_diverged for one, _ in pairs), sum(two.num_diverged for _, two in pairs)


def compare(arm: TrainedArm, other: TrainedArm, margin: float) -> Comparison | None:
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
        margin,
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


def _sample(arm: TrainedArm, other: TrainedArm, split: str) -> _Sample:
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


def _tuning_error(arm: TrainedArm) -> float:
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
