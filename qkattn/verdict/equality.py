"""What differs between arms that are compared, beyond what the study says differs."""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from qkattn.study.tuning import SCREENING
from qkattn.verdict.declared import Planned
from qkattn.verdict.load import Study
from qkattn.verdict.summary import Row
from qkattn.verdict.trials import flat

# What a study matches, as a noun in the plural.
QUANTITIES = {
    'total': 'total parameters',
    'non_embedding': 'non-embedding parameters',
    'flops': 'FLOPs per token',
    'cache': 'cache floats per token',
}
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
MAX_NAMES = 3

# clause, whether it blocks, the arm it is about, what differs where that enters results
Found = tuple[str, bool, tuple[str, str] | None, str | None]


def differences(study: Study, rows: Sequence[Row]) -> Iterator[Found]:
    """Settings, data and software that differ between the arms of a size.

    One clause for each that differs, with its values and arms; where it enters results, one more
    for each arm that differs from the baseline, which gets no verdict.
    """
    runs = {row.place: study.by_name[row.example.run] for row in rows}
    allowed = declared_factors(study)
    for size in study.sizes:
        of_size = [row for row in rows if row.size == size and row.verdicts]
        settings = {row.variant: _settings(runs[row.place], allowed) for row in of_size}
        yield from _compared(study, size, settings, _HARMLESS)
        measured = {row.variant: _measured(row) for row in of_size}
        yield from _compared(study, size, measured, ())
    yield from _software(rows)


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


def _measured(row: Row) -> dict[str, Any]:
    example = row.example
    found = {f'data.{name}': value for name, value in flat(example.data)}
    found |= {'eval tokens': example.eval_tokens, 'eval rows': example.eval_rows}
    return found | {'target': example.target_parameters}


def _compared(
    study: Study, size: str, of_arms: Mapping[str, Mapping[str, Any]], harmless: Sequence[str]
) -> Iterator[Found]:
    where = f' at {size}' if len(study.sizes) > 1 else ''
    absent = dict.fromkeys((name for of in of_arms.values() for name in of), 'absent')
    of_arms = {arm: absent | of for arm, of in of_arms.items()}
    for name in absent:
        values = {arm: of[name] for arm, of in of_arms.items()}
        if len(set(map(repr, values.values()))) == 1:
            continue
        enters = None if name in harmless else name
        yield f'{name} differs between arms{where}: {_by_value(values)}', False, None, enters
        if name in harmless or study.baseline not in values:
            continue
        for arm, value in values.items():
            if repr(value) != repr(values[study.baseline]):
                clause = (
                    f"{name} is {_short(value)}, the baseline's {_short(values[study.baseline])}"
                )
                yield clause, True, (arm, size), None


def _by_value(values: Mapping[str, Any]) -> str:
    """'800 (qk/vo), 400 (shared_qk/vo and 2 more)'."""
    arms: dict[str, list[str]] = {}
    for arm, value in values.items():
        arms.setdefault(_short(value), []).append(arm)
    return ', '.join(f'{value} ({_few(names)})' for value, names in arms.items())


def _few(names: Sequence[str]) -> str:
    more = f' and {len(names) - MAX_NAMES} more' if len(names) > MAX_NAMES else ''
    return ', '.join(names[:MAX_NAMES]) + more


def _short(value: Any) -> str:
    """A hash by its first digits; null as Python and the config files write it."""
    text = str(value)
    return f'{text[:12]}…' if re.fullmatch(r'[0-9a-f]{32,}', text) else text


def _software(rows: Iterable[Row]) -> Iterator[Found]:
    """Versions, devices and commits; they explain a difference, and seldom are one."""
    facts: dict[str, dict[str, set[str]]] = {}
    dirty = False
    for trial in (trial for row in rows for trial in row.trials):
        recorded = dict(flat(trial.provenance))
        dirty = dirty or recorded.get('git.dirty') is True
        kept = {
            name: value
            for name, value in recorded.items()
            if name.startswith('versions.')
            or name in ('python', 'git.commit', 'devices.kind', 'devices.platform')
        }
        for name, value in kept.items():
            stage = ' (screening)' if trial.stage == SCREENING else ''
            place = f'{trial.variant} at {trial.size}{stage}'
            facts.setdefault(name, {}).setdefault(_short(value), set()).add(place)
    for name, values in facts.items():
        if len(values) > 1:
            texts = (f'{value} ({_few(sorted(places))})' for value, places in values.items())
            yield f'{name} differs between runs: {", ".join(texts)}', False, None, None
    if dirty:
        clause = 'Some results come from a working tree with changes that no commit holds'
        yield clause, False, None, None
