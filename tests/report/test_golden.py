"""Reports of three small studies and the sentence of every code, word for word.

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
from tests.refusals import refused
from tests.report.conftest import (
    BASE,
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
    """Writes a tuned study with an arm for each decision, probe metrics and expected verdicts.

    An arm is a variant of attention. Some arms have a long name, a diverged seed, or no results.
    """
    records = [*records_of_every_decision(), *tuned_arm(LONG, losses=losses_around(0.1))]
    # The values of the probe metrics are arbitrary, but differ between trials.
    for record in records:
        loss = record['val_loss']
        record |= {'val_induction_gain': 3 - loss, 'val_induction_accuracy': loss / 5}
    # The best rate of edge/vo is the last one of the grid. A loss of None is a diverged trial.
    records += tuned_arm('edge/vo', losses=losses_around(0.02), optimum=RATES[-1])
    records += tuned_arm('lost/vo', losses=[None, *losses_around(0.0)[1:]])

    # Screening losses lie on exact parabolas. Without noise, intervals would be rounding errors.
    # The two seeds of a rate are adjacent records, which get noise of opposite signs.
    for place, record in enumerate(records):
        if record['stage'] == 'screening':
            sign = 1 if place % 2 == 0 else -1
            pair = place // 2
            record['val_loss'] += sign * 0.004 * math.sin(17 * pair)
            record['val_bits_per_byte'] = record['val_loss'] / math.log(2)

    # late/vo is planned, but has no results: (variant, size, stage, tuned setting).
    without_results = ('late/vo', 'd_model=128', 'screening', 'learning_rate')
    # The verdict on bad/vo is as expected. good/vo is better, so its expectation fails.
    expected = ['bad/vo is worse', 'good/vo is not better']
    return write_tuned(
        directory, records, declared=[without_results], num_evals=4, expected=expected
    )


def write_described_study(directory: Path) -> Path:
    """Writes an untuned study of four sizes, which has a scaling law but no verdict.

    The baseline qk/vo and the variant b/vo have three seeds at each size. A fourth seed of b/vo
    diverged at the largest size.
    """
    records = []
    # In these tuned trials, one parameter of b/vo is worth 1.2 parameters of the baseline.
    # The untuned study takes the losses of the verdict trials with seeds 0, 1 and 2.
    for tuned in records_of_a_scaling_law(1.2):
        seed = tuned['trial']['seed']
        if tuned['stage'] == 'verdict' and seed < 3:
            record = trial_record(
                tuned['variant'],
                tuned['size'],
                seed,
                learning_rate=4e-3,
                val_loss=tuned['val_loss'],
                d_model=tuned['config']['d_model'],
            )
            records.append(record)

    # SIZES is {size: d_model}, with the largest size last. A loss of None is a diverged trial.
    largest_size, d_model = list(SIZES.items())[-1]
    diverged = trial_record(
        'b/vo', largest_size, seed=3, learning_rate=3e-3, val_loss=None, d_model=d_model
    )
    records.append(diverged)
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
    pictures = [picture(drawing) for drawing in figures(findings)]
    texts = documents(findings, pictures)
    page = Page(texts.pop('report.html'))
    texts['page.txt'] = '\n'.join(page.lines) + '\n'
    texts['headline.md'] = headline(findings)
    return {name: TIME.sub('TIME', text) for name, text in texts.items()}


A = ArmKey('a', 's', 'c')
B = ArmKey('b', 's', 'c')
CODES = {Remark: RemarkCode, Reason: ReasonCode, Problem: ProblemCode}
# The data of all codes by field name. `OTHER_DATA` has the fields that differ for one code.
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


def macros_of_clauses():
    return prose.environment(html=False).get_template('clauses.j2').module


def macro_name(kind: type, code) -> str:
    """The name of the macro that writes a code, such as 'remark_no_test'."""
    return f'{kind.__name__}_{code.name}'.lower()


def clauses() -> str:
    """Returns a line for each code, such as 'remark_no_test: its trials have no test loss'.

    A code stands for a remark, a reason of a verdict, or a problem of a scaling law. A template has
    a macro for each code. The macro writes the sentence, with data such as a loss or seeds.
    """
    macros = macros_of_clauses()
    lines = []
    for kind, codes in CODES.items():
        for code in codes:
            name = macro_name(kind, code)
            macro = getattr(macros, name)
            data = DATA | OTHER_DATA.get(name, {})
            data_of_code = {argument: data[argument] for argument in macro.arguments}
            finding = kind(code, data_of_code)
            # The report has 7 comparisons with the baseline, and shows intervals.
            sentence = prose.clause(finding, comparisons=7, intervals=True)
            lines.append(f'{name}: {sentence}')
    return '\n'.join(lines) + '\n'


@pytest.mark.stored
@pytest.mark.parametrize('name', STUDIES)
def test_the_report_of_a_study_is_the_golden_one(name, study_dir):
    write = STUDIES[name]
    texts = texts_of_report(findings_of(write(study_dir)))
    golden = {path.name: path.read_text() for path in (GOLDEN / name).iterdir()}
    assert texts.keys() == golden.keys()
    for file, text in texts.items():
        assert difference(golden[file], text) is None, f'{name}/{file}'


def test_every_code_is_a_clause_with_its_numbers():
    assert clauses() == (GOLDEN / 'clauses.txt').read_text()


def test_every_clause_has_a_code():
    names = set()
    for kind, codes in CODES.items():
        names |= {macro_name(kind, code) for code in codes}
    prefixes = ('remark_', 'reason_', 'problem_')
    macros = {name for name in dir(macros_of_clauses()) if name.startswith(prefixes)}
    assert macros == names


@pytest.mark.parametrize(
    ('number', 'printed'),
    [
        (None, '-'),
        (0, '0'),
        (12.5, '12.5'),
        (999.6, '1.00k'),
        (4921812, '4.92M'),
        (123456, '123k'),
        (0.25, '0.25'),
        (2.5e15, '2.50P'),
    ],
)
def test_numbers_are_printed_with_three_digits_and_a_prefix(number, printed):
    assert prose.si(number) == printed


def test_small_p_values_are_bounds():
    assert prose.p_value(None) == '-'
    assert prose.p_value(9e-4) == '< 0.001'
    assert prose.p_value(1e-3) == '0.001'


def test_numbers_are_rounded_and_other_values_stay():
    assert prose.rounded(1234567.89) == 1234567.9
    assert prose.rounded(1 / 3) == 0.333333
    assert prose.rounded(2.0) == 2.0
    assert prose.rounded('a') == 'a'


def rows_of_csv(findings: Findings) -> list[dict[str, str]]:
    """The rows of table.csv, one for each arm, by column."""
    return list(csv.DictReader(tables.csv_table(findings).splitlines()))


def test_a_metric_from_outside_is_a_column_without_its_module(study_dir, tmp_path, monkeypatch):
    # A report takes the metric and its description from the records, not from the metric's module.
    # An import of the module would fail.
    (tmp_path / 'evil.py').write_text('raise AssertionError("imported")')
    monkeypatch.syspath_prepend(tmp_path)

    # `top` is the value of the metric top_3. A record also describes the metric:
    # its unit is %, and its description is 'Share of the first three.'.
    records = [
        outside_record('qk/vo', top=0.5, seed=0),
        outside_record('qk/vo', top=0.75, seed=1),
        outside_record('b/vo', top=0.25, seed=0),
        outside_record('b/vo', top=None, seed=1),
        trial_record('c/vo'),  # results without the metric
    ]
    write_study(study_dir, records)
    # The config of each run names the metric by its import path.
    for run in {record['run'] for record in records}:
        studies.edit_plan(study_dir, run, train__metrics=['evil:TOP_3'])

    findings = findings_of(study_dir)

    # The mean of qk/vo is (0.5 + 0.75) / 2. In the other arms, a seed has no value.
    mean_by_arm = [row['test_top_3_mean'] for row in rows_of_csv(findings)]
    assert mean_by_arm == ['0.625', '', '']

    # In percent, qk/vo has the values 50 and 75. Their standard deviation is 25 / sqrt(2).
    report = tables.report_markdown(findings)
    assert '| test top 3, % mean ± sd |' in report
    assert '| 62.5000 ± 17.6777 |' in report
    assert 'Share of the first three.' in report


def test_the_loss_on_a_further_corpus_is_a_column_that_decides_nothing(study_dir):
    """An arm differs from the baseline by its loss on the main corpus, here by 0.

    The setting `evaluate` of a run asks for losses on further corpora (collections of texts).
    """
    # The losses of two seeds on the further corpus. The second seed of b/vo has no loss there.
    further_losses = {'qk/vo': [3.0, 3.5], 'b/vo': [2.5, None]}
    records = []
    for variant, losses_of_variant in further_losses.items():
        for seed, further_loss in enumerate(losses_of_variant):
            record = trial_record(variant, seed=seed, val_loss=2.0)
            records.append(studies.on_corpus(record, 'stdlib@test', further_loss))
    write_study(study_dir, records)

    # In the first report, only results have the corpus. In the second, plans ask for it too.
    text_before = tables.report_markdown(findings_of(study_dir))
    for run in {record['run'] for record in records}:
        studies.edit_plan(study_dir, run, data__evaluate=['stdlib@test'])
    findings = findings_of(study_dir)
    text = tables.report_markdown(findings)

    # The mean of qk/vo is (3.0 + 3.5) / 2. b/vo has no mean, because a seed has no loss.
    row_of_baseline, row_of_b = rows_of_csv(findings)
    assert row_of_baseline['loss[stdlib@test]_mean'] == '3.25'
    assert row_of_b['loss[stdlib@test]_mean'] == ''
    # On the main corpus, b/vo and the baseline qk/vo have the same losses.
    assert row_of_baseline['difference_mean'] == ''
    assert row_of_b['difference_mean'] == '0.0'

    # Both texts have the losses. The standard deviation of 3.0 and 3.5 is 0.5 / sqrt(2).
    for part in ('| loss on stdlib@test, nats/token mean ± sd |', '| 3.2500 ± 0.3536 |'):
        assert part in text
        assert part in text_before
    # If plans ask for the corpus, the text also says that the corpus decides nothing.
    note = 'also evaluated, and deciding nothing: stdlib@test'
    assert note in text
    assert note not in text_before


@pytest.mark.parametrize(
    ('name', 'escaped'),
    [
        pytest.param('a|b', r'a\|b', id='a column'),
        pytest.param(
            '<script>alert(1)</script>', '&lt;script>alert(1)&lt;/script>', id='a tag of HTML'
        ),
        pytest.param(
            '<!-- a --> &amp; &#60;', '&lt;!-- a --> &amp;amp; &amp;#60;', id='a comment of HTML'
        ),
        pytest.param('a < b & c > d', 'a < b & c > d', id='no markup'),
        pytest.param('![a](http://b) [c][d]', r'![a]\(http://b) [c]\[d]', id='a picture, a link'),
        pytest.param('`a` \\frac', r'\`a\` \\frac', id='code and TeX'),
        pytest.param('one\ntwo\r\n# three', 'one two # three', id='several lines'),
        pytest.param('\x1b[31mred \u202egro', r'\\x1b[31mred \\u202egro', id='codes of terminals'),
    ],
)
def test_names_are_escaped_in_markdown_tables(name, escaped):
    align_left = True
    lines = tables.markdown_table([(name, align_left)], [[name]]).splitlines()
    titles, _, row = lines
    assert row == f'| {escaped} |'
    # A vertical bar in a title means a line break, which Markdown shows as a space.
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
    """The function keeps a spreadsheet from running names that begin like formulas."""
    files = [*ROOT.glob('qkattn/**/*.py'), *ROOT.glob('experiments/**/*.py')]
    call_of_writer = re.compile(r'to_csv|csv\.(writer|DictWriter)')
    writing = [path.name for path in files if call_of_writer.search(path.read_text())]
    assert writing == ['tables.py']


def test_a_variant_that_begins_as_a_formula_is_text_in_table_csv(study_dir):
    write_study(study_dir, [trial_record('qk/vo'), trial_record('=cmd/vo')])
    lines = tables.csv_table(findings_of(study_dir)).splitlines()
    first_column = [line.split(',')[0] for line in lines]
    assert first_column == ['variant', 'qk/vo', "'=cmd/vo"]


def test_a_report_names_the_settings_of_a_recipe_that_arms_share(study_dir):
    """A report lists the training settings that all arms share.

    Some settings are listed only if they differ from the default.
    """
    records = [trial_record('qk/vo'), trial_record('b/vo')]
    write_study(study_dir, records)
    text_of_defaults = '\n'.join(tables.settings(findings_of(study_dir)))

    # By default, there is no z-loss, and tokens attend across documents.
    for record in records:
        studies.edit_plan(
            study_dir,
            record['run'],
            optimizer__schedule='wsd',
            train__z_loss=1e-4,
            data__cross_documents=False,
        )
    text = '\n'.join(tables.settings(findings_of(study_dir)))

    # By default, the schedule 'wsd' lowers the learning rate in the last 0.1 of the steps.
    schedule = 'to 0 of the peak in the last 0.1 of the steps'
    for setting in (schedule, 'z-loss 0.0001', 'within documents'):
        assert setting in text
        assert setting not in text_of_defaults


def test_settings_name_the_depths_of_encoders_where_only_some_arms_set_one(study_dir):
    """Without num_encoder_layers, the encoder has the layers of the decoder, here 4."""
    records = [trial_record('qk/vo'), trial_record('b/vo')]
    write_study(study_dir, records)
    studies.edit_plan(study_dir, records[0]['run'], model__num_encoder_layers=6)
    text = '\n'.join(tables.settings(findings_of(study_dir)))
    assert '4 layers of the decoder, 4 or 6 layers of the encoder' in text


def write_study_of_one_seed(directory: Path) -> Path:
    return write_study(directory, [trial_record('qk/vo'), trial_record('b/vo')])


def write_study_with_different_documents(directory: Path) -> Path:
    """Writes a study of three seeds, whose arms were evaluated on different documents."""
    write_study_of_three_seeds(directory)
    records_of_b = [trial_record('b/vo', seed=seed) for seed in range(3)]
    run_of_b = directory / records_of_b[0]['run']
    studies.write_documents(run_of_b, records_of_b, number=90)
    return directory


def write_study_without_verdict_trials(directory: Path) -> Path:
    """Writes a tuned study with results of screening trials, but none of verdict trials."""
    screening = []
    for variant in ('qk/vo', 'b/vo'):
        trials = tuned_arm(variant, losses=(2.0,), rates=RATES[:2])
        screening += [trial for trial in trials if trial['stage'] == 'screening']
    return write_tuned(directory, screening)


def write_study_of_three_seeds(directory: Path) -> Path:
    records = []
    for variant in ('qk/vo', 'b/vo'):
        records += [trial_record(variant, seed=seed) for seed in range(3)]
    return write_study(directory, records)


@pytest.mark.parametrize(
    ('write', 'sentence'),
    [
        (write_study_of_one_seed, 'One seed: no interval can be given'),
        (
            write_study_with_different_documents,
            'No interval can be given: arm and baseline share one seed only',
        ),
        (write_study_without_verdict_trials, 'Tests include the errors over seeds'),
    ],
)
def test_a_report_without_intervals_speaks_of_none(write, sentence, study_dir):
    """Where no difference has an interval, a report at most says that none can be given.

    `write` writes such a study.
    """
    findings = findings_of(write(study_dir))
    text = tables.report_markdown(findings)
    assert sentence in text
    # An interval looks like [-0.0310, -0.0290].
    interval = r'\[[-+.\d]+, [-+.\d]+\]'
    assert not re.search(interval, text)
    assert 'interval' not in re.sub('[Nn]o interval can be given', '', text)
    assert 'interval' not in tables.terminal_text(findings, Path('report.html'))


def test_a_report_with_intervals_says_what_they_hold(study_dir):
    text = tables.report_markdown(findings_of(write_study_of_three_seeds(study_dir)))
    assert 'Intervals (95 %, Student t) over 3 seeds are descriptive' in text
    assert 'what another choice of documents would change in a difference is part of its' in text


def test_hostile_names_are_text_in_every_file(study_dir):
    """All files of a report show a name with markup and control codes as text."""
    # Markup of HTML, TeX and Markdown, and codes of terminals.
    name = '<script>alert("x")</script>--><b>&amp;$\\frac$|a_b\n%\x1b[2J\u202e'
    write_study(
        study_dir,
        [trial_record('qk/vo'), trial_record(name)],
        question=f'<img src=x onerror=alert(1)>{name}',
        name=f'</title>{name}',
    )
    findings = findings_of(study_dir)

    # The page is made without pictures, so it has no tag <img> of its own.
    html = documents(findings, ())['report.html']
    page = Page(html)
    tags = {tag for tag, _ in page.tags}
    assert 'script' not in tags
    assert 'img' not in tags
    # The page shows the markup of the name and of the question as text.
    first_line_of_name, _ = name.split('\n')
    assert first_line_of_name in page.text
    assert '<img src=x onerror=alert(1)>' in page.text

    # The Markdown report has no HTML tags.
    markdown = tables.report_markdown(findings)
    assert not re.search('<[a-z/!]', markdown)

    # No text has an escape sequence, or a mark that reverses the direction of writing.
    for text in (tables.terminal_text(findings, study_dir), markdown, headline(findings)):
        assert '\x1b' not in text
        assert '\u202e' not in text


def test_a_terminal_tells_long_names_apart(study_dir):
    """A terminal has no room for long names. Shortened names still differ from each other."""
    # The names differ only in the middle.
    long_names = ['low_rank(rank=4)/vo?num_kv_heads=1', 'low_rank(rank=8)/vo?num_kv_heads=1']
    records = []
    for name in ['qk/vo', *long_names]:
        records += tuned_arm(name, losses=losses_around(0.0))
    findings = findings_of(write_tuned(study_dir, records))

    # The first column of a table has the names. Two spaces separate columns.
    lines = tables.terminal_text(findings, study_dir).splitlines()
    first_cells = [line.split('  ')[0] for line in lines]
    name_with_rank = re.compile(r'low_rank\S*rank=[48]\S*')
    names_with_rank = [cell for cell in first_cells if name_with_rank.fullmatch(cell)]
    assert len(names_with_rank) == 2


def test_a_headline_names_a_baseline_without_results(study_dir):
    baseline = tuned_arm('qk/vo', losses=losses_around(0.0))
    screening_of_baseline = [trial for trial in baseline if trial['stage'] == 'screening']
    records = screening_of_baseline + tuned_arm('b/vo', losses=losses_around(0.0))
    without_results = ('qk/vo', 'd_model=128', 'verdict', None)
    findings = findings_of(write_tuned(study_dir, records, declared=[without_results]))
    assert '| qk/vo | baseline, no result yet |' in headline(findings)


def test_a_headline_names_a_baseline_whose_seeds_all_diverged(study_dir):
    records = tuned_arm('qk/vo', losses=[None] * 8) + tuned_arm('b/vo', losses=losses_around(0.0))
    findings = findings_of(write_tuned(study_dir, records))
    assert '| qk/vo | baseline, diverged |' in headline(findings)


def test_text_tables_are_aligned():
    """A vertical bar in a title makes a line break. A line break in a cell is escaped."""
    align_left = True
    align_right = False
    columns_of_table = [('name', align_left), ('loss,|nats', align_right)]
    rows = [['a\n', '1'], ['b', '23']]

    text = text_table(columns_of_table, rows)

    # Each column is as wide as its longest cell, and two spaces stand between columns.
    assert text.splitlines() == [
        'name  loss,',
        '       nats',
        '----  -----',
        r'a\n       1',
        'b        23',
    ]


@pytest.fixture(scope='module')
def study_and_terminal_text(tmp_path_factory):
    """The directory of a study with its report, and what the terminal shows of it."""
    path = tmp_path_factory.mktemp('shown') / 'study'
    records = []
    for variant in ('qk/vo', 'b/vo'):
        records += [trial_record(variant, seed=0), trial_record(variant, seed=1)]
    write_study(path, records)
    text = show_report(path)
    return path, text


def test_a_report_writes_its_files(study_and_terminal_text):
    study_dir, text = study_and_terminal_text
    assert text.splitlines()[-1] == f'report: {study_dir / "report.html"}'
    files = {path.name for path in study_dir.iterdir()}
    assert 'report.html' in files
    assert 'table.md' in files
    assert 'table.csv' in files
    assert 'plots' not in files


def test_a_page_is_self_contained(study_and_terminal_text):
    """The page of a report is one file that needs neither other files nor the network."""
    study_dir, _ = study_and_terminal_text
    html = (study_dir / 'report.html').read_text()
    page = Page(html)  # the tags and ids of the HTML
    tags = [tag for tag, _ in page.tags]

    # Nothing is loaded from elsewhere.
    for tag in ('script', 'link', 'iframe', 'object'):
        assert tag not in tags
    assert 'http' not in html
    assert '@import' not in html

    links = []
    for _, attributes in page.tags:
        for name in ('src', 'srcset', 'href', 'action'):
            if name in attributes:
                links.append(attributes[name])
    # A link contains a picture, or leads to a place in the page, such as '#notes'.
    for link in links:
        assert link.startswith(('#', 'data:image/svg+xml;base64,'))
        if link.startswith('#'):
            assert link.removeprefix('#') in page.ids
    # Each id is unique, so each link leads to one place.
    assert len(page.ids) == len(set(page.ids))


def test_a_figure_without_panels_has_a_version_for_wide_screens(study_and_terminal_text):
    """A figure that is one picture has an <img> for narrow screens and a <source> for wide ones.

    The panels of other figures are separate pictures, as many in a row as fit on the screen.
    """
    study_dir, _ = study_and_terminal_text
    page = Page((study_dir / 'report.html').read_text())
    tags = [tag for tag, _ in page.tags]
    figures_without_panels = 1  # in this study
    assert tags.count('source') == figures_without_panels


@pytest.fixture(scope='module')
def decided_page(tmp_path_factory):
    """The HTML of the report of a study with every decision."""
    path = tmp_path_factory.mktemp('decided') / 'study'
    findings = findings_of(write_decided_study(path))
    pictures = [picture(drawing) for drawing in figures(findings)]
    return documents(findings, pictures)['report.html']


def test_the_first_table_of_a_page_has_what_a_reader_looks_at_first(decided_page):
    """The first table has few columns. A later table of the page has all columns."""
    heads = re.findall(r'<table class="">\n<thead>(.*?)</thead>', decided_page, re.DOTALL)
    head_of_first_table = heads[0]
    # Each title follows a tag <th ...>. The text before the first tag is no title.
    cells = re.split('<th [^>]*>', head_of_first_table)[1:]
    # The next tag ends the first line of a title. The second line is inside that tag.
    titles = [re.sub(r'<.*', '', cell).strip() for cell in cells]
    assert titles == [
        'variant',
        'difference in test loss,',
        'verdict,',
        'parameters',
        'd_model',
    ]


def test_the_table_of_all_columns_is_folded(decided_page):
    folded = re.search('<details><summary>All columns</summary>(.*?)</details>', decided_page, re.S)
    table = folded[1]
    assert 'induction accuracy' in table


def test_a_figure_has_a_panel_for_each_arm_with_its_whole_name(decided_page):
    panels = re.findall(r'alt="Learning rate: ([^"]*)"', decided_page)
    assert len(panels) == 8
    assert LONG in panels


def test_names_break_between_their_parts(decided_page):
    assert f'<b>{prose.breakable(LONG)}</b>' in decided_page
    assert 'my_package.my_module:<wbr>MyScore/<wbr>my_package.other:<wbr>MyValue?' in decided_page


def test_a_name_that_breaks_is_escaped():
    assert prose.breakable('a/<b>') == 'a/<wbr>&lt;b&gt;'


def test_a_page_escapes_the_names_of_sizes_once(study_dir):
    sizes = ['d_model=64&num_heads=4', 'd_model=96&num_heads=6']
    records = []
    for size in sizes:
        records += tuned_arm('qk/vo', size, BASE)
        records += tuned_arm('bad/vo', size, losses_around(0.05))
    write_tuned(study_dir, records)

    text = Page(documents(findings_of(study_dir), ())['report.html']).text

    # A browser shows a name that is escaped twice as d_model=64&amp;num_heads=4.
    assert '&amp;' not in text
    for size in sizes:
        assert f', {size}), each arm at its own tuned learning rate' in text


def test_sentences_about_arms_of_several_sizes_name_the_size(study_dir):
    """The sentences on positive controls and on longer training name the size of each arm."""
    sizes = ['d_model=64', 'd_model=96']
    records = []
    for size in sizes:
        for length in ({}, {'control': 'longer', 'num_steps': 1600, 'num_tokens': 1600 * 768}):
            records += tuned_arm('qk/vo', size, BASE, **length)
            records += tuned_arm('bad/vo', size, losses_around(0.05), **length)
    controls = {'equal_shape': False, 'longer': 4, 'longer_seeds': []}
    write_tuned(study_dir, records, expected=['bad/vo is worse'], controls=controls)

    text = ' '.join(tables.summary(findings_of(study_dir)))

    # The difference is the same at both sizes, so only the size tells the arms apart.
    assert 'Positive control: bad/vo at d_model=64 is worse than qk/vo' in text
    assert 'Positive control: bad/vo at d_model=96 is worse than qk/vo' in text
    assert 'from qk/vo: bad/vo at d_model=64 +0.0500 [' in text
    assert ', bad/vo at d_model=96 +0.0500 [' in text


def test_a_format_of_plots_that_does_not_exist_is_refused(study_dir):
    with pytest.raises(ConfigError, match=r"plots='gif' is no format; valid are png, pdf, svg"):
        show_report(study_dir, ['gif'])


def test_a_list_has_every_arm_below_its_verdict(decided_page):
    lines = Page(decided_page).lines
    heading = lines.index('Better by more than the margin at this length')
    assert lines[heading + 1] == 'good/vo -0.0300 [-0.0310, -0.0290]'
    listed = re.findall('<li><code>([^ ]*)</code>', decided_page)
    assert len(listed) == 7


def test_a_law_with_a_loose_exponent_is_shown_without_its_numbers(tmp_path):
    """A scaling law is a formula for the loss at N parameters, such as 1.5 + 30 * N**-0.3.

    If the sizes of the study do not determine the exponent, the exponent is loose. The report then
    shows the reason instead of the numbers of the law.
    """
    # Losses follow the law above. A parameter of the arm is worth 1.2 parameters of the baseline.
    findings = findings_of(write_tuned(tmp_path, records_of_a_scaling_law(1.2)))
    scaling_of_baseline, scaling_of_arm = findings.scaling
    reason = Problem(ProblemCode.EXPONENT_LOOSE, {'value': 0.2, 'low': -0.1, 'high': 0.5})
    loose_law = dataclasses.replace(scaling_of_arm.law, loose=reason)
    loose_scaling_of_arm = dataclasses.replace(scaling_of_arm, law=loose_law)

    def row_in_table_of_laws(scaling):
        """Returns {heading: cell} for the arm, with the arm's law taken from `scaling`."""
        changed_findings = dataclasses.replace(findings, scaling=(scaling_of_baseline, scaling))
        (sheet,) = [sheet for sheet in tables.sheets(changed_findings) if sheet.name == 'laws']
        headings = [name for name, _ in sheet.headings]
        row_of_arm = sheet.rows[1]  # rows[0] is the row of the baseline
        return dict(zip(headings, row_of_arm, strict=True))

    determined = row_in_table_of_laws(scaling_of_arm)
    loose = row_in_table_of_laws(loose_scaling_of_arm)

    # The column 'a' has the exponent. A cell without content is '-'.
    assert determined['a'].startswith('0.30')
    assert determined['why a number is missing'].startswith('-')
    assert loose['a'].startswith('-')
    assert loose['why a number is missing'].startswith('the sizes do not determine')

    # Both rows say how many parameters of the baseline a parameter of the arm is worth.
    assert determined['worth of a parameter,|in baseline parameters'].startswith('1.200 [')
    assert loose['worth of a parameter,|in baseline parameters'].startswith('1.200 [')


