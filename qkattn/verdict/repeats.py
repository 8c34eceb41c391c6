"""What earlier studies of a chain found of the same arms."""

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

# The same arm may differ in these settings between studies, as each study does its own tuning and
# has its own seeds.
_OF_STUDY = (*HARMLESS, *OF_MACHINE, 'trials', *(f'model.{knob}' for knob in MODEL_KNOBS))


def with_earlier_arms(
    study: TrainedStudy, arms: Sequence[TrainedArm], earlier: Mapping[str, Findings]
) -> tuple[TrainedArm, ...]:
    """Adds to each arm the same arm of earlier studies, so that seeds can be pooled.

    An earlier arm is added if it has the same question and the same training settings, and
    qualifies for a verdict in its own study. The question is the arm's key in the form that all
    studies share (`TrainedStudy.question_of`).

    Args:
        study: The study.
        arms: The arms of the study.
        earlier: The findings of earlier studies, by study name.
    """
    if not earlier:
        return tuple(arms)

    usable_by_study: dict[str, dict[ArmKey, TrainedArm]] = {}
    for study_name, findings in earlier.items():
        withholds_all_verdicts = bool(findings.blocks)
        if not withholds_all_verdicts:
            usable_by_study[study_name] = _usable_arms(findings)

    completed = []
    for arm in arms:
        question = study.question_of(arm.key)
        earlier_arms: dict[str, TrainedArm] = {}
        for study_name, arm_by_question in usable_by_study.items():
            earlier_arm = arm_by_question.get(question)
            if earlier_arm is None:
                continue
            if _training_settings(earlier_arm) == _training_settings(arm):
                earlier_arms[study_name] = earlier_arm
        completed.append(dataclasses.replace(arm, earlier=earlier_arms))
    return tuple(completed)


def _usable_arms(findings: Findings) -> dict[ArmKey, TrainedArm]:
    """Returns the arms of an earlier study that qualify for a verdict, by their question."""
    study = findings.study
    usable = {}
    for arm in findings.every_arm:
        if _is_usable(study, arm):
            usable[study.question_of(arm.key)] = arm
    return usable


def _is_usable(study: TrainedStudy, arm: TrainedArm) -> bool:
    """Returns whether an arm of an earlier study qualifies for a verdict.

    Controls that are trained longer do not qualify: they were selected by their results.
    """
    if arm.key.control == LONGER or arm.blocks:
        return False
    seeds = {trial.seed for trial in arm.verdict_trials}
    return seeds.issuperset(study.verdict_seeds(arm.key))


def _training_settings(arm: TrainedArm) -> dict[str, Any]:
    """Returns the settings that an arm is trained with, by name, such as 'model.d_model'.

    Settings in which studies of the same arm may differ are left out. _OF_STUDY lists them: a
    setting, such as 'model.init_qk', or a whole section, such as 'trials'.
    """
    config: Config = from_json(Config, known_settings(Config, arm.example.run.config))
    # d_ff=None stands for the default width. Make it explicit, so that equal widths are equal.
    model = dataclasses.replace(config.model, d_ff=config.model.mlp_width)
    config = dataclasses.replace(config, model=model)

    settings = {}
    for name, value in flat(dataclasses.asdict(config)):
        is_of_study = any(name == own or name.startswith(f'{own}.') for own in _OF_STUDY)
        if not is_of_study:
            settings[name] = value
    return settings
