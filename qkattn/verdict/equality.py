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
    'train.steps_per_dispatch',
    'train.log_every',
    'train.eval_every',
    'train.checkpoint_every',
    'train.lifting',
    'model.remat',
    'model.scan_unroll',
    'trials.seeds',
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
        yield from _compared(
            study, size, {arm.variant: _facts(study, arm, factors) for arm in of_size}
        )
    yield from _software(arms)


def declared_factors(study: Study) -> set[str]:
    """The settings that may differ: those of variants and of matching, and the tuned knobs."""
    fields = {f'model.{name}' for name in _FACTORS}
    for variant in study.variants:
        own = variant.partition('?')[2]
        fields |= {f'model.{name}' for name in re.findall(r'(?:^|&)(\w+)=', own)}
    for knob in study.tuning.knobs if study.tuning else ():
        fields.add('model.score_scale' if knob == 'score_scale' else f'trials.{knob}s')
    return fields


def _facts(study: Study, arm: Arm, factors: set[str]) -> dict[str, Any]:
    """Settings of the arm's run, and the data it was measured on."""
    example = arm.example
    settings = flat(study.by_name[example.run].config)
    return {
        **{n: v for n, v in settings if n not in factors and not n.startswith(_PLACES)},
        **{f'data.{name}': value for name, value in flat(example.data)},
        'eval_tokens': example.eval_tokens,
        'eval_rows': example.eval_rows,
        'target_parameters': example.target_parameters,
    }


def _compared(study: Study, size: str, of_arms: Mapping[str, dict[str, Any]]) -> Iterator[Remark]:
    for name in dict.fromkeys(name for of in of_arms.values() for name in of):
        values = {variant: of.get(name, 'absent') for variant, of in of_arms.items()}
        if len(set(map(repr, values.values()))) == 1:
            continue
        by_value: dict[str, tuple[str, ...]] = {}
        for variant, value in values.items():
            by_value[str(value)] = (*by_value.get(str(value), ()), variant)
        yield Remark.of(
            RemarkCode.DIFFERS,
            name=name,
            size=size if len(study.sizes) > 1 else None,
            values=by_value,
            harmless=name in _HARMLESS,
        )
        if name in _HARMLESS or study.baseline not in values:
            continue
        baseline = values[study.baseline]
        for variant, value in values.items():
            if repr(value) != repr(baseline):
                yield Remark.of(
                    RemarkCode.DIFFERS_FROM_BASELINE,
                    (variant, size),
                    True,
                    name=name,
                    value=str(value),
                    baseline=str(baseline),
                )


def _software(arms: Sequence[Arm]) -> Iterator[Remark]:
    """Versions, devices and commits, which seldom affect results."""
    facts: dict[str, dict[str, set[tuple[str, str, str]]]] = {}
    dirty = False
    for trial in (trial for arm in arms for trial in arm.trials):
        recorded = dict(flat(trial.provenance))
        dirty = dirty or recorded.get('git.dirty') is True
        for name, value in recorded.items():
            if name.startswith('versions.') or name in _SOFTWARE:
                place = trial.variant, trial.size, trial.stage
                facts.setdefault(name, {}).setdefault(str(value), set()).add(place)
    for name, values in facts.items():
        if len(values) > 1:
            sorted_values = {value: tuple(sorted(of)) for value, of in values.items()}
            yield Remark.of(RemarkCode.SOFTWARE_DIFFERS, name=name, values=sorted_values)
    if dirty:
        yield Remark.of(RemarkCode.UNCOMMITTED_CHANGES)
