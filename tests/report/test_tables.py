"""The printed tables, every number recomputed from the records; LaTeX, a terminal, trials.csv."""

import csv
import io
import json
import re
import statistics
from pathlib import Path

import numpy as np
import pytest

from qkattn.report import headline
from qkattn.report.columns import columns
from qkattn.report.measures import scores
from qkattn.report.tables import (
    WIDTH,
    csv_table,
    fitted,
    frame,
    headed,
    headings,
    latex,
    latex_table,
    markdown_table,
    notes,
    printed,
    report_markdown,
    report_text,
    terminal_text,
    text_table,
    trials_csv,
    width_of_terminal,
)
from qkattn.verdict import find, load_study
from tests.report.conftest import HOSTILE, controlled
from tests.studies import (
    RATES,
    edit_plan,
    outside_record,
    probe_record,
    run_name,
    translation_record,
    trial_record,
    tuned_arm,
    write_study,
    write_tuned,
)

LOSSES = {'qk/vo': (2.00, 2.10, 2.30), 'merged_qk/vo': (2.05, 2.12, 2.38)}
LOSSES_OF_8 = [2 + 0.01 * seed for seed in range(8)]
DIFFERENCE = 'difference in test loss, nats/token [95 % interval]'


def read(directory):
    study = load_study(directory)
    return study, find(study)


@pytest.fixture
def single(study_dir):
    records = [
        trial_record(variant, seed=seed, val_loss=loss)
        for variant, losses in LOSSES.items()
        for seed, loss in enumerate(losses)
    ]
    records.append(trial_record('merged_qk/vo', seed=3, learning_rate=3e-3, val_loss=None))
    return read(write_study(study_dir, records, declared=[('qk/merged_vo', 'd_model=128')]))


def test_settings_have_the_layers_and_heads_of_all_sizes(study_dir):
    sizes = {'d_model=64&num_layers=1': (64, 1, 1), 'd_model=128': (128, 1, 4)}
    records = [trial_record('qk/vo', size, d_model=of[0]) for size, of in sizes.items()]
    write_study(study_dir, records)
    for size, (_, layers, heads) in sizes.items():
        name = run_name('qk/vo', size)
        edit_plan(study_dir, name, model__num_layers=layers, model__num_heads=heads)
    assert 'model: decoder, 1 layer, 1 or 4 heads, pre-norm' in report_text(*read(study_dir))


@pytest.fixture
def tuned(study_dir):
    records = tuned_arm('qk/vo', losses=LOSSES_OF_8)
    losses = [loss - 0.02 - 0.001 * i for i, loss in enumerate(LOSSES_OF_8)]
    records += tuned_arm('b/vo', losses=losses, optimum=3e-3)
    records += tuned_arm('c/vo', losses=[x + 0.03 - 0.001 * i for i, x in enumerate(losses)])
    for record in records:
        record |= {'val_induction_gain': 1.25, 'val_induction_accuracy': 0.5}
    return read(write_tuned(study_dir, records))


def cells(line):
    return [cell.strip() for cell in line.strip('|').split(' | ')]


def row(study, found, number):
    """A row of the Markdown table, by its headings."""
    of_study = headed(study, found)
    lines = markdown_table(headings(of_study), printed(of_study, found.arms)).splitlines()
    return dict(zip(cells(lines[0]), cells(lines[2 + number]), strict=True))


def records_of(study, found):
    return list(csv.DictReader(io.StringIO(csv_table(study, found))))


def test_every_number_of_the_table(single):
    record = trial_record('merged_qk/vo')
    losses = LOSSES['merged_qk/vo']
    spread = statistics.stdev(losses)
    correlation = statistics.correlation(LOSSES['qk/vo'], losses)
    parameters = record['parameters']
    assert row(*single, 1) == {
        'variant': 'merged_qk/vo',
        'size': 'd_model=128',
        # Differences 0.05, 0.02, 0.08; half width 4.3027 * 0.03 / sqrt(3).
        DIFFERENCE: '+0.0500 [-0.0245, +0.1245]',
        'test loss, nats/token mean ± sd': f'{statistics.mean(losses) + 0.1:.4f} ± {spread:.4f}',
        'val loss, nats/token mean ± sd': f'{statistics.mean(losses):.4f} ± {spread:.4f}',
        'learning rate': '0.001*',
        'correlation over seeds': f'{correlation:+.2f}',
        'seeds': '3',
        'parameters': f'{parameters["total"]:,}',
        'residual, %': f'{100 * record["residual"]:+.3f}',
        'attention parameters': f'{parameters["attention"]:,}',
        'd_model (widened)': '128 (+0)',
        'd_ff (fill)': '512 (+0)',
        'FLOPs /token': f'{6 * parameters["total"] / 1e6:.2f}M',
        'cache floats/token': '1.02k',
        'tokens /s': '123k',
        'run time, s': '12.5',
        'diverged': '1/4',
    }


