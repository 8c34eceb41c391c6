"""The columns of the summary table: a heading of two short lines and the text of an arm's run."""

import dataclasses
import statistics
from collections.abc import Callable, Sequence

from qkattn.report.numbers import NONE, interval, mean_sd, p_value, si, words
from qkattn.study.tuning import KNOBS
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.measures import Measure, losses, probes, scores


@dataclasses.dataclass(frozen=True)
class Column:
    """One printed column."""

    heading: tuple[str, str]
    text: Callable[[Arm], str]
    left: bool = False

    @property
    def title(self) -> str:
        return ' '.join(filter(None, self.heading))


def columns_of(findings: Findings) -> tuple[Column, ...]:
    """The columns that mean something here.

    The verdict and what was found stand left of what it cost, so that they are in sight on a narrow
    screen.
    """
    rows = findings.arms
    tuned = any(arm.verdict for arm in findings.arms) or any(row.screening_trials for row in rows)
    val, *test = map(_measured, losses(rows))
    difference = Column(_difference_heading(findings), _difference)
    induction = [_measured(measure) for measure in probes(rows)]
    if tuned:
        found = (_VERDICT, difference, *_TESTS, val, *map(_measured, scores(rows)), *induction)
        return (*_NAMES, *found, *test, *_knobs(findings), *_SCREENED, *_COSTS)
    found = (*map(_measured, scores(rows)), val, difference, *test, *induction)
    return (*_NAMES, *found, _SEEDS, _RATE, *_COSTS)


def _difference_heading(findings: Findings) -> tuple[str, str]:
    """An interval is promised only where there is one."""
    if any(arm.difference and arm.difference.low is not None for arm in findings.arms):
        return 'difference in val loss,', 'nats/token [95 % t interval]'
    return 'difference in', 'val loss, nats/token'


def _difference(arm: Arm) -> str:
    if arm.is_baseline:
        return 'baseline'
    unpaired = arm.difference is not None and not arm.difference.paired
    return interval(arm.difference) + (' unpaired' if unpaired else '')


def _verdict(arm: Arm) -> str:
    return NONE if arm.verdict is None else arm.verdict.decision.value


def _adjusted(arm: Arm) -> str:
    return p_value(arm.verdict.p_holm) if arm.verdict else NONE


def _detectable(arm: Arm) -> str:
    value = detectable(arm)
    return NONE if value is None else f'{value:.4f}'


def detectable(arm: Arm) -> float | None:
    """After Holm's correction where there is a verdict: that is the test which decides."""
    return arm.verdict.detectable if arm.verdict else None


def _single_rate(arm: Arm) -> str:
    rate = arm.learning_rate
    return NONE if rate is None else f'{rate:g}{"*" if arm.at_edge else ""}'


def _knobs(findings: Findings) -> list[Column]:
    """Each tuned setting, marked where it is not bracketed, with the interval of its optimum."""
    columns = []
    for knob in ('learning_rate', *KNOBS[1:]):
        if knob != 'learning_rate' and not any(knob in arm.sweeps for arm in findings.arms):
            continue

        def text(arm: Arm, knob: str = knob) -> str:
            return tuned_value(arm, knob)

        columns.append(Column((f'tuned {words(knob)}', '[95 % interval]'), text))
    return columns


def tuned_value(arm: Arm, knob: str, span: bool = True) -> str:
    """'0.0042 [0.0038, 0.0047]', '0.016*' where it is not bracketed."""
    value = value_of(arm, knob)
    if value is None:
        return NONE
    if knob not in arm.sweeps:
        return f'{value:g}'
    bowl = arm.sweeps[knob]
    mark = '' if bowl.bracketed else '*'
    if not span or bowl.optimum_low is None or bowl.optimum_high is None:
        return f'{value:g}{mark}'
    return f'{value:g}{mark} [{bowl.optimum_low:.3g}, {bowl.optimum_high:.3g}]'


def value_of(arm: Arm, knob: str) -> float | None:
    """What the verdict ran at, or what the screening has chosen so far."""
    if arm.verdict_trials:
        return arm.verdict_trials[0].at[KNOBS.index(knob)]
    return arm.sweeps[knob].chosen if knob in arm.sweeps else None


def _sensitivity(arm: Arm) -> str:
    bowl = arm.sweeps.get('learning_rate')
    return NONE if bowl is None or bowl.sensitivity is None else f'{bowl.sensitivity:.3f}'


def _residual(arm: Arm) -> str:
    residual = arm.example.residual
    return NONE if residual is None else f'{100 * residual:+.3f}'


def _diverged(arm: Arm) -> str:
    return f'{arm.num_diverged}/{len(arm.verdict_trials)}'


def _screening_diverged(arm: Arm) -> str:
    lost = sum(not trial.finished for trial in arm.screening_trials)
    return f'{lost}/{len(arm.screening_trials)}'


def mean(values: Sequence[float]) -> float | None:
    return statistics.fmean(values) if values else None


def _measured(measure: Measure) -> Column:
    return Column(
        (measure.heading, 'mean ± sd'),
        lambda arm: mean_sd(measure.over_seeds(arm), measure.decimals),
    )


_NAMES = (
    Column(('variant', ''), lambda arm: arm.variant, left=True),
    Column(('size', ''), lambda arm: arm.size, left=True),
)
_VERDICT = Column(('verdict', ''), _verdict, left=True)
_TESTS = (
    Column(('p', 'after Holm'), _adjusted),
    Column(('detectable', 'difference'), _detectable),
)
_SEEDS = Column(('seeds', ''), lambda arm: str(len(arm.chosen)))
_RATE = Column(('learning', 'rate'), _single_rate)
_SCREENED = (
    Column(('learning rate', 'sensitivity'), _sensitivity),
    Column(('screening', 'diverged'), _screening_diverged),
    _SEEDS,
)
_COSTS = (
    Column(('parameters', ''), lambda arm: f'{arm.example.parameters["total"]:,}'),
    Column(('residual', '%'), _residual),
    Column(('attention', 'parameters'), lambda arm: f'{arm.example.parameters["attention"]:,}'),
    Column(('d_model', ''), lambda arm: str(arm.example.config['d_model'])),
    Column(('d_ff', ''), lambda arm: str(arm.example.config['d_ff'])),
    Column(('FLOPs', '/token'), lambda arm: si(arm.example.flops_per_token)),
    Column(('cache', 'floats/token'), lambda arm: si(arm.example.cache_floats_per_token)),
    Column(('tokens', '/s'), lambda arm: si(mean(arm.of_runs('tokens_per_second')))),
    Column(('run', 's'), lambda arm: si(sum(arm.of_runs('train_seconds')))),
    Column(('diverged', ''), _diverged),
)
