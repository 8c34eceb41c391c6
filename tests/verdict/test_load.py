"""Reading a study: partial grids, bad lines, contradictions, damaged files."""

import json
import re
import shutil

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
RUN = studies.run_name('qk/vo', SIZE)  # without tuning
LOG = f'{RUN}/metrics.jsonl'
B_RUN = studies.run_name('b/vo', SIZE, 'verdict')


def arm_key(variant, control=None):
    return ArmKey(variant, SIZE, 'stdlib', control)


def result_of(variant='qk/vo', seed=0, **changes):
    return studies.trial_record(variant, seed=seed, **changes)


def plan_line(**changes):
    """The line of plan.jsonl of b/vo."""
    return studies.plan_line(studies.trial_record('b/vo', SIZE, **changes))


def study_of_two_arms(directory, records):
    """Writes a study that declares the arms qk/vo and b/vo."""
    arms = [arm_key(variant)._asdict() for variant in ('qk/vo', 'b/vo')]
    return studies.write_study(directory, records, arms=arms, variants=['qk/vo', 'b/vo'])


def add_line(path, line):
    with path.open('a') as file:
        file.write(f'{line}\n')


def test_a_repeated_result_counts_once(study_dir):
    records = [result_of(seed=0), result_of(seed=1)]
    study_of_two_arms(study_dir, records)
    studies.write_lines(study_dir / 'results.jsonl', records + records)
    assert [trial.seed for trial in load_study(study_dir).trials] == [0, 1]


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
    study_of_two_arms(study_dir, [result_of(seed=0), result_of(seed=1)])
    add_line(study_dir / file, line if isinstance(line, str) else json.dumps(line))

    with pytest.raises(ReportError, match=re.escape(message)) as raised:
        load_study(study_dir)

    # The bad line is the last one.
    line_number = len((study_dir / file).read_text().splitlines())
    assert f'{file}, line {line_number} is damaged' in str(raised.value)


EVALUATION = '{"kind": "eval", "step": 400, "val_loss": [1.0]}'  # of one trial
FINAL = '{"kind": "final", "step": 400}'


@pytest.mark.parametrize(
    # `lines` are added to the log. A whole log ends with an evaluation at the last step and a line
    # of the kind 'final'. EVALUATION has the loss of one trial, but the run has two trials.
    ('lines', 'message'),
    [
        pytest.param([EVALUATION], 'does not end with the last evaluation', id='no final line'),
        pytest.param(
            [EVALUATION, FINAL],
            'does not have one loss for each of 2 trials',
            id='too few losses',
        ),
    ],
)
def test_a_log_that_does_not_fit_its_results_is_left_out(study_dir, lines, message):
    """A damaged log of evaluations is a problem of the study, but the results still count."""
    study_of_two_arms(study_dir, [result_of(seed=0), result_of(seed=1)])
    for line in lines:
        add_line(study_dir / LOG, line)

    study = load_study(study_dir)

    (problem,) = study.problems
    assert LOG in problem
    assert message in problem

    # The run has the results of both seeds, and no evaluations.
    (run,) = study.runs
    assert len(run.trials) == 2
    for trial in run.trials:
        assert not trial.evaluations


def test_evaluations_end_where_a_trial_diverges(study_dir):
    records = [result_of(val_loss=0.5), result_of(seed=1, val_loss=None)]
    studies.write_study(study_dir, records, num_evals=4)

    finished, diverged = load_study(study_dir).trials

    assert list(finished.evaluations) == [100, 200, 300, 400]
    assert finished.evaluations[400] == 0.5
    # A diverged trial has losses of 3.5 in two evaluations, and then null.
    assert diverged.evaluations == {100: 3.5, 200: 3.5}


