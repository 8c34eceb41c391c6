"""Reading a study: partial grids, bad lines, contradictions."""

import json

import numpy as np
import pytest

from qkattn.errors import ReportError
from qkattn.study.place import Place
from qkattn.study.tuning import KNOBS
from qkattn.verdict import Missing, load_findings, load_study
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
METRICS = f'{RUN}/metrics.jsonl'


def place(variant, control=None):
    return Place(variant, SIZE, 'stdlib', control)


def test_missing_arms_of_a_study_without_tuning(study_dir):
    declared = [('merged_qk/vo', SIZE), ('qk/merged_vo', SIZE)]
    write_study(study_dir, [trial_record('qk/vo')], declared=declared)
    names = [run_name(variant, size) for variant, size in declared]
    (study_dir / names[1]).mkdir()
    write_metrics(study_dir / names[1], [trial_record('qk/merged_vo')], num_evals=4)
    assert load_study(study_dir).missing == (
        Missing(names[0], place(declared[0][0]), 'single', num_steps=400),
        Missing(names[1], place(declared[1][0]), 'single', step=400, num_steps=400),
    )


GOOD = plan_line('b/vo', SIZE)
FINAL = {'kind': 'final', 'step': 401, 'trials': [], 'eval_tokens': 1, 'test_tokens': None}
EVALUATION = {'kind': 'eval', 'step': 401, 'val_loss': [1.0, 1.0], 'val_bits_per_byte': None}


def result(variant='qk/vo', seed=2, **changes):
    return trial_record(variant, seed=seed, **changes)


@pytest.mark.parametrize(
    ('path', 'record', 'message'),
    [
        ('results.jsonl', '{"run": "x", ', ' is not JSON'),
        ('results.jsonl', [1], 'expected an object, found list'),
        ('results.jsonl', {}, "field 'run' is missing"),
        ('results.jsonl', {'run': RUN}, "field 'variant' is missing"),
        ('results.jsonl', result(val_loss=float('nan')), "'val_loss' is nan, expected float"),
        ('results.jsonl', result('other'), 'is not in plan.jsonl'),
        ('results.jsonl', result(residual=0.5), 'residual 0.5 contradicts plan.jsonl'),
        ('results.jsonl', result(), f'seed 2 is not one of run {RUN!r}, which has [0, 1]'),
        ('results.jsonl', result(seed=0, val_loss=1.5), 'repeats an earlier line'),
        ('results.jsonl', result('x', run=RUN), "variant 'x' contradicts plan.jsonl"),
        ('plan.jsonl', '{"run": ', ' is not JSON'),
        ('plan.jsonl', {}, "field 'run' is missing"),
        ('plan.jsonl', GOOD | {'corpus': 'x'}, "field 'corpus' is 'x', but its config has"),
        (
            'plan.jsonl',
            GOOD | {'control': 'x'},
            "field 'control' is 'x', expected null",
        ),
        (
            'plan.jsonl',
            GOOD | {'variant': 'z/vo'},
            "'z/vo' at 'd_model=128' on 'stdlib' is no arm that study",
        ),
        ('plan.jsonl', GOOD | {'stage': 'final'}, "'final', expected screening, verdict, single"),
        ('plan.jsonl', GOOD | {'stage': 'screening'}, "field 'knob' is None, expected learning"),
        ('plan.jsonl', GOOD | {'knob': 'width'}, "'width', expected null at stage 'single'"),
        ('plan.jsonl', GOOD | {'config': {}}, "field 'model' is missing"),
        ('plan.jsonl', plan_line('b/vo', SIZE, name=RUN), 'is planned twice, differently'),
        (METRICS, {'kind': 'final', 'step': 401}, "field 'trials' is missing"),
        (METRICS, FINAL | {'val_loss': 3}, "'val_loss' is 3, expected tuple"),
        (METRICS, '{"kind": "ev', ' is not JSON'),
        (METRICS, EVALUATION | {'step': 400}, 'step 400 follows step 400'),
        (METRICS, EVALUATION | {'val_loss': [1.0, 'x']}, 'expected tuple'),
        (METRICS, EVALUATION | {'val_loss': [1.0]}, "'val_loss' has 1 values for 2 trials"),
        (METRICS, EVALUATION | {'val_bits_per_byte': [1.0]}, 'has 1 values for 2 trials'),
        (METRICS, EVALUATION | {'val_bits_per_byte': 1.0}, 'is 1.0, expected tuple'),
    ],
)
def test_bad_lines_are_named_and_left_out(study_dir, path, record, message):
    arms = [place(v)._asdict() for v in ('qk/vo', 'b/vo')]
    records = [trial_record('qk/vo', seed=s) for s in (0, 1)]
    write_study(study_dir, records, arms=arms, variants=['qk/vo', 'b/vo'])
    with (study_dir / path).open('a') as file:
        file.write((record if isinstance(record, str) else json.dumps(record)) + '\n')
    study = load_study(study_dir)
    (problem,) = study.problems
    number = len((study_dir / path).read_text().splitlines())
    assert message in problem and problem.startswith(f'{path}:{number}')
    assert len(study.trials) == 2 and len(study.runs) == 1
    assert study.runs[0].curve.steps_E.tolist() == list(range(40, 401, 40))


