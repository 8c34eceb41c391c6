"""How figures look: palette, one style per variant, and rendering to PNG and theme-aware SVG."""

import dataclasses
import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from scipy.optimize import isotonic_regression

INK, MUTED, GRID, SURFACE = '#1b1f24', '#5d6570', '#dfe3e8', '#fffffe'
# Six hues chosen for distance under simulated deuteranopia and protanopia (Machado, Oliveira and
# Fernandes 2009: at least 16 CIELAB units between any two on white, 20 on dark) and for 3:1
# contrast with the page. Beyond six, marker and dashes tell apart.
HUES = ('#1d4fa0', '#b93a1a', '#1f9f8c', '#c46be7', '#999710', '#6d2138')
HUES_DARK = ('#4f8df0', '#f0824a', '#35d0b5', '#dba6f5', '#f0e27a', '#c0566e')
MARKERS = ('o', 's', '^', 'v', 'P', 'X')
DASHES: tuple[Any, ...] = (
    'solid',
    (0, (4, 1.5)),
    (0, (1.2, 1.2)),
    (0, (6, 1.5, 1.2, 1.5)),
    (0, (8, 2)),
    (0, (2.5, 1, 1, 1, 1, 1)),
)
LINE_POINTS = 11.5
# Inches of a figure with one panel.
WIDTH = 6.6

# In SVG each colour becomes a CSS variable, so that one figure reads on light and on dark.
SVG_COLOURS = {INK: 'ink', MUTED: 'muted', GRID: 'grid', SURFACE: 'surface'} | {
    hue: f'hue-{index}' for index, hue in enumerate(HUES)
}
_RC = {
    'font.size': 9,
    'font.family': 'DejaVu Sans',
    'axes.titlesize': 9,
    'axes.titleweight': 'bold',
    'axes.titlelocation': 'left',
    'axes.labelsize': 9,
    'xtick.labelsize': 8.5,
    'ytick.labelsize': 8.5,
    'legend.fontsize': 8.5,
    'legend.frameon': False,
    'axes.spines.top': False,
    'axes.spines.right': False,
    'axes.facecolor': 'none',
    'axes.edgecolor': MUTED,
    'axes.labelcolor': INK,
    'text.color': INK,
    'xtick.color': MUTED,
    'ytick.color': MUTED,
    'xtick.labelcolor': INK,
    'ytick.labelcolor': INK,
    'axes.grid': True,
    'axes.axisbelow': True,
    'grid.color': GRID,
    'grid.linewidth': 0.8,
    'lines.linewidth': 1.5,
    'axes.formatter.useoffset': False,
    # A dollar sign in a variant's name is a dollar sign.
    'text.parse_math': False,
    'svg.hashsalt': 'qkattn',
}


@dataclasses.dataclass(frozen=True)
class VariantStyle:
    """Colour, marker and dashes of one variant, the same in every figure."""

    colour: str
    marker: str
    dashes: Any
    width: float


@dataclasses.dataclass(frozen=True)
class Rendered:
    """One figure: file stem, heading, a sentence on how to read it, PNG bytes and two SVGs.

    `svg` is an element of the page, its colours CSS variables; `paper_svg` is a document of its own
    on white, its colours concrete.
    """

    stem: str
    title: str
    caption: str
    png: bytes
    svg: str
    paper_svg: str


def rc() -> Any:
    """The context in which figures are built and rendered."""
    return matplotlib.rc_context(_RC)


def styles(variants: Sequence[str], baseline: str | None) -> dict[str, VariantStyle]:
    """A style for each variant by its place in the study; the baseline is ink-coloured."""
    chosen = {}
    for index, variant in enumerate(v for v in variants if v != baseline):
        turn = index // len(HUES)
        chosen[variant] = VariantStyle(
            HUES[index % len(HUES)],
            MARKERS[turn % len(MARKERS)],
            DASHES[turn % len(DASHES)],
            1.5,
        )
    if baseline is not None:
        chosen[baseline] = VariantStyle(INK, 'D', 'solid', 2.0)
    return chosen


