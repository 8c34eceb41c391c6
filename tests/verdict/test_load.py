"""Reading a study: partial grids, bad lines, contradictions, damaged files."""

import json
import math
import re
import shutil

import numpy as np
import pytest

from qkattn.errors import ReportError
from qkattn.metrics import result_fields
from qkattn.report.prose import clause
from qkattn.study.arm_key import ArmKey
from qkattn.verdict import Decision, Missing, ReasonCode, find, load_findings, load_study, runs
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


def key(variant, control=None):
    return ArmKey(variant, SIZE, 'stdlib', control)


def test_reads_declaration_plan_and_trials(study_dir):
    study = load_study(write_tuned(study_dir, tuned_arm('qk/vo')))
    assert (study.name, study.baseline, study.matched) == ('synthetic', 'qk/vo', 'total')
    assert study.missing == () and study.problems == ()
    assert study.arms == (key('qk/vo'),) and study.margin == 0.005
    assert study.tuning.seeds == (100, 101) and study.tuned_knobs == ('learning_rate',)
    screening, verdict = study.runs
    assert (screening.stage, screening.knob) == ('screening', 'learning_rate')
    assert (verdict.stage, verdict.knob, verdict.num_trials) == ('verdict', None, 8)
    assert verdict.config['train']['num_steps'] == 400 and verdict.step == 400
    assert [trial.seed for trial in verdict.trials] == list(range(8))
    trial = screening.trials[0]
    assert trial.settings == (('learning_rate', 1e-3), ('weight_decay', 0.1))
    assert trial.model_knobs[0] == 1.0 and trial.metrics['val_loss_se'] == 0.0125


def test_missing_arms_and_runs(study_dir):
    screening = 'screening', 'learning_rate'
    records = tuned_arm('qk/vo') + tuned_arm('a/vo')[:10] + tuned_arm('b/vo')[:10]
    declared = [('b/vo', SIZE, 'verdict'), ('c/vo', SIZE, *screening), ('d/vo', SIZE, *screening)]
    variants = [f'{v}/vo' for v in ('qk', 'a', 'b', 'c', 'd', 'e')]
    arms = [key(variant)._asdict() for variant in variants]
    write_tuned(study_dir, records, declared=declared, arms=arms, variants=variants)
    waiting, running, planned = (run_name(*run) for run in declared)
    edit_plan(study_dir, running, train__num_steps=800)
    (study_dir / running).mkdir()
    write_metrics(study_dir / running, [trial_record('c/vo', num_steps=300)], num_evals=3)
    assert load_study(study_dir).missing == (
        Missing(None, key('a/vo'), 'verdict'),
        Missing(waiting, key('b/vo'), 'verdict', num_steps=400),
        Missing(running, key('c/vo'), *screening, step=300, num_steps=800),
        Missing(planned, key('d/vo'), *screening, num_steps=400),
        Missing(None, key('e/vo'), None),
    )
    write_study(study_dir / 'b', [trial_record('qk/vo')], declared=[('a/vo', SIZE)])
    single = Missing(run_name('a/vo', SIZE), key('a/vo'), 'single', num_steps=400)
    assert load_study(study_dir / 'b').missing == (single,)


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
        ('results.jsonl', {'run': RUN}, "field 'variant' is missing"),
        ('results.jsonl', result('other'), 'is not in plan.jsonl'),
        ('results.jsonl', result(residual=0.5), 'residual 0.5 contradicts plan.jsonl'),
        ('results.jsonl', result(), f'seed 2 is not one of run {RUN!r}, which has [0, 1]'),
        ('results.jsonl', result(seed=0, val_loss=1.5), 'repeats an earlier line'),
        ('plan.jsonl', {}, "field 'run' is missing"),
        ('plan.jsonl', GOOD | {'control': 'x'}, 'is no arm that study'),
        ('plan.jsonl', GOOD | {'stage': 'final'}, "'stage' is 'final', expected"),
        ('plan.jsonl', GOOD | {'config': {}}, "field 'model' is missing"),
        ('plan.jsonl', plan_line('b/vo', SIZE, name=RUN), 'is planned twice, differently'),
        ('orphans.jsonl', {'run': 'b'}, "field 'directory' is missing"),
        (METRICS, {'kind': 'final', 'step': 401}, "field 'trials' is missing"),
        (METRICS, FINAL | {'val_loss': 3}, "'val_loss' is 3, expected tuple"),
        (METRICS, EVALUATION | {'step': 400}, 'step 400 follows step 400'),
        (METRICS, EVALUATION | {'val_loss': [1.0, 'x']}, 'expected tuple'),
        (METRICS, EVALUATION | {'val_bits_per_byte': [1.0]}, 'has 1 values for 2 trials'),
    ],
)
def test_bad_lines_are_named_and_left_out(study_dir, path, record, message):
    arms = [key(v)._asdict() for v in ('qk/vo', 'b/vo')]
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


