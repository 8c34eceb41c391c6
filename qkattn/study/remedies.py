"""What to change in a study that has no model of equal cost for some of its arms.

Sizes and destinations are tried before they are named, so the flags of the message work.
"""

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from qkattn.config import ControlsConfig, ModelConfig, Study
from qkattn.study.matching import Dimension

# How many other values of d_model are tried for a size, those nearest to its own.
NUM_TRIED = 12
# How many of those that match are suggested.
NUM_NAMED = 2


class Refusal(NamedTuple):
    """An arm that no model matches in cost."""

    size: str  # as written in the study
    baseline: ModelConfig  # the baseline at this size
    variant: str  # as written in the study
    reason: str  # a sentence without its subject


# Returns whether all arms of a study can be matched at a size.
AllArmsMatch = Callable[[Study, str], bool]


def suggest_flags(study: Study, refusals: Sequence[Refusal], all_arms_match: AllArmsMatch) -> str:
    """Returns a line with the flags that make all arms of a study match the baseline's cost.

    Two changes are tried: other sizes near those at which an arm has no match, and d_ff as the
    destination of the saved parameters. For example:

        all arms match with --config.sizes='("d_model=104",)' or --config.destinations='("d_ff",)'

    Some variants may not match at any nearby size. The line then suggests sizes for the others:

        all arms but 'merged/vo' match with --config.sizes='("d_model=104",)'

    Args:
        study: The study.
        refusals: The arms without a match.
        all_arms_match: Tells whether all arms of a changed study match at a size.
    """
    # Controls at the baseline's shape are not matched, so they are left out.
    study = dataclasses.replace(study, controls=ControlsConfig(equal_shape=False))

    # Which variants could match at other sizes?
    nearby_sizes: dict[str, list[str]] = {}  # by the size that refuses an arm
    for refusal in refusals:
        nearby_sizes[refusal.size] = _nearby_sizes(refusal.size, refusal.baseline)
    never_matched = _never_matched(study, refusals, nearby_sizes, all_arms_match)
    matchable = [variant for variant in study.variants if variant not in never_matched]
    avoidable_refusals = [refusal for refusal in refusals if refusal.variant in matchable]

    # The first change: other sizes, for the arms that could match.
    matchable_arms = 'all arms'
    if never_matched:
        matchable_arms += f' but {" and ".join(repr(variant) for variant in never_matched)}'
    flags_of_arms: dict[str, list[str]] = {}  # by the arms that match with one of these flags
    if avoidable_refusals:
        matchable_study = _with_variants(study, matchable)
        suggested_sizes = _fitting_sizes(
            matchable_study, avoidable_refusals, nearby_sizes, all_arms_match
        )
        for sizes in suggested_sizes:
            flags_of_arms.setdefault(matchable_arms, []).append(f'--config.sizes={_quoted(sizes)}')

    # The second change: the destination d_ff, for all arms.
    on_d_ff = dataclasses.replace(study, destinations=('d_ff',))
    if all(all_arms_match(on_d_ff, size) for size in study.sizes):
        flag = f'--config.destinations={_quoted(on_d_ff.destinations)}'
        flags_of_arms.setdefault('all arms', []).append(flag)

    # The line.
    clauses: list[str] = []
    if not avoidable_refusals:
        clauses.append(f'{matchable_arms} match at these sizes')
    for arms, flags in flags_of_arms.items():
        clauses.append(f'{arms} match with {" or ".join(flags)}')
    return '; '.join(clauses) or 'neither a d_model near these nor the destination d_ff matches all'


