"""Which differences of a study are settled, by the same arms after at least four times the steps.

The longer training comes from one of two places:

- the study's own control that is trained longer, if it has fresh seeds;
- another study in a directory beside this one. It has the same base config except for the number of
  steps, the frequency of evaluations and the trials. It has the same baseline and matching, and
  other seeds.

A longer arm counts only if it qualifies for a verdict. It is trained at its own tuned settings.
"""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkattn.config import Config, to_json
from qkattn.config.serialize import OF_MACHINE
from qkattn.stats.decision import Decision
from qkattn.storage.records import flat, parse_file
from qkattn.study.arm_key import LONGER, ArmKey
from qkattn.study.family import is_compared
from qkattn.verdict import judging
from qkattn.verdict.codes import Remark
from qkattn.verdict.findings import Findings
from qkattn.verdict.settling import TIMES, Settling, Trained, settle, trained
from qkattn.verdict.trained_arm import TrainedArm
from qkattn.verdict.trained_study import TrainedStudy, read_base

# Two studies that train for different lengths may differ in these settings.
_FREE = (
    'train.num_steps',
    'train.eval_every',
    'train.log_every',
    'train.checkpoint_every',
    'train.steps_per_dispatch',
    'train.lifting',
    'trials',
    *OF_MACHINE,
)
# Fields of study.json that say how arms are matched to the baseline, with their types.
_MATCHING = {
    'baseline': str,
    'matched': str | None,
    'fill': str | None,
    'destinations': tuple[str, ...],
}


def studies_beside(study: TrainedStudy) -> list[Path]:
    """Finds the directories beside a study whose studies train the same models longer.

    Longer means at least TIMES times as many steps.
    """
    shared = _shared(study.base)
    matching = [study.baseline, study.match, study.fill, list(study.destinations)]
    paths = []
    for path in sorted(study.directory.resolve().parent.glob('*/study.json')):
        try:
            record = parse_file(path, {**_MATCHING, 'base': {'model': {'kind': str}}})
            base = read_base(record)
        except ValueError:
            # A report on that study says what is wrong with it.
            continue
        is_longer = base.train.num_steps >= TIMES * study.base.train.num_steps
        has_matching = [record[name] for name in _MATCHING] == matching
        if is_longer and has_matching and _shared(base) == shared:
            paths.append(path.parent)
    return paths


def _shared(base: Config) -> dict[str, Any]:
    """Returns the settings that studies of different lengths have to share."""
    settings = {}
    for name, value in flat(to_json(base)):
        is_free = any(name == free or name.startswith(f'{free}.') for free in _FREE)
        if not is_free:
            settings[name] = value
    return settings


def settlings(
    study: TrainedStudy,
    arms: Sequence[TrainedArm],
    blocks: Sequence[Remark],
    beside: Sequence[Findings],
) -> Mapping[ArmKey, Settling]:
    """Returns for each primary arm whether a longer training confirms its difference.

    Args:
        study: The study.
        arms: Its arms, with their verdicts.
        blocks: The remarks that withhold every verdict of the study.
        beside: The findings of `studies_beside`. If an arm is trained longer in several of them,
            the longest training counts.
    """
    settling_of_arm = {}
    for arm in arms:
        if not is_compared(arm.key, study.baseline) or arm.difference is None:
            continue
        longer_arms = [*_own(study, arm, arms, blocks), *_others(study, arm, beside)]
        longest = None
        for longer_arm in longer_arms:
            longer = _trained(longer_arm)
            if longer and (longest is None or longer.steps > longest.steps):
                longest = longer
        is_equivalent = arm.verdict is not None and arm.verdict.decision is Decision.EQUIVALENT
        settling_of_arm[arm.key] = settle(
            _trained(arm), longest, study.margin, equivalent=is_equivalent
        )
    return settling_of_arm


def _trained(arm: TrainedArm) -> Trained | None:
    """Returns an arm's difference with its number of steps; None if its error is not known."""
    if arm.difference is None:
        return None
    return trained(arm.example.run.num_steps, arm.difference)


def _own(
    study: TrainedStudy, arm: TrainedArm, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> list[TrainedArm]:
    """Returns the arm's control in this study that is trained longer, as a list of one arm.

    Returns [] if the control does not have fresh seeds or would get no verdict.
    """
    longer_seeds = set(study.controls.longer_seeds)
    has_fresh_seeds = longer_seeds and longer_seeds.isdisjoint(study.seeds)
    if not study.tuned or not has_fresh_seeds:
        return []
    arm_by_key = {candidate.key: candidate for candidate in arms}
    longer = arm_by_key.get(arm.key._replace(control=LONGER))
    baseline = arm_by_key.get(arm.group._replace(control=LONGER))
    if longer is None or longer.difference is None:
        return []
    verdict = judging.pair(study, longer, baseline, blocks, num_comparisons=1)
    if verdict.decision is Decision.NO_VERDICT:
        return []
    return [longer]


def _others(
    study: TrainedStudy, arm: TrainedArm, beside: Sequence[Findings]
) -> Iterator[TrainedArm]:
    """Yields the same arm in the studies beside this one that have other seeds.

    The arm has to have a verdict and the same parameter counts there.
    """
    for findings in beside:
        if not set(findings.study.seeds).isdisjoint(study.seeds):
            continue
        for longer in findings.arms:
            is_same_arm = longer.key == arm.key
            has_verdict = longer.verdict and longer.verdict.decision is not Decision.NO_VERDICT
            if not is_same_arm or not has_verdict:
                continue
            if longer.example.parameters == arm.example.parameters:
                yield longer
