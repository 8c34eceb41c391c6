"""The arms of a study: variants x destinations x sizes, each matched in cost to the baseline."""

import ast
import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from qkattn.attention import registry
from qkattn.config import Config, ControlsConfig, ModelConfig, Study
from qkattn.config.setting import check_section
from qkattn.data.tasks.task_registry import task_of
from qkattn.errors import CoarseError, ConfigError, MatchError, SpecError
from qkattn.model import cost, sites
from qkattn.storage.sinks import check_sinks
from qkattn.study import matching, rules
from qkattn.study.arm_key import EQUAL_SHAPE, LONGER, ArmKey
from qkattn.study.tuning import MODEL_KNOBS
from qkattn.train.optimizer import check_optimizer
from qkattn.train.trials import check_metrics

# Widths on either side of a size that are tried where a variant has no model of equal cost there.
REACH = 16
Refused = list[tuple[str, MatchError]]  # variants, and why no model matches


@dataclasses.dataclass(frozen=True)
class MatchedArm:
    """A variant at one size, one corpus and one destination of the parameters it saves."""

    variant: str  # as written in the study
    # What receives the saved parameters; None for the baseline and for controls of equal shape.
    destination: str | None
    key: ArmKey
    # Solved to cost what the baseline does; for controls of equal shape the residual is what it is.
    match: matching.Match

    @property
    def label(self) -> str:
        return self.key.variant

    @property
    def size(self) -> str:
        return self.key.size

    @property
    def title(self) -> str:
        """Label, size and control, in words; the corpus is left out."""
        return ' '.join(filter(None, (self.label, self.size, self.key.control)))

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


def build_arms(study: Study) -> list[MatchedArm]:
    """Every arm, corpora outermost, then sizes, validated and matched; nothing compiles.

    Raises ConfigError for an impossible variant, size or setting; it is a MatchError, with a line
    for each variant that no model matches, one for the nearest sizes that match all arms, and the
    other arms, where models cannot be matched.
    """
    rules.validate(study)
    check_optimizer(study.base.optimizer, study.base.train.num_steps)
    check_sinks(study.base.train.sinks)
    check_metrics(study.base)
    for name in study.corpora:
        data = dataclasses.replace(study.base.data, name=name)
        try:
            task_of(dataclasses.replace(study.base, data=data))
        except ConfigError as error:
            raise ConfigError(f'corpora={study.corpora}: {error}') from error
    first, *others = corpora_of(study)
    refused: dict[str, Refused] = {size: [] for size in study.sizes}
    arms = [arm for size in study.sizes for arm in _at_size(study, size, first, refused[size])]
    if errors := [error for of_size in refused.values() for _, error in of_size]:
        coarse = all(isinstance(error, CoarseError) for error in errors)
        remedy = [_remedy(study, refused)] if coarse else []
        separator = '\n' if len(errors) > 1 else '; '
        refusal = MatchError(separator.join([*map(str, errors), *remedy]))
        refusal.matched = tuple(arms)
        raise refusal
    seen: dict[ModelConfig, MatchedArm] = {}
    for arm in arms:
        explicit = dataclasses.replace(arm.model, d_ff=arm.model.mlp_width)
        if (same := seen.setdefault(explicit, arm)) is not arm:
            raise ConfigError(
                f'{same.label!r} and {arm.label!r} at {arm.size!r} are the same model; leave one '
                'out, or choose sizes whose steps are finer than the parameters saved'
            )
    return arms + [
        dataclasses.replace(arm, key=arm.key._replace(corpus=corpus))
        for corpus in others
        for arm in arms
    ]


def _remedy(study: Study, refused: dict[str, Refused]) -> str:
    """The flag of a study whose arms all have models of equal cost, if there is one nearby."""
    sizes = []
    for size, of_size in refused.items():
        nearest = _nearest(study, size, [variant for variant, _ in of_size]) if of_size else size
        if nearest is None:
            return f'none of the next {REACH} widths below and above {size!r} matches all arms'
        sizes.append(f'"{nearest}",')
    return f"all arms match at the nearest widths: --config.sizes='({' '.join(sizes)})'"


