"""The columns of a report. Each is declared once in `columns`, for all tables.

A column with a heading is printed in its `tables`. These are the full table of report.html and
table.md (PAGE), the first table of report.html (FIRST_SCREEN), the table of a Markdown page about
the study (HEADLINE) and the table of controls (CONTROL). A column with a key is also written to
table.csv, in the unit of the result files.
"""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from qkattn.metrics import METRICS, PREFIXES, Metric, shown
from qkattn.report import prose
from qkattn.report.prose import NONE, interval, mean_sd, one_line, p_value, reasons, si, words
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Estimate
from qkattn.stats.scaling import Interval
from qkattn.study.tuning import KNOBS
from qkattn.verdict.findings import PARTS, Findings
from qkattn.verdict.runs import Trial
from qkattn.verdict.trained_arm import TrainedArm

PAGE = 'page'
# The columns of PAGE that a reader looks at first.
FIRST_SCREEN = 'first screen'
HEADLINE = 'headline'
CONTROL = 'control'
EVERYWHERE = (PAGE, FIRST_SCREEN, HEADLINE, CONTROL)
# The text of a heading, which '|' breaks into two lines, and whether its column is aligned to the
# left.
Heading = tuple[str, bool]
# Headings, and rows of cells.
Table = tuple[list[Heading], list[list[str]]]
# The parts of an estimate, and of a difference, that table.csv has.
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
# The parts of an arm's difference (`Decomposition`) that are printed, with their headings.
_HEADING_OF_PART = {'same_shape': 'at the same shape', 'reinvesting': 'reinvesting'}
# The parts whose name in table.csv differs from their name in code.
_KEY_OF_PART = {'same_shape': 'removing'}
# The parts of a learning-rate sweep that table.csv has.
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
        """The label of the metric, with the split if it is measured on several splits."""
        label = self.metric.label
        if len(self.metric.prefixes) > 1:
            return f'{self.split} {label}'
        return label

    @property
    def heading(self) -> str:
        """The name with the unit, unless the label is the unit, as in 'bits per byte'."""
        if self.metric.unit in (None, self.metric.label):
            return self.name
        return f'{self.name}, {self.metric.unit}'

    def over_seeds(self, arm: TrainedArm) -> Estimate | None:
        """Returns the mean over an arm's seeds, in the unit of the result files."""
        return arm.over_seeds(self.field)

    def printed(self, value: Estimate) -> str:
        """Formats a mean over seeds and its standard deviation: '3.2500 ± 0.3536'."""
        return mean_sd(value, self.metric.decimals, self.metric.scale)


VAL_LOSS = Measure(METRICS['loss'], 'val')
TEST_LOSS = Measure(METRICS['loss'], 'test')
# The roles of metrics that have a column in addition to the loss, in the order of the columns.
ROLES = ('score', 'probe')


