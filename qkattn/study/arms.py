"""The arms of a study: variants x destinations x sizes, each matched in cost to the baseline."""

import ast
import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

from qkattn.attention import registry
from qkattn.config import ModelConfig, Study
from qkattn.config.calls import call_with_config_errors
from qkattn.config.setting import check_section
from qkattn.data import evaluation_corpora
from qkattn.data.tasks.task_registry import task_of
from qkattn.errors import ConfigError, MatchError, SpecError
from qkattn.jobs.output import text_table
from qkattn.model import cost
from qkattn.model.sites import attention_spec, validate
from qkattn.storage.sinks import check_sinks
from qkattn.study.arm_key import LONGER, SAME_SHAPE, ArmKey, parse_expected
from qkattn.study.matching import COSTS, match, violated_constraint
from qkattn.study.protocol import check_protocol, resolved
from qkattn.study.remedies import Refusal, suggest_flags
from qkattn.study.tuning import MODEL_KNOBS
from qkattn.train.optimizer import check_optimizer
from qkattn.train.trials import check_metrics


@dataclasses.dataclass(frozen=True)
class PlannedArm:
    """A variant at one size and on one corpus, with its model."""

    variant: str  # as written in the study
    # The dimension that gets the saved parameters, such as 'd_model'. None for the baseline and for
    # controls at the baseline's shape.
    destination: str | None
    key: ArmKey
    model: ModelConfig
    target: float | int  # the baseline's cost, such as a number of parameters
    residual: float  # (cost - target) / target

    @property
    def title(self) -> str:
        """The label, size and control of the arm, such as 'qk/no_o d_model=128 longer'."""
        parts = (self.key.variant, self.key.size, self.key.control)
        return ' '.join(part for part in parts if part)


def parse_fields(text: str, context: str) -> dict[str, Any]:
    """Parses model fields such as 'd_model=128&kind=encoder'.

    This example returns {'d_model': 128, 'kind': 'encoder'}. A value that is not a Python literal
    stays a string.

    Args:
        text: The fields.
        context: The beginning of error messages.

    Raises:
        ConfigError: A field is unknown or set twice, or has no '='.
    """
    valid_names = [field.name for field in dataclasses.fields(ModelConfig)]
    fields: dict[str, Any] = {}
    for assignment in text.split('&'):
        if not assignment:
            continue
        name, equals, value_text = assignment.partition('=')
        if not equals or name not in valid_names:
            raise ConfigError(
                f'{context}: {assignment!r} must be a model field as in d_model=128; '
                f'fields are {", ".join(valid_names)}'
            )
        if name in fields:
            raise ConfigError(f'{context} sets {name} twice')
        try:
            fields[name] = ast.literal_eval(value_text)
        except (SyntaxError, ValueError, TypeError, RecursionError):
            fields[name] = value_text  # a string without quotes, such as 'encoder'
    return fields


def parse_variant(text: str) -> dict[str, Any]:
    """Parses a variant such as 'qk/no_o?num_heads=1' into model fields.

    This example returns {'score': 'qk', 'value': 'no_o', 'num_heads': 1}.

    Raises:
        ConfigError: The Score, the Value or a field does not exist.
    """
    name, _, fields_text = text.partition('?')
    try:
        variant = registry.parse_variant(name)  # a named tuple of score and value
    except SpecError as error:
        raise ConfigError(f'variant {text!r}: {error}') from error
    other_fields = parse_fields(fields_text, f'variant {text!r}')
    return {**variant._asdict(), **other_fields}