def _nearest(study: Study, size: str, refused: Sequence[str]) -> str | None:
    """The size with the nearest d_model that matches all arms; those that were refused go first."""

    def matches(near: str, variant: str) -> bool:
        errors: Refused = []
        pair = dataclasses.replace(study, variants=(study.baseline, variant))
        try:
            _at_size(pair, near, corpora_of(study)[0], errors)
        except (ConfigError, SpecError):
            return False
        return not errors

    fields = parse_fields(size, f'size {size!r}')
    model = dataclasses.replace(study.base.model, **fields)
    step = model.num_heads * (2 if model.positions == 'rope' else 1)
    for width in (model.d_model + n * step for n in sorted(range(-REACH, REACH + 1), key=abs)):
        near = '&'.join(f'{n}={v}' for n, v in (fields | {'d_model': width}).items())
        if width > 0 and all(matches(near, v) for v in (*refused, *study.variants)):
            return near
    return None


def _at_size(study: Study, size: str, corpus: str, refused: Refused) -> list[MatchedArm]:
    """The arms at a size; adds to `refused` the variants that have no model of equal cost."""
    at_size = parse_fields(size, f'size {size!r}')

    def model(variant: str) -> ModelConfig:
        fields = parse_variant(variant)
        if twice := sorted(fields.keys() & at_size.keys()):
            raise ConfigError(f'variant {variant!r} and sizes both set {twice[0]}')
        for name in fields.keys() & set(MODEL_KNOBS):
            if getattr(study.tuning, f'{name}s'):
                raise ConfigError(f'variant {variant!r} sets {name}, which tuning.{name}s tunes')
        return dataclasses.replace(study.base.model, **at_size, **fields)

    baseline = model(study.baseline)
    sites.validate(dataclasses.replace(study.base, model=baseline))
    if study.match is not None:
        baseline = dataclasses.replace(baseline, d_ff=baseline.mlp_width)
    target = cost.measured(baseline, study.match or 'total')

    def unsolved(config: ModelConfig) -> matching.Match:
        """The model as it is, and by how much it misses the target."""
        residual = cost.measured(config, study.match or 'total') / target - 1
        return matching.Match(config, cost.count(config), target, residual, config)

    arms: list[MatchedArm] = []
    for variant in study.variants:
        if variant == study.baseline:
            exact = dataclasses.replace(unsolved(baseline), residual=0.0)
            arms.append(MatchedArm(variant, None, ArmKey(variant, size, corpus), exact))
            continue
        config = model(variant)
        check_section(f'variant {variant!r}: model.', config)
        for destination in study.destinations:
            if study.match is None:
                sites.validate(dataclasses.replace(study.base, model=config))
            try:
                matched = unsolved(config) if study.match is None else None
                matched = matched or matching.match(
                    config,
                    target,
                    which=study.match or 'total',
                    fill=study.fill,
                    tolerance=study.tolerance,
                    destination=destination,
                )
            except MatchError as error:
                refused.append((variant, type(error)(f'variant {variant!r}: {error}')))
                continue
            sites.validate(dataclasses.replace(study.base, model=matched.config))
            label = variant if len(study.destinations) == 1 else f'{variant} [{destination}]'
            arms.append(MatchedArm(variant, destination, ArmKey(label, size, corpus), matched))
        # A variant at the baseline's shape, if it costs less there.
        config = dataclasses.replace(config, d_ff=config.d_ff or baseline.d_ff)
        if controls_of(study).equal_shape and matching.buildable(config):
            control = unsolved(config)
            if control.residual < 0 and config not in [arm.model for arm in arms]:
                sites.validate(dataclasses.replace(study.base, model=config))
                key = ArmKey(variant, size, corpus, EQUAL_SHAPE)
                arms.append(MatchedArm(variant, None, key, control))
    return arms


def grids(study: Study, arm: MatchedArm) -> dict[str, tuple[float, ...]]:
    """The grid of each tuned setting; a single value is not tuned."""
    trials = study.base.trials
    return {'learning_rate': trials.learning_rates, 'weight_decay': trials.weight_decays} | {
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


def base_of(study: Study, arm: MatchedArm) -> Config:
    """What the runs of an arm share: its model, its corpus, its steps, the seeds of its verdict."""
    data = dataclasses.replace(study.base.data, name=arm.key.corpus)
    base = dataclasses.replace(study.base, model=arm.model, data=data)
    if arm.key.control != LONGER:
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


def table(arms: list[MatchedArm], equal: str | None) -> str:
    """Parameters, residual, FLOPs and cache of all arms, under a line that states what is equal."""
    one_size = len({arm.size for arm in arms}) == 1
    rows = {}
    for arm in arms:
        control = ' (equal shape)' if arm.key.control == EQUAL_SHAPE else ''
        name = arm.label + control
        rows[name if one_size else f'{name} {arm.size}'] = arm.match
    return matching.table(rows, equal)