@pytest.mark.parametrize(
    ('wrong_columns', 'message'),
    [
        pytest.param(
            [Column('mine', 'key.variant'), Column('mine', 'key.size')],
            "^two columns of table.csv are named 'mine'$",
            id='the same name',
        ),
        pytest.param(
            [Column('width', 'example.config.d_modle')],
            "^report column 'width': no arm has the key 'd_modle' of .*; near it are d_model",
            id='a key',
        ),
        pytest.param(
            [Column('width', 'exampel.config.d_model')],
            "^report column 'width': .* has no attribute 'exampel'; near it are example",
            id='an attribute',
        ),
        pytest.param(
            [Column('key', 'key', parts=('varaint',))],
            "^report column 'key': .* has no attribute 'varaint'; near it are variant",
            id='a part',
        ),
    ],
)
def test_wrong_columns_are_refused(tmp_path, monkeypatch, wrong_columns, message):
    write_study(tmp_path, records_of_every_decision())
    findings = findings_of(tmp_path)
    monkeypatch.setattr(columns, 'columns', lambda findings: wrong_columns)
    with refused(message):
        tables.csv_table(findings)


def test_a_format_that_does_not_fit_the_values_of_a_column_is_refused(tmp_path):
    write_study(tmp_path, records_of_every_decision())
    arm = findings_of(tmp_path).arms[0]
    with refused("^report column 'arm': text='.1f' cannot format 'qk/vo': "):
        Column('arm', 'key.variant', heading='arm', text='.1f').print(arm)


def test_a_table_that_does_not_exist_is_refused_with_the_column():
    with refused("^report column 'width': 'pages' is no table of reports; valid are 'page'"):
        Column('width', 'd_model', tables=('pages',))


if __name__ == '__main__':
    for name, write in STUDIES.items():
        shutil.rmtree(GOLDEN / name, ignore_errors=True)
        (GOLDEN / name).mkdir(parents=True)
        with tempfile.TemporaryDirectory() as directory:
            findings = findings_of(write(Path(directory) / 'study'))
            for file, text in texts_of_report(findings).items():
                (GOLDEN / name / file).write_text(text)
    (GOLDEN / 'clauses.txt').write_text(clauses())
