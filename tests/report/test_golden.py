"""Reports of three small studies and the sentence of every code, word for word; other sentences.

Where a change of the report is meant, write the golden files again and read what has changed:

    python -m tests.report.test_golden
"""

import csv
import dataclasses
import math
import re
import shutil
import tempfile
from pathlib import Path

import pytest

from qkattn.errors import ConfigError
from qkattn.jobs.output import text_table
from qkattn.report import columns, documents, headline, prose, show_report, tables
from qkattn.report.columns import Column
from qkattn.report.figures import figures
from qkattn.report.figures.drawing import picture
from qkattn.report.verify import difference
from qkattn.stats.decision import Decision
from qkattn.stats.scaling import Problem, ProblemCode
from qkattn.study.arm_key import ArmKey
from qkattn.verdict import Findings, Reason, ReasonCode, Remark, RemarkCode
from tests import studies
from tests.processes import ROOT
from tests.report.conftest import (
    LONG,
    SIZES,
    Page,
    findings_of,
    losses_around,
    records_of_a_scaling_law,
    records_of_every_decision,
    write_controlled_study,
)
from tests.studies import RATES, outside_record, trial_record, tuned_arm, write_study, write_tuned

GOLDEN = Path(__file__).parent / 'golden'


def write_decided_study(directory: Path) -> Path:
    """Writes a study with every decision, metrics of a probe, expected verdicts, an arm whose best
    rate is the last one, one that diverged, and one without results."""
    records = [*records_of_every_decision(), *tuned_arm(LONG, losses=losses_around(0.1))]
    for record in records:
        loss = record['val_loss']
        record |= {'val_induction_gain': 3 - loss, 'val_induction_accuracy': loss / 5}
    records += tuned_arm('edge/vo', losses=losses_around(0.02), optimum=16e-3)
    records += tuned_arm('lost/vo', losses=[None, *losses_around(0.0)[1:]])
    for place, record in enumerate(records):
        if record['stage'] == 'screening':
            # Without noise a sweep has intervals of rounding errors; the mean over seeds is kept.
            record['val_loss'] += 0.004 * math.sin(17 * (place // 2)) * (-1) ** place
            record['val_bits_per_byte'] = record['val_loss'] / math.log(2)
    late = ('late/vo', 'd_model=128', 'screening', 'learning_rate')
    expected = ['bad/vo is worse', 'good/vo is not better']
    return write_tuned(directory, records, declared=[late], num_evals=4, expected=expected)


def write_described_study(directory: Path) -> Path:
    """Writes an untuned study of four sizes: it has a scaling law, but no verdict."""
    records = []
    for tuned in records_of_a_scaling_law(1.2):
        seed = tuned['trial']['seed']
        if tuned['stage'] == 'verdict' and seed < 3:
            shape = {'d_model': tuned['config']['d_model']}
            loss = tuned['val_loss']
            records.append(trial_record(tuned['variant'], tuned['size'], seed, 4e-3, loss, **shape))
    size, d_model = list(SIZES.items())[-1]
    records.append(trial_record('b/vo', size, 3, 3e-3, None, d_model=d_model))
    return write_study(directory, records, num_evals=4)


STUDIES = {
    'decided': write_decided_study,
    'described': write_described_study,
    'controlled': write_controlled_study,
}
# Entries of a ledger are made while a test runs.
TIME = re.compile(r'\d{4}-\d\d-\d\d[ T][\d:]{8}')


def texts_of_report(findings: Findings) -> dict[str, str]:
    """The files of a report by name: tables, headline, and the text of its page."""
    files = documents(findings, [picture(drawing) for drawing in figures(findings)])
    page = '\n'.join(Page(files.pop('report.html')).lines) + '\n'
    files |= {'page.txt': page, 'headline.md': headline(findings)}
    return {name: TIME.sub('TIME', text) for name, text in files.items()}


A, B = ArmKey('a', 's', 'c'), ArmKey('b', 's', 'c')
CODES = {Remark: RemarkCode, Reason: ReasonCode, Problem: ProblemCode}
# The data of all codes by the name of a field; `OTHER_DATA` has those that differ in one code.
DATA = {
    **{'accepted': None, 'actual': (1, 2), 'apart': 2, 'arm': 1},
    **{'baseline': 'qk/vo', 'best': 1.6e-2, 'bleu': 3.5, 'cost': 0.05},
    **{'decision': Decision.BETTER, 'declared': (0, 1, 2), 'detectable': 0.0123},
    **{'documents': 15, 'expected': 2.0, 'factor': 2.5},
    **{'final_fraction': 0.5, 'first_look': '2025-01-02', 'gain': 0.022},
    **{'high': 0.5, 'knob': 'weight_decay', 'learning_rates': (1e-3, 2e-3), 'limit': 0.1},
    **{'look': 2, 'loss': 1.94, 'losses': (2.0, 2.1), 'low': 0.01, 'margin': 0.005},
    **{'matched': 'total', 'mean': 0.02, 'n': 16, 'name': '5-gram', 'needed': 4, 'num_steps': 4000},
    **{'p': 1e-2, 'p_equivalence': 1e-4, 'parameters': (1000.0, 9000.0), 'planned': 2},
    **{'r_squared': 0.5, 'span': 4.0},
    **{'readable': 1, 'remarks': (Remark(RemarkCode.NO_TEST),), 'residual': 0.0123},
    **{'rows': (512, 1024), 'run': 'abc', 'schedule': 'linear'},
    **{'sd': 0.4, 'seeds': (7, 8), 'side': Decision.WORSE, 'sizes': 2},
    **{'split': 'test', 'stage': 'verdict', 'target': 12000, 'test': -0.01},
    **{'test_tokens': (9,), 'times': 3.0, 'tokens': 512000, 'tolerance': 1e-3, 'trials': 8},
    **{'tuned': False, 'typical': -0.001, 'usual': 0.012, 'validation': 0.002, 'value': 0.25},
    **{'values': (0.1, 0.2), 'word_by_word': 15.75, 'yardstick': 1.577},
}
OTHER_DATA = {
    'remark_differs_from_baseline': {'value': '1'},
    'remark_evaluation': {'tokens': (65536,), 'documents': (99, 120)},
    'remark_other_setting': {'actual': 1.0},
    'remark_software_differs': {'values': {'1': (A,), 'f' * 40: (A, B, A, B)}},
    'reason_diverged': {'baseline': 2},
    'problem_extrapolated': {'parameters': 1000.0},
}


def clauses() -> str:
    """A line for every code, of the arguments that its macro has."""
    module = prose.environment(html=False).get_template('clauses.j2').module
    lines = []
    for kind, codes in CODES.items():
        for code in codes:
            name = f'{kind.__name__}_{code.name}'.lower()
            data = DATA | OTHER_DATA.get(name, {})
            about = {argument: data[argument] for argument in getattr(module, name).arguments}
            lines.append(
                f'{name}: {prose.clause(kind(code, about), comparisons=7, intervals=True)}'
            )
    return '\n'.join(lines) + '\n'


@pytest.mark.stored
@pytest.mark.parametrize('name', STUDIES)
def test_the_report_of_a_study_is_the_golden_one(name, study_dir):
    files = texts_of_report(findings_of(STUDIES[name](study_dir)))
    golden = {path.name: path.read_text() for path in (GOLDEN / name).iterdir()}
    assert files.keys() == golden.keys()
    for file, text in files.items():
        assert difference(golden[file], text) is None, f'{name}/{file}'


def test_every_code_is_a_clause_with_its_numbers():
    assert clauses() == (GOLDEN / 'clauses.txt').read_text()


def test_every_clause_has_a_code():
    names = {f'{kind.__name__}_{c.name}'.lower() for kind in CODES for c in CODES[kind]}
    macros = dir(prose.environment(html=False).get_template('clauses.j2').module)
    kinds = ('remark_', 'reason_', 'problem_')
    assert {name for name in macros if name.startswith(kinds)} == names


def test_numbers_are_printed_with_few_digits_and_units():
    values = (None, 0, 12.5, 999.6, 4921812, 123456, 0.25, 2.5e15)
    assert [*map(prose.si, values)] == ['-', '0', '12.5', '1.00k', '4.92M', '123k', '0.25', '2.50P']
    assert [*map(prose.p_value, (None, 9e-4, 1e-3))] == ['-', '< 0.001', '0.001']
    rounded = [*map(prose.rounded, (1234567.89, 1 / 3, 2.0, 'a'))]
    assert rounded == [1234567.9, 0.333333, 2.0, 'a']


def test_a_metric_from_outside_is_a_column_without_its_module(study_dir, tmp_path, monkeypatch):
    (tmp_path / 'evil.py').write_text('raise AssertionError("imported")')
    monkeypatch.syspath_prepend(tmp_path)
    records = [outside_record('qk/vo', value, seed=s) for s, value in enumerate((0.5, 0.75))]
    records += [outside_record('b/vo', value, seed=s) for s, value in enumerate((0.25, None))]
    records.append(trial_record('c/vo'))  # whose results lack the metric
    write_study(study_dir, records)
    for run in {record['run'] for record in records}:
        studies.edit_plan(study_dir, run, train__metrics=['evil:TOP_3'])
    findings = findings_of(study_dir)
    records_of_every_decision = csv.DictReader(tables.csv_table(findings).splitlines())
    assert [arm['test_top_3_mean'] for arm in records_of_every_decision] == ['0.625', '', '']
    text = tables.report_markdown(findings)
    for part in (
        '| test top 3, % mean ± sd |',
        '| 62.5000 ± 17.6777 |',
        'Share of the first three.',
    ):
        assert part in text


def test_the_loss_on_a_further_corpus_is_a_column_that_decides_nothing(study_dir):
    # The loss of each seed on the further corpus; one run was not measured on it.
    losses = {'qk/vo': (3.0, 3.5), 'b/vo': (2.5, None)}
    records = []
    for variant, losses_of_variant in losses.items():
        for seed, loss in enumerate(losses_of_variant):
            record = trial_record(variant, seed=seed, val_loss=2.0)
            records.append(studies.on_corpus(record, 'stdlib@test', loss))
    write_study(study_dir, records)

    # First the records alone have such losses; then plans ask for the corpus as well.
    without = tables.report_markdown(findings_of(study_dir))
    for run in {record['run'] for record in records}:
        studies.edit_plan(study_dir, run, data__evaluate=['stdlib@test'])
    findings = findings_of(study_dir)

    # The mean over the seeds that have a loss; the differences are those of the main corpus.
    records_of_every_decision = list(csv.DictReader(tables.csv_table(findings).splitlines()))
    assert [arm['loss[stdlib@test]_mean'] for arm in records_of_every_decision] == ['3.25', '']
    assert [arm['difference_mean'] for arm in records_of_every_decision] == ['', '0.0']

    # The text says that the corpus decides nothing where plans ask for it.
    text = tables.report_markdown(findings)
    for part in ('| loss on stdlib@test, nats/token mean ± sd |', '| 3.2500 ± 0.3536 |'):
        assert part in text
        assert part in without
    note = 'also evaluated, and deciding nothing: stdlib@test'
    assert note in text
    assert note not in without


def test_names_are_escaped_in_markdown_tables():
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
        assert row == f'| {escaped} |'
        assert titles == row.replace(r'\|', ' ')


@pytest.mark.parametrize(
    ('cell', 'written'),
    [
        ('=HYPERLINK("http://a")', '"\'=HYPERLINK(""http://a"")"'),
        ('+1', "'+1"),
        ('-1', "'-1"),
        ('@SUM(A1)', "'@SUM(A1)"),
        ('\t=1', "'\t=1"),
        ('qk/vo?x=-1', 'qk/vo?x=-1'),
        ("'=1", "'=1"),
        (-0.5, '-0.5'),
        (-3, '-3'),
        (None, '""'),
    ],
)
def test_text_is_no_formula_of_a_spreadsheet(cell, written):
    assert tables.csv_text([{'variant': cell}]) == f'variant\n{written}\n'


def test_the_names_of_columns_are_no_formulas():
    assert tables.csv_text([{'=1': 1, '-a': 2}]) == "'=1,'-a\n1,2\n"


def test_every_csv_is_written_by_one_function():
    """Only that function keeps names that begin like formulas from being run by a spreadsheet."""
    files = [path for room in ('qkattn', 'experiments') for path in ROOT.glob(f'{room}/**/*.py')]
    writing = re.compile(r'to_csv|csv\.(writer|DictWriter)')
    assert [path.name for path in files if writing.search(path.read_text())] == ['tables.py']


def test_a_variant_that_begins_as_a_formula_is_text_in_table_csv(study_dir):
    name = '=cmd/vo'
    findings = findings_of(write_study(study_dir, [trial_record(v) for v in ('qk/vo', name)]))
    rows = [line.split(',')[0] for line in tables.csv_table(findings).splitlines()]
    assert rows == ['variant', 'qk/vo', f"'{name}"]


def test_a_report_names_the_settings_of_a_recipe_that_arms_share(study_dir):
    records = [trial_record(v) for v in ('qk/vo', 'b/vo')]
    write_study(study_dir, records)
    plain = '\n'.join(tables.settings(findings_of(study_dir)))
    for record in records:
        changes = {'optimizer__schedule': 'wsd', 'train__z_loss': 1e-4}
        studies.edit_plan(study_dir, record['run'], data__cross_documents=False, **changes)
    recipe = '\n'.join(tables.settings(findings_of(study_dir)))

    # The schedule, the z-loss and the mask of documents, none of which is a default.
    for text in (
        'to 0 of the peak in the last 0.1 of the steps',
        'z-loss 0.0001',
        'within documents',
    ):
        assert text in recipe
        assert text not in plain


def write_one_seed(directory: Path) -> Path:
    return write_study(directory, [trial_record(v) for v in ('qk/vo', 'b/vo')])


def write_other_documents(directory: Path) -> Path:
    """Writes a study of three seeds whose arms were evaluated on different documents."""
    records = [trial_record(v, seed=s) for v in ('qk/vo', 'b/vo') for s in (0, 1, 2)]
    write_study(directory, records)
    of_b = [record for record in records if record['variant'] == 'b/vo']
    studies.write_documents(directory / of_b[0]['run'], of_b, number=90)
    return directory


def write_screened(directory: Path) -> Path:
    """Writes a tuned study whose screening has begun and whose verdict runs have no results."""
    records = [r for v in ('qk/vo', 'b/vo') for r in tuned_arm(v, losses=(2.0,), rates=RATES[:2])]
    return write_tuned(directory, [r for r in records if r['stage'] == 'screening'])


def write_several_seeds(directory: Path) -> Path:
    return write_study(
        directory, [trial_record(v, seed=s) for v in ('qk/vo', 'b/vo') for s in (0, 1, 2)]
    )


@pytest.mark.parametrize(
    ('study', 'sentence'),
    [
        (write_one_seed, 'One seed: no interval can be given'),
        (write_other_documents, 'No interval can be given: arm and baseline share one seed only'),
        (write_screened, 'Tests include the errors over seeds'),
    ],
)
def test_a_report_without_intervals_speaks_of_none(study, sentence, study_dir):
    findings = findings_of(study(study_dir))
    text = tables.report_markdown(findings)
    assert sentence in text
    assert not re.search(r'\[[-+.\d]+, [-+.\d]+\]', text)
    assert 'interval' not in text.replace('o interval can be given', '')
    assert 'interval' not in tables.terminal_text(findings, Path('report.html'))


def test_a_report_with_intervals_says_what_they_hold(study_dir):
    text = tables.report_markdown(findings_of(write_several_seeds(study_dir)))
    assert 'Intervals (95 %, Student t) over 3 seeds are descriptive' in text
    assert 'what another choice of documents would change in a difference is part of its' in text


def test_hostile_names_are_text_in_every_file(study_dir):
    # Markup of HTML, TeX and Markdown, and codes of terminals.
    name = '<script>alert("x")</script>--><b>&amp;$\\frac$|a_b\n%\x1b[2J\u202e'
    records = [trial_record(variant) for variant in ('qk/vo', name)]
    changes = {'question': f'<img src=x onerror=alert(1)>{name}', 'name': f'</title>{name}'}
    findings = findings_of(write_study(study_dir, records, **changes))
    page = Page(documents(findings, ())['report.html'])
    assert not {tag for tag, _ in page.tags} & {'script', 'img'}
    assert name.split('\n')[0] in page.text
    assert '<img src=x onerror=alert(1)>' in page.text

    # Markdown has no tags, and texts for terminals no control codes.
    document = tables.report_markdown(findings)
    assert not re.search('<[a-z/!]', document)
    for text in (tables.terminal_text(findings, study_dir), document, headline(findings)):
        assert not re.search('[\x1b\u202e]', text)


def test_a_terminal_tells_long_names_apart(study_dir):
    names = [f'low_rank(rank={rank})/vo?num_kv_heads=1' for rank in (4, 8)]
    records = [r for name in ('qk/vo', *names) for r in tuned_arm(name, losses=losses_around(0.0))]
    findings = findings_of(write_tuned(study_dir, records))
    rows = [line.split('  ')[0] for line in tables.terminal_text(findings, study_dir).splitlines()]
    assert len([row for row in rows if re.fullmatch(r'low_rank\S*rank=[48]\S*', row)]) == 2


def test_a_headline_names_a_baseline_without_results(study_dir):
    records = [r for name in ('qk/vo', 'b/vo') for r in tuned_arm(name, losses=losses_around(0.0))]
    records = [r for r in records if (r['variant'], r['stage']) != ('qk/vo', 'verdict')]
    last = ('qk/vo', 'd_model=128', 'verdict', None)
    findings = findings_of(write_tuned(study_dir, records, declared=[last]))
    assert '| qk/vo | baseline, no result yet |' in headline(findings)


def test_text_tables_are_aligned():
    text = text_table([('name', True), ('loss,|nats', False)], [['a\n', '1'], ['b', '23']])
    rows = ['name  loss,', '       nats', '----  -----', r'a\n       1', 'b        23']
    assert text.splitlines() == rows


@pytest.fixture(scope='module')
def study_and_terminal_text(tmp_path_factory):
    """The directory of a study with its report, and what the terminal shows of it."""
    path = tmp_path_factory.mktemp('shown') / 'study'
    records = [trial_record(variant, seed=s) for variant in ('qk/vo', 'b/vo') for s in (0, 1)]
    write_study(path, records)
    return path, show_report(path)


def test_a_report_writes_its_files(study_and_terminal_text):
    study_dir, text = study_and_terminal_text
    assert text.splitlines()[-1] == f'report: {study_dir / "report.html"}'
    files = {path.name for path in study_dir.iterdir()}
    assert files >= {'report.html', 'table.md', 'table.csv'}
    assert 'plots' not in files


def test_a_page_is_self_contained(study_and_terminal_text):
    study_dir, _ = study_and_terminal_text
    html = (study_dir / 'report.html').read_text()
    page = Page(html)
    assert not {tag for tag, _ in page.tags} & {'script', 'link', 'iframe', 'object'}
    attributes = [pair for _, attrs in page.tags for pair in attrs.items()]
    links = {value for name, value in attributes if name in ('src', 'srcset', 'href', 'action')}
    assert all(link.startswith(('#', 'data:image/svg+xml;base64,')) for link in links)
    assert {link[1:] for link in links if link[0] == '#'} <= set(page.ids)
    assert len(page.ids) == len(set(page.ids))
    assert 'http' not in html
    assert '@import' not in html
    assert [tag for tag, _ in page.tags].count('source') == 1  # the differences, in two widths


@pytest.fixture(scope='module')
def decided_page(tmp_path_factory):
    findings = findings_of(write_decided_study(tmp_path_factory.mktemp('decided') / 'study'))
    pictures = [picture(drawing) for drawing in figures(findings)]
    return documents(findings, pictures)['report.html']


def test_the_first_table_of_a_page_has_what_a_reader_looks_at_first(decided_page):
    headings = re.findall(r'<table class="">\n<thead>(.*?)</thead>', decided_page, re.DOTALL)
    columns = [re.sub(r'<.*', '', part).strip() for part in re.split('<th [^>]*>', headings[0])]
    assert columns[1:] == [
        'variant',
        'difference in test loss,',
        'verdict,',
        'parameters',
        'd_model',
    ]


def test_the_table_of_all_columns_is_folded(decided_page):
    folded = re.search('<details><summary>All columns</summary>(.*?)</details>', decided_page, re.S)
    assert 'induction accuracy' in folded[1]


def test_a_figure_has_a_panel_for_each_arm_with_its_whole_name(decided_page):
    panels = re.findall(r'alt="Learning rate: ([^"]*)"', decided_page)
    assert len(panels) == 8
    assert LONG in panels


def test_names_break_between_their_parts(decided_page):
    assert f'<b>{prose.breakable(LONG)}</b>' in decided_page
    assert 'my_package.my_module:<wbr>MyScore/<wbr>my_package.other:<wbr>MyValue?' in decided_page


def test_a_name_that_breaks_is_escaped():
    assert prose.breakable('a/<b>') == 'a/<wbr>&lt;b&gt;'


def test_a_format_of_plots_that_does_not_exist_is_refused(study_dir):
    with pytest.raises(ConfigError, match=r"plots='gif' is no format; valid are png, pdf, svg"):
        show_report(study_dir, ['gif'])


def test_the_list_by_verdict_says_every_arm_before_the_sentences(decided_page):
    lines = Page(decided_page).lines
    better = lines.index('Better by more than the margin at this length')
    assert lines[better + 1] == 'good/vo -0.0300 [-0.0310, -0.0290]'
    listed = re.findall('<li><code>([^ ]*)</code>', decided_page)
    assert len(listed) == 7


def test_a_law_with_a_loose_exponent_is_shown_without_its_numbers(tmp_path):
    findings = findings_of(write_tuned(tmp_path, records_of_a_scaling_law(1.2)))
    reason = Problem(ProblemCode.EXPONENT_LOOSE, {'value': 0.2, 'low': -0.1, 'high': 0.5})
    base, arm = findings.scaling
    loose = dataclasses.replace(arm, law=dataclasses.replace(arm.law, loose=reason))

    def row_of(scaling):
        """The row of the arm in the table of laws, by heading."""
        changed = dataclasses.replace(findings, scaling=(base, scaling))
        (sheet,) = (sheet for sheet in tables.sheets(changed) if sheet.name == 'laws')
        headings = [name for name, _ in sheet.headings]
        return dict(zip(headings, sheet.rows[1], strict=True))

    determined = row_of(arm)
    assert determined['a'].startswith('0.30')
    assert determined['no number, because'].startswith('-')
    open_row = row_of(loose)
    assert open_row['a'].startswith('-')
    assert open_row['no number, because'].startswith('the sizes do not determine')
    # What a parameter is worth is known in both cases.
    for row in (determined, open_row):
        assert row['baseline parameters|per parameter'].startswith('1.200 [')


if __name__ == '__main__':
    for name in STUDIES:
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        (GOLDEN / name).mkdir(parents=True)
        with tempfile.TemporaryDirectory() as directory:
            for file, text in texts_of_report(
                findings_of(STUDIES[name](Path(directory) / 'study'))
            ).items():
                (GOLDEN / name / file).write_text(text)
    (GOLDEN / 'clauses.txt').write_text(clauses())


def test_two_columns_of_one_name_are_refused(tmp_path, monkeypatch):
    write_study(tmp_path, records_of_every_decision())
    findings = findings_of(tmp_path)
    both = [Column('mine', 'key.variant'), Column('mine', 'key.size')]
    monkeypatch.setattr(columns, 'columns', lambda findings: both)
    with pytest.raises(ValueError, match="two columns of table.csv are named 'mine'"):
        tables.csv_table(findings)
