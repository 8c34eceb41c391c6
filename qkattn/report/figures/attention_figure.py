"""Figures of an analysis: singular values, quantities by layer and head, attention maps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from qkattn.report.figures.style import GRID, legend, panels, rows_of

# Layers and heads that attention maps have room for; of more, they show some, evenly spaced.
MAX_LAYERS = 12
MAX_HEADS = 16
# Attention maps of more tokens do not name them.
MAX_TOKENS = 40
# Inches.
_WIDTH = 6.6


def singular_values(layers: Mapping[int, np.ndarray], circuit: str) -> Figure:
    """Singular values s_ND by index, relative to the largest: a panel a layer, a line a head."""
    columns = min(4, len(layers))
    height = 1.7 * rows_of(len(layers), columns) + 1.0
    figure = Figure(figsize=(max(_WIDTH, 1.9 * columns), height))
    axes = panels(figure, columns, len(layers), sharex=True, sharey=True)
    for ax, (layer, s_ND) in zip(axes, sorted(layers.items()), strict=True):
        shades = colormaps['viridis'](np.linspace(0, 0.9, len(s_ND)))
        for head, (s_D, shade) in enumerate(zip(s_ND, shades, strict=True)):
            # Below the precision of float32 there is rounding only.
            largest = s_D[0] or 1.0
            relative_D = np.where(s_D > 1e-6 * s_D[0], s_D / largest, np.nan)
            ax.plot(np.arange(1, len(s_D) + 1), relative_D, color=shade, label=f'head {head}')
        ax.set(yscale='log', title=f'layer {layer}')
        # The formatters of a logarithmic axis write TeX.
        ax.yaxis.set(major_formatter='{x:g}', minor_formatter='')
    figure.supxlabel('index')
    figure.supylabel(f'singular value of {circuit}\n(largest = 1)')
    legend(figure)
    return figure


def heat_maps(quantities: Mapping[str, np.ndarray]) -> Figure:
    """A heat map [layers, heads] for each quantity by its name; grey where there is no value."""
    columns = min(2, len(quantities))
    num_layers = max(len(values_LN) for values_LN in quantities.values())
    height = min(max(0.28 * num_layers, 1.2), 3.2) + 0.75
    figure = Figure(figsize=(_WIDTH, height * rows_of(len(quantities), columns)))
    axes = panels(figure, columns, len(quantities))
    for ax, (name, values_LN) in zip(axes, quantities.items(), strict=True):
        finite = values_LN[np.isfinite(values_LN)]
        largest = np.abs(finite).max(initial=1e-6)
        signed = finite.min(initial=0.0) < 0
        shades = colormaps['RdBu' if signed else 'Blues'].with_extremes(bad=GRID)
        lowest = -largest if signed else 0.0
        masked_LN = np.ma.masked_invalid(values_LN)
        image = ax.imshow(masked_LN, cmap=shades, vmin=lowest, vmax=largest, aspect='auto')
        ax.set(title=name, xlabel='head', ylabel='layer')
        ax.grid(visible=False)
        ax.locator_params(integer=True)
        figure.colorbar(image, ax=ax, shrink=0.9, pad=0.02)
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
    # Inches of a map, in which a named token takes a row or column.
    inches_of_token = 0.085 if named else 0.0
    width = max(0.8, inches_of_token * len(keys))
    height = max(0.8, inches_of_token * len(queries))
    figure = Figure(figsize=(max(width * len(heads) + 0.9, 3.6), height * len(shown) + 0.9))
    axes = figure.subplots(len(shown), len(heads), squeeze=False, sharex=True, sharey=True)
    image: Any = None
    for row, layer in zip(axes, shown, strict=True):
        for ax, head in zip(row, heads, strict=True):
            image = ax.imshow(layers[layer][head], cmap='Blues', vmin=0, vmax=1, aspect='auto')
            ax.grid(visible=False)
            ax.set_title(f'head {head}' if layer == shown[0] else '', fontsize=7)
        row[0].set_ylabel(f'layer {layer}', fontsize=7)
    axes[0, 0].set(xticks=[], yticks=[])
    if named:
        axes[0, 0].set_xticks(range(len(keys)), keys)
        axes[0, 0].set_yticks(range(len(queries)), queries)
        for ax in axes.flat:
            ax.tick_params(labelsize=6, axis='both')
            ax.tick_params(rotation=90, axis='x')
    figure.supxlabel('key')
    figure.supylabel('query')
    figure.colorbar(image, ax=axes, shrink=0.6, pad=0.02, label='probability')
    return figure


def _spaced(places: Sequence[int], most: int) -> list[int]:
    """At most that many of the places, evenly spaced, the first and the last among them."""
    indices = np.linspace(0, len(places) - 1, min(most, len(places))).round().astype(int)
    return [places[index] for index in indices]
