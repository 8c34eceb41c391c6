"""Figures of a report that can be drawn in any width.

A `Drawing` is such a figure. It may be a `Grid` of small plots, each a `Panel`. A `Picture` is a
drawing as SVG for report.html.
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
# The size of a panel that is a separate image, in inches.
_PANEL_WIDTH = style.WIDTH / 2
_PANEL_HEIGHT = 1.45
# The left margin of such a panel: the width of each character of the labels, and a gap.
_CHARACTER_WIDTH = 0.075
_LABEL_GAP = 0.12
# The other margins of such a panel.
_RIGHT_MARGIN = 0.16
_BOTTOM_MARGIN = 0.24
_TOP_MARGIN = 0.06
# The height of a grid's legend and axis labels.
_LEGEND_HEIGHT = 0.95


@dataclasses.dataclass(frozen=True)
class Panel:
    """One small plot of one variant, without a title."""

    variant: str
    draw: Callable[[Axes], None]
    notes: Sequence[str] = ()  # lines of the title below the variant's name


@dataclasses.dataclass(frozen=True)
class Grid:
    """Panels with the same axis labels."""

    panels: Sequence[Panel]
    xlabel: str
    ylabel: str
    title_length: int = 40  # the most characters of all titles in a row
    row_height: float = 1.9  # inches

    def draw(self, width: float = style.WIDTH) -> Figure:
        """Draws all panels in one figure, with titles. `width` is in inches."""
        columns = self._num_columns()
        num_rows = style.rows_of(len(self.panels), columns)
        height = self.row_height * num_rows + _LEGEND_HEIGHT
        figure = Figure(figsize=(width, height))
        axes = style.panels(figure, columns, count=len(self.panels))
        for ax, panel in zip(axes, self.panels, strict=True):
            panel.draw(ax)
            name = short(panel.variant, self.title_length // columns)
            title = '\n'.join([name, *panel.notes])
            ax.set_title(title, fontsize=8, fontweight='normal')
        figure.supxlabel(self.xlabel)
        figure.supylabel(self.ylabel)
        style.legend(figure)
        return figure

    def _num_columns(self) -> int:
        """Returns two, or one if two titles would be cut to the same text."""
        columns = min(2, len(self.panels))
        titles = {short(panel.variant, self.title_length // columns) for panel in self.panels}
        are_different = len(titles) == len(self.panels)
        return columns if are_different else 1

    def draw_alone(self) -> list[Figure]:
        """Draws each panel as a separate figure without a title.

        All figures have the same margins.
        """
        figures = []
        longest_label = 0
        for panel in self.panels:
            figure = Figure(figsize=(_PANEL_WIDTH, _PANEL_HEIGHT), layout='none')
            ax = figure.subplots()
            panel.draw(ax)
            labels = ax.yaxis.get_major_formatter().format_ticks(ax.get_yticks())
            for label in labels:
                longest_label = max(longest_label, len(label))
            figures.append(figure)

        # An estimate. matplotlib's layout engine would double the time.
        left_margin = _LABEL_GAP + _CHARACTER_WIDTH * longest_label
        # subplots_adjust takes fractions of the figure.
        for figure in figures:
            figure.subplots_adjust(
                left=left_margin / _PANEL_WIDTH,
                right=1 - _RIGHT_MARGIN / _PANEL_WIDTH,
                bottom=_BOTTOM_MARGIN / _PANEL_HEIGHT,
                top=1 - _TOP_MARGIN / _PANEL_HEIGHT,
            )
        return figures


class Cut(NamedTuple):
    """The number of drawn arms in a figure with too many arms."""

    num_drawn: int  # in a forest plot, of the lowest means and again of the highest
    num_arms: int


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure of a report."""

    stem: str  # the file name without suffix; its first word is the kind of figure
    draw: Callable[[float], Figure]  # draws the figure with a width in inches
    # Arguments of the macro in templates/figures.j2 that makes the title and caption.
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    grid: Grid | None = None  # the panels of a figure of panels
    file_width: float = style.WIDTH  # the width in a file, in inches

    def figure(self, width: float = style.WIDTH) -> Figure:
        """Draws the figure in the report's style. `width` is in inches."""
        with style.style_sheet():
            return self.draw(width)


@dataclasses.dataclass(frozen=True)
class PanelPicture:
    """A panel as SVG, with the text above it."""

    variant: str
    notes: Sequence[str]
    svg: bytes


@dataclasses.dataclass(frozen=True)
class Picture:
    """A drawing as SVG: either panels with a legend, or a figure in two widths."""

    drawing: Drawing
    narrow: bytes = b''
    wide: bytes = b''
    panels: Sequence[PanelPicture] = ()
    legend: bytes = b''


def picture(drawing: Drawing) -> Picture:
    """Draws a figure as SVG.

    A grid becomes an image for each panel and one for the legend. Any other figure is drawn in two
    widths, for narrow and wide screens.
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
        svg = style.render(figure, 'svg')
        panels.append(PanelPicture(panel.variant, panel.notes, svg))
    return Picture(drawing, panels=panels, legend=style.render(legend_figure, 'svg'))


def write_plots(plots: Path, drawings: Sequence[Drawing], formats: Sequence[str]) -> None:
    """Writes each figure in each format to the directory `plots`.

    All other figures in the directory are removed.
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
