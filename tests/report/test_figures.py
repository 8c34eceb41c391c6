"""Figures: what the matplotlib objects show, whether texts are legible, and the files."""

import itertools
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
from qkattn.report.figures.drawing import Cut, Drawing, picture, write_plots
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
    figure_by_name = {drawing.stem: drawing.figure() for drawing in figures(findings)}
    return Drawn(findings, figure_by_name)


def marks_at(ax, label: str) -> list[np.ndarray]:
    """The x values of each collection of marks with this label."""
    return [c.get_offsets()[:, 0] for c in ax.collections if c.get_label() == label]


def line(ax, label: str):
    """The only line of the axes that has this label."""
    matches = [line for line in ax.lines if line.get_label() == label]
    assert len(matches) == 1
    return matches[0]


@pytest.fixture(scope='module')
def grids(drawn):
    """The grids of panels of `drawn`."""
    return [drawing.grid for drawing in figures(drawn.findings) if drawing.grid]


@pytest.fixture(scope='module')
def drawn(tmp_path_factory):
    """The findings and figures of a study with every decision, drawn once for all tests.

    An arm is a variant of attention. The baseline is qk/vo. The margin of equivalence is 0.004.
    """
    # The baseline, an arm for each decision such as good/vo, and an arm with a long name.
    records = [*records_of_every_decision(), *tuned_arm(LONG, losses=losses_around(0.006))]
    # Loss is drawn against parameters only if the numbers of parameters differ by over 1 %.
    for record in records:
        if record['variant'] == 'bad/vo':
            record['parameters'] = record['parameters'] | {'total': 10**6}

    # The losses of far/vo are 3 above the baseline's. Its screening diverged at the last rate.
    last_rate = RATES[-1]
    records += tuned_arm('far/vo', losses=losses_around(3.0), diverged_rates=[last_rate])
    # A loss of None means that the trial diverged. All 8 trials of lost/vo did, and 1 of half/vo.
    records += tuned_arm('lost/vo', losses=[None] * 8)
    losses_of_other_seeds = losses_around(0.0)[1:]
    records += tuned_arm('half/vo', losses=[None, *losses_of_other_seeds])
    # late/vo is planned, but has no results: (variant, size, stage, tuned setting).
    without_results = ('late/vo', 'd_model=128', 'screening', 'learning_rate')

    path = tmp_path_factory.mktemp('drawn') / 'study'
    write_tuned(path, records, declared=[without_results], num_evals=4, margin=0.004)
    findings_and_figures = draw(path)
    # matplotlib places texts and legends while it draws.
    for figure in findings_and_figures.figure_by_name.values():
        with style_sheet():
            figure.draw_without_rendering()
    return findings_and_figures


def test_a_forest_shows_every_declared_arm(drawn):
    (ax,) = drawn.figure_by_name['verdicts'].axes

    # Lines are sorted by mean. Arms without a mean are last.
    finished = ['good/vo', 'half/vo', 'same/vo', 'wide/vo', short(LONG, 44), 'bad/vo', 'far/vo']
    assert row_names(ax) == [*finished, 'lost/vo', 'late/vo']
    texts = [text.get_text() for text in ax.texts]
    assert texts.count('diverged') == 1
    assert texts.count('no result yet') == 1


def test_a_line_of_a_forest_shows_the_numbers_of_its_arm(drawn):
    """A forest plot has a line for each arm, with the arm's difference in loss from the baseline.

    The line shows the mean difference, its interval, a mark for each seed, and a text.
    """
    (ax,) = drawn.figure_by_name['verdicts'].axes
    (good_arm,) = [arm for arm in drawn.findings.arms if arm.variant == 'good/vo']
    difference = good_arm.difference

    # The text has the mean, the interval, and the verdict.
    texts = [text.get_text() for text in ax.texts]
    interval = f'[{difference.low:+.4f}, {difference.high:+.4f}]'
    assert f'{difference.mean:+.4f} {interval}  better' in texts
    # One seed of half/vo diverged, so its verdict is undecided.
    texts_of_half = [text for text in texts if text.endswith('undecided  1 diverged')]
    assert texts_of_half != []

    # Lines are sorted by mean. good/vo is first, so the first interval and marks are its own.
    intervals = [c for c in ax.collections if c.get_label() == '95 % interval']
    (segment,) = intervals[0].get_segments()
    ends = segment[:, 0]  # the x values
    assert ends == pytest.approx((difference.low, difference.high))
    drawn_seeds = marks_at(ax, 'one seed')[0]
    differences_of_seeds = good_arm.comparison.differences.values()
    assert sorted(drawn_seeds) == pytest.approx(sorted(differences_of_seeds))


