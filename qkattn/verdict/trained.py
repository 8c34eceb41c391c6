"""Whether the models of a study are trained enough to compare: baselines have to beat yardsticks.

What a baseline lacks withholds the words of all arms that are compared with it.
"""

import dataclasses
import statistics
from collections.abc import Iterator, Sequence

from qkattn.verdict.arms import Arm
from qkattn.verdict.codes import Remark, RemarkCode
from qkattn.verdict.load import Study
from qkattn.verdict.yardstick import Yardstick

# Nats/token that a language model gains between position 4 and the last half of its context.
MIN_GAIN = 0.1
MIN_BLEU = 15.0
# Nats/token that a translation loses with the sources of other pairs.
MIN_SOURCES = 0.5
# How many times the median sd of the arms of its group an arm's losses may spread over seeds.
MAX_SPREAD = 3.0


@dataclasses.dataclass(frozen=True)
class Standing:
    """A baseline beside its yardstick.

    Attributes:
      yardstick: None if it is not recorded, or was for another run.
      best: the lowest loss of counts on the baseline's split, and its name; None for a translation.
      gain: by how much the loss falls from position 4 to the last half of the context.
      bleu: on its split.
      sources: by how much the loss rises with the sources of other pairs.
      remarks: what it lacks.

    The last numbers are None where they are not defined or not recorded.
    """

    arm: Arm
    yardstick: Yardstick | None
    best: tuple[str, float] | None
    gain: float | None
    bleu: float | None
    sources: float | None
    remarks: tuple[Remark, ...] = ()


def standings(study: Study, arms: Sequence[Arm]) -> list[Standing]:
    """One for each baseline that has results; none of a study whose yardsticks are not recorded."""
    found: list[Standing] = []
    for arm in arms if study.yardsticks else ():
        if not arm.is_baseline or arm.loss is None or study.yardsticks is None:
            continue
        yardstick = study.yardsticks.groups.get(arm.group)
        if yardstick and yardstick.run not in {trial.run for trial in arm.verdict_trials}:
            yardstick = None
        bleu = arm.over_seeds(f'{arm.split}_bleu')
        standing = Standing(
            arm,
            yardstick,
            best=yardstick.best(arm.split) if yardstick else None,
            gain=study.yardsticks.gain(arm.place),
            bleu=bleu.mean if bleu else None,
            sources=study.yardsticks.sources(arm.place),
        )
        lacks = tuple(Remark(code, data, True, arm.place) for code, data in _lacks(standing))
        found.append(dataclasses.replace(standing, remarks=lacks))
    return found


def check(study: Study, arms: Sequence[Arm]) -> Iterator[Remark]:
    """What withholds words: of each baseline, and of arms whose seeds end far from each other."""
    if study.yardsticks is None and any(arm.is_baseline and arm.chosen for arm in arms):
        yield Remark(RemarkCode.NO_YARDSTICK, {}, blocks=True)
    for standing in standings(study, arms):
        yield from standing.remarks
    for group in dict.fromkeys(arm.group for arm in arms):
        spreads = [(a, a.loss.sd) for a in arms if a.group == group and a.loss and a.loss.sd]
        usual = statistics.median(sd for _, sd in spreads) if spreads else 0.0
        for arm, sd in spreads:
            if sd > MAX_SPREAD * usual:
                data = {'sd': sd, 'usual': usual, 'times': MAX_SPREAD}
                yield Remark(RemarkCode.BIMODAL_SEEDS, data, True, arm.place)


def _lacks(of: Standing) -> Iterator[tuple[RemarkCode, dict]]:
    if of.yardstick is None:
        yield RemarkCode.NO_YARDSTICK, {}
        return
    if of.best and of.arm.loss and of.arm.loss.mean >= of.best[1]:
        data = {'split': of.arm.split, 'loss': of.arm.loss.mean, 'tokens': of.yardstick.tokens}
        yield RemarkCode.BELOW_YARDSTICK, data | {'name': of.best[0], 'yardstick': of.best[1]}
    if of.yardstick.task == 'language' and of.gain is not None and of.gain < MIN_GAIN:
        yield RemarkCode.LITTLE_CONTEXT, {'gain': of.gain, 'needed': MIN_GAIN}
    if of.bleu is not None and of.bleu < MIN_BLEU:
        yield RemarkCode.LOW_BLEU, {'bleu': of.bleu, 'needed': MIN_BLEU}
    if of.sources is not None and of.sources < MIN_SOURCES:
        yield RemarkCode.SOURCES_UNUSED, {'cost': of.sources, 'needed': MIN_SOURCES}
