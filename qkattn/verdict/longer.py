"""Which differences of a study are settled, by the same arms after at least four times the steps.

The longer training is the study's own control, if that has fresh seeds, or another study in a
directory beside it: of the same base config but for the steps, how often it evaluates, and its
trials, with the same baseline and matching, on seeds of its own. Only arms that qualify for a
verdict there count, each at its own tuned settings.
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

# What two lengths of one training may differ in.
_FREE = (
    *('train.num_steps', 'train.eval_every', 'train.log_every', 'train.checkpoint_every'),
    *('train.steps_per_dispatch', 'train.lifting', 'trials', *OF_MACHINE),
)
# Fields of study.json that say what arms are matched in, and to what; with their types.
_MATCHING = {
    'baseline': str,
    'matched': str | None,
    'fill': str | None,
    'destinations': tuple[str, ...],
}


def studies_beside(study: TrainedStudy) -> list[Path]:
    """The directories beside a study that train the same models at least `TIMES` as long."""
    shared = _shared(study.base)
    matching = [study.baseline, study.match, study.fill, list(study.destinations)]
    paths = []
    for path in sorted(study.directory.resolve().parent.glob('*/study.json')):
        try:
            record = parse_file(path, {**_MATCHING, 'base': {'model': {'kind': str}}})
            base = read_base(record)
        except ValueError:  # a report on that study says so
            continue
        is_longer = base.train.num_steps >= TIMES * study.base.train.num_steps
        has_matching = [record[name] for name in _MATCHING] == matching
        if is_longer and has_matching and _shared(base) == shared:
            paths.append(path.parent)
    return paths


def _shared(base: Config) -> dict[str, Any]:
    """The settings that do not depend on the length of training."""
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
    """What is known of each primary arm's difference beyond its length of training.

    `arms` have their verdicts; `beside` are the findings of `studies_beside`. Of several longer
    trainings the longest counts.
    """
    by_arm = {}
    for arm in arms:
        if not is_compared(arm.key, study.baseline) or arm.difference is None:
            continue
        short = _trained(arm)
        longest = None
        for longer_arm in (*_own(study, arm, arms, blocks), *_others(study, arm, beside)):
            longer = _trained(longer_arm)
            if longer and (longest is None or longer.steps > longest.steps):
                longest = longer
        is_equivalent = arm.verdict is not None and arm.verdict.decision is Decision.EQUIVALENT
        by_arm[arm.key] = settle(short, longest, study.margin, equivalent=is_equivalent)
    return by_arm


def _trained(arm: TrainedArm) -> Trained | None:
    """The difference of an arm with its number of steps; None where its error is not known."""
    if arm.difference is None:
        return None
    return trained(arm.example.run.num_steps, arm.difference)


def _own(
    study: TrainedStudy, arm: TrainedArm, arms: Sequence[TrainedArm], blocks: Sequence[Remark]
) -> list[TrainedArm]:
    """The study's own control that is trained longer, if it has fresh seeds and gets a verdict."""
    longer_seeds = {*study.controls.longer_seeds}
    if not study.tuned or not longer_seeds or longer_seeds & {*study.seeds}:
        return []
    by_key = {each.key: each for each in arms}
    longer = by_key.get(arm.key._replace(control=LONGER))
    baseline = by_key.get(arm.group._replace(control=LONGER))
    if longer is None or longer.difference is None:
        return []
    verdict = judging.pair(study, longer, baseline, blocks, 1)
    return [] if verdict.decision is Decision.NO_VERDICT else [longer]


def _others(
    study: TrainedStudy, arm: TrainedArm, beside: Sequence[Findings]
) -> Iterator[TrainedArm]:
    """The same arm in other studies where it has a verdict, on seeds of their own."""
    for findings in beside:
        if {*findings.study.seeds} & {*study.seeds}:
            continue
        for longer in findings.arms:
            has_verdict = longer.verdict and longer.verdict.decision is not Decision.NO_VERDICT
            if (
                has_verdict
                and longer.key == arm.key
                and longer.example.parameters == arm.example.parameters
            ):
                yield longer
