"""The tables beside that of the arms, and how arms are marked in every file."""

import csv
import io
import json

import pytest

from qkattn.report import documents, headline
from qkattn.report.equations import form
from qkattn.report.figures import figures
from qkattn.report.sheets import sheets
from qkattn.report.tables import csv_table, report_text, settings, summary
from qkattn.storage import ledger
from qkattn.verdict import find, load_study
from tests.report.conftest import controlled, row_names, shifted
from tests.studies import (
    edit_plan,
    run_name,
    trial_record,
    tuned_arm,
    write_study,
    write_tuned,
    write_yardsticks,
)


@pytest.fixture(scope='module')
def of_controls(tmp_path_factory):
    study = load_study(controlled(tmp_path_factory.mktemp('controlled') / 'study'))
    return study, find(study)


def rows(study, found, name):
    """The rows of a sheet, by their first cell."""
    (sheet,) = [sheet for sheet in sheets(study, found) if sheet.name == name]
    headings = [heading for heading, _ in sheet.headings]
    return {row[0]: dict(zip(headings, row, strict=True)) for row in sheet.rows}


def test_removing_and_reinvesting_add_up(of_controls):
    parts = rows(*of_controls, 'parts')
    assert list(parts) == ['qk/no_o', 'shared_qk/vo', 'qk/no_v (post hoc)']
    means = {
        name: [cell.partition(' ')[0] for cell in list(row.values())[1:]]
        for name, row in parts.items()
    }
    assert means['qk/no_o'] == ['-0.0200', '-0.0100', '-0.0300', '-0.0100']
    assert means['shared_qk/vo'] == ['+0.0600', '-0.0200', '+0.0400', '-']
    assert all('[' in cell for cell in list(parts['qk/no_o'].values())[1:])
    table, _, text = headline(*of_controls).partition('\n\n')
    assert '| -0.0200 [-0.0209, -0.0191] | -0.0100 [-0.0100, -0.0100] |' in table
    assert 'Trained 4 times as long, difference from qk/vo: qk/no_o -0.0100 [' in text


def test_controls_are_no_contestants(of_controls):
    study, found = of_controls
    controls = rows(study, found, 'controls')
    assert controls['qk/no_o']['control'] == 'longer' and len(found.controls) == 4
    assert 'equal shape' not in '\n'.join(summary(study, found))
    (forest,) = [drawing for drawing in figures(study, found) if drawing.stem == 'verdicts']
    labels = row_names(forest.figure.axes[0])
    assert labels == ['qk/no_o', 'qk/no_v (post hoc)', 'shared_qk/vo']
    records = list(csv.DictReader(io.StringIO(csv_table(study, found))))
    assert [r['control'] for r in records] == [''] * 4 + ['equal_shape'] * 2 + ['longer'] * 2
    assert [r['post_hoc'] for r in records] == ['0', '0', '0', '1', '0', '0', '0', '0']
    assert [r['d_model_widened'] for r in records] == ['', '8', '4', '8', '0', '0', '', '8']
    assert [r['d_ff_fill'] for r in records] == ['', '0', '0', '0', '0', '0', '', '0']


def test_what_is_wrong_with_a_control_is_in_the_way_of_no_verdict(study_dir):
    arms = {None: 4e-3, 'equal_shape': 16e-3}
    records = tuned_arm('qk/vo', losses=shifted(0.0))
    for control, optimum in arms.items():
        records += tuned_arm('b/vo', losses=shifted(0.1), control=control, optimum=optimum)
    study = load_study(write_tuned(study_dir, records))
    page = documents(study, find(study), (), {})['report.html']
    assert 'b/vo at d_model=128 (equal shape): learning rate not bracketed' in page
    assert 'In the way of a verdict' not in page and 'blocks a verdict' not in page


def test_fill_is_beyond_the_ratio_of_the_baseline(study_dir):
    records = [*tuned_arm('qk/vo'), *tuned_arm('b/vo', losses=shifted(0.0))]
    for record in records[18:]:
        record['config'] |= {'d_model': 130, 'd_ff': 517}
    study = load_study(write_tuned(study_dir, records))
    (_, arm) = csv.DictReader(io.StringIO(csv_table(study, find(study))))
    assert (arm['d_model_widened'], arm['d_ff_fill']) == ('2', '-3')


