"""The columns of a report, each declared once: an entry of `columns` adds one to every table.

A column with a heading is printed on the page, in table.md and in table.txt, a brief one also in
the LaTeX table, and one of the headline in a Markdown page. Every column with a key stands in the
data frame and in table.csv, unrounded, in the unit of the result files.
"""

import dataclasses
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from qkattn.report.prose import NONE, interval, mean_sd, one_line, p_value, reasons, si, words
from qkattn.stats.inference import Estimate
from qkattn.study.tuning import KNOBS
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study
from qkattn.verdict.measures import Measure, losses, probes, scores

_ESTIMATE = tuple(field.name for field in dataclasses.fields(Estimate))
_DIFFERENCE = ('mean', 'sd', 'low', 'high', 'n', 'bootstrap_low', 'bootstrap_high', 'p')
_SWEEP = ('optimum', 'optimum_low', 'optimum_high', 'sensitivity', 'at_worst', 'bracketed')


@dataclasses.dataclass(frozen=True)
class Column:
    """One column.

    Attributes:
      key: its name in the data frame; empty where it is only printed.
      value: path of attributes of an Arm, 'verdict.p_holm' (None on the way gives None), or a
        function of one.
      heading: with the unit; '|' breaks it into two lines, the second set lighter.
      text: format of a value that is not None, or a function that prints it.
      parts: attributes of the value that the data frame has as key_part; () for the value itself.
      has: whether this study has the column.
      description: a note under the table.
    """

    key: str
    value: str | Callable[[Arm], Any]
    heading: str = ''
    text: str | Callable[[Any], str] = ''
    parts: Sequence[str] = ()
    has: bool = True
    brief: bool = False
    headline: bool = False
    left: bool = False
    description: str = ''

    def of(self, arm: Arm) -> Any:
        return self.value(arm) if callable(self.value) else _follow(arm, self.value)

    def cells(self, arm: Arm) -> Iterator[tuple[str, Any]]:
        """Names and values in the data frame."""
        value = self.of(arm)
        for part in self.parts:
            yield f'{self.key}_{part}', _follow(value, part)
        if self.key and not self.parts:
            yield self.key, value

    def print(self, arm: Arm) -> str:
        value = self.of(arm)
        if value is None:
            return NONE
        return one_line(self.text(value) if callable(self.text) else format(value, self.text))


def measured(found: Findings) -> tuple[Measure, ...]:
    """The metrics that a report shows, in the order of their columns."""
    val, *test = losses(found.arms)
    return (val, *scores(found.arms), *probes(found.arms), *test)


def columns(study: Study, found: Findings) -> list[Column]:
    """The columns of a study; results stand left, in sight on a narrow screen."""
    arms, tuned = found.arms, study.tuning is not None
    intervals = any(arm.difference and arm.difference.low is not None for arm in arms)
    several, compared = len(study.sizes) > 1, study.baseline is not None
    multipliers = {of.variant: of.multiplier for of in found.scaling}
    groups = dict.fromkeys(group for arm in arms for group in arm.example.parameters)
    main, *_ = metrics = measured(found)
    unit = 'nats/token [95 % t interval]' if intervals else 'nats/token'
    differs = f'difference in {found.split} loss,|{unit}'
    by_key = {
        'p_equivalence_holm': 'verdict.p_equivalence_holm',
        **{n: f'difference.{n}' for n in ('p_equivalence', 'detectable', 'margin', 'paired')},
    }
    declared = [
        Column('variant', 'variant', 'variant', left=True, brief=True, headline=True),
        Column('size', 'size', 'size', left=True, brief=several, headline=several),
        Column('is_baseline', 'is_baseline'),
        Column('', _difference, differs, brief=compared, headline=compared),
        Column('difference', 'difference', parts=_DIFFERENCE),
        Column(
            'verdict',
            'verdict.decision.value',
            'verdict' * tuned,
            left=True,
            brief=tuned,
            headline=tuned,
        ),
        Column('p_holm', 'verdict.p_holm', 'p|after Holm' * tuned, p_value, brief=tuned),
        Column(
            'detectable_holm',
            'verdict.detectable',
            'detectable difference,|nats/token' * tuned,
            '.4f',
        ),
        Column('reason', lambda arm: arm.verdict and reasons(arm)),
        *(Column(key, path) for key, path in by_key.items()),
        Column('val_loss', 'val_loss', parts=_ESTIMATE, has=main.field != 'val_loss'),
        *(c for metric in metrics for c in _of_metric(metric, metric == main, not compared)),
        *(column for knob in KNOBS for column in _of_knob(knob, arms, tuned)),
        Column(
            '',
            lambda arm: _follow(arm.sweeps.get(KNOBS[0]), 'sensitivity'),
            'learning rate sensitivity,|nats/token',
            '.3f',
            has=tuned,
            description='Learning rate sensitivity: mean loss over the screened values minus the '
            'lowest; it compares arms only as far as their grids agree.',
        ),
        Column('', 'screening_trials', 'screening|diverged', _diverged, has=tuned),
        Column('', lambda arm: len(arm.chosen), 'seeds'),
        Column('parameters', 'example.parameters.total', 'parameters', ',', brief=True),
        Column('target_parameters', 'example.target_parameters'),
        Column('residual', 'example.residual', 'residual,|%', lambda of: f'{100 * of:+.3f}'),
        *(
            Column(f'parameters_{group}', f'example.parameters.{group}', heading, ',')
            for group in groups
            if group != 'total'
            for heading in ['attention|parameters' * (group == 'attention')]
        ),
        Column('d_model', 'example.config.d_model', 'd_model'),
        Column('d_ff', 'example.config.d_ff', 'd_ff'),
        Column(
            'flops_per_token',
            'example.flops_per_token',
            'FLOPs|/token',
            si,
            description='FLOPs/token are those of a forward pass.',
        ),
        Column(
            'cache_floats_per_token', 'example.cache_floats_per_token', 'cache|floats/token', si
        ),
        Column(
            'tokens_per_second',
            lambda arm: _mean(arm.of_runs('tokens_per_second')),
            'tokens|/s',
            si,
            description='tokens/s and run time are of the whole run, all its trials together, '
            'training only.',
        ),
        Column('train_seconds', lambda arm: sum(arm.of_runs('train_seconds')), 'run time,|s', si),
        Column('compile_seconds', lambda arm: sum(arm.of_runs('compile_seconds'))),
        Column('', 'verdict_trials', 'diverged', _diverged),
        Column('diverged', 'num_diverged'),
        Column('trials', lambda arm: len(arm.verdict_trials)),
        Column('screening_diverged', lambda arm: sum(not t.finished for t in arm.screening_trials)),
        Column('screening_trials', lambda arm: len(arm.screening_trials)),
        Column('seeds', lambda arm: _seeds(arm.chosen)),
        Column('screening_seeds', lambda arm: _seeds(arm.screening_trials)),
        Column('learning_rates_run', lambda arm: ' '.join(f'{r:g}' for r in arm.learning_rates)),
        Column('learning_rate_at_edge', 'at_edge'),
        Column('val_loss_se', lambda arm: _mean(t.metrics['val_loss_se'] for t in arm.chosen)),
        Column('eval_tokens', 'example.eval_tokens'),
        Column(
            'multiplier',
            lambda arm: multipliers.get(arm.variant),
            parts=('value', 'low', 'high'),
            has=bool(multipliers),
        ),
    ]
    return [column for column in declared if column.has]