def test_same_seed_in_two_runs_is_refused(study_dir):
    write_study(study_dir, [trial_record('qk/vo', run='a'), trial_record('qk/vo', run='b')])
    with pytest.raises(ReportError, match=r"runs 'a' and 'b' both hold seed 0"):
        load_study(study_dir)


def test_a_run_that_lacks_a_result_has_no_curve(study_dir):
    """The columns of its curve would be those of other trials."""
    write_study(study_dir, [trial_record('qk/vo', seed=s) for s in (0, 1)])
    lines = (study_dir / 'results.jsonl').read_text().splitlines()
    (study_dir / 'results.jsonl').write_text(f'{lines[0][:-9]}\n{lines[1]}\n')
    study = load_study(study_dir)
    assert [trial.seed for trial in study.trials] == [1] and study.runs[0].curve is None
    assert len(study.problems) == 1 and study.runs[0].step == 400


def test_many_bad_lines_are_counted(study_dir):
    write_study(study_dir, [trial_record('qk/vo')])
    with (study_dir / METRICS).open('a') as file:
        file.write('{"kind": "ev\n' * 4)
    assert load_study(study_dir).problems[2] == f'{METRICS}: 2 more lines were left out.'


def test_nothing_to_report_is_one_sentence(tmp_path, study_dir):
    with pytest.raises(ReportError, match='does not exist'):
        load_study(tmp_path / 'nowhere')
    study_dir.mkdir()
    with pytest.raises(ReportError, match='not a study directory'):
        load_study(study_dir)
    write_study(study_dir, [], declared=[('qk/vo', SIZE)])
    with pytest.raises(ReportError, match='has no results yet'):
        load_study(study_dir)
    write_study(study_dir, [trial_record('qk/vo')])
    write_lines(study_dir / 'plan.jsonl', [GOOD])
    with pytest.raises(ReportError, match='has no results yet'):
        load_study(study_dir)
    (study_dir / 'plan.jsonl').unlink()
    with pytest.raises(ReportError, match=r'no results yet \(plan.jsonl cannot be read'):
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


def test_scores_that_do_not_compare_are_named(study_dir):
    other = translation_record('b/vo', test_bleu_signature='tok:intl', test_num_sentences=500)
    study = load_study(write_study(study_dir, [translation_record('qk/vo'), other]))
    assert study.problems == (
        'scores are not comparable, test_num_sentences differs: '
        "1000 ('qk/vo' at 'd_model=128' on 'stdlib'), 500 ('b/vo' at 'd_model=128' on 'stdlib').",
        'scores are not comparable, val_bleu_signature/test_bleu_signature differs: '
        "nrefs:1|case:lc|tok:13a|version:2.5.1 ('qk/vo' at 'd_model=128' on 'stdlib'), "
        "tok:intl ('b/vo' at 'd_model=128' on 'stdlib').",
    )


