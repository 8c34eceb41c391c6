"""The arms of a study: variants x destinations x sizes, each matched in cost to the baseline.

One dimension of the model is solved for, then d_ff absorbs the rounding residual.
"""

import ast
import bisect
import dataclasses
import functools
import itertools
import math
import typing
from collections.abc import Iterator, Sequence
from typing import Any

from qkattn.attention import registry
from qkattn.config import ANNEALED, ControlsConfig, ModelConfig, Study
from qkattn.config.setting import check_section
from qkattn.data.tasks.task_registry import task_of
from qkattn.errors import ConfigError, MatchError, SpecError
from qkattn.jobs.output import text_table
from qkattn.model import cost
from qkattn.model.sites import attention_spec, sites, validate
from qkattn.stats.inference import MIN_PAIRS
from qkattn.stats.sweep import MIN_SEEDS, MIN_VALUES
from qkattn.storage.sinks import check_sinks
from qkattn.study.arm_key import SAME_SHAPE, ArmKey, parse_expected
from qkattn.study.tuning import MODEL_KNOBS, TRIAL_KNOBS, screening_seeds
from qkattn.train.optimizer import check_optimizer
from qkattn.train.trials import check_metrics

FARTHEST = 16  # times the baseline's value: the end of the search
# The costs that can be made equal, and their units.
COSTS = {
    'total': 'parameters',
    'non_embedding': 'non-embedding parameters',
    'flops': 'FLOP per token',
    'cache': 'cached numbers per token',
}


def problem(config: ModelConfig) -> str | None:
    """The constraint of a variant that a model violates; None if all variants fit."""
    try:
        for spec in sites(config).values():
            registry.check(spec())
    except SpecError as error:
        return f'cannot be built: {error}'
    return None


@dataclasses.dataclass(frozen=True)
class Dimension:
    """An integer of the model's shape that is solved for, as documented in `match`."""

    config: ModelConfig  # the variant at the baseline's shape
    name: str  # the field
    which: str = 'total'  # the cost that is made equal

    @property
    def given(self) -> int:
        """The value at the baseline's shape."""
        return getattr(self.config, self.name) or self.config.mlp_width

    @property
    def step(self) -> int:
        """The step between valid values."""
        if self.name == 'num_heads':
            return self.config.num_kv_heads or 1
        # A cache follows N H, which moves in steps of the heads.
        coarse = self.name == 'd_model' and self.which == 'cache' and not self.config.head_size
        return self.whole_heads if coarse else 1

    @property
    def whole_heads(self) -> int:
        """The smallest width whose heads have a whole size, even with rotary positions."""
        return self.config.num_heads * (2 if self.config.positions == 'rope' else 1)

    def at(self, value: int) -> ModelConfig:
        """The config at a value."""
        config = self.config
        whole = self.whole_heads
        fields: dict[str, Any] = {'d_ff': config.mlp_width, self.name: value}
        if self.name == 'num_heads':
            fields['head_size'] = config.head_size or config.d_model // config.num_heads
        if self.name == 'd_model':
            fields['d_ff'] = max(1, round(config.mlp_width / config.d_model * value))
            size = whole // config.num_heads * max(1, round(value / whole))
            alike = size * config.num_heads == value
            fields['head_size'] = config.head_size or (None if alike else size)
        return dataclasses.replace(config, **fields)

    def cost(self, value: int) -> float:
        return cost.measured(self.at(value), self.which)

    def first(self, values: range) -> int | None:
        """The first of the values at which the variant can be built; some need powers of two."""
        return next((value for value in values if problem(self.at(value)) is None), None)

    def nearest(self, target: float) -> int:
        """The usable value whose cost is nearest to the target; costs ascend."""
        given = self.given
        step = self.step
        end = FARTHEST * self.given
        other = self.first(range(given + step, end, step))
        if other is not None and self.cost(other) == self.cost(given):
            raise MatchError(f'has the same cost at any {self.name}')

        def reaches(value: int) -> bool:
            """Whether the first usable value from this one on, if any, costs the target."""
            usable = self.first(range(value, end, step))
            return usable is None or self.cost(usable) >= target

        high = given
        while not reaches(high):
            high *= 2
        values = range(step, high + 1, step)
        value = values[bisect.bisect_left(values, True, key=reaches)]
        around = self.first(range(value - step, 0, -step)), self.first(range(value, end, step))
        return min(filter(None, around), key=lambda value: abs(self.cost(value) - target))


