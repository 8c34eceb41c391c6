"""What the figures show, read from the matplotlib objects; that they are legible; their files."""

import sys
from typing import NamedTuple

import numpy as np
import pytest
from matplotlib.collections import PathCollection
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from qkattn.jobs.output import short
from qkattn.report import described
from qkattn.report.figures import attention_figure, figures
from qkattn.report.figures.drawing import Drawing, picture, write_plots
from qkattn.report.figures.forest import Line, forest
from qkattn.report.figures.style import WIDE, WIDTH, style_sheet, styles
from qkattn.verdict import Findings
from tests.report.conftest import (
    LONG,
    SIZES,
    findings_of,
    losses_around,
    records_of_a_scaling_law,
    records_of_every_decision,
    row_names,
)
from tests.studies import RATES, tuned_arm, write_tuned


class Drawn(NamedTuple):
    """Findings of a study, and its figures by name."""

    findings: Findings
    figure_by_name: dict[str, Figure]


def draw(path):
    findings = findings_of(path)
    return Drawn(findings, {drawing.stem: drawing.figure() for drawing in figures(findings)})


def marks_at(ax, label: str) -> list[np.ndarray]:
    """The x values of each collection of marks with this label."""
    return [c.get_offsets()[:, 0] for c in ax.collections if c.get_label() == label]


def line(ax, label: str):
    (match,) = [line for line in ax.lines if line.get_label() == label]
    return match


@pytest.fixture(scope='module')
def grids(drawn):
    """The grids of panels of `drawn`."""
    return [drawing.grid for drawing in figures(drawn.findings) if drawing.grid]


@pytest.fixture(scope='module')
def drawn(tmp_path_factory):
    """A study with every decision, and with arms that diverge or lack results."""
    records = [*records_of_every_decision(), *tuned_arm(LONG, losses=losses_around(0.006))]
    for record in records:
        if record['variant'] == 'bad/vo':
            record['parameters'] = record['parameters'] | {'total': 10**6}
    records += tuned_arm('far/vo', losses=losses_around(3.0), diverged_rates=RATES[-1:])
    records += tuned_arm('lost/vo', losses=[None] * 8)
    records += tuned_arm('half/vo', losses=[None, *losses_around(0.0)[1:]])
    late = ('late/vo', 'd_model=128', 'screening', 'learning_rate')
    path = tmp_path_factory.mktemp('drawn') / 'study'
    path = write_tuned(path, records, declared=[late], num_evals=4, margin=0.004)
    result = draw(path)
    for figure in result.figure_by_name.values():
        with style_sheet():
            figure.draw_without_rendering()
    return result


def test_a_forest_shows_every_declared_arm(drawn):
    findings, figure_by_name = drawn
    (ax,) = figure_by_name['verdicts'].axes
    names = row_names(ax)
    finished = ['good/vo', 'half/vo', 'same/vo', 'wide/vo', short(LONG, 44), 'bad/vo', 'far/vo']
    assert names == [*finished, 'lost/vo', 'late/vo']
    shown = [text.get_text() for text in ax.texts]
    assert shown.count('diverged') == shown.count('no result yet') == 1

    # The line of an arm: its numbers in words, its interval, its seeds, and the margin.
    by_name = {arm.variant: arm for arm in findings.arms}
    good = by_name['good/vo'].difference
    assert f'{good.mean:+.4f} [{good.low:+.4f}, {good.high:+.4f}]  better' in shown
    assert any(text.endswith('undecided  1 diverged') for text in shown)
    (interval, *_) = [c for c in ax.collections if c.get_label() == '95 % interval']
    assert interval.get_segments()[0][:, 0] == pytest.approx((good.low, good.high))
    (seeds, *_) = marks_at(ax, 'one seed')
    differences = by_name['good/vo'].comparison.differences.values()
    assert sorted(seeds) == pytest.approx(sorted(differences))
    (band,) = [patch for patch in ax.patches if patch.get_label().startswith('±0.004')]
    corners = band.get_extents().transformed(ax.transData.inverted())
    assert (corners.x0, corners.x1) == pytest.approx((-0.004, 0.004))

    # The axis ends before an arm that is far off: its mean and seeds are arrowheads at the edge.
    means = np.concatenate(marks_at(ax, 'mean'))
    edge = ax.get_xlim()[1]
    assert (means[:-1] < 0.1).all()
    assert means[-1] > edge < 0.5
    assert np.concatenate(marks_at(ax, 'off the scale')).tolist() == [edge] * 2


