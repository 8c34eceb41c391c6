"""The figures of a study; here: learning curves."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, MaxNLocator

from qkattn.report.figures import marks
from qkattn.report.figures.forest import differences, final_losses, final_scores
from qkattn.report.figures.retrieval import retrieval_figure
from qkattn.report.figures.scaling_plot import loss_against_parameters, multipliers
from qkattn.report.figures.style import (
    GRID,
    INK,
    WIDTH,
    Rendered,
    VariantStyle,
    label_right,
    rc,
    render,
    short,
    styles,
)
from qkattn.report.figures.sweep_plot import bowls_figure
from qkattn.report.figures.verdict_plot import verdict_forest
from qkattn.report.numbers import si
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study
from qkattn.verdict.measures import losses, scores

# More lines than this in one panel cannot be told apart: each variant then gets its own panel.
MAX_LINES = 8


def figures(study: Study, found: Findings) -> tuple[Rendered, ...]:
    """All figures that the results allow, the main ones first."""
    rows = found.arms
    # Arms without a result have a style too: their place is in every figure.
    look = styles(study.variants, study.baseline)
    made: list[Rendered | None] = []
    with rc():
        if study.tuning:
            made.append(verdict_forest(study, found, look))
        # One of the scores: what else there is stands in the table.
        for measure in scores(rows)[:1]:
            made.append(final_scores(study, rows, look, measure))
        if any(row.chosen for row in rows):
            made.append(final_losses(study, rows, look))
        if not study.tuning and any(arm.difference for arm in found.arms):
            made.append(differences(study, found, look))
        made += _of_bowls(study, found, look)
        for size, suffix in _sizes(study):
            of_size = [row for row in rows if row.size == size]
            made.append(learning_curves(study, of_size, look, f'curves{suffix}'))
        if any(row.chosen for row in rows):
            made.append(loss_against_parameters(study, found, look))
        made.append(multipliers(study, found, look))
        made.append(retrieval_figure(study, found, look))
    return tuple(figure for figure in made if figure is not None)


def _sizes(study: Study) -> list[tuple[str, str]]:
    """Each size and what its figures' names end with."""
    several = len(study.sizes) > 1
    return [(s, f'_{index + 1}' if several else '') for index, s in enumerate(study.sizes)]


def _of_bowls(study: Study, found: Findings, look: dict[str, VariantStyle]) -> list[Rendered]:
    made = []
    for knob in ('learning_rate', 'weight_decay', 'score_scale'):
        for size, suffix in _sizes(study):
            of_size = {
                arm.variant: arm.sweeps[knob]
                for arm in found.arms
                if arm.size == size and knob in arm.sweeps
            }
            if of_size:
                name = size if len(study.sizes) > 1 else None
                made.append(bowls_figure(knob, of_size, look, f'bowl_{knob}{suffix}', name))
    return made


