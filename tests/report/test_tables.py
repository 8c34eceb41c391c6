"""The printed tables: every number recomputed from the records, and the notes under them."""

import csv
import hashlib
import io
import shutil
import statistics
from pathlib import Path

import pytest

from qkattn.report import load_study, report_text, summarise, write_report
from qkattn.report.notes import notes
from qkattn.report.tables import csv_table, markdown_table, si, text_table

from .conftest import probe_record, translation_record, trial_record, write_study

QUICKSTART = Path(__file__).parents[2] / 'experiments/results/quickstart'

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


def test_the_quickstart_prints_as_committed(tmp_path):
    for name in ('study.json', 'results.jsonl'):
        shutil.copy(QUICKSTART / name, tmp_path)
    write_report(tmp_path)
    for name in ('table.md', 'table.csv'):
        assert (tmp_path / name).read_bytes() == (QUICKSTART / name).read_bytes(), name
    text = (tmp_path / 'table.txt').read_bytes()
    assert hashlib.sha256(text).hexdigest() == (
        '8404b8b9ea7a8e5981768470d5491f8f2300761624f78982a407db877d6a298e'
    )


def found(table):
    """Headings and cells between the names and the number of seeds, of the last row."""
    lines = [cells(line) for line in table.splitlines()]
    end = lines[0].index('seeds')
    return dict(zip(lines[0][2:end], lines[-1][2:end], strict=True))


@pytest.fixture
def translation(study_dir):
    records = [
        translation_record(variant, bleu, seed=seed)
        for variant, scores in (('qk/vo', (30, 32)), ('b/vo', (20.5, 21.5)))
        for seed, bleu in enumerate(scores)
    ]
    return load_study(write_study(study_dir, [*records, translation_record('b/vo', None, seed=2)]))


def test_translation_table(translation):
    assert found(markdown_table(summarise(translation))) == {
        'test BLEU mean ± sd': '21.00 ± 0.71',
        'test chrF mean ± sd': '41.00 ± 0.71',
        'test exact match, % mean ± sd': '10.50 ± 0.35',
        'val bits/byte mean ± sd': '2.8854 ± 0.0000',
        'difference in val loss, nats/token [95 % t interval]': '+0.0000 [+0.0000, +0.0000]',
        'test bits/byte mean ± sd': '3.0297 ± 0.0000',
    }


def test_translation_notes_say_once_how_scores_were_made(translation):
    text = report_text(translation, summarise(translation))
    bleu = 'BLEU: test split, from 0 to 100, 1,000 sentences, signature '
    assert text.count(f'{bleu}nrefs:1|case:lc|tok:13a|version:2.5.1.\n') == 1
    assert text.count('signature nrefs:1|case:lc|nc:6|version:2.5.1.\n') == 1
    assert 'Accuracy' not in text and '!' not in text


def test_translation_csv_is_in_the_units_of_the_records(translation):
    row = list(csv.DictReader(io.StringIO(csv_table(summarise(translation)))))[1]
    assert (row['test_bleu_mean'], row['test_exact_match_mean']) == ('21.0', '0.105')
    assert not any(name.startswith(('val_bleu', 'test_accuracy', 'test_loss')) for name in row)


def test_probe_table(study_dir):
    records = [
        probe_record(variant, accuracy) for variant, accuracy in (('qk/vo', 0.75), ('b/vo', 0.5))
    ]
    study = load_study(write_study(study_dir, records))
    assert found(markdown_table(summarise(study))) == {
        'test accuracy, % mean ± sd': '50.00',
        'test solved, % mean ± sd': '12.50',
        'val loss, nats/token mean ± sd': '0.5000',
        'difference in val loss, nats/token': '+0.2500',
        'test loss, nats/token mean ± sd': '0.6000',
    }
    assert 'Accuracy: the part of the targets' in ' '.join(notes(study, summarise(study)))
    row = next(csv.DictReader(io.StringIO(csv_table(summarise(study)))))
    assert row['test_accuracy_mean'] == '0.75' and 'val_bits_per_byte_mean' not in row


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
