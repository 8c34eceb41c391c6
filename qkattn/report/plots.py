"""The figures of a study; here: learning curves and loss against weights."""

import math
from collections.abc import Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from qkattn.report.forest import differences, final_losses, final_scores
from qkattn.report.load import Study
from qkattn.report.measures import losses, scores
from qkattn.report.style import (
    GRID,
    INK,
    MUTED,
    SURFACE,
    WIDTH,
    Rendered,
    VariantStyle,
    label_right,
    rc,
    render,
    short,
    styles,
)
from qkattn.report.summary import Row
from qkattn.report.tables import si

# More lines than this in one panel cannot be told apart: each variant then gets its own panel.
MAX_LINES = 8


def figures(study: Study, rows: Sequence[Row]) -> tuple[Rendered, ...]:
    """All figures that the results allow, the main ones (final scores and losses) first."""
    look = styles(study.variants, study.baseline)
    made = []
    with rc():
        # One of the scores: what else there is stands in the table.
        for measure in scores(rows)[:1]:
            made.append(final_scores(study, rows, look, measure))
        if any(row.chosen for row in rows):
            made.append(final_losses(study, rows, look))
        if any(row.difference for row in rows):
            made.append(differences(study, rows, look))
        several = len(study.sizes) > 1
        for index, size in enumerate(study.sizes):
            of_size = [row for row in rows if row.size == size]
            suffix = f'_{index + 1}' if several else ''
            curves = learning_curves(study, of_size, look, f'curves{suffix}')
            made += [curves] if curves else []
        if any(row.chosen for row in rows):
            made.append(loss_against_weights(study, rows, look))
    return tuple(made)


def _curve(study: Study, row: Row, field: str) -> tuple[np.ndarray, np.ndarray] | None:
    """Steps [E] and `field` [seeds, E] of the row's chosen trials, at the steps all share."""
    found = []
    for cell in study.cells:
        for index, trial in enumerate(cell.trials):
            if cell.curve is not None and any(trial is chosen for chosen in row.chosen):
                values = getattr(cell.curve, f'{field}_EX')[:, index]
                found.append(dict(zip(cell.curve.steps_E.tolist(), values, strict=True)))
    if not found:
        return None
    steps = sorted(set.intersection(*map(set, found)))
    values = np.array([[curve[step] for step in steps] for curve in found])
    return (np.array(steps), values) if steps else None


def learning_curves(
    study: Study, rows: Sequence[Row], look: dict[str, VariantStyle], stem: str
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
    grid = figure.subplots(num_rows, num_columns, sharex=True, sharey=True, squeeze=False)
    limits = _limits(curves)
    envelope = _envelope(list(curves.values()))
    for ax, variant in zip(grid.flat, variants, strict=False):
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
    for index, ax in enumerate(grid.flat):
        ax.set_visible(index < len(variants))
        # A panel with nothing below it carries the column's tick labels.
        if index + num_columns >= len(variants):
            ax.tick_params(labelbottom=True)
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


def loss_against_weights(
    study: Study, rows: Sequence[Row], look: dict[str, VariantStyle]
) -> Rendered:
    """Mean val loss against total weights, all sizes; a line joins the sizes of one variant."""
    points: dict[str, list[Row]] = {}
    for row in rows:
        if row.chosen:
            points.setdefault(row.variant, []).append(row)
    figure = Figure(figsize=(WIDTH, max(4.2, 0.172 * len(points) + 1.2)), layout='constrained')
    ax = figure.subplots()
    labels = []
    for variant, of_variant in points.items():
        style = look[variant]
        of_variant.sort(key=lambda row: row.example.weights['total'])
        x = [row.example.weights['total'] for row in of_variant]
        y = [row.val_loss.mean for row in of_variant]
        ax.plot(
            x,
            y,
            color=style.colour,
            marker=style.marker,
            linestyle=style.dashes,
            linewidth=1.2,
            markersize=6,
            markeredgecolor=SURFACE,
            markeredgewidth=0.7,
        )
        for row in of_variant:
            losses = [trial.val_loss for trial in row.chosen]
            weights = [row.example.weights['total']] * len(losses)
            ax.scatter(weights, losses, s=9, color=style.colour, alpha=0.6, linewidths=0, zorder=3)
        labels.append((x[-1], y[-1], variant, style.colour))
    # Any other target counts other weights than this axis does.
    matched = study.matched == 'total'
    targets = sorted({row.example.target_weights for row in rows} - {None}) if matched else []
    for target in targets:
        ax.axvline(target, color=MUTED, linewidth=1, linestyle=(0, (4, 2)), zorder=1)
    ax.set_ylim(ax.get_ylim())
    label_right(ax, labels)
    _weight_axis(ax, rows, targets)
    ax.set_ylabel('val loss (nats/token)')
    at_equal = ' The dashed line marks the target count.' if targets else ''
    return render(
        figure,
        'loss_weights',
        'Loss against weights',
        'Mean val loss against the number of weights counted on the parameter tree; small dots are '
        f'seeds.{at_equal}',
    )


def _weight_axis(ax: Axes, rows: Sequence[Row], targets: Sequence[int]) -> None:
    totals = [row.example.weights['total'] for row in rows] + list(targets)
    sizes = list(dict.fromkeys(row.size for row in rows))
    ax.set_xlabel('total weights')
    if len(sizes) > 1:
        ax.set_xscale('log')
        ticks = [
            float(np.median([r.example.weights['total'] for r in rows if r.size == size]))
            for size in sizes
        ]
        ax.xaxis.set_major_locator(FixedLocator(ticks))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))
        ax.set_xlabel('total weights (log scale)')
        return
    # At least 1 % to either side, so that counts that are nearly equal look nearly equal.
    middle, spread = (min(totals) + max(totals)) / 2, max(totals) - min(totals)
    half = max(0.01 * middle, 0.6 * spread)
    ax.set_xlim(middle - half, middle + half)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    digits = 3 if half > 0.05 * middle else 4
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value, digits)))
