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
    """Returns a line with flags that make all arms match: other sizes, or the destination d_ff.

    If a variant matches at none of the sizes that are tried, the line names it, and the sizes are
    for the other arms.
    """
    study = dataclasses.replace(study, controls=ControlsConfig(equal_shape=False))
    candidates: dict[str, list[str]] = {}  # by size
    for refusal in refusals:
        candidates[refusal.size] = _candidates(refusal.size, refusal.baseline)
    left_out = _never_matched(study, refusals, candidates, matches)
    others = [refusal for refusal in refusals if refusal.variant not in left_out]
    kept = [variant for variant in study.variants if variant not in left_out]
    kept_arms = 'all arms'
    if left_out:
        kept_arms += f' but {" and ".join(repr(variant) for variant in left_out)}'

    flags_of_arms: dict[str, list[str]] = {kept_arms: [], 'all arms': []}
    if others:
        for sizes in _fitting_sizes(_with_variants(study, kept), others, candidates, matches):
            flags_of_arms[kept_arms].append(f'--config.sizes={_quoted(sizes)}')
    on_d_ff = dataclasses.replace(study, destinations=('d_ff',))
    if all(matches(on_d_ff, size) for size in study.sizes):
        flags_of_arms['all arms'].append(f'--config.destinations={_quoted(on_d_ff.destinations)}')

    clauses: list[str] = []
    if not others:
        clauses.append(f'{kept_arms} match at these sizes')
    for arms, flags in flags_of_arms.items():
        if flags:
            clauses.append(f'{arms} match with {" or ".join(flags)}')
    return '; '.join(clauses) or 'neither a d_model near these nor the destination d_ff matches all'


def _candidates(size: str, baseline: ModelConfig) -> list[str]:
    """Returns sizes with other values of d_model, the nearest to `size` first.

    They are multiples of the smallest width of the baseline: 'd_model=96' with 4 heads and rotary
    positions gives 'd_model=104', 'd_model=88', 'd_model=112' and so on.
    """
    step = Dimension(baseline, 'd_model').smallest_width
    nearest_multiple = step * round(baseline.d_model / step)
    other_fields = [
        field for field in size.split('&') if field and not field.startswith('d_model=')
    ]
    candidates: list[str] = []
    for distance in itertools.count(0, step):
        for d_model in dict.fromkeys((nearest_multiple + distance, nearest_multiple - distance)):
            if d_model > 0 and d_model != baseline.d_model:
                candidates.append('&'.join([f'd_model={d_model}', *other_fields]))
        if len(candidates) >= NUM_TRIED:
            return candidates
    raise AssertionError('count does not end')


def _never_matched(
    study: Study,
    refusals: Sequence[Refusal],
    candidates: Mapping[str, Sequence[str]],
    matches: Matches,
) -> list[str]:
    """Returns the refused variants for which no candidate of a size that refuses them fits."""
    variants: list[str] = []
    for refusal in refusals:
        alone = _with_variants(study, [refusal.variant])
        fits = any(matches(alone, candidate) for candidate in candidates[refusal.size])
        if not fits and refusal.variant not in variants:
            variants.append(refusal.variant)
    return variants


def _fitting_sizes(
    study: Study,
    refusals: Sequence[Refusal],
    candidates: Mapping[str, Sequence[str]],
    matches: Matches,
) -> list[list[str]]:
    """Returns up to NUM_NAMED values of the setting `sizes` with which all arms match.

    Sizes that refuse no arm stay. In place of the others, the first value has the nearest candidate
    that fits, the second value the next one.
    """
    # Most candidates fail with variants that were refused, so these are tried first and alone.
    parts = [[variant] for variant in dict.fromkeys(refusal.variant for refusal in refusals)]
    parts.append(list(study.variants))

    def all_match(size: str) -> bool:
        return all(matches(_with_variants(study, part), size) for part in parts)

    fitting: dict[str, list[str]] = {}
    for size in dict.fromkeys(refusal.size for refusal in refusals):
        others = [candidate for candidate in candidates[size] if candidate not in study.sizes]
        fitting[size] = list(itertools.islice(filter(all_match, others), NUM_NAMED))

    values: list[list[str]] = []
    for index in range(min(len(sizes) for sizes in fitting.values())):
        values.append([fitting[size][index] if size in fitting else size for size in study.sizes])
    return values


def _with_variants(study: Study, variants: Iterable[str]) -> Study:
    return dataclasses.replace(study, variants=tuple(variants))


def _quoted(texts: Sequence[str]) -> str:
    """Formats a tuple of texts for a flag in a shell, as in '("d_model=96",)'."""
    return "'(" + ', '.join(f'"{text}"' for text in texts) + (",)'" if len(texts) == 1 else ")'")