def test_a_forest_has_a_band_of_the_margin(drawn):
    (ax,) = drawn.figure_by_name['verdicts'].axes
    (band,) = [patch for patch in ax.patches if patch.get_label().startswith('±0.004')]
    corners = band.get_extents().transformed(ax.transData.inverted())
    assert corners.x0 == pytest.approx(-0.004)
    assert corners.x1 == pytest.approx(0.004)


def test_an_arm_far_off_is_beyond_the_axis_of_a_forest(drawn):
    """A forest plot has a line for each arm, with the arm's difference in loss from the baseline.

    far/vo has a difference of 3, and all other arms are below 0.1. The x axis ends before 3.
    """
    (ax,) = drawn.figure_by_name['verdicts'].axes
    right_edge = ax.get_xlim()[1]
    assert right_edge < 0.5

    # Lines are sorted by mean, so the last mean is the one of far/vo.
    means = np.concatenate(marks_at(ax, 'mean'))
    means_of_others = means[:-1]
    mean_of_far = means[-1]
    assert (means_of_others < 0.1).all()
    assert mean_of_far > right_edge

    # far/vo has two arrowheads at the edge: one for its mean and one for its seeds.
    arrowheads = np.concatenate(marks_at(ax, 'off the scale'))
    assert arrowheads.tolist() == [right_edge, right_edge]


def test_marks_beyond_the_edge_of_a_forest_are_arrowheads_at_it():
    """A forest plot has a line for each arm, with its mean, interval and seeds.

    Here a line also has a reported range, which a publication gives. Each part of a line that
    reaches beyond the x axis gets an arrowhead at that end.
    """

    def make_line(name, mean, low, high):
        """A line with one seed, and with a reported range of 0.1 around the mean."""
        reported = (mean - 0.1, mean + 0.1)
        return Line(name, mean, low, high, seeds=(mean,), reported=reported)

    lines = [
        make_line('in/vo', mean=0.1, low=-0.1, high=0.2),
        make_line('near/vo', mean=-0.1, low=-0.2, high=0.1),
        make_line('wide/vo', mean=0.1, low=-9.0, high=9.0),
        make_line('far/vo', mean=50.0, low=40.0, high=60.0),
    ]
    styles_of_lines = styles([line.arm for line in lines], None)
    # The largest numbers of the lines are 0.2, 0.2, 9 and 60. Their median is (0.2 + 9) / 2 = 4.6.
    # The x axis leaves out numbers above far * median = 1.5 * 4.6 = 6.9.
    with style_sheet():
        figure = forest({'': lines}, 'x', styles_of_lines, far=1.5)

    (ax,) = figure.axes
    left, right = ax.get_xlim()
    arrowheads = [c for c in ax.collections if c.get_label() == 'off the scale']
    positions = [tuple(c.get_offsets()[0]) for c in arrowheads]
    # From the top, the lines are at y = 0, 1, 2 and 3. All of in/vo and near/vo is on the axis.
    # Each line draws its reported range first, then its mean with the interval, then its seeds.
    assert positions == [
        (left, 2),  # wide/vo: lower end of the interval, -9
        (right, 2),  # wide/vo: upper end, 9
        (right, 3),  # far/vo: the reported range
        (right, 3),  # far/vo: the mean and its interval
        (right, 3.16),  # far/vo: the seed, which is drawn a little below the mean
    ]


def lines_of_forest(number):
    """Equal lines named 0/vo, 1/vo, and so on, with a text on the right."""
    seeds = (1.0, 1.1)
    return [Line(f'{n}/vo', 1.0, 0.5, 2.0, seeds, right='gjy') for n in range(number)]


@pytest.mark.parametrize('num_lines', [1, 2, 8])
def test_texts_of_a_forest_do_not_overlap(num_lines):
    """A forest plot has a line for each arm, with a name and a text.

    In a narrow figure, the name and the text are written above the mean.
    """
    lines = lines_of_forest(num_lines)
    styles_of_lines = styles([line.arm for line in lines], None)
    with style_sheet():
        figure = forest({'': lines}, 'x', styles_of_lines, margin=0.00833)
        figure.draw_without_rendering()

    (ax,) = figure.axes
    boxes = [text.get_bbox_patch().get_window_extent() for text in ax.texts]
    assert len(boxes) == 2 * num_lines  # a name and a text
    for box, other_box in itertools.combinations(boxes, 2):
        assert not box.overlaps(other_box)


