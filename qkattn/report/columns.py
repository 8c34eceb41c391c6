"""The columns of report tables.

A column with a key is written to table.csv. A column with a heading is printed in its `tables`:

    PAGE            the full table of report.html and table.md
    FIRST_SCREEN    the first table of report.html
    HEADLINE        the table of a README or a terminal
    CONTROL         the table of controls
"""

import dataclasses
import difflib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from operator import methodcaller
from typing import Any

from qkattn.errors import ConfigError
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
FIRST_SCREEN = 'first screen'
HEADLINE = 'headline'
CONTROL = 'control'
EVERYWHERE = (PAGE, FIRST_SCREEN, HEADLINE, CONTROL)
# A heading's text, where '|' is a line break, and whether its column is left-aligned.
Heading = tuple[str, bool]
# Headings and rows.
Table = tuple[list[Heading], list[list[str]]]
# The attributes of an estimate and of a difference that table.csv has.
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
# The parts of a difference (`Decomposition`) that are printed, with their headings.
_HEADING_OF_PART = {'same_shape': 'at the same shape', 'reinvesting': 'reinvesting'}
# The attributes of a sweep that table.csv has.
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
        """The metric's label, with the split if the metric has several splits."""
        label = self.metric.label
        if len(self.metric.prefixes) > 1:
            return f'{self.split} {label}'
        return label

    @property
    def heading(self) -> str:
        """The name and unit. A label such as 'bits per byte' is already a unit."""
        if self.metric.unit in (None, self.metric.label):
            return self.name
        return f'{self.name}, {self.metric.unit}'

    def over_seeds(self, arm: TrainedArm) -> Estimate | None:
        """Returns the mean over an arm's seeds."""
        return arm.over_seeds(self.field)

    def printed(self, value: Estimate) -> str:
        """Formats a mean over seeds and its standard deviation: '3.2500 ± 0.3536'."""
        return mean_sd(value, self.metric.decimals, self.metric.scale)


VAL_LOSS = Measure(METRICS['loss'], 'val')
TEST_LOSS = Measure(METRICS['loss'], 'test')
# The roles of metrics that have a column beside the loss, in column order.
ROLES = ('score', 'probe')


def reported_measures(findings: Findings) -> tuple[Measure, ...]:
    """Returns the metrics that a report shows, in column order.

    The order is: test loss, scores, probes, validation loss. Without a test loss, the validation
    loss is first. Scores and probes are on the test split if they have a value there.
    """
    trials = list[Trial]()
    metric_by_name = dict[str, Metric]()
    for arm in findings.arms:
        for trial in arm.chosen:  # the trials whose results the report shows
            trials.append(trial)
            metric_by_name |= trial.declared_metrics

    def has_value(measure: Measure) -> bool:
        return any(trial.metrics.get(measure.field) is not None for trial in trials)

    shown_metrics = shown(metric_by_name, [trial.metrics for trial in trials])
    scores_and_probes = list[Measure]()
    for role in ROLES:  # 'score', then 'probe'
        metrics_of_role = [metric for metric in shown_metrics if metric.role == role]
        for metric in metrics_of_role:
            measures = [Measure(metric, split) for split in metric.prefixes]  # 'val', then 'test'
            measures_with_values = [measure for measure in measures if has_value(measure)]
            if measures_with_values:
                scores_and_probes.append(measures_with_values[-1])

    if has_value(TEST_LOSS):
        return (TEST_LOSS, *scores_and_probes, VAL_LOSS)
    return (VAL_LOSS, *scores_and_probes)


