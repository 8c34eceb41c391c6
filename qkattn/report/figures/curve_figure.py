"""Learning curves: the loss of the validation split over training."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from qkattn.report.figures.style import (
    GRID,
    INK,
    WIDTH,
    Drawing,
    Look,
    VariantStyle,
    label_right,
    panels,
    short,
)
from qkattn.report.prose import si
from qkattn.verdict.arms import Arm
from qkattn.verdict.load import Study
from qkattn.verdict.measures import losses

# More lines than this in one panel cannot be told apart: each variant then gets its own panel.
MAX_LINES = 8
COLUMNS = 4

# By variant: x [E] and y [seeds, E].
Curves = Mapping[str, tuple[np.ndarray, np.ndarray]]


def learning_curves(study: Study, arms: Sequence[Arm], look: Look, stem: str) -> Drawing | None:
    """Val loss over training of one size: mean line and min-max band over seeds."""
    measure = losses(arms)[0]
    curves = {arm.variant: curve for arm in arms if (curve := _curve(study, arm, measure.field))}
    if not curves:
        return None
    example = {arm.variant: arm.chosen[0] for arm in arms if arm.chosen}
    rates = {v: example[v].num_tokens / example[v].num_steps for v in curves}
    by_tokens = max(rates.values()) - min(rates.values()) > 1e-6
    if by_tokens:
        curves = {v: (x * rates[v], y) for v, (x, y) in curves.items()}
    limits = _limits(curves)
    draw = _one_panel if len(curves) <= MAX_LINES else _small_multiples
    figure = draw(curves, look, study.baseline, limits)
    figure.supxlabel('training tokens' if by_tokens else 'training step')
    figure.supylabel(measure.axis)
    return Drawing.of(
        figure,
        stem,
        size=arms[0].size if len(study.sizes) > 1 else None,
        axis=measure.axis,
        banded=any(len(y) > 1 for _, y in curves.values()),
        cut=any(float(np.nanmax(y)) > limits[1] for _, y in curves.values()),
    )


def _curve(study: Study, arm: Arm, field: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps [E] and `field` [seeds, E] of the arm's chosen trials, at the steps all share."""
    found = []
    for run in study.runs:
        for index, trial in enumerate(run.trials):
            if run.curve is not None and any(trial is chosen for chosen in arm.chosen):
                values = run.curve.values_EX[field][:, index]
                found.append(dict(zip(run.curve.steps_E.tolist(), values, strict=True)))
    steps = sorted(set.intersection(*map(set, found))) if found else []
    if not steps:
        return None
    return np.array(steps), np.array([[curve[step] for step in steps] for curve in found])


def _limits(curves: Curves) -> tuple[float, float]:
    """Y limits that show the last four fifths of training, where variants differ."""
    low = min(float(np.nanmin(y)) for _, y in curves.values())
    high = max(float(np.nanmax(y[:, x >= 0.2 * x[-1]])) for x, y in curves.values())
    pad = 0.06 * (high - low) or 0.05
    return low - pad, high + pad


def _draw(ax: Axes, x: np.ndarray, y: np.ndarray, style: VariantStyle, order: int) -> None:
    if len(y) > 1:
        band = {'color': style.colour, 'alpha': 0.18, 'linewidth': 0}
        ax.fill_between(x, y.min(axis=0), y.max(axis=0), **band)
    line = {'color': style.colour, 'linestyle': style.dashes, 'linewidth': style.width}
    ax.plot(x, y.mean(axis=0), zorder=order, **line)


def _axes(ax: Axes, limits: tuple[float, float], ticks: int) -> None:
    ax.set_ylim(limits)
    ax.xaxis.set_major_locator(MaxNLocator(ticks))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))


def _one_panel(
    curves: Curves, look: Look, baseline: str | None, limits: tuple[float, float]
) -> Figure:
    figure = Figure(figsize=(WIDTH, 4.2))
    ax = figure.subplots()
    for variant, (x, y) in curves.items():
        _draw(ax, x, y, look[variant], 4 if variant == baseline else 3)
    _axes(ax, limits, 6)
    ax.margins(x=0.01)
    ends = {variant: (x[-1], float(y[:, -1].mean())) for variant, (x, y) in curves.items()}
    label_right(ax, [(*end, variant, look[variant].colour) for variant, end in ends.items()])
    return figure


def _small_multiples(
    curves: Curves, look: Look, baseline: str | None, limits: tuple[float, float]
) -> Figure:
    variants = [variant for variant in curves if variant != baseline]
    figure = Figure(figsize=(WIDTH + 1.2, 1.45 * -(-len(variants) // COLUMNS) + 0.7))
    axes = panels(figure, COLUMNS, len(variants), sharex=True, sharey=True)
    envelope = _envelope(list(curves.values()))
    for ax, variant in zip(axes, variants, strict=True):
        if envelope is not None:
            ax.fill_between(*envelope, color=GRID, linewidth=0, zorder=1)
        if baseline in curves:
            _draw(ax, *curves[baseline], look[baseline], 3)
        _draw(ax, *curves[variant], look[variant], 4)
        ax.set_title(short(variant, 24), fontsize=8, fontweight='normal', color=INK)
        ax.grid(visible=False)
        _axes(ax, limits, 2)
    handles: list[Line2D | Patch] = [
        Line2D([], [], color=look[variants[0]].colour, label='the variant named above')
    ]
    if baseline in curves:
        name = f'baseline {short(baseline)}'
        handles.append(Line2D([], [], color=INK, linewidth=2, label=name))
    if envelope is not None:
        handles.append(Patch(color=GRID, label='range of all means'))
    figure.legend(handles=handles, loc='outside upper center', ncols=3)
    return figure


def _envelope(
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Lowest and highest mean of all curves over x; None when their steps differ."""
    x = curves[0][0]
    if not all(np.array_equal(x, other) for other, _ in curves):
        return None
    means = np.array([y.mean(axis=0) for _, y in curves])
    return x, means.min(axis=0), means.max(axis=0)
