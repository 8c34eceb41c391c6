"""The induction probe beside the loss: can the model still copy what followed before?"""

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qkattn.report.findings import Findings
from qkattn.report.load import Study
from qkattn.report.measures import Measure
from qkattn.report.style import (
    DASHED,
    INK,
    MUTED,
    SURFACE,
    WIDTH,
    Rendered,
    VariantStyle,
    render,
    short,
)
from qkattn.report.summary import Row

LOSS = Measure('val_loss', 'val loss', 'nats/token')
GAIN = Measure('val_induction_gain', 'induction gain', 'nats/token')
ACCURACY = Measure('val_induction_accuracy', 'induction accuracy', '%', 100.0)


def retrieval_figure(
    study: Study, found: Findings, look: Mapping[str, VariantStyle]
) -> Rendered | None:
    """Loss and probe side by side, a line of panels for each size; None where nobody was probed."""
    measured = [arm.row for arm in found.arms if GAIN.over_seeds(arm.row)]
    if not measured:
        return None
    figure = panels(measured, look, study.baseline)
    return render(
        figure,
        'retrieval',
        'Retrieval beside the loss',
        'The induction probe repeats a sequence: the gain is how much lower the loss is on the '
        'second copy than on the first, the accuracy how often its likeliest token is right; right '
        'is better. Loss, left, is better to the left. Arms are in the order of their loss.',
    )


def panels(rows: Sequence[Row], look: Mapping[str, VariantStyle], baseline: str | None) -> Figure:
    """The figure of `retrieval_figure`."""
    sizes = list(dict.fromkeys(row.size for row in rows))
    measures = [LOSS, GAIN] + [ACCURACY] * any(map(ACCURACY.over_seeds, rows))
    counts = [sum(row.size == size for row in rows) for size in sizes]
    figure = Figure(
        figsize=(max(WIDTH, 2.2 + 2.0 * len(measures)), 0.24 * sum(counts) + 0.75 * len(sizes)),
        layout='constrained',
    )
    heights = [0.24 * count + 0.6 for count in counts]
    grid = figure.subplots(
        len(sizes), len(measures), sharey='row', squeeze=False, height_ratios=heights
    )
    for axes, size in zip(grid, sizes, strict=True):
        of_size = [row for row in rows if row.size == size]
        of_size.sort(key=lambda row: statistics.fmean(LOSS.of_seeds(row)))
        for ax, measure in zip(axes, measures, strict=True):
            for y, row in enumerate(of_size):
                _draw(ax, y, row, measure, look[row.variant])
                if row.variant == baseline and (value := measure.over_seeds(row)):
                    ax.axvline(value.mean, color=INK, linewidth=1, linestyle=DASHED, zorder=1)
            ax.xaxis.set_major_locator(MaxNLocator(4))
            ax.set_xlabel(measure.axis)
            ax.tick_params(axis='y', length=0)
        axes[0].set_yticks(range(len(of_size)), [short(row.variant, 28) for row in of_size])
        axes[0].set_ylim(len(of_size) - 0.4, -0.6)
        if len(sizes) > 1:
            axes[0].set_title(short(size))
    return figure


def _draw(ax: Axes, y: int, row: Row, measure: Measure, style: VariantStyle) -> None:
    value = measure.over_seeds(row)
    if value is None:
        ax.annotate(
            'not measured',
            (0.02, y),
            xycoords=('axes fraction', 'data'),
            va='center',
            fontsize=8,
            color=MUTED,
            style='italic',
        )
        return
    if value.low is not None:
        ax.plot([value.low, value.high], [y, y], color=style.colour, linewidth=2)
    seeds = measure.of_seeds(row)
    ax.scatter(
        seeds, [y + 0.28] * len(seeds), s=8, color=style.colour, alpha=0.6, linewidths=0, zorder=3
    )
    ax.plot(
        value.mean,
        y,
        marker=style.marker,
        markersize=6,
        color=style.colour,
        markeredgecolor=SURFACE,
        markeredgewidth=0.8,
        zorder=4,
    )