def panels_of_sweeps(drawn):
    """The axes of the sweeps of the learning rate, by variant."""
    axes = drawn.figure_by_name['sweep_learning_rate'].axes
    variants = [arm.variant for arm in drawn.findings.arms if arm.sweeps]
    return dict(zip(variants, axes, strict=False))


def sweep_of_baseline(drawn):
    (baseline,) = [arm for arm in drawn.findings.arms if arm.variant == 'qk/vo']
    return baseline.sweeps['learning_rate']


def test_a_sweep_shows_how_a_rate_was_chosen(drawn):
    panels = panels_of_sweeps(drawn)
    sweep = sweep_of_baseline(drawn)

    # The first panel shows the baseline.
    first_variant = list(panels)[0]
    assert first_variant == 'qk/vo'

    # Below the name, the title has the chosen rate and the interval of the optimum.
    ax = panels['qk/vo']
    title = ax.get_title(loc='left')
    chosen = f'{sweep.chosen:.3g}'
    interval = f'[{sweep.optimum_low:.3g}, {sweep.optimum_high:.3g}]'
    assert title.splitlines() == ['qk/vo', chosen, interval]

    # A vertical line stands at the chosen rate.
    vertical_line = line(ax, 'chosen value')
    assert vertical_line.get_xdata()[0] == sweep.chosen


def test_a_sweep_has_a_mark_for_each_trial(drawn):
    ax = panels_of_sweeps(drawn)['qk/vo']
    sweep = sweep_of_baseline(drawn)

    (marks,) = [marks for marks in ax.collections if marks.get_label() == 'one seed']

    # A mark is a point (rate, loss). The sweep has a list of losses for each rate.
    drawn_losses = marks.get_offsets()[:, 1]
    measured_losses = itertools.chain(*sweep.losses)
    assert sorted(drawn_losses) == sorted(measured_losses)


def test_the_curve_of_a_sweep_is_the_fitted_parabola(drawn):
    ax = panels_of_sweeps(drawn)['qk/vo']
    sweep = sweep_of_baseline(drawn)

    curve = line(ax, 'parabola')

    # The trials lie on an exact parabola in ln(rate), so the curve passes through each mean.
    ln_rates = np.log(curve.get_xdata())
    loss_at_second_rate = np.interp(np.log(RATES[1]), ln_rates, curve.get_ydata())
    mean_at_second_rate = sweep.means[1]
    assert loss_at_second_rate == pytest.approx(mean_at_second_rate, abs=1e-4)


def test_each_panel_of_a_sweep_has_its_own_scale(drawn):
    panels = panels_of_sweeps(drawn)
    baseline = panels['qk/vo']
    far = panels['far/vo']  # its losses are higher by 3

    highest_loss_of_baseline = max(itertools.chain(*sweep_of_baseline(drawn).losses))
    assert baseline.get_ylim()[1] > highest_loss_of_baseline
    assert far.get_ylim()[0] > baseline.get_ylim()[1]


def test_a_sweep_marks_a_rate_that_diverged(drawn):
    panels = panels_of_sweeps(drawn)
    assert marks_at(panels['qk/vo'], 'off the scale') == []
    (diverged_rates,) = marks_at(panels['far/vo'], 'off the scale')
    assert diverged_rates.tolist() == [RATES[-1]]


def test_learning_curves_stand_beside_the_baseline(drawn):
    """Each arm has a panel with two curves of loss during training: its own and the baseline's."""
    figure = drawn.figure_by_name['curves']
    panels = {ax.get_title(loc='left'): ax for ax in figure.axes}

    # There are 9 arms and the baseline. lost/vo has no finite loss, and late/vo has no results.
    assert len(panels) == 9 - 2
    assert 'qk/vo' not in panels

    # The runs of this study have 4 evaluations each.
    for ax in panels.values():
        curve_of_baseline = line(ax, 'baseline qk/vo')
        assert len(curve_of_baseline.get_ydata()) == 4

    # The final losses of good/vo are losses_around(-0.03). A curve is the mean over seeds.
    curve_of_good = line(panels['good/vo'], 'the variant named above')
    final_loss = curve_of_good.get_ydata()[-1]
    assert final_loss == pytest.approx(np.mean(losses_around(-0.03)))
    # The x axis counts tokens: 400 steps of 768 tokens.
    final_tokens = curve_of_good.get_xdata()[-1]
    assert final_tokens == 400 * 768