def reported_measures(findings: Findings) -> tuple[Measure, ...]:
    """Returns the metrics that a report shows, in the order of their columns.

    The first is the loss that decides: the test loss, or the validation loss if there is no test
    split. Then come scores and probes, each on the test split, or on validation if it has no value
    on test. If the test loss decides, the validation loss comes last.
    """
    trials = list[Trial]()
    for arm in findings.arms:
        trials += arm.chosen

    def has_value(measure: Measure) -> bool:
        return any(trial.metrics.get(measure.field) is not None for trial in trials)

    # All metrics of the results, also those from outside the package.
    declared = dict[str, Metric]()
    for trial in trials:
        declared |= trial.declared_metrics
    metrics = shown(declared, [trial.metrics for trial in trials])

    measures = list[Measure]()
    for role in ROLES:
        metrics_of_role = [metric for metric in metrics if metric.role == role]
        for metric in metrics_of_role:
            # `prefixes` are the splits of the metric, 'val' before 'test'.
            measure_of_splits = [Measure(metric, split) for split in metric.prefixes]
            with_values = [measure for measure in measure_of_splits if has_value(measure)]
            if with_values:
                measures.append(with_values[-1])  # test, if it has a value there

    if has_value(TEST_LOSS):
        return (TEST_LOSS, *measures, VAL_LOSS)
    return (VAL_LOSS, *measures)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of table.csv, of printed tables, or of both.

    Column('d_ff', 'example.config.d_ff', 'width') is named 'd_ff' in table.csv, has the value
    arm.example.config.d_ff, and is printed under the heading 'width'.
    """

    # Its name in table.csv; '' for a column that is only printed.
    key: str
    # A function of a TrainedArm, or a path of attributes such as 'verdict.p_holm'; see `follow`.
    value: str | Callable[[TrainedArm], Any]
    # The printed heading with the unit, which '|' breaks into two lines; '' for a column that is
    # not printed.
    heading: str = ''
    _: dataclasses.KW_ONLY
    # How a value that is not None is printed: a format specification, or a function.
    text: str | Callable[[Any], str] = ''
    # The tables that print the column.
    tables: Sequence[str] = (PAGE,)
    # Whether the column is aligned to the left.
    left: bool = False
    # Attributes of the value that table.csv has as columns KEY_PART; () for the value itself.
    parts: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raises ValueError for a table that does not exist."""
        for table in self.tables:
            if table not in EVERYWHERE:
                valid = ', '.join(repr(name) for name in EVERYWHERE)
                raise ValueError(f'{table!r} is no table of reports; valid are {valid}')

    def get(self, arm: TrainedArm) -> Any:
        """Returns the value of an arm."""
        if callable(self.value):
            return self.value(arm)
        return follow(arm, self.value)

    def cells(self, arm: TrainedArm) -> dict[str, Any]:
        """Returns the values of an arm by their names in table.csv.

        This is {} for a column that is only printed, {'d_ff': 512} for one without parts, and
        {'loss_mean': 3.2, 'loss_sd': 0.1} for one with the parts 'mean' and 'sd'.
        """
        value = self.get(arm)
        if self.parts:
            return {f'{self.key}_{part}': follow(value, part) for part in self.parts}
        if self.key:
            return {self.key: value}
        return {}

    def print(self, arm: TrainedArm) -> str:
        """Returns the text of an arm's cell in printed tables."""
        value = self.get(arm)
        if value is None:
            return NONE
        text = self.text(value) if callable(self.text) else format(value, self.text)
        return one_line(text)


def follow(value: Any, path: str) -> Any:
    """Follows a path of attributes or keys, such as 'verdict.p_holm' of an arm.

    Returns None if anything on the way is None. Truth values become 0 and 1, as in table.csv.
    """
    for name in path.split('.'):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif value is not None:
            value = getattr(value, name)
    return int(value) if isinstance(value, bool) else value


def printed(table: str, findings: Findings, arms: Iterable[TrainedArm]) -> Table:
    """Returns the headings and rows of a table, with a row for each arm.

    `table` is PAGE, FIRST_SCREEN, HEADLINE or CONTROL.
    """
    shown_columns = []
    for column in columns(findings):
        if column.heading and table in column.tables:
            shown_columns.append(column)
    headings = [(column.heading, column.left) for column in shown_columns]
    rows = [[column.print(arm) for column in shown_columns] for arm in arms]
    return headings, rows


def columns(findings: Findings) -> Iterator[Column]:
    """Yields the columns of a study. Results come first, so that a narrow screen shows them."""
    yield from _arm_columns(findings)
    yield from _difference_columns(findings)
    yield from _verdict_columns(findings)
    yield from _part_columns(findings)
    yield from _metric_columns(findings)
    yield from _corpus_columns(findings)
    yield from _setting_columns(findings)
    yield Column('correlation', 'comparison.correlation', 'correlation|over seeds', text='+.2f')
    yield from COSTS
    if findings.scaling:
        yield _exchange_rate(findings)


def _arm_columns(findings: Findings) -> Iterator[Column]:
    """Yields the columns that identify an arm.

    If the study has only one size, only the full table prints it. A corpus is printed only if the
    study has several corpora.
    """
    study = findings.study
    tables_with_size = EVERYWHERE if len(study.sizes) > 1 else (PAGE,)
    corpus_heading = 'corpus' if len(study.corpora) > 1 else ''

    def is_post_hoc(arm: TrainedArm) -> int:
        """Returns 1 if the arm was added to the study after a look at results, else 0."""
        return int(arm.key.declared in study.ledger.post_hoc)

    yield Column('variant', 'variant', 'variant', tables=EVERYWHERE, left=True)
    yield Column('size', 'size', 'size', tables=tables_with_size, left=True)
    yield Column('corpus', 'corpus', corpus_heading, tables=EVERYWHERE, left=True)
    yield Column(
        'control',
        'key.control',
        'control',
        text=prose.control_words,
        tables=(CONTROL,),
        left=True,
    )
    # Without a heading, these two are in table.csv only.
    yield Column('is_baseline', 'is_baseline')
    yield Column('post_hoc', is_post_hoc)


