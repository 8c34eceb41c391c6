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

# Settings in which the same arm may differ between studies: each study tunes on its own, and has
# its own seeds.
_OF_STUDY = (*HARMLESS, *OF_MACHINE, 'trials', *(f'model.{knob}' for knob in MODEL_KNOBS))


def with_earlier(
    study: TrainedStudy, arms: Sequence[TrainedArm], earlier: Mapping[str, Findings]
) -> tuple[TrainedArm, ...]:
    """The arms of a study, each with those of earlier studies that may be pooled with it.

    An earlier arm is pooled if it asks the same question, is trained by the same settings, has
    results at all its seeds, and if no rule withholds its verdict. What is not pooled still counts
    as a look. `earlier` has the findings of studies by name; where a rule withholds every verdict
    of a study, nothing of it is pooled.
    """
    if not earlier:
        return tuple(arms)
    # By the name of a study and the question of an arm (`chain.question`).
    usable: dict[str, dict[ArmKey, TrainedArm]] = {}
    for name, findings in earlier.items():
        if findings.blocks:
            continue
        other = findings.study
        usable[name] = {
            other.question_of(arm.key): arm for arm in findings.every_arm if _is_usable(other, arm)
        }
    pooled = []
    for arm in arms:
        question = study.question_of(arm.key)
        same: dict[str, TrainedArm] = {}
        for name, arms_by_question in usable.items():
            candidate = arms_by_question.get(question)
            if candidate and _training(candidate) == _training(arm):
                same[name] = candidate
        pooled.append(dataclasses.replace(arm, earlier=same))
    return tuple(pooled)


def _is_usable(study: TrainedStudy, arm: TrainedArm) -> bool:
    """Whether an arm has a verdict, or could have one; those trained longer were selected."""
    if arm.key.control == LONGER or arm.blocks:
        return False
    seeds = {trial.seed for trial in arm.verdict_trials}
    return seeds.issuperset(study.verdict_seeds(arm.key))


def _training(arm: TrainedArm) -> dict[str, Any]:
    """The settings by which an arm is trained but those that each study has of its own."""
    config: Config = from_json(Config, known_settings(Config, arm.example.run.config))
    # Of a config without d_ff, the width that follows from d_model.
    model = dataclasses.replace(config.model, d_ff=config.model.mlp_width)
    settings = dataclasses.asdict(dataclasses.replace(config, model=model))
    return {name: value for name, value in flat(settings) if not _is_of_study(name)}


def _is_of_study(name: str) -> bool:
    """Whether a setting, as 'trials.seeds', is one of _OF_STUDY or in a section of them."""
    return any(name == own or name.startswith(f'{own}.') for own in _OF_STUDY)
