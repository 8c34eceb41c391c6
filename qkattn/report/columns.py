"""The columns of a report, each declared once: an entry of `columns` adds one to every table.

A column with a heading is printed on the page, in table.md and in table.txt; one with a brief
heading also in the LaTeX table, and in the headline of a Markdown page where it is `headline`.
Every column with a key stands in the data frame and in table.csv, unrounded, in the unit of the
result files.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
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
      text: the printed form of a value that is not None.
      printed, in_brief: the printed form where it depends on more of the arm than the value, and
        that under the brief heading.
      parts: attributes of the value that the data frame has as key_part; () for the value itself.
      has: whether this study has the column.
      description: a note under the table.
    """

    key: str
    value: str | Callable[[Arm], Any]
    heading: str = ''
    text: Callable[[Any], str] = str
    printed: Callable[[Arm], str] | None = None
    in_brief: Callable[[Arm], str] | None = None
    parts: Sequence[str] = ()
    has: bool = True
    brief: str = ''
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

    def print(self, arm: Arm, brief: bool = False) -> str:
        special = self.in_brief if brief and self.in_brief else self.printed
        if special is not None:
            return one_line(special(arm))
        value = self.of(arm)
        return NONE if value is None else one_line(self.text(value))


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
    metrics = measured(found)
    unit = 'nats/token [95 % t interval]' if intervals else 'nats/token'
    declared = [
        Column('variant', 'variant', 'variant', left=True, brief='arm', headline=True),
        Column('size', 'size', 'size', left=True, brief='size' * several, headline=several),
        Column('is_baseline', 'is_baseline'),
        Column(
            'difference',
            'difference',
            f'difference in val loss,|{unit}',
            printed=_difference,
            in_brief=_difference_in_brief,
            parts=_DIFFERENCE,
            brief=f'difference in val loss, {unit}' * compared,
            headline=compared,
        ),
        Column(
            'verdict',
            'verdict.decision.value',
            'verdict' * tuned,
            left=True,
            brief='verdict' * tuned,
            headline=tuned,
        ),
        Column(
            'p_holm',
            'verdict.p_holm',
            'p|after Holm' * tuned,
            p_value,
            brief='p after Holm' * tuned,
        ),
        Column(
            'detectable_holm',
            'verdict.detectable',
            'detectable difference,|nats/token' * tuned,
            '{:.4f}'.format,
        ),
        Column('reason', lambda arm: arm.verdict and reasons(arm)),
        Column('p_equivalence_holm', 'verdict.p_equivalence_holm'),
        *(
            Column(n, f'difference.{n}')
            for n in ('p_equivalence', 'detectable', 'margin', 'paired')
        ),
        Column('val_loss', 'val_loss', parts=_ESTIMATE, has=metrics[0].field != 'val_loss'),
        *(_of_metric(metric, metric == metrics[0], not compared) for metric in metrics),
        *(column for knob in KNOBS for column in _of_knob(knob, arms, tuned)),
        Column(
            '',
            lambda arm: _follow(arm.sweeps.get(KNOBS[0]), 'sensitivity'),
            'learning rate sensitivity,|nats/token',
            '{:.3f}'.format,
            has=tuned,
            description='Learning rate sensitivity: mean loss over the screened values minus the '
            'lowest; it compares arms only as far as their grids agree.',
        ),
        Column('', 'screening_trials', 'screening|diverged', _diverged, has=tuned),
        Column('', 'chosen', 'seeds', lambda chosen: str(len(chosen))),
        Column(
            'parameters',
            'example.parameters.total',
            'parameters',
            '{:,}'.format,
            brief='parameters',
        ),
        Column('target_parameters', 'example.target_parameters'),
        Column('residual', 'example.residual', 'residual,|%', lambda of: f'{100 * of:+.3f}'),
        *(
            Column(
                f'parameters_{group}',
                f'example.parameters.{group}',
                'attention|parameters' if group == 'attention' else '',
                '{:,}'.format,
            )
            for group in groups
            if group != 'total'
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
        Column('screening_diverged', lambda arm: _num_diverged(arm.screening_trials)),
        Column('screening_trials', lambda arm: len(arm.screening_trials)),
        Column('seeds', lambda arm: _joined(trial.seed for trial in arm.chosen)),
        Column('screening_seeds', lambda arm: _joined(t.seed for t in arm.screening_trials)),
        Column('learning_rates_run', lambda arm: ' '.join(f'{r:g}' for r in arm.learning_rates)),
        Column('learning_rate_at_edge', 'at_edge'),
        Column(
            'val_loss_se',
            lambda arm: _mean(
                [se for t in arm.chosen if (se := t.metrics['val_loss_se']) is not None]
            ),
        ),
        Column('eval_tokens', 'example.eval_tokens'),
        Column(
            'multiplier',
            lambda arm: multipliers.get(arm.variant),
            parts=('value', 'low', 'high'),
            has=bool(multipliers),
        ),
    ]
    return [column for column in declared if column.has]


def _of_metric(metric: Measure, is_main: bool, leads: bool) -> Column:
    return Column(
        metric.field,
        lambda arm: arm.over_seeds(metric.field),
        f'{metric.heading}|mean ± sd',
        printed=lambda arm: mean_sd(metric.over_seeds(arm), metric.decimals),
        parts=_ESTIMATE,
        brief=metric.heading * is_main,
        headline=is_main and leads,
    )


def _of_knob(knob: str, arms: Sequence[Arm], tuned: bool) -> Iterator[Column]:
    """The chosen value, marked where it is not bracketed, and what the sweep found."""
    swept = any(knob in arm.sweeps for arm in arms)
    heading = f'tuned {words(knob)}|[95 % interval]' * swept
    if knob == KNOBS[0] and not tuned:
        heading = 'learning|rate'
    yield Column(
        knob,
        functools.partial(_setting, knob=knob),
        heading,
        printed=lambda arm: _setting_text(arm, knob, with_interval=True),
        in_brief=lambda arm: _setting_text(arm, knob, with_interval=False),
        brief=f'tuned {words(knob)}' * swept,
        headline=swept,
    )
    yield Column(knob, lambda arm: arm.sweeps.get(knob), parts=_SWEEP)


def _setting(arm: Arm, knob: str) -> float | None:
    """What the verdict ran at, or what the screening has chosen so far."""
    if knob == KNOBS[0] and arm.tuning is None:
        return arm.learning_rate
    if arm.verdict_trials:
        return arm.verdict_trials[0].at[KNOBS.index(knob)]
    return arm.sweeps[knob].chosen if knob in arm.sweeps else None


def _setting_text(arm: Arm, knob: str, with_interval: bool) -> str:
    """'0.0042 [0.0038, 0.0047]', '0.016*' where it is not bracketed."""
    value, sweep = _setting(arm, knob), arm.sweeps.get(knob)
    if value is None:
        return NONE
    if sweep is None:
        return f'{value:g}{"*" if knob == KNOBS[0] and arm.tuning is None and arm.at_edge else ""}'
    text = f'{value:g}{"" if sweep.bracketed else "*"}'
    if not with_interval or sweep.optimum_low is None or sweep.optimum_high is None:
        return text
    return f'{text} [{sweep.optimum_low:.3g}, {sweep.optimum_high:.3g}]'


def _difference(arm: Arm) -> str:
    if arm.is_baseline:
        return 'baseline'
    unpaired = arm.difference is not None and not arm.difference.paired
    return interval(arm.difference) + ' unpaired' * unpaired


def _difference_in_brief(arm: Arm) -> str:
    if arm.is_baseline:
        return f'baseline, val loss {mean_sd(arm.val_loss, 4)}'
    return _difference(arm)


def _num_diverged(trials: Sequence[Any]) -> int:
    return sum(not trial.finished for trial in trials)


def _diverged(trials: Sequence[Any]) -> str:
    return f'{_num_diverged(trials)}/{len(trials)}'


def _mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _joined(seeds: Iterator[int]) -> str:
    return ' '.join(map(str, sorted(set(seeds))))


def _follow(value: Any, path: str) -> Any:
    """The attribute or mapping entry at the end of `path`, or None; truth values as 0 and 1."""
    for name in path.split('.'):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif value is not None:
            value = getattr(value, name)
    return int(value) if isinstance(value, bool) else value