def build_arms(study: Study) -> list[PlannedArm]:
    """Returns all arms of a study, validated and matched in cost.

    The arms are ordered by corpus, then by size. Nothing is compiled.

    Raises:
        ConfigError: A variant, a size or a setting is invalid.
        MatchError: Some variants cannot be matched in cost. The last line of the message suggests
            flags with which all arms match.
    """
    # Check the settings.
    check_section('', study)
    check_protocol(study)
    check_optimizer(study.base.optimizer, study.base.train.num_steps)
    check_sinks(study.base.train.sinks)
    check_metrics(study.base)
    study = resolved(study)  # `corpora` gets its default
    _check_corpora(study)

    # All corpora have the same models, so arms are matched once, on the first corpus.
    arms_on_first_corpus: list[PlannedArm] = []
    refusals: list[Refusal] = []
    for size in study.sizes:
        arms_at_size, refusals_at_size = _arms_at_size(study, size)
        arms_on_first_corpus += arms_at_size
        refusals += refusals_at_size
    if refusals:
        raise MatchError(_refusal_text(study, refusals))
    _require_different_models(arms_on_first_corpus)
    _require_expected_arms(study, arms_on_first_corpus)

    arms: list[PlannedArm] = []
    for corpus in study.corpora:
        for arm in arms_on_first_corpus:
            key = arm.key._replace(corpus=corpus)
            arms.append(dataclasses.replace(arm, key=key))
    return arms


def _check_corpora(study: Study) -> None:
    """Raises ConfigError if a corpus has no task that fits the config. Opens no data."""
    for corpus in study.corpora:
        data = dataclasses.replace(study.base.data, name=corpus)
        config = dataclasses.replace(study.base, data=data)
        try:
            task_of(config)
        except ConfigError as error:
            raise ConfigError(f'corpora={study.corpora}: {error}') from error
        evaluation_corpora.entries(config)  # raises ConfigError for an invalid entry


def _require_different_models(arms: Sequence[PlannedArm]) -> None:
    """Raises ConfigError if two arms have the same model."""
    arm_of_model: dict[ModelConfig, PlannedArm] = {}
    for arm in arms:
        # d_ff=None means the default width, which is made explicit to compare models. The hash of a
        # run leaves out the kernel, so arms that differ in it alone would share their runs.
        model = dataclasses.replace(arm.model, d_ff=arm.model.mlp_width, kernel=ModelConfig.kernel)
        if model in arm_of_model:
            raise ConfigError(
                f'{arm_of_model[model].key} and {arm.key} are the same model; leave one out, or '
                'choose sizes whose steps are finer than the parameters saved'
            )
        arm_of_model[model] = arm


def _require_expected_arms(study: Study, arms: Sequence[PlannedArm]) -> None:
    """Raises ConfigError if a positive control of the study names no arm that is compared.

    A positive control is an effect that the study has to find:

    - 'qk/no_o is worse' names the arm that is matched in cost to the baseline.
    - 'qk/no_o is worse at equal shape' names the arm at the baseline's shape.
    """
    for text in study.expected:
        expected = parse_expected(text)
        labels_compared: list[str] = []
        for arm in arms:
            is_baseline = arm.variant == study.baseline
            has_same_shape = arm.key.control == SAME_SHAPE
            if not is_baseline and has_same_shape == expected.same_shape:
                labels_compared.append(arm.key.variant)
        if expected.variant in labels_compared:
            continue

        restriction = ''
        if expected.same_shape:
            restriction = ' at the same shape (cheaper ones, with controls.equal_shape and a match)'
        valid_labels = ', '.join(repr(label) for label in dict.fromkeys(labels_compared))
        raise ConfigError(
            f'expected={text!r}: {expected.variant!r} is not among the arms{restriction} that '
            f'are compared with {study.baseline!r}; they are {valid_labels or "none"}'
        )


def _refusal_text(study: Study, refusals: Sequence[Refusal]) -> str:
    """Returns the error message for arms without a match.

    It has one line for each reason, and a last line that suggests flags.
    """
    variants_by_reason: dict[tuple[str, str], list[str]] = {}  # by (size, reason)
    for refusal in refusals:
        variants = variants_by_reason.setdefault((refusal.size, refusal.reason), [])
        variants.append(repr(refusal.variant))
    lines: list[str] = []
    for (size, reason), variants in variants_by_reason.items():
        subject = f'variant {variants[0]}'
        if len(variants) > 1:
            subject = f'each of the variants {", ".join(variants)}'
        if len(study.sizes) > 1:
            subject += f' at {size!r}'
        lines.append(f'{subject} {reason}')
    lines.append(suggest_flags(study, refusals, _all_arms_match))
    return '\n'.join(lines)


