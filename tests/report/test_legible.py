"""Figures are legible on a screen of 400 pixels, and say verdicts in words."""

import pytest
from matplotlib.text import Text

from qkattn.report.figures import figures
from qkattn.report.figures.style import style_sheet
from qkattn.verdict import find, load_study
from tests.report.conftest import LONG, arms, shifted
from tests.studies import tuned_arm, write_tuned


@pytest.fixture(scope='module')
def drawn(tmp_path_factory):
    """Figures of all common kinds, with their layout."""
    records = [*arms()[:72], *tuned_arm(LONG, losses=shifted(0.006))]
    for record in records:
        record |= {'val_induction_gain': 3 - record['val_loss'], 'val_induction_accuracy': 0.5}
        if record['variant'] == 'bad/vo':
            record['parameters'] = record['parameters'] | {'total': 10**6}
    late = ('late/vo', 'd_model=128', 'screening', 'learning_rate')
    path = tmp_path_factory.mktemp('legible') / 'study'
    study = load_study(write_tuned(path, records, declared=[late], num_evals=4))
    made = {of.stem: of.figure for of in figures(study, find(study))}
    for figure in made.values():
        with style_sheet():
            figure.draw_without_rendering()
    return made


def test_text_is_legible_and_inside(drawn):
    """At least 11 pixels at 368 of 400, the rest of which is the margin of the page."""
    stems = {'verdicts', 'losses', 'sweep_learning_rate', 'curves', 'loss_parameters'}
    assert drawn.keys() == stems | {'retrieval'}
    for stem, figure in drawn.items():
        assert figure.get_figwidth() == 3.6
        seen = [text for text in figure.findobj(Text) if text.get_text().strip()]
        assert len(seen) > 5
        for text in seen:
            assert text.get_fontsize() * 96 / 72 * 368 / (96 * 3.6) >= 11, (stem, text)
        box, whole = figure.get_tightbbox(), figure.bbox_inches
        assert -0.01 <= box.x0 and box.x1 <= whole.x1 + 0.01, stem
        assert -0.01 <= box.y0 and box.y1 <= whole.y1 + 0.01, stem


def test_no_text_lies_on_another_or_on_a_mark(drawn):
    for stem, figure in drawn.items():
        for ax in figure.axes:
            boxes = [text.get_window_extent() for text in ax.texts]
            dots = [ax.transData.transform(of.get_offsets()) for of in ax.collections]
            for place, box in enumerate(boxes):
                assert not any(box.overlaps(of) for of in boxes[:place]), (stem, place)
                assert not any(box.contains(*dot) for of in dots for dot in of), (stem, place)
        # What stands outside of the axes: the legend and the labels of all panels together.
        outside = [of for of in (figure._supxlabel, *figure.legends) if of is not None]
        boxes = [of.get_window_extent() for of in outside]
        assert len(boxes) < 2 or not boxes[0].overlaps(boxes[1]), stem


def test_a_forest_says_the_verdicts_in_words(drawn):
    (ax,) = drawn['verdicts'].axes
    said = [text.get_text() for text in ax.texts]
    words = [text.split('  ')[1] for text in said if ']  ' in text]
    assert sorted(words) == ['better', 'equivalent', 'no verdict', 'worse (below margin)']
    # The name stands above its words, whole where there is room.
    assert said.index('good/vo') == said.index(next(t for t in said if t.endswith('better'))) + 1
