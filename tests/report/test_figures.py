"""What the figures show: read from the matplotlib objects, not from pixels."""

import numpy as np
import pytest
from matplotlib.axes import Axes

from qkattn.metrics import METRICS
from qkattn.report.figures import figures
from qkattn.report.figures.forest import Line, Panel, forest
from qkattn.report.figures.style import style_sheet, styles
from qkattn.report.page import described
from qkattn.verdict import find, load_study
from tests.report.conftest import BASE, SIZES, arms, row_names, scaled, shifted
from tests.studies import (
    RATES,
    edit_plan,
    probe_record,
    translation_record,
    trial_record,
    tuned_arm,
    write_study,
    write_tuned,
)


def draw(path):
    study = load_study(path)
    found = find(study)
    return found, {drawing.stem: drawing.figure for drawing in figures(study, found)}


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def labels(ax: Axes) -> list[str]:
    return row_names(ax)


def title(ax: Axes) -> list[str]:
    return ax.get_title(loc='left').splitlines()


def seeds(ax: Axes) -> list:
    return [dots for dots in ax.collections if dots.get_label() == 'one seed']


def line(ax: Axes, label: str):
    (found,) = [line for line in ax.lines if line.get_label() == label]
    return found


def test_forest_has_a_line_for_every_declared_arm(study_dir):
    late = ('late/vo', 'd_model=128', 'screening', 'learning_rate')
    write_tuned(study_dir, arms(), declared=[late])
    _, drawn = draw(study_dir)
    (ax,) = drawn['verdicts'].axes
    assert labels(ax) == ['good/vo', 'same/vo', 'wide/vo', 'bad/vo', 'late/vo']
    said = texts(ax)
    words = [text.split()[-1] for text in said if ']  ' in text]
    assert words == ['better', 'equivalent', 'undecided', 'worse']
    assert any('screening' in text or text == 'no result yet' for text in said)


def test_forest_draws_seeds_intervals_and_margin(study_dir):
    found, drawn = draw(write_tuned(study_dir, arms(), margin=0.004))
    (ax,) = drawn['verdicts'].axes
    by_name = {arm.variant: arm for arm in found.arms}
    for name, dots in zip(labels(ax), seeds(ax), strict=True):
        seen = sorted(dots.get_offsets()[:, 0])
        assert seen == pytest.approx(sorted(by_name[name].differences))
    (band,) = [patch for patch in ax.patches if patch.get_label().startswith('±0.004')]
    corners = band.get_extents().transformed(ax.transData.inverted())
    assert (corners.x0, corners.x1) == pytest.approx((-0.004, 0.004))
    difference = by_name['good/vo'].difference
    interval = next(of for of in ax.collections if of.get_label() == '95 % interval')
    ends = interval.get_segments()[0][:, 0]
    assert ends == pytest.approx((difference.low, difference.high))
    said = f'{difference.mean:+.4f} [{difference.low:+.4f}, {difference.high:+.4f}]  better'
    assert said in texts(ax)


def test_an_outlier_does_not_flatten_the_others(study_dir):
    records = [*arms(), *tuned_arm('far/vo', losses=shifted(3.0))]
    _, drawn = draw(write_tuned(study_dir, records))
    (ax,) = drawn['verdicts'].axes
    assert ax.get_xlim()[1] < 0.5
    # One arrowhead for the mean, one for each of the seeds.
    at_edge = [of.get_offsets() for of in ax.collections if of.get_label() in ('mean', 'one seed')]
    at_edge = [offsets for offsets in at_edge if offsets[0, 0] == ax.get_xlim()[1]]
    assert sorted(map(len, at_edge)) == [1, 8]
    assert any(text.startswith('+3.0000') for text in texts(ax))


def test_diverged_verdict_trials_are_counted(study_dir):
    records = [*arms(), *tuned_arm('div/vo', losses=[None, *shifted(0.0)[1:]])]
    _, drawn = draw(write_tuned(study_dir, records))
    assert any(text.endswith('  1 diverged') for text in texts(drawn['verdicts'].axes[0]))