def _difference_columns(findings: Findings) -> Iterator[Column]:
    """Yields the columns of the difference from the baseline."""
    unit = 'nats/token [95 % interval]' if findings.has_intervals else 'nats/token'
    heading = f'difference in {findings.split} loss,|{unit}'
    yield Column('difference', 'difference', parts=DIFFERENCE)
    yield Column('', _difference_text, heading, tables=EVERYWHERE)


def _verdict_columns(findings: Findings) -> Iterator[Column]:
    """Yields the columns of the verdict, of longer training, and of the tests behind the verdict.

    A verdict compares the difference from the baseline with the margin: 'worse' is a loss that is
    higher by more than the margin. A study without tuning has no verdicts. The columns then have no
    heading, so only table.csv has them.
    """
    study = findings.study
    margin = f'{study.margin:g}'

    def heading(text: str) -> str:
        """Returns the heading of a column, or '' if the column is not printed."""
        return text if study.tuned else ''

    # The verdict: table.csv has the decision alone. The printed text also says whether a longer
    # training confirms it, as in 'worse, settled'.
    yield Column('verdict', 'verdict.decision.value')
    yield Column(
        '',
        _verdict_text,
        heading(f'verdict,|margin {margin}'),
        tables=(PAGE, FIRST_SCREEN, HEADLINE),
        left=True,
    )

    # What longer training says about the difference.
    yield Column('length', 'settling.code.value')
    yield Column('length_times', 'settling.times')
    yield Column('difference_longer', 'settling.longer')

    # The p values of the three tests, corrected for multiple comparisons. The headline has only the
    # one on which the verdict rests.
    test_by_key = {
        'p_holm': 'p',
        'p_margin_holm': f'p of more than {margin}',
        'p_equivalence_holm': f'p of less than {margin}',
    }
    for key, test in test_by_key.items():
        yield Column(key, f'verdict.{key}', heading(f'{test},|corrected'), text=p_value)
    yield Column('', _p_of_verdict, heading('p,|corrected'), text=p_value, tables=(HEADLINE,))
    yield Column(
        'detectable_holm',
        'verdict.detectable',
        heading('detectable difference,|nats/token'),
        text='.4f',
    )


def _part_columns(findings: Findings) -> Iterator[Column]:
    """Yields the parts of a difference, the reasons of the verdict, and the data that decide.

    For example, the part 'same_shape' is the difference of an arm that has the baseline's
    dimensions and so fewer parameters. All columns are in table.csv. Of the parts, those in
    _HEADING_OF_PART are also printed, unless no arm has them.
    """
    for part in PARTS:
        # A part without a printed heading is in table.csv only.
        heading = ''
        is_known = any(getattr(arm.parts, part) for arm in findings.arms)
        if is_known and part in _HEADING_OF_PART:
            heading = f'{_HEADING_OF_PART[part]},|nats/token'
        yield Column(
            _KEY_OF_PART.get(part, part),
            f'parts.{part}.difference',
            heading,
            text=interval,
            tables=(HEADLINE,),
            parts=('mean', 'low', 'high'),
        )
    yield Column('reason', lambda arm: arm.verdict and reasons(arm))
    yield Column('split', 'comparison.split')
    yield Column('difference_validation', 'comparison.validation')
    yield Column('num_documents', 'comparison.num_documents')


def _metric_columns(findings: Findings) -> Iterator[Column]:
    """Yields a column for each metric, as its mean over the seeds of an arm.

    The table of controls has only the loss that decides.
    """
    measures = reported_measures(findings)
    deciding_loss = measures[0]
    for measure in measures:
        tables = (PAGE, CONTROL) if measure == deciding_loss else (PAGE,)
        yield Column(
            measure.field,
            measure.over_seeds,
            f'{measure.heading}|mean ± sd',
            text=measure.printed,
            tables=tables,
            parts=ESTIMATE,
        )

    # Bits per byte are in table.csv only.
    for split in PREFIXES.values():
        per_byte = Measure(METRICS['bits_per_byte'], split)
        if any(per_byte.over_seeds(arm) for arm in findings.arms):
            yield Column(per_byte.field, per_byte.over_seeds, parts=ESTIMATE)


