"""Reading a study: partial grids, bad lines, contradictions."""

import json

import numpy as np
import pytest

from qkattn.report import ReportError, load_study

from .conftest import (
    cell_name,
    probe_record,
    translation_record,
    trial_record,
    write_metrics,
    write_study,
)


def test_reads_declaration_and_trials(study_dir):
    study = load_study(write_study(study_dir, [trial_record('qk/vo', seed=s) for s in (0, 1)]))
    assert (study.name, study.baseline, study.matched) == ('synthetic', 'qk/vo', 'total')
    assert [trial.seed for trial in study.trials] == [0, 1]
    assert study.trials[0].settings == (('learning_rate', 1e-3), ('weight_decay', 0.1))
    assert study.missing == () and study.problems == ()


def test_missing_cells_say_how_far_they_are(study_dir):
    declared = [('merged_qk/vo', 'd_model=128'), ('qk/merged_vo', 'd_model=128')]
    write_study(study_dir, [trial_record('qk/vo')], declared=declared)
    running = study_dir / cell_name('qk/merged_vo', 'd_model=128')
    running.mkdir()
    write_metrics(running, [trial_record('qk/merged_vo')], num_evals=4)
    missing = load_study(study_dir).missing
    assert [cell.variant for cell in missing] == ['merged_qk/vo', 'qk/merged_vo']
    assert [cell.progress for cell in missing] == [
        'not started',
        'unfinished, last logged step 400',
    ]


@pytest.mark.parametrize(
    ('line', 'said'),
    [
        ('{"cell": "x", ', 'results.jsonl:2 is not JSON'),
        ('[1]', 'results.jsonl:2 was left out: expected an object, found list'),
        ('{}', "results.jsonl:2 was left out: field 'cell' is missing"),
        (json.dumps(trial_record('qk/vo', seed=1, num_steps='many')), "'num_steps' is 'many'"),
        (json.dumps(trial_record('qk/vo', seed=1, status='lost')), "'status' is 'lost'"),
        (json.dumps(trial_record('qk/vo', seed=1, val_loss=float('nan'))), "'val_loss' of a fin"),
        (json.dumps(trial_record('other', seed=1)), 'is not declared in study.json'),
        (json.dumps(trial_record('qk/vo', val_loss=1.5)), 'repeats an earlier line'),
        (
            json.dumps(trial_record('x', seed=1, cell=cell_name('qk/vo', 'd_model=128'))),
            "variant 'x' contradicts study.json",
        ),
    ],
)
def test_bad_result_lines_are_named_and_left_out(study_dir, line, said):
    write_study(study_dir, [trial_record('qk/vo')])
    with (study_dir / 'results.jsonl').open('a') as file:
        file.write(line + '\n')
    study = load_study(study_dir)
    assert len(study.trials) == 1
    assert len(study.problems) == 1
    assert said in study.problems[0] and study.problems[0].startswith('results.jsonl:2')


def test_repeated_identical_line_counts_once(study_dir):
    write_study(study_dir, [trial_record('qk/vo')])
    path = study_dir / 'results.jsonl'
    path.write_text(path.read_text() * 2)
    study = load_study(study_dir)
    assert len(study.trials) == 1 and study.problems == ()


def test_same_seed_in_two_cells_is_refused(study_dir):
    write_study(study_dir, [trial_record('qk/vo', cell='a'), trial_record('qk/vo', cell='b')])
    with pytest.raises(ReportError, match=r"cells 'a' and 'b' both hold seed 0"):
        load_study(study_dir)


def test_result_json_fills_what_results_jsonl_lacks(study_dir):
    records = [trial_record('qk/vo', seed=s) for s in (0, 1)]
    write_study(study_dir, records)
    (study_dir / 'results.jsonl').write_text(json.dumps(records[1]) + '\n')
    study = load_study(study_dir)
    # Trial order is result.json's: it is the order of the curves' columns.
    assert [trial.seed for trial in study.trials] == [0, 1]
    assert 'lacks 1 of the 2 trials' in study.problems[0]


def test_result_json_of_another_cell_is_left_out(study_dir):
    write_study(study_dir, [trial_record('qk/vo')])
    path = study_dir / cell_name('qk/vo', 'd_model=128') / 'result.json'
    path.write_text(json.dumps([trial_record('qk/vo', cell='other', val_loss=1.0)]))
    assert 'it holds a trial of cell' in load_study(study_dir).problems[0]
    path.write_text('[1]')
    assert 'expected an object, found int' in load_study(study_dir).problems[0]