def match(
    config: ModelConfig,
    target: float | int,
    *,
    which: str = 'total',
    fill: str | None = 'd_ff',
    tolerance: float = 1e-3,
    destination: str = 'd_model',
) -> ModelConfig:
    """The config with `destination`, then `fill`, solved so that its cost equals `target`.

    The destination takes the usable value nearest to the target; d_ff then absorbs the residual, at
    most half of one step of the destination. The variant has to be possible at the baseline's
    shape.

    - 'd_model': d_ff keeps its ratio to d_model; the number of heads stays, and the head size is
      the integer nearest to d_model / num_heads (even with rotary positions) unless it is set. A
      variant that needs N H = D therefore moves in multiples of num_heads.
    - 'd_ff': all other dimensions stay; `fill` has no effect.
    - 'num_heads': the head size stays; so does num_kv_heads where it is set, which is the step.
    - 'num_layers': in an encoder-decoder the encoder keeps its depth if num_encoder_layers is set,
      and otherwise is as deep as the decoder.

    The cache does not depend on d_ff, so `fill` is off for it. If a variant saves or costs less
    than half a step, the destination would stay and d_ff would absorb everything, which is another
    destination, so it is refused.

    `config` is the variant at the baseline's shape. `target` is in parameters for `which` 'total'
    or 'non_embedding', FLOP per token for 'flops', cached numbers per token for 'cache'; see
    `cost.measured`. `fill` is 'd_ff', or None to accept the residual of the destination;
    `tolerance` is the largest |residual| accepted. MatchError if there is no such model: what the
    variant violates, as a sentence without its subject.
    """
    if (impossible := problem(config)) is not None:
        raise MatchError(impossible)
    dimension = Dimension(config, destination, which)
    value = dimension.nearest(target)
    goal = f'{target:.0f} {COSTS[which]}'
    at = f'{destination}={value}'
    solved = dimension.at(value)
    wider = dataclasses.replace(solved, d_ff=solved.mlp_width + 1)
    step = cost.measured(wider, which) - dimension.cost(value)  # 0 of a cache
    if fill and destination != 'd_ff' and step:
        d_ff = solved.mlp_width + round((target - dimension.cost(value)) / step)
        if d_ff < 1:
            raise MatchError(f'has more than {goal} at d_ff=1 and {at}')
        solved = dataclasses.replace(solved, d_ff=d_ff)
    gap = dimension.cost(value) / target - 1
    if destination != 'd_ff' and value == dimension.given and abs(gap) > tolerance:
        raise MatchError(
            f'is {gap:+.2%} from the target at {at}, and no other {destination} is nearer, '
            'so d_ff would absorb it all: use the destination d_ff '
            '(--config.destinations=\'("d_ff",)\'), or a baseline of another size'
        )
    residual = cost.measured(solved, which) / target - 1
    if abs(residual) > tolerance:
        at = ' and '.join(dict.fromkeys((at, f'd_ff={solved.mlp_width}')))
        raise MatchError(
            f'reaches {goal} only to {100 * residual:+.3g}%, at {at}; choose another size, or a '
            f'tolerance above {tolerance:g}'
        )
    return solved


@dataclasses.dataclass(frozen=True)
class MatchedArm:
    """A variant at one size, one corpus and one destination of the parameters it saves."""

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
        return ' '.join(filter(None, (self.key.variant, self.key.size, self.key.control)))


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
        if name in fields:
            raise ConfigError(f'{where} sets {name} twice')
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


def resolved(study: Study) -> Study:
    """The study with defaults in place of empty corpora and controls.

    Without tuning there are no controls; without a match none at the same shape.
    """
    corpora = study.corpora or (study.base.data.name,)
    given = study.controls
    longer = given.longer if study.tuning.seeds else None
    controls = ControlsConfig(
        equal_shape=bool(given.equal_shape and study.tuning.seeds and study.match),
        longer=longer,
        longer_seeds=(given.longer_seeds or study.base.trials.seeds) if longer else (),
    )
    return dataclasses.replace(study, corpora=corpora, controls=controls)


