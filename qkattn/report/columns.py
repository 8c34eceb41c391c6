"""The columns of a report, each declared once: an entry of `columns` adds one to every table.

A column with a heading is printed in its `tables`: the page and table.md (PAGE), the first table of
the page (FIRST_SCREEN), the headline of a Markdown page (HEADLINE), the table of controls
(CONTROL). Every column with a key stands in table.csv, in the unit of the result files.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

from qkattn.metrics import METRICS, PREFIXES, Metric, shown
from qkattn.report import prose
from qkattn.report.prose import NONE, interval, mean_sd, one_line, p_value, reasons, si, words
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Estimate
from qkattn.stats.scaling import Interval
from qkattn.study.tuning import KNOBS
from qkattn.verdict.findings import PARTS, Findings
from qkattn.verdict.trained_arm import TrainedArm

PAGE = 'page'
# The columns of PAGE that a reader looks at first.
FIRST_SCREEN = 'first screen'
HEADLINE = 'headline'
CONTROL = 'control'
EVERYWHERE = (PAGE, FIRST_SCREEN, HEADLINE, CONTROL)
# Text, '|' breaks it into two lines; and whether its column is aligned to the left.
Heading = tuple[str, bool]
Table = tuple[list[Heading], list[list[str]]]
ESTIMATE = tuple(field.name for field in dataclasses.fields(Estimate))
DIFFERENCE = (
    'mean',
    'sd',
    'low',
    'high',
    'n',
    'p',
    'p_margin',
    'error_seeds',
    'error_evaluation',
    'tuning_low',
    'tuning_high',
)
# Of the parts of a difference: the headings of those that are printed, and the name in table.csv
# where it is another one than in code.
_HEADINGS = {'same_shape': 'at the same shape', 'reinvesting': 'reinvesting'}
_KEYS = {'same_shape': 'removing'}
SWEEP = ('optimum', 'optimum_low', 'optimum_high', 'at_worst', 'bracketed')


@dataclasses.dataclass(frozen=True)
class Measure:
    """A metric on one split, 'val' or 'test'."""

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
    def heading(self) -> str:
        """The name with the unit; a metric such as bits per byte, which is its unit, alone."""
        if self.metric.unit in (None, self.metric.label):
            return self.name
        return f'{self.name}, {self.metric.unit}'

    def over_seeds(self, arm: TrainedArm) -> Estimate | None:
        """In the unit of the result files."""
        return arm.over_seeds(self.field)

    def printed(self, value: Estimate) -> str:
        return mean_sd(value, self.metric.decimals, self.metric.scale)


VAL_LOSS = Measure(METRICS['loss'], 'val')
TEST_LOSS = Measure(METRICS['loss'], 'test')
# The roles of metrics beside the loss that have a column, in the order of the columns.
ROLES = ('score', 'probe')


def measured(findings: Findings) -> tuple[Measure, ...]:
    """The metrics that a report shows, in the order of their columns; losses are in nats/token.

    These are the loss that decides, scores and probes on the test split, or on validation without
    one, and the validation loss.
    """
    trials = [trial for arm in findings.arms for trial in arm.chosen]

    def exists(measure: Measure) -> bool:
        return any(trial.metrics.get(measure.field) is not None for trial in trials)

    declared = dict[str, Metric]()
    for trial in trials:
        declared |= trial.declared_metrics
    beside_loss = list[Measure]()
    printable = shown(declared, [trial.metrics for trial in trials])
    for role in ROLES:
        for metric in printable:
            on_splits = [Measure(metric, split) for split in reversed(metric.prefixes)]
            existing = [measure for measure in on_splits if exists(measure)]
            if metric.role == role and existing:
                beside_loss.append(existing[0])
    if exists(TEST_LOSS):
        return (TEST_LOSS, *beside_loss, VAL_LOSS)
    return (VAL_LOSS, *beside_loss)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of table.csv, of printed tables, or of both."""

    key: str  # its name in table.csv; empty where it is only printed
    # A path of attributes of a TrainedArm, 'verdict.p_holm' (None on the way gives None), or a
    # function of the arm.
    value: str | Callable[[TrainedArm], Any]
    heading: str = ''  # with the unit; '|' breaks it into two lines; empty if it is not printed
    text: str | Callable[[Any], str] = ''  # format of a value that is not None, or what prints it
    tables: Sequence[str] = (PAGE,)
    left: bool = False
    # Attributes of the value that table.csv has as key_part; () for the value itself.
    parts: Sequence[str] = ()

    def get(self, arm: TrainedArm) -> Any:
        if callable(self.value):
            return self.value(arm)
        return follow(arm, self.value)

    def cells(self, arm: TrainedArm) -> dict[str, Any]:
        """Values by their names in table.csv."""
        value = self.get(arm)
        if self.parts:
            return {f'{self.key}_{part}': follow(value, part) for part in self.parts}
        return {self.key: value} if self.key else {}

    def print(self, arm: TrainedArm) -> str:
        value = self.get(arm)
        if value is None:
            return NONE
        text = self.text(value) if callable(self.text) else format(value, self.text)
        return one_line(text)


