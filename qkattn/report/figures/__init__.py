"""The figures of a study: forest, tuning sweeps, learning curves, loss against parameters."""

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullLocator

from qkattn.jobs.output import short
from qkattn.report import prose
from qkattn.report.figures import forest, style
from qkattn.report.figures.drawing import Cut, Drawing, Grid, Panel
from qkattn.stats.scaling import Law
from qkattn.stats.sweep import Sweep
from qkattn.study.tuning import KNOBS
from qkattn.verdict.findings import Findings
from qkattn.verdict.trained_arm import TrainedArm
from qkattn.verdict.trained_study import TrainedStudy

# The most panels of a figure, which limits the height of images.
MOST_PANELS = 60
# Parameter counts are about equal if the largest is at most this many times the smallest.
LARGEST_EQUAL_RATIO = 1.01
# Learning curves leave out this first fraction of the steps, in which variants do not differ.
NOT_DRAWN = 0.2
_VAL_LOSS = 'val loss (nats/token)'


def figures(findings: Findings) -> list[Drawing]:
    """Returns the figures of a study, the main one first."""
    study = findings.study
    styles = style.styles(study.variants, study.baseline)
    drawings = [forest.differences(findings, styles)]
    # A group is a size and corpus, such as 'd_model=128, stdlib'; '' if the study has only one.
    arms_by_group = prose.by_size_and_corpus(findings.arms, study)
    for group_number, (group, arms) in enumerate(arms_by_group.items(), start=1):
        suffix = f'_{group_number}' if group else ''
        for knob in KNOBS:
            drawings.append(_sweeps(knob, arms, styles, suffix, group))
        drawings.append(_learning_curves(study, arms, styles, suffix, group))
    drawings.append(_loss_against_parameters(findings, styles))
    return [drawing for drawing in drawings if drawing is not None]


def _drawing_of_grid(stem: str, grid: Grid, group: str, num_arms: int, **values: object) -> Drawing:
    """Returns a figure of panels for the arms of a group.

    Args:
        stem: The name of the figure.
        grid: The panels.
        group: The size and corpus of the arms, for the caption.
        num_arms: The number of arms without the limit MOST_PANELS, for the caption.
        **values: Further values for the caption.
    """
    cut = None
    if num_arms > MOST_PANELS:
        cut = Cut(num_drawn=MOST_PANELS, num_arms=num_arms)
    caption_values = {'size': group or None, 'cut': cut, **values}
    return Drawing(stem, grid.draw, caption_values, grid)


def _sweeps(
    knob: str, arms: Sequence[TrainedArm], styles: style.Styles, suffix: str, group: str
) -> Drawing | None:
    """Returns the figure of a setting's tuning sweeps, with a panel for each arm.

    Args:
        knob: The setting, such as 'learning_rate'.
        arms: The arms of one size and corpus.
        styles: The style of each variant.
        suffix: The end of the figure's name, such as '_2' in 'sweep_learning_rate_2'.
        group: The size and corpus, for the caption.

    Returns:
        The figure; None if no arm has tuned the setting.
    """
    tuned_arms = [arm for arm in arms if knob in arm.sweeps]
    if not tuned_arms:
        return None

    drawn_arms = tuned_arms[:MOST_PANELS]
    # All panels have the same x axis.
    tried_values = set[float]()
    for arm in drawn_arms:
        tried_values.update(arm.sweeps[knob].values)
    axis_values = sorted(tried_values)

    panels = []
    for arm in drawn_arms:
        sweep = arm.sweeps[knob]
        draw = functools.partial(
            _draw_sweep, sweep=sweep, axis_values=axis_values, keywords=styles[arm.variant]
        )
        chosen = f'{sweep.chosen:.3g}'
        optimum = prose.optimum(sweep) if sweep.bracketed else 'not bracketed'
        panels.append(Panel(arm.variant, draw, notes=(chosen, optimum)))
    xlabel = f'{prose.words(knob)} (log scale)'
    grid = Grid(panels, xlabel, _VAL_LOSS, title_length=36)

    # The caption explains chosen values that are not the vertex of their parabola.
    is_any_beside_vertex = any(_is_beside_vertex(arm.sweeps[knob]) for arm in drawn_arms)
    return _drawing_of_grid(
        f'sweep_{knob}{suffix}',
        grid,
        group,
        num_arms=len(tuned_arms),
        knob=knob,
        beside_vertex=is_any_beside_vertex,
    )


