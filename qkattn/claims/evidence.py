"""The rows of a claim's expectations, from the arms of a study and their verdicts."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple

from qkattn.claims import rules
from qkattn.claims.claim import Expectation
from qkattn.claims.decided import Kind, Row, Speaks
from qkattn.claims.results import UNIT, Loaded
from qkattn.errors import ConfigError
from qkattn.stats.inference import Difference
from qkattn.study.arm_key import EQUAL_SHAPE, LONGER, ArmKey
from qkattn.verdict import judging
from qkattn.verdict.arms import Arm, compare
from qkattn.verdict.codes import Comparison, Verdict


class Evidence(NamedTuple):
    """A row that an expectation decides by, with the arm behind it and its verdict."""

    row: Row
    arm: Arm
    verdict: Verdict
    difference: Difference


def evidence(
    expected: Expectation, loaded: Loaded, family: int = 1
) -> tuple[list[Evidence], list[Row], list[ArmKey]]:
    """What decides an expectation, the rows beside it, and declared arms without a difference yet.

    An arm has a row at its own length of training and, matched, at a longer one. The rows beside it
    are the other parts of the difference: removed, reinvested, matched; beside a pair of variants,
    those of each against the baseline. The error rate of each row is divided by `family`.
    ConfigError if the study declares no such arm.
    """
    decided: list[Evidence] = []
    beside: list[Row] = []
    lacking = _declared(expected, loaded)
    added = dict(expected.context)
    for arm, verdict, comparison in _cases(expected, loaded, family):
        if comparison is None:
            continue
        if arm.key in lacking:
            lacking.remove(arm.key)
        context = loaded.context(arm) | added
        kind = Kind.REMOVED if arm.control == EQUAL_SHAPE else Kind.MATCHED
        if loaded.study.matched is None:
            kind = Kind.MEASURED  # neither removed nor at equal parameter count
        row = _row(arm, comparison, kind, context, expected)
        word, speaks = rules.finding(row, expected.relation, verdict, comparison)
        row = dataclasses.replace(row, relation=expected.relation, word=word, speaks=speaks)
        decided.append(Evidence(row, arm, verdict, comparison.difference))
        if arm.control != LONGER:
            beside += _beside(arm, kind, expected, loaded)
    return decided, beside, lacking


def number_of_rows(expected: Expectation, loaded: Loaded | None) -> int:
    """How many rows decide an expectation once its study is finished, if that is declared."""
    if loaded is None:
        return 1
    longer = expected.at == 'matched' and loaded.study.controls['longer'] is not None
    return len(_declared(expected, loaded)) * (2 if longer else 1)


def _declared(expected: Expectation, loaded: Loaded) -> list[ArmKey]:
    """The arms that the study declares for an expectation."""
    if loaded.study.tuning is None and expected.at == 'removed':
        return []  # a study without tuning has no controls
    control = EQUAL_SHAPE if expected.at == 'removed' else None
    keys = [key for key in loaded.study.arms if key.control == control]
    variants = list(dict.fromkeys(key.variant for key in keys))
    for variant in (expected.variant, expected.versus or expected.variant):
        if not any(loaded.names(label, variant) for label in variants):
            raise ConfigError(
                f'study {expected.study!r} has no {expected.at} arm of variant {variant!r}; it has '
                f'{", ".join(variants) or "none"}'
            )
    return [key for key in keys if loaded.names(key.variant, expected.variant)]


def _beside(arm: Arm, kind: Kind, expected: Expectation, loaded: Loaded) -> Iterator[Row]:
    """The parts of an arm's difference but for `kind`; of a pair, all of both from the baseline."""
    parts = {part.key: part for part in loaded.found.decomposition}
    for primary in loaded.found.arms:
        if (primary.size, primary.corpus) != (arm.size, arm.corpus):
            continue
        variant, shown, context = loaded.study.bare(primary.variant), expected, expected.context
        if expected.versus:
            pair = (expected.variant, expected.versus)
            if not any(loaded.names(primary.variant, each) for each in pair):
                continue
            shown, context = Expectation(expected.study, variant, expected.relation), {}
        elif primary.key != arm.key and (arm.control != EQUAL_SHAPE or variant != arm.variant):
            continue
        part = parts.get(primary.key)
        comparisons = {
            Kind.REMOVED: part.removing if part else None,
            Kind.REINVESTED: part.reinvesting if part else None,
            Kind.MATCHED: primary.comparison if loaded.study.matched is not None else None,
        }
        for name, comparison in comparisons.items():
            if comparison is not None and (expected.versus or name != kind):
                where = loaded.context(primary) | dict(context)
                yield _row(primary, comparison, name, where, shown)


def _row(
    arm: Arm, comparison: Comparison, kind: Kind, context: Mapping[str, str], expected: Expectation
) -> Row:
    low, high = expected.reported or (None, None)
    pair = f'{expected.variant} - {expected.versus}' if expected.versus else expected.variant
    return Row(
        what=expected.curve or pair,
        kind=kind,
        context=context,
        value=comparison.difference.mean,
        speaks=Speaks.BESIDE,
        unit=UNIT,
        low=comparison.difference.low,
        high=comparison.difference.high,
        expected=None if low is None else (low + high) / 2,
        tolerance=None if low is None else (high - low) / 2,
        x=expected.x,
        x_label=expected.x_label,
        # The points of a curve have one colour.
        arm=expected.variant if expected.x is None else None,
        study=expected.study,
    )


def _cases(
    expected: Expectation, loaded: Loaded, family: int
) -> Iterator[tuple[Arm, Verdict, Comparison | None]]:
    """The arms of an expectation with their verdicts and differences."""
    study, found = loaded
    everything = (*found.arms, *found.controls)
    mine = [arm for arm in everything if loaded.names(arm.variant, expected.variant)]
    others = {
        (arm.group, arm.control): arm
        for arm in everything
        if (loaded.names(arm.variant, expected.versus) if expected.versus else arm.is_baseline)
    }
    for control in (EQUAL_SHAPE,) if expected.at == 'removed' else (None, LONGER):
        against = control if expected.versus or control == LONGER else None
        for arm in (arm for arm in mine if arm.control == control):
            other = others.get((arm.group, against))
            if expected.versus is None or other is not None:
                compared = compare([(arm, other)], study) if expected.versus else arm.comparison
                yield arm, judging.pair(study, arm, other, found.blocks, family), compared