def follow(value: Any, path: str) -> Any:
    """What a path of attributes or keys leads to, 'verdict.p_holm' from an arm.

    None where something on the way is None; truth values as 0 and 1, as table.csv has them.
    """
    for name in path.split('.'):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif value is not None:
            value = getattr(value, name)
    return int(value) if isinstance(value, bool) else value


def printed(table: str, findings: Findings, arms: Iterable[TrainedArm]) -> Table:
    """The columns that PAGE, HEADLINE or CONTROL prints, with a row for each arm."""
    shown_columns = [c for c in columns(findings) if c.heading and table in c.tables]
    headings = [(column.heading, column.left) for column in shown_columns]
    rows = [[column.print(arm) for column in shown_columns] for arm in arms]
    return headings, rows


def columns(findings: Findings) -> Iterator[Column]:
    """The columns of a study; results come first, to be visible on a narrow screen."""
    yield from _of_arm(findings)
    yield from _of_difference(findings)
    yield from _of_verdict(findings)
    yield from _of_parts(findings)
    yield from _of_metrics(findings)
    yield from _of_settings(findings)
    yield Column('correlation', 'comparison.correlation', 'correlation|over seeds', '+.2f')
    yield from COSTS
    if findings.scaling:
        yield _exchange_rate(findings)


def _of_arm(findings: Findings) -> Iterator[Column]:
    """What identifies an arm. Size and corpus are printed everywhere if the study has several."""
    study = findings.study
    several_sizes = len(study.sizes) > 1
    several_corpora = len(study.corpora) > 1
    yield Column('variant', 'variant', 'variant', tables=EVERYWHERE, left=True)
    yield Column('size', 'size', 'size', tables=EVERYWHERE if several_sizes else (PAGE,), left=True)
    yield Column(
        'corpus', 'corpus', 'corpus' if several_corpora else '', tables=EVERYWHERE, left=True
    )
    yield Column(
        'control', 'key.control', 'control', prose.control_words, tables=(CONTROL,), left=True
    )
    yield Column('is_baseline', 'is_baseline')
    yield Column('post_hoc', lambda arm: int(arm.key.declared in study.ledger.post_hoc))


def _of_difference(findings: Findings) -> Iterator[Column]:
    unit = 'nats/token [95 % interval]' if findings.has_intervals else 'nats/token'
    heading = f'difference in {findings.split} loss,|{unit}'
    yield Column('difference', 'difference', parts=DIFFERENCE)
    yield Column('', _difference, heading, tables=EVERYWHERE)


def _of_verdict(findings: Findings) -> Iterator[Column]:
    """The verdict, how it lasts, and the tests behind it; printed of a study with tuning."""
    study = findings.study
    margin = f'{study.margin:g}'

    def heading(text: str) -> str:
        return text if study.tuned else ''

    yield Column('verdict', 'verdict.decision.value')
    yield Column(
        '',
        _verdict,
        heading(f'verdict,|margin {margin}'),
        tables=(PAGE, FIRST_SCREEN, HEADLINE),
        left=True,
    )
    yield Column('length', 'settling.code.value')
    yield Column('length_times', 'settling.times')
    yield Column('difference_longer', 'settling.longer')
    for key, test in (
        ('p_holm', 'p'),
        ('p_margin_holm', f'p of more than {margin}'),
        ('p_equivalence_holm', f'p of less than {margin}'),
    ):
        yield Column(key, f'verdict.{key}', heading(f'{test},|corrected'), p_value)
    yield Column('', _p_of_verdict, heading('p,|corrected'), p_value, tables=(HEADLINE,))
    detectable = heading('detectable difference,|nats/token')
    yield Column('detectable_holm', 'verdict.detectable', detectable, '.4f')


def _of_parts(findings: Findings) -> Iterator[Column]:
    """The parts of a difference, and why and on which data it is decided."""
    for name in PARTS:
        heading = ''
        if name in _HEADINGS and any(getattr(arm.parts, name) for arm in findings.arms):
            heading = f'{_HEADINGS[name]},|nats/token'
        key = _KEYS.get(name, name)
        difference = f'parts.{name}.difference'
        bounds = ('mean', 'low', 'high')
        yield Column(key, difference, heading, interval, (HEADLINE,), parts=bounds)
    yield Column('reason', lambda arm: arm.verdict and reasons(arm))
    yield Column('split', 'comparison.split')
    yield Column('difference_validation', 'comparison.validation')
    yield Column('num_documents', 'comparison.num_documents')


def _of_metrics(findings: Findings) -> Iterator[Column]:
    """The metrics over seeds; the first of them, the loss that decides, also of controls."""
    measures = measured(findings)
    for measure in measures:
        tables = (PAGE, CONTROL) if measure == measures[0] else (PAGE,)
        yield Column(
            measure.field,
            measure.over_seeds,
            f'{measure.heading}|mean ± sd',
            measure.printed,
            tables=tables,
            parts=ESTIMATE,
        )
    for split in PREFIXES.values():
        per_byte = Measure(METRICS['bits_per_byte'], split)
        if any(per_byte.over_seeds(arm) for arm in findings.arms):
            yield Column(per_byte.field, per_byte.over_seeds, parts=ESTIMATE)


