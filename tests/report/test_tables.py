"""The printed tables: every number recomputed from the records, and the notes under them."""

import csv
import io
import statistics

import pytest

from qkattn.report import load_study, report_text, summarise
from qkattn.report.tables import csv_table, markdown_table, notes, si, text_table

from .conftest import trial_record, write_study

LOSSES = {'qk/vo': (2.00, 2.10, 2.30), 'merged_qk/vo': (2.05, 2.12, 2.38)}


@pytest.fixture
def study(study_dir):
    records = [
        trial_record(variant, seed=seed, val_loss=loss)
        for variant, losses in LOSSES.items()
        for seed, loss in enumerate(losses)
    ]
    records.append(trial_record('merged_qk/vo', seed=3, learning_rate=3e-3, val_loss=None))
    declared = [('qk/merged_vo', 'd_model=128')]
    return load_study(write_study(study_dir, records, declared=declared))


def cells(line):
    return [cell.strip() for cell in line.strip('|').split(' | ')]


def test_every_number_of_the_table(study):
    lines = markdown_table(summarise(study)).splitlines()
    printed = dict(zip(cells(lines[0]), cells(lines[3]), strict=True))
    record = trial_record('merged_qk/vo')
    bits = [loss / 0.6931471805599453 for loss in LOSSES['merged_qk/vo']]
    test_bits = [(loss + 0.1) / 0.6931471805599453 for loss in LOSSES['merged_qk/vo']]
    weights = record['weights']
    assert printed == {
        'variant': 'merged_qk/vo',
        'size': 'd_model=128',
        'val bits/byte mean ± sd': f'{statistics.mean(bits):.4f} ± {statistics.stdev(bits):.4f}',
        # Differences 0.05, 0.02, 0.08; half width 4.3027 * 0.03 / sqrt(3).
        'difference in val loss, nats/token [95 % t interval]': '+0.0500 [-0.0245, +0.1245]',
        'test bits/byte mean ± sd': (
            f'{statistics.mean(test_bits):.4f} ± {statistics.stdev(test_bits):.4f}'
        ),
        'seeds': '3',
        'learning rate': '0.001*',
        'weights': f'{weights["total"]:,}',
        'residual %': f'{100 * record["residual"]:+.3f}',
        'attention weights': f'{weights["attention"]:,}',
        'd_model': '128',
        'd_ff': '512',
        'FLOPs /token': f'{6 * weights["total"] / 1e6:.2f}M',
        'cache floats/token': '1.02k',
        'tokens /s': '123k',
        'cell s': '12.5',
        'diverged': '1/4',
    }


def test_csv_holds_unrounded_numbers(study):
    first, second = csv.DictReader(io.StringIO(csv_table(summarise(study))))
    assert first['is_baseline'] == '1' and first['difference_mean'] == ''
    assert float(second['difference_mean']) == pytest.approx(0.05)
    assert float(second['val_loss_mean']) == statistics.fmean(LOSSES['merged_qk/vo'])
    assert float(second['compile_seconds']) == 3.25
    assert second['seeds'] == '0 1 2'
    assert second['learning_rates_run'] == '0.001 0.003'


def test_text_is_aligned_and_fits_a_wide_terminal(study):
    lines = text_table(summarise(study)).splitlines()
    assert len(lines) == 5 and max(map(len, lines)) <= 210
    end = lines[2].index('  ', lines[2].index('  ') + 2)
    assert all(line[end : end + 2] == '  ' for line in lines)
    assert 'baseline' in lines[3]


def test_notes(study):
    said = ' '.join(notes(study, summarise(study)))
    assert 'Intervals (95 %, Student t) over 3 seeds are descriptive' in said
    assert '1 of 7 trials diverged' in said
    assert 'Missing cells, 1 of 3: qk/merged_vo at d_model=128 (not started).' in said
    assert 'lowest mean val loss, of 0.001, 0.003' in said
    assert 'Not tuned, one learning rate only: qk/vo at d_model=128.' in said
    assert 'Weights are matched in total count' in said


def test_single_seed_prints_no_interval(study_dir):
    records = [trial_record('qk/vo'), trial_record('b/vo', val_loss=2.25)]
    study = load_study(write_study(study_dir, records, matched=None))
    text = report_text(study, summarise(study))
    assert '+0.2500' in text and '[' not in text and '±' not in text.splitlines()[-8]
    assert 'One seed: no interval can be given' in text
    assert 'not tuned per arm: each ran at one only (0.001)' in text
    assert 'Weights are not matched' in text


def test_problems_are_printed(study_dir):
    write_study(study_dir, [trial_record('qk/vo')])
    with (study_dir / 'results.jsonl').open('a') as file:
        file.write('nonsense\n')
    study = load_study(study_dir)
    assert '! results.jsonl:2 is not JSON' in report_text(study, summarise(study))


def test_markdown_escapes_pipes(study_dir):
    study = load_study(write_study(study_dir, [trial_record('a|b')], baseline=None))
    assert markdown_table(summarise(study)).splitlines()[2].startswith('| a\\|b | ')


@pytest.mark.parametrize(
    ('value', 'text'),
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
def test_si(value, text):
    assert si(value) == text