def test_evaluations_of_a_run_without_all_results_are_left_out(study_dir):
    """Each evaluation in a log has a list of losses, one for each trial of the run.

    If a trial has no result, the losses cannot be assigned to trials.
    """
    # The trial of seed 0 finished, and the trial of seed 1 diverged.
    records = [result_of(seed=0, val_loss=0.5), result_of(seed=1, val_loss=None)]
    studies.write_study(study_dir, records, num_evals=4)
    # Only seed 1 has a result.
    studies.write_lines(study_dir / 'results.jsonl', records[1:])

    study = load_study(study_dir)

    assert study.problems == ()
    assert [trial.seed for trial in study.trials] == [1]
    assert not study.trials[0].evaluations


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'margin': 0.0}, "'margin'"),
        ({'tuning__seeds': []}, "'seeds' is []"),
        ({'tuning__choice': 'best'}, "'choice' is 'best'"),
        ({'tuning__max_seeds': 10**30}, 'tuning.max_seeds=1'),
        ({'base': {'model': {'kind': 'decoder'}, 'train': 3}}, 'train=3'),
        ({'arms': [arm_key('qk/vo', 'x')._asdict()]}, "control 'x'"),
        ({'arms': [arm_key('qk/vo')._asdict() | {'corpus': 'y'}]}, "corpus 'y'"),
    ],
)
def test_a_bad_declaration_is_refused(study_dir, changes, message):
    with pytest.raises(ReportError, match=r'study\.json.* cannot be read') as raised:
        load_study(studies.write_tuned(study_dir, studies.tuned_arm('qk/vo'), **changes))
    assert message in str(raised.value)


def test_settings_that_this_version_does_not_know_are_left_out(study_dir):
    """A study of a later version may have unknown settings. It is read without them."""
    base = to_json(Config())
    base['model']['num_layers'] = 3
    base['model']['depth_decay'] = 2  # no setting of this version
    # The hash in study.json includes the unknown setting, so it fits.
    base_hash = fingerprint_of(base)
    records = studies.tuned_arm('qk/vo')
    studies.write_tuned(study_dir, records, base=base, base_hash=base_hash)

    study = load_study(study_dir)

    assert study.base == Config(model=ModelConfig(num_layers=3))
    assert study.problems == ()


def test_settings_that_do_not_fit_their_hash_are_a_problem(study_dir):
    """The base config was changed after its hash was taken, which is reported.

    It also has an unknown setting and a setting of a wrong type, which are not reported.
    """
    base = to_json(Config())
    base['model']['depth_decay'] = 2  # unknown
    base['model']['num_layers'] = 3
    hash_before_change = fingerprint_of(base)
    base['model']['d_ff'] = {'a': 1}  # d_ff has to be a number
    studies.write_study(study_dir, [result_of()], base=base, base_hash=hash_before_change)

    (problem,) = load_study(study_dir).problems

    assert problem == 'base_hash of study.json is not the hash of its base'


def test_findings_are_cached_until_a_file_changes(study_dir):
    """Findings of a packed study are computed once, and again if one of its files has changed.

    A packed study has its logs in logs.zip, and three more files. One is yardsticks.json, with the
    losses that the baseline has to beat for a verdict.
    """
    packed_study = study_dir / 'packed'
    studies.write_tuned(study_dir, studies.tuned_arm('qk/vo'))
    stored.pack(study_dir, packed_study)

    findings = load_findings(packed_study)
    assert load_findings(str(packed_study)) is findings

    # After the change, yardsticks.json is read again and refused. The cache would not notice this.
    (packed_study / 'yardsticks.json').write_text('{}')
    with pytest.raises(ReportError, match=r"yardsticks\.json.* be read: .*'groups' is missing"):
        load_findings(packed_study)


@pytest.fixture(scope='module')
def study_of_three_arms(tmp_path_factory):
    """A tuned study in which b/vo is worse by 0.02 and c/vo by 0.04 nats/token."""
    baseline_losses = 2 + 0.05 * np.arange(8)
    records = []
    for variant, delta in {'qk/vo': 0.0, 'b/vo': 0.02, 'c/vo': 0.04}.items():
        records += studies.tuned_arm(variant, losses=list(baseline_losses + delta))
    return studies.write_tuned(tmp_path_factory.mktemp('sound'), records, num_documents=101)