def test_an_arm_without_finished_trials_says_why(study_dir):
    short = [r | {'num_steps': 40} for r in tuned_arm('short/vo', losses=shifted(0.0))]
    path = write_tuned(study_dir, [*arms(), *tuned_arm('lost/vo', losses=[None] * 8), *short])
    edit_plan(path, short[-1]['run'], train__num_steps=400)
    _, drawn = draw(path)
    for stem in ('verdicts', 'losses'):
        said = texts(drawn[stem].axes[0])
        assert said.count('diverged') == 1 and said.count('stopped early') == 1


def test_a_panel_for_each_size(study_dir):
    records = [r for size, d in SIZES.items() for r in arms(size, d_model=d)[:36]]
    _, drawn = draw(write_tuned(study_dir, records))
    titles = [ax.get_title(loc='left') for ax in drawn['verdicts'].axes]
    assert titles == list(SIZES)
    assert 'sweep_learning_rate_4' in drawn and 'curves_4' in drawn


def test_without_a_baseline_result_arms_are_named(study_dir):
    records = [record for record in arms() if record['variant'] != 'qk/vo']
    _, drawn = draw(write_tuned(study_dir, records, declared=[('qk/vo', 'd_model=128', 'verdict')]))
    (ax,) = drawn['verdicts'].axes
    assert len(labels(ax)) == 4
    assert texts(ax).count('the baseline has not finished') == 4


def test_only_a_baseline_has_no_forest(study_dir):
    _, drawn = draw(write_tuned(study_dir, tuned_arm('qk/vo', losses=BASE), matched=None))
    assert 'verdicts' not in drawn and 'losses' in drawn


def test_sweeps_show_screening_losses_fit_and_choice(study_dir):
    found, drawn = draw(write_tuned(study_dir, arms()))
    axes = drawn['sweep_learning_rate'].axes
    assert [title(ax)[0] for ax in axes[:5]] == [a.variant for a in found.arms]
    assert [ax.get_visible() for ax in axes] == [True] * 5 + [False]
    assert len({ax.get_ylim() for ax in axes[:5]}) == 1
    at_bottom = [ax.xaxis.get_tick_params()['labelbottom'] for ax in axes[:5]]
    assert at_bottom == [False] * 3 + [True] * 2
    sweep = found.arms[0].sweeps['learning_rate']
    seen = [sorted(dots.get_offsets()[:, 1]) for dots in seeds(axes[0])]
    assert seen == [sorted(losses) for losses in sweep.losses]
    value, interval = title(axes[0])[1:]
    assert value == f'{sweep.chosen:.3g}' and interval.startswith(f'[{sweep.optimum_low:.3g}, ')
    assert list(line(axes[0], 'mean').get_xdata()) == list(RATES)
    assert line(axes[0], 'chosen value').get_xdata()[0] == sweep.chosen
    # The records are an exact parabola: the curve goes through the means.
    curve = line(axes[0], 'parabola')
    at = np.interp(np.log(RATES[1]), np.log(curve.get_xdata()), curve.get_ydata())
    assert at == pytest.approx(sweep.means[1], abs=1e-4)
    assert len(drawn['sweep_learning_rate'].legends) == 1


def test_sweeps_say_what_is_not_known(study_dir):
    records = [
        *arms(),
        *tuned_arm('edge/vo', losses=BASE, optimum=16e-3),
        *tuned_arm('burst/vo', losses=BASE, diverged_rates=RATES[3:], optimum=2e-3),
        *tuned_arm('lost/vo', losses=(), diverged_rates=RATES),
    ]
    _, drawn = draw(write_tuned(study_dir, records))
    by_title = {title(ax)[0]: ax for ax in drawn['sweep_learning_rate'].axes}
    assert title(by_title['edge/vo'])[-1].endswith(', not bracketed')
    assert 'not bracketed' not in title(by_title['burst/vo'])[-1]
    crosses = line(by_title['burst/vo'], 'a seed diverged')
    assert list(crosses.get_xdata()) == list(RATES[3:])
    assert np.all(np.array(crosses.get_ydata()) > 0.9)
    assert title(by_title['lost/vo'])[1] == 'diverged at every value'
    assert not [ln for ln in by_title['lost/vo'].lines if ln.get_label() == 'chosen value']


def test_sweeps_share_an_axis_only_where_it_shows_them(study_dir):
    lost = tuned_arm('lost/vo', losses=(), diverged_rates=RATES)
    far = tuned_arm('far/vo', losses=shifted(30))
    other = write_tuned(study_dir, [*lost, *arms()[:36], *far])
    _, drawn = draw(other)
    assert len({ax.get_ylim() for ax in drawn['sweep_learning_rate'].axes}) == 3


