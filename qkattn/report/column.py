"""A column of a report's tables, and the columns that belong together."""

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from qkattn.report import prose
from qkattn.report.prose import NONE, interval, mean_sd, one_line, p_value, words
from qkattn.stats.decision import Decision
from qkattn.stats.inference import Estimate
from qkattn.study.tuning import KNOBS
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study
from qkattn.verdict.measures import Measure

ESTIMATE = tuple(field.name for field in dataclasses.fields(Estimate))
DIFFERENCE = (
    *('mean', 'sd', 'low', 'high', 'n', 'bootstrap_low', 'bootstrap_high', 'p', 'p_margin'),
    *('error_seeds', 'error_evaluation', 'tuning_low', 'tuning_high'),
)
_PART = ('mean', 'low', 'high')
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
      full, brief, headline, control: the tables that print it, of those above.
      description: a note under the table.
    """

    key: str
    value: str | Callable[[Arm], Any]
    heading: str = ''
    text: str | Callable[[Any], str] = ''
    parts: Sequence[str] = ()
    has: bool = True
    full: bool = True
    brief: bool = False
    headline: bool = False
    control: bool = False
    left: bool = False
    description: str = ''

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


def of_place(study: Study, compared: bool) -> Iterator[Column]:
    """Variant, size and corpus as printed, and the keys of the latter."""
    everywhere: dict[str, Any] = {'left': True, 'brief': True, 'headline': True, 'control': True}
    yield Column('', lambda arm: prose.shown(study, arm.place), 'variant', **everywhere)
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
    of_arm = {of.place: of for of in found.decomposition}
    for part in ('removing', 'reinvesting', 'longer'):

        def difference(arm: Arm, part: str = part) -> Any:
            return follow(of_arm.get(arm.place), f'{part}.difference')

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
    for name, (shift, of) in shifts.items():

        def printed(arm: Arm, name: str = name, of: Callable = of) -> str:
            more = of(arm)
            return f'{arm.example.config[name]}' + (f' ({more:+d})' if more is not None else '')

        yield Column(name, f'example.config.{name}')
        yield Column(f'{name}_{shift}', of)
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
        sweep, own = arm.sweeps.get(knob), value(arm)
        if own is None:
            return None
        at_edge = knob == KNOBS[0] and arm.tuning is None and arm.at_edge
        text = f'{own:g}{"*" if (at_edge if sweep is None else not sweep.bracketed) else ""}'
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