@pytest.mark.parametrize(
    ('of', 'scores', 'printed'),
    [
        (
            translation_record,
            {'bleu': (20.5, 21.5)},
            {
                'test BLEU mean ± sd': '21.00 ± 0.71',
                'test chrF mean ± sd': '41.00 ± 0.71',
                'test exact match, % mean ± sd': '10.50 ± 0.35',
                'test loss, nats/token mean ± sd': '2.1000 ± 0.0000',
                'val loss, nats/token mean ± sd': '2.0000 ± 0.0000',
            },
        ),
        (
            probe_record,
            {'accuracy': (0.5, 0.5)},
            {
                'test accuracy, % mean ± sd': '50.00 ± 0.00',
                'test solved, % mean ± sd': '12.50 ± 0.00',
                'val loss, nats/token mean ± sd': '0.5000 ± 0.0000',
                'test loss, nats/token mean ± sd': '0.6000 ± 0.0000',
            },
        ),
    ],
)
def test_metrics_of_other_tasks(study_dir, of, scores, printed):
    ((name, values),) = scores.items()
    records = [
        of(variant, seed=seed, **{name: value})
        for variant in ('qk/vo', 'b/vo')
        for seed, value in enumerate(values)
    ]
    study, found = read(write_study(study_dir, records))
    measured = {title: cell for title, cell in row(study, found, 1).items() if 'mean' in title}
    assert measured == printed
    record = records_of(study, found)[1]
    if of is translation_record:
        said = ' '.join(notes(study, found))
        assert said.count('number of sentences 1000') == 1
        assert said.count('signature nrefs:1|case:lc|tok:13a|version:2.5.1.') == 1
        # The unit of the records.
        assert (record['test_bleu_mean'], record['test_exact_match_mean']) == ('21.0', '0.105')
        assert not any(key.startswith(('val_bleu', 'test_accuracy')) for key in record)
    else:
        assert record['test_accuracy_mean'] == '0.5' and 'val_bits_per_byte_mean' not in record


def test_a_metric_from_outside_is_a_column_without_its_module(study_dir, tmp_path, monkeypatch):
    (tmp_path / 'evil.py').write_text('raise AssertionError("imported")')
    monkeypatch.syspath_prepend(tmp_path)
    values = {'qk/vo': (0.5, 0.75), 'b/vo': (0.25, None)}
    records = [
        outside_record(variant, value, seed=seed)
        for variant, of_seeds in values.items()
        for seed, value in enumerate(of_seeds)
    ]
    write_study(study_dir, records)
    for run in {record['run'] for record in records}:
        edit_plan(study_dir, run, train__metrics=['evil:TOP_3'])
    study, found = read(study_dir)
    assert not study.problems
    title = 'test top 3, % mean ± sd'
    assert [row(study, found, number)[title] for number in (0, 1)] == ['62.5000 ± 17.6777', '-']
    assert 'Test top 3: Share of the first three.' in notes(study, found)
    assert records_of(study, found)[0]['test_top_3_mean'] == '0.625'
    trials = list(csv.DictReader(io.StringIO(trials_csv(study, found))))
    assert [trial['val_top_3'] for trial in trials] == ['0.5', '0.75', '0.25', '']
    # Another description, and results of an earlier part of the study that lack the metric.
    described = records[0]['outside_metrics']['top_3'] | {'decimals': 2}
    records[0]['outside_metrics'] = {'top_3': described}
    write_study(study_dir, [*records, trial_record('c/vo')])
    (problem,) = load_study(study_dir).problems
    assert "descriptions of metric 'top_3' differ" in problem
    study, found = read(study_dir)
    assert row(study, found, 2)[title] == '-'
    assert [scores(found.arms)[0].of_seeds(arm) for arm in found.arms] == [[50, 75], [25], []]


def test_csv_holds_numbers_in_the_unit_of_results_to_six_digits(single):
    first, second = records_of(*single)
    assert first['is_baseline'] == '1' and first['difference_mean'] == ''
    assert float(second['difference_mean']) == pytest.approx(0.05)
    assert float(second['val_loss_mean']) == round(statistics.fmean(LOSSES['merged_qk/vo']), 5)
    assert float(second['compile_seconds']) == 3.25
    assert second['seeds'] == '0 1 2' and second['learning_rates_run'] == '0.001 0.003'


