"""The style of figures: the palette, one style per variant, panels, legends, and formats."""

import io
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
# Keywords of a line at zero, at the baseline's mean, at a chosen value.
REFERENCE: dict[str, Any] = {'color': INK, 'linewidth': 1, 'linestyle': (0, (4, 2)), 'zorder': 1}
# Keywords of the dots of seeds.
SEEDS: dict[str, Any] = {'s': 8, 'alpha': 0.6, 'linewidths': 0, 'zorder': 3, 'label': 'one seed'}
# The label of an arrowhead at an edge.
BEYOND = 'off the scale'
# A label that several styles share shows the marks of so many of them in a legend.
MARKS_OF_LABEL = 3
# Characters that an inch of a legend holds, and those that the mark beside a label takes.
_CHARACTERS = 13.9
_MARK = 6
_METADATA = {'png': {'Software': None}, 'pdf': {'CreationDate': None}, 'svg': {'Date': None}}


def style_sheet() -> AbstractContextManager[None]:
    """The context in which figures are built and rendered."""
    return matplotlib.style.context(Path(__file__).with_name('qkattn.mplstyle'))


def styles(variants: Sequence[str], baseline: str | None) -> dict[str, dict[str, Any]]:
    """A style for each variant, from the palette in order; the baseline is black and thick.

    After each turn of the hues, the markers move on by one, so that 36 variants differ.
    """
    by_variant: dict[str, dict[str, Any]] = {}
    others = [variant for variant in variants if variant != baseline]
    for index, variant in enumerate(others):
        turn = index // len(HUES)
        marker = MARKERS[(index + turn) % len(MARKERS)]
        by_variant[variant] = {'color': HUES[index % len(HUES)], 'marker': marker}
    if baseline is not None:
        by_variant[baseline] = {'color': INK, 'marker': 'D', 'linewidth': 2.0}
    return by_variant


def rows_of(count: int, columns: int) -> int:
    """How many rows a grid of `count` panels has."""
    return -(-count // columns)


def panels(figure: Figure, columns: int, count: int, **share: Any) -> list[Axes]:
    """The first `count` axes of a grid with `columns`; the others are removed."""
    grid = figure.subplots(rows_of(count, columns), columns, squeeze=False, **share)
    axes = list(grid.flat)
    for ax in axes[count:]:
        ax.remove()
    lowest_of_columns = axes[max(count - columns, 0) : count]
    for ax in lowest_of_columns:
        ax.tick_params(labelbottom=True)
    return axes[:count]


def legend(
    figure: Figure,
    loc: Literal['upper', 'lower'] = 'upper',
    axes: Iterable[Axes] | None = None,
) -> float:
    """Adds a legend with one entry for each label; returns its height in inches.

    The labels are those of `axes`, by default of the figure's own. A label of several variants, as
    'mean', stands beside the marks of the first few. There are as many columns as labels have room.
    """
    handles_by_label: dict[str, list[Any]] = {}
    looks_by_label: dict[str, set[str]] = {}
    for ax in figure.axes if axes is None else axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles = handles_by_label.setdefault(label, [])
            looks = looks_by_label.setdefault(label, set())
            look = _look(handle)
            if look not in looks and len(handles) < MARKS_OF_LABEL:
                looks.add(look)
                handles.append(handle)
    lengths = sorted(len(label) for label in handles_by_label)
    room = _CHARACTERS * figure.get_figwidth()
    columns = 1
    while columns < len(lengths) and sum(lengths[-columns - 1 :]) + _MARK * (columns + 1) <= room:
        columns += 1
    figure.legend(
        [tuple(handles) for handles in handles_by_label.values()],
        list(handles_by_label),
        handler_map={tuple: HandlerTuple(ndivide=None)},
        loc=f'outside {loc} center',
        ncols=columns,
    )
    return 0.1 + 0.18 * rows_of(len(lengths), columns)


def _look(handle: Any) -> str:
    """What tells the marks of two artists apart: their colour, and the marker of a line."""
    color = handle.get_color() if hasattr(handle, 'get_color') else handle.get_facecolor()
    marker = handle.get_marker() if hasattr(handle, 'get_marker') else ''
    return f'{color} {marker}'


def render(figure: Figure, kind: str) -> bytes:
    """A figure as 'png', 'pdf' or 'svg'; the same numbers give the same bytes."""
    content = io.BytesIO()
    with style_sheet():
        if kind == 'svg':
            # Figure.savefig draws twice, the first time to learn a size that is known here.
            FigureCanvasSVG(figure).print_svg(content, metadata=_METADATA[kind])
        else:
            figure.savefig(content, format=kind, dpi=160, metadata=_METADATA[kind])
    return content.getvalue()
