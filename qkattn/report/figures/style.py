"""The style of figures: the palette, one style per variant, panels, legends, and formats."""

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

# Six hues chosen for distance under simulated deuteranopia and protanopia (Machado, Oliveira and
# Fernandes 2009: at least 16 CIELAB units between any two on white, 20 on dark) and for 3:1
# contrast with the page. Beyond six, markers tell apart.
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
# Inches of a figure in a file or on a narrow page, where its text has 11 pixels or more on a screen
# of 400 CSS pixels.
WIDTH = 3.6
# Inches of a figure that takes the width of a page on a wide screen.
WIDE = 11.0
# The keywords of `Axes.plot` of each variant, the same in every figure of a report.
Styles = Mapping[str, dict[str, Any]]
# Keywords of a line at zero, or at a chosen value.
REFERENCE: dict[str, Any] = {'color': INK, 'linewidth': 1, 'linestyle': (0, (4, 2)), 'zorder': 1}
# Keywords of the dots of seeds.
SEEDS: dict[str, Any] = {'s': 8, 'alpha': 0.6, 'linewidths': 0, 'zorder': 3, 'label': 'one seed'}
# The label of an arrowhead at an edge.
BEYOND = 'off the scale'
# The most marks that a legend shows beside one label, if several styles share the label.
MARKS_OF_LABEL = 3
# Inches of the height of a legend: of each row, and of its margins together.
_LEGEND_ROW = 0.18
_LEGEND_MARGIN = 0.1
# How many characters fit into an inch of a legend.
_CHARACTERS_PER_INCH = 13.9
# The room for the marks beside a label, in characters.
_MARK_CHARACTERS = 6
_METADATA = {'png': {'Software': None}, 'pdf': {'CreationDate': None}, 'svg': {'Date': None}}


def style_sheet() -> AbstractContextManager[None]:
    """Returns the context in which figures are built and rendered."""
    return matplotlib.style.context(Path(__file__).with_name('qkattn.mplstyle'))


def styles(variants: Sequence[str], baseline: str | None) -> dict[str, dict[str, Any]]:
    """Returns a style for each variant. The baseline is black and thick.

    Variants 0 to 5 have the hues 0 to 5 and the markers 0 to 5. Variants 6 to 11 have the hues
    again, each with the next marker: variant 6 has hue 0 and marker 1, and variant 11 has hue 5 and
    marker 0. So the styles of 36 variants differ.
    """
    style_by_variant: dict[str, dict[str, Any]] = {}
    others = [variant for variant in variants if variant != baseline]
    for index, variant in enumerate(others):
        # How many earlier variants have the same hue.
        num_earlier = index // len(HUES)
        hue_index = index % len(HUES)
        marker_index = (hue_index + num_earlier) % len(MARKERS)
        style_by_variant[variant] = {'color': HUES[hue_index], 'marker': MARKERS[marker_index]}
    if baseline is not None:
        style_by_variant[baseline] = {'color': INK, 'marker': 'D', 'linewidth': 2.0}
    return style_by_variant


def rows_of(count: int, columns: int) -> int:
    """Returns how many rows a grid of `count` panels has."""
    return math.ceil(count / columns)


def panels(figure: Figure, columns: int, count: int, **keywords: Any) -> list[Axes]:
    """Adds a grid of `count` axes with `columns` columns to a figure; returns the axes.

    The last row may be incomplete. `keywords` go to `Figure.subplots`, for example `sharex`.
    """
    grid = figure.subplots(rows_of(count, columns), columns, squeeze=False, **keywords)
    axes = list(grid.flat)
    for ax in axes[count:]:
        ax.remove()
    # With a shared x axis, matplotlib labels only the last row, which may be incomplete. Label the
    # lowest axes of each column instead: of 5 axes in 2 columns, these are axes 3 and 4.
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

    Several variants may share a label, such as 'mean'. Its entry shows the marks of the first
    MARKS_OF_LABEL of them.

    Args:
      figure: the figure that gets the legend.
      loc: whether the legend is above or below the axes.
      axes: the axes with the labels, by default those of the figure.
    """
    if axes is None:
        axes = figure.axes
    handles_by_label = _handles_by_label(axes)
    labels = list(handles_by_label)
    columns = _legend_columns(labels, figure.get_figwidth())
    figure.legend(
        [tuple(handles) for handles in handles_by_label.values()],
        labels,
        # Draws the handles of a tuple side by side.
        handler_map={tuple: HandlerTuple(ndivide=None)},
        loc=f'outside {loc} center',
        ncols=columns,
    )
    return _LEGEND_MARGIN + _LEGEND_ROW * rows_of(len(labels), columns)


def _handles_by_label(axes: Iterable[Axes]) -> dict[str, list[Any]]:
    """Returns the drawn objects (handles) that stand for each label in a legend.

    These are the first MARKS_OF_LABEL handles of the label whose marks look different.
    """
    handles_by_label: dict[str, list[Any]] = {}
    marks_by_label: dict[str, set[str]] = {}
    for ax in axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles = handles_by_label.setdefault(label, [])
            marks = marks_by_label.setdefault(label, set())
            mark = _mark(handle)
            if mark not in marks and len(handles) < MARKS_OF_LABEL:
                marks.add(mark)
                handles.append(handle)
    return handles_by_label


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """Returns how many columns of a legend fit into a width in inches.

    A column is as wide as its longest label. In the worst case, the longest labels of the legend
    are in different columns, so these have to fit beside each other.
    """
    available_characters = _CHARACTERS_PER_INCH * width
    lengths = sorted((len(label) for label in labels), reverse=True)
    columns = 1
    while columns < len(lengths):
        # Try one column more.
        longest = lengths[: columns + 1]
        if sum(longest) + _MARK_CHARACTERS * len(longest) > available_characters:
            break
        columns += 1
    return columns


def _mark(handle: Any) -> str:
    """Returns a text that is equal for handles that look the same: colour, and marker of a line."""
    color = handle.get_color() if hasattr(handle, 'get_color') else handle.get_facecolor()
    marker = handle.get_marker() if hasattr(handle, 'get_marker') else ''
    return f'{color} {marker}'


def render(figure: Figure, kind: str) -> bytes:
    """Renders a figure as 'png', 'pdf' or 'svg'. The same figure always gives the same bytes."""
    content = io.BytesIO()
    with style_sheet():
        if kind == 'svg':
            # Figure.savefig draws twice, the first time to learn a size that is known here.
            FigureCanvasSVG(figure).print_svg(content, metadata=_METADATA[kind])
        else:
            figure.savefig(content, format=kind, dpi=160, metadata=_METADATA[kind])
    return content.getvalue()
