"""How figures look: palette, one style per variant, and rendering to PNG and theme-aware SVG."""

import collections
import dataclasses
import io
import re
import zlib
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkattn.report.equations import places
from qkattn.storage.files import write_atomic
from qkattn.verdict.arms import Arm
from qkattn.verdict.codes import VALIDATION
from qkattn.verdict.load import Study

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
    **{'grid.color': GRID, 'lines.markeredgecolor': SURFACE},
}
MARKERS = ('o', 's', '^', 'v', 'P', 'X')
DASHES: tuple[Any, ...] = (
    'solid',
    *((0, dashes) for dashes in ((4, 1.5), (1.2, 1.2), (6, 1.5, 1.2, 1.5), (8, 2))),
    (0, (2.5, 1, 1, 1, 1, 1)),
)
# Inches of every figure, whose text then has 11 pixels or more on a screen of 400 CSS pixels.
WIDTH = 3.6
# Characters for which two columns of a legend have room.
_LABELS = 38
# The keywords of `Axes.plot` of each variant, the same in every figure of a report.
Styles = Mapping[str, dict[str, Any]]
# Keywords of a line at zero, at the baseline's mean, at a chosen value.
REFERENCE: dict[str, Any] = {'color': INK, 'linewidth': 1, 'linestyle': (0, (4, 2)), 'zorder': 1}
SEEDS: dict[str, Any] = {'s': 8, 'alpha': 0.6, 'linewidths': 0, 'zorder': 3, 'label': 'one seed'}


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure; `stem` names its files, `values` are what its heading and caption need."""

    figure: Figure
    stem: str
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Rendered:
    """A figure as PNG, PDF and an SVG document on white, and as an element of the page."""

    png: bytes
    pdf: bytes
    paper_svg: str
    svg: str  # the element; its colours are CSS variables, so that it reads on light and on dark


def style_sheet() -> AbstractContextManager[None]:
    """The context in which figures are built and rendered."""
    return matplotlib.style.context([Path(__file__).with_name('qkattn.mplstyle'), _COLOURS])


def styles(variants: Sequence[str], baseline: str | None) -> dict[str, dict[str, Any]]:
    """A style for each variant: a colour, and what tells it from others of that colour.

    A variant has the colour of its name, or the next that no variant before it has while there is
    one. The baseline has a marker of its own and a thick line.
    """
    chosen: dict[str, dict[str, Any]] = {}
    turns: collections.Counter[str] = collections.Counter()
    for variant in variants:
        hue, first = colour(variant), 0
        if hue in HUES:
            first = HUES.index(hue)
            ordered = [*HUES[first:], *HUES[:first]]
            taken = {style['color'] for style in chosen.values()}
            hue = next((other for other in ordered if other not in taken), hue)
            first = HUES.index(hue)
        if variant == baseline:
            plain = {'color': hue, 'linestyle': 'solid'}
            chosen[variant] = plain | {'marker': 'D', 'linewidth': 2.0}
            continue
        turn = turns[hue]
        turns[hue] += 1
        chosen[variant] = {
            'color': hue,
            'linestyle': DASHES[(turn + turn // len(MARKERS)) % len(DASHES)],
            'marker': MARKERS[(first + turn) % len(MARKERS)],
            'linewidth': 1.5,
        }
    return chosen


def colour(variant: str) -> str:
    """The colour of a variant where it is free: ink for qk/vo, else a hue by its name."""
    score, value, rest = places(variant)
    if not (score or value or rest):
        return INK
    # Scores beside `vo` and Values beside `qk` start at opposite ends; options never keep the hue.
    registered = score + (value and value + len(HUES) // 2)
    other = 1 + (zlib.crc32(rest.encode()) >> 16) % (len(HUES) - 1) if rest else 0
    return HUES[(registered + other) % len(HUES)]


def short(name: str, limit: int = 34) -> str:
    """`name` on one line, its middle left out when it is longer than `limit`."""
    name = ' '.join(name.split())
    half = (limit - 1) // 2
    return name if len(name) <= limit else f'{name[:half]}…{name[-half:]}'


def distinct(names: Sequence[str], limit: int = 34) -> list[str]:
    """`short` names, cut elsewhere than in the middle where that tells different names apart."""
    names = [' '.join(name.split()) for name in names]
    cut = plain = [short(name, limit) for name in names]
    for tail in sorted(range(4, limit - 4), key=lambda tail: abs(tail - limit // 2)):
        if len({*cut}) == len({*names}):
            return cut
        head = limit - 1 - tail
        cut = [n if len(n) <= limit else f'{n[:head]}…{n[-tail:]}' for n in names]
    return plain


def panels(figure: Figure, columns: int, count: int, **share: Any) -> list[Axes]:
    """The first `count` axes of a grid with `columns`; the others are hidden."""
    axes = list(figure.subplots(-(-count // columns), columns, squeeze=False, **share).flat)
    for ax in axes[count:]:
        ax.set_visible(False)
    # A panel with nothing below it carries the column's tick labels.
    for ax in axes[max(count - columns, 0) :]:
        ax.tick_params(labelbottom=True)
    return axes[:count]


def yardstick(ax: Axes, study: Study, arm: Arm, *, fit: bool = False) -> None:
    """A thin line at the loss on the validation split that the arm's baseline has to beat.

    Where it lies outside the axis, the legend alone has its number; with `fit` the axis reaches
    down to it.
    """
    groups = study.yardsticks or {}
    best = groups[arm.group].best(VALIDATION) if arm.group in groups else None
    if best is None:
        return
    name, loss = best
    low, high = ax.get_ylim()
    low = min(low, loss - 0.03 * (high - loss)) if fit else low
    where = ' (below)' if loss < low else ' (above)' if loss > high else ''
    line = REFERENCE | {'color': MUTED, 'linewidth': 0.8, 'linestyle': (0, (1, 1))}
    ax.axhline(loss, label=f'{name}, {loss:.3f}{where}', **line)
    ax.set_ylim(low, high)


def legend(figure: Figure, loc: Literal['upper', 'lower'] = 'upper') -> None:
    """One entry for each label of the figure, drawn as where it occurs first."""
    handles: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    widths = sorted(max(map(len, label.splitlines())) for label in handles)
    columns = 2 if sum(widths[-2:]) <= _LABELS else 1
    figure.legend(handles.values(), handles, loc=f'outside {loc} center', ncols=columns)


def render(drawing: Drawing) -> Rendered:
    """All formats of a figure."""
    png, pdf = io.BytesIO(), io.BytesIO()
    with style_sheet():
        figure = drawing.figure
        figure.savefig(png, format='png', dpi=160, facecolor='white', metadata={'Software': None})
        # The layout is the same in every format; computing it takes as long as drawing.
        figure.set_layout_engine(None)
        # No date: the same numbers give the same bytes.
        figure.savefig(pdf, format='pdf', facecolor='white', metadata={'CreationDate': None})
        document = _svg(figure)
    page = '<rect width="100%" height="100%" fill="#ffffff"/>'
    paper = re.sub(r'<svg\b[^>]*>', rf'\g<0>\n {page}', document, count=1)
    inline = _inline(document, drawing.stem)
    return Rendered(png.getvalue(), pdf.getvalue(), paper.replace(SURFACE, '#ffffff'), inline)


def _svg(figure: Figure) -> str:
    svg = io.BytesIO()
    figure.savefig(svg, format='svg', facecolor='none', metadata={'Date': None})
    return svg.getvalue().decode()


def _inline(svg: str, stem: str) -> str:
    """An SVG document as an element of an HTML page: own ids, no outside names, themed colours."""
    svg = svg[svg.index('<svg') :]
    svg = re.sub(r'<!--.*?-->\s*|<metadata>.*?</metadata>\s*', '', svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', '', svg)
    svg = re.sub(r'\bid="', f'id="{stem}-', svg)
    svg = re.sub(r'((?:xlink:)?href="#|url\(#)', rf'\g<1>{stem}-', svg)
    for name, hue in LIGHT.items():
        svg = re.sub(hue, f'var(--{name})', svg, flags=re.IGNORECASE)
    width = float(re.findall(r'<svg[^>]*\swidth="([\d.]+)pt"', svg)[0])
    # Its text stays near the page's on a wide screen, too.
    size = f'<svg style="max-width:{1.5 * width:.0f}pt"'
    return re.sub(r'\s(width|height)="[\d.]+pt"', '', svg, count=2).replace('<svg', size, 1).strip()


def write_plots(
    plots: Path,
    drawn: Sequence[Drawing],
    kinds: Sequence[str] = ('png', 'pdf', 'svg'),
) -> dict[str, str]:
    """Writes figures into a directory, removes earlier ones not drawn now; returns SVG by stem."""
    for file in plots.glob('*.*'):
        if file.stem not in {drawing.stem for drawing in drawn}:
            file.unlink()
    svg = {}
    for drawing in drawn:
        rendered = render(drawing)
        svg[drawing.stem] = rendered.svg
        for kind in kinds:
            content = rendered.paper_svg if kind == 'svg' else getattr(rendered, kind)
            write_atomic(plots / f'{drawing.stem}.{kind}', content)
    return svg
