"""What differs between arms that are compared, beyond what the study says differs."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from qkattn.verdict.arms import Arm
from qkattn.verdict.codes import Remark, RemarkCode
from qkattn.verdict.declared import Planned
from qkattn.verdict.load import Study
from qkattn.verdict.reading import flat

# The factors of every study, and the shapes that matching solves for.
_FACTORS = (
    'score',
    'value',
    'd_model',
    'd_ff',
    'num_heads',
    'head_size',
    'num_layers',
)
# Where things lie and what runs them: they do not enter a result, or only by rounding.
_PLACES = ('mesh', 'data.data_dir', 'data.manual_dir')
_PROGRAM = (
    'train.steps_per_dispatch',
    'train.log_every',
    'train.eval_every',
    'train.checkpoint_every',
    'train.lifting',
    'model.remat',
    'model.scan_unroll',
)
# Seeds pair where they are shared, whatever else there is.
_HARMLESS = (*_PROGRAM, 'trials.seeds')
_SOFTWARE = ('python', 'git.commit', 'devices.kind', 'devices.platform')


def differences(study: Study, arms: Sequence[Arm]) -> Iterator[Remark]:
    """Settings, data and software that differ between the arms of a size.

    One remark for each that differs, with its values and arms; where it enters results, one more
    for each arm that differs from the baseline, which gets no verdict.
    """
    runs = {arm.place: study.by_name[arm.example.run] for arm in arms}
    allowed = declared_factors(study)
    for size in study.sizes:
        of_size = [arm for arm in arms if arm.size == size and arm.verdict_trials]
        settings = {arm.variant: _settings(runs[arm.place], allowed) for arm in of_size}
        yield from _compared(study, size, settings, _HARMLESS)
        measured = {arm.variant: _measured(arm) for arm in of_size}
        yield from _compared(study, size, measured, ())
    yield from _software(arms)


def declared_factors(study: Study) -> set[str]:
    """The settings that may differ: variants', matching's and, where tuned, the knobs'."""
    fields = {f'model.{name}' for name in _FACTORS}
    for variant in study.variants:
        own = variant.partition('?')[2]
        fields |= {f'model.{name}' for name in re.findall(r'(?:^|&)(\w+)=', own)}
    for knob in study.tuning.knobs if study.tuning else ():
        fields.add('model.score_scale' if knob == 'score_scale' else f'trials.{knob}s')
    return fields


def _settings(run: Planned, allowed: set[str]) -> dict[str, Any]:
    return {
        name: value
        for name, value in flat(run.config)
        if name not in allowed and not name.startswith(_PLACES)
    }


def _measured(arm: Arm) -> dict[str, Any]:
    example = arm.example
    found = {f'data.{name}': value for name, value in flat(example.data)}
    found |= {'eval_tokens': example.eval_tokens, 'eval_rows': example.eval_rows}
    return found | {'target_parameters': example.target_parameters}


def _compared(
    study: Study, size: str, of_arms: Mapping[str, Mapping[str, Any]], harmless: Sequence[str]
) -> Iterator[Remark]:
    absent = dict.fromkeys((name for of in of_arms.values() for name in of), 'absent')
    of_arms = {variant: absent | of for variant, of in of_arms.items()}
    for name in absent:
        values = {variant: str(of[name]) for variant, of in of_arms.items()}
        kinds = {variant: repr(of[name]) for variant, of in of_arms.items()}
        if len(set(kinds.values())) == 1:
            continue
        data = {
            'name': name,
            'size': size if len(study.sizes) > 1 else None,
            'values': _by_value(values),
            'harmless': name in harmless,
        }
        yield Remark(RemarkCode.DIFFERS, data)
        if name in harmless or study.baseline not in values:
            continue
        for variant, value in values.items():
            if kinds[variant] != kinds[study.baseline]:
                data = {'name': name, 'value': value, 'baseline': values[study.baseline]}
                yield Remark(RemarkCode.DIFFERS_FROM_BASELINE, data, True, (variant, size))


def _by_value(values: Mapping[Any, str]) -> dict[str, tuple]:
    by_value: dict[str, tuple] = {}
    for key, value in values.items():
        by_value[value] = (*by_value.get(value, ()), key)
    return by_value


def _software(arms: Sequence[Arm]) -> Iterator[Remark]:
    """Versions, devices and commits; they explain a difference, and seldom are one."""
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
            data = {'name': name, 'values': {v: tuple(sorted(of)) for v, of in values.items()}}
            yield Remark(RemarkCode.SOFTWARE_DIFFERS, data)
    if dirty:
        yield Remark(RemarkCode.UNCOMMITTED_CHANGES)