def broken(study: Study) -> Iterator[str]:
    """A sentence for every rule that the settings of a study break, not those of its runs."""
    trials = study.base.trials
    tuning = study.tuning
    controls = study.controls
    model_grids = {f'tuning.{knob}s': getattr(tuning, f'{knob}s') for knob in MODEL_KNOBS}
    if study.match is None and len(study.destinations) > 1:
        yield f'destinations={study.destinations} have no effect with match=None; give one'
    if not tuning.seeds:
        if study.repeats is not None:
            yield f'repeats={study.repeats!r} needs tuning.seeds: without them there is no verdict'
        for name, values in ({'expected': study.expected} | model_grids).items():
            if values:
                yield f'{name}={values} need tuning.seeds: without them there is no verdict'
        return
    if study.baseline not in study.variants:
        yield (
            f'variants={study.variants} must contain the baseline {study.baseline!r} for a verdict'
        )
    if not (optimizer := study.base.optimizer).anneals:
        yield (
            f'optimizer.schedule={optimizer.schedule} with '
            f'final_fraction={optimizer.final_fraction} does not anneal, which a verdict needs; '
            f'use linear, cosine or wsd with final_fraction={ANNEALED} or less'
        )
    if len(trials.learning_rates) < 2:
        yield (
            f'trials.learning_rates={trials.learning_rates} must be a grid with tuning.seeds, as '
            'in (0.001, 0.002, 0.004)'
        )
    fresh = {'trials.seeds': trials.seeds, 'controls.longer_seeds': controls.longer_seeds}
    for name, seeds in fresh.items():
        if len(seeds) < MIN_PAIRS and (seeds or name == 'trials.seeds'):
            yield f'{name}={seeds} must be at least {MIN_PAIRS} seeds for a verdict'
        if shared := sorted({*screening_seeds(tuning)} & {*seeds}):
            yield (
                f'tuning.seeds, or those that the tuning may draw, and {name} share '
                f'{tuple(shared)}: settings tuned on a seed look better on it, so the verdict '
                'needs other seeds'
            )
    grids = {f'trials.{knob}s': getattr(trials, f'{knob}s') for knob in TRIAL_KNOBS}
    grids |= {name: values for name, values in model_grids.items() if values}
    for name, values in grids.items():
        if len(values) > 1 and not _ascends(values):
            yield f'{name}={values} must ascend by a constant factor, as in (0.001, 0.002, 0.004)'
    points = max(map(len, grids.values()))
    num_seeds = len(tuning.seeds)
    if tuning.max_points < (least := max(points, MIN_VALUES)):
        yield (
            f'tuning.max_points={tuning.max_points} must be at least {least}: the longest grid has '
            f'{points}, and a best value needs worse ones beside it'
        )
    if tuning.max_seeds < (least := max(num_seeds, MIN_SEEDS)):
        yield (
            f'tuning.max_seeds={tuning.max_seeds} must be at least {least}: tuning.seeds has '
            f'{num_seeds}, and one seed shows no best value'
        )
    numbers = num_seeds, tuning.max_seeds, len(trials.seeds), len(controls.longer_seeds)
    if any(number % study.base.mesh.trial for number in numbers):
        yield (
            f'mesh.trial={study.base.mesh.trial} must divide the numbers of tuning.seeds, '
            f'tuning.max_seeds, trials.seeds and controls.longer_seeds, {numbers}'
        )


def _ascends(values: tuple[float, ...]) -> bool:
    """Whether a grid ascends by one factor from above 0."""
    first, second, *_ = values
    return 0 < first < second < math.inf and all(
        math.isclose(right / left, second / first, rel_tol=1e-3)
        for left, right in itertools.pairwise(values)
    )


def build_arms(study: Study) -> list[MatchedArm]:
    """Every arm, corpora outermost, then sizes, validated and matched; nothing compiles.

    Raises ConfigError for an impossible variant, size or setting; it is a MatchError, with a line
    for each variant of a size, where no model has an equal cost.
    """
    check_section('', study)
    for sentence in broken(study):
        raise ConfigError(sentence)
    check_optimizer(study.base.optimizer, study.base.train.num_steps)
    check_sinks(study.base.train.sinks)
    check_metrics(study.base)
    study = resolved(study)
    for name in study.corpora:
        data = dataclasses.replace(study.base.data, name=name)
        try:
            task_of(dataclasses.replace(study.base, data=data))
        except ConfigError as error:
            raise ConfigError(f'corpora={study.corpora}: {error}') from error
    arms = [arm for size in study.sizes for arm in _at_size(study, size)]
    seen: dict[ModelConfig, MatchedArm] = {}
    for arm in arms:
        explicit = dataclasses.replace(arm.model, d_ff=arm.model.mlp_width)
        if (same := seen.setdefault(explicit, arm)) is not arm:
            raise ConfigError(
                f'{same.key} and {arm.key} are the same model; leave one out, or choose sizes '
                'whose steps are finer than the parameters saved'
            )
    for text in study.expected:
        expected = parse_expected(text)
        compared = [
            arm.key.variant
            for arm in arms
            if arm.variant != study.baseline
            and (arm.key.control == SAME_SHAPE) == expected.same_shape
        ]
        if expected.variant not in compared:
            kind = ''
            if expected.same_shape:
                kind = ' at the same shape (cheaper ones, with controls.equal_shape and a match)'
            raise ConfigError(
                f'expected={text!r}: {expected.variant!r} is not among the arms{kind} that '
                f'are compared with {study.baseline!r}; they are '
                f'{", ".join(map(repr, dict.fromkeys(compared))) or "none"}'
            )
    return [
        dataclasses.replace(arm, key=arm.key._replace(corpus=corpus))
        for corpus in study.corpora
        for arm in arms
    ]


