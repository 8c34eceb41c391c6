"""Whether the differences of a study last when the same arms are trained longer.

The longer training is either a control of the study, with seeds of its own, or another study in a
directory beside the study, with other seeds. An arm trained longer counts only if it qualifies for
a verdict, has the same data, and shares no seed with the (pooled) difference.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from qkattn.config import Config, to_json
from qkattn.config.serialize import OF_MACHINE
from qkattn.stats.decision import Decision
from qkattn.storage.records import flat, parse_file
from qkattn.study.arm_key import LONGER, ArmKey
from qkattn.study.chain import HARMLESS
from qkattn.study.family import is_compared
from qkattn.verdict import judging
from qkattn.verdict.codes import Remark
from qkattn.verdict.findings import Findings
from qkattn.verdict.settling import TIMES, Settling, Trained, settle
from qkattn.verdict.trained_arm import TrainedArm
from qkattn.verdict.trained_study import TrainedStudy, read_base

# Settings and sections in which two studies of different training lengths may differ.
_FREE = ('train.num_steps', 'trials', *HARMLESS, *OF_MACHINE)
# The fields that are read from study.json of other studies, with their types.
_SCHEMA = {
    'base': {'model': {'kind': str}},
    'baseline': str,
    'matched': str | None,
    'fill': str | None,
    'destinations': tuple[str, ...],
}


def studies_beside(study: TrainedStudy) -> list[Path]:
    """Finds studies in sibling directories that train the same models longer.

    For example, runs/long is found for runs/short. The other study has to

    - train for at least TIMES = 4 times as many steps;
    - have the same baseline, and match the cost of its arms in the same way;
    - have the same base config, except for settings in _FREE such as train.num_steps.

    Returns:
        The directories of the studies, sorted by path.
    """
    settings = _settings_to_compare(study.base)
    directories = []
    parent_directory = study.directory.resolve().parent
    for study_json in sorted(parent_directory.glob('*/study.json')):
        try:
            other = parse_file(study_json, _SCHEMA)
            other_base = read_base(other)
        except ValueError:
            # Damaged studies are skipped; their own reports name the problem.
            continue
        is_longer = other_base.train.num_steps >= TIMES * study.base.train.num_steps
        has_same_settings = _settings_to_compare(other_base) == settings
        has_same_baseline = other['baseline'] == study.baseline
        # Matching gives arms the baseline's cost by changing their sizes.
        has_same_matching = (
            other['matched'] == study.match
            and other['fill'] == study.fill
            and tuple(other['destinations']) == study.destinations
        )
        if is_longer and has_same_settings and has_same_baseline and has_same_matching:
            directories.append(study_json.parent)
    return directories


def _settings_to_compare(base: Config) -> dict[str, Any]:
    """Returns the settings that must not differ between the two studies, by name.

    For example, {'model.d_model': 256, ...}. _FREE names the settings and sections that may differ,
    such as 'train.num_steps' and 'trials'.
    """
    settings = {}
    for name, setting in flat(to_json(base)):
        # The section 'trials' contains 'trials.seeds'.
        is_free = any(name == free or name.startswith(f'{free}.') for free in _FREE)
        if not is_free:
            settings[name] = setting
    return settings


def settlings(
    study: TrainedStudy,
    arms: Sequence[TrainedArm],
    blocks: Sequence[Remark],
    beside: Sequence[Findings],
) -> Mapping[ArmKey, Settling]:
    """Returns whether each arm's difference from the baseline lasts in longer training.

    The difference is compared with that of the same arm after the longest training (`settle`).

    Args:
        study: The study.
        arms: The arms of the study, with their verdicts.
        blocks: The remarks that withhold every verdict of the study.
        beside: The findings of other studies that train the arms longer (`studies_beside`).

    Returns:
        The result by arm key, for all arms that have a difference but are not controls.
    """
    settling_by_arm = {}
    for arm in arms:
        is_primary = is_compared(arm.key, study.baseline)  # neither a control nor the baseline
        if not is_primary or arm.difference is None:
            continue

        # Find the same arm, trained longer: as a control of this study, and in other studies.
        longer_arms: list[TrainedArm] = []
        control = _longer_control(study, arm, arms, blocks)
        if control is not None:
            longer_arms.append(control)
        longer_arms += _arms_beside(study, arm, beside)

        is_equivalent = arm.verdict is not None and arm.verdict.decision is Decision.EQUIVALENT
        settling_by_arm[arm.key] = settle(
            _trained_difference(arm),
            _longest_difference(arm, longer_arms),
            study.margin,
            equivalent=is_equivalent,
        )
    return settling_by_arm


def _longest_difference(arm: TrainedArm, longer_arms: Sequence[TrainedArm]) -> Trained | None:
    """Returns the difference from the baseline after the longest training of an arm.

    `longer_arms` are the same arm, trained longer. One of them counts only if it has the same data
    and shares no seed with `arm`. Returns None if none of them counts.
    """
    longer_differences: list[Trained] = []
    for longer_arm in longer_arms:
        longer_difference = _trained_difference(longer_arm)
        has_same_data = longer_arm.example.data == arm.example.data
        if longer_difference is not None and has_same_data and _share_no_seed(arm, longer_arm):
            longer_differences.append(longer_difference)
    return max(longer_differences, key=lambda difference: difference.steps, default=None)


def _trained_difference(arm: TrainedArm) -> Trained | None:
    """Returns an arm's difference with its standard error and number of steps.

    Returns None if the difference or its standard error is not known.
    """
    difference = arm.difference
    if difference is None:
        return None
    if difference.error_seeds is None or difference.error_evaluation is None:
        return None
    # The two parts of the standard error are independent: error**2 is the sum of their squares.
    error = math.hypot(difference.error_seeds, difference.error_evaluation)
    return Trained(steps=arm.example.run.num_steps, mean=difference.mean, error=error)


def _share_no_seed(arm: TrainedArm, longer_arm: TrainedArm) -> bool:
    """Returns whether the differences of two arms have no seed in common.

    The seeds include those that are pooled from earlier studies. Both arms have a comparison with
    their baseline.
    """
    assert arm.comparison is not None and longer_arm.comparison is not None
    seeds = arm.comparison.differences.keys()  # `differences` are by seed
    longer_seeds = longer_arm.comparison.differences.keys()
    return seeds.isdisjoint(longer_seeds)


def _longer_control(
    study: TrainedStudy, arm: TrainedArm, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> TrainedArm | None:
    """Returns the control of this study that trains an arm longer, if it qualifies for a verdict.

    The control must not share seeds with the verdict on the arm. That verdict decides whether the
    control is trained, so a difference on the same seeds would be biased.

    Args:
        arms: All arms of the study, with the controls.
        blocks: The remarks that withhold every verdict of the study.
    """
    # Without `longer_seeds`, controls are trained on the seeds of the verdicts.
    longer_seeds = set(study.controls.longer_seeds)
    has_other_seeds = longer_seeds and longer_seeds.isdisjoint(study.seeds)
    if not study.tuned or not has_other_seeds:
        return None

    arm_by_key = {candidate.key: candidate for candidate in arms}
    control_key = arm.key._replace(control=LONGER)
    control = arm_by_key.get(control_key)
    if control is None or control.difference is None:
        return None
    baseline = arm_by_key.get(control.baseline_key)
    verdict = judging.verdict_on_pair(study, control, baseline, blocks, num_comparisons=1)
    has_verdict = verdict.decision is not Decision.NO_VERDICT
    return control if has_verdict else None


def _arms_beside(
    study: TrainedStudy, arm: TrainedArm, beside: Sequence[Findings]
) -> Iterator[TrainedArm]:
    """Yields the same arm of other studies that train it longer.

    `beside` holds the findings of these studies. The other study must not share seeds with `study`,
    and the arm must have a verdict there and the same parameter counts.
    """
    for findings in beside:
        has_other_seeds = set(findings.study.seeds).isdisjoint(study.seeds)
        if not has_other_seeds:
            continue
        for candidate in findings.arms:
            if candidate.key != arm.key or candidate.verdict is None:
                continue
            has_verdict = candidate.verdict.decision is not Decision.NO_VERDICT
            has_same_parameters = candidate.example.parameters == arm.example.parameters
            if has_verdict and has_same_parameters:
                yield candidate