def test_missing_arms_of_a_tuned_study(study_dir):
    screening = 'screening', 'learning_rate'
    records = tuned_arm('qk/vo') + tuned_arm('a/vo')[:10] + tuned_arm('b/vo')[:10]
    declared = [('b/vo', SIZE, 'verdict'), ('c/vo', SIZE, *screening), ('d/vo', SIZE, *screening)]
    variants = [f'{v}/vo' for v in ('qk', 'a', 'b', 'c', 'd', 'e')]
    arms = [place(variant)._asdict() for variant in variants]
    write_tuned(study_dir, records, declared=declared, arms=arms, variants=variants)
    waiting, running, planned = (run_name(*run) for run in declared)
    edit_plan(study_dir, running, train__num_steps=800)
    (study_dir / running).mkdir()
    write_metrics(study_dir / running, [trial_record('c/vo', num_steps=300)], num_evals=3)
    assert load_study(study_dir).missing == (
        Missing(None, place('a/vo'), 'verdict'),
        Missing(waiting, place('b/vo'), 'verdict', num_steps=400),
        Missing(running, place('c/vo'), *screening, step=300, num_steps=800),
        Missing(planned, place('d/vo'), *screening, num_steps=400),
        Missing(None, place('e/vo'), None),
    )


def test_reads_declaration_plan_and_trials(study_dir):
    study = load_study(write_tuned(study_dir, tuned_arm('qk/vo')))
    assert (study.name, study.baseline, study.matched) == ('synthetic', 'qk/vo', 'total')
    assert study.missing == () and study.problems == ()
    assert study.arms == (place('qk/vo'),) and study.margin == 0.005
    assert study.tuning.seeds == (100, 101) and study.tuning.knobs == ('learning_rate',)
    screening, verdict = study.runs
    assert (screening.stage, screening.knob) == ('screening', 'learning_rate')
    assert (verdict.stage, verdict.knob, verdict.num_trials) == ('verdict', None, 8)
    assert verdict.config['train']['num_steps'] == 400 and verdict.step == 400
    assert [trial.seed for trial in verdict.trials] == list(range(8))
    trial = screening.trials[0]
    assert trial.settings == (('learning_rate', 1e-3), ('weight_decay', 0.1))
    assert trial.model_knobs[0] == 1.0 and trial.metrics['val_loss_se'] == 0.0125


GRIDS = {f'{knob}s': [1.0] for knob in KNOBS}
TUNING = {'seeds': [9], 'max_points': 5, 'max_seeds': 2, **GRIDS}


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
        "plan.jsonl:3 was left out: 'qk/vo' at 'd_model=128' on 'stdlib' has its verdict on "
        f"seed 0 in run {first!r} already, 'later' would be a second one."
    )


@pytest.mark.parametrize(
    ('changes', 'said'),
    [
        ({'margin': None}, "field 'margin' is None, expected float"),
        ({'margin': float('nan')}, "field 'margin' is nan, expected float"),
        ({'margin': 0.0}, "field 'margin' is 0.0, expected nats per token above 0"),
        ({'tuning': {'seeds': [1]}}, "field 'max_points' is missing"),
        ({'tuning': TUNING | {'seeds': []}}, "field 'seeds' is [], expected at least one"),
        ({'seeds': 3}, "field 'seeds' is 3, expected tuple"),
        ({'looks': 3}, "field 'looks' is 3, expected tuple"),
        ({'controls': {'equal_shape': True}}, "field 'longer' is missing"),
        ({'seeds': ['a']}, "field 'seeds' is ['a'], expected tuple"),
        ({'tuning': TUNING | {'weight_decays': []}}, "'weight_decays' of its tuning is [], exp"),
        ({'tuning': TUNING | {'learning_rates': [2, 1]}}, 'is [2, 1], expected one value or sev'),
        ({'tuning': TUNING | {'weight_decays': [0, 1]}}, 'is [0, 1], expected one value or sever'),
        ({'tuning': TUNING | {'score_scales': ['x']}}, "'score_scales' is ['x'], expected tuple"),
        ({'looks': [4]}, "field 'looks' is [4], expected numbers of seeds that ascend to all 8"),
        ({'looks': [8, 4, 8]}, "field 'looks' is [8, 4, 8], expected"),
        ({'arms': [place('qk/vo', 'x')._asdict()]}, "an arm has control 'x', which is"),
        ({'arms': [place('qk/vo')._asdict() | {'corpus': 'y'}]}, "an arm has corpus 'y', which is"),
        ({'arms': [{'variant': 'qk/vo', 'size': SIZE}]}, "field 'corpus' is missing"),
        ({'arms': [place('z')._asdict()]}, "an arm has variant 'z', which is"),
    ],
)
def test_a_bad_declaration_is_one_sentence(study_dir, changes, said):
    write_study(study_dir, [trial_record('qk/vo')], **changes)
    with pytest.raises(ReportError) as raised:
        load_study(study_dir)
    assert said in str(raised.value)