def _of_metric(metric: Measure, is_main: bool, leads: bool) -> Iterator[Column]:
    def printed(arm: Arm) -> str:
        return mean_sd(metric.over_seeds(arm), metric.decimals)

    heading, headline = f'{metric.heading}|mean ± sd', is_main and leads
    yield Column('', printed, heading, brief=is_main, headline=headline)
    yield Column(metric.field, lambda arm: arm.over_seeds(metric.field), parts=_ESTIMATE)


def _of_knob(knob: str, arms: Sequence[Arm], tuned: bool) -> Iterator[Column]:
    """The chosen value, marked where it is not bracketed, and what the sweep found."""
    swept = any(knob in arm.sweeps for arm in arms)
    heading = f'tuned {words(knob)}|[95 % interval]' * swept
    if knob == KNOBS[0] and not tuned:
        heading = 'learning|rate'

    def value(arm: Arm) -> float | None:
        """What the verdict ran at, or what the screening has chosen so far."""
        if knob == KNOBS[0] and arm.tuning is None:
            return arm.learning_rate
        if arm.verdict_trials:
            return arm.verdict_trials[0].at[KNOBS.index(knob)]
        return arm.sweeps[knob].chosen if knob in arm.sweeps else None

    def printed(arm: Arm) -> str | None:
        """'0.0042 [0.0038, 0.0047]', '0.016*' where it is not bracketed."""
        sweep, own = arm.sweeps.get(knob), value(arm)
        if own is None:
            return None
        at_edge = knob == KNOBS[0] and arm.tuning is None and arm.at_edge
        text = f'{own:g}{"*" if (at_edge if sweep is None else not sweep.bracketed) else ""}'
        if sweep is None or sweep.optimum_low is None or sweep.optimum_high is None:
            return text
        return f'{text} [{sweep.optimum_low:.3g}, {sweep.optimum_high:.3g}]'

    yield Column('', printed, heading, brief=swept, headline=swept)
    yield Column(knob, value)
    yield Column(knob, lambda arm: arm.sweeps.get(knob), parts=_SWEEP)


def _difference(arm: Arm) -> str:
    if arm.is_baseline:
        return f'baseline, {arm.split} loss {mean_sd(arm.loss, 4)}'
    unpaired = arm.difference is not None and not arm.difference.paired
    return interval(arm.difference) + ' unpaired' * unpaired


def _diverged(trials: Sequence[Any]) -> str:
    return f'{sum(not trial.finished for trial in trials)}/{len(trials)}'


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _seeds(trials: Iterable[Any]) -> str:
    return ' '.join(map(str, sorted({trial.seed for trial in trials})))


def _follow(value: Any, path: str) -> Any:
    """The attribute or mapping entry at the end of `path`, or None; truth values as 0 and 1."""
    for name in path.split('.'):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif value is not None:
            value = getattr(value, name)
    return int(value) if isinstance(value, bool) else value