def corpora(findings: Findings) -> list[str]:
    """Returns the entries of data.evaluate on which the arms of a study are evaluated."""
    trials = [trial for arm in findings.arms for trial in arm.chosen]
    return list(dict.fromkeys(corpus for trial in trials for corpus in trial.corpora))


def _corpus_columns(findings: Findings) -> Iterator[Column]:
    """Yields a column for each further corpus on which models are evaluated (data.evaluate).

    Its value for an arm is the loss on the corpus, as mean and standard deviation over seeds. These
    columns are for information: verdicts come from the losses on the study's own data.
    """
    loss = METRICS['loss']
    for corpus in corpora(findings):
        field = loss.corpus_field(corpus)
        mean_loss = methodcaller('over_seeds', field)  # the function arm -> arm.over_seeds(field)
        yield Column(
            field,
            mean_loss,
            f'loss on {corpus}, {loss.unit}|mean ± sd',  # a heading of two lines
            text=VAL_LOSS.printed,  # with as many digits as the validation loss
            parts=ESTIMATE,
        )


def _setting_columns(findings: Findings) -> Iterator[Column]:
    """Yields the columns of each setting that a study may tune (a knob): the learning rate, etc.

    The value of every knob is in table.csv. A knob that the study tunes has two more columns: a
    printed text with the interval of its optimum, such as '0.0042 [0.0038, 0.0047]', and details of
    its sweep in table.csv, such as 'learning_rate_optimum'. If a study tunes nothing, the learning
    rate is still printed.
    """
    for knob in KNOBS:
        yield Column(knob, partial(chosen_setting, knob))

        printed_text = partial(_setting_text, knob)
        is_tuned = any(knob in arm.sweeps for arm in findings.arms)
        if is_tuned:
            has_intervals = any(knob in arm.bounded_knobs for arm in findings.arms)
            heading = f'tuned {words(knob)}'
            if has_intervals:
                heading += '|[95 % interval]'
            # The printed text has no key, so it is not in table.csv. The sweep has no heading, so
            # it is only there.
            yield Column('', printed_text, heading, tables=(PAGE, CONTROL))
            yield Column(knob, f'sweeps.{knob}', parts=SWEEP)
        elif knob == 'learning_rate' and not findings.study.tuned:
            yield Column('', printed_text, 'learning|rate')


def _exchange_rate(findings: Findings) -> Column:
    """Returns the column of how many baseline parameters one parameter of a variant is worth.

    At 1.5, a variant with 1,000,000 parameters has the loss of a baseline with 1,500,000. The
    number is estimated over all sizes of a variant, so its arms have the same number.
    """
    worth_of_variant = {}
    for scaling in findings.scaling:
        if isinstance(scaling.worth, Interval):
            worth_of_variant[scaling.variant, scaling.corpus] = scaling.worth

    def worth(arm: TrainedArm) -> Interval | None:
        return worth_of_variant.get((arm.variant, arm.corpus))

    return Column('multiplier', worth, parts=('value', 'low', 'high'))


def _difference_text(arm: TrainedArm) -> str:
    """Formats the difference of an arm from the baseline; for the baseline, its loss."""
    if arm.is_baseline and not arm.chosen:
        return 'baseline, no result yet'
    if arm.is_baseline:
        return f'baseline, {arm.split} loss {mean_sd(arm.loss, 4)}'
    return prose.marked(interval(arm.difference), bool(arm.shortfalls))


def _verdict_text(arm: TrainedArm) -> str | None:
    """Returns the decision, and whether it is settled or holds only at this training length."""
    if arm.verdict is None:
        return None
    return prose.verdict(arm)


