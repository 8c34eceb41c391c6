"""The figures of a study: forest, tuning sweeps, learning curves, loss against parameters."""

import functools
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from qkattn.jobs.output import short
from qkattn.report import prose
from qkattn.report.figures import forest, style
from qkattn.report.figures.drawing import Drawing, Grid, Panel
from qkattn.stats.scaling import Law
from qkattn.stats.sweep import Sweep
from qkattn.study.tuning import KNOBS
from qkattn.verdict.findings import Findings
from qkattn.verdict.trained_arm import TrainedArm
from qkattn.verdict.trained_study import TrainedStudy

# A figure of more panels is larger than a page shows and an image may be.
MOST_PANELS = 60
# Parameter counts within this ratio are equal.
EQUAL = 1.01
# Of a learning curve, the first part of the training is not drawn: variants do not differ there.
NOT_DRAWN = 0.2
_VAL_LOSS = 'val loss (nats/token)'


def figures(findings: Findings) -> list[Drawing]:
    """All figures that the results allow, the main ones first."""
    study = findings.study
    styles = style.styles(study.variants, study.baseline)
    drawings = [forest.differences(findings, styles)]
    arms_by_group = prose.by_where(findings.arms, study)
    for number, (group, arms) in enumerate(arms_by_group.items(), start=1):
        suffix = f'_{number}' if group else ''
        for knob in KNOBS:
            drawings.append(_sweeps(knob, arms, styles, suffix, group))
        drawings.append(_learning_curves(study, arms, styles, suffix, group))
    drawings.append(_loss_against_parameters(findings, styles))
    return [drawing for drawing in drawings if drawing is not None]


def _of_grid(stem: str, grid: Grid, group: str, num_arms: int, **values: object) -> Drawing:
    """A figure of panels, of the arms of a size and corpus; its caption says if some are left out.

    `num_arms` is the number of arms that there are to draw.
    """
    cut = (MOST_PANELS, num_arms) if num_arms > MOST_PANELS else None
    return Drawing(stem, grid.draw, {'size': group or None, 'cut': cut, **values}, grid)


def _sweeps(
    knob: str, arms: Sequence[TrainedArm], styles: style.Styles, suffix: str, group: str
) -> Drawing | None:
    """Screening loss against a setting, a panel for each arm that is tuned in it."""
    swept = [arm for arm in arms if knob in arm.sweeps]
    if not swept:
        return None
    shown = swept[:MOST_PANELS]
    values = sorted({value for arm in shown for value in arm.sweeps[knob].values})
    panels = []
    for arm in shown:
        sweep = arm.sweeps[knob]
        interval = prose.optimum(sweep) if sweep.bracketed else 'not bracketed'
        draw = functools.partial(
            _draw_sweep, sweep=sweep, values=values, keywords=styles[arm.variant]
        )
        panels.append(Panel(arm.variant, draw, (f'{sweep.chosen:.3g}', interval)))
    grid = Grid(panels, f'{prose.words(knob)} (log scale)', _VAL_LOSS, title_length=36)
    is_minimax = any(_is_beside_vertex(arm.sweeps[knob]) for arm in shown)
    stem = f'sweep_{knob}{suffix}'
    return _of_grid(stem, grid, group, len(swept), knob=knob, minimax=is_minimax)


def _is_beside_vertex(sweep: Sweep) -> bool:
    """Whether the chosen value is another than the optimum of the parabola, to three digits."""
    return sweep.optimum is not None and sweep.chosen != float(f'{sweep.optimum:.3g}')