def short(name: str, limit: int = 34) -> str:
    """`name` on one line, its middle left out when it is longer than `limit`."""
    name = ' '.join(name.split())
    half = (limit - 1) // 2
    return name if len(name) <= limit else f'{name[:half]}…{name[-half:]}'


def label_right(ax: Axes, labels: Sequence[tuple[float, float, str, str]]) -> None:
    """Writes (x, y, text, colour) labels in a column right of the axes, none over another.

    Each label stays as near its y as the others allow (isotonic regression) and is tied to its
    point by a thin line. Call it once the y limits are final.
    """
    if not labels:
        return
    low, high = ax.get_ylim()
    height_points = ax.figure.get_figheight() * 72 * 0.8 / ax.get_subplotspec().get_gridspec().nrows
    gap = (high - low) * LINE_POINTS / height_points
    ordered = sorted(labels, key=lambda label: label[1])
    wanted = [y - index * gap for index, (_, y, _, _) in enumerate(ordered)]
    top = max(high - (len(ordered) - 1) * gap, low)
    placed = isotonic_regression(wanted).x.clip(low, top)
    for index, (x, y, text, colour) in enumerate(ordered):
        ax.annotate(
            short(text),
            xy=(x, y),
            xytext=(1.06, placed[index] + index * gap),
            textcoords=('axes fraction', 'data'),
            va='center',
            fontsize=8.5,
            annotation_clip=False,
            arrowprops={
                'arrowstyle': '-',
                'color': colour,
                'lw': 0.6,
                'alpha': 0.7,
                'relpos': (0, 0.5),
                'shrinkA': 1,
            },
        )


def render(figure: Figure, stem: str, title: str, caption: str) -> Rendered:
    """Renders `figure` (inside `rc()`) to PNG and SVG on white and to SVG with CSS variables."""
    png = io.BytesIO()
    figure.savefig(png, format='png', dpi=160, facecolor='white', metadata={'Software': None})
    # The layout is found, and is the same in every format; finding it takes as long as drawing.
    figure.set_layout_engine(None)
    svg = io.BytesIO()
    # No date: the same numbers give the same bytes.
    figure.savefig(svg, format='svg', facecolor='none', metadata={'Date': None})
    document = svg.getvalue().decode()
    return Rendered(
        stem, title, caption, png.getvalue(), _inline(document, stem), _on_white(document)
    )


def _on_white(svg: str) -> str:
    """An SVG document with a white page behind the figure."""
    page = '<rect width="100%" height="100%" fill="#ffffff"/>'
    return re.sub(r'<svg\b[^>]*>', rf'\g<0>\n {page}', svg, count=1).replace(SURFACE, '#ffffff')


def _inline(svg: str, stem: str) -> str:
    """An SVG document as an element of an HTML page: own ids, no outside names, themed colours."""
    svg = svg[svg.index('<svg') :]
    svg = re.sub(r'<!--.*?-->\s*', '', svg, flags=re.DOTALL)
    svg = re.sub(r'<metadata>.*?</metadata>\s*', '', svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', '', svg)
    svg = re.sub(r'\bid="', f'id="{stem}-', svg)
    svg = re.sub(r'((?:xlink:)?href="#|url\(#)', rf'\g<1>{stem}-', svg)
    for colour, name in SVG_COLOURS.items():
        svg = re.sub(colour, f'var(--{name})', svg, flags=re.IGNORECASE)
    width = float(re.search(r'<svg[^>]*\swidth="([\d.]+)pt"', svg).group(1))
    # Its text stays near the page's: a little larger on a wide screen, not tiny on a narrow one.
    size = f'<svg style="max-width:{1.2 * width:.0f}pt;min-width:{0.75 * width:.0f}pt"'
    return re.sub(r'\s(width|height)="[\d.]+pt"', '', svg, count=2).replace('<svg', size, 1).strip()