def test_columns_are_unique_and_in_every_row(tuned):
    of_study = columns(*tuned)
    table = frame(*tuned)
    assert table.columns.is_unique and len(table) == 3
    headings = [column.heading for column in of_study if column.heading and column.full]
    assert len(headings) == len(set(headings))


def test_notes_of_a_single_seed_and_problems(study_dir):
    write_study(study_dir, [trial_record('qk/vo'), trial_record('b/vo', val_loss=2.25)])
    with (study_dir / 'results.jsonl').open('a') as file:
        file.write('nonsense\n')
    text = report_text(*read(study_dir))
    assert '! results.jsonl:3 was left out: it is not JSON' in text
    table = text.partition('Variants')[0]
    assert '+0.2500' in table and '[' not in table and ' ± 0' not in table
    assert 'One seed: no interval can be given' in text
    assert 'not tuned per arm: each ran at one only (0.001)' in text


def test_notes_of_rates_chosen_by_the_same_seeds(single):
    said = ' '.join(notes(*single))
    assert 'Intervals (95 %, Student t) over 3 seeds are descriptive' in said
    assert 'lowest mean validation loss, of 0.001, 0.003;' in said
    assert 'Not tuned, one learning rate only: qk/vo at d_model=128.' in said
    assert 'Missing, 1: qk/merged_vo at d_model=128 (not started).' in said


def test_what_intervals_leave_out_is_noted(study_dir):
    """The largest at_worst of two noisy sweeps, and of a third that bounds nothing."""
    records = [r for v in ('qk/vo', 'b/vo', 'c/vo') for r in tuned_arm(v, losses=LOSSES_OF_8)]
    for place, sd in enumerate((0.01, 0.05, 2.0)):
        noise = np.random.default_rng(0).normal(0, sd, 10)
        for record, extra in zip(records[18 * place :], noise, strict=False):
            record['val_loss'] += extra
    grids = {'tuning__weight_decays': [0.1, 0.2], 'tuning__score_scales': [1.0, 2.0]}
    study, found = read(write_tuned(study_dir / 'knobs', records, **grids))
    assert 'one at a time (learning rate, weight decay, score scale)' in ' '.join(
        notes(study, found)
    )
    study, found = read(write_tuned(study_dir, records))
    at_worst = [arm.sweeps['learning_rate'].at_worst for arm in found.arms]
    assert at_worst[2] is None and at_worst[1] > at_worst[0]
    (said,) = [note for note in notes(study, found) if 'may have missed' in note]
    assert (
        f'optima: up to {at_worst[1]:.2g} nats/token (learning rate of b/vo at d_model=128); '
        '1 of 3 optima are not bounded, which withholds the verdict.'
    ) in said


def test_an_arm_that_is_only_screened_is_in_every_table(study_dir):
    records = tuned_arm('qk/vo') + tuned_arm('b/vo', optimum=3e-3)[:10]
    study, found = read(write_tuned(study_dir, records))
    shown = row(study, found, 1)
    assert (shown['verdict, margin 0.005'], shown['p, corrected']) == ('no verdict', '-')
    assert shown['tuned learning rate [95 % interval]'] == '0.003 [0.003, 0.003]'
    assert 'verdict not started' in report_text(study, found)
    assert 'b/vo,' in csv_table(study, found)
    assert '| b/vo | - | no verdict | - |' in headline(study, found)


def test_headline(tuned):
    table, _, sentence = headline(*tuned).rstrip().rpartition('\n\n')
    lines = [cells(line) for line in table.splitlines()]
    assert table.startswith(
        '| variant | difference in test loss, nats/token [95 % interval] | verdict, margin 0.005 |'
    )
    assert [line[0].removeprefix('| ') for line in lines[2:]] == ['qk/vo', 'b/vo', 'c/vo']
    assert lines[3][1:3] == ['-0.0235 [-0.0255, -0.0215]', 'better']
    assert sentence.startswith('Intervals are 95 % each; p is that of the verdict')
    assert 'Equal total parameters (820k, within 0.1 %); same data' in sentence


def test_headline_of_a_study_without_tuning(single):
    lines = headline(*single).splitlines()
    assert 'verdict' not in lines[0] and 'tuned' not in lines[0]
    assert lines[2].startswith('| qk/vo | baseline, test loss 2.2333 ± 0.1528 |')
    assert lines[3] == '| merged_qk/vo | +0.0500 [-0.0245, +0.1245] |'


