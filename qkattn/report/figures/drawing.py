"""A figure of a report before it has a size: pages and files draw it as wide as they need it."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkattn.jobs.output import short
from qkattn.report.figures import style
from qkattn.storage.files import below, write_atomic

FORMATS = ('png', 'pdf', 'svg')
# Inches of a panel that stands alone on a page.
_PANEL_WIDTH = style.WIDTH / 2
_PANEL_HEIGHT = 1.45
# Inches around the axes of such a panel: of a character of a tick's label to the left, of the gap
# between label and axis, and of the other margins, of which that below holds a line of labels.
_CHARACTER = 0.075
_LABEL_GAP = 0.12
_RIGHT = 0.16
_BELOW = 0.24
_ABOVE = 0.06
# Inches of the legend of a grid and of the names of its axes.
_LEGEND_HEIGHT = 0.95


@dataclasses.dataclass(frozen=True)
class Panel:
    """One small plot, which shows one variant; its title is text of the page or of a grid."""

    variant: str
    draw: Callable[[Axes], None]
    notes: Sequence[str] = ()  # lines of the title below the variant


@dataclasses.dataclass(frozen=True)
class Grid:
    """Panels with the same axes. In a file they are one figure, on a page they flow into rows."""

    panels: Sequence[Panel]
    xlabel: str
    ylabel: str
    title_length: int = 40  # characters of a variant in a row of panels, beyond which it is cut
    row_height: float = 1.9  # inches

    def draw(self, width: float = style.WIDTH) -> Figure:
        """All panels in one figure of two columns, or of one where titles need the room."""
        columns = self._columns()
        height = self.row_height * style.rows_of(len(self.panels), columns) + _LEGEND_HEIGHT
        figure = Figure(figsize=(width, height))
        axes = style.panels(figure, columns, len(self.panels))
        for ax, panel in zip(axes, self.panels, strict=True):
            panel.draw(ax)
            name = short(panel.variant, self.title_length // columns)
            ax.set_title('\n'.join([name, *panel.notes]), fontsize=8, fontweight='normal')
        figure.supxlabel(self.xlabel)
        figure.supylabel(self.ylabel)
        style.legend(figure)
        return figure

    def _columns(self) -> int:
        """Two columns, unless their titles would be cut to the same text."""
        columns = min(2, len(self.panels))
        titles = {short(panel.variant, self.title_length // columns) for panel in self.panels}
        return columns if len(titles) == len(self.panels) else 1

    def draw_alone(self) -> list[Figure]:
        """Each panel as a figure of its own without its title, all with axes at the same place.

        The place follows from the longest label of a tick: matplotlib's layout engine, which knows
        it exactly, takes as long as the drawing.
        """
        figures = []
        longest = 0
        for panel in self.panels:
            figure = Figure(figsize=(_PANEL_WIDTH, _PANEL_HEIGHT), layout='none')
            ax = figure.subplots()
            panel.draw(ax)
            labels = ax.yaxis.get_major_formatter().format_ticks(ax.get_yticks())
            longest = max(longest, *(len(label) for label in labels))
            figures.append(figure)
        left = _LABEL_GAP + _CHARACTER * longest
        for figure in figures:
            figure.subplots_adjust(
                left=left / _PANEL_WIDTH,
                right=1 - _RIGHT / _PANEL_WIDTH,
                bottom=_BELOW / _PANEL_HEIGHT,
                top=1 - _ABOVE / _PANEL_HEIGHT,
            )
        return figures


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure of a report: `draw` makes it as wide as so many inches."""

    stem: str  # names its files
    draw: Callable[[float], Figure]
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # fill heading and caption
    grid: Grid | None = None  # what it is made of, if panels
    file_width: float = style.WIDTH  # inches of the figure in a file

    def figure(self, width: float = style.WIDTH) -> Figure:
        """The figure in the style of reports."""
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
    """Draws a figure for a page."""
    if drawing.grid is None:
        narrow = style.render(drawing.figure(style.WIDTH), 'svg')
        wide = style.render(drawing.figure(style.WIDE), 'svg')
        return Picture(drawing, narrow, wide)
    panels = drawing.grid.panels
    with style.style_sheet():
        figures = drawing.grid.draw_alone()
        key = Figure(figsize=(style.WIDTH, 1.0))
        key_height = style.legend(key, axes=[figure.axes[0] for figure in figures])
        key.set_figheight(key_height)
    shown = [
        PanelPicture(panel.variant, panel.notes, style.render(figure, 'svg'))
        for panel, figure in zip(panels, figures, strict=True)
    ]
    return Picture(drawing, panels=shown, legend=style.render(key, 'svg'))


def write_plots(plots: Path, drawn: Sequence[Drawing], formats: Sequence[str]) -> None:
    """Writes each figure in each of the formats; removes those of an earlier report."""
    plots = below(plots.parent, plots.name)
    written = set()
    for drawing in drawn:
        for kind in formats:
            path = plots / f'{drawing.stem}.{kind}'
            written.add(write_atomic(path, style.render(drawing.figure(drawing.file_width), kind)))
    for kind in FORMATS:
        for path in plots.glob(f'*.{kind}'):
            if path not in written:
                path.unlink()