def test_many_bad_lines_are_counted(study_dir):
    write_study(study_dir, [trial_record('qk/vo')])
    with (study_dir / METRICS).open('a') as file:
        file.write('{"kind": "ev\n' * 4)
    assert load_study(study_dir).problems[2] == f'{METRICS}: 2 more lines were left out.'


def test_a_seed_counts_once(study_dir):
    """In a verdict or a single run; one setting may be screened in two runs."""
    again = trial_record(
        'qk/vo', seed=100, learning_rate=4e-3, stage='screening', knob='weight_decay'
    )
    # A line that repeats an earlier one counts once.
    study = load_study(write_tuned(study_dir / 'a', [*tuned_arm('qk/vo'), again, again]))
    assert len(study.trials) == 19 and study.problems == ()
    later = {'stage': 'verdict', 'run': 'later'}
    records = tuned_arm('qk/vo') + [trial_record('qk/vo', seed=s, **later) for s in range(8)]
    study = load_study(write_tuned(study_dir / 'b', records))
    assert [run.stage for run in study.runs] == ['screening', 'verdict']
    assert "has its verdict on seed 0 in run 'qk_vo" in study.problems[0]
    write_study(study_dir / 'c', [trial_record('qk/vo', run=name) for name in 'ab'])
    with pytest.raises(ReportError, match=r"runs 'a' and 'b' both hold seed 0"):
        load_study(study_dir / 'c')


