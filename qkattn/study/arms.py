"""The arms of a study: variants x destinations x sizes, each matched in cost to the baseline."""

import ast
import dataclasses
import typing
from collections.abc import Sequence
from typing import Any

from qkattn.attention import registry
from qkattn.config import ModelConfig, Study
from qkattn.config.setting import check_section
from qkattn.data.tasks.task_registry import task_of
from qkattn.errors import ConfigError, MatchError, SpecError
from qkattn.jobs.output import text_table
from qkattn.model import cost
from qkattn.model.sites import attention_spec, validate
from qkattn.storage.sinks import check_sinks
from qkattn.study.arm_key import SAME_SHAPE, ArmKey, parse_expected
from qkattn.study.matching import COSTS, match, violated_constraint
from qkattn.study.protocol import check_protocol, resolved
from qkattn.study.tuning import MODEL_KNOBS
from qkattn.train.optimizer import check_optimizer
from qkattn.train.trials import check_metrics


@dataclasses.dataclass(frozen=True)
class PlannedArm:
    """An arm as it is planned: a variant at one size, on one corpus, with its solved model."""

    variant: str  # as written in the study
    # What receives the saved parameters; None for the baseline and for controls at the same shape.
    destination: str | None
    key: ArmKey
    model: ModelConfig
    target: float | int  # what the baseline costs, in the unit of the cost that is made equal
    residual: float  # (cost - target) / target

    @property
    def title(self) -> str:
        """Label, size and control as text, without the corpus."""
        parts = (self.key.variant, self.key.size, self.key.control)
        return ' '.join(part for part in parts if part)


def parse_fields(text: str, context: str) -> dict[str, Any]:
    """Parses model fields: 'd_model=128&kind=encoder' is {'d_model': 128, 'kind': 'encoder'}.

    A value that is no Python literal is a string. ConfigError, which begins with `context`, for an
    unknown field, one that is set twice, or a part without '='.
    """
    valid_names = typing.get_type_hints(ModelConfig)
    fields: dict[str, Any] = {}
    for part in text.split('&'):
        if not part:
            continue
        name, equals, value = part.partition('=')
        if not equals or name not in valid_names:
            raise ConfigError(
                f'{context}: {part!r} must be a model field as in d_model=128; '
                f'fields are {", ".join(valid_names)}'
            )
        if name in fields:
            raise ConfigError(f'{context} sets {name} twice')
        try:
            fields[name] = ast.literal_eval(value)
        except (SyntaxError, ValueError):
            fields[name] = value
    return fields


def parse_variant(text: str) -> dict[str, Any]:
    """Parses 'score/value?field=value&...', a variant of a study, as model fields."""
    name, _, fields = text.partition('?')
    try:
        variant = registry.parse_variant(name)
    except SpecError as error:
        raise ConfigError(f'variant {text!r}: {error}') from error
    return {**variant._asdict(), **parse_fields(fields, f'variant {text!r}')}


def build_arms(study: Study) -> list[PlannedArm]:
    """Every arm, corpora outermost, then sizes, validated and matched; nothing compiles.

    Raises ConfigError for an impossible variant, size or setting; it is a MatchError, with a line
    for each variant of a size, where no model has an equal cost.
    """
    check_section('', study)
    check_protocol(study)
    check_optimizer(study.base.optimizer, study.base.train.num_steps)
    check_sinks(study.base.train.sinks)
    check_metrics(study.base)
    study = resolved(study)
    for corpus in study.corpora:
        data = dataclasses.replace(study.base.data, name=corpus)
        try:
            task_of(dataclasses.replace(study.base, data=data))
        except ConfigError as error:
            raise ConfigError(f'corpora={study.corpora}: {error}') from error
    arms: list[PlannedArm] = []  # on the first corpus
    for size in study.sizes:
        arms += _arms_at_size(study, size)
    _require_different_models(arms)
    _require_expected_arms(study, arms)
    return [
        dataclasses.replace(arm, key=arm.key._replace(corpus=corpus))
        for corpus in study.corpora
        for arm in arms
    ]


def _require_different_models(arms: Sequence[PlannedArm]) -> None:
    """Raises ConfigError if two arms have the same model."""
    arm_of_model: dict[ModelConfig, PlannedArm] = {}
    for arm in arms:
        # Without a d_ff, a model is the same as with the default in its place.
        with_explicit_d_ff = dataclasses.replace(arm.model, d_ff=arm.model.mlp_width)
        first_arm = arm_of_model.setdefault(with_explicit_d_ff, arm)
        if first_arm is not arm:
            raise ConfigError(
                f'{first_arm.key} and {arm.key} are the same model; leave one out, or choose sizes '
                'whose steps are finer than the parameters saved'
            )


