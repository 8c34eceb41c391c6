"""Loss against parameters over the sizes: points, fitted laws, and what one weight is worth."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from qkattn.report.figures import marks
from qkattn.report.figures.style import MUTED, WIDTH, Rendered, VariantStyle, label_right, render
from qkattn.report.numbers import si
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings, Scaling
from qkattn.verdict.load import Study


def loss_against_parameters(
    study: Study, found: Findings, look: Mapping[str, VariantStyle]
) -> Rendered:
    """Mean val loss against total parameters, all sizes; with the fitted law where there is one."""
    fits = {scaling.variant: scaling for scaling in found.scaling if not scaling.fit.problem}
    # Any other target counts other parameters than this axis does.
    targets = {row.example.target_parameters for row in found.arms} - {None}
    targets = sorted(targets) if study.matched == 'total' else []
    figure = weights_figure(found.arms, fits, targets, look)
    at_equal = ' The dashed line marks the target count.' if targets else ''
    law = ' Curves are the fitted laws E + A N^-a; thin lines only join points.' if fits else ''
    return render(
        figure,
        'loss_parameters',
        'Loss against parameters',
        'Mean val loss against the number of parameters, counted on the parameter tree; small '
        f'dots are seeds.{law}{at_equal}',
    )


def weights_figure(
    rows: Sequence[Arm],
    fits: Mapping[str, Scaling],
    targets: Sequence[int],
    look: Mapping[str, VariantStyle],
) -> Figure:
    """The figure of `loss_against_parameters`."""
    points: dict[str, list[Arm]] = {}
    for row in rows:
        if row.chosen:
            points.setdefault(row.variant, []).append(row)
    figure = Figure(figsize=(WIDTH, max(4.2, 0.172 * len(points) + 1.2)), layout='constrained')
    ax = figure.subplots()
    labels = []
    for variant, of_variant in points.items():
        of_variant.sort(key=lambda row: row.example.parameters['total'])
        labels.append(_draw(ax, variant, of_variant, variant in fits, look[variant]))
        if variant in fits:
            law = fits[variant].fit
            x = np.geomspace(law.sizes[0], law.sizes[-1], 80)
            y = [law.loss(parameters) for parameters in x]
            style = look[variant]
            ax.plot(
                x,
                y,
                color=style.colour,
                linestyle=style.dashes,
                linewidth=style.width,
                label=f'law of {variant}',
            )
    for target in targets:
        ax.axvline(target, **marks.REFERENCE | {'color': MUTED})
    if fits:
        ax.set_yscale('log')
        ax.yaxis.set_major_locator(MaxNLocator(7))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:g}'))
    ax.set_ylim(ax.get_ylim())
    label_right(ax, labels)
    _weight_axis(ax, rows, targets)
    ax.set_ylabel('val loss (nats/token' + (', log scale)' if fits else ')'))
    return figure


def _draw(
    ax: Axes, variant: str, of_variant: Sequence[Arm], fitted: bool, style: VariantStyle
) -> tuple[float, float, str, str]:
    """Points of one arm; returns its label at the largest size, for `label_right`."""
    x = [row.example.parameters['total'] for row in of_variant]
    y = [row.val_loss.mean for row in of_variant]
    dashes = 'none' if fitted else style.dashes
    ax.plot(x, y, linestyle=dashes, linewidth=0.8, label=variant, **marks.mean_mark(style, 6))
    for parameters, row in zip(x, of_variant, strict=True):
        losses = [trial.val_loss for trial in row.chosen]
        marks.seed_dots(ax, [parameters] * len(losses), losses, style)
    return x[-1], y[-1], variant, style.colour


def _weight_axis(ax: Axes, rows: Sequence[Arm], targets: Sequence[int]) -> None:
    totals = [row.example.parameters['total'] for row in rows] + list(targets)
    sizes = list(dict.fromkeys(row.size for row in rows))
    ax.set_xlabel('total parameters')
    if len(sizes) > 1:
        ax.set_xscale('log')
        ticks = [
            float(np.median([r.example.parameters['total'] for r in rows if r.size == size]))
            for size in sizes
        ]
        ax.xaxis.set_major_locator(FixedLocator(ticks))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value)))
        ax.set_xlabel('total parameters (log scale)')
        return
    # At least 1 % to either side, so that counts that are nearly equal look nearly equal.
    middle, spread = (min(totals) + max(totals)) / 2, max(totals) - min(totals)
    half = max(0.01 * middle, 0.6 * spread)
    ax.set_xlim(middle - half, middle + half)
    ax.xaxis.set_major_locator(MaxNLocator(4))
    digits = 3 if half > 0.05 * middle else 4
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value, digits)))


def multipliers(study: Study, found: Findings, look: Mapping[str, VariantStyle]) -> Rendered | None:
    """How many of the baseline's parameters one of each arm's is worth; None where nobody knows."""
    compared = [scaling for scaling in found.scaling if scaling.multiplier is not None]
    if all(scaling.multiplier.problem for scaling in compared):
        return None
    return render(
        multiplier_figure(compared, look),
        'multipliers',
        'What one weight is worth',
        f'How many parameters of {study.baseline} have the loss of one of the arm: the median '
        'over sizes (small dots) with its 95 % bootstrap interval. Right of 1 is better.',
    )


def multiplier_figure(compared: Sequence[Scaling], look: Mapping[str, VariantStyle]) -> Figure:
    """The figure of `multipliers`, the best arm at the top, those without a number at the end."""
    known = [scaling for scaling in compared if not scaling.multiplier.problem]
    known.sort(key=lambda scaling: -scaling.multiplier.value)
    order = known + [scaling for scaling in compared if scaling.multiplier.problem]
    figure = Figure(figsize=(WIDTH, 0.27 * len(order) + 0.75), layout='constrained')
    ax = figure.subplots()
    ax.axvline(1, **marks.REFERENCE)
    for y, scaling in enumerate(known):
        style, found = look[scaling.variant], scaling.multiplier
        marks.estimate_line(ax, y, style, found.value, found.low, found.high, found.by_size)
        text = f'{found.value:.3f} [{found.low:.3f}, {found.high:.3f}]'
        marks.text_right(ax, y, text, fontsize=8)
    for y in range(len(known), len(order)):
        marks.reason_text(ax, y, 'no number: see the table')
    marks.name_lines(ax, [scaling.variant for scaling in order])
    ax.xaxis.set_major_locator(MaxNLocator(6))
    ax.set_xlabel('baseline parameters per weight of the arm')
    return figure
