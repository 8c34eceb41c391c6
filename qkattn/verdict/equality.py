"""Differences between compared arms that the study does not declare."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qkattn.verdict.arms import Arm
from qkattn.verdict.codes import Remark, RemarkCode
from qkattn.verdict.load import Study
from qkattn.verdict.reading import flat

# The factors of every study, and the shapes that matching solves for.
_FACTORS = ('score', 'value', 'd_model', 'd_ff', 'num_heads', 'head_size', 'num_layers')
# Paths and device layout, which affect results at most by rounding.
_PLACES = ('mesh', 'data.data_dir', 'data.manual_dir')
# Settings that do not affect results; trials with shared seeds are paired whatever the others are.
_HARMLESS = (
    *('train.steps_per_dispatch', 'train.log_every', 'train.eval_every', 'train.checkpoint_every'),
    *('train.lifting', 'model.remat', 'model.scan_unroll', 'trials.seeds'),
)
_SOFTWARE = ('python', 'git.commit', 'devices.kind', 'devices.platform')


def differences(study: Study, arms: Sequence[Arm]) -> Iterator[Remark]:
    """Settings, data and software that differ between the arms of a size.

    One remark for each setting or fact that differs, with its values and arms. If it can affect
    results, each arm that differs from the baseline gets a blocking remark as well.
    """
    factors = declared_factors(study)
    for size in study.sizes:
        of_size = [arm for arm in arms if arm.size == size and arm.verdict_trials]
        facts = {arm.variant: _facts(study, arm, factors) for arm in of_size}
        yield from _compared(study, size, facts)
    yield from _software(arms)


def declared_factors(study: Study) -> set[str]:
    """The settings that may differ: those of variants and of matching, and the tuned knobs."""
    own = [name for v in study.variants for name in re.findall(r'[?&](\w+)=', v)]
    tuned = study.tuning.knobs if study.tuning else ()
    knobs = {'model.score_scale' if k == 'score_scale' else f'trials.{k}s' for k in tuned}
    return knobs | {f'model.{name}' for name in (*_FACTORS, *own)}


def _facts(study: Study, arm: Arm, factors: set[str]) -> dict[str, Any]:
    """Settings of the arm's run, and the data it was measured on."""
    example = arm.example
    settings = flat(study.by_name[example.run].config)
    return {
        **{n: v for n, v in settings if n not in factors and not n.startswith(_PLACES)},
        **{f'data.{name}': value for name, value in flat(example.data)},
        **{n: getattr(example, n) for n in ('eval_tokens', 'eval_rows', 'target_parameters')},
    }


def _compared(study: Study, size: str, of_arms: Mapping[str, dict[str, Any]]) -> Iterator[Remark]:
    for name in dict.fromkeys(name for of in of_arms.values() for name in of):
        values = {variant: of.get(name, 'absent') for variant, of in of_arms.items()}
        if len(set(map(repr, values.values()))) == 1:
            continue
        by_value: dict[str, tuple[str, ...]] = {}
        for variant, value in values.items():
            by_value[str(value)] = (*by_value.get(str(value), ()), variant)
        where = {'name': name, 'size': size if len(study.sizes) > 1 else None}
        found = {'values': by_value, 'harmless': name in _HARMLESS}
        yield Remark(RemarkCode.DIFFERS, where | found)
        if name in _HARMLESS or study.baseline not in values:
            continue
        baseline = values[study.baseline]
        for variant, value in values.items():
            if repr(value) != repr(baseline):
                data = {'name': name, 'value': str(value), 'baseline': str(baseline)}
                yield Remark(RemarkCode.DIFFERS_FROM_BASELINE, data, True, (variant, size))


def _software(arms: Sequence[Arm]) -> Iterator[Remark]:
    """Versions, devices and commits, which seldom affect results."""
    facts: dict[str, dict[str, set[tuple[str, str, str]]]] = {}
    for trial in (trial for arm in arms for trial in arm.trials):
        for name, value in flat(trial.provenance):
            place = trial.variant, trial.size, trial.stage
            facts.setdefault(name, {}).setdefault(str(value), set()).add(place)
    for name, places in facts.items():
        if len(places) > 1 and (name.startswith('versions.') or name in _SOFTWARE):
            values = {value: tuple(sorted(of)) for value, of in places.items()}
            yield Remark(RemarkCode.SOFTWARE_DIFFERS, {'name': name, 'values': values})
    if 'True' in facts.get('git.dirty', ()):
        yield Remark(RemarkCode.UNCOMMITTED_CHANGES)
