"""The columns of a report, each declared once: an entry of `columns` adds one to every table.

A column with a heading is printed in its `tables`: the page and table.md (PAGE), the headline of a
Markdown page and the LaTeX table (HEADLINE), the table of controls (CONTROL). Every column with a
key stands in the data frame, unrounded, and in table.csv, to six digits, in the unit of the result
files.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qkattn.metrics import METRICS, Metric, shown
from qkattn.report import prose
from qkattn.report.prose import NONE, interval, mean_sd, one_line, p_value, reasons, si, words
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Estimate
from qkattn.study.tuning import KNOBS
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study

PAGE, HEADLINE, CONTROL = 'page', 'headline', 'control'
EVERYWHERE = (PAGE, HEADLINE, CONTROL)
ESTIMATE = tuple(field.name for field in dataclasses.fields(Estimate))
DIFFERENCE = (
    *('mean', 'sd', 'low', 'high', 'n', 'p', 'p_margin'),
    *('error_seeds', 'error_evaluation', 'tuning_low', 'tuning_high'),
)
_SWEEP = ('optimum', 'optimum_low', 'optimum_high', 'at_worst', 'bracketed')


@dataclasses.dataclass(frozen=True)
class Measure:
    """A metric on one split, 'val' or 'test', in the unit in which it is printed."""

    metric: Metric
    split: str

    @property
    def field(self) -> str:
        return self.metric.field(self.split)

    @property
    def name(self) -> str:
        """The label, with the split if the metric is measured on several."""
        label = self.metric.label
        return f'{self.split} {label}' if len(self.metric.prefixes) > 1 else label

    @property
    def unit(self) -> str:
        """The unit, unless there is none or it is the label."""
        return self.metric.unit if self.metric.unit not in (None, self.metric.label) else ''

    @property
    def axis(self) -> str:
        return f'{self.name} ({self.unit})' if self.unit else self.name

    def over_seeds(self, arm: Arm) -> Estimate | None:
        return arm.over_seeds(self.field, self.metric.scale)

    def of_seeds(self, arm: Arm) -> list[float]:
        """The values of all chosen trials that have it."""
        values = [trial.metrics.get(self.field) for trial in arm.chosen]
        return [self.metric.scale * value for value in values if value is not None]


VAL_LOSS, TEST_LOSS = (Measure(METRICS['loss'], split) for split in ('val', 'test'))


def losses(arms: Sequence[Arm]) -> tuple[Measure, ...]:
    """Validation loss, and test loss if there is one, in nats/token."""
    has_test = any(TEST_LOSS.of_seeds(arm) for arm in arms)
    return (VAL_LOSS, TEST_LOSS) if has_test else (VAL_LOSS,)


def _shown(arms: Sequence[Arm], role: str) -> tuple[Measure, ...]:
    """The metrics of a role on the test split, or on validation without one; the main one first."""
    trials = [trial for arm in arms for trial in arm.chosen]
    declared = {name: m for trial in trials for name, m in trial.declared_metrics.items()}
    measures: list[Measure] = []
    for metric in shown(declared, [trial.metrics for trial in trials]):
        if metric.role == role:
            on_splits = [Measure(metric, split) for split in reversed(metric.prefixes)]
            measures += [m for m in on_splits if any(m.of_seeds(arm) for arm in arms)][:1]
    return tuple(measures)


scores = functools.partial(_shown, role='score')
probes = functools.partial(_shown, role='probe')


def measured(findings: Findings) -> tuple[Measure, ...]:
    """The metrics that a report shows, in the order of their columns; losses are in nats/token."""
    val, *test = losses(findings.arms)
    return (*(test or [val]), *scores(findings.arms), *probes(findings.arms), *([val] * len(test)))


@dataclasses.dataclass(frozen=True)
class Column:
    """One column."""

    key: str  # its name in the data frame; empty where it is only printed
    # A path of attributes of an Arm, 'verdict.p_holm' (None on the way gives None), or a function.
    value: str | Callable[[Arm], Any]
    heading: str = ''  # with the unit; '|' breaks it into two lines, the second set lighter
    # Format of a value that is not None, or a function that prints it.
    text: str | Callable[[Any], str] = ''
    tables: Sequence[str] = (PAGE,)
    left: bool = False
    # Attributes of the value that the data frame has as key_part; () for the value itself.
    parts: Sequence[str] = ()

    def get(self, arm: Arm) -> Any:
        return self.value(arm) if callable(self.value) else follow(arm, self.value)

    def cells(self, arm: Arm) -> Iterator[tuple[str, Any]]:
        """Names and values in the data frame."""
        value = self.get(arm)
        for part in self.parts:
            yield f'{self.key}_{part}', follow(value, part)
        if self.key and not self.parts:
            yield self.key, value

    def print(self, arm: Arm) -> str:
        value = self.get(arm)
        if value is None:
            return NONE
        return one_line(self.text(value) if callable(self.text) else format(value, self.text))


def follow(value: Any, path: str) -> Any:
    """The attribute or mapping entry at the end of `path`, or None; truth values as 0 and 1."""
    for name in path.split('.'):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif value is not None:
            value = getattr(value, name)
    return int(value) if isinstance(value, bool) else value


def printed_in(table: str, study: Study, findings: Findings) -> list[Column]:
    """The columns that PAGE, HEADLINE or CONTROL prints."""
    of_study = columns(study, findings)
    return [column for column in of_study if column.heading and table in column.tables]


def columns(study: Study, findings: Findings) -> list[Column]:
    """The columns of a study; results come first, to be visible on a narrow screen."""
    main, *_ = metrics = measured(findings)
    compared, tuned = study.baseline is not None, study.tuning is not None
    made = [*_of_arm(study), *_of_difference(study, findings)]
    for metric in metrics:
        of_main = (PAGE, CONTROL) if compared else EVERYWHERE
        made += _of_metric(metric, of_main if metric == main else (PAGE,))
    for field in ('val_bits_per_byte', 'test_bits_per_byte'):
        if any(arm.over_seeds(field) for arm in findings.arms):
            over_seeds = functools.partial(Arm.over_seeds, field=field)
            made.append(Column(field, over_seeds, parts=ESTIMATE))
    made += [column for knob in KNOBS for column in _of_knob(knob, findings.arms, tuned)]
    return made + [*_of_costs(study, findings)]


def _of_arm(study: Study) -> Iterator[Column]:
    """Variant, size and corpus; those that distinguish arms of this study are in every table."""
    yield Column('variant', 'variant')
    name = functools.partial(prose.shown, study)
    yield Column('', lambda arm: name(arm.key), 'variant', tables=EVERYWHERE, left=True)
    tables = EVERYWHERE if len(study.sizes) > 1 else (PAGE,)
    yield Column('size', 'size', 'size', tables=tables, left=True)
    heading = 'corpus' if len(study.corpora) > 1 else ''
    yield Column('corpus', 'corpus', heading, tables=EVERYWHERE, left=True)
    yield Column('control', 'control')
    yield Column(
        '', lambda arm: arm.control and words(arm.control), 'control', tables=(CONTROL,), left=True
    )
    yield Column('is_baseline', 'is_baseline')
    yield Column('post_hoc', lambda arm: int(prose.is_post_hoc(study, arm.key)))


def _of_difference(study: Study, findings: Findings) -> Iterator[Column]:
    """The difference, its verdict, the tests behind the verdict, and its parts."""
    tuned, margin = study.tuning is not None, f'{study.margin:g}'
    intervals = any(arm.difference and arm.difference.low is not None for arm in findings.arms)
    unit = 'nats/token [95 % interval]' if intervals else 'nats/token'
    heading = f'difference in {findings.split} loss,|{unit}'
    tables = EVERYWHERE if study.baseline is not None else (PAGE,)
    yield Column('', _difference, heading, tables=tables)
    yield Column('difference', 'difference', parts=DIFFERENCE)
    heading = f'verdict,|margin {margin}' * tuned
    yield Column('verdict', 'verdict.decision.value', heading, tables=(PAGE, HEADLINE), left=True)
    for key, heading in (
        ('p_holm', 'p'),
        ('p_margin_holm', f'p of more than {margin}'),
        ('p_equivalence_holm', f'p of less than {margin}'),
    ):
        yield Column(key, f'verdict.{key}', f'{heading},|corrected' * tuned, p_value)
    yield Column('', _p_of_verdict, 'p,|corrected' * tuned, p_value, tables=(HEADLINE,))
    heading = 'detectable difference,|nats/token' * tuned
    yield Column('detectable_holm', 'verdict.detectable', heading, '.4f')
    parts = {parts.key: parts for parts in findings.decomposition}
    for part in ('removing', 'reinvesting', 'longer'):

        def difference(arm: Arm, part: str = part) -> Any:
            return follow(parts.get(arm.key), f'{part}.difference')

        yield Column(part, difference, parts=('mean', 'low', 'high'))
        if part != 'longer' and any(map(difference, findings.arms)):
            yield Column('', difference, f'{part},|nats/token', interval, tables=(HEADLINE,))
    yield Column('reason', lambda arm: arm.verdict and reasons(arm))
    yield Column('split', 'comparison.split')
    yield Column('difference_validation', 'comparison.validation')
    yield Column('num_documents', 'comparison.num_documents')


def _difference(arm: Arm) -> str:
    if arm.is_baseline:
        return f'baseline, {arm.split} loss {mean_sd(arm.loss, 4)}'
    return interval(arm.difference)


def _p_of_verdict(arm: Arm) -> float | None:
    """The corrected p value of the test behind an arm's verdict, of no difference if undecided.

    `better` and `worse` rest on the margin's test, those below the margin on that of no difference.
    """
    if arm.verdict is None:
        return None
    by_decision = {Decision.EQUIVALENT: arm.verdict.p_equivalence_holm}
    by_decision |= dict.fromkeys((Decision.BETTER, Decision.WORSE), arm.verdict.p_margin_holm)
    return by_decision.get(arm.verdict.decision, arm.verdict.p_holm)


def _of_metric(metric: Measure, tables: Sequence[str]) -> Iterator[Column]:
    def printed(arm: Arm) -> str:
        return mean_sd(metric.over_seeds(arm), metric.metric.decimals)

    heading = ', '.join(filter(None, (metric.name, metric.unit)))
    yield Column('', printed, f'{heading}|mean ± sd', tables=tables)
    yield Column(metric.field, lambda arm: arm.over_seeds(metric.field), parts=ESTIMATE)


def _of_knob(knob: str, arms: Sequence[Arm], tuned: bool) -> Iterator[Column]:
    """The chosen value, marked where it is not bracketed, and the results of its sweep."""
    swept = any(knob in arm.sweeps for arm in arms)
    heading = f'tuned {words(knob)}|[95 % interval]' * swept
    if knob == KNOBS[0] and not tuned:
        heading = 'learning|rate'

    def value(arm: Arm) -> float | None:
        """The value of the verdict runs, or the one that screening has chosen so far."""
        if knob == KNOBS[0] and arm.tuning is None:
            return arm.learning_rate
        if arm.verdict_trials:
            return arm.verdict_trials[0].at[KNOBS.index(knob)]
        return arm.sweeps[knob].chosen if knob in arm.sweeps else None

    def printed(arm: Arm) -> str | None:
        """'0.0042 [0.0038, 0.0047]', '0.016*' where it is not bracketed."""
        sweep, chosen = arm.sweeps.get(knob), value(arm)
        if chosen is None:
            return None
        if sweep is None:
            return f'{chosen:g}{"*" if knob == KNOBS[0] and not tuned and arm.at_edge else ""}'
        text = f'{chosen:g}{"" if sweep.bracketed else "*"}'
        if sweep.optimum_low is None or sweep.optimum_high is None:
            return text
        return f'{text} [{sweep.optimum_low:.3g}, {sweep.optimum_high:.3g}]'

    yield Column('', printed, heading, tables=(PAGE, CONTROL) if swept else (PAGE,))
    yield Column(knob, value)
    if swept:
        yield Column(knob, lambda arm: arm.sweeps.get(knob), parts=_SWEEP)


def _of_costs(study: Study, findings: Findings) -> Iterator[Column]:
    """Seeds, parameters, shape, costs, and how trials ended."""
    heading = 'correlation|over seeds' * (study.baseline is not None)
    yield Column('correlation', 'comparison.correlation', heading, '+.2f')
    shared: dict[str, Any] = {'tables': (PAGE, CONTROL)}
    yield Column('', lambda arm: len(arm.chosen), 'seeds', **shared)
    yield Column('parameters', 'example.parameters.total', 'parameters', ',', **shared)
    percent = '{:+.3f}'.format
    yield Column(
        'residual', 'example.residual', 'residual,|%', lambda r: percent(100 * r), **shared
    )
    heading = 'attention|parameters'
    yield Column('parameters_attention', 'example.parameters.attention', heading, ',')
    for name in ('d_model', 'd_ff'):
        yield Column(name, f'example.config.{name}', name, **shared)
    yield Column('flops_per_token', 'example.flops_per_token', 'FLOPs|/token', si)
    heading = 'cache|floats/token'
    yield Column('cache_floats_per_token', 'example.cache_floats_per_token', heading, si)

    def speed(arm: Arm) -> float | None:
        values = arm.of_runs('tokens_per_second')
        return statistics.fmean(values) if values else None

    yield Column('tokens_per_second', speed, 'tokens|/s', si)
    yield Column('train_seconds', lambda arm: sum(arm.of_runs('train_seconds')), 'run time,|s', si)
    diverged = '{0.num_diverged}/{1}'.format
    yield Column('', lambda arm: diverged(arm, len(arm.verdict_trials)), 'diverged', **shared)
    yield Column('diverged', 'num_diverged')
    yield Column('trials', lambda arm: len(arm.verdict_trials))
    yield Column('steps', 'example.num_steps')
    yield Column('seeds', lambda arm: ' '.join(str(t.seed) for t in arm.chosen))
    laws = {(law.variant, law.corpus): law.multiplier for law in findings.scaling}
    if laws:
        parts = ('value', 'low', 'high')
        yield Column('multiplier', lambda arm: laws.get((arm.variant, arm.corpus)), parts=parts)
