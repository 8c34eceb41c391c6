"""Forest plots: mean, interval and seeds of each variant, for scores, losses, differences."""

import math
from collections.abc import Callable, Sequence

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from qkattn.report.figures import marks
from qkattn.report.figures.style import WIDTH, Rendered, VariantStyle, render, short
from qkattn.report.sentences import progress
from qkattn.stats.inference import Difference, Estimate
from qkattn.verdict.arms import Arm
from qkattn.verdict.findings import Findings
from qkattn.verdict.load import Study
from qkattn.verdict.measures import Measure, measure_of


def final_losses(study: Study, rows: Sequence[Arm], look: dict[str, VariantStyle]) -> Rendered:
    """Val loss per variant: a dot per seed, mean and t interval, a line at the baseline's mean."""
    figure = _levels(study, rows, look, measure_of('val_loss'))
    return render(
        figure,
        'losses',
        'Final loss',
        'Validation loss at the end of training, best variant at the top; left is better. '
        + _settings(study),
    )


def final_scores(
    study: Study, rows: Sequence[Arm], look: dict[str, VariantStyle], measure: Measure
) -> Rendered:
    """The same of a score that is better when higher."""
    figure = _levels(study, rows, look, measure, higher_is_better=True)
    name = f'{measure.name[:1].upper()}{measure.name[1:]}'
    return render(
        figure,
        'scores',
        name,
        f'{name} at the end of training, best variant at the top; right is better. '
        + _settings(study),
    )


def _settings(study: Study) -> str:
    if study.tuning is not None:
        return 'The seeds are those of the verdict, each variant at its own tuned settings.'
    return 'Each variant is shown at the learning rate with its lowest mean val loss.'


def _levels(
    study: Study,
    rows: Sequence[Arm],
    look: dict[str, VariantStyle],
    measure: Measure,
    higher_is_better: bool = False,
) -> Figure:
    def baseline_line(ax: Axes, of_size: Sequence[Arm]) -> None:
        for row in of_size:
            if row.is_baseline and (value := measure.over_seeds(row)):
                ax.axvline(value.mean, **marks.REFERENCE)

    return _forest(
        study,
        rows,
        look,
        value=measure.over_seeds,
        seeds=measure.of_seeds,
        reference=baseline_line,
        reference_name=f'baseline mean ({short(study.baseline)})' if study.baseline else None,
        xlabel=measure.axis,
        skip=None,
        absent='not measured for every seed',
        sharex=False,
        higher_is_better=higher_is_better,
    )


def differences(study: Study, found: Findings, look: dict[str, VariantStyle]) -> Rendered:
    """Paired difference to the baseline per variant, with its t interval and one dot per seed."""
    arms = {(arm.variant, arm.size): arm for arm in found.arms}
    figure = _forest(
        study,
        found.arms,
        look,
        value=lambda row: arms[row.variant, row.size].difference,
        seeds=lambda row: arms[row.variant, row.size].differences,
        reference=lambda ax, _: ax.axvline(0, **marks.REFERENCE),
        reference_name='no difference',
        xlabel='difference in val loss (nats/token)',
        skip=study.baseline,
        absent='no seed in common with the baseline',
        sharex=True,
    )
    return render(
        figure,
        'differences',
        'Difference to the baseline',
        f'Val loss minus that of {study.baseline}, seed by seed; right of zero is worse. Pairing '
        'removes what all variants share at a seed, so this is usually sharper.',
    )


def _forest(
    study: Study,
    rows: Sequence[Arm],
    look: dict[str, VariantStyle],
    *,
    value: Callable[[Arm], Estimate | Difference | None],
    seeds: Callable[[Arm], Sequence[float]],
    reference: Callable[[Axes, Sequence[Arm]], object],
    reference_name: str | None,
    xlabel: str,
    skip: str | None,
    absent: str,
    sharex: bool,
    higher_is_better: bool = False,
) -> Figure:
    by_place = {(row.variant, row.size): row for row in rows}
    variants = [variant for variant in study.variants if variant != skip]

    def rank(variant: str) -> float:
        found = [by_place.get((variant, size)) for size in study.sizes]
        means = [value(row).mean for row in found if row and value(row)]
        mean = sum(means) / len(means) if means else math.inf
        return -mean if means and higher_is_better else mean

    variants.sort(key=rank)
    sizes = study.sizes
    num_columns = min(len(sizes), 3)
    num_rows = math.ceil(len(sizes) / num_columns)
    width = WIDTH if num_columns == 1 else 2.4 + 2.5 * num_columns
    height = num_rows * (0.23 * len(variants) + 0.75) + 0.55
    figure = Figure(figsize=(width, height), layout='constrained')
    axes = marks.panels(figure, num_rows, num_columns, len(sizes), sharex=sharex, sharey=True)
    intervals = False
    for ax, size in zip(axes, sizes, strict=True):
        for y, variant in enumerate(variants):
            row = by_place.get((variant, size))
            estimate = value(row) if row else None
            if estimate is None:
                marks.reason_text(ax, y, reason(study, (variant, size), row, absent))
                continue
            intervals |= estimate.low is not None
            ends = estimate.low, estimate.high
            marks.estimate_line(ax, y, look[variant], estimate.mean, *ends, seeds(row))
        reference(ax, [row for row in rows if row.size == size])
        marks.name_lines(ax, variants)
        ax.xaxis.set_major_locator(MaxNLocator(5 if num_columns == 1 else 3))
        ax.set_xlabel(xlabel)
        ax.tick_params(labelbottom=True)
        if len(sizes) > 1:
            ax.set_title(short(size))
    handles = marks.mean_handles(intervals, mean='mean over seeds')
    if reference_name:
        handles.append(Line2D([], [], label=reference_name, **marks.REFERENCE))
    figure.legend(handles=handles, loc='outside lower center', ncols=2 if width < 6.7 else 4)
    return figure


def reason(study: Study, place: tuple[str, str], row: Arm | None, absent: str) -> str:
    """Why an arm at a size has no number to draw; `absent` where it has finished trials."""
    if row is not None and row.chosen:
        return absent
    if row is not None and row.verdict_trials:
        return 'stopped early' if any(t.finished for t in row.verdict_trials) else 'diverged'
    if place not in study.arms:
        return 'not in the grid'
    missing = [progress(run) for run in study.missing if (run.variant, run.size) == place]
    return missing[-1] if missing and missing[-1] != 'not started' else 'no result yet'