def _all_arms_match(study: Study, size: str) -> bool:
    """Returns whether all arms of a study are valid at a size, and matched in cost."""
    try:
        arms, refusals = _arms_at_size(study, size)
        _require_different_models(arms)
    except ConfigError:
        return False
    return not refusals


@dataclasses.dataclass(frozen=True)
class _Baseline:
    """The baseline at one size. The other arms of this size are matched to its cost."""

    size: str  # as written in the study, such as 'd_model=128'
    model: ModelConfig
    which: str  # the cost that is matched, one of COSTS
    cost: float | int


def _arms_at_size(study: Study, size: str) -> tuple[list[PlannedArm], list[Refusal]]:
    """Returns the arms of one size on the first corpus, and the refused arms.

    A variant has an arm for each destination, matched in cost to the baseline. With
    `controls.equal_shape`, it also has a control at the baseline's shape if it costs less there.
    """
    size_fields = parse_fields(size, f'size {size!r}')
    baseline = _baseline_at_size(study, size, size_fields)
    arms: list[PlannedArm] = []
    refusals: list[Refusal] = []
    for variant in study.variants:
        if variant == study.baseline:
            arms.append(_planned_arm(study, baseline, variant, baseline.model))
            continue
        unmatched = _model_at_baseline_shape(study, size_fields, variant)
        check_section(f'variant {variant!r}: model.', unmatched)
        for destination in study.destinations:
            try:
                model = _matched_model(study, baseline, variant, unmatched, destination)
            except MatchError as error:
                refusals.append(Refusal(size, baseline.model, variant, str(error)))
                continue
            arms.append(_planned_arm(study, baseline, variant, model, destination))

        if study.controls.equal_shape:
            # The width of the baseline is explicit, and so is that of its controls.
            same_shape = dataclasses.replace(unmatched, d_ff=unmatched.d_ff or baseline.model.d_ff)
            is_other_model = same_shape not in [arm.model for arm in arms]
            if is_other_model and _costs_less(same_shape, baseline):
                arms.append(_planned_arm(study, baseline, variant, same_shape, control=SAME_SHAPE))
    return arms, refusals


def _costs_less(model: ModelConfig, baseline: _Baseline) -> bool:
    """Returns whether a model can be built and costs less than the baseline."""
    can_be_built = violated_constraint(model) is None
    return can_be_built and cost.measured(model, baseline.which) < baseline.cost


def _matched_model(
    study: Study, baseline: _Baseline, variant: str, unmatched: ModelConfig, destination: str
) -> ModelConfig:
    """Returns the model of a variant, matched in cost to the baseline if the study asks for it.

    Args:
        baseline: The baseline at the size of the model.
        unmatched: The model of the variant at the baseline's shape.
        destination: The dimension that gets the saved parameters.

    Raises:
        MatchError: No model of the variant costs as much as the baseline.
    """
    if study.match is None:
        return unmatched
    solve = functools.partial(
        match,
        unmatched,
        baseline.cost,
        which=baseline.which,
        fill=study.fill,
        tolerance=study.tolerance,
        destination=destination,
    )
    if ':' in variant:
        # The variant is imported from outside the package, so its code may raise anything.
        return call_with_config_errors('variants', variant, solve)
    return solve()


def _baseline_at_size(study: Study, size: str, size_fields: dict[str, Any]) -> _Baseline:
    """Returns the baseline of a study at one size.

    Args:
        size: The size, such as 'd_model=128'.
        size_fields: The parsed size, such as {'d_model': 128}.

    Raises:
        ConfigError: The model is invalid.
        MatchError: The study matches caches, and the model has no cache.
    """
    model = _model_at_baseline_shape(study, size_fields, study.baseline)
    validate(dataclasses.replace(study.base, model=model))
    if study.match is not None:
        # Matched arms have an explicit d_ff, so the baseline gets one too.
        model = dataclasses.replace(model, d_ff=model.mlp_width)
    which = study.match or 'total'  # without matching, the table compares the total parameters
    baseline_cost = cost.measured(model, which)
    if not baseline_cost:
        raise MatchError(f'match={which!r}: a model of kind={model.kind!r} has no cache')
    return _Baseline(size, model, which, baseline_cost)


