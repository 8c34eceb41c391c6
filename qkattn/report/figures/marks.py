"""The marks that figures share: an arm's mean, interval and seeds, words for it, legend entries."""

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from qkattn.report.figures.style import INK, MUTED, SURFACE, VariantStyle, short

# Keywords of a line at zero, at the baseline's mean, at a chosen value.
REFERENCE = {'color': INK, 'linewidth': 1, 'linestyle': (0, (4, 2)), 'zorder': 1}
# Points across.
MEAN_SIZE = 6.5


def mean_mark(style: VariantStyle, size: float = MEAN_SIZE) -> dict[str, Any]:
    """Keywords of `Axes.plot` for an arm's means."""
    return {
        'color': style.colour,
        'marker': style.marker,
        'markersize': size,
        'markeredgecolor': SURFACE,
        'markeredgewidth': 0.8,
        'zorder': 4,
    }


def seed_dots(ax: Axes, x: Sequence[float], y: Sequence[float], style: VariantStyle) -> None:
    """Draws a small dot for each seed."""
    ax.scatter(x, y, s=8, color=style.colour, alpha=0.6, linewidths=0, zorder=3)


def seeds_beyond(ax: Axes, y: float, style: VariantStyle, edge: float, marker: str) -> None:
    """Draws one arrowhead at the edge of the axes for the seeds that lie beyond it."""
    ax.plot(edge, y + 0.28, marker=marker, markersize=3.5, color=style.colour, clip_on=False)


def estimate_line(
    ax: Axes,
    y: float,
    style: VariantStyle,
    mean: float,
    low: float | None,
    high: float | None,
    seeds: Sequence[float],
) -> None:
    """Draws one line of a forest plot: mean and, where there is one, interval; seeds below them."""
    if low is not None:
        ax.plot([low, high], [y, y], color=style.colour, linewidth=2, solid_capstyle='butt')
    # On top of the interval they would be hidden.
    seed_dots(ax, seeds, [y + 0.28] * len(seeds), style)
    # One at the edge of the axes is drawn whole.
    ax.plot(mean, y, clip_on=False, **mean_mark(style))


def reason_text(ax: Axes, y: float, text: str) -> None:
    """Writes at height `y` why there is nothing to draw."""
    ax.annotate(
        text,
        (0.02, y),
        xycoords=('axes fraction', 'data'),
        va='center',
        fontsize=8,
        color=MUTED,
        style='italic',
        zorder=5,
        bbox={'facecolor': SURFACE, 'edgecolor': 'none', 'pad': 1},
    )


def text_right(ax: Axes, y: float, text: str, inches: float = 0.0, **font: object) -> None:
    """Writes `text` at height `y`, so far right of the axes."""
    ax.annotate(
        text,
        (1.0, y),
        xytext=(8 + 72 * inches, 0),
        xycoords=('axes fraction', 'data'),
        textcoords='offset points',
        va='center',
        annotation_clip=False,
        **font,
    )


def name_lines(ax: Axes, arms: Sequence[str], limit: int = 34) -> None:
    """Names the lines at y 0, 1, ... of a forest plot, the first at the top."""
    ax.set_yticks(range(len(arms)), [short(arm, limit) for arm in arms])
    ax.set_ylim(len(arms) - 0.4, -0.6)
    ax.tick_params(axis='y', length=0)


def panels(figure: Figure, rows: int, columns: int, count: int, **share: bool) -> list[Axes]:
    """The first `count` of rows by columns axes; the others are not seen."""
    axes = list(figure.subplots(rows, columns, squeeze=False, **share).flat)
    for ax in axes[count:]:
        ax.set_visible(False)
    # A panel with nothing below it carries the column's tick labels.
    for ax in axes[max(count - columns, 0) :]:
        ax.tick_params(labelbottom=True)
    return axes[:count]


def dot_handle(label: str, size: float, marker: str = 'o', **keywords: object) -> Line2D:
    """The legend entry of a mark that every arm has in its own colour."""
    plain = {'color': MUTED, 'linestyle': 'none', 'markeredgewidth': 0}
    return Line2D([], [], marker=marker, markersize=size, label=label, **plain, **keywords)


def mean_handles(intervals: bool, mean: str = 'mean', size: float = MEAN_SIZE) -> list[Line2D]:
    """The legend entries of means, seeds and, where there are any, intervals."""
    handles = [dot_handle(mean, size), dot_handle('one seed', 3, alpha=0.6)]
    if intervals:
        handles.append(Line2D([], [], color=MUTED, linewidth=2, label='95 % t interval'))
    return handles