@pytest.mark.parametrize(
    ('name', 'escaped'),
    [
        ('a|b', r'a\|b'),
        ('<script>alert(1)</script>', '&lt;script>alert(1)&lt;/script>'),
        ('<!-- a --> &amp; &#60;', '&lt;!-- a --> &amp;amp; &amp;#60;'),
        ('a < b & c > d', 'a < b & c > d'),
        ('![a](http://b) [c][d]', r'![a]\(http://b) [c]\[d]'),
        ('`a` \\frac', r'\`a\` \\frac'),
        ('one\ntwo\r\n# three', 'one two # three'),
        ('\x1b[31mred \u202egro', r'\\x1b[31mred \\u202egro'),
    ],
)
def test_names_are_text_in_markdown(study_dir, name, escaped):
    records = [trial_record(variant, seed=seed) for variant in ('qk/vo', name) for seed in (0, 1)]
    study, found = read(write_study(study_dir, records, question=name, name=name))
    text = report_markdown(study, found)
    of_line = escaped.replace(r'\|', '|')  # which is text outside of tables
    assert text.startswith(f'# {of_line}\n\n{of_line}\n\n')
    titles, _, _, row = [line for line in text.splitlines() if line.startswith('| ')][:4]
    assert row.startswith(f'| {escaped} | ') and f'\n| {escaped} | ' in headline(study, found)
    assert len(re.findall(r'(?<!\\)\|', row)) == titles.count('|')
    assert not re.search('<[a-z/!]', text) and '\x1b' not in text


def test_text_tables_show_what_a_terminal_obeys(study_dir):
    """The names of variants, which a config of someone else may hold."""
    assert text_table([('name', True)], [['a\n\tb\x7f']]).splitlines()[2:] == [r'a\n\tb\x7f']
    name = 'a\x1b[2J\n\u202eb\u2066'
    study, found = read(write_study(study_dir, [trial_record(name)], baseline=None, question=name))
    for text in (report_text(study, found), terminal_text(study, found, study_dir / 'a', 120)):
        assert not re.search('[\x1b\u202e\u2066]', text)
        assert any(line.startswith(r'a\x1b[2J \u202eb\u2066 ') for line in text.splitlines())


def test_headings_of_a_study_without_baseline(study_dir):
    study, found = read(write_study(study_dir, [trial_record('a|b')], baseline=None))
    assert headline(study, found).splitlines()[0] == '| variant | test loss, nats/token mean ± sd |'


# table.tex


def test_a_table_of_hostile_names(study_dir):
    records = tuned_arm('qk/vo', losses=LOSSES_OF_8)
    name = HOSTILE + 'é→' + chr(0x4E00)
    records += tuned_arm(name, losses=[x - 0.02 - 0.001 * i for i, x in enumerate(LOSSES_OF_8)])
    study = load_study(write_tuned(study_dir, records, question='Are 100 % of W_O needed? {no}'))
    table = latex_table(study, find(study))
    assert_compiles(table)
    minus = r'\ensuremath{-}'
    assert f'{minus}0.0235 [{minus}0.0255, {minus}0.0215]' in table and '& better' in table
    (caption,) = re.findall(r'\\caption\{(.*)\}\n', table)
    for part in (
        r'synthetic: Are 100 \% of W\_O needed? \{no\} Difference:',
        r'Equal total parameters (820k, within 0.1 \%).',
        'Learning rate tuned per arm on other seeds; 8 seeds',
        'p corrected for 1 comparison; margin 0.005 nats/token.',
    ):
        assert part in ' '.join(caption.split())


def assert_compiles(table):
    """Braces balance, environments nest, nothing active is bare, rows have as many cells."""
    plain = re.sub(r'\\[{}%&#$_\\]', '', table)
    assert plain.count('{') == plain.count('}') and not re.search(r'[_#^~"|<>$]', plain)
    opened = re.findall(r'\\(begin|end)\{(\w+)\}', table)
    assert opened == [
        *(('begin', 'table'), ('begin', 'tabular'), ('end', 'tabular'), ('end', 'table'))
    ]
    (places,) = re.findall(r'\{@\{\}([lr]+)@\{\}\}', table)
    rows = [line for line in table.splitlines() if line.endswith(r'\\')]
    assert len(rows) == 3
    assert {len(re.split(r'(?<!\\)&', row)) for row in rows} == {len(places)}


