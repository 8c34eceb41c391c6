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


def with_earlier(
    study: TrainedStudy, arms: Sequence[TrainedArm], earlier: Mapping[str, Findings]
) -> tuple[TrainedArm, ...]:
    """Adds to each arm of a study the same arm of earlier studies that it may be pooled with.

    An earlier arm may be pooled if it asks the same question, is trained with the same settings and
    has results at all its seeds, and if no rule withholds its verdict. If a rule withholds every
    verdict of a study, no arm of that study is pooled. Arms that are not pooled still count as
    looks.

    `earlier` holds the findings of the earlier studies by name.
    """
    if not earlier:
        return tuple(arms)

    # The arms of each earlier study by their question (`chain.question`), which is the same key in
    # all studies of a chain.
    usable: dict[str, dict[ArmKey, TrainedArm]] = {}
    for name, findings in earlier.items():
        if findings.blocks:
            continue
        usable[name] = {}
        for arm in findings.every_arm:
            if _is_usable(findings.study, arm):
                usable[name][findings.study.question_of(arm.key)] = arm

    pooled = []
    for arm in arms:
        question = study.question_of(arm.key)
        earlier_arms: dict[str, TrainedArm] = {}
        for name, arms_by_question in usable.items():
            candidate = arms_by_question.get(question)
            if candidate and _training(candidate) == _training(arm):
                earlier_arms[name] = candidate
        pooled.append(dataclasses.replace(arm, earlier=earlier_arms))
    return tuple(pooled)


def _is_usable(study: TrainedStudy, arm: TrainedArm) -> bool:
    """Returns whether an arm of an earlier study qualifies for a verdict.

    Controls that are trained longer do not qualify: they were selected by their results.
    """
    if arm.key.control == LONGER or arm.blocks:
        return False
    seeds = {trial.seed for trial in arm.verdict_trials}
    return seeds.issuperset(study.verdict_seeds(arm.key))


def _training(arm: TrainedArm) -> dict[str, Any]:
    """Returns the settings that an arm is trained with, except those that each study chooses."""
    config: Config = from_json(Config, known_settings(Config, arm.example.run.config))
    # d_ff=None stands for the default width, so it is made explicit before settings are compared.
    model = dataclasses.replace(config.model, d_ff=config.model.mlp_width)
    settings = dataclasses.asdict(dataclasses.replace(config, model=model))
    return {name: value for name, value in flat(settings) if not _is_of_study(name)}


def _is_of_study(name: str) -> bool:
    """Returns whether each study chooses a setting itself, such as 'trials.seeds'.

    _OF_STUDY lists these settings, or the sections that they are in.
    """
    return any(name == own or name.startswith(f'{own}.') for own in _OF_STUDY)
