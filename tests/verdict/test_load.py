"""Reading a study: partial grids, bad lines, contradictions."""

import json

import numpy as np
import pytest

from qkattn.errors import ReportError
from qkattn.verdict import Missing, load_study
from tests.studies import (
    edit_plan,
    plan_line,
    probe_record,
    run_name,
    translation_record,
    trial_record,
    tuned_arm,
    write_lines,
    write_metrics,
    write_study,
    write_tuned,
)

SIZE = 'd_model=128'
RUN = run_name('qk/vo', SIZE)


def test_reads_declaration_and_trials(study_dir):
    study = load_study(write_study(study_dir, [trial_record('qk/vo', seed=s) for s in (0, 1)]))
    assert (study.name, study.baseline, study.matched) == ('synthetic', 'qk/vo', 'total')
    assert [trial.seed for trial in study.trials] == [0, 1]
    assert study.trials[0].settings == (('learning_rate', 1e-3), ('weight_decay', 0.1))
    assert study.missing == () and study.problems == ()


def test_missing_arms_of_a_study_without_tuning(study_dir):
    declared = [('merged_qk/vo', SIZE), ('qk/merged_vo', SIZE)]
    write_study(study_dir, [trial_record('qk/vo')], declared=declared)
    names = [run_name(variant, size) for variant, size in declared]
    (study_dir / names[1]).mkdir()
    write_metrics(study_dir / names[1], [trial_record('qk/merged_vo')], num_evals=4)
    assert load_study(study_dir).missing == (
        Missing(names[0], *declared[0], 'single', num_steps=400),
        Missing(names[1], *declared[1], 'single', step=400, num_steps=400),
    )


