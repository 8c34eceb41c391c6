"""What to change in a study that has no model of equal cost for some of its arms.

Sizes and destinations are tried before they are named, so the flags of the message work.
"""

import dataclasses
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple

from qkattn.config import ControlsConfig, ModelConfig, Study
from qkattn.study.matching import Dimension

# How many other values of d_model are tried for a size, those nearest to its own.
NUM_TRIED = 12
# How many of those that match are named.
NUM_NAMED = 2


class Refusal(NamedTuple):
    """An arm that no model matches in cost."""

    size: str  # as written in the study
    baseline: ModelConfig  # the baseline at this size
    variant: str  # as written in the study
    reason: str  # a sentence without its subject


# Returns whether all arms of a study can be matched at a size.
Matches = Callable[[Study, str], bool]


def remedy(study: Study, refusals: Sequence[Refusal], matches: Matches) -> str:
    """Returns a line with the flags that make all arms match in cost.

    Two changes are tried: other sizes near those that refuse an arm, and the destination d_ff at
    the sizes of the study. Some variants may match at no other size either. The line then names
    them, and gives the sizes at which the other variants match:

        all arms but 'merged/vo' match with --config.sizes='("d_model=104",)'
    """
    # Controls at the baseline's shape are not matched.
    study = dataclasses.replace(study, controls=ControlsConfig(equal_shape=False))

    # Which variants could match at other sizes?
    nearby_sizes: dict[str, list[str]] = {}  # by the size that refuses an arm
    for refusal in refusals:
        nearby_sizes[refusal.size] = _nearby_sizes(refusal.size, refusal.baseline)
    never_matched = _never_matched(study, refusals, nearby_sizes, matches)
    matchable = [variant for variant in study.variants if variant not in never_matched]
    refusals_to_avoid = [refusal for refusal in refusals if refusal.variant in matchable]

    # The first change: other sizes, for the matchable arms.
    matchable_arms = 'all arms'
    if never_matched:
        matchable_arms += f' but {" and ".join(repr(variant) for variant in never_matched)}'
    flags_of_arms: dict[str, list[str]] = {}  # by the arms that match with these flags
    if refusals_to_avoid:
        matchable_study = _with_variants(study, matchable)
        for sizes in _fitting_sizes(matchable_study, refusals_to_avoid, nearby_sizes, matches):
            flags_of_arms.setdefault(matchable_arms, []).append(f'--config.sizes={_quoted(sizes)}')

    # The second change: the destination d_ff, for all arms.
    on_d_ff = dataclasses.replace(study, destinations=('d_ff',))
    if all(matches(on_d_ff, size) for size in study.sizes):
        flag = f'--config.destinations={_quoted(on_d_ff.destinations)}'
        flags_of_arms.setdefault('all arms', []).append(flag)

    clauses: list[str] = []
    if not refusals_to_avoid:
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
    matches: Matches,
) -> list[str]:
    """Returns the variants that no other size helps.

    Each of them is refused at a size of the study and at all sizes near it.
    """
    variants: list[str] = []
    for refusal in refusals:
        alone = _with_variants(study, [refusal.variant])
        is_helped = any(matches(alone, nearby) for nearby in nearby_sizes[refusal.size])
        if not is_helped and refusal.variant not in variants:
            variants.append(refusal.variant)
    return variants


def _fitting_sizes(
    study: Study,
    refusals: Sequence[Refusal],
    nearby_sizes: Mapping[str, Sequence[str]],
    matches: Matches,
) -> list[list[str]]:
    """Returns up to NUM_NAMED values of the setting `sizes` with which all arms match.

    Sizes that refuse no arm stay, and nearby sizes replace the others. For example, a study has the
    sizes A and B, and B refuses an arm. All arms match at B1 and B2 near B, and B1 is nearer. Then
    the values are [A, B1] and [A, B2].
    """
    refused_variants = dict.fromkeys(refusal.variant for refusal in refusals)
    refusing_sizes = dict.fromkeys(refusal.size for refusal in refusals)

    def all_match(size: str) -> bool:
        # A variant that was refused is the most likely to fail, so each is tried first and alone.
        for variant in refused_variants:
            if not matches(_with_variants(study, [variant]), size):
                return False
        return matches(study, size)

    replacements: dict[str, list[str]] = {}  # of each size that refuses an arm, nearest first
    for size in refusing_sizes:
        others = [nearby for nearby in nearby_sizes[size] if nearby not in study.sizes]
        # filter is lazy, so the search stops after NUM_NAMED replacements.
        replacements[size] = list(itertools.islice(filter(all_match, others), NUM_NAMED))

    values: list[list[str]] = []
    num_values = min(len(sizes) for sizes in replacements.values())
    for number in range(num_values):
        value = []
        for size in study.sizes:
            value.append(replacements[size][number] if size in replacements else size)
        values.append(value)
    return values


def _with_variants(study: Study, variants: Iterable[str]) -> Study:
    """Returns the study with these variants in place of its own."""
    return dataclasses.replace(study, variants=tuple(variants))


def _quoted(texts: Sequence[str]) -> str:
    """Formats a tuple of texts for a flag in a shell, as in '("d_model=96",)'."""
    entries = ', '.join(f'"{text}"' for text in texts)
    if len(texts) == 1:
        entries += ','
    return f"'({entries})'"
