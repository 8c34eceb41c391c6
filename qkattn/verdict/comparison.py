"""An arm minus another: differences over seeds on both splits, with every error that enters."""

import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from qkattn.stats import inference
from qkattn.verdict.arms import Arm
from qkattn.verdict.codes import TEST, VALIDATION, Comparison
from qkattn.verdict.load import Study

# An arm and the one that it is compared with.
Pair = tuple[Arm, Arm]

_SPLITS = (TEST, VALIDATION)


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
    losses = {of: [(arm.losses(of), other.losses(of)) for arm, other in pairs] for of in _SPLITS}
    seeds = sorted(set.intersection(*(set(own) for both in losses[split] for own in both)))
    if not seeds and len(pairs) > 1:
        return None
    error, df, number = _evaluation_error(pairs, seeds, split, study.has_documents)
    errors: dict[str, Any] = {
        'evaluation_error': error,
        'evaluation_df': df,
        'tuning': (_tuning_error([a for a, _ in pairs]), _tuning_error([b for _, b in pairs])),
        'resamples': resamples,
    }
    if seeds:
        arm_S, other_S = (_means(losses[split], side, seeds) for side in (0, 1))
        differences = dict(zip(seeds, (arm_S - other_S).tolist(), strict=True))
        difference = inference.paired(list(differences.values()), study.margin, **errors)
        validation = [_means(losses[VALIDATION], side, seeds) for side in (0, 1)]
        correlation = _correlation(arm_S, other_S)
    else:
        differences, correlation = {}, None
        group, other = (list(own.values()) for own in losses[split][0])
        difference = inference.welch(group, other, study.margin, **errors)
        validation = [np.array(list(own.values())) for own in losses[VALIDATION][0]]
    confirmed = float(validation[0].mean() - validation[1].mean())
    return Comparison(split, differences, difference, confirmed, correlation, number)


def _means(losses: Sequence[tuple], side: int, seeds: Sequence[int]) -> np.ndarray:
    """The mean loss over the pairs of each seed, of the arms (0) or the others (1)."""
    return np.mean([[both[side][seed] for seed in seeds] for both in losses], axis=0)


def _correlation(arm_S: np.ndarray, other_S: np.ndarray) -> float | None:
    if len(arm_S) < inference.MIN_PAIRS or not (np.ptp(arm_S) > 0 and np.ptp(other_S) > 0):
        return None
    return statistics.correlation(arm_S.tolist(), other_S.tolist())


def _tuning_error(arms: Sequence[Arm]) -> float:
    """Nats by which the settings may be off, the sum over knobs; where unbounded, none is known."""
    errors = [sum(sweep.at_worst or 0.0 for sweep in arm.sweeps.values()) for arm in arms]
    return statistics.fmean(errors)


def _evaluation_error(
    pairs: Sequence[Pair], seeds: Sequence[int], split: str, expected: bool
) -> tuple[float | None, float | None, int | None]:
    """Standard error over documents, its degrees of freedom (Satterthwaite), number of documents.

    Of one document only, 0, None and None. Without losses by document, or if those of the two arms
    are of other targets, the error is None where losses by document are expected, else 0.
    """
    variances, dfs, number = [], [], 0
    for arm, other in pairs:
        both = [arm.documents(split, seeds), other.documents(split, seeds)]
        if not all(both) or not all(of.alike(both[0][0]) for side in both for of in side):
            return None if expected else 0.0, None, None
        if len(both[0][0].names) < 2:
            return 0.0, None, None
        arm_SC, other_SC = (np.array([of.nats_C for of in side]) for side in both)
        nats_SC = arm_SC - other_SC if seeds else (arm_SC.mean(0) - other_SC.mean(0))[None]
        error, df = inference.evaluation_error(nats_SC, both[0][0].tokens_C)
        variances.append(error**2)
        dfs.append(df)
        number += nats_SC.shape[1]
    total = sum(variances)
    if not total:
        return 0.0, None, number
    df = total**2 / sum(v**2 / df for v, df in zip(variances, dfs, strict=True))
    return total**0.5 / len(pairs), df, number
