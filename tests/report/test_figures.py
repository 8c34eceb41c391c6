"""What the figures of a tuned study show: read from the matplotlib objects, not from pixels."""

import dataclasses
import math

import numpy as np
import pytest
from matplotlib.axes import Axes

from qkattn.report import find, load_study
from qkattn.report.figures.plots import figures
from qkattn.report.figures.style import SVG_COLOURS, rc, styles
from qkattn.report.figures.verdict_plot import Line, forest
from tests.studies import RATES, edit_plan, tuned_arm, write_tuned

from .pages import capture_figures

BASE = tuple(2 + 0.01 * math.sin(seed) for seed in range(8))
SIZES = {f'd_model={d}': d for d in (32, 64, 96, 128)}


def shifted(mean, spread=0.001):
    return [loss + mean + spread * (-1) ** seed for seed, loss in enumerate(BASE)]


def arms(size='d_model=128', **changes):
    """A baseline and one arm of each word."""
    made = {
        'qk/vo': BASE,
        'good/vo': shifted(-0.03),
        'bad/vo': shifted(0.05),
        'same/vo': shifted(0.0005),
        'wide/vo': shifted(0.006, 0.02),
    }
    return [r for v, losses in made.items() for r in tuned_arm(v, size, losses, **changes)]


@pytest.fixture
def drawn(monkeypatch):
    return capture_figures(monkeypatch)


def draw(path):
    study = load_study(path)
    found = find(study)
    return study, found, {figure.stem: figure for figure in figures(study, found)}


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def labels(ax: Axes) -> list[str]:
    return [label.get_text() for label in ax.get_yticklabels()]


def line(ax: Axes, label: str):
    (found,) = [line for line in ax.lines if line.get_label() == label]
    return found


def test_forest_has_a_line_for_every_declared_arm(study_dir, drawn):
    late = ('late/vo', 'd_model=128', 'screening', 'learning_rate')
    write_tuned(study_dir, arms(), declared=[late])
    draw(study_dir)
    (ax,) = drawn['verdicts'].axes
    assert labels(ax) == ['good/vo', 'same/vo', 'wide/vo', 'bad/vo', 'late/vo']
    said = texts(ax)
    words = [t for t in said if t in ('better', 'worse', 'equivalent', 'undecided')]
    assert words == ['better', 'equivalent', 'undecided', 'worse']
    assert any('screening' in text or text == 'no result yet' for text in said)


def test_forest_draws_seeds_intervals_and_margin(study_dir, drawn):
    _, found, _ = draw(write_tuned(study_dir, arms(), margin=0.004))
    (ax,) = drawn['verdicts'].axes
    by_name = {arm.variant: arm for arm in found.arms}
    for name, dots in zip(labels(ax), ax.collections, strict=True):
        seen = sorted(dots.get_offsets()[:, 0])
        assert seen == pytest.approx(sorted(by_name[name].differences))
    (band,) = [patch for patch in ax.patches if patch.get_label() == 'margin']
    corners = band.get_extents().transformed(ax.transData.inverted())
    assert (corners.x0, corners.x1) == pytest.approx((-0.004, 0.004))
    difference = by_name['good/vo'].difference
    ends = [tuple(line.get_xdata()) for line in ax.lines if len(line.get_xdata()) == 2]
    assert any(pair == pytest.approx((difference.low, difference.high)) for pair in ends)
    assert f'{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]' in texts(ax)


def test_an_outlier_does_not_flatten_the_others(study_dir, drawn):
    records = [*arms(), *tuned_arm('far/vo', losses=shifted(3.0))]
    draw(write_tuned(study_dir, records))
    (ax,) = drawn['verdicts'].axes
    assert ax.get_xlim()[1] < 0.5
    # One arrowhead for the mean, one for the seeds.
    assert [line.get_marker() for line in ax.lines if line.get_marker() == '>'] == ['>', '>']
    assert any(text.startswith('+3.0000') for text in texts(ax))


def test_diverged_verdict_trials_are_counted(study_dir, drawn):
    records = [*arms(), *tuned_arm('div/vo', losses=[None, *shifted(0.0)[1:]])]
    draw(write_tuned(study_dir, records))
    assert any(text.endswith('\n1 diverged') for text in texts(drawn['verdicts'].axes[0]))


