"""Figures of an analysis: singular values, quantities by layer and head, attention maps."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import colormaps
from matplotlib.figure import Figure

from qkattn.report.figures.style import GRID, legend, panels, rows_of

# The most layers and heads that attention maps show. Of more, they show some, evenly spaced.
MAX_LAYERS = 12
MAX_HEADS = 16
# The most tokens that attention maps name.
MAX_NAMED_TOKENS = 40
# Inches.
_WIDTH = 6.6


def singular_values(layers: Mapping[int, np.ndarray], circuit: str) -> Figure:
    """Draws singular values by their index, with a panel for each layer and a line for each head.

    Args:
      layers: for each layer the singular values s_ND of its heads, descending.
      circuit: what they are the singular values of, for the label.
    """
    columns = min(4, len(layers))
    height = 1.7 * rows_of(len(layers), columns) + 1.0
    figure = Figure(figsize=(max(_WIDTH, 1.9 * columns), height))
    axes = panels(figure, columns, len(layers), sharex=True, sharey=True)
    for ax, (layer, s_ND) in zip(axes, sorted(layers.items()), strict=True):
        shades = colormaps['viridis'](np.linspace(0, 0.9, len(s_ND)))
        for head, (s_D, shade) in enumerate(zip(s_ND, shades, strict=True)):
            # Values below 1e-6 times the largest are rounding errors of float32. NaN is not drawn.
            largest = s_D[0]
            divisor = largest if largest > 0 else 1.0  # a matrix of zeros has largest = 0
            relative_D = np.where(s_D > 1e-6 * largest, s_D / divisor, np.nan)
            ax.plot(np.arange(1, len(s_D) + 1), relative_D, color=shade, label=f'head {head}')
        ax.set(yscale='log', title=f'layer {layer}')
        # By default, a logarithmic axis writes its labels as TeX.
        ax.yaxis.set(major_formatter='{x:g}', minor_formatter='')
    figure.supxlabel('index')
    figure.supylabel(f'singular value of {circuit}\n(largest = 1)')
    legend(figure)
    return figure


def heat_maps(quantities: Mapping[str, np.ndarray]) -> Figure:
    """Draws a heat map of each quantity, with layers as rows and heads as columns.

    `quantities` has an array [layers, heads] for each name. It is grey at entries that are not
    finite.
    """
    columns = min(2, len(quantities))
    num_layers = max(len(values_LN) for values_LN in quantities.values())
    height = min(max(0.28 * num_layers, 1.2), 3.2) + 0.75
    figure = Figure(figsize=(_WIDTH, height * rows_of(len(quantities), columns)))
    axes = panels(figure, columns, len(quantities))
    for ax, (name, values_LN) in zip(axes, quantities.items(), strict=True):
        finite = values_LN[np.isfinite(values_LN)]
        largest = np.abs(finite).max(initial=1e-6)  # `initial` is for no finite values
        # White is zero in both colour scales. Negative values are red, positive ones blue.
        has_negative = finite.min(initial=0.0) < 0
        shades = colormaps['RdBu' if has_negative else 'Blues'].with_extremes(bad=GRID)
        lowest = -largest if has_negative else 0.0
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
    """Draws the attention probabilities of one text, with a map for each layer and head.

    In a map, a row is a query and a column is a key. The maps at the left and at the bottom name
    the tokens, if there is room.

    Args:
      layers: for each layer the probabilities p_NTS of its heads.
      queries: the tokens that attend, as text.
      keys: the tokens that they attend to.
    """
    drawn_layers = _spaced(sorted(layers), MAX_LAYERS)
    num_heads = len(layers[drawn_layers[0]])
    drawn_heads = _spaced(range(num_heads), MAX_HEADS)
    are_named = max(len(queries), len(keys)) <= MAX_NAMED_TOKENS

    # All sizes are inches. The name of a token needs a row or column of this size.
    token_size = 0.085 if are_named else 0.0
    map_width = max(0.8, token_size * len(keys))
    map_height = max(0.8, token_size * len(queries))
    width = max(map_width * len(drawn_heads) + 0.9, 3.6)
    height = map_height * len(drawn_layers) + 0.9
    figure = Figure(figsize=(width, height))
    axes = figure.subplots(
        len(drawn_layers), len(drawn_heads), squeeze=False, sharex=True, sharey=True
    )
    image: Any = None  # any of the maps; they have the same colours
    for row_of_axes, layer in zip(axes, drawn_layers, strict=True):
        for ax, head in zip(row_of_axes, drawn_heads, strict=True):
            image = ax.imshow(layers[layer][head], cmap='Blues', vmin=0, vmax=1, aspect='auto')
            ax.grid(visible=False)
            ax.set_title(f'head {head}' if layer == drawn_layers[0] else '', fontsize=7)
        row_of_axes[0].set_ylabel(f'layer {layer}', fontsize=7)

    # The maps share their axes, so ticks are set once for all.
    axes[0, 0].set(xticks=[], yticks=[])
    if are_named:
        axes[0, 0].set_xticks(range(len(keys)), keys)
        axes[0, 0].set_yticks(range(len(queries)), queries)
        for ax in axes.flat:
            ax.tick_params(labelsize=6, axis='both')
            ax.tick_params(rotation=90, axis='x')
    figure.supxlabel('key')
    figure.supylabel('query')
    figure.colorbar(image, ax=axes, shrink=0.6, pad=0.02, label='probability')
    return figure


def _spaced(numbers: Sequence[int], most: int) -> list[int]:
    """Returns at most `most` of the numbers, evenly spaced, with the first and the last."""
    count = min(most, len(numbers))
    indices = np.linspace(0, len(numbers) - 1, count).round().astype(int)
    return [numbers[index] for index in indices]