def _nearby_sizes(size: str, baseline: ModelConfig) -> list[str]:
    """Returns `size` with NUM_TRIED or more other values of d_model, the nearest first.

    The values are multiples of the smallest width of the baseline. For example, this width is 8
    with 4 heads and rotary positions. Then 'd_model=96' gives 'd_model=104', 'd_model=88',
    'd_model=112', 'd_model=80' and so on.
    """
    step = Dimension(baseline, 'd_model').smallest_width
    nearest_multiple = step * round(baseline.d_model / step)
    d_models: list[int] = []
    distance = 0
    while len(d_models) < NUM_TRIED:
        for d_model in (nearest_multiple + distance, nearest_multiple - distance):
            if d_model > 0 and d_model != baseline.d_model and d_model not in d_models:
                d_models.append(d_model)
        distance += step

    other_fields = [
        field for field in size.split('&') if field and not field.startswith('d_model=')
    ]
    return ['&'.join([f'd_model={d_model}', *other_fields]) for d_model in d_models]


def _never_matched(
    study: Study,
    refusals: Sequence[Refusal],
    nearby_sizes: Mapping[str, Sequence[str]],
    all_arms_match: AllArmsMatch,
) -> list[str]:
    """Returns the variants for which no nearby size helps.

    Such a variant has no match at a size of the study, nor at any of the sizes near it.

    Args:
        study: The study.
        refusals: The arms without a match.
        nearby_sizes: The sizes near each size at which an arm has no match.
        all_arms_match: Tells whether all arms of a changed study match at a size.
    """
    variants: list[str] = []
    for refusal in refusals:
        study_of_variant = _with_variants(study, [refusal.variant])
        matches_nearby = any(
            all_arms_match(study_of_variant, size) for size in nearby_sizes[refusal.size]
        )
        if not matches_nearby and refusal.variant not in variants:
            variants.append(refusal.variant)
    return variants


def _fitting_sizes(
    study: Study,
    refusals: Sequence[Refusal],
    nearby_sizes: Mapping[str, Sequence[str]],
    all_arms_match: AllArmsMatch,
) -> list[list[str]]:
    """Returns up to NUM_NAMED values of the setting `sizes` with which all arms match.

    For example, a study has the sizes A and B, and some arms have no match at B. At B1 and B2 near
    B, all arms match, and B1 is nearer. Then the values are [A, B1] and [A, B2].

    Args:
        study: The study.
        refusals: The arms without a match.
        nearby_sizes: The sizes near each size at which an arm has no match, nearest first.
        all_arms_match: Tells whether all arms of a changed study match at a size.
    """
    refused_variants = list(dict.fromkeys(refusal.variant for refusal in refusals))
    refusing_sizes = list(dict.fromkeys(refusal.size for refusal in refusals))

    # For each size to replace, the nearest ones at which all arms match.
    replacements: dict[str, list[str]] = {}
    for size in refusing_sizes:
        replacements[size] = []
        for nearby in nearby_sizes[size]:
            if len(replacements[size]) == NUM_NAMED:
                break
            if nearby in study.sizes:
                continue
            if _all_match_at(nearby, study, refused_variants, all_arms_match):
                replacements[size].append(nearby)

    # The n-th value has the n-th replacement of each size. The other sizes stay.
    values: list[list[str]] = []
    num_values = min(len(sizes) for sizes in replacements.values())
    for number in range(num_values):
        value = []
        for size in study.sizes:
            value.append(replacements[size][number] if size in replacements else size)
        values.append(value)
    return values


def _all_match_at(
    size: str, study: Study, refused_variants: Sequence[str], all_arms_match: AllArmsMatch
) -> bool:
    """Returns whether all arms of a study match at a size.

    Variants that had no match at another size are the most likely to fail, so they are tried first.
    """
    for variant in refused_variants:
        if not all_arms_match(_with_variants(study, [variant]), size):
            return False
    return all_arms_match(study, size)


def _with_variants(study: Study, variants: Iterable[str]) -> Study:
    """Returns the study with these variants in place of its own."""
    return dataclasses.replace(study, variants=tuple(variants))


def _quoted(texts: Sequence[str]) -> str:
    """Formats a tuple of texts for a flag in a shell, as in '("d_model=96",)'."""
    entries = ', '.join(f'"{text}"' for text in texts)
    if len(texts) == 1:
        entries += ','
    return f"'({entries})'"