def _at_size(study: Study, size: str) -> list[MatchedArm]:
    """The arms at a size; MatchError names each variant that has no model of equal cost there."""
    at_size = parse_fields(size, f'size {size!r}')
    which = study.match or 'total'
    arms: list[MatchedArm] = []
    refused: list[str] = []

    def model(variant: str) -> ModelConfig:
        fields = parse_variant(variant)
        if twice := sorted(fields.keys() & at_size.keys()):
            raise ConfigError(f'variant {variant!r} and sizes both set {twice[0]}')
        for name in fields.keys() & set(MODEL_KNOBS):
            if getattr(study.tuning, f'{name}s'):
                raise ConfigError(f'variant {variant!r} sets {name}, which tuning.{name}s tunes')
        return dataclasses.replace(study.base.model, **at_size, **fields)

    def add(
        variant: str,
        config: ModelConfig,
        destination: str | None = None,
        control: str | None = None,
    ) -> None:
        validate(dataclasses.replace(study.base, model=config))
        residual = cost.measured(config, which) / target - 1
        several = destination is not None and len(study.destinations) > 1
        label = f'{variant} [{destination}]' if several else variant
        key = ArmKey(label, size, study.corpora[0], control)
        arms.append(MatchedArm(variant, destination, key, config, target, residual))

    baseline = model(study.baseline)
    validate(dataclasses.replace(study.base, model=baseline))
    if study.match is not None:
        baseline = dataclasses.replace(baseline, d_ff=baseline.mlp_width)
    if not (target := cost.measured(baseline, which)):
        raise MatchError(f'match={which!r}: a model of kind={baseline.kind!r} has no cache')
    solve = functools.partial(
        match, target=target, which=which, fill=study.fill, tolerance=study.tolerance
    )
    for variant in study.variants:
        if variant == study.baseline:
            add(variant, baseline)
            continue
        config = model(variant)
        check_section(f'variant {variant!r}: model.', config)
        for destination in study.destinations:
            try:
                solved = solve(config, destination=destination) if study.match else config
            except MatchError as error:
                refused.append(f'variant {variant!r} {error}')
            else:
                add(variant, solved, destination)
        # A variant at the baseline's shape, if it costs less there.
        config = dataclasses.replace(config, d_ff=config.d_ff or baseline.d_ff)
        saves = problem(config) is None and cost.measured(config, which) < target
        if study.controls.equal_shape and saves and config not in [arm.model for arm in arms]:
            add(variant, config, control=SAME_SHAPE)
    if refused:
        raise MatchError('\n'.join(refused))
    return arms


def table(arms: Sequence[MatchedArm], equal: str | None) -> str:
    """Shape, parameters by group, residual, FLOPs and cache of all arms, as aligned text.

    `equal`: the cost that was made equal, as `which` of `match`, for a first line that states it.
    """
    one_size = len({arm.key.size for arm in arms}) == 1
    rows = []
    for arm in arms:
        config = arm.model
        control = ' (same shape)' if arm.key.control == SAME_SHAPE else ''
        row = {
            'variant': f'{arm.key.variant}{control}{"" if one_size else f" {arm.key.size}"}',
            **{'d_model': f'{config.d_model}', 'd_ff': f'{config.mlp_width}'},
            **{'heads': f'{config.num_heads}', 'head_size': f'{attention_spec(config).head_size}'},
            'layers': f'{config.num_layers}',
            **{group: f'{number:,}' for group, number in cost.count(config).items()},
            'residual': f'{arm.residual:+.4%}',
            'FLOP/token': f'{cost.flops_per_token(config):,.0f}',
            'cache/token': f'{cost.cache_floats_per_token(config):,}',
        }
        rows.append(row)
    titles = [(title, title == 'variant') for title in rows[0]]
    text = text_table(titles, [[*row.values()] for row in rows])
    return text if equal is None else f'equal: {COSTS[equal]}\n{text}'