def test_scaling_draws_the_law_and_the_multiplier(study_dir):
    found, drawn = draw(write_tuned(study_dir, scaled(1.2)))
    (ax,) = drawn['loss_parameters'].axes
    (law,) = [scaling.fit for scaling in found.scaling if scaling.variant == 'b/vo']
    curve = line(ax, '_law of b/vo')
    assert curve.get_ydata()[-1] == pytest.approx(law.loss(law.sizes[-1]))
    assert list(line(ax, 'b/vo').get_xdata()) == pytest.approx(law.sizes)
    (worth,) = drawn['multipliers'].axes
    assert labels(worth) == ['b/vo']
    assert any(text.startswith('1.2') for text in texts(worth))


def test_no_law_no_curve(study_dir):
    two = [r for r in scaled(1.2) if r['size'] in list(SIZES)[:2]]
    found, drawn = draw(write_tuned(study_dir, two))
    assert all(scaling.fit.problem for scaling in found.scaling)
    (ax,) = drawn['loss_parameters'].axes
    assert not [ln for ln in ax.lines if str(ln.get_label()).startswith('_law')]
    assert 'multipliers' not in drawn


def test_retrieval_stands_beside_the_loss(study_dir):
    records = arms()
    for record in records:
        if record['variant'] != 'bad/vo' and record['stage'] == 'verdict':
            record |= {'val_induction_gain': 3 - record['val_loss'], 'val_induction_accuracy': 0.5}
    _, drawn = draw(write_tuned(study_dir, records))
    loss, gain, accuracy = drawn['retrieval'].axes
    assert labels(loss)[:2] == ['good/vo', 'qk/vo']
    assert gain.get_xlabel() == 'induction gain (nats/token)'
    assert accuracy.get_xlabel() == 'induction accuracy (%)'
    seen = sorted(seeds(gain)[0].get_offsets()[:, 0])
    assert seen == pytest.approx(sorted(3 - loss for loss in shifted(-0.03)))


def test_a_line_without_a_mean_is_drawn():
    line = Line('a/vo', absent='no result yet')
    with style_sheet():
        figure = forest([Panel([line], 'x')], styles(['a/vo'], None))
    (ax,) = figure.axes
    assert 'no result yet' in texts(ax) and labels(ax) == ['a/vo']


KINDS = {'translation': translation_record, 'probe': probe_record, 'language': trial_record}


def study_of(kind, directory):
    scores = {'translation': (30.0, 32.0, 25.0), 'probe': (0.5, 0.75, 0.25), 'language': (2, 1, 3)}
    field = {'translation': 'bleu', 'probe': 'accuracy', 'language': 'val_loss'}[kind]
    records = [
        KINDS[kind](variant, seed=seed, **{field: score + seed / 100})
        for variant, score in zip(('qk/vo', 'b/vo', 'c/vo'), scores[kind], strict=True)
        for seed in (0, 1)
    ]
    return write_study(directory, records)


@pytest.mark.parametrize(
    ('kind', 'score', 'curve'),
    [
        ('translation', 'test BLEU', 'val loss (nats/token)'),
        ('probe', 'test accuracy (%)', 'val loss (nats/token)'),
        ('language', None, 'val loss (nats/token)'),
    ],
)
def test_axes_of_other_tasks(study_dir, kind, score, curve):
    study = load_study(study_of(kind, study_dir))
    found = find(study)
    made = {drawing.stem: drawing for drawing in figures(study, found)}
    drawn = {stem: drawing.figure for stem, drawing in made.items()}
    assert drawn['curves'].get_supylabel() == curve
    caption = described(study, found, made['curves'])['caption']
    assert caption.startswith(curve.replace('val', 'Validation', 1))
    assert drawn['losses'].axes[0].get_xlabel() == 'test loss (nats/token)'
    assert ('scores' in drawn) == (score is not None)
    if score:
        (ax,) = drawn['scores'].axes
        assert ax.get_xlabel() == score
        # The highest score is at the top.
        assert labels(ax) == ['b/vo', 'qk/vo', 'c/vo'] and ax.yaxis_inverted()
    if kind == 'probe':
        ends = sorted(line.get_ydata()[-1] for line in drawn['curves'].axes[0].lines)
        assert ends == pytest.approx([0.245, 0.495, 0.745])