def _draw_sweep(ax: Axes, sweep: Sweep, values: Sequence[float], keywords: dict[str, Any]) -> None:
    """Draws the losses of a sweep, their parabola, the chosen value and the optimum's interval.

    The x axis has the ascending `values` of all panels. The y axis ends at the losses of the values
    that the parabola is fitted to. Means above it are arrowheads at its top, as infinite ones of
    values at which a seed diverged, so that they do not flatten the parabola.
    """
    color = keywords['color']
    # A panel has room for three labels.
    labelled = values[::-1][:: math.ceil(len(values) / 3)]
    ax.set(xscale='log', xlim=(values[0] / 1.3, values[-1] * 1.3))
    ax.set_xticks(labelled, [f'{value:.3g}' for value in labelled])
    ax.set_xticks(values, [''] * len(values), minor=True)
    ax.locator_params(axis='y', nbins=4)

    seeds_x = list[float]()
    seeds_y = list[float]()
    fitted_losses = list[float]()
    for value, losses in zip(sweep.values, sweep.losses, strict=True):
        seeds_x += [value] * len(losses)
        seeds_y += losses
        if value in sweep.fitted:
            fitted_losses += losses
    ax.scatter(seeds_x, seeds_y, color=color, **style.SEEDS)
    ax.plot(sweep.values, sweep.means, label='mean', **keywords | {'linestyle': 'none'})
    if fitted_losses:
        pad = 0.1 * (max(fitted_losses) - min(fitted_losses)) or 0.01
        ax.set_ylim(min(fitted_losses) - pad, max(fitted_losses) + pad)

    top = ax.get_ylim()[1]
    above = [v for v, mean in zip(sweep.values, sweep.means, strict=True) if mean > top]
    if above:
        arrowhead = {'marker': '^', 's': 30, 'color': color, 'zorder': 4, 'clip_on': False}
        ax.scatter(above, [top] * len(above), label=style.BEYOND, **arrowhead)
    if sweep.loss is not None and sweep.curvature is not None and sweep.optimum is not None:
        x = np.geomspace(sweep.fitted[0], sweep.fitted[-1], 60)
        parabola = sweep.loss + sweep.curvature / 2 * np.log(x / sweep.optimum) ** 2
        ax.plot(x, parabola, color=color, zorder=3, label='parabola')
    ax.axvline(sweep.chosen, label='chosen value', **style.REFERENCE)
    if sweep.optimum_low is not None and sweep.optimum_high is not None:
        band = {'color': style.INK, 'alpha': 0.1, 'linewidth': 0, 'zorder': 0}
        label = '95 % interval of the optimum'
        ax.axvspan(sweep.optimum_low, sweep.optimum_high, label=label, **band)


def _learning_curves(
    study: TrainedStudy,
    arms: Sequence[TrainedArm],
    styles: style.Styles,
    suffix: str,
    group: str,
) -> Drawing | None:
    """Validation loss over training of one size and corpus: a panel an arm, beside the baseline.

    None without any curve. The baseline has a panel where it is alone.
    """
    baselines = [arm for arm in arms if arm.is_baseline]
    others = [arm for arm in arms if not arm.is_baseline]
    curves = dict[str, pd.DataFrame]()
    for arm in baselines + others[:MOST_PANELS]:
        curve = _curve(arm)
        if not curve.empty:
            curves[arm.variant] = curve
    if not curves:
        return None
    shown = [variant for variant in curves if variant != study.baseline] or list(curves)
    # The panels have the same axes.
    lowest = min(curve.min(axis=None) for curve in curves.values())
    highest = max(curve.max(axis=None) for curve in curves.values())
    first = min(curve.index[0] for curve in curves.values())
    last = max(curve.index[-1] for curve in curves.values())
    limits = {
        'xlim': _padded(first, last),
        'ylim': _padded(lowest, highest),
    }
    panels = [
        Panel(variant, functools.partial(_draw_curves, study, curves, variant, styles, limits))
        for variant in shown
    ]
    grid = Grid(panels, 'training tokens', _VAL_LOSS, title_length=44, row_height=1.6)
    return _of_grid(f'curves{suffix}', grid, group, len(others))


def _padded(low: float, high: float) -> tuple[float, float]:
    """Limits of an axis that shows numbers from `low` to `high`."""
    pad = 0.05 * (high - low) or 0.01
    return low - pad, high + pad


def _curve(arm: TrainedArm) -> pd.DataFrame:
    """Validation losses of the chosen trials, [tokens, seeds], without the beginning of training.

    Empty without evaluations during training.
    """
    losses_by_step = [trial.evaluations for trial in arm.chosen if trial.evaluations]
    if not losses_by_step:
        return pd.DataFrame()
    curve = pd.DataFrame(losses_by_step).T.dropna()
    late = curve[curve.index >= NOT_DRAWN * max(curve.index, default=0)]
    tokens_of_a_step = arm.example.num_tokens / arm.example.num_steps
    return late.set_axis(late.index * tokens_of_a_step)


