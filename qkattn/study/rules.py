"""The rules of a study's protocol: functions that return a code and numbers if a rule is broken.

`validate` refuses a study before it starts by the first one; `verdict.rules` applies `tuned`,
`fresh` and `anneals` to results.
"""

import enum
import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from qkattn.config import ANNEALED, OptimizerConfig, Study, TuningConfig
from qkattn.config.setting import check_section
from qkattn.errors import ConfigError
from qkattn.stats.inference import MIN_PAIRS
from qkattn.stats.sweep import MIN_SEEDS, MIN_VALUES
from qkattn.study.arm_key import parse_expected
from qkattn.study.tuning import KNOBS, MODEL_KNOBS, screening_seeds


class Rule(enum.Enum):
    """A rule of the protocol; the value is the message if it is broken."""

    LEARNING_RATE_NOT_TUNED = (
        'trials.learning_rates={learning_rates} must be a grid with tuning.seeds, as in '
        '(0.001, 0.002, 0.004)'
    )
    SHARED_SEEDS = (
        'tuning.seeds, or those that the tuning may draw, and {name} share {seeds}: settings tuned '
        'on a seed look better on it, so the verdict needs other seeds'
    )
    NOT_ANNEALED = (
        'optimizer.schedule={schedule} with final_fraction={final_fraction} does not anneal, which '
        'a verdict needs; use linear or cosine with final_fraction={limit} or less'
    )
    GRID = '{name}={values} must ascend by a constant factor, as in (0.001, 0.002, 0.004)'
    SINGLE_VALUE = (
        "{name}={values} must be a grid, or empty for the model's own; set a single value as "
        'base.model.{field}'
    )
    UNKNOWN_CONTROL = (
        'expected={text!r}: {variant!r} is none of the arms that are compared with {baseline!r}; '
        'they are {arms}'
    )
    NO_EQUAL_SHAPE = 'expected={text!r} needs controls.equal_shape and a match'
    NEEDS_TUNING = '{name}={values} need tuning.seeds: without them there is no verdict'
    NO_BASELINE = 'variants={variants} must contain the baseline {baseline!r} for a verdict'
    TOO_FEW = '{name}={value} must be at least {least}{why}'
    NOT_DIVISIBLE = 'mesh.trial={trial} must divide {name}, {number}'
    NO_EFFECT = 'destinations={destinations} have no effect with match=None; give one'


Broken = Iterator[tuple[Rule, dict[str, Any]]]


def sentence(rule: Rule, data: Mapping[str, Any]) -> str:
    """The message of a broken rule."""
    return rule.value.format(**data)


def tuned(tuning: TuningConfig | None, rates: Sequence[float]) -> Broken:
    """A verdict needs a tuned learning rate."""
    if tuning is not None and len(rates) < 2:
        yield Rule.LEARNING_RATE_NOT_TUNED, {'learning_rates': tuple(rates)}


def fresh(screening: Collection[int], verdict: Collection[int]) -> Broken:
    """Verdict seeds are not screening seeds, which favour the values chosen on them."""
    if shared := sorted(set(screening) & set(verdict)):
        yield Rule.SHARED_SEEDS, {'seeds': tuple(shared)}


def anneals(optimizer: OptimizerConfig) -> Broken:
    """A verdict needs a schedule that anneals the learning rate."""
    if not optimizer.anneals:
        final = optimizer.final_fraction if optimizer.decays else None
        data = {'schedule': optimizer.schedule, 'final_fraction': final, 'limit': ANNEALED}
        yield Rule.NOT_ANNEALED, data


def grids(values_of: Mapping[str, tuple[float, ...]]) -> Broken:
    """Grids of more than one value ascend by one factor from above 0."""
    for name, values in values_of.items():
        if len(values) == 1:
            continue
        ascends = len(values) > 1 and 0 < values[0] < values[1] < math.inf
        if not ascends or any(
            not math.isclose(right / left, values[1] / values[0], rel_tol=1e-3)
            for left, right in itertools.pairwise(values)
        ):
            yield Rule.GRID, {'name': name, 'values': values}