def test_panels_of_long_names_have_whole_titles(study_dir):
    """Titles that would be cut to the same text are written in full."""
    # The names differ only in the middle. A shortened name has '…' in place of its middle.
    long_names = ['low_rank(rank=4)/vo?num_kv_heads=1', 'low_rank(rank=8)/vo?num_kv_heads=1']
    records = []
    for name in ['qk/vo', *long_names]:
        records += tuned_arm(name, losses=losses_around(0.0))
    write_tuned(study_dir, records, num_evals=4)

    figure_by_name = draw(study_dir).figure_by_name

    # In the sweeps, the first panel shows the baseline, so only the last two titles are compared.
    for stem in ('sweep_learning_rate', 'curves'):
        titles = []
        for ax in figure_by_name[stem].axes:
            # The first line of a title is the name. The lines below have numbers.
            first_line, *_ = ax.get_title(loc='left').splitlines()
            titles.append(first_line)
        assert titles[-2:] == long_names


def test_text_is_legible_on_a_narrow_screen(drawn):
    """Letters have at least 11 pixels where a page is 400 pixels wide."""
    figure_width = 400 - 32  # pixels, without the margins of the page
    for stem, figure in drawn.figure_by_name.items():
        texts = [text for text in figure.findobj(Text) if text.get_text().strip()]
        assert len(texts) > 5
        assert figure.get_figwidth() == WIDTH
        pixels_per_point = figure_width / WIDTH / 72  # WIDTH is in inches of 72 points
        for text in texts:
            assert text.get_fontsize() * pixels_per_point >= 11, (stem, text)


def test_everything_drawn_is_within_its_figure(drawn):
    tolerance = 0.01  # inches
    for stem, figure in drawn.figure_by_name.items():
        content = figure.get_tightbbox()
        page = figure.bbox_inches
        assert content.x0 >= -tolerance, stem
        assert content.y0 >= -tolerance, stem
        assert content.x1 <= page.x1 + tolerance, stem
        assert content.y1 <= page.y1 + tolerance, stem


def test_texts_cover_neither_each_other_nor_marks(drawn):
    for stem, figure in drawn.figure_by_name.items():
        for ax in figure.axes:
            boxes = [text.get_window_extent() for text in ax.texts]
            for one, other in itertools.combinations(boxes, 2):
                assert not one.overlaps(other), stem
            for collection in ax.collections:
                for x, y in ax.transData.transform(collection.get_offsets()):
                    assert not any(box.contains(x, y) for box in boxes), stem


def drawings_of_arms(path, num_arms):
    """The drawings, by name, of a study of the baseline and the arms v0/vo, v1/vo, ..."""
    variants = ['qk/vo', *(f'v{n}/vo' for n in range(num_arms))]
    records = []
    for place, variant in enumerate(variants):
        records += tuned_arm(variant, losses=losses_around(0.01 * place))
    findings = findings_of(write_tuned(path, records, num_evals=3, num_documents=5))
    return {drawing.stem: drawing for drawing in figures(findings)}


def test_figures_of_many_arms_show_the_first_and_last_ones(study_dir, monkeypatch):
    """A forest plot has a line for each arm. A plot of too many arms shows the first and last.
    With room for 4 lines, 4 arms are all drawn. Of 8 arms, the first 2 and the last 2 are drawn.
    """
    module_of_forest = sys.modules[forest.__module__]
    monkeypatch.setattr(module_of_forest, 'MOST_LINES', 4)
    forest_of_4 = drawings_of_arms(study_dir / 'few', num_arms=4)['verdicts']
    forest_of_8 = drawings_of_arms(study_dir / 'many', num_arms=8)['verdicts']

    # Lines are sorted by their means, which rise from v0/vo to v7/vo.
    (ax,) = forest_of_8.figure().axes
    assert row_names(ax) == ['v0/vo', 'v1/vo', 'v6/vo', 'v7/vo']

    # `cut` is for the caption: of 8 arms, 2 are drawn at each end. A whole forest has no cut.
    assert forest_of_8.values['cut'] == Cut(num_drawn=2, num_arms=8)
    assert forest_of_4.values['cut'] is None