def _of_settings(findings: Findings) -> Iterator[Column]:
    """The settings that are tuned, or the learning rate of a study without tuning."""
    for knob in KNOBS:
        yield Column(knob, partial(setting, knob))
        if any(knob in arm.sweeps for arm in findings.arms):
            heading = f'tuned {words(knob)}'
            if any(knob in arm.bounded_knobs for arm in findings.arms):
                heading += '|[95 % interval]'
            yield Column('', partial(_setting, knob), heading, tables=(PAGE, CONTROL))
            yield Column(knob, f'sweeps.{knob}', parts=SWEEP)
        elif knob == 'learning_rate' and not findings.study.tuned:
            yield Column('', partial(_setting, knob), 'learning|rate')


def _exchange_rate(findings: Findings) -> Column:
    """How many baseline parameters one of a variant's is worth; over sizes, so of several arms."""
    rates = {
        (scaling.variant, scaling.corpus): scaling.worth
        for scaling in findings.scaling
        if isinstance(scaling.worth, Interval)
    }
    return Column(
        'multiplier',
        lambda arm: rates.get((arm.variant, arm.corpus)),
        parts=('value', 'low', 'high'),
    )


def _difference(arm: TrainedArm) -> str:
    if arm.is_baseline and not arm.chosen:
        return 'baseline, no result yet'
    if arm.is_baseline:
        return f'baseline, {arm.split} loss {mean_sd(arm.loss, 4)}'
    return prose.marked(interval(arm.difference), bool(arm.shortfalls))


def _verdict(arm: TrainedArm) -> str | None:
    """The decision, and whether it is settled or holds at this length of training."""
    if arm.verdict is None:
        return None
    return prose.verdict(arm)


def _p_of_verdict(arm: TrainedArm) -> float | None:
    """The corrected p value of the test behind an arm's verdict, of no difference if undecided.

    `better` and `worse` rest on the margin's test, those below the margin on that of no difference.
    """
    if arm.verdict is None:
        return None
    if arm.verdict.decision == Decision.EQUIVALENT:
        return arm.verdict.p_equivalence_holm
    if arm.verdict.decision in (Decision.BETTER, Decision.WORSE):
        return arm.verdict.p_margin_holm
    return arm.verdict.p_holm


def setting(knob: str, arm: TrainedArm) -> float | None:
    """The value of the verdict runs, or the one that screening has chosen so far."""
    if knob == 'learning_rate' and arm.tuning is None:
        return arm.learning_rate
    if arm.verdict_trials:
        return arm.verdict_trials[0].settings[KNOBS.index(knob)]
    if knob in arm.sweeps:
        return arm.sweeps[knob].chosen
    return None


def _setting(knob: str, arm: TrainedArm) -> str:
    """'0.0042 [0.0038, 0.0047]'; '0.016*' where it is not bracketed, or at the edge of a grid."""
    value = setting(knob, arm)
    if value is None:
        return NONE
    sweep = arm.sweeps.get(knob)
    if sweep is not None:
        is_bracketed = sweep.bracketed
    else:
        is_bracketed = arm.tuning is not None or not arm.at_edge
    star = '' if is_bracketed else '*'
    return f'{value:g}{star} {prose.optimum(sweep)}'


def _of_run(field: str, arm: TrainedArm) -> float | None:
    """A number that all trials of the verdict run share."""
    return getattr(arm.verdict_trials[0], field) if arm.verdict_trials else None


# Seeds, parameters, shape, costs, and how trials ended.
_BOTH: Mapping[str, Any] = {'tables': (PAGE, CONTROL)}
_FIRST: Mapping[str, Any] = {'tables': (PAGE, FIRST_SCREEN, CONTROL)}
COSTS = (
    Column('', lambda arm: len(arm.chosen), 'seeds', **_BOTH),
    Column('parameters', 'example.parameters.total', 'parameters', ',', **_FIRST),
    Column('residual', 'example.run.residual', 'residual,|%', lambda r: f'{100 * r:+.3f}', **_BOTH),
    Column('parameters_attention', 'example.parameters.attention', 'attention|parameters', ','),
    Column('d_model', 'example.config.d_model', 'd_model', **_FIRST),
    Column('d_ff', 'example.config.d_ff', 'd_ff', **_BOTH),
    Column('flops_per_token', 'example.flops_per_token', 'FLOPs|/token', si),
    Column('cache_floats_per_token', 'example.cache_floats_per_token', 'cache|floats/token', si),
    Column('tokens_per_second', partial(_of_run, 'tokens_per_second'), 'tokens|/s', si),
    Column('train_seconds', partial(_of_run, 'train_seconds'), 'run time,|s', si),
    Column('diverged', 'num_diverged'),
    Column('', lambda arm: f'{arm.num_diverged}/{len(arm.verdict_trials)}', 'diverged', **_BOTH),
    Column('trials', lambda arm: len(arm.verdict_trials)),
    Column('steps', 'example.num_steps'),
    Column('seeds', lambda arm: ' '.join(str(trial.seed) for trial in arm.chosen)),
)
