"""The columns of a report, each declared once: an entry of `columns` adds one to every table.

A column with a heading is printed on the page, in table.md and in table.txt, a brief one also in
the LaTeX table, one of the headline in a Markdown page, one for controls in their table. Every
column with a key stands in the data frame, unrounded, and in table.csv, to six digits, in the unit
of the result files.
"""

import dataclasses
import functools
import statistics
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from qkattn.report import prose
from qkattn.report.measures import Measure, losses, probes, scores
from qkattn.report.prose import NONE, interval, mean_sd, one_line, p_value, reasons, si, words
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Estimate
from qkattn.study.tuning import KNOBS
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study

ESTIMATE = tuple(field.name for field in dataclasses.fields(Estimate))
DIFFERENCE = (
    *('mean', 'sd', 'low', 'high', 'n', 'bootstrap_low', 'bootstrap_high', 'p', 'p_margin'),
    *('error_seeds', 'error_evaluation', 'tuning_low', 'tuning_high'),
)
_PART = ('mean', 'low', 'high')
_SWEEP = ('optimum', 'optimum_low', 'optimum_high', 'sensitivity', 'at_worst', 'bracketed')


@dataclasses.dataclass(frozen=True)
class Column:
    """One column."""

    key: str  # its name in the data frame; empty where it is only printed
    # A path of attributes of an Arm, 'verdict.p_holm' (None on the way gives None), or a function.
    value: str | Callable[[Arm], Any]
    heading: str = ''  # with the unit; '|' breaks it into two lines, the second set lighter
    # Format of a value that is not None, or a function that prints it.
    text: str | Callable[[Any], str] = ''
    # Attributes of the value that the data frame has as key_part; () for the value itself.
    parts: Sequence[str] = ()
    has: bool = True  # whether this study has the column
    # These four are the tables that print it, of those at the top of this module.
    full: bool = True
    brief: bool = False
    headline: bool = False
    control: bool = False
    left: bool = False
    description: str = ''  # a note under the table

    def of(self, arm: Arm) -> Any:
        return self.value(arm) if callable(self.value) else follow(arm, self.value)

    def cells(self, arm: Arm) -> Iterator[tuple[str, Any]]:
        """Names and values in the data frame."""
        value = self.of(arm)
        for part in self.parts:
            yield f'{self.key}_{part}', follow(value, part)
        if self.key and not self.parts:
            yield self.key, value

    def print(self, arm: Arm) -> str:
        value = self.of(arm)
        if value is None:
            return NONE
        return one_line(self.text(value) if callable(self.text) else format(value, self.text))


def of_arm(study: Study, compared: bool) -> Iterator[Column]:
    """Variant, size and corpus as printed, and the keys of the latter."""
    everywhere: dict[str, Any] = {'left': True, 'brief': True, 'headline': True, 'control': True}
    yield Column('', lambda arm: prose.shown(study, arm.key), 'variant', **everywhere)
    for field, among in (('size', study.sizes), ('corpus', study.corpora)):
        shown = everywhere | dict.fromkeys(('brief', 'headline', 'control'), len(among) > 1)
        heading = field * (field == 'size' or len(among) > 1)
        yield Column(field, field, heading, **shown)
    kind = everywhere | dict.fromkeys(('full', 'brief', 'headline'), False)
    yield Column('', lambda arm: arm.control and words(arm.control), 'control', **kind)


def of_verdict(study: Study) -> Iterator[Column]:
    """The word, the margin that it is about, and the corrected p values behind it."""
    tuned, margin = study.tuning is not None, f'{study.margin:g}'
    yield Column(
        'verdict',
        'verdict.decision.value',
        f'verdict,|margin {margin}' * tuned,
        left=True,
        brief=tuned,
        headline=tuned,
    )
    tests = {
        'p_holm': 'p',
        'p_margin_holm': f'p of more than {margin}',
        'p_equivalence_holm': f'p of less than {margin}',
    }
    for key, heading in tests.items():
        yield Column(key, f'verdict.{key}', f'{heading},|corrected' * tuned, p_value)
    if tuned:
        yield Column('', _p_of_word, 'p,|corrected', p_value, full=False, brief=True, headline=True)
    yield Column(
        'detectable_holm',
        'verdict.detectable',
        'detectable difference,|nats/token' * tuned,
        '.4f',
    )