def test_figures_of_many_panels_show_the_first_ones(study_dir, monkeypatch):
    """A figure has a panel for each arm, but at most MOST_PANELS panels, which is set to 3."""
    module_of_figures = sys.modules[figures.__module__]
    monkeypatch.setattr(module_of_figures, 'MOST_PANELS', 3)
    drawings_of_4 = drawings_of_arms(study_dir / 'few', num_arms=4)
    drawings_of_8 = drawings_of_arms(study_dir / 'many', num_arms=8)

    for drawings in (drawings_of_4, drawings_of_8):
        assert len(drawings['sweep_learning_rate'].grid.panels) == 3
        assert len(drawings['curves'].grid.panels) == 3

    # `cut` is for the caption: 3 of 9 panels are drawn. The 8 arms and the baseline have a sweep.
    assert drawings_of_8['sweep_learning_rate'].values['cut'] == Cut(num_drawn=3, num_arms=9)
    # The curve of the baseline is drawn in every panel, so only the 8 arms count.
    assert drawings_of_8['curves'].values['cut'] == Cut(num_drawn=3, num_arms=8)


def one_line(width):
    """A forest of one arm without results."""
    lines = [Line('a/vo', absent='no result yet')]
    return forest({'': lines}, 'x', styles(['a/vo'], None), width=width)


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_formats_asked_for_are_written(tmp_path):
    drawing = Drawing('new', one_line)
    write_plots(tmp_path, [drawing], ['png', 'pdf'])
    bytes_by_name = contents(tmp_path)
    assert bytes_by_name.keys() == {'new.png', 'new.pdf'}

    # The picture is not empty: over 1 % of its pixels are darker than the white background.
    image = imread(tmp_path / 'new.png')
    red_green_blue = image[..., :3]
    is_dark = np.any(red_green_blue < 0.9, axis=-1)
    assert np.mean(is_dark) > 0.01

    # The document has TrueType fonts (CIDFontType2). Many journals refuse Type 3 fonts.
    document = bytes_by_name['new.pdf']
    assert b'/CIDFontType2' in document
    assert b'/Type3' not in document
    # The document has neither a bitmap nor a date.
    assert b'Subtype /Image' not in document
    assert b'/CreationDate' not in document

    # The same drawing gives the same bytes.
    write_plots(tmp_path, [drawing], ['png', 'pdf'])
    assert contents(tmp_path) == bytes_by_name


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
    """A forest plot has a line for each arm, with a name and a text.

    A wide figure has the names in its left margin, and the texts in its right margin.
    """
    lines = lines_of_forest(3)
    styles_of_lines = styles([line.arm for line in lines], None)
    with style_sheet():
        figure = forest({'': lines}, 'x', styles_of_lines, width=WIDE)
        figure.draw_without_rendering()

    (ax,) = figure.axes
    axes_box = ax.get_window_extent()

    # Names of arms are left of the axes, and begin within the figure.
    names = [label.get_window_extent() for label in ax.get_yticklabels()]
    assert len(names) == 3
    for name in names:
        assert name.x0 >= 0
        assert name.x1 < axes_box.x0

    # Texts are right of the axes, and end within the figure.
    texts = [text.get_window_extent() for text in ax.texts]
    assert len(texts) == 3
    for text in texts:
        assert text.x0 > axes_box.x1
        assert text.x1 <= figure.bbox.x1


def test_a_legend_shows_the_marks_of_several_arms():
    lines = [Line(f'{n}/vo', 1.0, 0.5, 2.0) for n in range(5)]
    styles_of_lines = styles([line.arm for line in lines], None)
    with style_sheet():
        figure = forest({'': lines}, 'x', styles_of_lines)

    (legend,) = figure.legends
    marks = legend.findobj(PathCollection)
    colors = {tuple(mark.get_facecolor()[0]) for mark in marks}
    assert len(colors) == 3  # a legend shows the first three


def assert_labels_are_within(figure):
    """Asserts that the x axis of a figure has visible labels, and that nothing is cut off."""
    content = figure.get_tightbbox()  # in inches, like the size of the figure
    assert content.x0 >= 0
    assert content.y0 >= 0
    assert content.x1 <= figure.get_figwidth()
    assert content.y1 <= figure.get_figheight()

    labels = [label for label in figure.axes[0].get_xticklabels() if label.get_text()]
    assert labels
    for label in labels:
        assert label.get_visible()


def test_panels_of_a_page_fit_their_labels_around_aligned_axes(grids):
    """A page shows each panel of a grid in a separate figure."""
    for grid in grids:
        with style_sheet():
            figures_of_panels = grid.draw_alone()
            for figure in figures_of_panels:
                figure.draw_without_rendering()  # places the labels

        # The axes have the same place in each figure, so they are aligned on the page.
        places = set()
        for figure in figures_of_panels:
            place = figure.axes[0].get_position().bounds
            places.add(tuple(place))
        assert len(places) == 1

        for figure in figures_of_panels:
            assert_labels_are_within(figure)