def test_the_ledger_is_printed(of_controls):
    study, found = of_controls
    (sheet,) = [sheet for sheet in sheets(study, found) if sheet.name == 'ledger']
    events = [(row[1], row[2], row[3]) for row in sheet.rows]
    assert events == [
        ('declared', '-', '2'),
        ('looked', '1', '-'),
        ('arms added', '-', '3'),
        ('accepted', '-', '-'),
    ]
    said = [row[-1] for row in sheet.rows]
    assert said[0].startswith('3 arms, 2 controls, 8 seeds, margin 0.005; declaration ')
    assert said[2].startswith('post hoc: qk/no_v at d_model=128; declaration ')
    assert said[3] == 'uncommitted: a comment was edited'


def test_changes_of_settings_are_printed_and_withhold_the_word(study_dir):
    records = [*tuned_arm('qk/vo', losses=shifted(0.0)), *tuned_arm('b/vo', losses=shifted(0.1))]
    path = write_tuned(study_dir, records)
    ledger.look(path)
    study = json.loads((path / 'study.json').read_text()) | {'margin': 0.01}
    ledger.declare(path, study, ['margin: 0.005 -> 0.01', 'looks: [4, 8] -> [8]'])
    (path / 'study.json').write_text(json.dumps(study))
    study = load_study(path)
    row = rows(study, find(study), 'ledger')
    (said,) = [of['what'] for of in row.values() if of['event'] == 'changed']
    assert said.startswith('post hoc: margin: 0.005 -> 0.01; looks: [4, 8] -> [8]; declaration ')
    page = documents(study, find(study), (), {})['report.html']
    assert 'the arm was added, or its settings changed, after the first look' in page


def test_changes_of_a_study_without_verdicts_are_printed_as_they_are(study_dir):
    path = write_study(study_dir, [trial_record('qk/vo'), trial_record('b/vo')])
    ledger.look(path)
    study = json.loads((path / 'study.json').read_text()) | {'margin': 0.01}
    ledger.declare(path, study, ['margin: 0.005 -> 0.01'])
    (path / 'study.json').write_text(json.dumps(study))
    study = load_study(path)
    (sheet,) = [sheet for sheet in sheets(study, find(study)) if sheet.name == 'ledger']
    assert sheet.rows[-1][-1].startswith('margin: 0.005 -> 0.01; declaration ')


def test_what_was_accepted_stands_first(of_controls):
    first, *_ = summary(*of_controls)
    assert first.startswith('Accepted although it would withhold every verdict: results of code')
    assert first.endswith('with uncommitted changes (a comment was edited).')


def test_a_variant_is_shown_with_its_equations_and_all_options(of_controls):
    forms = rows(*of_controls, 'forms')
    named = 'shared_qk(key_norm=False, self_mask=False, temperature=None)/vo'
    assert forms['shared_qk/vo'] == {
        'variant': 'shared_qk/vo',
        'form': named,
        'A[n]': 'W_Q[n] W_Q[n]^T',
        'B[n]': 'W_V[n] W_O[n]',
    }
    assert f'shared_qk/vo is {named}, with a visible diagonal' in headline(*of_controls)
    own = form({'model': {'score': 'my.module:MyScore(rank=2)', 'value': 'low_rank(rank=8)'}})
    assert own.name == 'my.module:MyScore(rank=2)/low_rank(rank=8)'
    assert own.score is None and own.value == 'W_V[n] W_O[n], rank R'


