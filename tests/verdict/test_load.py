"""Reading a study: partial grids, bad lines, contradictions, damaged files."""

import json
import re
import shutil
from operator import setitem as put

import numpy as np
import pytest

from qkattn.config import Config, ModelConfig, fingerprint_of, to_json
from qkattn.errors import ReportError
from qkattn.report.prose import clause
from qkattn.study import stored
from qkattn.study.arm_key import ArmKey
from qkattn.verdict import Decision, ReasonCode, find, load_findings, load_study
from qkattn.verdict.runs import _documents_of_split
from tests import studies

SIZE = 'd_model=128'
RUN = studies.run_name('qk/vo', SIZE)
LOG = f'{RUN}/metrics.jsonl'


def key(variant, control=None):
    return ArmKey(variant, SIZE, 'stdlib', control)


EVALUATION = '{"kind": "eval", "step": 400, "val_loss": [1.0]}'
FINAL = '{"kind": "final", "step": 400}'


def result_of(variant='qk/vo', seed=0, **changes):
    return studies.trial_record(variant, seed=seed, **changes)


def plan_line(**changes):
    return studies.plan_line(studies.trial_record('b/vo', SIZE, **changes))


@pytest.mark.parametrize(
    ('file', 'line', 'message'),
    [
        ('results.jsonl', '{"run": "x", ', 'it is not JSON'),
        ('results.jsonl', '[1]', 'expected an object'),
        ('results.jsonl', result_of('other'), 'is not in plan.jsonl'),
        ('results.jsonl', result_of(seed=2), f'seed 2 is not one of run {RUN!r}, which has [0, 1]'),
        ('results.jsonl', result_of(val_loss=1.5), 'seed 0 has two results, which differ'),
        ('results.jsonl', result_of(status='lost'), "field 'status' is 'lost', expected Literal"),
        ('results.jsonl', result_of(val_loss=float('nan')), "'val_loss' is nan"),
        ('plan.jsonl', plan_line(control='x'), 'is not an arm that study.json declares'),
        ('plan.jsonl', plan_line(run=RUN), 'is planned twice, differently'),
        ('plan.jsonl', plan_line() | {'directory': '../x'}, "'directory' is '../x', expected one"),
        ('plan.jsonl', plan_line() | {'trials': 0}, "field 'trials' is 0, expected 1 or more"),
    ],
)
def test_a_bad_line_of_a_study_is_refused(study_dir, file, line, message):
    records = [result_of(seed=0), result_of(seed=1)]
    path = study_of_two_arms(study_dir, records) / file
    # A repeated line counts once.
    studies.write_lines(study_dir / 'results.jsonl', [*records, *records])
    assert [trial.seed for trial in load_study(study_dir).trials] == [0, 1]
    add_line(path, line if isinstance(line, str) else json.dumps(line))
    with pytest.raises(ReportError, match=re.escape(message)) as raised:
        load_study(study_dir)
    assert f'{file}, line {len(path.read_text().splitlines())} is damaged' in str(raised.value)


def study_of_two_arms(directory, records):
    arms = [key(variant)._asdict() for variant in ('qk/vo', 'b/vo')]
    return studies.write_study(directory, records, arms=arms, variants=['qk/vo', 'b/vo'])


def add_line(path, line):
    with path.open('a') as file:
        file.write(f'{line}\n')


@pytest.mark.parametrize(
    ('lines', 'message'),
    [
        (EVALUATION, 'does not end with the last evaluation'),
        (f'{EVALUATION}\n{FINAL}', 'does not have one loss for each of 2 trials'),
    ],
)
def test_a_log_that_does_not_fit_its_results_is_left_out(study_dir, lines, message):
    study_of_two_arms(study_dir, [result_of(seed=0), result_of(seed=1)])
    add_line(study_dir / LOG, lines)
    study = load_study(study_dir)
    (problem,) = study.problems
    (run,) = study.runs
    assert message in problem
    assert LOG in problem
    assert len(run.trials) == 2
    assert not any(trial.evaluations for trial in run.trials)


def test_evaluations_end_where_a_trial_diverges(study_dir):
    records = [result_of(val_loss=0.5), result_of(seed=1, val_loss=None)]
    one, other = load_study(studies.write_study(study_dir, records, num_evals=4)).trials
    assert [*one.evaluations] == [100, 200, 300, 400]
    assert one.evaluations[400] == 0.5
    assert other.evaluations == {100: 3.5, 200: 3.5}