@pytest.mark.parametrize(
    ('chosen_rate', 'is_explained'),
    [
        pytest.param(0.004, False, id='at the vertex'),
        pytest.param(0.005, True, id='beside the vertex'),
    ],
)
def test_a_caption_explains_a_choice_beside_the_vertex(
    chosen_rate, is_explained, study_dir, monkeypatch
):
    """A sweep is an arm's losses at several rates, with a fitted parabola.

    If the chosen rate is not at the vertex of the parabola, the caption says why.
    """
    # The losses of all arms lie on parabolas in ln(rate) whose vertex is at 0.004.
    findings = findings_of(write_tuned(study_dir, records_of_every_decision()))
    # `chosen` is a cached property, so its value is set in the __dict__ of the sweep.
    for arm in findings.arms:
        sweep = arm.sweeps['learning_rate']
        monkeypatch.setitem(sweep.__dict__, 'chosen', chosen_rate)

    (drawing,) = [d for d in figures(findings) if d.stem == 'sweep_learning_rate']
    caption = described(findings, drawing)['caption']
    assert ('not always at the vertex' in caption) == is_explained


def test_laws_are_drawn_over_the_sizes(study_dir):
    """A scaling law is a curve of loss against the number of parameters, fitted to several sizes.

    The study has the baseline and the arm b/vo at the four sizes of SIZES.
    """
    # 1.2 is how many parameters of the baseline one parameter of b/vo is worth.
    write_tuned(study_dir, records_of_a_scaling_law(1.2))

    findings, figure_by_name = draw(study_dir)

    # Verdicts have a panel for each size. Sweeps and curves have a figure for each size.
    titles = [ax.get_title(loc='left') for ax in figure_by_name['verdicts'].axes]
    assert titles == list(SIZES)
    assert 'sweep_learning_rate_4' in figure_by_name  # of the fourth size
    assert 'curves_4' in figure_by_name

    # The law of b/vo has a mark at each size that it was fitted to. Sizes are parameter counts.
    (ax,) = figure_by_name['loss_parameters'].axes
    (law,) = [scaling.law for scaling in findings.scaling if scaling.variant == 'b/vo']
    marks = line(ax, 'b/vo')
    assert list(marks.get_xdata()) == pytest.approx(law.sizes)
    # The curve ends at the largest size. Its loss there is the law's loss.
    curve = line(ax, '_law of b/vo')
    largest_size = law.sizes[-1]
    assert curve.get_ydata()[-1] == pytest.approx(law.loss(largest_size))


def test_colors_of_heat_maps_depend_on_signs():
    """A heat map has a color for each number of an array [layers, heads].

    The scale of colors begins at zero. With negative numbers, the scale is symmetric around zero.
    """
    norms = np.array([[np.nan, 1.5], [2.0, 3.0]])
    drifts = np.array([[-2.0], [1.0]])

    figure = attention_figure.heat_maps({'norm': norms, 'drift': drifts})

    norm_axes = figure.axes[0]
    drift_axes = figure.axes[1]
    (norm_image,) = norm_axes.images
    (drift_image,) = drift_axes.images
    # The largest norm is 3. Drifts have both signs, and the largest absolute value is 2.
    assert norm_image.get_clim() == (0, 3)
    assert drift_image.get_clim() == (-2, 2)

    # NaN is masked, so its cell has no color of the scale.
    assert norm_image.get_array().mask.tolist() == [[True, False], [False, False]]


def test_singular_values_are_relative_to_the_largest():
    """Each head has a line with its singular values, divided by its largest singular value.

    A value that is not drawn becomes NaN.
    """
    head_0 = [4.0, 2.0, 1e-7]
    head_1 = [0.0, 0.0, 0.0]
    layers = {0: np.array([head_0, head_1])}

    (ax,) = attention_figure.singular_values(layers, 'A[n]').axes

    # 1e-7 is a rounding error compared with the largest value, 4.
    np.testing.assert_array_equal(line(ax, 'head 0').get_ydata(), [1, 0.5, np.nan])
    # Zeros cannot be drawn on a logarithmic axis.
    assert np.isnan(line(ax, 'head 1').get_ydata()).all()

    # Labels of the axis are plain numbers. By default, a logarithmic axis has labels in TeX.
    label_of = ax.yaxis.get_major_formatter()
    assert label_of(1) == '1'
    assert label_of(0.01) == '0.01'
