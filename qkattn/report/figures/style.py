"""The style of figures: the palette, one style per variant, panels, and files of every format."""

import dataclasses
import io
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal

import matplotlib.style
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from qkattn.storage.files import below, write_atomic

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
# Inches of every figure of a study, whose text has 11 pixels or more on a screen of 400 CSS pixels.
WIDTH = 3.6
# The keywords of `Axes.plot` of each variant, the same in every figure of a report.
Styles = Mapping[str, dict[str, Any]]
# Keywords of a line at zero, at the baseline's mean, at a chosen value; of the dots of seeds.
REFERENCE: dict[str, Any] = {'color': INK, 'linewidth': 1, 'linestyle': (0, (4, 2)), 'zorder': 1}
SEEDS: dict[str, Any] = {'s': 8, 'alpha': 0.6, 'linewidths': 0, 'zorder': 3, 'label': 'one seed'}
BEYOND = 'off the scale'  # the label of an arrowhead at an edge
_METADATA = {'png': {'Software': None}, 'pdf': {'CreationDate': None}, 'svg': {'Date': None}}


@dataclasses.dataclass(frozen=True)
class Drawing:
    """A figure; `stem` names its files, `values` fill its heading and caption."""

    figure: Figure
    stem: str
    values: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def style_sheet() -> AbstractContextManager[None]:
    """The context in which figures are built and rendered."""
    return matplotlib.style.context(Path(__file__).with_name('qkattn.mplstyle'))


def styles(variants: Sequence[str], baseline: str) -> dict[str, dict[str, Any]]:
    """A style for each variant, from the palette in order; the baseline is black and thick."""
    by_variant: dict[str, dict[str, Any]] = {}
    for place, name in enumerate(name for name in variants if name != baseline):
        turn = place // len(HUES)
        marker = MARKERS[(place + turn) % len(MARKERS)]
        by_variant[name] = {'color': HUES[place % len(HUES)], 'marker': marker}
    return by_variant | {baseline: {'color': INK, 'marker': 'D', 'linewidth': 2.0}}


def panels(figure: Figure, columns: int, count: int, **share: Any) -> list[Axes]:
    """The first `count` axes of a grid with `columns`; the others are removed."""
    axes = list(figure.subplots(-(-count // columns), columns, squeeze=False, **share).flat)
    for ax in axes[count:]:
        ax.remove()
    for ax in axes[max(count - columns, 0) : count]:
        ax.tick_params(labelbottom=True)
    return axes[:count]


def legend(figure: Figure, loc: Literal['upper', 'lower'] = 'upper') -> float:
    """One entry for each label, in two columns if the labels are short; its height in inches."""
    handles: dict[str, Any] = {}
    for ax in figure.axes:
        for handle, label in zip(*ax.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    widths = sorted(max(map(len, label.splitlines())) for label in handles)
    columns = 2 if sum(widths[-2:]) <= 38 else 1
    figure.legend(handles.values(), handles, loc=f'outside {loc} center', ncols=columns)
    return 0.1 + 0.18 * -(-len(handles) // columns)


def render(figure: Figure, kind: str) -> bytes:
    """A figure as 'png', 'pdf' or 'svg'; the same numbers give the same bytes."""
    content = io.BytesIO()
    with style_sheet():
        if figure.get_layout_engine():  # takes as long as drawing, and is the same in every format
            figure.draw_without_rendering()
            figure.set_layout_engine('none')
        figure.savefig(content, format=kind, dpi=160, metadata=_METADATA[kind])
    return content.getvalue()


def write_plots(
    plots: Path, drawn: Sequence[Drawing], kinds: Sequence[str] = ('png', 'pdf', 'svg')
) -> dict[str, bytes]:
    """Writes figures and removes earlier ones not drawn now; returns those of the last kind."""
    plots = below(plots.parent, plots.name)
    for file in plots.glob('*.*'):
        if file.stem not in {drawing.stem for drawing in drawn}:
            file.unlink()
    rendered: dict[str, bytes] = {}
    for drawing in drawn:
        for kind in kinds:
            rendered[drawing.stem] = render(drawing.figure, kind)
            write_atomic(plots / f'{drawing.stem}.{kind}', rendered[drawing.stem])
    return rendered