def test_evaluations_of_a_run_without_all_results_are_left_out(study_dir):
    """A log has a column for each trial, and which trials these were is not known."""
    records = [result_of(val_loss=0.5), result_of(seed=1, val_loss=None)]
    studies.write_study(study_dir, records, num_evals=4)
    studies.write_lines(study_dir / 'results.jsonl', records[1:])
    study = load_study(study_dir)
    assert [trial.seed for trial in study.trials] == [1]
    assert study.problems == ()
    assert not study.trials[0].evaluations


@pytest.mark.parametrize(
    ('changes', 'field'),
    [
        ({'margin': 0.0}, "'margin'"),
        ({'tuning__seeds': []}, "'seeds' is []"),
        ({'tuning__choice': 'best'}, "'choice' is 'best'"),
        ({'tuning__max_seeds': 10**30}, 'tuning.max_seeds=1'),
        ({'base': {'model': {'kind': 'decoder'}, 'train': 3}}, 'train=3'),
        ({'arms': [key('qk/vo', 'x')._asdict()]}, "control 'x'"),
        ({'arms': [key('qk/vo')._asdict() | {'corpus': 'y'}]}, "corpus 'y'"),
    ],
)
def test_a_bad_declaration_is_one_sentence(study_dir, changes, field):
    with pytest.raises(ReportError, match=r'study\.json.* cannot be read') as raised:
        load_study(studies.write_tuned(study_dir, studies.tuned_arm('qk/vo'), **changes))
    assert field in str(raised.value)


def test_settings_that_this_version_does_not_know_are_left_out(study_dir):
    base = to_json(Config())
    base['model'] |= {'depth_decay': 2, 'num_layers': 3}
    about = {'base': base, 'base_hash': fingerprint_of(base)}
    study = load_study(studies.write_tuned(study_dir, studies.tuned_arm('qk/vo'), **about))
    assert study.base == Config(model=ModelConfig(num_layers=3))
    assert study.problems == ()
    base['model']['d_ff'] = {'a': 1}
    (problem,) = load_study(studies.write_study(study_dir / 'x', [result_of()], **about)).problems
    assert problem.startswith('base_hash of study.json is not')


def test_findings_of_a_stored_study_are_read_again_only_once_a_file_has_changed(study_dir):
    kept = study_dir / 'kept'
    stored.pack(studies.write_tuned(study_dir, studies.tuned_arm('qk/vo')), kept)
    before = load_findings(kept)
    assert load_findings(str(kept)) is before
    (kept / 'yardsticks.json').write_text('{}')
    with pytest.raises(ReportError, match=r"yardsticks\.json.* be read: .*'groups' is missing"):
        load_findings(kept)


def changed_entries(**changes):
    """A function that sets these fields in all entries of a list."""
    return lambda entries: [entry | changes for entry in entries]


def changed_yardsticks(part, **changes):
    """A function that sets these fields in the groups or the runs of yardsticks.json."""
    return lambda content: content | {part: changed_entries(**changes)(content[part])}


B_RUN = studies.run_name('b/vo', SIZE, 'verdict')
WRONG_HASH = f"'config_hash' is 'other', expected {B_RUN!r}: it is the result of another run"


@pytest.mark.parametrize(
    ('file', 'change', 'message'),
    [
        ('results.jsonl', changed_entries(config_hash='other'), WRONG_HASH),
        ('results.jsonl', changed_entries(variant='qk/vo'), "but its result is of 'qk/vo' at"),
        ('results.jsonl', changed_entries(size='s'), "but its result is of 'b/vo' at 's'"),
        ('results.jsonl', changed_entries(trial=result_of(learning_rate=3.0)['trial']),
         'learning_rate 3.0 is not one of run'),
        ('yardsticks.json', changed_yardsticks('groups', run='other'), 'no arm of this study'),
        ('yardsticks.json', changed_yardsticks('groups', run=B_RUN), "but planned for 'b/vo'"),
        ('yardsticks.json', changed_yardsticks('runs', run='other'), 'no arm of this study'),
        ('yardsticks.json', changed_yardsticks('runs', variant='qk/vo'), "but planned for 'b/vo'"),
    ],
)  # fmt: skip
def test_a_file_of_another_study_or_run_is_refused(
    study_of_three_arms, study_dir, file, change, message
):
    path = shutil.copytree(study_of_three_arms, study_dir) / file
    if file == 'results.jsonl':
        lines = studies.read_lines(path)
        first = [line['run'] for line in lines].index(B_RUN)
        lines[first:] = change(lines[first:])
        studies.write_lines(path, lines)
    else:
        path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ReportError, match=re.escape(message)) as raised:
        load_study(study_dir)
    assert file in str(raised.value)
    assert '\n' not in str(raised.value)


