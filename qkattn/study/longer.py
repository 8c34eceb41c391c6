"""Controls of a longer budget: which arms are trained longer, and from which settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from qkattn.config import Study
from qkattn.run.records import FINISHED
from qkattn.stats import decision, inference
from qkattn.stats.decision import Decision
from qkattn.study.arms import Arm
from qkattn.study.place import LONGER, Place

# Test loss by seed; None for a diverged trial.
Losses = Mapping[int, float | None]


def losses_of(trials: Sequence[Mapping[str, Any]]) -> Losses:
    """Losses on the test split, of the results of an arm's verdict."""
    return {
        trial['trial']['seed']: trial['test_loss'] if trial['status'] == FINISHED else None
        for trial in trials
    }


def lengthened(arm: Arm) -> Arm:
    """The arm, trained longer."""
    return dataclasses.replace(arm, place=arm.place._replace(control=LONGER))


def to_lengthen(
    study: Study, arms: Sequence[Arm], losses: Mapping[Place, Losses], comparisons: int
) -> list[Arm]:
    """The baseline and the arms with a word, of primary arms of one size and corpus.

    A word is one by the tests alone, on the test split, paired over seeds: other reasons against a
    verdict are not known before the report.

    Args:
      comparisons: of the whole study, to correct for.
    """
    (baseline,) = (arm for arm in arms if arm.variant == study.baseline)
    others = [arm for arm in arms if arm is not baseline]
    of_baseline = losses[baseline.place]
    differences, diverged = {}, {}
    for arm in others:
        own = losses[arm.place]
        pairs = [(own[seed], of_baseline[seed]) for seed in own]
        finished = [one - other for one, other in pairs if one is not None and other is not None]
        differences[arm.place] = (
            inference.paired(finished, study.margin, resamples=None) if finished else None
        )
        diverged[arm.place] = (
            sum(one is None for one, _ in pairs),
            sum(other is None for _, other in pairs),
        )
    judged = decision.judge(differences, diverged=diverged, planned=comparisons)
    silent = (Decision.UNDECIDED, Decision.NO_VERDICT)
    words = [arm for arm in others if judged[arm.place].decision not in silent]
    return [baseline, *words] if words else []
