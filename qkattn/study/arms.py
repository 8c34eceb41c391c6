"""The arms of a study: variants x destinations x sizes, each matched in cost to the baseline."""

import ast
import dataclasses
import typing
from typing import Any

from qkattn.attention import registry
from qkattn.config import ModelConfig, Study
from qkattn.config.validate import check_types
from qkattn.errors import ConfigError, SpecError
from qkattn.model import cost
from qkattn.model.sites import validate
from qkattn.study import matching
from qkattn.study.place import Place
from qkattn.study.validate_study import validate_study
from qkattn.train.optimizer import check_optimizer


@dataclasses.dataclass(frozen=True)
class Arm:
    """A variant at one size, one corpus and one destination of the parameters it saves.

    Attributes:
      variant: as written in the study.
      destination: the dimension that receives the saved parameters; None for the baseline and for
        controls of equal shape.
      place: its label (the variant, with its destination if the study has several), size, corpus
        and control.
      match: the model, solved to cost what the baseline does, and the residual, which is whatever
        it is for controls of equal shape.
    """

    variant: str
    destination: str | None
    place: Place
    match: matching.Match

    @property
    def label(self) -> str:
        return self.place.variant

    @property
    def size(self) -> str:
        return self.place.size

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
    name, _, fields = text.partition('?')
    try:
        score, value = registry.parse_variant(name)
    except SpecError as error:
        raise ConfigError(f'variant {text!r}: {error}') from error
    return {'score': score, 'value': value, **parse_fields(fields, f'variant {text!r}')}


def build_arms(study: Study) -> list[Arm]:
    """Every arm, sizes outermost, validated and matched; nothing compiles.

    Raises:
      ConfigError: an impossible variant, size or setting; a MatchError where no model matches.
    """
    check_optimizer(study.base.optimizer)
    validate_study(study)
    arms = []
    corpus = study.base.data.name
    for size in study.sizes:
        at_size = parse_fields(size, f'size {size!r}')

        def model(variant: str, at_size: dict = at_size) -> ModelConfig:
            own = parse_variant(variant)
            _check_fields(study, variant, own, at_size)
            return dataclasses.replace(study.base.model, **at_size, **own)

        baseline = model(study.baseline)
        validate(dataclasses.replace(study.base, model=baseline))
        if study.match is not None:
            baseline = dataclasses.replace(baseline, d_ff=baseline.mlp_width)
        target = cost.measured(baseline, study.match or 'total')
        for variant in study.variants:
            if variant == study.baseline:
                exact = matching.Match(baseline, cost.count(baseline), target, 0.0)
                arms.append(Arm(variant, None, Place(variant, size, corpus), exact))
                continue
            check_types(f'variant {variant!r}: model', model(variant))
            for destination in study.destinations:
                match = _matched(study, model(variant), target, destination)
                validate(dataclasses.replace(study.base, model=match.config))
                label = variant if len(study.destinations) == 1 else f'{variant} [{destination}]'
                arms.append(Arm(variant, destination, Place(label, size, corpus), match))
    seen: dict[ModelConfig, Arm] = {}
    for arm in arms:
        explicit = dataclasses.replace(arm.model, d_ff=arm.model.mlp_width)
        if (same := seen.setdefault(explicit, arm)) is not arm:
            raise ConfigError(
                f'{same.label!r} and {arm.label!r} at {arm.size!r} are the same model; leave one '
                'out, or choose sizes whose steps are finer than the parameters saved'
            )
    return arms


def _check_fields(study: Study, variant: str, own: dict, at_size: dict) -> None:
    if twice := sorted(own.keys() & at_size.keys()):
        raise ConfigError(f'variant {variant!r} and sizes both set {twice[0]}')
    if 'score_scale' in own and study.tuning.score_scales:
        raise ConfigError(f'variant {variant!r} sets score_scale, which tuning.score_scales tunes')


def _matched(study: Study, model: ModelConfig, target: float, destination: str) -> matching.Match:
    if study.match is None:
        reached = cost.measured(model, 'total')
        return matching.Match(model, cost.count(model), target, reached / target - 1)
    return matching.match(
        model,
        target,
        which=study.match,
        fill=study.fill,
        tolerance=study.tolerance,
        destination=destination,
    )


def grids(study: Study, arm: Arm) -> dict[str, tuple[float, ...]]:
    """The grid of each tuned setting; a single value is not tuned."""
    trials = study.base.trials
    return {
        'learning_rate': trials.learning_rates,
        'weight_decay': trials.weight_decays,
        'score_scale': study.tuning.score_scales or (arm.model.score_scale,),
    }


def is_tuned(study: Study) -> bool:
    return bool(study.tuning.seeds)


def table(arms: list[Arm], equal: str | None) -> str:
    """Parameters, residual, FLOPs and cache of all arms, under a line that states what is equal."""
    one_size = len({arm.size for arm in arms}) == 1
    rows = {arm.label if one_size else f'{arm.label} {arm.size}': arm.match for arm in arms}
    return matching.table(rows, equal)