def test_settings_are_those_of_the_runs(of_controls, study_dir):
    said = dict(settings(*of_controls))
    assert said['training'] == '400 steps of 16 sequences x 48 tokens, 307,200 tokens per trial'
    assert said['schedule'] == 'linear to 0 of the peak, warm-up 100 steps'
    assert said['weight decay'].startswith('independent of the learning rate, 0.1, of matrices')
    assert said['optimizer'].endswith('epsilon 1e-08; gradients clipped to norm 1')
    assert said['evaluation'].endswith('differences are on test')
    assert said.keys() >= {'context', 'data', 'dropout', 'initialization', 'model', 'learning rate'}
    path = write_tuned(study_dir, tuned_arm('qk/vo'))
    run = run_name('qk/vo', 'd_model=128', 'verdict')
    edit_plan(path, run, optimizer__decay='coupled', model__dropout=0.1, model__init='nanogpt')
    edit_plan(path, run, optimizer__name='my:opt', model__normalizer='my:n', model__logit_cap=9.0)
    study = load_study(path)
    said = dict(settings(study, find(study)))
    assert said['weight decay'].startswith('coupled to the learning rate')
    assert said['dropout'].startswith('0.1, of attention probabilities 0.1')
    assert said['initialization'].startswith('nanogpt, init embedding 1')
    assert said['optimizer'].startswith('my:opt; gradients')
    assert said['model'].endswith('normalizer my:n, logits capped at 9')


def test_several_corpora_have_a_word_each_and_one_over_all(study_dir):
    made = {'qk/vo': (0.0, 0.0), 'b/vo': (-0.03, -0.02), 'c/vo': (0.0002, 0.02)}
    records = [
        record
        for variant, shifts in made.items()
        for corpus, shift in zip(('stdlib', 'packages'), shifts, strict=True)
        for record in tuned_arm(variant, losses=shifted(shift), corpus=corpus)
    ]
    study = load_study(write_tuned(study_dir, records))
    found = find(study)
    overall = rows(study, found, 'overall')['c/vo']
    assert (overall['verdict'], overall['stdlib'], overall['packages']) == (
        'worse',
        'equivalent',
        'worse',
    )
    text = report_text(study, found)
    assert (
        'Over all corpora: b/vo (-0.0250 [' in text
        and 'At equal total parameters (820k, packages)' in text
    )
    assert 'Over all corpora: b/vo -0.0250 [' in headline(study, found)
    drawn = {drawing.stem: drawing.figure for drawing in figures(study, found)}
    titles = [ax.get_title(loc='left') for ax in drawn['verdicts'].axes]
    assert titles == ['stdlib', 'packages'] and 'curves_2' in drawn


def test_losses_are_in_one_unit(of_controls):
    text = report_text(*of_controls)
    assert 'bits/byte' not in text
    assert 'test loss,' in text and 'val loss,' in text
    assert 'test_bits_per_byte_mean' in csv_table(*of_controls)


def test_each_baseline_stands_beside_its_yardstick(study_dir):
    """What was measured of a baseline, what was not, and whether it is trained enough."""
    records = [
        record
        for size in ('d_model=64', 'd_model=128')
        for variant in ('qk/vo', 'b/vo')
        for record in tuned_arm(variant, size, losses=shifted(0.0))
    ]
    trial = {'seed': 0, 'loss': 2.1, 'positions': {'1': 2.5, '2': None}, 'shuffled': None}
    trials = {'qk/vo': [trial | {'early': 2.2, 'late': late} for late in (1.9, 2.0)]}
    losses = {'val': {'4-gram': 3.0}, 'test': {'3-gram': 2.5, '4-gram': 2.25}}
    yardsticks = {'losses': losses, 'trials': trials}
    study = load_study(write_tuned(study_dir, records, yardsticks=yardsticks))
    row = rows(study, find(study), 'yardsticks')['d_model=128']
    assert list(row.values())[2:] == ['yes', '307k', '2.101', '4-gram', '2.250', '0.250', '-', '-']
    position = rows(study, find(study), 'positions')['qk/vo']
    assert (position['1'], position['2'], position['sources|shuffled']) == ('2.500', '-', '-')
    write_yardsticks(study_dir, records, losses={'test': {'4-gram': 2.0}})
    study = load_study(study_dir)
    row = rows(study, find(study), 'yardsticks')['d_model=64']
    assert (row['trained|enough'], row['gain by|position']) == ('no', 'not recorded')
    assert not [sheet for sheet in sheets(study, find(study)) if sheet.name == 'positions']