def test_an_arm_without_finished_trials_says_why(study_dir, drawn):
    short = [r | {'num_steps': 40} for r in tuned_arm('short/vo', losses=shifted(0.0))]
    path = write_tuned(study_dir, [*arms(), *tuned_arm('lost/vo', losses=[None] * 8), *short])
    edit_plan(path, short[-1]['run'], train__num_steps=400)
    draw(path)
    for stem in ('verdicts', 'losses'):
        said = texts(drawn[stem].axes[0])
        assert said.count('diverged') == 1 and said.count('stopped early') == 1


def test_a_panel_for_each_size(study_dir, drawn):
    records = [r for size, d in SIZES.items() for r in arms(size, d_model=d)]
    draw(write_tuned(study_dir, records))
    titles = [ax.get_title(loc='left') for ax in drawn['verdicts'].axes]
    assert titles == list(SIZES)
    assert 'bowl_learning_rate_4' in drawn and 'curves_4' in drawn


def test_without_a_baseline_result_arms_are_named(study_dir, drawn):
    records = [record for record in arms() if record['variant'] != 'qk/vo']
    draw(write_tuned(study_dir, records, declared=[('qk/vo', 'd_model=128', 'verdict')]))
    (ax,) = drawn['verdicts'].axes
    assert len(labels(ax)) == 4
    assert texts(ax).count('the baseline has not finished') == 4


def test_only_a_baseline_has_no_forest(study_dir, drawn):
    draw(write_tuned(study_dir, tuned_arm('qk/vo', losses=BASE)))
    assert 'verdicts' not in drawn and 'losses' in drawn


def test_bowls_show_screening_losses_fit_and_choice(study_dir, drawn):
    _, found, _ = draw(write_tuned(study_dir, arms()))
    axes = drawn['bowl_learning_rate'].axes
    assert [ax.get_title(loc='left') for ax in axes[:5]] == [a.variant for a in found.arms]
    assert [ax.get_visible() for ax in axes] == [True] * 5 + [False] * 3
    at_bottom = [ax.xaxis.get_tick_params()['labelbottom'] for ax in axes[:5]]
    assert at_bottom == [False] + [True] * 4
    bowl = found.arms[0].sweeps['learning_rate']
    seeds = [sorted(dots.get_offsets()[:, 1]) for dots in axes[0].collections]
    assert seeds == [sorted(losses) for losses in bowl.losses]
    assert list(line(axes[0], 'mean').get_xdata()) == list(RATES)
    assert line(axes[0], 'chosen').get_xdata()[0] == bowl.chosen
    # The records are an exact parabola: the curve goes through the means.
    curve = line(axes[0], 'fit')
    at = np.interp(np.log(RATES[1]), np.log(curve.get_xdata()), curve.get_ydata())
    assert at == pytest.approx(bowl.means[1], abs=1e-4)
    assert len(drawn['bowl_learning_rate'].legends) == 1


def test_bowls_say_what_is_not_known(study_dir, drawn):
    records = [
        *arms(),
        *tuned_arm('edge/vo', losses=BASE, optimum=16e-3),
        *tuned_arm('burst/vo', losses=BASE, diverged_rates=RATES[3:], optimum=2e-3),
        *tuned_arm('lost/vo', losses=(), diverged_rates=RATES),
    ]
    draw(write_tuned(study_dir, records))
    by_title = {ax.get_title(loc='left'): ax for ax in drawn['bowl_learning_rate'].axes}
    assert 'not bracketed' in texts(by_title['edge/vo'])
    assert 'not bracketed' not in texts(by_title['burst/vo'])
    crosses = line(by_title['burst/vo'], 'diverged')
    assert list(crosses.get_xdata()) == list(RATES[3:])
    assert np.all(np.array(crosses.get_ydata()) > 0.9)
    assert 'diverged at every value' in texts(by_title['lost/vo'])
    assert not [ln for ln in by_title['lost/vo'].lines if ln.get_label() == 'chosen']