def _is_beside_vertex(sweep: Sweep) -> bool:
    """Returns whether the chosen value differs from the vertex of the fitted parabola."""
    if sweep.optimum is None:
        return False
    # Chosen values are rounded to three significant digits.
    return sweep.chosen != float(f'{sweep.optimum:.3g}')


def _draw_sweep(
    ax: Axes, sweep: Sweep, axis_values: Sequence[float], keywords: dict[str, Any]
) -> None:
    """Draws a tuning sweep: loss against setting, the fitted parabola and the chosen value.

    Args:
        ax: The axes of the panel.
        sweep: The sweep of one arm.
        axis_values: The ticks of the x axis, ascending.
        keywords: The style of the arm, as keywords of `Axes.plot`.
    """
    # Label at most three ticks from right to left: of 7 values, the 7th, the 4th and the 1st.
    label_every = math.ceil(len(axis_values) / 3)
    labelled_values = axis_values[::-1][::label_every]
    ax.set(xscale='log', xlim=(axis_values[0] / 1.3, axis_values[-1] * 1.3))
    ax.set_xticks(labelled_values, [f'{value:.3g}' for value in labelled_values])
    ax.set_xticks(axis_values, [''] * len(axis_values), minor=True)
    ax.locator_params(axis='y', nbins=4)
    _draw_sweep_losses(ax, sweep, keywords)
    _draw_sweep_fit(ax, sweep, keywords['color'])


def _draw_sweep_losses(ax: Axes, sweep: Sweep, keywords: dict[str, Any]) -> None:
    """Draws a dot for each seed and a marker for each mean.

    The y axis shows the losses of the fitted values. Higher means are arrowheads at its top.
    """
    color = keywords['color']
    seeds_x = list[float]()
    seeds_y = list[float]()
    fitted_losses = list[float]()
    for value, losses in zip(sweep.values, sweep.losses, strict=True):
        seeds_x += [value] * len(losses)
        seeds_y += losses
        if value in sweep.fitted:
            fitted_losses += losses
    ax.scatter(seeds_x, seeds_y, color=color, **style.SEEDS)
    markers = keywords | {'linestyle': 'none'}
    ax.plot(sweep.values, sweep.means, label='mean', **markers)
    if fitted_losses:
        # Losses of other values may be much higher, and would flatten the parabola.
        lowest = min(fitted_losses)
        highest = max(fitted_losses)
        pad = 0.1 * (highest - lowest)
        if pad == 0:
            pad = 0.01
        ax.set_ylim(lowest - pad, highest + pad)

    _, top = ax.get_ylim()
    values_above = []
    for value, mean in zip(sweep.values, sweep.means, strict=True):
        if mean > top:
            values_above.append(value)
    if values_above:
        arrowhead = {'marker': '^', 's': 30, 'color': color, 'zorder': 4, 'clip_on': False}
        ax.scatter(values_above, [top] * len(values_above), label=style.BEYOND, **arrowhead)


def _draw_sweep_fit(ax: Axes, sweep: Sweep, color: str) -> None:
    """Draws the fitted parabola, the chosen value, and the interval of the optimum."""
    has_parabola = None not in (sweep.loss, sweep.curvature, sweep.optimum)
    if has_parabola:
        values = np.geomspace(sweep.fitted[0], sweep.fitted[-1], 60)
        losses = sweep.loss + sweep.curvature / 2 * np.log(values / sweep.optimum) ** 2
        ax.plot(values, losses, color=color, zorder=3, label='parabola')
    ax.axvline(sweep.chosen, label='chosen value', **style.REFERENCE)
    has_interval = None not in (sweep.optimum_low, sweep.optimum_high)
    if has_interval:
        band = {'color': style.INK, 'alpha': 0.1, 'linewidth': 0, 'zorder': 0}
        label = '95 % interval of the optimum'
        ax.axvspan(sweep.optimum_low, sweep.optimum_high, label=label, **band)


