"""Lines with a legend: loss over training, and loss against parameters over the sizes."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator, NullFormatter, NullLocator

from qkattn.report import prose
from qkattn.report.figures.style import (
    GRID,
    MUTED,
    REFERENCE,
    SEEDS,
    WIDTH,
    Styles,
    distinct,
    legend,
    panels,
    short,
    yardstick,
)
from qkattn.report.measures import VAL_LOSS
from qkattn.report.prose import by_size, si
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study

# More lines than this in one panel cannot be told apart: each variant then gets its own panel.
MAX_LINES = 8
COLUMNS = 2
# Learning curves of more evaluations have ticks at labelled ones only.
MAX_TICKS = 60
# Parameter counts within this ratio are equal.
EQUAL = 1.01


def learning_curves(
    study: Study, arms: Sequence[Arm], look: Styles
) -> tuple[Figure | None, dict[str, Any]]:
    """Val loss over training of one size: mean line and min-max band over seeds."""
    measure = VAL_LOSS
    curves = {arm.variant: curve for arm in arms if len(curve := _curve(study, arm, measure.field))}
    if not curves:
        return None, {}
    shown = distinct(
        [prose.shown(study, arm.key) for arm in arms], 20 if len(curves) > MAX_LINES else 34
    )
    names = dict(zip((arm.variant for arm in arms), shown, strict=True))
    example = {arm.variant: arm.chosen[0] for arm in arms if arm.chosen}
    rates = {v: example[v].num_tokens / example[v].num_steps for v in curves}
    if by_tokens := max(rates.values()) - min(rates.values()) > 1e-6:
        curves = {v: curve.set_index(curve.index * rates[v]) for v, curve in curves.items()}
    last = curves.get(study.baseline)
    if small := len(curves) > MAX_LINES:
        variants = [variant for variant in curves if variant != study.baseline]
        figure = Figure(figsize=(WIDTH, 1.45 * -(-len(variants) // COLUMNS) + 0.9))
        axes = panels(figure, COLUMNS, len(variants), sharex=True, sharey=True)
        means = pd.concat([curve.mean(axis=1) for curve in curves.values()], axis=1).dropna()
        for ax, variant in zip(axes, variants, strict=True):
            band = {'color': GRID, 'linewidth': 0, 'zorder': 1, 'label': 'range of all means'}
            ax.fill_between(means.index, means.min(axis=1), means.max(axis=1), **band)
            if last is not None:
                _line(ax, last, look[study.baseline], f'baseline {short(study.baseline)}')
            _line(ax, curves[variant], look[variant], 'the variant named above')
            ax.set_title(names[variant], fontsize=8, fontweight='normal')
            ax.grid(visible=False)
    else:
        figure = Figure(figsize=(WIDTH, 3.4 + 0.2 * len(curves)))
        axes = [figure.subplots()]
        axes[0].margins(x=0.01)
        # The legend is in the order in which the lines end.
        for variant in sorted(curves, key=lambda v: -curves[v].iloc[-1].mean()):
            _line(axes[0], curves[variant], look[variant], names[variant])
    # The last four fifths of training, where variants differ, are shown.
    low = min(curve.min(axis=None) for curve in curves.values())
    late = [curve[curve.index >= 0.2 * curve.index[-1]] for curve in curves.values()]
    high = max(curve.max(axis=None) for curve in late)
    pad = 0.06 * (high - low) or 0.05
    steps = sorted({step for curve in curves.values() for step in curve.index})
    for ax in axes:
        ax.set_ylim(low - pad, high + pad)
        evaluation_ticks(ax, steps, 2 if small else 4)
        yardstick(ax, study, arms[0], fit=True)
    legend(figure)
    figure.supxlabel('training tokens' if by_tokens else 'training step')
    figure.supylabel(measure.axis)
    banded = any(curve.shape[1] > 1 for curve in curves.values())
    cut = any(curve.max(axis=None) > high + pad for curve in curves.values())
    return figure, {'axis': measure.axis, 'banded': banded, 'cut': cut}


def _curve(study: Study, arm: Arm, field: str) -> pd.DataFrame:
    """`field` of the arm's chosen trials, [steps, seeds], at the steps that all share."""
    chosen = set(map(id, arm.chosen))
    losses = [
        pd.Series(run.curve.values_EX[field][:, index], run.curve.steps_E)
        for run in study.runs
        for index, trial in enumerate(run.trials)
        if run.curve is not None and id(trial) in chosen
    ]
    return pd.concat(losses, axis=1, join='inner') if losses else pd.DataFrame()