@pytest.fixture
def copied_study(study_of_three_arms, study_dir):
    """A copy of `study_of_three_arms`, whose files may be changed."""
    return shutil.copytree(study_of_three_arms, study_dir)


WRONG_HASH = f"'config_hash' is 'other', expected {B_RUN!r}: it is the result of another run"
OTHER_RATE = {'trial': result_of(learning_rate=3.0)['trial']}


def assert_refused(directory, file, message):
    """Asserts that loading the study raises an error of one line that names the file."""
    with pytest.raises(ReportError, match=re.escape(message)) as raised:
        load_study(directory)
    assert file in str(raised.value)
    assert '\n' not in str(raised.value)


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'config_hash': 'other'}, WRONG_HASH),
        ({'variant': 'qk/vo'}, "but its result is of 'qk/vo' at"),
        ({'size': 's'}, "but its result is of 'b/vo' at 's'"),
        (OTHER_RATE, 'learning_rate 3.0 is not one of run'),
    ],
)
def test_results_of_another_study_or_run_are_refused(copied_study, changes, message):
    file = copied_study / 'results.jsonl'
    lines = studies.read_lines(file)
    # Change the results of the verdict run of b/vo, and all results after them.
    runs = [line['run'] for line in lines]
    for line in lines[runs.index(B_RUN) :]:
        line.update(changes)
    studies.write_lines(file, lines)

    assert_refused(copied_study, 'results.jsonl', message)


@pytest.mark.parametrize(
    ('section', 'changes', 'message'),
    [
        ('groups', {'run': 'other'}, 'no arm of this study'),
        ('groups', {'run': B_RUN}, "but planned for 'b/vo'"),
        ('runs', {'run': 'other'}, 'no arm of this study'),
        ('runs', {'variant': 'qk/vo'}, "but planned for 'b/vo'"),
    ],
)
def test_yardsticks_of_another_study_or_run_are_refused(copied_study, section, changes, message):
    file = copied_study / 'yardsticks.json'
    content = json.loads(file.read_text())
    for entry in content[section]:
        entry.update(changes)
    file.write_text(json.dumps(content))

    assert_refused(copied_study, 'yardsticks.json', message)


@pytest.mark.parametrize(
    ('file', 'content', 'message'),
    [
        ('result.json', [studies.result_record(config_hash='other')], WRONG_HASH),
        ('config.json', {'hash': 'other', 'config': {}}, "field 'hash' is 'other', expected"),
        ('config.json', {'hash': B_RUN, 'config': {}}, 'its hash does not match its config'),
    ],
)
def test_a_file_in_the_directory_of_another_run_is_named(copied_study, file, content, message):
    (copied_study / B_RUN / file).write_text(json.dumps(content))

    (problem,) = load_study(copied_study).problems

    assert f'{B_RUN}/{file} is damaged' in problem
    assert message in problem


def test_runs_that_are_trained_longer_may_leave_the_plan_after_their_yardsticks(copied_study):
    file = copied_study / 'yardsticks.json'
    content = json.loads(file.read_text())
    content['groups'].append(content['groups'][0] | {'run': 'not planned', 'longer': True})
    file.write_text(json.dumps(content))

    assert load_study(copied_study).yardsticks


def test_documents_of_a_split_have_different_names():
    split = {'documents': ['a', 'a', 'b'], 'tokens': [1.0, 1.0], 'nats': [[2.0, 2.0]]}
    with pytest.raises(ValueError, match='documents of different names'):
        _documents_of_split(split, 'test', [2.0])


BOTH_WORSE = {'b/vo': Decision.WORSE, 'c/vo': Decision.WORSE}
B_WITHHELD = {'b/vo': Decision.NO_VERDICT, 'c/vo': Decision.WORSE}
C_WITHHELD = {'b/vo': Decision.WORSE, 'c/vo': Decision.NO_VERDICT}