def known(text: str, variant: str, labels: Sequence[str], baseline: str | None) -> Broken:
    """A positive control names an arm that is compared with the baseline."""
    compared = [label for label in labels if label != baseline]
    if variant not in compared:
        data = {'text': text, 'variant': variant, 'baseline': baseline}
        yield Rule.UNKNOWN_CONTROL, data | {'arms': ', '.join(map(repr, compared))}


def broken(study: Study) -> Broken:
    """Every rule that the settings of a study break, checked before it starts."""
    trials, tuning, controls = study.base.trials, study.tuning, study.controls
    model_grids = {f'tuning.{knob}s': getattr(tuning, f'{knob}s') for knob in MODEL_KNOBS}
    if study.match is None and len(study.destinations) > 1:
        yield Rule.NO_EFFECT, {'destinations': study.destinations}
    if not tuning.seeds:
        needs = {'expected': study.expected} | model_grids
        for name, values in needs.items():
            if values:
                yield Rule.NEEDS_TUNING, {'name': name, 'values': values}
        return
    for text in study.expected:
        expected = parse_expected(text)
        labels = study.variants
        if not expected.equal_shape and len(study.destinations) > 1:
            labels = tuple(f'{v} [{d}]' for v in labels for d in study.destinations)
        yield from known(text, expected.variant, labels, study.baseline)
        if expected.equal_shape and not (controls.equal_shape and study.match):
            yield Rule.NO_EQUAL_SHAPE, {'text': text}
    if study.baseline not in study.variants:
        yield Rule.NO_BASELINE, {'variants': study.variants, 'baseline': study.baseline}
    yield from anneals(study.base.optimizer)
    drawn = {'trials.seeds': trials.seeds, 'controls.longer_seeds': controls.longer_seeds}
    for name, seeds in drawn.items():
        for rule, data in fresh(screening_seeds(tuning), seeds):
            yield rule, data | {'name': name}
        if len(seeds) < MIN_PAIRS and (seeds or name == 'trials.seeds'):
            why = ' for a verdict' if name == 'trials.seeds' else ', or empty for trials.seeds'
            yield Rule.TOO_FEW, {'name': name, 'value': seeds, 'least': MIN_PAIRS, 'why': why}
    yield from tuned(tuning, trials.learning_rates)
    for name, values in model_grids.items():
        if len(values) == 1:
            field = name.removeprefix('tuning.').removesuffix('s')
            yield Rule.SINGLE_VALUE, {'name': name, 'values': values, 'field': field}
    every = {f'trials.{k}s': getattr(trials, f'{k}s') for k in KNOBS if k not in MODEL_KNOBS}
    every |= {name: values for name, values in model_grids.items() if values}
    yield from grids(every)
    for name, value, least, why in (
        ('max_points', tuning.max_points, max(map(len, every.values())), ', the longest grid'),
        ('max_seeds', tuning.max_seeds, len(tuning.seeds), ', the number of tuning.seeds'),
        ('max_points', tuning.max_points, MIN_VALUES, ': a best value needs worse ones beside it'),
        ('max_seeds', tuning.max_seeds, MIN_SEEDS, ': one seed shows no best value'),
    ):
        if value < least:
            data = {'name': f'tuning.{name}', 'value': value}
            yield Rule.TOO_FEW, data | {'least': least, 'why': why}
    numbers = {
        'the number of tuning.seeds': len(tuning.seeds),
        'tuning.max_seeds': tuning.max_seeds,
        'the number of trials.seeds': len(trials.seeds),
        'the number of controls.longer_seeds': len(controls.longer_seeds),
    }
    for name, number in numbers.items():
        if number % study.base.mesh.trial:
            data = {'trial': study.base.mesh.trial, 'name': name, 'number': number}
            yield Rule.NOT_DIVISIBLE, data


def validate(study: Study) -> None:
    """Raises ConfigError for the first rule that the study breaks, not those of its runs."""
    check_section('', study)
    for rule, data in broken(study):
        raise ConfigError(sentence(rule, data))