@pytest.mark.parametrize(
    ('line', 'said'),
    [
        ('{"run": "x", ', 'results.jsonl:2 is not JSON'),
        ('[1]', 'results.jsonl:2 was left out: expected an object, found list'),
        ('{}', "results.jsonl:2 was left out: field 'run' is missing"),
        (json.dumps(trial_record('qk/vo', seed=1, val_loss=float('nan'))), "'val_loss' of a fin"),
        (json.dumps(trial_record('other', seed=1)), 'is not in plan.jsonl'),
        (json.dumps(trial_record('qk/vo', seed=1, residual=0.5)), 'residual 0.5 contradicts plan'),
        (json.dumps(trial_record('qk/vo', val_loss=1.5)), 'repeats an earlier line'),
        (
            json.dumps(trial_record('x', seed=1, run=RUN)),
            "variant 'x' contradicts plan.jsonl",
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


def test_same_seed_in_two_runs_is_refused(study_dir):
    write_study(study_dir, [trial_record('qk/vo', run='a'), trial_record('qk/vo', run='b')])
    with pytest.raises(ReportError, match=r"runs 'a' and 'b' both hold seed 0"):
        load_study(study_dir)


def test_result_json_fills_what_results_jsonl_lacks(study_dir):
    records = [trial_record('qk/vo', seed=s) for s in (0, 1)]
    write_study(study_dir, records)
    (study_dir / 'results.jsonl').write_text(json.dumps(records[1]) + '\n')
    study = load_study(study_dir)
    # Trial order is result.json's: it is the order of the curves' columns.
    assert [trial.seed for trial in study.trials] == [0, 1]
    assert 'lacks 1 of the 2 trials' in study.problems[0]


def test_result_json_of_another_run_is_left_out(study_dir):
    write_study(study_dir, [trial_record('qk/vo')])
    path = study_dir / RUN / 'result.json'
    path.write_text(json.dumps([trial_record('qk/vo', run='other', val_loss=1.0)]))
    assert 'it holds a trial of run' in load_study(study_dir).problems[0]
    path.write_text('[1]')
    assert 'expected an object, found int' in load_study(study_dir).problems[0]


def test_disagreement_between_the_two_files_is_named(study_dir):
    write_study(study_dir, [trial_record('qk/vo')])
    path = study_dir / RUN / 'result.json'
    path.write_text(json.dumps([trial_record('qk/vo', val_loss=1.0)]))
    study = load_study(study_dir)
    assert 'disagree on seed 0' in study.problems[0]
    assert study.trials[0].val_loss == 2.0


def test_bad_metrics_lines_are_named(study_dir):
    write_study(study_dir, [trial_record('qk/vo')])
    with (study_dir / RUN / 'metrics.jsonl').open('a') as file:
        for step, loss in ((400, '[2.0]'), (401, '[2.0, 2.0]')):
            file.write(
                f'{{"kind": "eval", "step": {step}, "val_loss": {loss}, '
                f'"val_bits_per_byte": {loss}}}\n'
            )
        file.write('{"kind": "ev\n')
    study = load_study(study_dir)
    assert study.runs[0].curve.steps_E.tolist() == list(range(40, 401, 40))
    assert f'{RUN}/metrics.jsonl:21 was left out: step 400 follows step 400' in study.problems[0]
    assert f'{RUN}/metrics.jsonl:22 was left out: field' in study.problems[1]
    assert study.problems[2] == f'{RUN}/metrics.jsonl: 1 more lines were left out.'


def test_nothing_to_report_is_one_sentence(tmp_path, study_dir):
    with pytest.raises(ReportError, match='does not exist'):
        load_study(tmp_path / 'nowhere')
    study_dir.mkdir()
    with pytest.raises(ReportError, match='not a study directory'):
        load_study(study_dir)
    write_study(study_dir, [], declared=[('qk/vo', SIZE)])
    with pytest.raises(ReportError, match='has no results yet'):
        load_study(study_dir)
    (study_dir / 'study.json').write_text('{"name": "x"}')
    with pytest.raises(ReportError, match="field 'question' is missing"):
        load_study(study_dir)


def test_curves_without_bytes(study_dir):
    records = [probe_record('qk/vo', seed=0), probe_record('qk/vo', None, seed=1)]
    study = load_study(write_study(study_dir, records, num_evals=4))
    curve = study.runs[0].curve
    assert study.problems == () and curve.steps_E.tolist() == [100, 200, 300, 400]
    assert curve.values_EX['val_loss'][-1, 0] == 0.5
    diverged_EX = np.isnan(curve.values_EX['val_loss'])
    assert diverged_EX.tolist() == [[False, False]] * 2 + [[False, True]] * 2
    assert np.isnan(curve.values_EX['val_bits_per_byte']).all()


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        (
            {'val_loss': [1.0, 'x']},
            "field 'val_loss' is [1.0, 'x'], expected list of int/float/null",
        ),
        ({'val_bits_per_byte': [1.0]}, "field 'val_bits_per_byte' has 1 values for 2 trials"),
        ({'val_bits_per_byte': 1.0}, 'is 1.0, expected list of int/float/null or null'),
    ],
)
def test_bad_evaluations_are_named(study_dir, changes, said):
    write_study(study_dir, [trial_record('qk/vo', seed=s) for s in (0, 1)])
    line = {'kind': 'eval', 'step': 401, 'val_loss': [1.0, 1.0], 'val_bits_per_byte': None}
    with (study_dir / RUN / 'metrics.jsonl').open('a') as file:
        file.write(json.dumps(line | changes) + '\n')
    (problem,) = load_study(study_dir).problems
    assert problem.endswith(f'{said}.') and 'metrics.jsonl:21 was left out: field' in problem


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


def test_missing_arms_of_a_tuned_study(study_dir):
    screening = 'screening', 'learning_rate'
    records = tuned_arm('qk/vo') + tuned_arm('a/vo')[:10] + tuned_arm('b/vo')[:10]
    declared = [('b/vo', SIZE, 'verdict'), ('c/vo', SIZE, *screening), ('d/vo', SIZE, *screening)]
    variants = [f'{v}/vo' for v in ('qk', 'a', 'b', 'c', 'd', 'e')]
    arms = [{'variant': variant, 'size': SIZE} for variant in variants]
    write_tuned(study_dir, records, declared=declared, arms=arms, variants=variants)
    waiting, running, planned = (run_name(*run) for run in declared)
    edit_plan(study_dir, running, train__num_steps=800)
    (study_dir / running).mkdir()
    write_metrics(study_dir / running, [trial_record('c/vo', num_steps=300)], num_evals=3)
    assert load_study(study_dir).missing == (
        Missing(None, 'a/vo', SIZE, 'verdict'),
        Missing(waiting, 'b/vo', SIZE, 'verdict', num_steps=400),
        Missing(running, 'c/vo', SIZE, *screening, step=300, num_steps=800),
        Missing(planned, 'd/vo', SIZE, *screening, num_steps=400),
        Missing(None, 'e/vo', SIZE, None),
    )


def test_reads_plan_and_tuning(study_dir):
    study = load_study(write_tuned(study_dir, tuned_arm('qk/vo')))
    screening, verdict = study.runs
    assert (screening.stage, screening.knob) == ('screening', 'learning_rate')
    assert (verdict.stage, verdict.knob, verdict.num_trials) == ('verdict', None, 8)
    assert verdict.config['train']['num_steps'] == 400 and verdict.step == 400
    assert study.tuning.seeds == (100, 101) and study.tuning.knobs == ('learning_rate',)
    assert study.trials[0].score_scale == 1.0 and study.trials[0].metrics['val_loss_se'] == 0.0125
    assert study.arms == (('qk/vo', SIZE),) and study.margin == 0.005


GOOD = plan_line('b/vo', SIZE)
TUNING = {
    'seeds': [9],
    'max_points': 5,
    'learning_rates': [1.0],
    'weight_decays': [0.0],
    'score_scales': [1.0],
}


@pytest.mark.parametrize(
    ('line', 'said'),
    [
        ('{"run": ', 'plan.jsonl:2 is not JSON'),
        ('{}', "plan.jsonl:2 was left out: field 'run' is missing"),
        (json.dumps(GOOD | {'variant': 'z/vo'}), "'z/vo' at 'd_model=128' is no arm that study"),
        (json.dumps(GOOD | {'stage': 'screening'}), "field 'knob' is None, expected learning_rate"),
        (json.dumps(GOOD | {'config': {}}), "field 'model' is missing"),
        (
            json.dumps(plan_line('b/vo', SIZE, name=RUN)),
            'is planned twice, differently',
        ),
    ],
)
def test_bad_plan_lines_are_named_and_left_out(study_dir, line, said):
    arms = [{'variant': v, 'size': SIZE} for v in ('qk/vo', 'b/vo')]
    write_study(study_dir, [trial_record('qk/vo')], arms=arms, variants=['qk/vo', 'b/vo'])
    with (study_dir / 'plan.jsonl').open('a') as file:
        file.write(line + '\n')
    study = load_study(study_dir)
    assert len(study.trials) == 1 and len(study.problems) == 1
    assert said in study.problems[0] and study.problems[0].startswith('plan.jsonl:2')


def test_a_second_verdict_of_an_arm_is_refused(study_dir):
    records = tuned_arm('qk/vo', losses=[3.0] * 8)
    records += [
        trial_record('qk/vo', seed=s, val_loss=2.0, stage='verdict', run='later') for s in range(8)
    ]
    study = load_study(write_tuned(study_dir, records))
    assert [run.stage for run in study.runs] == ['screening', 'verdict']
    assert {trial.val_loss for trial in study.trials if trial.stage == 'verdict'} == {3.0}
    first = run_name('qk/vo', SIZE, 'verdict')
    assert study.problems[0] == (
        f"plan.jsonl:3 was left out: 'qk/vo' at 'd_model=128' has its verdict in run {first!r} "
        "already, 'later' would be a second one."
    )


def test_a_seed_that_its_run_does_not_have_is_refused(study_dir):
    write_study(study_dir, [trial_record('qk/vo', seed=s) for s in (0, 1)])
    edit_plan(study_dir, RUN, trials__seeds=[0, 2])
    study = load_study(study_dir)
    assert [trial.seed for trial in study.trials] == [0]
    said = f'seed 1 is not one of run {RUN!r}, which has [0, 2].'
    assert study.problems[0] == f'results.jsonl:2 was left out: {said}'


def test_a_study_without_a_plan_is_named(study_dir):
    write_study(study_dir, [trial_record('qk/vo')])
    (study_dir / 'plan.jsonl').unlink()
    with pytest.raises(ReportError, match=r'no results yet \(plan.jsonl does not exist'):
        load_study(study_dir)


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'margin': None}, "field 'margin' is None, expected int or float"),
        ({'tuning': {'seeds': [1]}}, "field 'max_points' is missing"),
        ({'tuning': TUNING | {'seeds': []}}, "field 'seeds' is [], expected at least one"),
        ({'seeds': ['a']}, "field 'seeds' is ['a'], expected list of int"),
        ({'tuning': TUNING | {'weight_decays': []}}, "'weight_decays' of its tuning is [], exp"),
        ({'tuning': TUNING | {'learning_rates': [2, 1]}}, 'is [2, 1], expected one value or sev'),
        ({'tuning': TUNING | {'weight_decays': [0, 1]}}, 'is [0, 1], expected one value or sever'),
        (
            {'tuning': TUNING | {'score_scales': ['x']}},
            "'score_scales' is ['x'], expected list",
        ),
        ({'arms': [{'variant': 'z', 'size': SIZE}]}, "an arm has variant 'z', which is"),
    ],
)
def test_a_bad_declaration_is_one_sentence(study_dir, changes, said):
    write_study(study_dir, [trial_record('qk/vo')], **changes)
    with pytest.raises(ReportError) as raised:
        load_study(study_dir)
    assert said in str(raised.value)


def test_one_seed_and_setting_may_be_screened_in_two_runs(study_dir):
    records = tuned_arm('qk/vo')
    again = trial_record(
        'qk/vo', seed=100, learning_rate=4e-3, stage='screening', knob='weight_decay'
    )
    study = load_study(write_tuned(study_dir, [*records, again]))
    assert len(study.trials) == 19 and study.problems == ()


def test_results_of_a_run_that_is_not_planned_are_left_out(study_dir):
    write_study(study_dir, [trial_record('qk/vo')])
    write_lines(study_dir / 'plan.jsonl', [GOOD])
    with pytest.raises(ReportError, match='has no results yet'):
        load_study(study_dir)