def test_marks_beyond_the_edge_of_a_forest_are_arrowheads_at_it():
    def line(name, mean, low, high):
        reported = (mean - 0.1, mean + 0.1)
        return Line(name, mean, low, high, seeds=(mean,), reported=reported)

    lines = [
        line('in/vo', 0.1, -0.1, 0.2),
        line('near/vo', -0.1, -0.2, 0.1),
        line('wide/vo', 0.1, -9.0, 9.0),
        line('far/vo', 50.0, 40.0, 60.0),
    ]
    names = [line.arm for line in lines]
    with style_sheet():
        (ax,) = forest({'': lines}, 'x', styles(names, None), far=1.5).axes
    low, high = ax.get_xlim()
    arrowheads = [c for c in ax.collections if c.get_label() == 'off the scale']
    places = [tuple(c.get_offsets()[0]) for c in arrowheads]
    # Line 2, wide/vo, has both ends of its interval there; line 3, far/vo, what others report,
    # its mean with the interval, and below these its seed.
    assert places == [(low, 2), (high, 2), (high, 3), (high, 3), (high, 3.16)]


@pytest.mark.parametrize('number', [1, 2, 8])
def test_texts_of_a_forest_do_not_overlap(number):
    lines = [Line(f'{n}/vo', 1.0, 0.5, 2.0, (1.0, 1.1), right='gjy') for n in range(number)]
    styles_of_lines = styles([line.arm for line in lines], None)
    with style_sheet():
        figure = forest({'': lines}, 'x', styles_of_lines, margin=0.00833)
        figure.draw_without_rendering()
    boxes = [text.get_bbox_patch().get_window_extent() for text in figure.axes[0].texts]
    assert len(boxes) == 2 * number
    for place, box in enumerate(boxes):
        assert not any(box.overlaps(other) for other in boxes[:place])


def test_sweeps_show_how_a_rate_was_chosen(drawn):
    findings, figure_by_name = drawn
    axes = figure_by_name['sweep_learning_rate'].axes
    swept = [arm for arm in findings.arms if arm.sweeps]
    # The first panel, of the baseline: its title, its points, and the value that was chosen.
    ax = axes[0]
    sweep = swept[0].sweeps['learning_rate']
    interval = f'[{sweep.optimum_low:.3g}, {sweep.optimum_high:.3g}]'
    assert ax.get_title(loc='left').splitlines() == ['qk/vo', f'{sweep.chosen:.3g}', interval]
    losses = [c.get_offsets()[:, 1] for c in ax.collections if c.get_label() == 'one seed']
    assert sorted(losses[0]) == sorted(loss for of_value in sweep.losses for loss in of_value)
    assert line(ax, 'chosen value').get_xdata()[0] == sweep.chosen
    # The records are an exact parabola: the curve goes through the means.
    curve = line(ax, 'parabola')
    at_second_rate = np.interp(np.log(RATES[1]), np.log(curve.get_xdata()), curve.get_ydata())
    assert at_second_rate == pytest.approx(sweep.means[1], abs=1e-4)

    # The panel of an arm whose losses are higher by 3 has a scale of its own.
    far = axes[[arm.variant for arm in swept].index('far/vo')]
    assert far.get_ylim()[0] > ax.get_ylim()[1] > max(map(max, sweep.losses))
    # The rate at which it diverged is marked as off the scale; the baseline has no such mark.
    assert [x.tolist() for x in marks_at(far, 'off the scale')] == [[RATES[-1]]]
    assert marks_at(ax, 'off the scale') == []


def test_learning_curves_stand_beside_the_baseline(drawn):
    figure = drawn.figure_by_name['curves']
    axes = {ax.get_title(loc='left'): ax for ax in figure.axes}
    assert len(axes) == 7
    assert 'qk/vo' not in axes
    for ax in axes.values():
        assert len(line(ax, 'baseline qk/vo').get_ydata()) == 4
    good = line(axes['good/vo'], 'the variant named above')
    assert good.get_ydata()[-1] == pytest.approx(np.mean(losses_around(-0.03)))
    assert good.get_xdata()[-1] == 400 * 768


def test_panels_of_long_names_that_differ_in_the_middle_have_titles_of_their_own(study_dir):
    names = [f'low_rank(rank={rank})/vo?num_kv_heads=1' for rank in (4, 8)]
    records = [r for name in ('qk/vo', *names) for r in tuned_arm(name, losses=losses_around(0.0))]
    _, figure_by_name = draw(write_tuned(study_dir, records, num_evals=4))
    for stem in ('sweep_learning_rate', 'curves'):
        titles = [ax.get_title(loc='left').splitlines()[0] for ax in figure_by_name[stem].axes]
        assert titles[-2:] == names