def _curve(study: Study, row: Arm, field: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps [E] and `field` [seeds, E] of the row's chosen trials, at the steps all share."""
    found = []
    for run in study.runs:
        for index, trial in enumerate(run.trials):
            if run.curve is not None and any(trial is chosen for chosen in row.chosen):
                values = run.curve.values_EX[field][:, index]
                found.append(dict(zip(run.curve.steps_E.tolist(), values, strict=True)))
    if not found:
        return None
    steps = sorted(set.intersection(*map(set, found)))
    values = np.array([[curve[step] for step in steps] for curve in found])
    return (np.array(steps), values) if steps else None


def learning_curves(
    study: Study, rows: Sequence[Arm], look: dict[str, VariantStyle], stem: str
) -> Rendered | None:
    """Val loss over training of one size: mean line and min-max band over seeds."""
    measure = losses(rows)[0]
    curves = {row.variant: curve for row in rows if (curve := _curve(study, row, measure.field))}
    if not curves:
        return None
    example = {row.variant: row.chosen[0] for row in rows if row.chosen}
    rates = {v: example[v].num_tokens / example[v].num_steps for v in curves}
    by_tokens = max(rates.values()) - min(rates.values()) > 1e-6
    xlabel = 'training tokens' if by_tokens else 'training step'
    curves = {v: (x * rates[v] if by_tokens else x, y) for v, (x, y) in curves.items()}
    draw = _one_panel if len(curves) <= MAX_LINES else _small_multiples
    figure, limits = draw(study, curves, look, xlabel, measure.axis)
    size = f' at {rows[0].size}' if len(study.sizes) > 1 else ''
    banded = any(len(y) > 1 for _, y in curves.values())
    cut = any(float(np.nanmax(y)) > limits[1] for _, y in curves.values())
    return render(
        figure,
        stem,
        f'Learning curves{size}',
        f'{measure.axis.replace("val", "Validation", 1)} during training'
        + (': mean over seeds, band from lowest to highest seed.' if banded else ', one seed.')
        + (' The first evaluations lie above the axis.' if cut else ''),
    )


def _limits(curves: dict[str, tuple[np.ndarray, np.ndarray]]) -> tuple[float, float]:
    """Y limits that show the last four fifths of training, where variants differ."""
    low = min(float(np.nanmin(y)) for _, y in curves.values())
    late = [y[:, x >= 0.2 * x[-1]] for x, y in curves.values()]
    high = max(float(np.nanmax(y)) for y in late)
    pad = 0.06 * (high - low) or 0.05
    return low - pad, high + pad


def _draw_curve(ax: Axes, x: np.ndarray, y: np.ndarray, style: VariantStyle, order: int) -> None:
    mean = y.mean(axis=0)
    if len(y) > 1:
        ax.fill_between(
            x, y.min(axis=0), y.max(axis=0), color=style.colour, alpha=0.18, linewidth=0
        )
    ax.plot(
        x, mean, color=style.colour, linestyle=style.dashes, linewidth=style.width, zorder=order
    )


def _one_panel(
    study: Study,
    curves: dict[str, tuple[np.ndarray, np.ndarray]],
    look: dict[str, VariantStyle],
    xlabel: str,
    ylabel: str,
) -> tuple[Figure, tuple[float, float]]:
    figure = Figure(figsize=(WIDTH, 4.2), layout='constrained')
    ax = figure.subplots()
    for variant, (x, y) in curves.items():
        _draw_curve(ax, x, y, look[variant], 4 if variant == study.baseline else 3)
    limits = _limits(curves)
    ax.set_ylim(limits)
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))
    ax.margins(x=0.01)
    ax.set_xlabel(xlabel)
    ax.set_ylabel(ylabel)
    label_right(
        ax, [(x[-1], float(y[:, -1].mean()), v, look[v].colour) for v, (x, y) in curves.items()]
    )
    return figure, limits


def _small_multiples(
    study: Study,
    curves: dict[str, tuple[np.ndarray, np.ndarray]],
    look: dict[str, VariantStyle],
    xlabel: str,
    ylabel: str,
) -> tuple[Figure, tuple[float, float]]:
    variants = [variant for variant in curves if variant != study.baseline]
    num_columns = 4
    num_rows = math.ceil(len(variants) / num_columns)
    figure = Figure(figsize=(WIDTH + 1.2, 1.45 * num_rows + 0.7), layout='constrained')
    axes = marks.panels(figure, num_rows, num_columns, len(variants), sharex=True, sharey=True)
    limits = _limits(curves)
    envelope = _envelope(list(curves.values()))
    for ax, variant in zip(axes, variants, strict=True):
        if envelope is not None:
            ax.fill_between(*envelope, color=GRID, linewidth=0, zorder=1)
        if study.baseline in curves:
            _draw_curve(ax, *curves[study.baseline], look[study.baseline], 3)
        _draw_curve(ax, *curves[variant], look[variant], 4)
        ax.set_title(short(variant, 24), fontsize=8, fontweight='normal', color=INK)
        ax.grid(visible=False)
        ax.set_ylim(limits)
        ax.xaxis.set_major_locator(MaxNLocator(2))
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))
    figure.supxlabel(xlabel, fontsize=9)
    figure.supylabel(ylabel, fontsize=9)
    handles = [Line2D([], [], color=look[variants[0]].colour, label='the variant named above')]
    if study.baseline in curves:
        name = f'baseline {short(study.baseline)}'
        handles.append(Line2D([], [], color=INK, linewidth=2, label=name))
    if envelope is not None:
        handles.append(Patch(color=GRID, label='range of all means'))
    figure.legend(handles=handles, loc='outside upper center', ncols=3)
    return figure, limits


def _envelope(
    curves: Sequence[tuple[np.ndarray, np.ndarray]],
) -> tuple[np.ndarray, np.ndarray, np.ndarray] | None:
    """Lowest and highest mean of all curves over x; None when their steps differ."""
    x = curves[0][0]
    if not all(np.array_equal(x, other) for other, _ in curves):
        return None
    means = np.array([y.mean(axis=0) for _, y in curves])
    return x, means.min(axis=0), means.max(axis=0)