@dataclasses.dataclass(frozen=True)
class Column:
    """A column of table.csv, of printed tables, or of both.

    For example, Column('d_ff', 'example.config.d_ff', 'width') has the value
    arm.example.config.d_ff of each arm. Its name is 'd_ff' in table.csv and 'width' in printed
    tables.
    """

    # The name in table.csv; '' if the column is only printed.
    key: str
    # A function of an arm, or an attribute path such as 'verdict.p_holm'.
    value: str | Callable[[TrainedArm], Any]
    # The printed heading, where '|' is a line break; '' if the column is not printed.
    heading: str = ''
    _: dataclasses.KW_ONLY
    # How to print a value: a format spec or a function. None is printed as '-'.
    text: str | Callable[[Any], str] = ''
    # The tables that print the column.
    tables: Sequence[str] = (PAGE,)
    # Whether the column is left-aligned.
    left: bool = False
    # Attributes of the value. table.csv has a column KEY_PART for each; () for the value itself.
    parts: Sequence[str] = ()

    def __post_init__(self) -> None:
        """Raises ConfigError for a table that does not exist."""
        for table in self.tables:
            if table not in EVERYWHERE:
                valid = ', '.join(repr(name) for name in EVERYWHERE)
                raise ConfigError(
                    f'report column {self.name!r}: {table!r} is no table of reports; '
                    f'valid are {valid}'
                )

    @property
    def name(self) -> str:
        """The name in error messages: the key, or the heading of a column without a key."""
        return self.key or self.heading

    def get(self, arm: TrainedArm) -> Any:
        """Returns the value of an arm; raises ConfigError if the path has a missing attribute."""
        if callable(self.value):
            return self.value(arm)
        return self._follow(arm, self.value)

    def _follow(self, value: Any, path: str) -> Any:
        """Looks up a path, as `follow` does; raises ConfigError if an attribute is missing."""
        try:
            return follow(value, path)
        except AttributeError as error:
            near_names = difflib.get_close_matches(error.name or '', dir(error.obj))
            hint = f'; near it are {", ".join(near_names)}' if near_names else ''
            raise ConfigError(f'report column {self.name!r}: {error}{hint}') from error

    def require_keys(self, arms: Iterable[TrainedArm]) -> None:
        """Raises ConfigError for a misspelled key or attribute of the path, which no arm has."""
        if callable(self.value):
            return
        # Follow a path such as 'example.config.d_ff' from all arms at once.
        values: list[Any] = list(arms)
        for name in self.value.split('.'):
            mappings = [value for value in values if isinstance(value, Mapping)]
            if mappings:
                self._require_key(name, mappings)
            values = [self._follow(value, name) for value in values]

    def _require_key(self, key: str, mappings: Iterable[Mapping]) -> None:
        """Raises ConfigError if none of the mappings has the key."""
        valid_keys = dict[str, Any]()  # a dict keeps the order
        for mapping in mappings:
            valid_keys |= dict.fromkeys(str(valid_key) for valid_key in mapping)
        if key in valid_keys:
            return
        near_keys = difflib.get_close_matches(key, valid_keys) or list(valid_keys)
        hint = f'near it are {", ".join(near_keys)}' if near_keys else 'no arm has any key'
        raise ConfigError(
            f'report column {self.name!r}: no arm has the key {key!r} of {self.value!r}; {hint}'
        )

    def cells(self, arm: TrainedArm) -> dict[str, Any]:
        """Returns an arm's cells of table.csv, by column name.

        For example, {'d_ff': 512}, or with the parts 'mean' and 'sd',
        {'loss_mean': 3.2, 'loss_sd': 0.1}. A column that is only printed has no cells.
        """
        value = self.get(arm)
        if self.parts:
            return {f'{self.key}_{part}': self._follow(value, part) for part in self.parts}
        if self.key:
            return {self.key: value}
        return {}

    def print(self, arm: TrainedArm) -> str:
        """Returns the printed text of an arm's cell; raises ConfigError for an unfit format."""
        value = self.get(arm)
        if value is None:
            return NONE
        if callable(self.text):
            return one_line(self.text(value))
        try:
            return one_line(format(value, self.text))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f'report column {self.name!r}: text={self.text!r} cannot format {value!r}: {error}'
            ) from error


def follow(value: Any, path: str) -> Any:
    """Looks up a path of attributes or keys, such as 'verdict.p_holm'.

    Returns:
        The value at the end of the path, with bools as 0 or 1. None if a value on the path is None.
    """
    for name in path.split('.'):
        value = _entry(value, name)
    return int(value) if isinstance(value, bool) else value


def _entry(value: Any, name: str) -> Any:
    """Returns a key or attribute of a value; None if the value is None or lacks the key."""
    if isinstance(value, Mapping):
        return value.get(name)
    return None if value is None else getattr(value, name)