def test_a_directory_of_an_older_format_is_one_sentence(study_dir):
    write_tuned(study_dir, tuned_arm('qk/vo'))
    study = json.loads((study_dir / 'study.json').read_text())
    for name in ('base', 'corpora', 'controls', 'looks'):
        old = {field: value for field, value in study.items() if field != name}
        (study_dir / 'study.json').write_text(json.dumps(old))
        with pytest.raises(ReportError, match=r'study.json.*older format.*run the study again, or'):
            load_study(study_dir)


def test_a_ledger_that_is_missing_or_was_edited_is_one_sentence(study_dir):
    write_tuned(study_dir, tuned_arm('qk/vo'))
    entries = study_dir / 'ledger.jsonl'
    assert load_study(study_dir).ledger.family == 0
    text = entries.read_text()
    entries.write_text(text.replace('"margin": 0.005', '"margin": 0.5'))
    with pytest.raises(ReportError, match=r'ledger.jsonl, line 1 was edited.*; restore it'):
        load_study(study_dir)
    entries.unlink()
    with pytest.raises(ReportError, match=r'ledger.jsonl does not exist.*; restore it from'):
        load_study(study_dir)
    assert load_study(write_study(study_dir / 'b', [trial_record('qk/vo')])).ledger.family == 0
    (study_dir / 'b/ledger.jsonl').unlink()
    assert load_study(study_dir / 'b').ledger is None


def test_longer_runs_are_of_declared_arms_and_orphans_are_listed(study_dir):
    records = [trial_record('qk/vo'), trial_record('qk/vo', control='longer')]
    write_study(study_dir, records)
    other = plan_line('b/vo', SIZE, control='longer')
    orphan = {'directory': 'runs/a', 'run': 'a', 'config': None, 'results': None}
    write_lines(study_dir / 'orphans.jsonl', [orphan, {'run': 'b'}])
    with (study_dir / 'plan.jsonl').open('a') as file:
        file.write(json.dumps(other) + '\n')
    study = load_study(study_dir)
    assert study.arms == (place('qk/vo'),)
    assert [trial.place for trial in study.trials] == [place('qk/vo'), place('qk/vo', 'longer')]
    assert study.orphans == ('runs/a',)
    assert [problem.split(' was left out')[0] for problem in study.problems] == [
        'plan.jsonl:3',
        'orphans.jsonl:2',
    ]


def test_one_seed_and_setting_may_be_screened_in_two_runs(study_dir):
    records = tuned_arm('qk/vo')
    again = trial_record(
        'qk/vo', seed=100, learning_rate=4e-3, stage='screening', knob='weight_decay'
    )
    # A line that repeats an earlier one counts once.
    study = load_study(write_tuned(study_dir, [*records, again, again]))
    assert len(study.trials) == 19 and study.problems == ()


def test_findings_are_read_again_only_once_a_file_has_changed(study_dir):
    write_tuned(study_dir, tuned_arm('qk/vo'))
    study, found = load_findings(study_dir)
    assert found.arms and load_findings(str(study_dir))[1] is found
    run = study_dir / study.runs[0].directory
    new = [run / 'config.json', study_dir / 'orphans.jsonl']
    for path in [*study_dir.glob('*.json*'), *run.glob('*.json*'), *new]:
        text = path.read_text() if path.exists() else ''
        damage = '' if path.name == 'ledger.jsonl' else 'x'
        path.write_text(f'{text}{damage}\n')
        try:
            again = load_findings(study_dir)[1]
        except ReportError:  # study.json and ledger.jsonl are of use only whole
            again = None
        assert again is not found, path
        path.write_text(text)
        assert load_findings(study_dir)[1] is found or path in new


def test_a_choice_is_one_of_its_names(study_dir):
    records = tuned_arm('qk/vo', losses=[2.0, 2.1, 2.2])
    write_tuned(study_dir, records, tuning__choice='minimax')
    assert load_study(study_dir).tuning.choice == 'minimax'
    write_tuned(study_dir, records, tuning__choice='best')
    with pytest.raises(ReportError, match="'choice' is 'best', expected"):
        load_study(study_dir)