@pytest.mark.parametrize(
    ('file', 'content', 'message'),
    [
        ('result.json', [studies.result_record(config_hash='other')], WRONG_HASH),
        ('config.json', {'hash': 'other', 'config': {}}, "field 'hash' is 'other', expected"),
        ('config.json', {'hash': B_RUN, 'config': {}}, 'its hash does not match its config'),
    ],
)
def test_a_file_in_the_directory_of_another_run_is_named(
    study_of_three_arms, study_dir, file, content, message
):
    path = shutil.copytree(study_of_three_arms, study_dir) / B_RUN / file
    path.write_text(json.dumps(content))
    (problem,) = load_study(study_dir).problems
    assert f'{B_RUN}/{file} is damaged' in problem
    assert message in problem


def test_runs_that_are_trained_longer_may_leave_the_plan_after_their_yardsticks(
    study_of_three_arms, study_dir
):
    path = shutil.copytree(study_of_three_arms, study_dir) / 'yardsticks.json'
    content = json.loads(path.read_text())
    content['groups'].append(content['groups'][0] | {'run': 'left', 'longer': True})
    path.write_text(json.dumps(content))
    assert load_study(study_dir).yardsticks


def test_documents_of_a_split_have_different_names():
    split = {'documents': ['a', 'a', 'b'], 'tokens': [1.0, 1.0], 'nats': [[2.0, 2.0]]}
    with pytest.raises(ValueError, match='documents of different names'):
        _documents_of_split(split, 'test', [2.0])


DOCUMENTS = f'{B_RUN}/documents.json'
LOG_B = f'{B_RUN}/metrics.jsonl'
WORSE = Decision.WORSE
NO_VERDICT = Decision.NO_VERDICT
JUDGED = {'b/vo': WORSE, 'c/vo': WORSE}
WITHHELD = {'b/vo': NO_VERDICT, 'c/vo': WORSE}
C_WITHHELD = {'b/vo': WORSE, 'c/vo': NO_VERDICT}


@pytest.fixture(scope='module')
def study_of_three_arms(tmp_path_factory):
    """A tuned study in which b/vo is worse by 0.02 and c/vo by 0.04 nats/token."""
    base = 2 + 0.05 * np.arange(8)
    records = []
    for variant, delta in {'qk/vo': 0.0, 'b/vo': 0.02, 'c/vo': 0.04}.items():
        records += studies.tuned_arm(variant, losses=list(base + delta))
    return studies.write_tuned(tmp_path_factory.mktemp('sound'), records, num_documents=101)


@pytest.mark.parametrize(
    ('file', 'damage', 'message', 'decisions'),
    [
        ('results.jsonl', lambda c: c[: c.rindex(b'{"study"')], '7 of its 8 verdict t', C_WITHHELD),
        (LOG_B, None, r'verdict-4 has results, but metrics\.jsonl is missing', JUDGED),
        (DOCUMENTS, None, r'verdict-4 has results, but documents\.json is missing', WITHHELD),
        (DOCUMENTS, lambda d: d.pop('test'), "'test' is missing", WITHHELD),
        (DOCUMENTS, lambda d: d['test']['nats'][1].pop(), 'one number for', WITHHELD),
        (DOCUMENTS, lambda d: put(d['test']['tokens'], 0, 0), 'must have documents of', WITHHELD),
        (DOCUMENTS, lambda d: put(d['test']['documents'], 0, 'other'), '', WITHHELD),
        (DOCUMENTS, lambda d: put(d['test']['nats'][1], 0, 1e9), 'its result', WITHHELD),
    ],
)  # fmt: skip
def test_a_verdict_is_withheld_where_results_or_documents_are_damaged(
    study_of_three_arms, study_dir, file, damage, message, decisions
):
    """Without documents an interval would be narrower, so that such an arm gets no verdict."""
    path = shutil.copytree(study_of_three_arms, study_dir) / file
    if damage is None:
        path.unlink()
    elif file == DOCUMENTS:
        documents = json.loads(path.read_text())
        damage(documents)
        path.write_text(json.dumps(documents))
    else:
        path.write_bytes(damage(path.read_bytes()))
    study = load_study(study_dir)
    findings = find(study)
    remarks = [clause(remark) for remark in findings.remarks if remark.blocks]
    assert re.search(message, '\n'.join([*study.problems, *remarks]))
    assert {a.variant: a.verdict.decision for a in findings.arms if a.verdict} == decisions
    is_known = {a.variant: a.difference.low is not None for a in findings.arms if a.difference}
    assert is_known.pop('b/vo', False) == (decisions['b/vo'] is WORSE)
    if file == DOCUMENTS:
        assert [why.code for why in findings.arms[1].verdict.reasons] == [ReasonCode.NO_DOCUMENTS]