def _line(ax: Axes, curve: pd.DataFrame, style: dict[str, Any], label: str) -> None:
    if curve.shape[1] > 1:
        band = {'color': style['color'], 'alpha': 0.18, 'linewidth': 0}
        ax.fill_between(curve.index, curve.min(axis=1), curve.max(axis=1), **band)
    ax.plot(curve.index, curve.mean(axis=1), label=label, zorder=3, **style | {'marker': ''})


def evaluation_ticks(ax: Axes, steps: Sequence[float], most: int) -> None:
    """A tick at every evaluation while they can be told apart, `most` of them with a label."""
    ax.set_xticks(steps[::-1][:: -(-len(steps) // most)])
    ax.xaxis.set_major_formatter(lambda value, _: si(value))
    if len(steps) <= MAX_TICKS:
        ax.xaxis.set_minor_locator(FixedLocator(steps))
        ax.xaxis.set_minor_formatter(NullFormatter())


def loss_against_parameters(
    study: Study, found: Findings, look: Styles
) -> tuple[Figure | None, dict[str, bool]]:
    """Mean loss against total parameters, all sizes; with the fitted law where there is one.

    A line for each variant and corpus. None where all parameter counts are equal.
    """
    totals = [*map(_total, found.arms)]
    if max(totals) <= EQUAL * min(totals):
        return None, {}
    laws = {prose.on_corpus(study, law): law.fit for law in found.scaling if not law.fit.problem}
    points: dict[str, list[Arm]] = {}
    for arm in sorted(found.arms, key=_total):
        if arm.chosen:
            points.setdefault(prose.on_corpus(study, arm), []).append(arm)
    figure = Figure(figsize=(WIDTH, 3.4 + 0.2 * len(points)))
    ax = figure.subplots()
    labels = dict(zip(points, distinct([*points]), strict=True))
    # The legend is in the order of the losses at the largest size.
    for name in sorted(points, key=lambda v: -_mean(points[v][-1])):
        arms, law = points[name], laws.get(name)
        style = look[arms[0].variant]
        thin = {'linewidth': 0.8, 'linestyle': 'none' if law else style['linestyle'], 'zorder': 4}
        late = ' (post hoc)' * any(prose.is_post_hoc(study, arm.key) for arm in arms)
        means = [*map(_mean, arms)]
        ax.plot([*map(_total, arms)], means, label=labels[name] + late, **style | thin)
        for arm in arms:
            seeds = arm.losses(arm.split).values()
            dots = SEEDS | {'label': '_', 'color': style['color']}
            ax.scatter([_total(arm)] * len(seeds), [*seeds], **dots)
        if law:
            sizes = np.geomspace(law.sizes[0], law.sizes[-1], 80)
            curve = style | {'marker': '', 'label': f'_law of {name}'}
            ax.plot(sizes, [law.loss(size) for size in sizes], **curve)
    # Any other target counts other parameters than this axis does.
    matched = {arm.example.target_parameters for arm in found.arms if study.matched == 'total'}
    targets = sorted(matched - {None})
    for target in targets:
        ax.axvline(target, label='_target', **REFERENCE | {'color': MUTED})
    if laws:
        ax.set_yscale('log')
        ax.yaxis.set_major_locator(MaxNLocator(7))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter('{x:g}')
    ax.set_ylabel(f'{found.split} loss (nats/token' + (', log scale)' if laws else ')'))
    _parameter_axis(ax, found.arms, targets)
    legend(figure)
    return figure, {'targets': bool(targets), 'laws': bool(laws)}


def _mean(arm: Arm) -> float:
    """Of an arm with finished trials."""
    assert arm.loss is not None
    return arm.loss.mean


def _total(arm: Arm) -> int:
    return arm.example.parameters['total']


def _parameter_axis(ax: Axes, arms: Sequence[Arm], targets: Sequence[float]) -> None:
    totals = [[_total(arm) for arm in group] for group in by_size(arms).values()]
    digits = 3
    if several := len(totals) > 1:
        ax.set_xscale('log')
        ax.set_xticks([float(np.median(group)) for group in totals])
        ax.xaxis.set_minor_locator(NullLocator())
    else:
        counts = [*totals[0], *targets]
        low, high = min(counts), max(counts)
        middle, half = (low + high) / 2, 0.6 * (high - low)
        ax.set_xlim(middle - half, middle + half)
        ax.locator_params(axis='x', nbins=4)
        digits = 3 if half > 0.05 * middle else 4
    ax.set_xlabel('total parameters' + ' (log scale)' * several)
    ax.xaxis.set_major_formatter(lambda value, _: si(value, digits))