def printed(table: str, findings: Findings, arms: Iterable[TrainedArm]) -> Table:
    """Returns the headings of a printed table, and a row for each arm.

    Args:
        table: PAGE, FIRST_SCREEN, HEADLINE or CONTROL.
        findings: The study, which determines the columns.
        arms: The arms of the rows.
    """
    shown_columns = []
    for column in columns(findings):
        if column.heading and table in column.tables:
            shown_columns.append(column)
    headings = [(column.heading, column.left) for column in shown_columns]
    rows = [[column.print(arm) for column in shown_columns] for arm in arms]
    return headings, rows


def columns(findings: Findings) -> Iterator[Column]:
    """Yields the columns of a study's tables, results first."""
    yield from _arm_columns(findings)
    yield from _difference_columns(findings)
    yield from _verdict_columns(findings)
    yield from _test_columns(findings)
    yield from _part_columns(findings)
    yield Column('reason', _reasons_of_verdict)
    yield Column('split', 'comparison.split')
    yield Column('difference_validation', 'comparison.validation')
    yield Column('num_documents', 'comparison.num_documents')
    yield from _metric_columns(findings)
    yield from _corpus_columns(findings)
    yield from _setting_columns(findings)
    yield Column(
        'correlation', 'comparison.correlation', heading='correlation|over seeds', text='+.2f'
    )
    yield from COSTS
    if findings.scaling:
        yield _exchange_rate(findings)


def _arm_columns(findings: Findings) -> Iterator[Column]:
    """Yields the columns that identify an arm."""
    study = findings.study
    # A size or corpus that all arms share is printed in fewer tables.
    tables_with_size = EVERYWHERE if len(study.sizes) > 1 else (PAGE,)
    corpus_heading = 'corpus' if len(study.corpora) > 1 else ''

    def is_post_hoc(arm: TrainedArm) -> int:
        """Returns 1 if the arm was declared after results were seen, else 0."""
        return int(arm.key.declared in study.ledger.post_hoc)

    # The arguments are the name in table.csv, the attribute path of an arm, and how to print it.
    yield Column('variant', 'variant', heading='variant', tables=EVERYWHERE, left=True)
    yield Column('size', 'size', heading='size', tables=tables_with_size, left=True)
    yield Column('corpus', 'corpus', heading=corpus_heading, tables=EVERYWHERE, left=True)
    yield Column(
        'control',
        'key.control',
        heading='control',
        text=prose.control_words,
        tables=(CONTROL,),
        left=True,
    )
    # Columns without a heading are only in table.csv.
    yield Column('is_baseline', 'is_baseline')
    yield Column('post_hoc', is_post_hoc)


def _difference_columns(findings: Findings) -> Iterator[Column]:
    """Yields the columns of the difference from the baseline."""
    unit = 'nats/token [95 % interval]' if findings.has_intervals else 'nats/token'
    heading = f'difference in {findings.split} loss,|{unit}'
    # table.csv has numbers, such as 'difference_mean', and printed tables have text.
    yield Column('difference', 'difference', parts=DIFFERENCE)
    yield Column(key='', value=_difference_text, heading=heading, tables=EVERYWHERE)


def _verdict_columns(findings: Findings) -> Iterator[Column]:
    """Yields the columns of verdicts, and of differences after longer training."""
    study = findings.study
    heading = ''  # an untuned study prints no verdicts
    if study.tuned:
        heading = f'verdict,|margin {study.margin:g}'
    # table.csv has 'worse', and printed tables have 'worse, settled'.
    yield Column('verdict', 'verdict.decision.value')
    yield Column(
        key='',
        value=_verdict_text,
        heading=heading,
        tables=(PAGE, FIRST_SCREEN, HEADLINE),
        left=True,
    )

    # In longer training: whether the difference lasts, the factor of the steps, the difference.
    yield Column('length', 'settling.code.value')
    yield Column('length_times', 'settling.times')
    yield Column('difference_longer', 'settling.longer')


