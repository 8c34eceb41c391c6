"""The arms of a study: variants x destinations x sizes, each matched in cost to the baseline."""

import ast
import dataclasses
import functools
import typing
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
    """A planned arm: a variant at one size, on one corpus, with the model that was solved for."""

    variant: str  # as written in the study
    # The dimension that receives the saved parameters, such as 'd_model'. None for the baseline and
    # for controls at the baseline's shape.
    destination: str | None
    key: ArmKey
    model: ModelConfig
    target: float | int  # the baseline's cost, in the unit of the cost that is made equal
    residual: float  # (cost - target) / target

    @property
    def title(self) -> str:
        """The label, size and control of the arm in one text, without the corpus."""
        parts = (self.key.variant, self.key.size, self.key.control)
        return ' '.join(part for part in parts if part)


def parse_fields(text: str, context: str) -> dict[str, Any]:
    """Parses model fields: 'd_model=128&kind=encoder' is {'d_model': 128, 'kind': 'encoder'}.

    A value that is not a Python literal is taken as a string. Raises ConfigError for an unknown
    field, a field that is set twice, or a part without '='. The message begins with `context`.
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
    """Parses a variant of a study, 'score/value?field=value&...', into model fields.

    Raises ConfigError for a Score, Value or field that does not exist.
    """
    name, _, fields_text = text.partition('?')
    try:
        variant = registry.parse_variant(name)
    except SpecError as error:
        raise ConfigError(f'variant {text!r}: {error}') from error
    fields = parse_fields(fields_text, f'variant {text!r}')
    return {**variant._asdict(), **fields}


def build_arms(study: Study) -> list[PlannedArm]:
    """Returns all arms of a study, validated and matched in cost. Compiles nothing.

    The arms are ordered by corpus, then by size.

    Raises:
        ConfigError: A variant, a size or a setting is impossible.
        MatchError: Some variants have no model that costs as much as the baseline. The message has
            the reasons, and a last line that suggests flags with which all arms match.
    """
    check_section('', study)
    check_protocol(study)
    check_optimizer(study.base.optimizer, study.base.train.num_steps)
    check_sinks(study.base.train.sinks)
    check_metrics(study.base)
    study = resolved(study)

    # The task of each corpus has to exist and to fit the config. Its data are not opened.
    for corpus in study.corpora:
        data = dataclasses.replace(study.base.data, name=corpus)
        base = dataclasses.replace(study.base, data=data)
        try:
            task_of(base)
        except ConfigError as error:
            raise ConfigError(f'corpora={study.corpora}: {error}') from error
        evaluation_corpora.entries(base)  # raises ConfigError for an invalid entry

    # The arms on the first corpus.
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

    # The other corpora have the same arms.
    arms: list[PlannedArm] = []
    for corpus in study.corpora:
        for arm in arms_on_first_corpus:
            key = arm.key._replace(corpus=corpus)
            arms.append(dataclasses.replace(arm, key=key))
    return arms


def _require_different_models(arms: Sequence[PlannedArm]) -> None:
    """Raises ConfigError if two arms have the same model."""
    arm_of_model: dict[ModelConfig, PlannedArm] = {}
    for arm in arms:
        # d_ff=None stands for the default width, so it is made explicit before models are compared.
        with_explicit_d_ff = dataclasses.replace(arm.model, d_ff=arm.model.mlp_width)
        first_arm = arm_of_model.setdefault(with_explicit_d_ff, arm)
        if first_arm is not arm:
            raise ConfigError(
                f'{first_arm.key} and {arm.key} are the same model; leave one out, or choose sizes '
                'whose steps are finer than the parameters saved'
            )


def _require_expected_arms(study: Study, arms: Sequence[PlannedArm]) -> None:
    """Checks that each positive control of the study names an arm that is compared.

    A positive control is a known effect that the study has to find. An arm is a variant of the
    model. If the study matches costs, a variant can have arms of two sizes:

    - 'qk/vo?num_heads=1 is worse' names the arm that is resized to the cost of the baseline;
    - 'qk/vo?num_heads=1 is worse at equal shape' names the arm that keeps the shape of the baseline
      (SAME_SHAPE), whatever it costs.

    Raises ConfigError if the study has no arm of this variant and size.
    """
    for text in study.expected:
        expected = parse_expected(text)

        # The variants that are compared with the baseline in the size that the control names.
        compared: list[str] = []
        for arm in arms:
            is_baseline = arm.variant == study.baseline
            has_same_shape = arm.key.control == SAME_SHAPE
            has_expected_size = has_same_shape == expected.same_shape
            if has_expected_size and not is_baseline:
                compared.append(arm.key.variant)
        if expected.variant in compared:
            continue

        # The error lists the variants that can be named. Arms at the baseline's shape exist only
        # under a condition, which it says too.
        restriction = ''
        if expected.same_shape:
            restriction = ' at the same shape (cheaper ones, with controls.equal_shape and a match)'
        labels = ', '.join(repr(label) for label in dict.fromkeys(compared))
        raise ConfigError(
            f'expected={text!r}: {expected.variant!r} is not among the arms{restriction} that '
            f'are compared with {study.baseline!r}; they are {labels or "none"}'
        )


def _refusal_text(study: Study, refusals: Sequence[Refusal]) -> str:
    """Returns the message of an error about arms that no model matches in cost.

    It has one line for each reason, which names the variants. The last line suggests flags with
    which all arms match.
    """
    variants_of_reason: dict[tuple[str, str], list[str]] = {}  # by size and reason
    for refusal in refusals:
        variants = variants_of_reason.setdefault((refusal.size, refusal.reason), [])
        variants.append(repr(refusal.variant))
    lines: list[str] = []
    for (size, reason), variants in variants_of_reason.items():
        subject = f'variant {variants[0]}'
        if len(variants) > 1:
            subject = f'each of the variants {", ".join(variants)}'
        if len(study.sizes) > 1:
            subject += f' at {size!r}'
        lines.append(f'{subject} {reason}')
    lines.append(suggest_flags(study, refusals, _all_arms_match))
    return '\n'.join(lines)


def _all_arms_match(study: Study, size: str) -> bool:
    """Returns whether all arms of a study can be matched at a size."""
    try:
        arms, refusals = _arms_at_size(study, size)
        _require_different_models(arms)
    except ConfigError:
        return False
    return not refusals


@dataclasses.dataclass(frozen=True)
class _Baseline:
    """The baseline at one size, whose cost the other arms of this size have to match."""

    size: str  # as written in the study, such as 'd_model=128'
    model: ModelConfig
    which: str  # the cost that is made equal, one of COSTS
    cost: float | int


def _arms_at_size(study: Study, size: str) -> tuple[list[PlannedArm], list[Refusal]]:
    """Returns the arms of a size on the first corpus, in the order of the variants.

    Each variant has one arm for each destination of the saved parameters, matched in cost to the
    baseline. The variant's control at the baseline's shape follows, if the study asks for it and
    the variant costs less there. Arms that no model matches are returned as refusals.
    """
    size_fields = parse_fields(size, f'size {size!r}')
    baseline = _baseline_at_size(study, size, size_fields)
    arms: list[PlannedArm] = []
    refusals: list[Refusal] = []
    for variant in study.variants:
        if variant == study.baseline:
            arms.append(_planned_arm(study, baseline, variant, baseline.model))
            continue

        # One arm for each destination.
        unmatched = _model_at_baseline_shape(study, size_fields, variant)
        check_section(f'variant {variant!r}: model.', unmatched)
        for destination in study.destinations:
            model = unmatched
            if study.match is not None:
                solve = functools.partial(
                    match,
                    unmatched,
                    baseline.cost,
                    which=baseline.which,
                    fill=study.fill,
                    tolerance=study.tolerance,
                    destination=destination,
                )
                try:
                    if ':' in variant:
                        # An import path: code from outside the package may raise anything.
                        model = call_with_config_errors('variants', variant, solve)
                    else:
                        model = solve()
                except MatchError as error:
                    refusals.append(Refusal(size, baseline.model, variant, str(error)))
                    continue
            arms.append(_planned_arm(study, baseline, variant, model, destination))

        # The control at the baseline's shape.
        if study.controls.equal_shape:
            d_ff = unmatched.d_ff or baseline.model.d_ff
            model = dataclasses.replace(unmatched, d_ff=d_ff)
            can_be_built = violated_constraint(model) is None
            costs_less = can_be_built and cost.measured(model, baseline.which) < baseline.cost
            if costs_less and model not in [arm.model for arm in arms]:
                arms.append(_planned_arm(study, baseline, variant, model, control=SAME_SHAPE))
    return arms, refusals


def _baseline_at_size(study: Study, size: str, size_fields: dict[str, Any]) -> _Baseline:
    """Returns the baseline of a study at a size; `size_fields` are the model fields of the size.

    Raises ConfigError for an invalid model, and MatchError if the model has no cache to match.
    """
    model = _model_at_baseline_shape(study, size_fields, study.baseline)
    validate(dataclasses.replace(study.base, model=model))
    if study.match is not None:
        model = dataclasses.replace(model, d_ff=model.mlp_width)
    which = study.match or 'total'
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
    """Returns the arm of a variant with a model. Raises ConfigError for an invalid model.

    The label of the arm names the destination of the saved parameters only if the study has
    several, as in 'qk/no_o [d_ff]'.
    """
    validate(dataclasses.replace(study.base, model=model))
    label = variant
    if destination is not None and len(study.destinations) > 1:
        label = f'{variant} [{destination}]'
    key = ArmKey(label, baseline.size, study.corpora[0], control)
    residual = cost.measured(model, baseline.which) / baseline.cost - 1
    return PlannedArm(variant, destination, key, model, baseline.cost, residual)


def _model_at_baseline_shape(
    study: Study, size_fields: dict[str, Any], variant: str
) -> ModelConfig:
    """Returns the model of a variant at the baseline's shape, before it is matched in cost.

    Args:
        study: The study, which has the base model.
        size_fields: The model fields that the size sets, such as {'d_model': 128}.
        variant: The variant, which sets fields of its own: 'qk/no_o?qk_norm=True' sets score, value
            and qk_norm.

    Raises:
        ConfigError: The variant sets a field that the size also sets or that is tuned.
    """
    variant_fields = parse_variant(variant)
    set_twice = sorted(variant_fields.keys() & size_fields.keys())
    if set_twice:
        raise ConfigError(f'variant {variant!r} and sizes both set {set_twice[0]}')

    # A study tunes a model field, such as score_scale, if its grid has values: `score_scales`.
    for name in MODEL_KNOBS:
        grid = getattr(study.tuning, f'{name}s')
        if name in variant_fields and grid:
            raise ConfigError(f'variant {variant!r} sets {name}, which tuning.{name}s tunes')
    return dataclasses.replace(study.base.model, **size_fields, **variant_fields)


def row_title(key: ArmKey, keys: Iterable[ArmKey]) -> str:
    """Returns the title of an arm in a table of the arms `keys`, as in 'qk/no_o (longer)'.

    The title has the variant and the control. The size and the corpus follow if the arms of the
    table have several.
    """
    parts = [key.variant]
    if key.control is not None:
        parts.append({SAME_SHAPE: '(same shape)', LONGER: '(longer)'}[key.control])
    for name in ('size', 'corpus'):
        values = {getattr(other, name) for other in keys}
        if len(values) > 1:
            parts.append(getattr(key, name))
    return ' '.join(parts)


def table(arms: Sequence[PlannedArm], matched_cost: str | None) -> str:
    """Returns a table of all arms: shape, parameters by group, residual, FLOPs and cache.

    `matched_cost` is the cost that was made equal, such as 'total' (see COSTS). A first line above
    the table names it. It is None for a study without matching.
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
        for group, number in cost.count(config).items():
            row[group] = f'{number:,}'
        row['residual'] = f'{arm.residual:+.4%}'
        row['FLOP/token'] = f'{cost.flops_per_token(config):,.0f}'
        row['cache/token'] = f'{cost.cache_floats_per_token(config):,}'
        rows.append(row)
    titles = [(title, title == 'variant') for title in rows[0]]  # whether the column is flush left
    text = text_table(titles, [list(row.values()) for row in rows])
    if matched_cost is None:
        return text
    return f'equal: {COSTS[matched_cost]}\n{text}'
