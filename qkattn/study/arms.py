"""The arms of a study: variants x destinations x sizes, each matched in cost to the baseline."""

import ast
import dataclasses
import typing
from typing import Any

from qkattn.attention import registry
from qkattn.config import Config, ControlsConfig, ModelConfig, Study
from qkattn.config.setting import check_section
from qkattn.errors import ConfigError, SpecError
from qkattn.model import cost
from qkattn.model.sites import validate
from qkattn.storage.sinks import check_sinks
from qkattn.study import matching
from qkattn.study.matching import buildable
from qkattn.study.place import EQUAL_SHAPE, LONGER, Place
from qkattn.study.tuning import MODEL_KNOBS
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
    def title(self) -> str:
        """Label, size and control, in words; the corpus is left out."""
        control = self.place.control
        return f'{self.label} {self.size}' + (f' {control}' if control else '')

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
        variant = registry.parse_variant(name)
    except SpecError as error:
        raise ConfigError(f'variant {text!r}: {error}') from error
    return {**variant._asdict(), **parse_fields(fields, f'variant {text!r}')}


def build_arms(study: Study) -> list[Arm]:
    """Every arm, corpora outermost, then sizes, validated and matched; nothing compiles.

    Raises:
      ConfigError: an impossible variant, size or setting; a MatchError where no model matches.
    """
    validate_study(study)
    check_optimizer(study.base.optimizer, study.base.train.num_steps)
    check_sinks(study.base.train.sinks)
    arms = []
    first, *others = corpora_of(study)
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
                exact = matching.Match(baseline, cost.count(baseline), target, 0.0, baseline)
                arms.append(Arm(variant, None, Place(variant, size, first), exact))
                continue
            check_section(f'variant {variant!r}: model.', model(variant))
            for destination in study.destinations:
                match = _matched(study, model(variant), baseline, target, destination)
                validate(dataclasses.replace(study.base, model=match.config))
                label = variant if len(study.destinations) == 1 else f'{variant} [{destination}]'
                arms.append(Arm(variant, destination, Place(label, size, first), match))
            control = _equal_shape(study, model(variant), baseline, target)
            if control is not None and control.config not in [arm.model for arm in arms]:
                place = Place(variant, size, first, EQUAL_SHAPE)
                arms.append(Arm(variant, None, place, control))
    seen: dict[ModelConfig, Arm] = {}
    for arm in arms:
        explicit = dataclasses.replace(arm.model, d_ff=arm.model.mlp_width)
        if (same := seen.setdefault(explicit, arm)) is not arm:
            raise ConfigError(
                f'{same.label!r} and {arm.label!r} at {arm.size!r} are the same model; leave one '
                'out, or choose sizes whose steps are finer than the parameters saved'
            )
    return arms + [
        dataclasses.replace(arm, place=arm.place._replace(corpus=corpus))
        for corpus in others
        for arm in arms
    ]


def _check_fields(study: Study, variant: str, own: dict, at_size: dict) -> None:
    if twice := sorted(own.keys() & at_size.keys()):
        raise ConfigError(f'variant {variant!r} and sizes both set {twice[0]}')
    for name in MODEL_KNOBS:
        if name in own and getattr(study.tuning, f'{name}s'):
            raise ConfigError(f'variant {variant!r} sets {name}, which tuning.{name}s tunes')


def _matched(
    study: Study, model: ModelConfig, baseline: ModelConfig, target: float, destination: str
) -> matching.Match:
    if study.match is None:
        reached = cost.measured(model, 'total')
        return matching.Match(model, cost.count(model), target, reached / target - 1, model)
    return matching.match(
        model,
        target,
        which=study.match,
        fill=study.fill,
        tolerance=study.tolerance,
        destination=destination,
        baseline=baseline,
    )


def _equal_shape(
    study: Study, model: ModelConfig, baseline: ModelConfig, target: float
) -> matching.Match | None:
    """A variant at the baseline's shape, if it costs less there and the study has such controls."""
    if not controls_of(study).equal_shape:
        return None
    model = dataclasses.replace(model, d_ff=model.d_ff or baseline.d_ff)
    if not buildable(model):
        return None
    saved = cost.measured(model, study.match) / target - 1
    if saved >= 0:
        return None
    validate(dataclasses.replace(study.base, model=model))
    return matching.Match(model, cost.count(model), target, saved, model)


def grids(study: Study, arm: Arm) -> dict[str, tuple[float, ...]]:
    """The grid of each tuned setting; a single value is not tuned."""
    trials = study.base.trials
    return {
        'learning_rate': trials.learning_rates,
        'weight_decay': trials.weight_decays,
    } | {
        name: getattr(study.tuning, f'{name}s') or (getattr(arm.model, name),)
        for name in MODEL_KNOBS
    }


def is_tuned(study: Study) -> bool:
    return bool(study.tuning.seeds)


def corpora_of(study: Study) -> tuple[str, ...]:
    return study.corpora or (study.base.data.name,)


def looks_of(study: Study) -> tuple[int, ...]:
    """The numbers of verdict seeds at which the study may be looked at; () without tuning."""
    return (study.looks or (len(study.base.trials.seeds),)) if is_tuned(study) else ()


def controls_of(study: Study) -> ControlsConfig:
    """The controls that the study has: none without tuning, of equal shape only if matched."""
    if not is_tuned(study):
        return ControlsConfig(equal_shape=False, longer=None)
    controls = study.controls
    return dataclasses.replace(
        controls,
        equal_shape=controls.equal_shape and study.match is not None,
        longer_seeds=controls.longer_seeds or study.base.trials.seeds if controls.longer else (),
    )


def base_of(study: Study, arm: Arm) -> Config:
    """What the runs of an arm share: its model, its corpus, its steps, the seeds of its verdict."""
    data = dataclasses.replace(study.base.data, name=arm.place.corpus)
    base = dataclasses.replace(study.base, model=arm.model, data=data)
    if arm.place.control != LONGER:
        return base
    controls, train, optimizer = controls_of(study), base.train, base.optimizer
    times = controls.longer
    names = ('num_steps', 'eval_every', 'checkpoint_every')
    return dataclasses.replace(
        base,
        train=dataclasses.replace(train, **{name: times * getattr(train, name) for name in names}),
        optimizer=dataclasses.replace(optimizer, warmup_steps=times * optimizer.warmup_steps),
        trials=dataclasses.replace(base.trials, seeds=controls.longer_seeds),
    )


def table(arms: list[Arm], equal: str | None) -> str:
    """Parameters, residual, FLOPs and cache of all arms, under a line that states what is equal."""
    one_size = len({arm.size for arm in arms}) == 1
    rows = {}
    for arm in arms:
        control = ' (equal shape)' if arm.place.control == EQUAL_SHAPE else ''
        name = arm.label + control
        rows[name if one_size else f'{name} {arm.size}'] = arm.match
    return matching.table(rows, equal)
