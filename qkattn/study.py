"""The arms of a study: variants x destinations x sizes, each as costly as the baseline."""

import ast
import dataclasses
import math
import typing
from typing import Any

from qkattn import budget, matching
from qkattn.attention import registry
from qkattn.attention.spec import SpecError
from qkattn.config import ConfigError, ModelConfig, Study
from qkattn.validate import check_types, validate


@dataclasses.dataclass(frozen=True)
class Arm:
    """One contestant at one size.

    Attributes:
      variant: as written in the study.
      destination: where the weights go that it saves; None for the baseline, which saves none.
      size: as written in the study.
      label: the variant, with its destination where the study has several.
      match: the model, solved to equal the baseline, and how near it comes.
    """

    variant: str
    destination: str | None
    size: str
    label: str
    match: matching.Match

    @property
    def model(self) -> ModelConfig:
        return self.match.config


def parse_fields(text: str, where: str) -> dict[str, Any]:
    """'a=1&b=x' as model fields; ConfigError names an unknown field or a malformed part."""
    known = typing.get_type_hints(ModelConfig)
    fields = {}
    for part in filter(None, text.split('&')):
        name, equals, value = part.partition('=')
        if not equals or name not in known:
            raise ConfigError(
                f'{where}: {part!r} must be a model field as in d_model=128; '
                f'fields are {", ".join(known)}'
            )
        try:
            fields[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            fields[name] = value
    return fields


def parse_variant(text: str) -> dict[str, Any]:
    """'score/value?field=value' as model fields."""
    cell, _, fields = text.partition('?')
    try:
        score, value = registry.parse_cell(cell)
    except SpecError as error:
        raise ConfigError(f'variant {text!r}: {error}') from error
    return {'score': score, 'value': value, **parse_fields(fields, f'variant {text!r}')}


def arms(study: Study) -> list[Arm]:
    """Every arm, sizes outermost, validated and matched; nothing compiles.

    Raises:
      ConfigError: a variant, a size or a setting that cannot work; MatchError among them.
    """
    _check(study)
    found = []
    for size in study.sizes:
        at_size = parse_fields(size, f'size {size!r}')

        def model(variant: str, at_size: dict = at_size) -> ModelConfig:
            return dataclasses.replace(study.base.model, **at_size, **parse_variant(variant))

        baseline = model(study.baseline)
        validate(dataclasses.replace(study.base, model=baseline))
        if study.match is not None:
            baseline = dataclasses.replace(baseline, d_ff=baseline.mlp_width)
        target = budget.measured(baseline, study.match or 'total')
        for variant in study.variants:
            if variant == study.baseline:
                exact = matching.Match(baseline, budget.count(baseline), target, 0.0)
                found.append(Arm(variant, None, size, variant, exact))
                continue
            check_types(f'variant {variant!r}: model', model(variant))
            for destination in study.destinations:
                match = _matched(study, model(variant), target, destination)
                validate(dataclasses.replace(study.base, model=match.config))
                label = variant if len(study.destinations) == 1 else f'{variant} [{destination}]'
                found.append(Arm(variant, destination, size, label, match))
    seen: dict[ModelConfig, Arm] = {}
    for arm in found:
        explicit = dataclasses.replace(arm.model, d_ff=arm.model.mlp_width)
        if (same := seen.setdefault(explicit, arm)) is not arm:
            raise ConfigError(f'{same.label!r} and {arm.label!r} at {arm.size!r} are one model')
    return found


def _matched(study: Study, model: ModelConfig, target: float, destination: str) -> matching.Match:
    if study.match is None:
        reached = budget.measured(model, 'total')
        return matching.Match(model, budget.count(model), target, reached / target - 1)
    return matching.match(
        model,
        target,
        which=study.match,
        fill=study.fill,
        tolerance=study.tolerance,
        destination=destination,
    )


def grids(study: Study) -> dict[str, tuple[float, ...]]:
    """The values of each setting that an arm finds for itself, in the order of tuning."""
    trials = study.base.trials
    return {
        'learning_rate': trials.learning_rates,
        'weight_decay': trials.weight_decays,
        'score_scale': study.tuning.score_scales,
    }


def is_tuned(study: Study) -> bool:
    return bool(study.tuning.seeds)


def ratio(values: tuple[float, ...]) -> float:
    """The factor between neighbours of a geometric grid."""
    return values[1] / values[0]


def _check(study: Study) -> None:
    check_types('study', study)
    check_types('tuning', study.tuning)
    for name in ('variants', 'sizes', 'destinations'):
        values = getattr(study, name)
        if not values or len(set(values)) != len(values):
            raise ConfigError(f'{name}={values} must hold at least one entry, none twice')
    for name, valid in (
        ('match', ('total', 'non_embedding', 'flops', 'cache', None)),
        ('fill', ('d_ff', None)),
    ):
        if getattr(study, name) not in valid:
            said = ', '.join(map(str, valid[:-1]))
            raise ConfigError(f'{name}={getattr(study, name)!r} must be {said} or None')
    for destination in study.destinations:
        if destination not in matching.DESTINATIONS:
            raise ConfigError(
                f'destinations={study.destinations} must be of {", ".join(matching.DESTINATIONS)}'
            )
    if study.match is None and len(study.destinations) > 1:
        raise ConfigError(
            f'destinations={study.destinations} mean nothing with match=None: nothing is moved'
        )
    for name in ('tolerance', 'margin'):
        if not getattr(study, name) > 0:
            raise ConfigError(f'{name}={getattr(study, name)} must be above 0')
    if is_tuned(study):
        _check_tuning(study)
    elif study.tuning.score_scales != (1.0,):
        raise ConfigError(
            f'tuning.score_scales={study.tuning.score_scales} is tuned with tuning.seeds, '
            'which is empty'
        )


def _check_tuning(study: Study) -> None:
    tuning, trials = study.tuning, study.base.trials
    if study.baseline not in study.variants:
        raise ConfigError(
            f'variants={study.variants} must hold the baseline {study.baseline!r}, '
            'without which there is no verdict'
        )
    if shared := sorted(set(tuning.seeds) & set(trials.seeds)):
        raise ConfigError(
            f'tuning.seeds and trials.seeds share {shared[0]}: settings that a seed has chosen '
            'look better on it, so the verdict needs other seeds'
        )
    seeds = tuning.seeds
    if len(set(seeds)) != len(seeds) or not all(0 <= seed < 2**31 for seed in seeds):
        raise ConfigError(f'tuning.seeds={seeds} must be from 0 to 2**31 - 1, none twice')
    for knob, values in grids(study).items():
        if len(values) > tuning.max_points:
            raise ConfigError(
                f'tuning.max_points={tuning.max_points} must be at least {len(values)}, '
                f'the number of values of {knob}'
            )
        if not values or len(values) > 1 and not _is_geometric(values):
            raise ConfigError(
                f'{knob} is tuned over {values}, which must be at least one value, ascending by '
                'one factor above 1, as in (0.001, 0.002, 0.004)'
            )
        if not all(math.isfinite(value) and value > 0 for value in values) and len(values) > 1:
            raise ConfigError(f'{knob} is tuned over {values}, which must be above 0 and finite')
    for stack, seeds in (('tuning.seeds', tuning.seeds), ('trials.seeds', trials.seeds)):
        if len(seeds) % study.base.mesh.trial:
            raise ConfigError(
                f'mesh.trial={study.base.mesh.trial} must divide the number of {stack}, '
                f'{len(seeds)}'
            )


def _is_geometric(values: tuple[float, ...]) -> bool:
    if values[0] <= 0 or values[1] <= values[0]:
        return False
    return all(
        math.isclose(right / left, ratio(values), rel_tol=1e-3)
        for left, right in zip(values, values[1:], strict=False)
    )


def table(found: list[Arm], equal: str | None) -> str:
    """Weights, residual, FLOPs and cache of all arms, under a line that says what is equal."""
    one_size = len({arm.size for arm in found}) == 1
    rows = {arm.label if one_size else f'{arm.label} {arm.size}': arm.match for arm in found}
    return matching.table(rows, equal)