def test_text_is_legible_on_a_narrow_screen(drawn):
    """Letters have at least 11 pixels where a figure is 368 pixels wide: a page of 400 less its
    margins."""
    for stem, figure in drawn.figure_by_name.items():
        seen = [text for text in figure.findobj(Text) if text.get_text().strip()]
        assert len(seen) > 5
        assert figure.get_figwidth() == WIDTH
        for text in seen:
            assert text.get_fontsize() * 96 / 72 * 368 / (96 * WIDTH) >= 11, (stem, text)


def test_texts_cover_neither_each_other_nor_marks(drawn):
    for stem, figure in drawn.figure_by_name.items():
        box = figure.get_tightbbox()
        whole = figure.bbox_inches
        assert -0.01 <= box.x0 and box.x1 <= whole.x1 + 0.01, stem
        assert -0.01 <= box.y0 and box.y1 <= whole.y1 + 0.01, stem

        # No text overlaps another or lies on a mark.
        for ax in figure.axes:
            boxes = [text.get_window_extent() for text in ax.texts]
            marks = [ax.transData.transform(c.get_offsets()) for c in ax.collections]
            for place, box in enumerate(boxes):
                assert not any(box.overlaps(other) for other in boxes[:place]), (stem, place)
                assert not any(box.contains(*mark) for c in marks for mark in c), (stem, place)


def drawings_of_arms(path, number):
    """The drawings, by name, of a study of this many arms beside the baseline."""
    variants = ['qk/vo', *(f'v{place}/vo' for place in range(number))]
    records = [
        r for i, v in enumerate(variants) for r in tuned_arm(v, losses=losses_around(0.01 * i))
    ]
    findings = findings_of(write_tuned(path, records, num_evals=3, num_documents=5))
    return {drawing.stem: drawing for drawing in figures(findings)}


def test_figures_of_many_arms_show_the_first_and_last_ones(study_dir, monkeypatch):
    monkeypatch.setattr(sys.modules[figures.__module__], 'MOST_PANELS', 3)
    monkeypatch.setattr(sys.modules[forest.__module__], 'MOST_LINES', 4)
    few = drawings_of_arms(study_dir / 'few', 4)
    many = drawings_of_arms(study_dir / 'many', 8)
    for stem in ('sweep_learning_rate', 'curves'):
        assert len(few[stem].grid.panels) == len(many[stem].grid.panels) == 3
    # 'cut' is how many are shown of how many: of 8 arms in a forest, the first and the last two.
    assert few['verdicts'].values['cut'] is None
    assert many['verdicts'].values['cut'] == (2, 8)
    assert row_names(many['verdicts'].figure().axes[0]) == ['v0/vo', 'v1/vo', 'v6/vo', 'v7/vo']
    assert many['sweep_learning_rate'].values['cut'] == (3, 9)
    assert many['curves'].values['cut'] == (3, 8)


def one_line(width):
    return forest(
        {'': [Line('a/vo', absent='no result yet')]}, 'x', styles(['a/vo'], None), width=width
    )


def test_the_formats_asked_for_are_written(tmp_path):
    write_plots(tmp_path, [Drawing('new', one_line)], ['png', 'pdf'])
    files = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    assert files.keys() == {'new.png', 'new.pdf'}
    image = imread(tmp_path / 'new.png')[..., :3]
    assert np.mean(np.any(image < 0.9, axis=-1)) > 0.01  # drawn
    # Fonts that journals take, no bitmap, and no date.
    assert b'/CIDFontType2' in files['new.pdf']
    for mark in (b'/Type3', b'Subtype /Image', b'/CreationDate'):
        assert mark not in files['new.pdf']
    write_plots(tmp_path, [Drawing('new', one_line)], ['png', 'pdf'])
    assert files == {path.name: path.read_bytes() for path in tmp_path.iterdir()}


def test_figures_of_an_earlier_report_do_not_stay(tmp_path):
    for name in ('old.svg', 'new.png', 'notes.txt'):
        (tmp_path / name).write_text('earlier')
    write_plots(tmp_path, [Drawing('new', one_line)], ['svg'])
    assert {path.name for path in tmp_path.iterdir()} == {'new.svg', 'notes.txt'}


def test_a_picture_of_a_page_has_the_same_bytes_each_time():
    drawing = Drawing('new', one_line)
    assert picture(drawing) == picture(drawing)
    assert picture(drawing).wide != picture(drawing).narrow


