"""Pages of studies that are no language models: translation and synthetic tasks."""

import pytest

from qkattn.report import find, load_study, write_report
from qkattn.report.facts import data_name
from qkattn.report.figures.plots import figures
from tests.studies import probe_record, translation_record, trial_record, write_study

from .pages import Page, assert_drawn, capture_figures

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


@pytest.fixture
def drawn(monkeypatch):
    return capture_figures(monkeypatch)


@pytest.mark.parametrize(
    ('kind', 'score', 'curve'),
    [
        ('translation', 'test BLEU', 'val bits/byte'),
        ('probe', 'test accuracy (%)', 'val loss (nats/token)'),
        ('language', None, 'val bits/byte'),
    ],
)
def test_axes_say_what_is_drawn(study_dir, drawn, kind, score, curve):
    study = load_study(study_of(kind, study_dir))
    captions = {figure.stem: figure.caption for figure in figures(study, find(study))}
    assert drawn['curves'].axes[0].get_ylabel() == curve
    assert captions['curves'].startswith(curve.replace('val', 'Validation', 1))
    assert drawn['losses'].axes[0].get_xlabel() == 'val loss (nats/token)'
    assert ('scores' in drawn) == (score is not None)
    if score:
        assert drawn['scores'].axes[0].get_xlabel() == score


@pytest.mark.parametrize('kind', ['translation', 'probe'])
def test_the_highest_score_is_at_the_top(study_dir, drawn, kind):
    study = load_study(study_of(kind, study_dir))
    figures(study, find(study))
    (ax,) = drawn['scores'].axes
    assert [label.get_text() for label in ax.get_yticklabels()] == ['b/vo', 'qk/vo', 'c/vo']
    assert ax.yaxis_inverted()


def test_curves_end_at_the_final_loss(study_dir, drawn):
    study = load_study(study_of('probe', study_dir))
    figures(study, find(study))
    ends = sorted(line.get_ydata()[-1] for line in drawn['curves'].axes[0].lines)
    assert ends == pytest.approx([0.245, 0.495, 0.745])


def test_many_variants_without_bytes_name_the_unit(study_dir, drawn):
    records = [probe_record(f'v{i}/vo', accuracy=0.5 + i / 100) for i in range(10)]
    study = load_study(write_study(study_dir, records, baseline='v0/vo'))
    figures(study, find(study))
    assert drawn['curves'].get_supylabel() == 'val loss (nats/token)'


@pytest.mark.parametrize(
    ('kind', 'data', 'heading'),
    [
        ('translation', 'pairs-de-en/de → pairs-de-en/en 1.0.0', 'Test BLEU'),
        ('probe', 'recall 1 (pairs=8, length=32)', 'Test accuracy'),
    ],
)
def test_page(study_dir, kind, data, heading):
    path = write_report(study_of(kind, study_dir))
    page = Page(path.read_text())
    text = ' '.join(' '.join(page.text).split())
    assert f'data {data} parameters' in text and f'Results {heading} ' in text
    assert len(page.ids) == len(set(page.ids))
    assert_drawn(study_dir / 'plots' / 'scores.png', least=0.01)


def test_a_variant_without_scores_is_drawn_as_such(study_dir, drawn):
    records = [translation_record('qk/vo'), trial_record('b/vo')]
    study = load_study(write_study(study_dir, records))
    figures(study, find(study))
    said = [text.get_text() for text in drawn['scores'].axes[0].texts]
    assert said == ['not measured for every seed']


@pytest.mark.parametrize(
    ('data', 'text'),
    [
        ({'name': 'stdlib', 'version': '3.11', 'tokenizer': 'bytes'}, 'stdlib 3.11'),
        ({'name': 'copy', 'version': 1, 'options': {}}, 'copy 1'),
        ({'name': 'copy', 'version': 1, 'options': {'length': 4}}, 'copy 1 (length=4)'),
        (
            {'source': {'name': 'a', 'version': '1'}, 'target': {'name': 'b', 'version': '2'}},
            'a → b 1 → 2',
        ),
    ],
)
def test_data_is_named(data, text):
    assert data_name(data) == text
