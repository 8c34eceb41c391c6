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
    """Adds to each arm of a study the same arm of earlier studies, so that seeds can be pooled.

    For example, an earlier study has trained an arm with the seeds 1 to 5, and has left open
    whether it is better. This study trains the arm with the seeds 6 to 10. The arm is then compared
    over all ten seeds.

    An earlier arm is added if it asks the same question, is trained with the same settings, and
    qualifies for a verdict in its own study.

    Args:
        study: The study.
        arms: Its arms.
        earlier: The findings of the earlier studies, by the name of the study.
    """
    if not earlier:
        return tuple(arms)

    # The arms of each earlier study that may be added, by their question (`chain.question`). An arm
    # may have another key in each study, but its question is the same in all of them.
    arms_by_study: dict[str, dict[ArmKey, TrainedArm]] = {}
    for name, findings in earlier.items():
        if not findings.blocks:  # they would withhold every verdict
            arms_by_study[name] = _usable_arms(findings)

    completed = []
    for arm in arms:
        question = study.question_of(arm.key)
        earlier_arms: dict[str, TrainedArm] = {}
        for name, arm_by_question in arms_by_study.items():
            earlier_arm = arm_by_question.get(question)
            if earlier_arm is None:
                continue
            if _training_settings(earlier_arm) == _training_settings(arm):
                earlier_arms[name] = earlier_arm
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