def _planned_arm(
    study: Study,
    baseline: _Baseline,
    variant: str,
    model: ModelConfig,
    destination: str | None = None,
    control: str | None = None,
) -> PlannedArm:
    """Returns the arm of a variant on the first corpus. Raises ConfigError for an invalid model."""
    validate(dataclasses.replace(study.base, model=model))
    label = variant
    if destination is not None and len(study.destinations) > 1:
        label = f'{variant} [{destination}]'  # such as 'qk/no_o [d_ff]'
    key = ArmKey(label, baseline.size, study.corpora[0], control)
    residual = cost.measured(model, baseline.which) / baseline.cost - 1
    return PlannedArm(variant, destination, key, model, target=baseline.cost, residual=residual)


def _model_at_baseline_shape(
    study: Study, size_fields: dict[str, Any], variant: str
) -> ModelConfig:
    """Returns the model of a variant at the baseline's shape, before it is matched in cost.

    Args:
        size_fields: The model fields that the size sets, such as {'d_model': 128}.
        variant: The variant, such as 'qk/no_o?qk_norm=True'.

    Raises:
        ConfigError: Variant and size set the same field, or one of them sets a tuned field.
    """
    variant_fields = parse_variant(variant)
    fields_set_twice = sorted(variant_fields.keys() & size_fields.keys())
    if fields_set_twice:
        raise ConfigError(f'variant {variant!r} and sizes both set {fields_set_twice[0]}')
    for name in MODEL_KNOBS:  # model fields that may be tuned, such as score_scale
        is_tuned = bool(getattr(study.tuning, f'{name}s'))  # such as tuning.score_scales
        if name in variant_fields and is_tuned:
            raise ConfigError(f'variant {variant!r} sets {name}, which tuning.{name}s tunes')
        if name in size_fields and is_tuned:
            raise ConfigError(f'sizes set {name}={size_fields[name]!r}, which tuning.{name}s tunes')
    return dataclasses.replace(study.base.model, **size_fields, **variant_fields)


def row_title(key: ArmKey, keys: Iterable[ArmKey]) -> str:
    """Returns the title of an arm in a table, such as 'qk/no_o (longer)'.

    The title has the size if the arms in the table differ in size, and likewise the corpus.

    Args:
        key: The key of the arm.
        keys: The keys of all arms in the table.
    """
    parts = [key.variant]
    if key.control == SAME_SHAPE:
        parts.append('(same shape)')
    elif key.control == LONGER:
        parts.append('(longer)')
    for name in ('size', 'corpus'):
        values_in_table = {getattr(arm_key, name) for arm_key in keys}
        if len(values_in_table) > 1:
            parts.append(getattr(key, name))
    return ' '.join(parts)


def table(arms: Sequence[PlannedArm], matched_cost: str | None) -> str:
    """Returns a table of all arms: shape, parameters by group, residual, FLOPs and cache.

    Args:
        arms: The arms.
        matched_cost: The cost that was matched, one of COSTS. The first line names it. None for a
            study without matching.
    """
    keys = [arm.key for arm in arms]
    rows: list[dict[str, str]] = []
    for arm in arms:
        config = arm.model
        row = {
            'variant': row_title(arm.key, keys),
            'd_model': f'{config.d_model}',
            'd_ff': f'{config.mlp_width}',
            'heads': f'{config.num_heads}',
            'head_size': f'{attention_spec(config).head_size}',
            'layers': f'{config.num_layers}',
        }
        for group, num_parameters in cost.count(config).items():
            row[group] = f'{num_parameters:,}'
        row['residual'] = f'{arm.residual:+.4%}'
        row['FLOP/token'] = f'{cost.flops_per_token(config):,.0f}'
        row['cache/token'] = f'{cost.cache_floats_per_token(config):,}'
        rows.append(row)
    # Pairs (title, whether the column is left-aligned).
    columns = [(title, title == 'variant') for title in rows[0]]
    text = text_table(columns, [list(row.values()) for row in rows])
    if matched_cost is None:
        return text
    return f'equal: {COSTS[matched_cost]}\n{text}'