def _draw_curves(
    study: TrainedStudy,
    curves: Mapping[str, pd.DataFrame],
    variant: str,
    styles: style.Styles,
    limits: Mapping[str, tuple[float, float]],
    ax: Axes,
) -> None:
    """Draws the curve of a variant beside that of the baseline.

    A line is the mean over seeds, its band from the lowest to the highest.
    """
    labels = {study.baseline: f'baseline {short(study.baseline, 34)}'}
    labels[variant] = 'the variant named above'
    for name, label in labels.items():
        if name in curves:
            curve = curves[name]
            tokens = curve.index
            color = styles[name]['color']
            lowest = curve.min(axis=1)
            highest = curve.max(axis=1)
            ax.fill_between(tokens, lowest, highest, color=color, alpha=0.18, linewidth=0)
            line = styles[name] | {'marker': ''}
            ax.plot(tokens, curve.mean(axis=1), label=label, zorder=3, **line)
    ax.set(**limits)
    ax.locator_params(axis='x', nbins=2)
    ax.locator_params(axis='y', nbins=4)
    ax.xaxis.set_major_formatter(lambda value, _: prose.si(value))


def _loss_against_parameters(findings: Findings, styles: style.Styles) -> Drawing | None:
    """Mean loss of each variant and corpus against parameters, with the law where there is one.

    None where all parameter counts are equal.
    """
    counts = [arm.example.parameters['total'] for arm in findings.arms]
    has_losses = any(arm.chosen for arm in findings.arms)
    if not has_losses or max(counts) <= EQUAL * min(counts):
        return None
    has_laws = any(isinstance(scaling.law, Law) for scaling in findings.scaling)
    draw = functools.partial(_draw_loss_against_parameters, findings, styles)
    return Drawing('loss_parameters', draw, {'laws': has_laws})


def _draw_loss_against_parameters(findings: Findings, styles: style.Styles, width: float) -> Figure:
    """Draws a line for each variant and corpus over the sizes, the smallest first."""

    def num_parameters(arm: TrainedArm) -> int:
        return arm.example.parameters['total']

    lines = dict[tuple[str, str], list[TrainedArm]]()
    for arm in sorted(findings.arms, key=num_parameters):
        if arm.chosen:
            lines.setdefault((arm.variant, arm.corpus), []).append(arm)
    laws = {(scaling.variant, scaling.corpus): scaling.law for scaling in findings.scaling}
    figure = Figure(figsize=(width, 3.4 + 0.2 * len(lines) * style.WIDTH / width))
    ax = figure.subplots()
    for (variant, corpus), arms in lines.items():
        name = f'{variant}, {corpus}' if len(findings.study.corpora) > 1 else variant
        keywords = styles[variant]
        sizes = [num_parameters(arm) for arm in arms]
        means = []
        for arm, size in zip(arms, sizes, strict=True):
            losses = list(arm.losses(arm.split).values())
            dots = style.SEEDS | {'label': '_', 'color': keywords['color']}
            ax.scatter([size] * len(losses), losses, **dots)
            means.append(np.mean(losses))
        law = laws.get((variant, corpus))
        if isinstance(law, Law):
            ax.plot(sizes, means, label=short(name, 40), **keywords | {'linestyle': 'none'})
            curve_sizes = np.geomspace(law.sizes[0], law.sizes[-1], 80)
            curve = keywords | {'marker': '', 'label': f'_law of {name}'}
            ax.plot(curve_sizes, [law.loss(size) for size in curve_sizes], **curve)
        else:
            ax.plot(sizes, means, label=short(name, 40), **keywords | {'linewidth': 0.8})
    counts = [num_parameters(arm) for arm in findings.arms]
    ax.set(xscale='log', xlabel='total parameters (log scale)')
    ax.set_ylabel(f'{findings.split} loss (nats/token)')
    ax.set_xticks(np.geomspace(min(counts), max(counts), 4))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: prose.si(value))
    style.legend(figure)
    return figure
