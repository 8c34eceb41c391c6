"""Loss against parameters over the sizes: points and fitted scaling laws."""

from collections.abc import Mapping, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from qkattn.report.figures import forest
from qkattn.report.figures.style import (
    MUTED,
    WIDTH,
    Drawing,
    Look,
    VariantStyle,
    label_right,
)
from qkattn.report.prose import si
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings, Scaling
from qkattn.verdict.load import Study


def loss_against_parameters(study: Study, found: Findings, look: Look) -> Drawing:
    """Mean val loss against total parameters, all sizes; with the fitted law where there is one."""
    fits = {scaling.variant: scaling for scaling in found.scaling if not scaling.fit.problem}
    points: dict[str, list[Arm]] = {}
    for arm in found.arms:
        if arm.chosen:
            points.setdefault(arm.variant, []).append(arm)
    figure = Figure(figsize=(WIDTH, max(4.2, 0.172 * len(points) + 1.2)))
    ax = figure.subplots()
    labels = []
    for variant, arms in points.items():
        arms.sort(key=lambda arm: arm.example.parameters['total'])
        labels.append(_draw(ax, variant, arms, look[variant], fits))
    # Any other target counts other parameters than this axis does.
    matched = [arm.example.target_parameters for arm in found.arms if study.matched == 'total']
    targets = sorted({target for target in matched if target is not None})
    for target in targets:
        ax.axvline(target, **forest.REFERENCE | {'color': MUTED})
    if fits:
        ax.set_yscale('log')
        ax.yaxis.set_major_locator(MaxNLocator(7))
        ax.yaxis.set_minor_locator(NullLocator())
        ax.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f'{value:g}'))
    ax.set_ylim(ax.get_ylim())
    label_right(ax, labels)
    _parameter_axis(ax, found.arms, targets)
    ax.set_ylabel('val loss (nats/token' + (', log scale)' if fits else ')'))
    return Drawing.of(figure, 'loss_parameters', targets=bool(targets), laws=bool(fits))


def _draw(
    ax: Axes, variant: str, arms: Sequence[Arm], style: VariantStyle, fits: Mapping[str, Scaling]
) -> tuple[float, float, str, str]:
    """Points and law of one variant; returns its label at the largest size, for `label_right`."""
    x = [arm.example.parameters['total'] for arm in arms]
    y = [arm.val_loss.mean for arm in arms]
    dashes = 'none' if variant in fits else style.dashes
    mark = forest.mean_mark(style, 6)
    ax.plot(x, y, linestyle=dashes, linewidth=0.8, label=variant, **mark)
    for parameters, arm in zip(x, arms, strict=True):
        seeds = [trial.val_loss for trial in arm.chosen]
        forest.seed_dots(ax, [parameters] * len(seeds), seeds, style)
    if variant in fits:
        law = fits[variant].fit
        sizes = np.geomspace(law.sizes[0], law.sizes[-1], 80)
        line = {'color': style.colour, 'linestyle': style.dashes, 'linewidth': style.width}
        ax.plot(sizes, [law.loss(size) for size in sizes], label=f'law of {variant}', **line)
    return x[-1], y[-1], variant, style.colour


def _parameter_axis(ax: Axes, arms: Sequence[Arm], targets: Sequence[float]) -> None:
    by_size: dict[str, list[float]] = {}
    for arm in arms:
        by_size.setdefault(arm.size, []).append(arm.example.parameters['total'])
    digits = 3
    if len(by_size) > 1:
        ax.set_xscale('log')
        ticks = [float(np.median(totals)) for totals in by_size.values()]
        ax.xaxis.set_major_locator(FixedLocator(ticks))
        ax.xaxis.set_minor_locator(NullLocator())
        ax.set_xlabel('total parameters (log scale)')
    else:
        # At least 1 % to either side, so that counts that are nearly equal look nearly equal.
        totals = [*next(iter(by_size.values())), *targets]
        middle, spread = (min(totals) + max(totals)) / 2, max(totals) - min(totals)
        half = max(0.01 * middle, 0.6 * spread)
        ax.set_xlim(middle - half, middle + half)
        ax.xaxis.set_major_locator(MaxNLocator(4))
        ax.set_xlabel('total parameters')
        digits = 3 if half > 0.05 * middle else 4
    ax.xaxis.set_major_formatter(FuncFormatter(lambda value, _: si(value, digits)))
