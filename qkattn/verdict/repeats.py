"""Adds results of the same arms in earlier studies, which a study repeats."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from qkattn.config import Config, from_json
from qkattn.config.serialize import OF_MACHINE
from qkattn.storage.records import flat
from qkattn.study.arm_key import LONGER, ArmKey
from qkattn.study.chain import HARMLESS
from qkattn.study.tuning import MODEL_KNOBS
from qkattn.verdict.findings import Findings
from qkattn.verdict.trained_arm import TrainedArm
from qkattn.verdict.trained_study import TrainedStudy, known_settings

# Settings and sections in which the same arm may differ between studies. Each study tunes its arms
# and has its own seeds.
_OF_STUDY = (*HARMLESS, *OF_MACHINE, 'trials', *(f'model.{knob}' for knob in MODEL_KNOBS))


def with_earlier_arms(
    study: TrainedStudy, arms: Sequence[TrainedArm], earlier: Mapping[str, Findings]
) -> tuple[TrainedArm, ...]:
    """Adds to each arm the same arm of earlier studies, so that seeds can be pooled.

    An earlier arm is added if it has the same training settings and data, and qualifies for a
    verdict in its own study. `question_of` gives an arm the same key in all studies.

    Args:
        study: The study.
        arms: The arms of the study.
        earlier: The findings of earlier studies, by study name.
    """
    if not earlier:
        return tuple(arms)

    # The usable arms of each earlier study, by the key that is the same in all studies.
    usable_by_study: dict[str, dict[ArmKey, TrainedArm]] = {}
    for study_name, findings in earlier.items():
        has_verdicts = not findings.blocks  # `blocks` are remarks that withhold every verdict
        if has_verdicts:
            usable_by_study[study_name] = _usable_arms(findings)

    completed = []
    for arm in arms:
        common_key = study.question_of(arm.key)
        earlier_arms: dict[str, TrainedArm] = {}
        for study_name, usable_arms in usable_by_study.items():
            earlier_arm = usable_arms.get(common_key)
            if earlier_arm is not None and _is_trained_alike(earlier_arm, arm):
                earlier_arms[study_name] = earlier_arm
        completed.append(dataclasses.replace(arm, earlier=earlier_arms))
    return tuple(completed)


def _is_trained_alike(earlier_arm: TrainedArm, arm: TrainedArm) -> bool:
    """Returns whether two arms have the same training settings and data."""
    has_same_settings = _training_settings(earlier_arm) == _training_settings(arm)
    # `example` is any trial of an arm, as all have the same data.
    has_same_data = earlier_arm.example.data == arm.example.data
    return has_same_settings and has_same_data


def _usable_arms(findings: Findings) -> dict[ArmKey, TrainedArm]:
    """Returns the arms of an earlier study that qualify for a verdict.

    They are by `question_of`, which gives an arm the same key in all studies.
    """
    study = findings.study
    arm_by_key = {}
    for arm in findings.every_arm:
        if _is_usable(study, arm):
            common_key = study.question_of(arm.key)
            arm_by_key[common_key] = arm
    return arm_by_key


def _is_usable(study: TrainedStudy, arm: TrainedArm) -> bool:
    """Returns whether an arm of an earlier study qualifies for a verdict."""
    # Arms trained longer were selected by their results, which would bias the pooled difference.
    is_trained_longer = arm.key.control == LONGER
    is_withheld = bool(arm.blocks)
    if is_trained_longer or is_withheld:
        return False
    # The verdict run is complete if it has a trial for every declared seed.
    seeds = {trial.seed for trial in arm.verdict_trials}
    return seeds.issuperset(study.verdict_seeds(arm.key))


def _training_settings(arm: TrainedArm) -> dict[str, Any]:
    """Returns the settings that an arm is trained with, by name, such as 'model.d_model'.

    Settings and sections in _OF_STUDY, such as 'trials', may differ between studies and are left
    out.
    """
    # Another version may have written settings that `Config` does not have.
    stored_settings = known_settings(Config, arm.example.run.config)
    config: Config = from_json(Config, stored_settings)
    # Replace d_ff=None by the default width, which compares equal to the same explicit width.
    model = dataclasses.replace(config.model, d_ff=config.model.mlp_width)
    config = dataclasses.replace(config, model=model)

    settings = {}
    for name, setting in flat(dataclasses.asdict(config)):
        may_differ = any(name == free or name.startswith(f'{free}.') for free in _OF_STUDY)
        if not may_differ:
            settings[name] = setting
    return settings
