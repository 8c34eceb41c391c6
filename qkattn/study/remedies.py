"""Suggests flags for a study in which some arms cannot be matched in cost.

Flags are tried before they are suggested.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from qkattn.config import ControlsConfig, ModelConfig, Study
from qkattn.study.matching import Dimension

# The number of other values of d_model to try for a size.
NUM_TRIED = 12
# The number of sizes to suggest.
NUM_NAMED = 2


class Refusal(NamedTuple):
    """An arm that cannot be matched in cost."""

    size: str  # as written in the study
    baseline: ModelConfig  # the baseline at this size
    variant: str  # as written in the study
    reason: str  # a sentence without its subject


# Returns whether all arms of a study can be matched at a size.
AllArmsMatch = Callable[[Study, str], bool]


def suggest_flags(study: Study, refusals: Sequence[Refusal], all_arms_match: AllArmsMatch) -> str:
    """Returns a line that suggests flags with which all arms of a study can be matched.

    The flags change the sizes, or make d_ff the destination of the saved parameters:

        all arms match with --config.sizes='("d_model=104",)' or --config.destinations='("d_ff",)'

    Variants that have no match at any nearby size are named:

        all arms but 'merged/vo' match with --config.sizes='("d_model=104",)'

    Args:
        study: The study.
        refusals: The arms without a match.
        all_arms_match: Returns whether all arms of a changed study can be matched at a size.
    """
    # Controls at the baseline's shape need no match, so no flag is tried with them.
    study = dataclasses.replace(study, controls=ControlsConfig(equal_shape=False))

    # Which variants could match at other sizes?
    nearby_sizes: dict[str, list[str]] = {}  # by the size to replace
    for refusal in refusals:
        nearby_sizes[refusal.size] = _nearby_sizes(refusal.size, refusal.baseline)
    never_matched = _never_matched(study, refusals, nearby_sizes, all_arms_match)
    matchable = [variant for variant in study.variants if variant not in never_matched]
    avoidable_refusals = [refusal for refusal in refusals if refusal.variant in matchable]

    # Try other sizes with these variants.
    matchable_arms = 'all arms'
    if never_matched:
        matchable_arms += f' but {" and ".join(repr(variant) for variant in never_matched)}'
    flags_by_arms: dict[str, list[str]] = {}  # by 'all arms', or 'all arms but ...'
    if avoidable_refusals:
        matchable_study = _with_variants(study, matchable)
        suggested_sizes = _fitting_sizes(
            matchable_study, avoidable_refusals, nearby_sizes, all_arms_match
        )
        for sizes in suggested_sizes:
            flags_by_arms.setdefault(matchable_arms, []).append(f'--config.sizes={_quoted(sizes)}')

    # Try the destination d_ff with all variants.
    on_d_ff = dataclasses.replace(study, destinations=('d_ff',))
    all_match_on_d_ff = all(all_arms_match(on_d_ff, size) for size in study.sizes)
    if all_match_on_d_ff:
        flag = f'--config.destinations={_quoted(on_d_ff.destinations)}'
        flags_by_arms.setdefault('all arms', []).append(flag)

    clauses: list[str] = []
    if not avoidable_refusals:
        clauses.append(f'{matchable_arms} match at these sizes')
    for arms, flags in flags_by_arms.items():
        clauses.append(f'{arms} match with {" or ".join(flags)}')
    if not clauses:
        return 'neither a d_model near these nor the destination d_ff matches all'
    return '; '.join(clauses)


def _nearby_sizes(size: str, baseline: ModelConfig) -> list[str]:
    """Returns NUM_TRIED or more sizes with other values of d_model, nearest first.

    The values are multiples of the smallest width of the baseline. For example, 'd_model=96' with
    4 heads and rotary positions gives 'd_model=104', 'd_model=88', 'd_model=112', ...
    """
    step = Dimension(baseline, 'd_model').smallest_width
    center = step * round(baseline.d_model / step)  # a multiple near the present width
    d_models: list[int] = []
    distance = 0
    while len(d_models) < NUM_TRIED:
        for d_model in (center + distance, center - distance):
            if d_model > 0 and d_model != baseline.d_model and d_model not in d_models:
                d_models.append(d_model)
        distance += step

    # Such as ['num_layers=2'] of 'd_model=96&num_layers=2'.
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
    """Returns the refused variants that have no match at any nearby size either.

    Args:
        refusals: The arms without a match.
        nearby_sizes: The nearby sizes of each size with a refusal.
        all_arms_match: Returns whether all arms of a changed study can be matched at a size.
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
    """Returns up to NUM_NAMED lists of sizes at which all arms match.

    For example, a study has the sizes A and B, and an arm has no match at B. The result
    [[A, B1], [A, B2]] replaces B by B1 or B2.

    Args:
        refusals: The arms without a match.
        nearby_sizes: The nearby sizes of each size with a refusal, nearest first.
        all_arms_match: Returns whether all arms of a changed study can be matched at a size.
    """
    refused_variants = list(dict.fromkeys(refusal.variant for refusal in refusals))
    refused_sizes = list(dict.fromkeys(refusal.size for refusal in refusals))
    replacements: dict[str, list[str]] = {}  # by the size to replace
    for size in refused_sizes:
        other_sizes = [nearby for nearby in nearby_sizes[size] if nearby not in study.sizes]
        fitting_sizes = (
            other
            for other in other_sizes
            if _all_match_at(other, study, refused_variants, all_arms_match)
        )
        replacements[size] = list(itertools.islice(fitting_sizes, NUM_NAMED))  # the first ones

    # The i-th list has the i-th replacement of each refused size.
    lists_of_sizes: list[list[str]] = []
    num_lists = min(len(fitting) for fitting in replacements.values())
    for i in range(num_lists):
        replacement_of_size = {size: fitting[i] for size, fitting in replacements.items()}
        lists_of_sizes.append([replacement_of_size.get(size, size) for size in study.sizes])
    return lists_of_sizes


def _all_match_at(
    size: str, study: Study, refused_variants: Sequence[str], all_arms_match: AllArmsMatch
) -> bool:
    """Returns whether all arms of a study can be matched at a size."""
    # Variants that were refused at another size are the most likely to fail, so they go first.
    for variant in refused_variants:
        if not all_arms_match(_with_variants(study, [variant]), size):
            return False
    return all_arms_match(study, size)


def _with_variants(study: Study, variants: Iterable[str]) -> Study:
    """Returns the study with other variants."""
    return dataclasses.replace(study, variants=tuple(variants))


def _quoted(texts: Sequence[str]) -> str:
    """Formats a tuple for a flag on a command line, such as '("d_model=96",)'."""
    entries = ', '.join(f'"{text}"' for text in texts)
    if len(texts) == 1:
        entries += ','
    return f"'({entries})'"
