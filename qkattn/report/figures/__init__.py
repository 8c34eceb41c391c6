"""The figures of a study: forest, tuning sweeps, learning curves, loss against parameters."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from qkattn.jobs.output import short
from qkattn.report import prose
from qkattn.report.figures import forest, style
from qkattn.report.figures.style import Drawing
from qkattn.stats.scaling import Law
from qkattn.study.tuning import KNOBS
from qkattn.verdict.findings import Findings
from qkattn.verdict.trained_arm import TrainedArm
from qkattn.verdict.trained_study import TrainedStudy

COLUMNS = 2
# A figure of more panels is larger than a page shows and an image may be, and its shared axes take
# time that grows with their square.
MOST_PANELS = 60
# Parameter counts within this ratio are equal.
EQUAL = 1.01
_VAL_LOSS = 'val loss (nats/token)'


def figures(findings: Findings) -> tuple[Drawing, ...]:
    """All figures that the results allow, the main ones first."""
    study = findings.study
    drawn: list[Drawing] = []

    def add(stem: str, figure: Figure | None, **values: Any) -> None:
        if figure is not None:
            drawn.append(Drawing(figure, stem, values))

    styles = style.styles(study.variants, study.baseline)
    with style.style_sheet():
        stem = 'verdicts' if study.tuned else 'differences'
        add(stem, forest.differences(findings, styles), cut=forest.cut(study))
        groups = prose.by_where(findings.arms, study)
        for number, (name, arms) in enumerate(groups.items(), start=1):
            place = f'_{number}' if name else ''
            size = name or None
            for knob in KNOBS:
                if swept := [arm for arm in arms if knob in arm.sweeps]:
                    figure = _sweep_panels(knob, swept[:MOST_PANELS], styles)
                    cut = _cut(len(swept))
                    add(f'sweep_{knob}{place}', figure, knob=knob, size=size, cut=cut)
            others = [arm for arm in arms if not arm.is_baseline]
            figure = _learning_curves(study, arms, styles)
            add(f'curves{place}', figure, size=size, cut=_cut(len(others)))
        laws = any(isinstance(scaling.law, Law) for scaling in findings.scaling)
        add('loss_parameters', _loss_against_parameters(findings, styles), laws=laws)
    return tuple(drawn)


def _cut(number: int) -> tuple[int, int] | None:
    """The numbers of drawn panels and of arms where a figure leaves arms out; else None."""
    return (MOST_PANELS, number) if number > MOST_PANELS else None


def _learning_curves(
    study: TrainedStudy, arms: Sequence[TrainedArm], styles: style.Styles
) -> Figure | None:
    """Validation loss over training of one size and corpus: a panel an arm, beside the baseline.

    A line is the mean over seeds, its band from the lowest to the highest. None without any curve.
    The first MOST_PANELS arms are drawn.
    """
    shown = [arm for arm in arms if arm.is_baseline]
    shown += [arm for arm in arms if not arm.is_baseline][:MOST_PANELS]
    curves = {arm.variant: curve for arm in shown if len(curve := _curve(arm))}
    if not curves:
        return None
    last = curves.get(study.baseline)
    variants = [v for v in curves if v != study.baseline] or list(curves)
    columns = _columns(variants, 44)
    figure = Figure(figsize=(style.WIDTH, (3.2 / columns) * -(-len(variants) // columns) + 0.9))
    axes = style.panels(figure, columns, len(variants), sharex=True, sharey=True)
    for ax, variant in zip(axes, variants, strict=True):
        if last is not None and variant != study.baseline:
            _line(ax, last, styles, study.baseline, f'baseline {short(study.baseline, 34)}')
        _line(ax, curves[variant], styles, variant, 'the variant named above')
        ax.set_title(short(variant, 44 // columns), fontsize=8, fontweight='normal')
        ax.locator_params(axis='x', nbins=4 // columns)
        ax.xaxis.set_major_formatter(lambda value, _: prose.si(value))
    style.legend(figure)
    figure.supxlabel('training tokens')
    figure.supylabel(_VAL_LOSS)
    return figure


def _columns(variants: Sequence[str], room: int) -> int:
    """Columns of panels titled by variants: one where several would cut titles to the same text."""
    columns = min(COLUMNS, len(variants))
    titles = {short(variant, room // columns) for variant in variants}
    return columns if len(titles) == len(variants) else 1


def _curve(arm: TrainedArm) -> pd.DataFrame:
    """Validation losses of the chosen trials, [tokens, seeds], after a fifth of the training.

    Before, variants do not differ.
    """
    by_step = pd.DataFrame([t.evaluations for t in arm.chosen if t.evaluations]).T.dropna()
    late = by_step[by_step.index >= 0.2 * max(by_step.index, default=0)]
    return late.set_axis(late.index * (arm.example.num_tokens / arm.example.num_steps))


def _line(ax: Axes, curve: pd.DataFrame, styles: style.Styles, variant: str, label: str) -> None:
    keywords = styles[variant]
    band = {'color': keywords['color'], 'alpha': 0.18, 'linewidth': 0}
    ax.fill_between(curve.index, curve.min(axis=1), curve.max(axis=1), **band)
    ax.plot(curve.index, curve.mean(axis=1), label=label, zorder=3, **keywords | {'marker': ''})


def _sweep_panels(knob: str, arms: Sequence[TrainedArm], styles: style.Styles) -> Figure:
    """Screening loss against a setting, a panel an arm of one size and corpus, with the parabola.

    Above a panel stand the chosen value and the interval of the optimum. The axis ends at the
    losses of the values that the parabola is fitted to, so that others, which are arrowheads at its
    top as diverged ones are, do not flatten it.
    """
    columns = _columns([arm.variant for arm in arms], 36)
    figure = Figure(figsize=(style.WIDTH, 1.9 * -(-len(arms) // columns) + 0.95))
    axes = style.panels(figure, columns, len(arms), sharex=True)
    values = sorted({value for arm in arms for value in arm.sweeps[knob].values})
    for ax, arm in zip(axes, arms, strict=True):
        sweep = arm.sweeps[knob]
        keywords = styles[arm.variant]
        interval = prose.optimum(sweep) if sweep.bracketed else 'not bracketed'
        title = f'{short(arm.variant, 36 // columns)}\n{sweep.chosen:.3g}\n{interval}'
        ax.set_title(title, fontsize=8, fontweight='normal')
        ax.set(xscale='log')
        # A panel has room for three labels.
        labelled = values[::-1][:: math.ceil(len(values) / 3)]
        ax.set_xticks(labelled, [f'{value:.3g}' for value in labelled])
        ax.set_xticks(values, [''] * len(values), minor=True)
        ax.locator_params(axis='y', nbins=4)
        for value, losses in zip(sweep.values, sweep.losses, strict=True):
            ax.scatter([value] * len(losses), losses, color=keywords['color'], **style.SEEDS)
        ax.plot(sweep.values, sweep.means, label='mean', **keywords | {'linestyle': 'none'})
        pairs = zip(sweep.values, sweep.losses, strict=True)
        if near := [loss for value, losses in pairs if value in sweep.fitted for loss in losses]:
            pad = 0.1 * (max(near) - min(near)) or 0.01
            ax.set_ylim(min(near) - pad, max(near) + pad)
        top = ax.get_ylim()[1]
        means = zip(sweep.values, sweep.means, strict=True)
        if far := [value for value, mean in means if mean > top]:
            arrowhead = {'marker': '^', 'color': keywords['color'], 'clip_on': False}
            ax.scatter(far, [top] * len(far), s=30, zorder=4, label=style.BEYOND, **arrowhead)
        if sweep.loss is not None:
            x = np.geomspace(sweep.fitted[0], sweep.fitted[-1], 60)
            fit = sweep.loss + sweep.curvature / 2 * np.log(x / sweep.optimum) ** 2
            ax.plot(x, fit, color=keywords['color'], zorder=3, label='parabola')
        ax.axvline(sweep.chosen, label='chosen value', **style.REFERENCE)
        if prose.optimum(sweep):
            band = {'color': style.INK, 'alpha': 0.1, 'linewidth': 0, 'zorder': 0}
            label = '95 % interval of the optimum'
            ax.axvspan(sweep.optimum_low, sweep.optimum_high, label=label, **band)
    figure.supxlabel(f'{prose.words(knob)} (log scale)')
    figure.supylabel(_VAL_LOSS)
    style.legend(figure)
    return figure


def _loss_against_parameters(findings: Findings, styles: style.Styles) -> Figure | None:
    """Mean loss of each variant and corpus against parameters, with the law where there is one.

    None where all parameter counts are equal.
    """
    total = {arm.key: arm.example.parameters['total'] for arm in findings.arms}
    lines: dict[tuple[str, str], list[TrainedArm]] = {}
    for arm in sorted(findings.arms, key=lambda arm: total[arm.key]):
        if arm.chosen:
            lines.setdefault((arm.variant, arm.corpus), []).append(arm)
    ends = min(total.values()), max(total.values())
    if not lines or ends[1] <= EQUAL * ends[0]:
        return None
    laws = {(s.variant, s.corpus): s.law for s in findings.scaling if isinstance(s.law, Law)}
    figure = Figure(figsize=(style.WIDTH, 3.4 + 0.2 * len(lines)))
    ax = figure.subplots()
    for (variant, corpus), arms in lines.items():
        keywords = styles[variant]
        law = laws.get((variant, corpus))
        name = variant + f', {corpus}' * (len(findings.study.corpora) > 1)
        losses = [list(arm.losses(arm.split).values()) for arm in arms]
        for arm, of_seeds in zip(arms, losses, strict=True):
            dots = style.SEEDS | {'label': '_', 'color': keywords['color']}
            ax.scatter([total[arm.key]] * len(of_seeds), of_seeds, **dots)
        thin = {'linestyle': 'none'} if law else {'linewidth': 0.8}
        x = [total[arm.key] for arm in arms]
        means = [*map(np.mean, losses)]
        ax.plot(x, means, label=short(name, 40), **keywords | thin)
        if law:
            sizes = np.geomspace(law.sizes[0], law.sizes[-1], 80)
            curve = keywords | {'marker': '', 'label': f'_law of {name}'}
            ax.plot(sizes, [law.loss(size) for size in sizes], **curve)
    ax.set(xscale='log', xlabel='total parameters (log scale)')
    ax.set_ylabel(f'{findings.split} loss (nats/token)')
    ax.set_xticks(np.geomspace(*ends, 4))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: prose.si(value))
    style.legend(figure)
    return figure
