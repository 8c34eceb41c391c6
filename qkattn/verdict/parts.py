"""What a difference is made of, by the controls of a study."""

import dataclasses
from collections.abc import Mapping, Sequence

from qkattn.study.place import EQUAL_SHAPE, LONGER, Place
from qkattn.verdict.arms import Arm
from qkattn.verdict.codes import Comparison, Remark, RemarkCode
from qkattn.verdict.comparison import compare
from qkattn.verdict.load import Study

# Remarks that withhold a word and leave an estimate.
UNSURE = (
    *(RemarkCode.NOT_BRACKETED, RemarkCode.UNBOUNDED_OPTIMUM, RemarkCode.FEW_DOCUMENTS),
    *(RemarkCode.NO_TEST, RemarkCode.POST_HOC, RemarkCode.NO_YARDSTICK, RemarkCode.BIMODAL_SEEDS),
    *(RemarkCode.BELOW_YARDSTICK, RemarkCode.LITTLE_CONTEXT),
    *(RemarkCode.LOW_BLEU, RemarkCode.SOURCES_UNUSED),
)


@dataclasses.dataclass(frozen=True)
class Decomposition:
    """The parts of an arm's difference from the baseline, and whether it lasts.

    On shared seeds `removing` + `reinvesting` is the difference. These are estimates with 95 %
    intervals, not corrected for their number, and give no word: the controls are no part of the
    family that verdicts are corrected for. A part is None while one of its arms lacks results or
    breaks a rule; an arm that is only known badly (UNSURE) has a part.

    Attributes:
      place: of the arm.
      removing: its control of equal shape minus the baseline: the effect of the missing parameters.
      reinvesting: the arm minus that control: the effect of spending them elsewhere.
      longer: the arm minus the baseline, both trained longer. Only arms that got a word are, which
        favours large differences where the seeds are those of the verdict.
    """

    place: Place
    removing: Comparison | None
    reinvesting: Comparison | None
    longer: Comparison | None


def decompose(
    study: Study, arms: Sequence[Arm], shared: Sequence[Remark] = ()
) -> tuple[Decomposition, ...]:
    """One for each primary arm but the baseline of which a control has results.

    `shared` are the blocking remarks about every arm, which no arm has of its own.
    """
    by_place = {arm.place: arm for arm in arms}
    return tuple(
        _decomposition(study, arm, by_place, shared)
        for arm in arms
        if arm.control is None and not arm.is_baseline and _controls(study, arm, by_place)
    )


def _controls(study: Study, arm: Arm, by_place: Mapping[Place, Arm]) -> dict[str, Arm]:
    """The controls of an arm by kind; one of equal shape has no destination in its name."""
    places = {
        EQUAL_SHAPE: arm.place._replace(variant=study.bare(arm.variant), control=EQUAL_SHAPE),
        LONGER: arm.place._replace(control=LONGER),
    }
    return {kind: by_place[place] for kind, place in places.items() if place in by_place}


def _decomposition(
    study: Study, arm: Arm, by_place: Mapping[Place, Arm], shared: Sequence[Remark]
) -> Decomposition:
    controls = _controls(study, arm, by_place)
    same, longer = controls.get(EQUAL_SHAPE), controls.get(LONGER)
    place = arm.place._replace(variant=study.baseline or '')

    def part(one: Arm | None, other: Arm | None) -> Comparison | None:
        if one is None or other is None:
            return None
        if any(remark.code not in UNSURE for remark in (*shared, *one.blocks, *other.blocks)):
            return None
        return compare([(one, other)], study, None)

    return Decomposition(
        arm.place,
        removing=part(same, by_place.get(place)),
        reinvesting=part(arm, same),
        longer=part(longer, by_place.get(place._replace(control=LONGER))),
    )
