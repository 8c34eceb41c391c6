"""trials.csv has one row per trial, with what the result files give."""

import csv
import io
import json

from qkattn.report.tables import trials_csv
from qkattn.verdict import find, load_study
from tests.report.conftest import controlled
from tests.studies import RATES, tuned_arm, write_tuned


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