def _learning_curves(
    study: TrainedStudy,
    arms: Sequence[TrainedArm],
    styles: style.Styles,
    suffix: str,
    group: str,
) -> Drawing | None:
    """Returns the figure of learning curves, with a panel for each variant.

    Each panel also shows the baseline.

    Args:
        arms: The arms of one size and corpus.
        styles: The style of each variant.
        suffix: The end of the figure's name, such as '_2' in 'curves_2'.
        group: The size and corpus, for the caption.

    Returns:
        The figure; None if no arm has a curve.
    """
    baselines = [arm for arm in arms if arm.is_baseline]
    other_arms = [arm for arm in arms if not arm.is_baseline]
    drawn_arms = baselines + other_arms[:MOST_PANELS]
    curve_by_variant = dict[str, pd.DataFrame]()
    for arm in drawn_arms:
        curve = _curve(arm)
        if not curve.empty:
            curve_by_variant[arm.variant] = curve
    if not curve_by_variant:
        return None

    variants = [variant for variant in curve_by_variant if variant != study.baseline]
    if not variants:
        variants = [study.baseline]  # only the baseline has a curve
    limits = _common_limits(curve_by_variant.values())
    panels = []
    for variant in variants:
        draw = functools.partial(
            _draw_curves, study.baseline, curve_by_variant, variant, styles, limits
        )
        panels.append(Panel(variant, draw))
    grid = Grid(panels, 'training tokens', _VAL_LOSS, title_length=44, row_height=1.6)
    return _drawing_of_grid(f'curves{suffix}', grid, group, num_arms=len(other_arms))


def _common_limits(curves: Collection[pd.DataFrame]) -> dict[str, tuple[float, float]]:
    """Returns axis limits that show all learning curves, as keywords of `Axes.set`."""
    first_tokens = min(curve.index[0] for curve in curves)
    last_tokens = max(curve.index[-1] for curve in curves)
    lowest_loss = min(curve.min(axis=None) for curve in curves)
    highest_loss = max(curve.max(axis=None) for curve in curves)
    return {
        'xlim': _padded(first_tokens, last_tokens),
        'ylim': _padded(lowest_loss, highest_loss),
    }


def _padded(low: float, high: float) -> tuple[float, float]:
    """Returns the limits of an axis with some room on each side."""
    pad = 0.05 * (high - low)
    if pad == 0:
        pad = 0.01
    return low - pad, high + pad


def _curve(arm: TrainedArm) -> pd.DataFrame:
    """Returns the validation losses of an arm's seeds during training.

    Rows are evaluations, indexed by training tokens. Columns are seeds. The table is empty without
    evaluations.
    """
    losses_of_seeds = []  # for each seed {step: loss}
    for trial in arm.chosen:
        if trial.evaluations:
            losses_of_seeds.append(trial.evaluations)
    if not losses_of_seeds:
        return pd.DataFrame()

    losses = pd.DataFrame(losses_of_seeds).T  # rows are steps, columns are seeds
    curve = losses.dropna()
    last_step = max(curve.index, default=0)
    curve = curve[curve.index >= NOT_DRAWN * last_step]
    tokens_per_step = arm.example.num_tokens / arm.example.num_steps
    return curve.set_axis(curve.index * tokens_per_step)


def _draw_curves(
    baseline: str,
    curve_by_variant: Mapping[str, pd.DataFrame],
    variant: str,
    styles: style.Styles,
    limits: Mapping[str, tuple[float, float]],
    ax: Axes,
) -> None:
    """Draws the learning curves of the baseline and a variant: the mean and range of seeds.

    `limits` are axis limits, as keywords of `Axes.set`.
    """
    label_by_variant = {baseline: f'baseline {short(baseline, 34)}'}
    # A baseline in its own panel is drawn once.
    label_by_variant[variant] = 'the variant named above'
    for drawn_variant, label in label_by_variant.items():
        curve = curve_by_variant.get(drawn_variant)
        if curve is None:
            continue
        tokens = curve.index
        color = styles[drawn_variant]['color']
        lowest = curve.min(axis=1)
        highest = curve.max(axis=1)
        ax.fill_between(tokens, lowest, highest, color=color, alpha=0.18, linewidth=0)
        line = styles[drawn_variant] | {'marker': ''}
        ax.plot(tokens, curve.mean(axis=1), label=label, zorder=3, **line)
    ax.set(**limits)
    ax.locator_params(axis='x', nbins=2)
    ax.locator_params(axis='y', nbins=4)
    ax.xaxis.set_major_formatter(lambda value, _: prose.si(value))