def test_labels_of_a_wide_forest_stand_beside_its_axes():
    lines = [Line(f'{n}/vo', 1.0, 0.5, 2.0, (1.0, 1.1), right='gjy') for n in range(3)]
    with style_sheet():
        figure = forest({'': lines}, 'x', styles([line.arm for line in lines], None), width=WIDE)
        figure.draw_without_rendering()
    (ax,) = figure.axes
    axis = ax.get_window_extent()

    # Names of arms are left of the axes, numbers are right of them.
    names = [label.get_window_extent() for label in ax.get_yticklabels()]
    assert len(names) == 3
    assert all(name.x0 >= 0 and name.x1 < axis.x0 for name in names)
    texts = [text.get_window_extent() for text in ax.texts]
    assert len(texts) == 3
    assert all(axis.x1 < text.x0 and text.x1 <= figure.bbox.x1 for text in texts)


def test_a_legend_shows_the_marks_of_several_arms():
    lines = [Line(f'{n}/vo', 1.0, 0.5, 2.0) for n in range(5)]
    with style_sheet():
        figure = forest({'': lines}, 'x', styles([line.arm for line in lines], None))
    (legend,) = figure.legends
    colors = {tuple(mark.get_facecolor()[0]) for mark in legend.findobj(PathCollection)}
    assert len(colors) == 3


def test_panels_of_a_page_fit_their_labels_around_aligned_axes(grids):
    for grid in grids:
        with style_sheet():
            panels = grid.draw_alone()
            for figure in panels:
                figure.draw_without_rendering()

        # Axes of all panels are at the same place, and labels stay within the figure.
        assert len({tuple(figure.axes[0].get_position().bounds) for figure in panels}) == 1
        for figure in panels:
            box = figure.get_tightbbox()
            assert box.x0 >= 0
            assert box.y0 >= 0
            assert box.x1 <= figure.get_figwidth()
            assert box.y1 <= figure.get_figheight()
            labels = [text for text in figure.axes[0].get_xticklabels() if text.get_text()]
            assert labels
            assert all(text.get_visible() for text in labels)


@pytest.mark.parametrize(('chosen', 'explained'), [(0.004, False), (0.005, True)])
def test_a_caption_explains_a_choice_beside_the_vertex(chosen, explained, study_dir, monkeypatch):
    findings = findings_of(write_tuned(study_dir, records_of_every_decision()))
    for arm in findings.arms:
        sweep = arm.sweeps['learning_rate']
        monkeypatch.setitem(sweep.__dict__, 'chosen', chosen)
    (drawing,) = [d for d in figures(findings) if d.stem == 'sweep_learning_rate']
    caption = described(findings, drawing)['caption']
    assert ('not always at the vertex' in caption) == explained


def test_laws_are_drawn_over_the_sizes(study_dir):
    findings, figure_by_name = draw(write_tuned(study_dir, records_of_a_scaling_law(1.2)))
    assert [ax.get_title(loc='left') for ax in figure_by_name['verdicts'].axes] == list(SIZES)
    assert figure_by_name.keys() >= {'sweep_learning_rate_4', 'curves_4'}
    (ax,) = figure_by_name['loss_parameters'].axes
    (law,) = [scaling.law for scaling in findings.scaling if scaling.variant == 'b/vo']
    assert line(ax, '_law of b/vo').get_ydata()[-1] == pytest.approx(law.loss(law.sizes[-1]))
    assert list(line(ax, 'b/vo').get_xdata()) == pytest.approx(law.sizes)


def test_heat_maps_are_symmetric_around_zero():
    values = {'norm': np.array([[np.nan, 1.5], [2.0, 3.0]]), 'drift': np.array([[-2.0], [1.0]])}
    norm, drift = (ax.images[0] for ax in attention_figure.heat_maps(values).axes[:2])
    assert norm.get_clim() == (0, 3)
    assert drift.get_clim() == (-2, 2)
    assert norm.get_array().mask.tolist() == [[True, False], [False, False]]


def test_singular_values_are_relative_to_the_largest():
    layers = {0: np.array([[4.0, 2.0, 1e-7], [0.0, 0.0, 0.0]])}
    (ax,) = attention_figure.singular_values(layers, 'A[n]').axes
    np.testing.assert_array_equal(line(ax, 'head 0').get_ydata(), [1, 0.5, np.nan])
    assert np.isnan(line(ax, 'head 1').get_ydata()).all()
    assert [ax.yaxis.get_major_formatter()(value) for value in (1, 0.01)] == ['1', '0.01']