def test_disagreement_between_the_two_files_is_named(study_dir):
    write_study(study_dir, [trial_record('qk/vo')])
    path = study_dir / cell_name('qk/vo', 'd_model=128') / 'result.json'
    path.write_text(json.dumps([trial_record('qk/vo', val_loss=1.0)]))
    study = load_study(study_dir)
    assert 'disagree on seed 0' in study.problems[0]
    assert study.trials[0].val_loss == 2.0


def test_bad_metrics_lines_are_named(study_dir):
    write_study(study_dir, [trial_record('qk/vo')])
    name = cell_name('qk/vo', 'd_model=128')
    with (study_dir / name / 'metrics.jsonl').open('a') as file:
        for step, loss in ((400, '[2.0]'), (401, '[2.0, 2.0]')):
            file.write(
                f'{{"kind": "eval", "step": {step}, "val_loss": {loss}, '
                f'"val_bits_per_byte": {loss}}}\n'
            )
        file.write('{"kind": "ev\n')
    study = load_study(study_dir)
    assert study.cells[0].curve.steps_E.tolist() == list(range(40, 401, 40))
    assert f'{name}/metrics.jsonl:21 was left out: step 400 follows step 400' in study.problems[0]
    assert f'{name}/metrics.jsonl:22 was left out: 2 evaluations for 1 trials' in study.problems[1]
    assert study.problems[2] == f'{name}/metrics.jsonl: 1 more lines were left out.'


def test_nothing_to_report_is_one_sentence(tmp_path, study_dir):
    with pytest.raises(ReportError, match='does not exist'):
        load_study(tmp_path / 'nowhere')
    study_dir.mkdir()
    with pytest.raises(ReportError, match='not a study directory'):
        load_study(study_dir)
    write_study(study_dir, [], declared=[('qk/vo', 'd_model=128')])
    with pytest.raises(ReportError, match='has no results yet'):
        load_study(study_dir)
    (study_dir / 'study.json').write_text('{"name": "x"}')
    with pytest.raises(ReportError, match="field 'question' is missing"):
        load_study(study_dir)


def test_curves_without_bytes(study_dir):
    records = [probe_record('qk/vo', seed=0), probe_record('qk/vo', None, seed=1)]
    study = load_study(write_study(study_dir, records, num_evals=4))
    curve = study.cells[0].curve
    assert study.problems == () and curve.steps_E.tolist() == [100, 200, 300, 400]
    assert curve.val_loss_EX[-1, 0] == 0.5
    assert np.isnan(curve.val_loss_EX).tolist() == [[False, False]] * 2 + [[False, True]] * 2
    assert np.isnan(curve.val_bits_per_byte_EX).all() and curve.val_bits_per_byte_EX.shape == (4, 2)


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'val_loss': [1.0, 'x']}, "field 'val_loss' holds 'x'"),
        ({'val_bits_per_byte': [1.0]}, '2 losses, but bits/byte of 1 trials'),
        ({'val_bits_per_byte': 1.0}, "field 'val_bits_per_byte' is 1.0, expected list or null"),
    ],
)
def test_bad_evaluations_are_named(study_dir, changes, said):
    write_study(study_dir, [trial_record('qk/vo', seed=s) for s in (0, 1)])
    line = {'kind': 'eval', 'step': 401, 'val_loss': [1.0, 1.0], 'val_bits_per_byte': None}
    with (study_dir / cell_name('qk/vo', 'd_model=128') / 'metrics.jsonl').open('a') as file:
        file.write(json.dumps(line | changes) + '\n')
    (problem,) = load_study(study_dir).problems
    assert problem.endswith(f'metrics.jsonl:21 was left out: {said}.')


def test_scores_that_do_not_compare_are_named(study_dir):
    other = translation_record('b/vo', test_bleu_signature='tok:intl', test_num_sentences=500)
    study = load_study(write_study(study_dir, [translation_record('qk/vo'), other]))
    assert study.problems == (
        'BLEU signatures differ, so the scores of these rows do not compare: '
        "nrefs:1|case:lc|tok:13a|version:2.5.1 ('qk/vo' at 'd_model=128'), "
        "tok:intl ('b/vo' at 'd_model=128').",
        'numbers of test sentences differ, so the scores of these rows do not compare: '
        "1000 ('qk/vo' at 'd_model=128'), 500 ('b/vo' at 'd_model=128').",
    )