def _test_columns(findings: Findings) -> Iterator[Column]:
    """Yields the columns of p values, and of the smallest difference that a test can detect."""
    study = findings.study
    margin = f'{study.margin:g}'

    def heading_if_tuned(text: str) -> str:
        """Returns the heading; '' in an untuned study, which prints no tests."""
        return text if study.tuned else ''

    # Three tests of a difference: any, more than the margin, less than the margin.
    heading_by_test = {
        'p_holm': 'p,|corrected',
        'p_margin_holm': f'p of more than {margin},|corrected',
        'p_equivalence_holm': f'p of less than {margin},|corrected',
    }
    for test, heading in heading_by_test.items():
        yield Column(test, f'verdict.{test}', heading=heading_if_tuned(heading), text=p_value)
    # The headline prints only the test that supports the verdict.
    yield Column(
        key='',
        value=_p_of_verdict,
        heading=heading_if_tuned('p,|corrected'),
        text=p_value,
        tables=(HEADLINE,),
    )
    yield Column(
        'detectable_holm',
        'verdict.detectable',
        heading=heading_if_tuned('detectable difference,|nats/token'),
        text='.4f',
    )


def _part_columns(findings: Findings) -> Iterator[Column]:
    """Yields a column for each part of an arm's difference from the baseline.

    For example, the part 'same_shape' is the difference at the baseline's dimensions.
    """
    for part in PARTS:
        heading = ''  # the column is only in table.csv
        has_values = any(getattr(arm.parts, part) for arm in findings.arms)
        is_printed = part in _HEADING_OF_PART
        if has_values and is_printed:
            heading = f'{_HEADING_OF_PART[part]},|nats/token'
        # table.csv has another name for 'same_shape'.
        key = 'removing' if part == 'same_shape' else part
        yield Column(
            key,
            f'parts.{part}.difference',
            heading=heading,
            text=interval,
            tables=(HEADLINE,),
            parts=('mean', 'low', 'high'),  # 'removing_mean', ... in table.csv
        )


def _reasons_of_verdict(arm: TrainedArm) -> str | None:
    """Formats the reasons for an arm's verdict."""
    return None if arm.verdict is None else reasons(arm)


def _metric_columns(findings: Findings) -> Iterator[Column]:
    """Yields a column for each metric, as mean over seeds."""
    measures = reported_measures(findings)
    deciding_loss = measures[0]  # on the test split, if the study has one
    for measure in measures:
        # Controls are compared by the deciding loss only.
        tables = (PAGE, CONTROL) if measure == deciding_loss else (PAGE,)
        yield Column(
            measure.field,
            measure.over_seeds,
            heading=f'{measure.heading}|mean ± sd',
            text=measure.printed,
            tables=tables,
            parts=ESTIMATE,
        )

    # Bits per byte are only in table.csv.
    for split in PREFIXES.values():  # 'val' and 'test'
        bits_per_byte = Measure(METRICS['bits_per_byte'], split)
        has_values = any(bits_per_byte.over_seeds(arm) for arm in findings.arms)
        if has_values:
            yield Column(bits_per_byte.field, bits_per_byte.over_seeds, parts=ESTIMATE)


def corpora(findings: Findings) -> list[str]:
    """Returns the additional evaluation corpora (data.evaluate), each once."""
    unique_corpora = dict[str, Any]()  # a dict keeps the order
    for arm in findings.arms:
        for trial in arm.chosen:
            unique_corpora |= dict.fromkeys(trial.corpora)
    return list(unique_corpora)


def _corpus_columns(findings: Findings) -> Iterator[Column]:
    """Yields a column for the loss on each additional evaluation corpus (data.evaluate)."""
    loss = METRICS['loss']
    for corpus in corpora(findings):
        field = loss.corpus_field(corpus)
        mean_loss = methodcaller('over_seeds', field)  # arm.over_seeds(field)
        yield Column(
            field,
            mean_loss,
            heading=f'loss on {corpus}, {loss.unit}|mean ± sd',
            text=VAL_LOSS.printed,  # the same digits as the validation loss
            parts=ESTIMATE,
        )


def _setting_columns(findings: Findings) -> Iterator[Column]:
    """Yields the columns of each tunable setting (knob), such as the learning rate."""
    for knob in KNOBS:
        yield Column(knob, partial(chosen_setting, knob))

        setting_text = partial(_setting_text, knob)
        is_tuned = any(knob in arm.sweeps for arm in findings.arms)
        if is_tuned:
            has_intervals = any(knob in arm.bounded_knobs for arm in findings.arms)
            heading = f'tuned {words(knob)}'
            if has_intervals:
                heading += '|[95 % interval]'
            # Printed tables have '0.0042 [0.0038, 0.0047]'.
            yield Column(key='', value=setting_text, heading=heading, tables=(PAGE, CONTROL))
            # table.csv has 'learning_rate_optimum', 'learning_rate_bracketed', ...
            yield Column(knob, f'sweeps.{knob}', parts=SWEEP)
        elif knob == 'learning_rate' and not findings.study.tuned:
            yield Column(key='', value=setting_text, heading='learning|rate')


