"""The induction probe beside the loss: can the model still copy what followed before?"""

import statistics
from collections.abc import Mapping, Sequence

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from qkattn.report.figures import marks
from qkattn.report.figures.style import WIDTH, Rendered, VariantStyle, render, short
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study
from qkattn.verdict.measures import measure_of

LOSS = measure_of('val_loss')
GAIN = measure_of('val_induction_gain')
ACCURACY = measure_of('val_induction_accuracy')


def retrieval_figure(
    study: Study, found: Findings, look: Mapping[str, VariantStyle]
) -> Rendered | None:
    """Loss and probe side by side, a line of panels for each size; None where nobody was probed."""
    measured = [arm for arm in found.arms if GAIN.over_seeds(arm)]
    if not measured:
        return None
    return render(
        beside_loss(measured, look, study.baseline),
        'retrieval',
        'Retrieval beside the loss',
        'The induction probe repeats a sequence: the gain is how much lower the loss is on the '
        'second copy than on the first, the accuracy how often its likeliest token is right; right '
        'is better. Loss, left, is better to the left. Arms are in the order of their loss.',
    )


def beside_loss(
    rows: Sequence[Arm], look: Mapping[str, VariantStyle], baseline: str | None
) -> Figure:
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
                value = measure.over_seeds(row)
                if value is None:
                    marks.reason_text(ax, y, 'not measured')
                    continue
                ends, seeds = (value.low, value.high), measure.of_seeds(row)
                marks.estimate_line(ax, y, look[row.variant], value.mean, *ends, seeds)
                if row.variant == baseline:
                    ax.axvline(value.mean, **marks.REFERENCE)
            ax.xaxis.set_major_locator(MaxNLocator(4))
            ax.set_xlabel(measure.axis)
            marks.name_lines(ax, [row.variant for row in of_size], limit=28)
        if len(sizes) > 1:
            axes[0].set_title(short(size))
    return figure
