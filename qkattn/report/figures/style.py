"""How figures look: palette, one style per variant, and rendering to PNG and theme-aware SVG."""

import dataclasses
import io
import re
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import isotonic_regression

# Six hues chosen for distance under simulated deuteranopia and protanopia (Machado, Oliveira and
# Fernandes 2009: at least 16 CIELAB units between any two on white, 20 on dark) and for 3:1
# contrast with the page. Beyond six, marker and dashes tell apart.
HUES = ('#1d4fa0', '#b93a1a', '#1f9f8c', '#c46be7', '#999710', '#6d2138')
HUES_DARK = ('#4f8df0', '#f0824a', '#35d0b5', '#dba6f5', '#f0e27a', '#c0566e')
INK, MUTED, GRID, SURFACE = '#1b1f24', '#5d6570', '#dfe3e8', '#fffffe'
# The names are those of the page's CSS variables.
LIGHT = {'ink': INK, 'muted': MUTED, 'grid': GRID, 'surface': SURFACE}
LIGHT |= {f'hue-{index}': hue for index, hue in enumerate(HUES)}
DARK = {'ink': '#e6e9ed', 'muted': '#9aa4b0', 'grid': '#343b45', 'surface': '#15181d'}
DARK |= {f'hue-{index}': hue for index, hue in enumerate(HUES_DARK)}
_COLOURS = {
    **dict.fromkeys(('axes.edgecolor', 'xtick.color', 'ytick.color'), MUTED),
    **dict.fromkeys(('axes.labelcolor', 'text.color'), INK),
    **dict.fromkeys(('xtick.labelcolor', 'ytick.labelcolor'), INK),
    'grid.color': GRID,
}

MARKERS = ('o', 's', '^', 'v', 'P', 'X')
DASHES: tuple[Any, ...] = (
    'solid',
    (0, (4, 1.5)),
    (0, (1.2, 1.2)),
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (8, 2)),
    (0, (2.5, 1, 1, 1, 1, 1)),
)
# Inches of a figure with one panel.
WIDTH = 6.6
# Points between the labels of two lines.
LABEL_GAP = 11.5


@dataclasses.dataclass(frozen=True)
class VariantStyle:
    """Colour, marker and dashes of one variant, the same in every figure."""

    colour: str
    marker: str
    dashes: Any
    width: float


Look = Mapping[str, VariantStyle]


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure; `stem` names its files, `values` are what its heading and caption need."""

    figure: Figure
    stem: str
    values: Mapping[str, Any]

    @classmethod
    def of(cls, figure: Figure, stem: str, **values: Any) -> 'Drawing':
        return cls(figure, stem, values)


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A figure as PNG, as an SVG document on white, and as `svg`, an element of the page.

    The colours of `svg` are CSS variables, so that one figure reads on light and on dark.
    """

    png: bytes
    svg: str
    paper_svg: str


def style_sheet() -> AbstractContextManager[None]:
    """The context in which figures are built and rendered."""
    return matplotlib.style.context([Path(__file__).with_name('qkattn.mplstyle'), _COLOURS])


def styles(variants: Sequence[str], baseline: str | None) -> dict[str, VariantStyle]:
    """A style for each variant by its place in the study; the baseline is ink-coloured."""
    chosen = {}
    for index, variant in enumerate(v for v in variants if v != baseline):
        turn, hue = divmod(index, len(HUES))
        turn %= len(MARKERS)
        chosen[variant] = VariantStyle(HUES[hue], MARKERS[turn], DASHES[turn], 1.5)
    if baseline is not None:
        chosen[baseline] = VariantStyle(INK, 'D', 'solid', 2.0)
    return chosen


def short(name: str, limit: int = 34) -> str:
    """`name` on one line, its middle left out when it is longer than `limit`."""
    name = ' '.join(name.split())
    half = (limit - 1) // 2
    return name if len(name) <= limit else f'{name[:half]}…{name[-half:]}'


def panels(figure: Figure, columns: int, count: int, **share: Any) -> list[Axes]:
    """The first `count` axes of a grid with `columns`; the others are hidden."""
    rows = -(-count // columns)
    axes = list(figure.subplots(rows, columns, squeeze=False, **share).flat)
    for ax in axes[count:]:
        ax.set_visible(False)
    # A panel with nothing below it carries the column's tick labels.
    for ax in axes[max(count - columns, 0) :]:
        ax.tick_params(labelbottom=True)
    return axes[:count]


def label_right(ax: Axes, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes (x, y, text, colour) labels in a column right of the axes, none over another.

    Each label stays as near its y as the others allow (isotonic regression) and is tied to its
    point by a thin line. Call it once the y limits are final.
    """
    if not labels:
        return
    low, high = ax.get_ylim()
    gap = (high - low) * LABEL_GAP / (ax.figure.get_figheight() * 72 * 0.8)
    ordered = sorted(labels, key=lambda label: label[1])
    wanted = [y - index * gap for index, (_, y, _, _) in enumerate(ordered)]
    top = max(high - (len(ordered) - 1) * gap, low)
    placed = isotonic_regression(wanted).x.clip(low, top)
    tie = {'arrowstyle': '-', 'lw': 0.6, 'alpha': 0.7, 'relpos': (0, 0.5), 'shrinkA': 1}
    for index, (x, y, text, colour) in enumerate(ordered):
        ax.annotate(
            short(text),
            xy=(x, y),
            xytext=(1.06, placed[index] + index * gap),
            textcoords=('axes fraction', 'data'),
            va='center',
            fontsize=8.5,
            annotation_clip=False,
            arrowprops=tie | {'color': colour},
        )


def render(drawing: Drawing) -> Rendered:
    """PNG and SVG on white, and themed SVG."""
    figure = drawing.figure
    png, svg = io.BytesIO(), io.BytesIO()
    with style_sheet():
        figure.savefig(png, format='png', dpi=160, facecolor='white', metadata={'Software': None})
        # The layout is the same in every format; computing it takes as long as drawing.
        figure.set_layout_engine(None)
        # No date: the same numbers give the same bytes.
        figure.savefig(svg, format='svg', facecolor='none', metadata={'Date': None})
    document = svg.getvalue().decode()
    page = '<rect width="100%" height="100%" fill="#ffffff"/>'
    paper = re.sub(r'<svg\b[^>]*>', rf'\g<0>\n {page}', document, count=1)
    paper = paper.replace(SURFACE, '#ffffff')
    return Rendered(png.getvalue(), _inline(document, drawing.stem), paper)


def _inline(svg: str, stem: str) -> str:
    """An SVG document as an element of an HTML page: own ids, no outside names, themed colours."""
    svg = svg[svg.index('<svg') :]
    svg = re.sub(r'<!--.*?-->\s*|<metadata>.*?</metadata>\s*', '', svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', '', svg)
    svg = re.sub(r'\bid="', f'id="{stem}-', svg)
    svg = re.sub(r'((?:xlink:)?href="#|url\(#)', rf'\g<1>{stem}-', svg)
    for name, colour in LIGHT.items():
        svg = re.sub(colour, f'var(--{name})', svg, flags=re.IGNORECASE)
    width = float(re.findall(r'<svg[^>]*\swidth="([\d.]+)pt"', svg)[0])
    # Its text stays near the page's: a little larger on a wide screen, not tiny on a narrow one.
    size = f'<svg style="max-width:{1.2 * width:.0f}pt;min-width:{0.75 * width:.0f}pt"'
    return re.sub(r'\s(width|height)="[\d.]+pt"', '', svg, count=2).replace('<svg', size, 1).strip()