def _p_of_word(arm: Arm) -> float | None:
    """The corrected p value of the test that an arm's word rests on, of no difference without one.

    `better` and `worse` rest on the margin's test, those below the margin on that of no difference.
    """
    if arm.verdict is None:
        return None
    by_word = {Decision.EQUIVALENT: arm.verdict.p_equivalence_holm}
    by_word |= dict.fromkeys((Decision.BETTER, Decision.WORSE), arm.verdict.p_margin_holm)
    return by_word.get(arm.verdict.decision, arm.verdict.p_holm)


def of_parts(found: Findings) -> Iterator[Column]:
    """The parts of a difference; the tables have one of their own for them."""
    parts = {parts.key: parts for parts in found.decomposition}
    for part in ('removing', 'reinvesting', 'longer'):

        def difference(arm: Arm, part: str = part) -> Any:
            return follow(parts.get(arm.key), f'{part}.difference')

        yield Column(part, difference, parts=_PART)
        if part != 'longer' and any(map(difference, found.arms)):
            heading = f'{part},|nats/token'
            yield Column('', difference, heading, interval, full=False, headline=True)


def of_shape(found: Findings) -> Iterator[Column]:
    """Widths, and by how much they differ from what the baseline's would be."""
    baselines = {a.group: a for a in (*found.arms, *found.controls) if a.is_baseline}

    def widened(arm: Arm) -> int | None:
        if arm.is_baseline or not (baseline := baselines.get(arm.group)):
            return None
        return arm.example.config['d_model'] - baseline.example.config['d_model']

    def fill(arm: Arm) -> int | None:
        if arm.is_baseline or not (baseline := baselines.get(arm.group)):
            return None
        ratio = baseline.example.config['d_ff'] / baseline.example.config['d_model']
        return arm.example.config['d_ff'] - round(ratio * arm.example.config['d_model'])

    shifts = {'d_model': ('widened', widened), 'd_ff': ('fill', fill)}
    for name, (shift, change) in shifts.items():

        def printed(arm: Arm, name: str = name, change: Callable = change) -> str:
            more = change(arm)
            return f'{arm.example.config[name]}' + (f' ({more:+d})' if more is not None else '')

        yield Column(name, f'example.config.{name}')
        yield Column(f'{name}_{shift}', change)
        yield Column('', printed, f'{name}|({shift})', brief=True, control=True)


def of_metric(metric: Measure, is_main: bool, leads: bool) -> Iterator[Column]:
    def printed(arm: Arm) -> str:
        return mean_sd(metric.over_seeds(arm), metric.decimals)

    heading, headline = f'{metric.heading}|mean ± sd', is_main and leads
    yield Column('', printed, heading, brief=is_main, headline=headline, control=is_main)
    yield Column(metric.field, lambda arm: arm.over_seeds(metric.field), parts=ESTIMATE)


def of_knob(knob: str, arms: Sequence[Arm], tuned: bool) -> Iterator[Column]:
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
        sweep, chosen = arm.sweeps.get(knob), value(arm)
        if chosen is None:
            return None
        at_edge = knob == KNOBS[0] and arm.tuning is None and arm.at_edge
        text = f'{chosen:g}{"*" if (at_edge if sweep is None else not sweep.bracketed) else ""}'
        if sweep is None or sweep.optimum_low is None or sweep.optimum_high is None:
            return text
        return f'{text} [{sweep.optimum_low:.3g}, {sweep.optimum_high:.3g}]'

    yield Column('', printed, heading, brief=swept, control=swept)
    yield Column(knob, value)
    yield Column(knob, lambda arm: arm.sweeps.get(knob), parts=_SWEEP)


def follow(value: Any, path: str) -> Any:
    """The attribute or mapping entry at the end of `path`, or None; truth values as 0 and 1."""
    for name in path.split('.'):
        if isinstance(value, Mapping):
            value = value.get(name)
        elif value is not None:
            value = getattr(value, name)
    return int(value) if isinstance(value, bool) else value


def measured(found: Findings) -> tuple[Measure, ...]:
    """The metrics that a report shows, in the order of their columns; losses are in nats/token."""
    val, *test = losses(found.arms)
    return (*(test or [val]), *scores(found.arms), *probes(found.arms), *([val] if test else []))


