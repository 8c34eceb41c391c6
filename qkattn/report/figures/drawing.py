"""A figure of a report before it has a size: pages and files draw it as wide as they need it.

A `Drawing` is such a figure. Many drawings are a `Grid` of small plots, each of them a `Panel`. A
`Picture` is a drawing as SVG for report.html.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkattn.jobs.output import short
from qkattn.report.figures import style
from qkattn.storage.files import join_without_links, write_atomic

FORMATS = ('png', 'pdf', 'svg')
# Inches of a panel that stands alone on a page.
_PANEL_WIDTH = style.WIDTH / 2
_PANEL_HEIGHT = 1.45
# Inches to the left of the axes of such a panel, where the labels of the y axis stand.
_CHARACTER_WIDTH = 0.075
_LABEL_GAP = 0.12
# Inches of its other margins. The labels of the x axis stand in the bottom margin.
_RIGHT_MARGIN = 0.16
_BOTTOM_MARGIN = 0.24
_TOP_MARGIN = 0.06
# Inches of a grid's legend, together with the names of its axes.
_LEGEND_HEIGHT = 0.95


@dataclasses.dataclass(frozen=True)
class Panel:
    """One small plot of one variant. Its title is drawn by a grid, or written by a page."""

    variant: str
    draw: Callable[[Axes], None]
    notes: Sequence[str] = ()  # lines of the title below the variant


@dataclasses.dataclass(frozen=True)
class Grid:
    """Panels with the same axes. In a file they are one figure, on a page they flow into rows."""

    panels: Sequence[Panel]
    xlabel: str
    ylabel: str
    title_length: int = 40  # the most characters of the titles in a row of panels, together
    row_height: float = 1.9  # inches

    def draw(self, width: float = style.WIDTH) -> Figure:
        """Draws all panels in one figure. `width` is in inches."""
        columns = self._num_columns()
        height = self.row_height * style.rows_of(len(self.panels), columns) + _LEGEND_HEIGHT
        figure = Figure(figsize=(width, height))
        axes = style.panels(figure, columns, len(self.panels))
        for ax, panel in zip(axes, self.panels, strict=True):
            panel.draw(ax)
            # The titles of panels beside each other share the width of the figure.
            name = short(panel.variant, self.title_length // columns)
            title = '\n'.join([name, *panel.notes])
            ax.set_title(title, fontsize=8, fontweight='normal')
        figure.supxlabel(self.xlabel)
        figure.supylabel(self.ylabel)
        style.legend(figure)
        return figure

    def _num_columns(self) -> int:
        """Returns the number of columns of the figure.

        It is two, or one if two titles would be cut to the same text.
        """
        columns = min(2, len(self.panels))
        titles = {short(panel.variant, self.title_length // columns) for panel in self.panels}
        are_different = len(titles) == len(self.panels)
        return columns if are_different else 1

    def draw_alone(self) -> list[Figure]:
        """Draws each panel as a figure of its own, without its title.

        The axes have the same place in all figures. The left margin is estimated from the number of
        characters of the longest label of a y axis. matplotlib's layout engine would measure it,
        but takes as long as the drawing.
        """
        figures = []
        longest_label = 0
        for panel in self.panels:
            figure = Figure(figsize=(_PANEL_WIDTH, _PANEL_HEIGHT), layout='none')
            ax = figure.subplots()
            panel.draw(ax)
            for label in ax.yaxis.get_major_formatter().format_ticks(ax.get_yticks()):
                longest_label = max(longest_label, len(label))
            figures.append(figure)

        # subplots_adjust takes fractions of the figure.
        left_margin = _LABEL_GAP + _CHARACTER_WIDTH * longest_label
        for figure in figures:
            figure.subplots_adjust(
                left=left_margin / _PANEL_WIDTH,
                right=1 - _RIGHT_MARGIN / _PANEL_WIDTH,
                bottom=_BOTTOM_MARGIN / _PANEL_HEIGHT,
                top=1 - _TOP_MARGIN / _PANEL_HEIGHT,
            )
        return figures


class Cut(NamedTuple):
    """How many arms a figure draws, if there are too many to draw all; the caption says so.

    A forest plot draws `num_drawn` arms with the lowest means, and as many with the highest.
    """

    num_drawn: int
    num_arms: int


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure of a report."""

    stem: str  # the name of its files without the ending; its first word is the kind of figure
    draw: Callable[[float], Figure]  # draws the figure with a width in inches
    # The values for the title and the caption, which are macros of templates/figures.j2.
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    grid: Grid | None = None  # its panels, if it is made of panels
    file_width: float = style.WIDTH  # inches of the figure in a file

    def figure(self, width: float = style.WIDTH) -> Figure:
        """Draws the figure in the style of reports. `width` is in inches."""
        with style.style_sheet():
            return self.draw(width)


@dataclasses.dataclass(frozen=True)
class PanelPicture:
    """A panel of a page as SVG, with the text above it."""

    variant: str
    notes: Sequence[str]
    svg: bytes


@dataclasses.dataclass(frozen=True)
class Picture:
    """A drawing as a page shows it, in SVG: panels with a legend, or a figure in two widths."""

    drawing: Drawing
    narrow: bytes = b''
    wide: bytes = b''
    panels: Sequence[PanelPicture] = ()
    legend: bytes = b''


def picture(drawing: Drawing) -> Picture:
    """Draws a figure as SVG for a page.

    A figure of panels becomes one image for each panel and one for the legend, which the page
    arranges. Any other figure is drawn in two widths, for narrow and for wide screens.
    """
    if drawing.grid is None:
        narrow = style.render(drawing.figure(style.WIDTH), 'svg')
        wide = style.render(drawing.figure(style.WIDE), 'svg')
        return Picture(drawing, narrow=narrow, wide=wide)

    with style.style_sheet():
        figures = drawing.grid.draw_alone()
        axes = [figure.axes[0] for figure in figures]
        legend_figure = Figure(figsize=(style.WIDTH, 1.0))
        legend_height = style.legend(legend_figure, axes=axes)
        legend_figure.set_figheight(legend_height)
    panels = []
    for panel, figure in zip(drawing.grid.panels, figures, strict=True):
        panels.append(PanelPicture(panel.variant, panel.notes, style.render(figure, 'svg')))
    return Picture(drawing, panels=panels, legend=style.render(legend_figure, 'svg'))


def write_plots(plots: Path, drawings: Sequence[Drawing], formats: Sequence[str]) -> None:
    """Writes each figure in each of the formats into the folder `plots`.

    Removes all other figures from the folder, such as those of an earlier report.
    """
    plots = join_without_links(plots.parent, plots.name)
    written_paths = set()
    for drawing in drawings:
        for plot_format in formats:
            path = plots / f'{drawing.stem}.{plot_format}'
            content = style.render(drawing.figure(drawing.file_width), plot_format)
            written_paths.add(write_atomic(path, content))
    for plot_format in FORMATS:
        for path in plots.glob(f'*.{plot_format}'):
            if path not in written_paths:
                path.unlink()
