"""Figures of an analysis: singular values, quantities by layer and head, attention maps, drift."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter

from qkattn.report.figures.style import (
    DASHES,
    GRID,
    HUES,
    INK,
    legend,
    panels,
)

# Shades of one hue for quantities from 0 on, of two hues for those around 0.
SHADES = LinearSegmentedColormap.from_list('shades', ['#ffffff', '#a8bfe6', HUES[0], '#0b1f45'])
AROUND = LinearSegmentedColormap.from_list('around', [HUES[1], '#ffffff', HUES[0]])
# Layers and heads that a figure has room for; of more, it shows some, evenly spaced.
MAX_LAYERS, MAX_HEADS = 12, 16
# Layers of a heat map, and characters across it, that have room for the numbers of its cells.
MAX_NUMBERS, MAX_CHARACTERS = 8, 36
# Tokens that attention maps name, and the inches of each.
MAX_TOKENS, TOKEN = 40, 0.085
COLUMNS = 4
_WIDTH = 6.6  # inches


def singular_values(layers: Mapping[int, np.ndarray], circuit: str) -> Figure:
    """Singular values s_ND by index, relative to the largest: a panel a layer, a line a head."""
    shown = _spaced(sorted(layers), MAX_LAYERS)
    columns = min(COLUMNS, len(shown))
    rows = math.ceil(len(shown) / columns)
    figure = Figure(figsize=(max(_WIDTH, 1.9 * columns), 1.7 * rows + 1.0))
    for ax, layer in zip(panels(figure, columns, len(shown), **_SHARED), shown, strict=True):
        heads = _spaced(range(len(layers[layer])), len(HUES) * len(DASHES))
        for place, head in enumerate(heads):
            s_D = layers[layer][head]
            with np.errstate(invalid='ignore'):
                relative_D = s_D / s_D[0]
            # Below the precision of float32 there is rounding only.
            relative_D = np.where(relative_D > 1e-6, relative_D, np.nan)
            style = {'color': HUES[place % len(HUES)], 'linewidth': 1.2}
            style['linestyle'] = DASHES[place // len(HUES)]
            ax.plot(np.arange(1, len(s_D) + 1), relative_D, label=f'head {head}', **style)
        ax.set(yscale='log', title=f'layer {layer}')
        ax.yaxis.set_major_formatter('{x:g}')
        ax.yaxis.set_minor_formatter(NullFormatter())
    figure.supxlabel('index')
    figure.supylabel(f'singular value of {circuit}\n(largest = 1)')
    legend(figure)
    return figure


def heat_maps(quantities: Mapping[str, np.ndarray]) -> Figure:
    """A heat map [layers, heads] for each quantity by its name."""
    columns = min(2, len(quantities))
    rows = math.ceil(len(quantities) / columns)
    (L, N) = next(iter(quantities.values())).shape
    height = min(max(0.28 * L, 1.2), 3.2)
    figure = Figure(figsize=(_WIDTH, rows * (height + 0.75)))
    for ax, (name, values_LN) in zip(
        panels(figure, columns, len(quantities)), quantities.items(), strict=True
    ):
        low, high = _range(values_LN)
        shades = AROUND if low < 0 else SHADES
        image = ax.imshow(values_LN, cmap=shades, vmin=low, vmax=high, aspect='auto')
        ax.set(title=name, xlabel='head', ylabel='layer')
        ax.patch.set(hatch='////', edgecolor=GRID)  # seen where there is no value
        _ticks(ax, N, L)
        bar = figure.colorbar(image, ax=ax, shrink=0.9, pad=0.02)
        bar.outline.set_visible(False)
        texts = {
            cell: f'{value:.2g}' for cell, value in np.ndenumerate(values_LN) if np.isfinite(value)
        }
        if L > MAX_NUMBERS or N * max(map(len, texts.values()), default=0) > MAX_CHARACTERS:
            continue
        for (layer, head), text in texts.items():
            place = (values_LN[layer, head] - low) / (high - low)
            dark = place > (0.8 if low < 0 else 0.55) or (low < 0 and place < 0.2)
            colour = '#ffffff' if dark else INK
            ax.text(head, layer, text, ha='center', va='center', color=colour, size=7)
    return figure


def attention_maps(
    layers: Mapping[int, np.ndarray], queries: Sequence[str], keys: Sequence[str]
) -> Figure:
    """Probabilities p_NTS of one row, a map for each layer and head; a row is a query.

    The outer maps name the tokens where there is room.
    """
    shown = _spaced(sorted(layers), MAX_LAYERS)
    heads = _spaced(range(len(layers[shown[0]])), MAX_HEADS)
    named = max(len(queries), len(keys)) <= MAX_TOKENS
    size = max(0.62, min(1.6, _WIDTH / len(heads)))
    width, height = (max(size, named * TOKEN * len(words)) for words in (keys, queries))
    figure = Figure(figsize=(max(width * len(heads) + 0.9, 3.6), height * len(shown) + 0.9))
    axes = figure.subplots(len(shown), len(heads), squeeze=False)
    image: Any = None
    for row, layer in enumerate(shown):
        for column, head in enumerate(heads):
            ax = axes[row, column]
            image = ax.imshow(layers[layer][head], cmap=SHADES, vmin=0, vmax=1, aspect='auto')
            ax.grid(False)
            ax.set(xticks=[], yticks=[])
            for spine in ax.spines.values():
                spine.set(visible=True, color=GRID)
            if named and row == len(shown) - 1:
                ax.set_xticks(range(len(keys)), keys, rotation=90, fontsize=6)
            if named and column == 0:
                ax.set_yticks(range(len(queries)), queries, fontsize=6)
            if row == 0:
                ax.set_title(f'head {head}', fontsize=7)
        axes[row, 0].set_ylabel(f'layer {layer}', fontsize=7)
    figure.supxlabel('key')
    figure.supylabel('query')
    bar = figure.colorbar(image, ax=axes, shrink=0.6, pad=0.02, label='probability')
    bar.outline.set_visible(False)
    return figure


def _range(values_LN: np.ndarray) -> tuple[float, float]:
    """The range of the colours: that of the values, symmetric around 0 where some are negative."""
    finite = values_LN[np.isfinite(values_LN)]
    if not finite.size:
        return 0.0, 1.0
    low, high = float(finite.min()), float(finite.max())
    if low < 0:
        high = max(-low, high)
        return -high, high
    return low, max(high, low + 1e-6)


def _ticks(ax: Axes, heads: int, layers: int) -> None:
    ax.grid(False)
    ax.set_xticks(range(0, heads, math.ceil(heads / 8)))
    ax.set_yticks(range(0, layers, math.ceil(layers / 8)))


def _spaced(places: Sequence[int], most: int) -> list[int]:
    """At most that many of the places, evenly spaced, the first and the last among them."""
    if len(places) <= most:
        return list(places)
    return [places[i] for i in np.linspace(0, len(places) - 1, most).round().astype(int)]


_SHARED = {'sharex': True, 'sharey': True}