def _num_parameters(arm: TrainedArm) -> int:
    return arm.example.parameters['total']


def _loss_against_parameters(findings: Findings, styles: style.Styles) -> Drawing | None:
    """Returns the figure of loss against parameter count.

    Returns None without losses, or if all arms have about the same parameter count.
    """
    has_losses = any(arm.chosen for arm in findings.arms)
    if not has_losses:
        return None
    counts = [_num_parameters(arm) for arm in findings.arms]
    are_equal = max(counts) <= LARGEST_EQUAL_RATIO * min(counts)
    if are_equal:
        return None
    has_laws = any(isinstance(scaling.law, Law) for scaling in findings.scaling)
    draw = functools.partial(_draw_loss_against_parameters, findings, styles)
    return Drawing('loss_parameters', draw, {'laws': has_laws})


def _draw_loss_against_parameters(findings: Findings, styles: style.Styles, width: float) -> Figure:
    """Draws a line over sizes for each variant and corpus. `width` is in inches."""
    arms_by_line = dict[tuple[str, str], list[TrainedArm]]()
    for arm in sorted(findings.arms, key=_num_parameters):
        if arm.chosen:
            arms_by_line.setdefault((arm.variant, arm.corpus), []).append(arm)
    law_by_line = {}
    for scaling in findings.scaling:
        if isinstance(scaling.law, Law):
            law_by_line[scaling.variant, scaling.corpus] = scaling.law

    # A narrow figure has fewer legend entries beside each other.
    legend_height = 0.2 * len(arms_by_line) * style.WIDTH / width
    figure = Figure(figsize=(width, 3.4 + legend_height))
    ax = figure.subplots()
    for (variant, corpus), arms in arms_by_line.items():
        name = f'{variant}, {corpus}' if len(findings.study.corpora) > 1 else variant
        law = law_by_line.get((variant, corpus))
        _draw_losses_of_sizes(ax, arms, law, name, styles[variant])

    counts = [_num_parameters(arm) for arm in findings.arms]
    ax.set(xscale='log', xlabel='total parameters (log scale)')
    ax.set_ylabel(f'{findings.split} loss (nats/token)')
    ax.set_xticks(np.geomspace(min(counts), max(counts), 4))
    ax.xaxis.set_minor_locator(NullLocator())
    ax.xaxis.set_major_formatter(lambda value, _: prose.si(value))
    style.legend(figure)
    return figure


def _draw_losses_of_sizes(
    ax: Axes, arms: Sequence[TrainedArm], law: Law | None, name: str, keywords: dict[str, Any]
) -> None:
    """Draws a variant's losses against its parameter counts, with the scaling law as a line.

    Args:
        ax: The axes.
        arms: The arms of the variant, one for each size.
        law: The scaling law; None draws a line through the means instead.
        name: The label in the legend.
        keywords: The style of the variant, as keywords of `Axes.plot`.
    """
    counts = []
    means = []
    # A label that begins with '_' is not in the legend.
    dots = style.SEEDS | {'label': '_', 'color': keywords['color']}
    for arm in arms:
        count = _num_parameters(arm)
        losses = list(arm.losses(arm.split).values())
        ax.scatter([count] * len(losses), losses, **dots)
        counts.append(count)
        means.append(np.mean(losses))

    label = short(name, 40)
    if law is None:
        line = keywords | {'linewidth': 0.8}
        ax.plot(counts, means, label=label, **line)
        return
    markers = keywords | {'linestyle': 'none'}
    ax.plot(counts, means, label=label, **markers)
    curve_counts = np.geomspace(law.sizes[0], law.sizes[-1], 80)
    curve_losses = [law.loss(count) for count in curve_counts]
    curve = keywords | {'marker': '', 'label': f'_law of {name}'}
    ax.plot(curve_counts, curve_losses, **curve)