def columns(study: Study, found: Findings) -> list[Column]:
    """The columns of a study; results stand left, in sight on a narrow screen."""
    arms, tuned = found.arms, study.tuning is not None
    intervals = any(arm.difference and arm.difference.low is not None for arm in arms)
    compared = study.baseline is not None
    multipliers = {(law.variant, law.corpus): law.multiplier for law in found.scaling}
    groups = dict.fromkeys(group for arm in arms for group in arm.example.parameters)
    main, *_ = metrics = measured(found)
    unit = 'nats/token [95 % interval]' if intervals else 'nats/token'
    heading = f'difference in {found.split} loss,|{unit}'
    by_key = {
        'p_equivalence': 'difference.p_equivalence',
        **{name: f'difference.{name}' for name in ('detectable', 'margin')},
        'split': 'comparison.split',
        'difference_validation': 'comparison.validation',
        'num_documents': 'comparison.num_documents',
        'alpha': 'verdict.alpha',
        'num_comparisons': 'verdict.num_comparisons',
        'num_seeds': 'verdict.num_seeds',
    }
    declared = [
        Column('variant', 'variant'),
        *of_arm(study, compared),
        Column('control', 'control'),
        Column('is_baseline', 'is_baseline'),
        Column('post_hoc', lambda arm: int(prose.is_post_hoc(study, arm.key))),
        Column('', _difference, heading, headline=compared, control=compared),
        Column('', _interval, heading, full=False, brief=compared),
        Column('difference', 'difference', parts=DIFFERENCE),
        *of_verdict(study),
        *of_parts(found),
        Column('reason', lambda arm: arm.verdict and reasons(arm)),
        *(Column(key, path) for key, path in by_key.items()),
        *(c for metric in metrics for c in of_metric(metric, metric == main, not compared)),
        *(
            Column(field, functools.partial(Arm.over_seeds, field=field), parts=ESTIMATE)
            for field in ('val_bits_per_byte', 'test_bits_per_byte')
            if any(arm.over_seeds(field) for arm in arms)
        ),
        *(column for knob in KNOBS for column in of_knob(knob, arms, tuned)),
        Column(
            '',
            lambda arm: follow(arm.sweeps.get(KNOBS[0]), 'sensitivity'),
            'learning rate sensitivity,|nats/token',
            '.3f',
            has=tuned,
            description='Learning rate sensitivity: mean loss over the screened values minus the '
            'lowest; it compares arms only as far as their grids agree.',
        ),
        Column(
            'correlation',
            'comparison.correlation',
            'correlation|over seeds' * compared,
            '+.2f',
        ),
        Column('', 'screening_trials', 'screening|diverged', _diverged, has=tuned),
        Column('', lambda arm: len(arm.chosen), 'seeds', control=True),
        Column(
            'parameters', 'example.parameters.total', 'parameters', ',', brief=True, control=True
        ),
        Column('target_parameters', 'example.target_parameters'),
        Column(
            'residual',
            'example.residual',
            'residual,|%',
            lambda share: f'{100 * share:+.3f}',
            control=True,
        ),
        *(
            Column(f'parameters_{group}', f'example.parameters.{group}', heading, ',')
            for group in groups
            if group != 'total'
            for heading in ['attention|parameters' * (group == 'attention')]
        ),
        *of_shape(found),
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
        Column('', 'verdict_trials', 'diverged', _diverged, control=True),
        Column('diverged', 'num_diverged'),
        Column('trials', lambda arm: len(arm.verdict_trials)),
        Column('steps', 'example.num_steps'),
        Column('screening_diverged', lambda arm: sum(not t.finished for t in arm.screening_trials)),
        Column('screening_trials', lambda arm: len(arm.screening_trials)),
        Column('seeds', lambda arm: _seeds(arm.chosen)),
        Column('screening_seeds', lambda arm: _seeds(arm.screening_trials)),
        Column('learning_rates_run', lambda arm: ' '.join(f'{r:g}' for r in arm.learning_rates)),
        Column('learning_rate_at_edge', 'at_edge'),
        Column('val_loss_se', lambda arm: _mean(t.metrics['val_loss_se'] for t in arm.chosen)),
        Column('eval_tokens', 'example.eval_tokens'),
        Column('test_tokens', 'example.test_tokens'),
        Column(
            'multiplier',
            lambda arm: multipliers.get((arm.variant, arm.corpus)),
            parts=('value', 'low', 'high'),
            has=bool(multipliers),
        ),
    ]
    return [column for column in declared if column.has]


def _difference(arm: Arm) -> str:
    loss = f', {arm.split} loss {mean_sd(arm.loss, 4)}' * arm.is_baseline
    return f'{_interval(arm)}{loss}'


def _interval(arm: Arm) -> str:
    if arm.is_baseline:
        return 'baseline'
    return interval(arm.difference)


def _diverged(trials: Sequence[Any]) -> str:
    return f'{sum(not trial.finished for trial in trials)}/{len(trials)}'


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def _seeds(trials: Iterable[Any]) -> str:
    return ' '.join(map(str, sorted({trial.seed for trial in trials})))