def _p_of_verdict(arm: TrainedArm) -> float | None:
    """Returns the p value on which an arm's verdict rests, corrected for multiple tests (Holm).

    The verdicts `better` and `worse` say that the difference from the baseline is larger than the
    margin, and `equivalent` that it is smaller. The p value is that of the test of this statement.
    For an arm without one of these verdicts, it is the test of any difference at all.
    """
    if arm.verdict is None:
        return None
    if arm.verdict.decision == Decision.EQUIVALENT:
        return arm.verdict.p_equivalence_holm
    if arm.verdict.decision in (Decision.BETTER, Decision.WORSE):
        return arm.verdict.p_margin_holm
    return arm.verdict.p_holm


def chosen_setting(knob: str, arm: TrainedArm) -> float | None:
    """Returns the value that an arm uses for a setting such as 'learning_rate'; None if not known.

    `knob` is one of KNOBS, the settings that a study may tune. A tuned study first tries values on
    a few seeds (screening), and then trains the best value on other seeds, which decide the
    verdict. The result is the value of these seeds. While they are not trained, it is the value
    that screening has chosen so far.
    """
    if knob == 'learning_rate' and arm.tuning is None:
        return arm.learning_rate  # the best of those that were trained
    if arm.verdict_trials:
        # All trials of the verdict have the same settings, which are in the order of KNOBS.
        settings = arm.verdict_trials[0].settings
        return settings[KNOBS.index(knob)]
    if knob in arm.sweeps:
        return arm.sweeps[knob].chosen
    return None


def _setting_text(knob: str, arm: TrainedArm) -> str:
    """Formats a tuned setting with the interval of its optimum: '0.0042 [0.0038, 0.0047]'.

    A star, as in '0.016*', says that the optimum may lie beyond the values that were tried.
    """
    value = chosen_setting(knob, arm)
    if value is None:
        return NONE
    sweep = arm.sweeps.get(knob)
    if sweep is not None:
        may_lie_beyond = not sweep.bracketed
    elif arm.tuning is None:
        # Without tuning, the best learning rate may be the lowest or the highest one.
        may_lie_beyond = arm.at_edge
    else:
        may_lie_beyond = False  # the arm does not tune this setting
    star = '*' if may_lie_beyond else ''
    return f'{value:g}{star} {prose.optimum(sweep)}'


def _of_run(field: str, arm: TrainedArm) -> float | None:
    """Returns a number that all trials of the verdict run share; None if there are no trials."""
    if not arm.verdict_trials:
        return None
    return getattr(arm.verdict_trials[0], field)


def _signed_percent(fraction: float) -> str:
    """Formats a fraction in percent: 0.00123 -> '+0.123'."""
    return f'{100 * fraction:+.3f}'


# The arguments of a column that is printed on the page and for controls.
_BOTH: Mapping[str, Any] = {'tables': (PAGE, CONTROL)}
# The arguments of a column that is also on the first screen.
_FIRST: Mapping[str, Any] = {'tables': (PAGE, FIRST_SCREEN, CONTROL)}
# Seeds, parameters, shape, costs, and how trials ended.
COSTS = (
    Column('', lambda arm: len(arm.chosen), 'seeds', **_BOTH),
    Column('parameters', 'example.parameters.total', 'parameters', text=',', **_FIRST),
    Column('residual', 'example.run.residual', 'residual,|%', text=_signed_percent, **_BOTH),
    Column(
        'parameters_attention',
        'example.parameters.attention',
        'attention|parameters',
        text=',',
    ),
    Column('d_model', 'example.config.d_model', 'd_model', **_FIRST),
    Column('d_ff', 'example.config.d_ff', 'd_ff', **_BOTH),
    Column('flops_per_token', 'example.flops_per_token', 'FLOPs|/token', text=si),
    Column(
        'cache_floats_per_token',
        'example.cache_floats_per_token',
        'cache|floats/token',
        text=si,
    ),
    Column('tokens_per_second', partial(_of_run, 'tokens_per_second'), 'tokens|/s', text=si),
    Column('train_seconds', partial(_of_run, 'train_seconds'), 'run time,|s', text=si),
    Column('diverged', 'num_diverged'),
    Column('', lambda arm: f'{arm.num_diverged}/{len(arm.verdict_trials)}', 'diverged', **_BOTH),
    Column('trials', lambda arm: len(arm.verdict_trials)),
    Column('steps', 'example.num_steps'),
    Column('seeds', lambda arm: ' '.join(str(trial.seed) for trial in arm.chosen)),
)
