"""Pages and tables: structure, numbers recomputed from records, names as text in every format."""

import csv
import re

from qkattn.jobs.output import text_table
from qkattn.report import documents, headline, show_report, tables
from tests.report.conftest import Page, read
from tests.studies import edit_plan, outside_record, trial_record, write_study


def test_a_metric_from_outside_is_a_column_without_its_module(study_dir, tmp_path, monkeypatch):
    (tmp_path / 'evil.py').write_text('raise AssertionError("imported")')
    monkeypatch.syspath_prepend(tmp_path)
    records = [outside_record('qk/vo', value, seed=s) for s, value in enumerate((0.5, 0.75))]
    records += [outside_record('b/vo', value, seed=s) for s, value in enumerate((0.25, None))]
    records.append(trial_record('c/vo'))  # whose results lack the metric
    write_study(study_dir, records)
    for run in {record['run'] for record in records}:
        edit_plan(study_dir, run, train__metrics=['evil:TOP_3'])
    pair = read(study_dir)
    arms = csv.DictReader(tables.csv_table(*pair).splitlines())
    assert [arm['test_top_3_mean'] for arm in arms] == ['0.625', '', '']
    text = tables.report_markdown(*pair)
    for part in (
        '| test top 3, % mean ± sd |',
        '| 62.5000 ± 17.6777 |',
        'Share of the first three.',
    ):
        assert part in text


def test_names_are_text_in_tables():
    for name, escaped in (
        ('a|b', r'a\|b'),
        ('<script>alert(1)</script>', '&lt;script>alert(1)&lt;/script>'),
        ('<!-- a --> &amp; &#60;', '&lt;!-- a --> &amp;amp; &amp;#60;'),
        ('a < b & c > d', 'a < b & c > d'),
        ('![a](http://b) [c][d]', r'![a]\(http://b) [c]\[d]'),
        ('`a` \\frac', r'\`a\` \\frac'),
        ('one\ntwo\r\n# three', 'one two # three'),
        ('\x1b[31mred \u202egro', r'\\x1b[31mred \\u202egro'),
    ):
        titles, _, row = tables.markdown_table([(name, True)], [[name]]).splitlines()
        assert row == f'| {escaped} |' and titles == row.replace(r'\|', ' ')


def test_names_are_text_everywhere(study_dir):
    name = '<script>alert("x")</script>--><b>&amp;$\\frac$|a_b\n%\x1b[2J\u202e'
    records = [trial_record(variant) for variant in ('qk/vo', name)]
    changes = {'question': f'<img src=x onerror=alert(1)>{name}', 'name': f'</title>{name}'}
    pair = read(write_study(study_dir, records, **changes))
    page = Page(documents(*pair, (), {})['report.html'])
    assert not {tag for tag, _ in page.tags} & {'script', 'b', 'img'}
    assert name.split('\n')[0] in page.text and '<img src=x onerror=alert(1)>' in page.text
    document = tables.report_markdown(*pair)
    assert not re.search('<[a-z/!]', document)
    for text in (tables.terminal_text(*pair, study_dir), document, headline(*pair)):
        assert not re.search('[\x1b\u202e]', text)


def test_text_tables_are_aligned():
    text = text_table([('name', True), ('loss,|nats', False)], [['a\n', '1'], ['b', '23']])
    rows = ['name  loss,', '       nats', '----  -----', r'a\n       1', 'b        23']
    assert text.splitlines() == rows


def test_a_report_is_complete_well_formed_and_self_contained(study_dir):
    records = [trial_record(variant, seed=s) for variant in ('qk/vo', 'b/vo') for s in (0, 1)]
    write_study(study_dir, records)
    text = show_report(study_dir)
    assert text.splitlines()[-1] == f'report: {study_dir / "report.html"}'
    files = {path.name for path in study_dir.iterdir()}
    assert files >= {'report.html', 'table.md', 'table.csv', 'plots'}
    html = (study_dir / 'report.html').read_text()
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {'script', 'link', 'iframe', 'object'}
    attributes = [pair for _, attrs in page.tags for pair in attrs.items()]
    links = {value for name, value in attributes if name in ('src', 'href', 'action')}
    assert all(link.startswith(('#', 'data:image/svg+xml;base64,')) for link in links)
    assert {link[1:] for link in links if link[0] == '#'} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids)) and 'http' not in html and '@import' not in html
    assert [tag for tag, _ in page.tags].count('img') == len(list(study_dir.glob('plots/*.png')))