@pytest.mark.parametrize(
    ('text', 'escaped'),
    [
        ('a_b', r'a\_b'),
        ('50 %', r'50 \%'),
        ('-0.1 [-0.2, +0.3]', r'\ensuremath{-}0.1 [\ensuremath{-}0.2, +0.3]'),
        ('8-9 p-value', '8-9 p-value'),
        ('a--b', 'a-{}-b'),
        ('\\x{', r'\textbackslash{}x\{'),
        ('a\n b', 'a b'),
        ('1 ± 2', r'1 \ensuremath{\pm} 2'),
        (chr(0x4E00), '[U+4E00]'),
    ],
)
def test_latex_escapes(text, escaped):
    assert latex(text) == escaped


# What a terminal shows


@pytest.mark.parametrize('width', [80, WIDTH])
def test_a_study_fits_and_has_its_verdicts(study, width):
    loaded = load_study(study)
    text = terminal_text(loaded, find(loaded), Path('runs/study/report.html'), width)
    lines = text.splitlines()
    assert max(map(len, lines)) <= width
    (titles,) = (line for line in lines if line.startswith('variant  '))
    assert 'difference in test loss' in titles and 'verdict' in titles
    assert lines[-2:] == [
        'all columns, notes and settings: runs/study/table.txt',
        'report: runs/study/report.html',
    ]


@pytest.mark.parametrize('width', [60, 95, 100])
def test_columns_that_do_not_fit_are_left_out_in_turn(width):
    titles = [('name', True), ('a' * 30, False), ('b' * 36, False), ('c|d', False)]
    table = fitted(titles, [['x' * 80, '1', '2', '3'], ['y', '4', '5', '6']], width)
    lines = table.splitlines()
    assert max(map(len, lines)) <= width
    assert ('b' * 36 in table) == (width >= 95)
    assert 'a' * 30 in table and lines[-1].split() == [
        'y',
        *{60: '46', 95: '45', 100: '456'}[width],
    ]
    assert (
        lines[-2].split()[0] == f'{"x" * ((width // 4 - 1) // 2)}…{"x" * ((width // 4 - 1) // 2)}'
    )


@pytest.mark.parametrize(('columns', 'width'), [('80', 80), ('200', 100)])
def test_a_report_is_as_wide_as_the_terminal_up_to_100(columns, width, monkeypatch):
    monkeypatch.setenv('COLUMNS', columns)
    assert width_of_terminal() == width


# trials.csv


def rows(directory):
    study = load_study(directory)
    return list(csv.DictReader(io.StringIO(trials_csv(study, find(study)))))


def test_a_row_for_every_trial_with_the_numbers_of_its_result(study_dir):
    directory = controlled(study_dir)
    results = [json.loads(line) for line in (directory / 'results.jsonl').read_text().splitlines()]
    table = rows(directory)
    assert len(table) == len(results)
    for row, result in zip(table, results, strict=True):
        for name in ('variant', 'size', 'corpus', 'stage', 'status', 'run'):
            assert row[name] == result[name]
        assert (row['control'], row['knob']) == (result['control'] or '', result['knob'] or '')
        assert int(row['seed']) == result['trial']['seed']
        for name in ('learning_rate', 'weight_decay'):
            assert float(row[name]) == result['trial'][name]
        for name in ('num_steps', 'val_loss', 'test_loss', 'test_bits_per_byte', 'residual'):
            assert float(row[name]) == result[name]
        assert (directory / row['directory']).is_dir()
    assert {row['stage'] for row in table} == {'screening', 'verdict'}
    assert {row['control'] for row in table} == {'', 'equal_shape', 'longer'}
    assert float(table[0]['score_scale']) == 1.0
    # Nothing has translated here.
    assert not [name for name in table[0] if 'bleu' in name]


def test_rows_of_diverged_trials_and_of_those_that_results_are_from(study_dir):
    records = tuned_arm('qk/vo', losses=[2.0, None, 2.2], diverged_rates=RATES[-1:])
    table = rows(write_tuned(study_dir, records))
    verdict = [row for row in table if row['stage'] == 'verdict']
    assert [row['status'] for row in verdict] == ['finished', 'diverged', 'finished']
    assert [row['val_loss'] for row in verdict] == ['2.0', '', '2.2']
    assert [row['chosen'] for row in verdict] == ['1', '0', '1']
    assert {row['chosen'] for row in table if row['stage'] == 'screening'} == {'0'}
