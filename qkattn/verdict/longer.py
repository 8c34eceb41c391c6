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
            record = parse_file(study_json, _SCHEMA)
            base = read_base(record)
        except ValueError:
            # Damaged studies are skipped; their own reports name the problem.
            continue
        is_longer = base.train.num_steps >= TIMES * study.base.train.num_steps
        has_same_settings = _settings_to_compare(base) == settings
        has_same_baseline = record['baseline'] == study.baseline
        has_same_matching = (
            record['matched'] == study.match
            and record['fill'] == study.fill
            and tuple(record['destinations']) == study.destinations
        )
        if is_longer and has_same_settings and has_same_baseline and has_same_matching:
            directories.append(study_json.parent)
    return directories


def _settings_to_compare(base: Config) -> dict[str, Any]:
    """Returns the settings that must not differ between the two studies, by name.

    For example, {'model.d_model': 256, ...}. Settings and sections in _FREE are left out.
    """
    settings = {}
    for name, setting in flat(to_json(base)):
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
        if not is_compared(arm.key, study.baseline) or arm.difference is None:
            continue

        # Find the same arm, trained longer: as a control of this study, and in other studies.
        longer_arms: list[TrainedArm] = []
        control = _longer_control(study, arm, arms, blocks)
        if control is not None:
            longer_arms.append(control)
        longer_arms += _arms_beside(study, arm, beside)

        longer_differences: list[Trained] = []
        for longer_arm in longer_arms:
            longer_difference = _trained_difference(longer_arm)
            has_same_data = longer_arm.example.data == arm.example.data
            if longer_difference is not None and has_same_data and _share_no_seed(arm, longer_arm):
                longer_differences.append(longer_difference)
        longest = max(longer_differences, key=lambda trained: trained.steps, default=None)

        is_equivalent = arm.verdict is not None and arm.verdict.decision is Decision.EQUIVALENT
        settling_by_arm[arm.key] = settle(
            _trained_difference(arm), longest, study.margin, equivalent=is_equivalent
        )
    return settling_by_arm


def _trained_difference(arm: TrainedArm) -> Trained | None:
    """Returns an arm's difference with its standard error and number of steps.

    Returns None if the difference or its standard error is not known.
    """
    difference = arm.difference
    if difference is None:
        return None
    if difference.error_seeds is None or difference.error_evaluation is None:
        return None
    error = math.hypot(difference.error_seeds, difference.error_evaluation)
    return Trained(steps=arm.example.run.num_steps, mean=difference.mean, error=error)


def _share_no_seed(arm: TrainedArm, longer_arm: TrainedArm) -> bool:
    """Returns whether the differences of two arms have no seed in common.

    The seeds include those that are pooled from earlier studies.
    """
    assert arm.comparison is not None and longer_arm.comparison is not None
    seeds = arm.comparison.differences.keys()
    return seeds.isdisjoint(longer_arm.comparison.differences)


def _longer_control(
    study: TrainedStudy, arm: TrainedArm, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> TrainedArm | None:
    """Returns the control of this study that trains an arm longer, if it qualifies for a verdict.

    The control must not share seeds with the verdict on the arm. That verdict decides whether the
    control is trained, so its seeds would be biased.

    Args:
        arms: All arms of the study, with the controls.
        blocks: The remarks that withhold every verdict of the study.
    """
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
    return None if verdict.decision is Decision.NO_VERDICT else control


def _arms_beside(
    study: TrainedStudy, arm: TrainedArm, beside: Sequence[Findings]
) -> Iterator[TrainedArm]:
    """Yields the same arm of other studies that train it longer.

    The other study must not share seeds with `study`. The arm needs a verdict there, and the same
    parameter counts. `beside` holds the findings of the other studies.
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