def _require_expected_arms(study: Study, arms: Sequence[PlannedArm]) -> None:
    """Raises ConfigError if a positive control of the study names no arm that is compared."""
    for text in study.expected:
        expected = parse_expected(text)
        compared = [
            arm.key.variant
            for arm in arms
            if arm.variant != study.baseline
            and (arm.key.control == SAME_SHAPE) == expected.same_shape
        ]
        if expected.variant in compared:
            continue
        restriction = ''
        if expected.same_shape:
            restriction = ' at the same shape (cheaper ones, with controls.equal_shape and a match)'
        labels = ', '.join(repr(label) for label in dict.fromkeys(compared))
        raise ConfigError(
            f'expected={text!r}: {expected.variant!r} is not among the arms{restriction} that '
            f'are compared with {study.baseline!r}; they are {labels or "none"}'
        )


def _arms_at_size(study: Study, size: str) -> list[PlannedArm]:
    """The arms of a size on the first corpus, in the order of the variants.

    Each variant is matched once for each destination, which is followed by its control at the
    baseline's shape if it costs less there. MatchError names each variant without a model of equal
    cost.
    """
    size_fields = parse_fields(size, f'size {size!r}')
    which = study.match or 'total'
    baseline = _model_at_baseline_shape(study, size_fields, study.baseline)
    validate(dataclasses.replace(study.base, model=baseline))
    if study.match is not None:
        baseline = dataclasses.replace(baseline, d_ff=baseline.mlp_width)
    target = cost.measured(baseline, which)
    if not target:
        raise MatchError(f'match={which!r}: a model of kind={baseline.kind!r} has no cache')

    def planned_arm(
        variant: str,
        model: ModelConfig,
        destination: str | None = None,
        control: str | None = None,
    ) -> PlannedArm:
        validate(dataclasses.replace(study.base, model=model))
        label = variant
        if destination is not None and len(study.destinations) > 1:
            label = f'{variant} [{destination}]'
        key = ArmKey(label, size, study.corpora[0], control)
        residual = cost.measured(model, which) / target - 1
        return PlannedArm(variant, destination, key, model, target, residual)

    arms: list[PlannedArm] = []
    refused: list[str] = []
    for variant in study.variants:
        if variant == study.baseline:
            arms.append(planned_arm(variant, baseline))
            continue
        unmatched = _model_at_baseline_shape(study, size_fields, variant)
        check_section(f'variant {variant!r}: model.', unmatched)
        for destination in study.destinations:
            model = unmatched
            if study.match is not None:
                try:
                    model = match(
                        unmatched,
                        target,
                        which=which,
                        fill=study.fill,
                        tolerance=study.tolerance,
                        destination=destination,
                    )
                except MatchError as error:
                    refused.append(f'variant {variant!r} {error}')
                    continue
            arms.append(planned_arm(variant, model, destination))
        if study.controls.equal_shape:
            model = dataclasses.replace(unmatched, d_ff=unmatched.d_ff or baseline.d_ff)
            can_be_built = violated_constraint(model) is None
            costs_less = can_be_built and cost.measured(model, which) < target
            if costs_less and model not in [arm.model for arm in arms]:
                arms.append(planned_arm(variant, model, control=SAME_SHAPE))
    if refused:
        raise MatchError('\n'.join(refused))
    return arms


def _model_at_baseline_shape(
    study: Study, size_fields: dict[str, Any], variant: str
) -> ModelConfig:
    """The model of a variant at a size; ConfigError if it sets what the size or the tuning sets."""
    variant_fields = parse_variant(variant)
    set_twice = sorted(variant_fields.keys() & size_fields.keys())
    if set_twice:
        raise ConfigError(f'variant {variant!r} and sizes both set {set_twice[0]}')
    for name in MODEL_KNOBS:
        if name in variant_fields and getattr(study.tuning, f'{name}s'):
            raise ConfigError(f'variant {variant!r} sets {name}, which tuning.{name}s tunes')
    return dataclasses.replace(study.base.model, **size_fields, **variant_fields)


def table(arms: Sequence[PlannedArm], equal: str | None) -> str:
    """Shape, parameters by group, residual, FLOPs and cache of all arms, as aligned text.

    `equal` is the cost that was made equal, one of COSTS, which a first line then states.
    """
    has_one_size = len({arm.key.size for arm in arms}) == 1
    rows: list[dict[str, str]] = []
    for arm in arms:
        config = arm.model
        label = arm.key.variant
        if arm.key.control == SAME_SHAPE:
            label += ' (same shape)'
        if not has_one_size:
            label += f' {arm.key.size}'
        row = {
            'variant': label,
            'd_model': f'{config.d_model}',
            'd_ff': f'{config.mlp_width}',
            'heads': f'{config.num_heads}',
            'head_size': f'{attention_spec(config).head_size}',
            'layers': f'{config.num_layers}',
        }
        for group, number in cost.count(config).items():
            row[group] = f'{number:,}'
        row['residual'] = f'{arm.residual:+.4%}'
        row['FLOP/token'] = f'{cost.flops_per_token(config):,.0f}'
        row['cache/token'] = f'{cost.cache_floats_per_token(config):,}'
        rows.append(row)
    titles = [(title, title == 'variant') for title in rows[0]]
    text = text_table(titles, [list(row.values()) for row in rows])
    if equal is None:
        return text
    return f'equal: {COSTS[equal]}\n{text}'