def assert_damage_is_reported(directory, message, decisions):
    """Asserts that a damage to a study is reported, and what is decided on b/vo and c/vo.

    Args:
        directory: Directory of a copy of `study_of_three_arms`, with a damage.
        message: A regular expression for the damage. The message is a problem of reading the study,
            or a remark that blocks a verdict.
        decisions: The decisions on b/vo and c/vo. Each is WORSE, or NO_VERDICT if it is withheld.

    Returns:
        The verdict on b/vo.
    """
    study = load_study(directory)
    findings = find(study)
    blocks = [clause(remark) for remark in findings.remarks if remark.blocks]
    problems_and_blocks = '\n'.join([*study.problems, *blocks])
    assert re.search(message, problems_and_blocks)

    baseline, b, c = findings.arms
    assert baseline.verdict is None
    assert {'b/vo': b.verdict.decision, 'c/vo': c.verdict.decision} == decisions

    # The difference of b/vo has an interval only if its verdict is not withheld.
    has_interval = b.difference is not None and b.difference.low is not None
    is_judged = decisions['b/vo'] is Decision.WORSE
    assert has_interval == is_judged
    return b.verdict


def test_a_verdict_is_withheld_where_results_are_missing(copied_study):
    # The last line is the result of the last verdict trial of c/vo.
    lines = studies.read_lines(copied_study / 'results.jsonl')
    studies.write_lines(copied_study / 'results.jsonl', lines[:-1])
    assert_damage_is_reported(copied_study, '7 of its 8 verdict trials', C_WITHHELD)


def test_a_verdict_needs_no_metrics(copied_study):
    (copied_study / B_RUN / 'metrics.jsonl').unlink()
    message = r'verdict-4 has results, but metrics\.jsonl is missing'
    assert_damage_is_reported(copied_study, message, BOTH_WORSE)


def assert_withheld_without_documents(directory, message):
    verdict = assert_damage_is_reported(directory, message, B_WITHHELD)
    assert [reason.code for reason in verdict.reasons] == [ReasonCode.NO_DOCUMENTS]


def test_a_verdict_is_withheld_where_documents_are_missing(copied_study):
    """Without documents, the interval would lack the error over documents, and be too narrow."""
    (copied_study / B_RUN / 'documents.json').unlink()
    message = r'verdict-4 has results, but documents\.json is missing'
    assert_withheld_without_documents(copied_study, message)


def remove_test_split(documents):
    del documents['test']


def remove_a_loss(documents):
    documents['test']['nats'][1].pop()


def empty_a_document(documents):
    documents['test']['tokens'][0] = 0


def enlarge_a_loss(documents):
    documents['test']['nats'][1][0] = 1e9


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (remove_test_split, "'test' is missing"),
        (remove_a_loss, 'one number for'),
        (empty_a_document, 'must have documents of'),
        (enlarge_a_loss, 'its result'),
    ],
)
def test_a_verdict_is_withheld_where_documents_are_damaged(copied_study, damage, message):
    """Without documents, the interval would lack the error over documents, and be too narrow."""
    file = copied_study / B_RUN / 'documents.json'
    documents = json.loads(file.read_text())
    damage(documents)
    file.write_text(json.dumps(documents))
    assert_withheld_without_documents(copied_study, message)


def test_a_verdict_is_withheld_where_an_arm_was_evaluated_on_another_document(copied_study):
    """The error over documents needs the losses of both arms on the same documents."""
    file = copied_study / B_RUN / 'documents.json'
    documents = json.loads(file.read_text())
    documents['test']['documents'][0] = 'other'
    file.write_text(json.dumps(documents))

    # The file is in order by itself, so nothing is reported but the reason of the verdict.
    no_message = r'\A\Z'
    assert_withheld_without_documents(copied_study, no_message)
