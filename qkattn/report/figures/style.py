"""The style of figures: colours, a style for each variant, panels, legends and formats."""

import io
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.legend_handler import HandlerTuple

# Six hues that differ under simulated deuteranopia and protanopia (Machado, Oliveira and Fernandes
# 2009) by at least 16 CIELAB units on white and 20 on dark, with 3:1 contrast to the page.
HUES = ('#1d4fa0', '#b93a1a', '#1f9f8c', '#c46be7', '#999710', '#6d2138')
HUES_DARK = ('#4f8df0', '#f0824a', '#35d0b5', '#dba6f5', '#f0e27a', '#c0566e')
INK = '#1b1f24'
MUTED = '#5d6570'
GRID = '#dfe3e8'
# CSS variables of pages.
LIGHT = {'ink': INK, 'muted': MUTED, 'grid': GRID, 'surface': '#fffffe'}
LIGHT |= {f'hue-{index}': hue for index, hue in enumerate(HUES)}
DARK = {'ink': '#e6e9ed', 'muted': '#9aa4b0', 'grid': '#343b45', 'surface': '#15181d'}
DARK |= {f'hue-{index}': hue for index, hue in enumerate(HUES_DARK)}
MARKERS = ('o', 's', '^', 'v', 'P', 'X')
# Inches of a figure in a file or on a narrow page, so that text has 11 pixels or more on a screen
# of 400 CSS pixels.
WIDTH = 3.6
# Inches of a figure on a wide page.
WIDE = 11.0
# The style of each variant, as keywords of `Axes.plot`.
Styles = Mapping[str, dict[str, Any]]
# Keywords of a line at zero, or at a chosen value.
REFERENCE: dict[str, Any] = {'color': INK, 'linewidth': 1, 'linestyle': (0, (4, 2)), 'zorder': 1}
# Keywords of the dots of seeds.
SEEDS: dict[str, Any] = {'s': 8, 'alpha': 0.6, 'linewidths': 0, 'zorder': 3, 'label': 'one seed'}
# The label of an arrowhead for numbers outside the axis.
BEYOND = 'off the scale'
# The most marks beside a legend label that several styles share.
MARKS_OF_LABEL = 3
# The height of a legend's row, and of all its margins, in inches.
_LEGEND_ROW = 0.18
_LEGEND_MARGIN = 0.1
# The text width of a legend.
_CHARACTERS_PER_INCH = 13.9
# The width of the marks beside a label, in characters.
_MARK_CHARACTERS = 6
_METADATA = {'png': {'Software': None}, 'pdf': {'CreationDate': None}, 'svg': {'Date': None}}


def style_sheet() -> AbstractContextManager[None]:
    """Returns the matplotlib style context in which figures are drawn and rendered."""
    return matplotlib.style.context(Path(__file__).with_name('qkattn.mplstyle'))


def styles(variants: Sequence[str], baseline: str | None) -> dict[str, dict[str, Any]]:
    """Returns a style for each variant, as keywords of `Axes.plot`.

    The styles of 36 variants differ. The baseline is black and thick.
    """
    style_by_variant: dict[str, dict[str, Any]] = {}
    others = [variant for variant in variants if variant != baseline]
    for index, variant in enumerate(others):
        # When all hues are used, use them again with the next marker.
        num_rounds, hue_index = divmod(index, len(HUES))
        marker_index = (hue_index + num_rounds) % len(MARKERS)
        style_by_variant[variant] = {'color': HUES[hue_index], 'marker': MARKERS[marker_index]}
    if baseline is not None:
        style_by_variant[baseline] = {'color': INK, 'marker': 'D', 'linewidth': 2.0}
    return style_by_variant


def rows_of(count: int, columns: int) -> int:
    """Returns how many rows a grid of `count` panels has."""
    return math.ceil(count / columns)


def panels(figure: Figure, columns: int, count: int, **keywords: Any) -> list[Axes]:
    """Adds a grid of axes to a figure, row by row, and returns the axes.

    Args:
        figure: The figure.
        columns: The number of columns.
        count: The number of axes. The last row may be incomplete.
        **keywords: Arguments of `Figure.subplots`, such as `sharex`.
    """
    grid = figure.subplots(rows_of(count, columns), columns, squeeze=False, **keywords)
    axes = list(grid.flat)
    for ax in axes[count:]:
        ax.remove()
    # With a shared x axis, matplotlib labels only the last row, which may be incomplete.
    lowest_of_each_column = axes[max(count - columns, 0) : count]
    for ax in lowest_of_each_column:
        ax.tick_params(labelbottom=True)
    return axes[:count]


def legend(
    figure: Figure,
    loc: Literal['upper', 'lower'] = 'upper',
    axes: Iterable[Axes] | None = None,
) -> float:
    """Adds a legend with one entry for each label; returns its height in inches.

    If several variants share a label, the entry shows their marks side by side, at most
    MARKS_OF_LABEL.

    Args:
        figure: The figure that gets the legend.
        loc: Whether the legend is above ('upper') or below ('lower') the axes.
        axes: The axes with the labels, by default all axes of the figure.
    """
    if axes is None:
        axes = figure.axes
    handles_by_label = _handles_by_label(axes)
    labels = list(handles_by_label)
    columns = _legend_columns(labels, figure.get_figwidth())
    figure.legend(
        [tuple(handles) for handles in handles_by_label.values()],
        labels,
        handler_map={tuple: HandlerTuple(ndivide=None)},  # draws a tuple side by side
        loc=f'outside {loc} center',
        ncols=columns,
    )
    return _LEGEND_MARGIN + _LEGEND_ROW * rows_of(len(labels), columns)


def _handles_by_label(axes: Iterable[Axes]) -> dict[str, list[Any]]:
    """Returns the legend handles of each label: the first MARKS_OF_LABEL that look different."""
    handles_by_label: dict[str, list[Any]] = {}
    marks_by_label: dict[str, set[str]] = {}
    for ax in axes:
        handles, labels = ax.get_legend_handles_labels()
        for handle, label in zip(handles, labels, strict=True):
            handles_of_label = handles_by_label.setdefault(label, [])
            marks = marks_by_label.setdefault(label, set())
            mark = _mark(handle)
            if mark not in marks and len(handles_of_label) < MARKS_OF_LABEL:
                marks.add(mark)
                handles_of_label.append(handle)
    return handles_by_label


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """Returns the number of legend columns that fit into a width in inches."""
    available_characters = _CHARACTERS_PER_INCH * width
    lengths = sorted((len(label) for label in labels), reverse=True)
    columns = 1
    while columns < len(lengths):
        more_columns = columns + 1
        # In the worst case, each column has one of the longest labels.
        needed_characters = sum(lengths[:more_columns]) + _MARK_CHARACTERS * more_columns
        if needed_characters > available_characters:
            break
        columns = more_columns
    return columns


def _mark(handle: Any) -> str:
    """Returns the colour and marker of a legend handle as text."""
    color = handle.get_color() if hasattr(handle, 'get_color') else handle.get_facecolor()
    marker = handle.get_marker() if hasattr(handle, 'get_marker') else ''
    return f'{color} {marker}'


def render(figure: Figure, kind: str) -> bytes:
    """Renders a figure as 'png', 'pdf' or 'svg'. The bytes are reproducible."""
    content = io.BytesIO()
    metadata = _METADATA[kind]  # without a date or version
    with style_sheet():
        if kind == 'svg':
            # Faster than Figure.savefig, which draws the figure twice.
            FigureCanvasSVG(figure).print_svg(content, metadata=metadata)
        else:
            figure.savefig(content, format=kind, dpi=160, metadata=metadata)
    return content.getvalue()