def test_bowls_share_an_axis_only_where_it_shows_them(study_dir, drawn):
    draw(write_tuned(study_dir, arms()))
    assert len({ax.get_ylim() for ax in drawn['bowl_learning_rate'].axes[:5]}) == 1
    other = write_tuned(study_dir / 'b', [*arms(), *tuned_arm('far/vo', losses=shifted(30))])
    draw(other)
    assert len({ax.get_ylim() for ax in drawn['bowl_learning_rate'].axes[:6]}) > 1


def scaled(multiplier):
    """Losses of a law in parameters, of an arm whose parameters count for `multiplier` each."""
    records = []
    for size, d in SIZES.items():
        parameters = tuned_arm('qk/vo', size, BASE, d_model=d)[0]['parameters']['total']
        for variant, factor in (('qk/vo', 1.0), ('b/vo', multiplier)):
            loss = 1.5 + 30 * (factor * parameters) ** -0.3
            seeds = [loss + 1e-4 * math.sin(7 * seed + d) for seed in range(8)]
            records += tuned_arm(variant, size, seeds, d_model=d)
    return records


def test_scaling_draws_the_law_and_the_multiplier(study_dir, drawn):
    _, found, _ = draw(write_tuned(study_dir, scaled(1.2)))
    (ax,) = drawn['loss_parameters'].axes
    (law,) = [scaling.fit for scaling in found.scaling if scaling.variant == 'b/vo']
    curve = line(ax, 'law of b/vo')
    assert curve.get_ydata()[-1] == pytest.approx(law.loss(law.sizes[-1]))
    assert list(line(ax, 'b/vo').get_xdata()) == pytest.approx(law.sizes)
    (worth,) = drawn['multipliers'].axes
    assert labels(worth) == ['b/vo']
    assert texts(worth)[0].startswith('1.2')


def test_no_law_no_curve(study_dir, drawn):
    two = [r for r in scaled(1.2) if r['size'] in list(SIZES)[:2]]
    _, found, _ = draw(write_tuned(study_dir, two))
    assert all(scaling.fit.problem for scaling in found.scaling)
    (ax,) = drawn['loss_parameters'].axes
    assert not [ln for ln in ax.lines if str(ln.get_label()).startswith('law')]
    assert 'multipliers' not in drawn


def test_retrieval_stands_beside_the_loss(study_dir, drawn):
    records = arms()
    for record in records:
        if record['variant'] != 'bad/vo' and record['stage'] == 'verdict':
            record |= {'val_induction_gain': 3 - record['val_loss'], 'val_induction_accuracy': 0.5}
    draw(write_tuned(study_dir, records))
    loss, gain, accuracy = drawn['retrieval'].axes
    assert labels(loss)[:2] == ['good/vo', 'qk/vo']
    assert gain.get_xlabel() == 'induction gain (nats/token)'
    assert accuracy.get_xlabel() == 'induction accuracy (%)'
    seeds = sorted(gain.collections[0].get_offsets()[:, 0])
    assert seeds == pytest.approx(sorted(3 - loss for loss in shifted(-0.03)))


def test_no_probe_no_retrieval(study_dir, drawn):
    draw(write_tuned(study_dir, arms()))
    assert 'retrieval' not in drawn


def test_one_line_of_any_kind_is_drawn():
    found = Line('a/vo', 's', None, (), '', 0, 'no result yet')
    with rc():
        figure = forest([found], styles(['a/vo'], None), 0.005)
    (ax,) = figure.axes
    assert 'no result yet' in texts(ax) and ax.get_xlim()[0] < -0.005
    assert dataclasses.astuple(found)[0] in labels(ax)


def test_paper_svg_stands_alone(study_dir):
    _, _, made = draw(write_tuned(study_dir, arms()))
    for figure in made.values():
        assert 'var(--' not in figure.paper_svg and figure.paper_svg.startswith('<?xml')
        assert 'xmlns="http://www.w3.org/2000/svg"' in figure.paper_svg
        assert 'fill="#ffffff"' in figure.paper_svg and 'date' not in figure.paper_svg
        assert 'xmlns' not in figure.svg
        for colour in SVG_COLOURS:
            assert colour not in figure.svg
