"""Figures of an analysis: singular values, quantities by layer and head, attention maps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from qkattn.report.figures.style import GRID, legend, panels, rows_of

# Attention maps show at most this many layers and heads, evenly spaced.
MAX_LAYERS = 12
MAX_HEADS = 16
# Attention maps of longer texts have no token labels.
MAX_NAMED_TOKENS = 40
# Inches.
_WIDTH = 6.6


def singular_values(layers: Mapping[int, np.ndarray], circuit: str) -> Figure:
    """Draws the singular values of each head, relative to the largest, with a panel per layer.

    Args:
        layers: The singular values s_ND of each layer, with N heads and D values, descending.
        circuit: The name of the decomposed matrix, for the label.
    """
    columns = min(4, len(layers))
    height = 1.7 * rows_of(len(layers), columns) + 1.0
    figure = Figure(figsize=(max(_WIDTH, 1.9 * columns), height))
    axes = panels(figure, columns, count=len(layers), sharex=True, sharey=True)
    for ax, (layer, s_ND) in zip(axes, sorted(layers.items()), strict=True):
        num_heads, D = s_ND.shape
        colors = colormaps['viridis'](np.linspace(0, 0.9, num_heads))
        for head in range(num_heads):
            s_D = s_ND[head]
            largest = s_D[0]
            divisor = largest if largest > 0 else 1.0  # a matrix of zeros has no positive value
            # Leave out rounding errors of float32. NaN is not drawn.
            relative_D = np.where(s_D > 1e-6 * largest, s_D / divisor, np.nan)
            ax.plot(np.arange(1, D + 1), relative_D, color=colors[head], label=f'head {head}')
        ax.set(yscale='log', title=f'layer {layer}')
        # The default labels of a logarithmic axis are TeX.
        ax.yaxis.set(major_formatter='{x:g}', minor_formatter='')
    figure.supxlabel('index')
    figure.supylabel(f'singular value of {circuit}\n(largest = 1)')
    legend(figure)
    return figure


def heat_maps(quantities: Mapping[str, np.ndarray]) -> Figure:
    """Draws a heat map of each quantity, with layers as rows and heads as columns.

    Zero is white, and entries that are not finite are grey.

    Args:
        quantities: An array [layers, heads] for each name.
    """
    columns = min(2, len(quantities))
    num_layers = max(len(values_LN) for values_LN in quantities.values())
    map_height = min(max(0.28 * num_layers, 1.2), 3.2) + 0.75
    num_rows = rows_of(len(quantities), columns)
    figure = Figure(figsize=(_WIDTH, map_height * num_rows))
    axes = panels(figure, columns, count=len(quantities))
    for ax, (name, values_LN) in zip(axes, quantities.items(), strict=True):
        finite_values = values_LN[np.isfinite(values_LN)]
        # `initial` is the result if no value is finite.
        largest = np.abs(finite_values).max(initial=1e-6)
        has_negative = finite_values.min(initial=0.0) < 0
        if has_negative:
            colors = colormaps['RdBu']  # red is negative, blue is positive
            lowest = -largest
        else:
            colors = colormaps['Blues']
            lowest = 0.0
        image = ax.imshow(
            np.ma.masked_invalid(values_LN),
            cmap=colors.with_extremes(bad=GRID),
            vmin=lowest,
            vmax=largest,
            aspect='auto',
        )
        ax.set(title=name, xlabel='head', ylabel='layer')
        ax.grid(visible=False)
        ax.locator_params(integer=True)
        figure.colorbar(image, ax=ax, shrink=0.9, pad=0.02)
    return figure


def attention_maps(
    layers: Mapping[int, np.ndarray], queries: Sequence[str], keys: Sequence[str]
) -> Figure:
    """Draws the attention probabilities of one text, with a map for each layer and head.

    Args:
        layers: The probabilities p_NTS of each layer: N heads, T queries (rows), S keys (columns).
        queries: The query tokens as text.
        keys: The key tokens as text.
    """
    drawn_layers = _spaced(sorted(layers), MAX_LAYERS)
    first_layer = drawn_layers[0]
    num_heads = len(layers[first_layer])
    drawn_heads = _spaced(range(num_heads), MAX_HEADS)
    has_token_labels = max(len(queries), len(keys)) <= MAX_NAMED_TOKENS

    # Sizes are in inches.
    token_size = 0.085 if has_token_labels else 0.0
    map_width = max(0.8, token_size * len(keys))
    map_height = max(0.8, token_size * len(queries))
    width = max(map_width * len(drawn_heads) + 0.9, 3.6)
    height = map_height * len(drawn_layers) + 0.9
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(
        len(drawn_layers), len(drawn_heads), squeeze=False, sharex=True, sharey=True
    )
    image: Any = None  # the last map; all maps have the same colours
    for row_of_axes, layer in zip(axes, drawn_layers, strict=True):
        for ax, head in zip(row_of_axes, drawn_heads, strict=True):
            image = ax.imshow(layers[layer][head], cmap='Blues', vmin=0, vmax=1, aspect='auto')
            ax.grid(visible=False)
            ax.set_title(f'head {head}' if layer == first_layer else '', fontsize=7)
        row_of_axes[0].set_ylabel(f'layer {layer}', fontsize=7)

    # The maps share these ticks.
    first_ax = axes[0, 0]
    first_ax.set(xticks=[], yticks=[])
    if has_token_labels:
        first_ax.set_xticks(range(len(keys)), keys)
        first_ax.set_yticks(range(len(queries)), queries)
        for ax in axes.flat:
            ax.tick_params(labelsize=6, axis='both')
            ax.tick_params(rotation=90, axis='x')
    figure.supxlabel('key')
    figure.supylabel('query')
    figure.colorbar(image, ax=axes, shrink=0.6, pad=0.02, label='probability')
    return figure


def _spaced(numbers: Sequence[int], most: int) -> list[int]:
    """Returns at most `most` evenly spaced numbers, with the first and the last."""
    count = min(most, len(numbers))
    indices = np.linspace(0, len(numbers) - 1, count).round().astype(int)
    return [numbers[index] for index in indices]
