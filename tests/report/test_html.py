"""The page of a tuned study: what stands where, and that nothing comes from elsewhere."""

import re

import pytest

from qkattn.report import find, load_study, write_report
from qkattn.report.html import MAX_BLOCKING, _stressed
from qkattn.report.sentences import reason, remark_text
from tests.studies import tuned_arm, write_tuned

from .pages import Page
from .test_figures import BASE, arms, scaled, shifted

LONG = 'my_package.my_module:MyScore/my_package.other:MyValue?num_kv_heads=1'


def read(path):
    html = write_report(path).read_text()
    return html, ' '.join(' '.join(Page(html).text).split())


def part(html, anchor):
    """The text of one section."""
    (found,) = re.findall(rf'<section id="{anchor}">.*?</section>', html, re.DOTALL)
    return ' '.join(' '.join(Page(found).text).split())


@pytest.fixture(scope='module')
def report(tmp_path_factory):
    path = tmp_path_factory.mktemp('tuned') / 'study'
    records = [*arms(), *tuned_arm(LONG, losses=shifted(0.1))]
    late = ('late/vo', 'd_model=128', 'screening', 'learning_rate')
    return write_tuned(path, records, declared=[late])


@pytest.fixture(scope='module')
def page(report):
    return read(report)


def test_page_is_well_formed_and_alone(page):
    html, _ = page
    read_page = Page(html)
    assert not {tag for tag, _ in read_page.tags} & {'script', 'link', 'img', 'iframe', 'object'}
    assert 'http' not in html and '@import' not in html
    assert len(read_page.ids) == len(set(read_page.ids))
    anchors = set(re.findall(r'<a href="#([a-z]+)"', html))
    assert anchors and anchors <= set(read_page.ids)


def test_first_screen_is_question_verdict_figure_facts(page):
    html, _ = page
    places = [
        html.index(mark)
        for mark in (
            'class="question"',
            'class="verdict"',
            'aria-label="Difference to the baseline"',
            'class="facts"',
            '<nav>',
        )
    ]
    assert places == sorted(places)
    lead = html[: html.index('<nav>')]
    assert '<strong>better</strong> than qk/vo' in lead
    text = ' '.join(' '.join(Page(lead[lead.index('<header>') :]).text).split())
    assert 'screening seeds 100, 101' in text and 'margin of equivalence ±0.005' in text


def test_every_declared_arm_is_named(report, page):
    html, _ = page
    study = load_study(report)
    for variant, _ in study.arms:
        assert variant in part(html, 'missing') + part(html, 'table')
    assert 'late/vo' in part(html, 'missing')


def test_every_verdict_has_its_reason(report, page):
    study = load_study(report)
    judged = [arm for arm in find(study).arms if arm.verdict]
    results = part(page[0], 'results')
    assert len(judged) == 5
    for arm in judged:
        assert f'{arm.size} {arm.verdict.decision.value} {reason(arm.verdict)}' in results


def test_remarks_are_told_once(report, page):
    study = load_study(report)
    remarks = find(study).remarks
    assert remarks
    for remark in remarks:
        assert remark_text(remark) in part(page[0], 'hygiene')
        assert remark_text(remark) not in part(page[0], 'table')


def test_what_blocks_stands_after_the_verdict(study_dir):
    records = [
        r for v in ('qk/vo', 'b/vo') for r in tuned_arm(v, losses=BASE, seeds=range(95, 103))
    ]
    path = write_tuned(study_dir, records, seeds=list(range(95, 103)))
    html, _ = read(path)
    study = load_study(path)
    blocking = [r for r in find(study).remarks if r.blocks]
    assert 0 < len(blocking) <= MAX_BLOCKING
    box = html.index('In the way of a verdict')
    assert html.index('class="verdict"') < box < html.index('<svg')
    for remark in blocking:
        assert remark_text(remark) in html[box : html.index('<svg')]
        assert f'blocks a verdict: {remark_text(remark)}' in part(html, 'hygiene')


def test_nothing_blocks_no_box(page):
    assert 'In the way of a verdict' not in page[0]


def test_sections_of_figures(page):
    html, _ = page
    assert 'aria-label="Learning rate"' in html[html.index('<section id="tuning">') :]
    assert '<section id="curves">' in html and '<section id="retrieval">' not in html


def test_scaling_prints_numbers_or_the_sentence(study_dir):
    html, _ = read(write_tuned(study_dir, scaled(1.2)))
    assert re.search(r'b/vo 1\.\d{3} \[.*\] .* 1\.(19|20)\d \[1\.', part(html, 'scaling'))
    few = [r for r in scaled(1.2) if r['size'] in ('d_model=32', 'd_model=64')]
    html, _ = read(write_tuned(study_dir / 'few', few))
    assert 'a scaling law needs 4 sizes or more, there are 2' in part(html, 'scaling')


def test_costs_are_relative_to_the_baseline(study_dir):
    records = [*tuned_arm('qk/vo', losses=BASE)]
    records += tuned_arm('b/vo', losses=BASE, cache_floats_per_token=512)
    html, _ = read(write_tuned(study_dir, records))
    assert re.search(r'b/vo d_model=128 \S+ 1\.00 512 0\.50', part(html, 'costs'))
    for record in records:
        record['cache_floats_per_token'] = None
    html, _ = read(write_tuned(study_dir / 'b', records))
    assert re.search(r'b/vo d_model=128 \S+ 1\.00 - -', part(html, 'costs'))


def test_one_arm_and_untuned_studies_have_pages(study_dir):
    html, text = read(write_tuned(study_dir, tuned_arm('qk/vo', losses=BASE)))
    assert 'No verdict' in text and 'aria-label="Final loss"' in html
    single = [r for r in arms() if r['stage'] == 'verdict']
    single = [
        r | {'stage': 'single', 'run': r['run'] + 's', 'config_hash': r['run'] + 's'}
        for r in single
    ]
    html, text = read(write_tuned(study_dir / 'b', single, tuning=None))
    assert 'No verdict' in text and '<section id="tuning">' not in html
    assert 'aria-label="Difference to the baseline"' in html[: html.index('<nav>')]


def test_long_names_are_broken(page):
    assert f'<span class="long">{LONG}</span>' in page[0]


@pytest.mark.parametrize(
    ('sentence', 'html'),
    [
        ('a is better than b; c', 'a is <strong>better</strong> than b; c'),
        ('a and <b> are worse than c.', 'a and &lt;b&gt; are <strong>worse</strong> than c.'),
        ('a is undecided: why', 'a is <strong>undecided</strong>: why'),
        ('No verdict: why', '<strong>No verdict</strong>: why'),
        ('below zero is better)', 'below zero is better)'),
        ('2 arms have no verdict trials', '2 arms have no verdict trials'),
    ],
)
def test_words_of_verdicts_are_bold(sentence, html):
    assert _stressed(sentence) == html