def _exchange_rate(findings: Findings) -> Column:
    """Returns the column of baseline parameters that one parameter of a variant is worth.

    At 1.5, a variant with 1M parameters has the same loss as a baseline with 1.5M.
    """
    worth_by_variant = {}
    for scaling in findings.scaling:
        if isinstance(scaling.worth, Interval):  # otherwise a Problem
            worth_by_variant[scaling.variant, scaling.corpus] = scaling.worth

    def worth(arm: TrainedArm) -> Interval | None:
        # All sizes of a variant share one estimate.
        return worth_by_variant.get((arm.variant, arm.corpus))

    return Column('multiplier', worth, parts=('value', 'low', 'high'))


def _difference_text(arm: TrainedArm) -> str:
    """Formats an arm's difference from the baseline, or the baseline's loss."""
    if not arm.is_baseline:
        falls_short = bool(arm.shortfalls)  # of the yardstick; a dagger marks such an arm
        return prose.marked(interval(arm.difference), falls_short)
    if arm.chosen:
        return f'baseline, {arm.split} loss {mean_sd(arm.loss, decimals=4)}'
    if arm.verdict_trials:
        return 'baseline, diverged'
    return 'baseline, no result yet'


def _verdict_text(arm: TrainedArm) -> str | None:
    """Formats an arm's verdict, such as 'worse, settled' or 'worse at this length'."""
    if arm.verdict is None:
        return None
    return prose.verdict(arm)


def _p_of_verdict(arm: TrainedArm) -> float | None:
    """Returns the Holm-corrected p value of the test that supports an arm's verdict."""
    verdict = arm.verdict
    if verdict is None:
        return None
    if verdict.decision == Decision.EQUIVALENT:
        return verdict.p_equivalence_holm  # tests a difference below the margin
    if verdict.decision in (Decision.BETTER, Decision.WORSE):
        return verdict.p_margin_holm  # tests a difference above the margin
    return verdict.p_holm  # tests any difference


def chosen_setting(knob: str, arm: TrainedArm) -> float | None:
    """Returns an arm's value of a tunable setting; None if it is not known yet.

    Args:
        knob: One of KNOBS, such as 'learning_rate'.
        arm: The arm.
    """
    if knob == 'learning_rate' and arm.tuning is None:
        return arm.learning_rate  # the best of those that were trained
    if arm.verdict_trials:
        # All verdict trials have the same settings.
        any_trial = arm.verdict_trials[0]
        setting_by_knob = dict(zip(KNOBS, any_trial.settings, strict=True))
        return setting_by_knob[knob]
    if knob in arm.sweeps:
        # The best value so far. Its verdict trials are not trained yet.
        return arm.sweeps[knob].chosen
    return None


def _setting_text(knob: str, arm: TrainedArm) -> str:
    """Formats a setting and the interval of its optimum: '0.0042 [0.0038, 0.0047]'.

    A star, as in '0.016*', means that the optimum may lie outside the values tried.
    """
    value = chosen_setting(knob, arm)
    if value is None:
        return NONE
    sweep = arm.sweeps.get(knob)
    if sweep is not None:
        may_lie_outside = not sweep.bracketed
    elif arm.tuning is None:
        may_lie_outside = arm.at_edge  # the best learning rate is the lowest or highest
    else:
        may_lie_outside = False  # this setting is not tuned
    star = '*' if may_lie_outside else ''
    return f'{value:g}{star} {prose.optimum(sweep)}'


def _of_run(field: str, arm: TrainedArm) -> float | None:
    """Returns a field that all verdict trials share; None without trials."""
    if not arm.verdict_trials:
        return None
    return getattr(arm.verdict_trials[0], field)


def _signed_percent(fraction: float) -> str:
    """Formats a fraction in percent: 0.00123 -> '+0.123'."""
    return f'{100 * fraction:+.3f}'


# Keyword arguments of columns.
_BOTH: Mapping[str, Any] = {'tables': (PAGE, CONTROL)}
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