def test_curves_need_every_result_and_no_bytes(study_dir):
    """The columns of a curve would be those of other trials."""
    records = [probe_record('qk/vo', seed=0), probe_record('qk/vo', None, seed=1)]
    study = load_study(write_study(study_dir, records, num_evals=4))
    curve = study.runs[0].curve
    assert study.problems == () and curve.steps_E.tolist() == [100, 200, 300, 400]
    assert curve.values_EX['val_loss'][-1, 0] == 0.5
    diverged_EX = np.isnan(curve.values_EX['val_loss'])
    assert diverged_EX.tolist() == [[False, False]] * 2 + [[False, True]] * 2
    assert np.isnan(curve.values_EX['val_bits_per_byte']).all()
    lines = (study_dir / 'results.jsonl').read_text().splitlines()
    (study_dir / 'results.jsonl').write_text(f'{lines[0][:-9]}\n{lines[1]}\n')
    study = load_study(study_dir)
    assert [trial.seed for trial in study.trials] == [1] and study.runs[0].curve is None
    assert len(study.problems) == 1 and study.runs[0].step == 400


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'test_num_sentences': 500}, 'test_num_sentences'),
        ({'test_bleu_signature': 'tok:intl'}, 'bleu_signature'),
        ({'run': 'a', 'variant': 'qk/vo', 'config': {'d_model': 1, 'd_ff': 1}}, 'parameters'),
    ],
)
def test_trials_that_do_not_compare_are_named(study_dir, changes, field):
    name = {'config_hash': changes['run']} if 'run' in changes else {}
    other = translation_record('b/vo', seed=1) | changes | name
    study = load_study(write_study(study_dir, [translation_record('qk/vo'), other]))
    assert any(field in problem for problem in study.problems)
    assert all('are not comparable' in problem for problem in study.problems)


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'margin': None}, "'margin'"),
        ({'margin': float('nan')}, "'margin'"),
        ({'margin': 0.0}, "'margin'"),
        ({'tuning__seeds': []}, "'seeds' is []"),
        ({'seeds': 3}, "'seeds' is 3"),
        ({'seeds': ['a']}, "'seeds' is"),
        ({'looks': 3}, "'looks' is 3"),
        ({'looks': [4]}, 'looks=(4,) must ascend'),
        ({'looks': [8, 4, 8]}, 'looks=(8, 4, 8) must ascend'),
        ({'controls': {'equal_shape': True}}, "'longer' is missing"),
        ({'tuning__weight_decays': []}, 'tuning.weight_decays=() must'),
        ({'tuning__learning_rates': [2, 1]}, 'tuning.learning_rates=(2, 1) must'),
        ({'tuning__score_scales': ['x']}, "'score_scales' is ['x']"),
        ({'tuning__choice': 'best'}, "'choice' is 'best'"),
        ({'expected': ['x/vo is worse']}, "'x/vo' is none of the arms"),
        ({'arms': [key('qk/vo', 'x')._asdict()]}, "control 'x'"),
        ({'arms': [key('qk/vo')._asdict() | {'corpus': 'y'}]}, "corpus 'y'"),
        ({'arms': [{'variant': 'qk/vo', 'size': SIZE}]}, "'corpus' is missing"),
    ],
)
def test_a_bad_declaration_is_one_sentence(study_dir, changes, field):
    with pytest.raises(ReportError, match=r'study\.json.* cannot be read') as raised:
        load_study(write_tuned(study_dir, tuned_arm('qk/vo'), **changes))
    assert field in str(raised.value)


def test_longer_runs_are_of_declared_arms_and_orphans_are_listed(study_dir):
    records = [trial_record('qk/vo'), trial_record('qk/vo', control='longer')]
    write_study(study_dir, records)
    orphan = {'directory': 'runs/a', 'run': 'a', 'config': None, 'results': None}
    write_lines(study_dir / 'orphans.jsonl', [orphan])
    with (study_dir / 'plan.jsonl').open('a') as file:
        file.write(json.dumps(plan_line('b/vo', SIZE, control='longer')) + '\n')
    study = load_study(study_dir)
    assert study.arms == (key('qk/vo'),) and study.orphans == ('runs/a',)
    assert [trial.key for trial in study.trials] == [key('qk/vo'), key('qk/vo', 'longer')]
    assert [problem.split(' was')[0] for problem in study.problems] == ['plan.jsonl:3']


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


# A result

SCORES = ('accuracy', 'solved', 'bleu', 'chrf', 'exact_match', 'num_sentences')
SIDE = {'name': 'x', 'version': '1'}


def parse_trial(record):
    return runs.parse_trial(record, runs.parse_run(plan_line('qk/vo', SIZE, [record])))


