"""Which differences of a study are settled, by the same arms after at least four times the steps.

The longer training comes from one of two places:

- the study's own control that is trained longer, if it has fresh seeds;
- another study in a directory beside this one. It has the same base config except for the number of
  steps, the frequency of evaluations and the trials. It has the same baseline and matching, and
  other seeds.

A longer arm counts only if it qualifies for a verdict. It is trained at its own tuned settings.
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
from qkattn.study.family import is_compared
from qkattn.verdict import judging
from qkattn.verdict.codes import Remark
from qkattn.verdict.findings import Findings
from qkattn.verdict.settling import TIMES, Settling, Trained, settle
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
# The fields of study.json that are read of a study beside this one, with their types.
_SCHEMA = {
    'base': {'model': {'kind': str}},
    'baseline': str,
    'matched': str | None,
    'fill': str | None,
    'destinations': tuple[str, ...],
}


def studies_beside(study: TrainedStudy) -> list[Path]:
    """Finds the studies that train the same models longer; returns their directories.

    Only directories beside that of the study are searched. For example, runs/long is found beside
    runs/short if it repeats the study with four times the steps. Another study has to meet three
    conditions:

    - it trains for at least four times (TIMES) as many steps;
    - it compares its arms, the variants of the model, with the same baseline, and matches their
      cost in the same way;
    - its base config has the same settings, except for those that the length of training changes
      (_FREE), such as train.num_steps and train.eval_every.
    """
    settings_of_study = _settings_to_compare(study.base)
    directories = []
    directory_of_studies = study.directory.resolve().parent
    for study_json in sorted(directory_of_studies.glob('*/study.json')):
        try:
            record = parse_file(study_json, _SCHEMA)
            base = read_base(record)
        except ValueError:
            # A report on that study says what is wrong with it.
            continue
        is_longer = base.train.num_steps >= TIMES * study.base.train.num_steps
        has_same_settings = _settings_to_compare(base) == settings_of_study
        has_same_baseline = record['baseline'] == study.baseline
        # Arms are resized until they have the cost of the baseline. Three settings say how: `match`
        # says which cost, `fill` what makes up for rounding, and `destinations` which part of the
        # model gets the parameters that an arm saves.
        is_matched_alike = (
            record['matched'] == study.match
            and record['fill'] == study.fill
            and tuple(record['destinations']) == study.destinations
        )
        if is_longer and has_same_settings and has_same_baseline and is_matched_alike:
            directories.append(study_json.parent)
    return directories


def _settings_to_compare(base: Config) -> dict[str, Any]:
    """Returns the settings that have to be equal in two studies of different lengths, by name.

    An example is {'model.d_model': 256, ...}. The settings in _FREE may differ and are left out. An
    entry of _FREE is a setting, such as 'train.num_steps', or a whole section, such as 'trials'.
    """
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
    """Returns for each primary arm whether its difference lasts when models are trained longer.

    For example, an arm is 0.020 nats/token better than its baseline after 1,000 steps. A control of
    the study trains both for 4,000 steps, and another study for 16,000. The difference after 16,000
    steps then says whether the first one lasts (`settle`).

    Args:
        study: The study.
        arms: Its arms, with their verdicts.
        blocks: The remarks that withhold every verdict of the study.
        beside: The findings of other studies that train the arms longer (`studies_beside`).
    """
    settling_by_arm = {}
    for arm in arms:
        if not is_compared(arm.key, study.baseline) or arm.difference is None:
            continue

        # The same arm, trained longer: in a control of this study, and in other studies.
        longer_arms: list[TrainedArm] = []
        control = _longer_control(study, arm, arms, blocks)
        if control is not None:
            longer_arms.append(control)
        longer_arms += _arms_beside(study, arm, beside)

        # The difference after the longest training.
        differences = [_trained_difference(longer_arm) for longer_arm in longer_arms]
        known = [difference for difference in differences if difference is not None]
        longest = max(known, key=lambda difference: difference.steps, default=None)

        is_equivalent = arm.verdict is not None and arm.verdict.decision is Decision.EQUIVALENT
        settling_by_arm[arm.key] = settle(
            _trained_difference(arm), longest, study.margin, equivalent=is_equivalent
        )
    return settling_by_arm


def _trained_difference(arm: TrainedArm) -> Trained | None:
    """Returns an arm's difference with its error and number of steps.

    Returns None if there is no difference or if its error is not known.
    """
    difference = arm.difference
    if difference is None:
        return None
    if difference.error_seeds is None or difference.error_evaluation is None:
        return None
    error = math.hypot(difference.error_seeds, difference.error_evaluation)
    return Trained(arm.example.run.num_steps, difference.mean, error)


def _longer_control(
    study: TrainedStudy, arm: TrainedArm, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> TrainedArm | None:
    """Returns the control of this study that trains an arm longer; None if it does not count.

    The control counts if it qualifies for a verdict, and has other seeds than the verdict on the
    arm. Those seeds have decided that the arm is trained longer, so they would favour it.

    Args:
        study: The study.
        arm: The arm.
        arms: All arms of the study, with its controls.
        blocks: The remarks that withhold every verdict of the study.
    """
    longer_seeds = set(study.controls.longer_seeds)
    has_other_seeds = longer_seeds and longer_seeds.isdisjoint(study.seeds)
    if not study.tuned or not has_other_seeds:
        return None

    arm_by_key = {candidate.key: candidate for candidate in arms}
    control = arm_by_key.get(arm.key._replace(control=LONGER))
    if control is None or control.difference is None:
        return None
    baseline = arm_by_key.get(control.baseline_key)
    verdict = judging.verdict_on_pair(study, control, baseline, blocks, num_comparisons=1)
    return None if verdict.decision is Decision.NO_VERDICT else control


def _arms_beside(
    study: TrainedStudy, arm: TrainedArm, beside: Sequence[Findings]
) -> Iterator[TrainedArm]:
    """Yields the same arm of other studies, which train it longer.

    The other study has to have other seeds. The arm has to have a verdict there, and the same
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
            if has_verdict and candidate.example.parameters == arm.example.parameters:
                yield candidate