def test_many_variants_get_their_own_panels(study_dir):
    records = [probe_record(f'v{i}/vo', accuracy=0.5 + i / 100) for i in range(10)]
    _, drawn = draw(write_study(study_dir, records, baseline='v0/vo'))
    assert drawn['curves'].get_supylabel() == 'val loss (nats/token)'
    assert [ax.get_visible() for ax in drawn['curves'].axes] == [True] * 9 + [False]


def test_a_variant_without_scores_says_so(study_dir):
    _, drawn = draw(write_study(study_dir, [translation_record('qk/vo'), trial_record('b/vo')]))
    assert 'not measured for every seed' in texts(drawn['scores'].axes[0])


@pytest.mark.parametrize('matched', ['total', 'non_embedding', None])
def test_target_line_only_where_the_axis_counts_it(study_dir, matched):
    records = [trial_record('qk/vo'), trial_record('b/vo')]
    records[1]['parameters']['mlp'] += 40000
    records[1]['parameters']['total'] += 40000
    _, drawn = draw(write_study(study_dir, records, matched=matched))
    (ax,) = drawn['loss_parameters'].axes
    vertical = [
        line for line in ax.lines if len(set(line.get_xdata())) == 1 < len(line.get_xdata())
    ]
    assert len(vertical) == (matched == 'total')


def test_no_loss_against_parameters_that_are_equal(study_dir):
    records = [trial_record('qk/vo'), trial_record('b/vo')]
    _, drawn = draw(write_study(study_dir / 'equal', records))
    assert 'loss_parameters' not in drawn and 'losses' in drawn
    larger = [trial_record('qk/vo', 'd_model=256', d_model=256)]
    _, drawn = draw(write_study(study_dir / 'sizes', records + larger))
    assert 'loss_parameters' in drawn


def test_learning_curves_have_ticks_at_the_evaluations(study_dir):
    for num_evals, labelled in ((4, [100, 200, 300, 400]), (9, None), (80, None)):
        directory = study_dir / str(num_evals)
        study = load_study(write_study(directory, [trial_record('qk/vo')], num_evals=num_evals))
        steps = study.runs[0].curve.steps_E
        assert len(steps) == num_evals
        made = {of.stem: of.figure for of in figures(study, find(study))}
        (ax,) = made['curves'].axes
        major, minor = sorted(ax.get_xticks()), sorted(ax.get_xticks(minor=True))
        assert set(major) <= set(steps) and major[-1] == steps[-1] and len(major) <= 4
        assert labelled is None or major == labelled
        assert num_evals > 60 or sorted({*major, *minor}) == list(steps)
        assert num_evals <= 60 or minor == []


def test_the_best_arm_is_at_the_top_where_lower_is_better(study_dir, monkeypatch):
    for metric in METRICS.values():
        monkeypatch.setitem(vars(metric), 'direction', 'lower')
    study = load_study(study_of('probe', study_dir))
    found = find(study)
    (drawn,) = (of for of in figures(study, found) if of.stem == 'scores')
    assert labels(drawn.figure.axes[0]) == ['c/vo', 'qk/vo', 'b/vo']
    assert 'left is better' in described(study, found, drawn)['caption']


def test_yardsticks_are_lines(study_dir):
    """In the curves the axis reaches down to it; a sweep has its number in the legend at least."""
    losses = {'val': {'5-gram': 1.5}, 'test': {'5-gram': 1.4}}
    _, drawn = draw(write_tuned(study_dir, arms(), yardsticks={'losses': losses}))
    (curves,), sweep = drawn['curves'].axes, drawn['sweep_learning_rate'].axes[0]
    assert set(line(curves, '5-gram, 1.500').get_ydata()) == {1.5}
    assert curves.get_ylim()[0] < 1.5
    assert set(line(sweep, '5-gram, 1.500 (below)').get_ydata()) == {1.5}
    assert sweep.get_ylim()[0] > 1.5


def test_a_study_without_yardsticks_has_no_line(study_dir):
    _, drawn = draw(write_study(study_dir, [trial_record('qk/vo'), trial_record('b/vo')]))
    assert not [of for of in drawn['curves'].axes[0].lines if 'gram' in str(of.get_label())]