def test_metrics_are_those_that_are_declared():
    trial = parse_trial(translation_record('qk/vo', bleu=30.0))
    assert trial.metrics.keys() == result_fields().keys()
    assert [trial.metrics[f'val_{name}'] for name in SCORES] == [0.5, 0.125, 29, 49, 0.15, 1014]
    assert [trial.metrics[f'test_{name}'] for name in SCORES] == [0.5, 0.125, 30, 50, 0.15, 1000]
    assert trial.metrics['test_chrf_signature'] == 'nrefs:1|case:lc|nc:6|version:2.5.1'
    none = dict.fromkeys(f'test_{name}' for name in ('loss', 'accuracy', 'solved'))
    metrics = parse_trial(probe_record('qk/vo', accuracy=0.75, **none)).metrics
    assert (metrics['val_loss'], metrics['val_accuracy']) == (0.25, 0.75)
    assert {metrics[name] for name in ('val_bits_per_byte', 'test_loss', 'test_bleu')} == {None}
    assert not parse_trial(translation_record('qk/vo', bleu=None)).finished


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'num_steps': 'many'}, "field 'num_steps' is 'many', expected int"),
        ({'test_solved': True}, "field 'test_solved' is True, expected float"),
        ({'val_num_sentences': 1.5}, "field 'val_num_sentences' is 1.5, expected int"),
        ({'test_bleu_signature': 1}, "field 'test_bleu_signature' is 1, expected str"),
        ({'parameters': {'total': 1}}, "field 'attention' is missing"),
        ({'status': 'lost'}, "field 'status' is 'lost', expected Literal"),
        ({'val_loss': None}, "field 'val_loss' of a finished trial is None"),
        ({'val_loss': math.inf}, "field 'val_loss' is inf, expected float"),
        ({'config_hash': '0123'}, "config_hash '0123' contradicts plan.jsonl"),
        ({'data': {'name': 'x'}}, "field 'version' is missing"),
        ({'data': {'source': SIDE}}, "field 'target' is missing"),
        ({'data': {'source': SIDE, 'target': {'name': 'x'}}}, "field 'version' is missing"),
    ],
)
def test_what_is_wrong_with_a_result_is_named(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        parse_trial(translation_record('qk/vo') | changes)


# Damage

DOCUMENTS, LOG = (
    f'{run_name("b/vo", SIZE, "verdict")}/{n}' for n in (runs.DOCUMENTS_FILE, runs.LOG)
)
WORSE, NO_VERDICT = Decision.WORSE, Decision.NO_VERDICT
JUDGED, WITHHELD = {'b/vo': WORSE, 'c/vo': WORSE}, {'b/vo': NO_VERDICT, 'c/vo': WORSE}


@pytest.fixture(scope='module')
def sound(tmp_path_factory):
    losses = {'qk/vo': 0.0, 'b/vo': 0.02, 'c/vo': 0.04}
    base = 2 + 0.05 * np.arange(8)
    records = [r for v, delta in losses.items() for r in tuned_arm(v, losses=list(base + delta))]
    return write_tuned(tmp_path_factory.mktemp('sound'), records, num_documents=101)


def test_every_trial_has_its_documents_on_both_splits(sound):
    first, last = load_study(sound).trials[0], load_study(sound).trials[-1]
    assert first.documents.keys() == {'val', 'test'} and len(first.documents['val'].names) == 101
    assert first.documents['test'].loss == pytest.approx(first.metrics['test_loss'])
    assert first.documents['val'].alike(last.documents['val'])
    assert not first.documents['val'].alike(first.documents['test'])


def of_test(change):
    """A damage of the test split of documents.json."""

    def damage(content):
        documents = json.loads(content)
        change(documents['test'])
        return json.dumps(documents).encode()

    return damage


def merge(documents):
    """Two documents become one, whose sums are theirs."""
    documents['documents'].pop()
    for values in (documents['tokens'], *documents['nats']):
        last = values.pop()
        values[-1] += last


def without_run(content):
    lines = content.splitlines(keepends=True)
    return b''.join(line for line in lines if DOCUMENTS.split('/')[0].encode() not in line)


GONE, DIRECTORY = (lambda content: None), (lambda content: ())
HALF, NAN = (lambda c: c[: len(c) // 2]), (lambda c: c.replace(b'2.02', b'NaN'))
SHORT = lambda c: c[:-99]  # noqa: E731
LESS = lambda c: b''.join(c.splitlines(keepends=True)[:-1])  # noqa: E731
C_WITHHELD = {'b/vo': WORSE, 'c/vo': NO_VERDICT}


@pytest.mark.parametrize(
    ('file', 'damage', 'said', 'decisions'),
    [
        ('study.json', DIRECTORY, r'study\.json.* cannot be read: Is a directory', None),
        ('study.json', HALF, r'study\.json.* cannot be read: it is not JSON', None),
        ('ledger.jsonl', GONE, r'ledger\.jsonl does not exist', None),
        ('ledger.jsonl', HALF, r'ledger\.jsonl, line 1 is damaged', None),
        ('plan.jsonl', GONE, r'no results yet \(plan\.jsonl cannot be read', None),
        ('plan.jsonl', SHORT, r'plan\.jsonl:6 was left out', C_WITHHELD),
        ('plan.jsonl', without_run, 'is not in plan.jsonl', WITHHELD),
        ('results.jsonl', SHORT, r'results\.jsonl:54 was left out', C_WITHHELD),
        ('results.jsonl', LESS, '7 of its 8 verdict trials', C_WITHHELD),
        ('results.jsonl', NAN, "'val_loss' is nan", WITHHELD),
        ('results.jsonl', without_run, r'results\.jsonl lacks the results of b_vo', WITHHELD),
        (LOG, GONE, r'verdict-4 has results, but metrics\.jsonl is missing', JUDGED),
        (LOG, SHORT, r'metrics\.jsonl:21 was left out', JUDGED),
        (LOG, LESS, r'metrics\.jsonl has no final record', JUDGED),
        (DOCUMENTS, GONE, r'verdict-4 has results, but documents\.json is missing', WITHHELD),
        (DOCUMENTS, lambda c: b'[' * 10**6, 'left out: it is n', WITHHELD),
        (DOCUMENTS, lambda c: c.replace(b'"test": ', b'"t": '), "'test' is missing", WITHHELD),
        (DOCUMENTS, of_test(lambda of: of['nats'].pop()), 'nats of 7 trials', WITHHELD),
        (DOCUMENTS, of_test(lambda of: of['nats'][1].pop()), 'one number for each', WITHHELD),
        (DOCUMENTS, of_test(lambda of: of['tokens'].__setitem__(0, 0)), 'without targ', WITHHELD),
        (DOCUMENTS, of_test(lambda of: of['tokens'].sort()), 'documents of test', WITHHELD),
        (DOCUMENTS, of_test(merge), 'documents of test', WITHHELD),
        (DOCUMENTS, of_test(lambda of: of['nats'][1].__setitem__(0, 1e9)), 'its result', WITHHELD),
        (DOCUMENTS, of_test(lambda of: of['tokens'].__setitem__(0, 1)), 'its results 3', WITHHELD),
    ],
)  # fmt: skip
def test_evidence_that_is_damaged_is_named_and_what_rests_on_it_is_withheld(
    sound, study_dir, file, damage, said, decisions
):
    """No decisions: the study cannot be read. Without documents an interval would be narrower."""
    path = shutil.copytree(sound, study_dir) / file
    damaged = damage(path.read_bytes())
    path.unlink()
    if damaged == ():
        path.mkdir()
    elif damaged is not None:
        path.write_bytes(damaged)
    if decisions is None:
        with pytest.raises(ReportError, match=said):
            load_study(study_dir)
        return
    study = load_study(study_dir)
    found = find(study)
    remarks = [clause(remark) for remark in found.remarks if remark.blocks]
    assert re.search(said, '\n'.join([*study.problems, *remarks]))
    assert {a.variant: a.verdict.decision for a in found.arms if a.verdict} == decisions
    is_known = {a.variant: a.difference.low is not None for a in found.arms if a.difference}
    assert is_known.pop('b/vo', False) == (decisions['b/vo'] is WORSE)
    if file == DOCUMENTS:
        assert [why.code for why in found.arms[1].verdict.reasons] == [ReasonCode.NO_DOCUMENTS]
