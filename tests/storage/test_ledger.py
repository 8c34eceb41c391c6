"""A ledger: lines that are only appended, each holding the hash of the one before it."""

import json

import pytest

from qkattn.errors import ReportError
from qkattn.storage import ledger
from qkattn.storage.files import write_atomic


def arm(variant, control=None):
    return {'variant': variant, 'size': 'd_model=32', 'corpus': 'stdlib', 'control': control}


ARMS = [arm('qk/vo'), arm('qk/no_o'), arm('qk/no_o', 'equal_shape')]
STUDY = {
    'baseline': 'qk/vo',
    'arms': ARMS,
    'seeds': [0, 1],
    'margin': 0.005,
    'tuning': {'seeds': [8]},
}
LARGER_STUDY = STUDY | {'arms': [*ARMS, arm('qk/no_v'), arm('qk/no_v', 'equal_shape')]}


def append_line(path, line):
    with path.open('a') as lines:
        lines.write(json.dumps(line) + '\n')


def add_run(study, name):
    """Adds a run to a study: a line of the plan, a result, and logs.

    The result has a loss, and a value of top_3, a metric from outside the package.
    """
    result = {
        'run': name,
        'status': 'finished',
        'val_loss': 2.0,
        'seconds': 1.0,
        'outside_metrics': {'top_3': {'role': 'score', 'description': 'From outside.'}},
        'val_top_3': 0.25,
    }
    evaluation = '{"kind": "eval", "val_loss": [2.0]}\n'
    append_line(study / 'plan.jsonl', {'run': name, 'directory': f'runs/{name}'})
    append_line(study / 'results.jsonl', result)
    write_atomic(study / f'runs/{name}/documents.json', '{}')
    write_atomic(study / f'runs/{name}/metrics.jsonl', evaluation)


@pytest.fixture
def study_with_a_look(tmp_path):
    """A declared study with one run, whose results were looked at once."""
    (tmp_path / 'study.json').write_text(json.dumps(STUDY))
    ledger.declare(tmp_path, STUDY)
    add_run(tmp_path, 'a')
    assert ledger.record_look(tmp_path)
    assert not altered_runs(tmp_path)
    return tmp_path


@pytest.fixture
def extended_study(study_with_a_look):
    """A study with two arms that were added after a look, and with accepted uncommitted code."""
    study = study_with_a_look
    (study / 'study.json').write_text(json.dumps(LARGER_STUDY))
    ledger.declare(study, LARGER_STUDY)
    ledger.accept(study, ['uncommitted', 'uncommitted'], 'a typo in docs')
    return study


def read_ledger(study):
    return ledger.read(study / 'ledger.jsonl')


def altered_runs(study):
    """{run: number of its first look} for runs whose files have changed since that look."""
    digests = ledger.run_digests(study)
    return read_ledger(study).altered(digests)


def test_a_ledger_has_an_entry_for_each_event(extended_study):
    entries = read_ledger(extended_study).entries

    events = [entry['event'] for entry in entries]
    assert events == ['declared', 'looked', 'arms_added', 'accepted']
    assert entries[0]['family'] == 1
    assert entries[1]['look'] == 1


def test_a_ledger_is_summed_up_by_its_properties(extended_study):
    kept = read_ledger(extended_study)

    # Two arms, qk/no_o and qk/no_v, are neither the baseline nor controls.
    assert kept.family == 2
    assert kept.accepted == {'uncommitted': 'a typo in docs'}
    assert kept.first_look == kept.entries[1]['time']
    assert kept.looked_files.keys() == {'study.json', 'plan.jsonl', 'results.jsonl', 'logs'}
    assert kept.declaration == ledger.declaration_digest(LARGER_STUDY)
    assert kept.declaration != ledger.declaration_digest(STUDY)


def test_arms_added_after_a_look_are_post_hoc(extended_study):
    kept = read_ledger(extended_study)

    first_arms = {tuple(fields.values()) for fields in ARMS}
    added_arms = {
        ('qk/no_v', 'd_model=32', 'stdlib', None),
        ('qk/no_v', 'd_model=32', 'stdlib', 'equal_shape'),
    }
    assert kept.post_hoc == added_arms
    assert kept.arms == first_arms | added_arms


def test_arms_of_a_study_without_verdicts_are_never_post_hoc(study_with_a_look):
    ledger.declare(study_with_a_look, LARGER_STUDY | {'tuning': None})

    kept = read_ledger(study_with_a_look)
    assert not kept.post_hoc
    assert kept.family == 2


def test_a_declaration_and_an_acceptance_are_entered_once(extended_study):
    before = (extended_study / 'ledger.jsonl').read_bytes()

    # The command is no part of a declaration.
    ledger.declare(extended_study, LARGER_STUDY | {'command': 'another'})
    ledger.accept(extended_study, ['uncommitted'], 'a typo in docs')

    assert (extended_study / 'ledger.jsonl').read_bytes() == before


def test_a_look_at_unchanged_results_is_not_recorded(extended_study):
    assert ledger.record_look(extended_study)

    (extended_study / 'lock').unlink()
    assert not ledger.record_look(extended_study)
    assert not (extended_study / 'lock').exists()  # nothing was locked


def test_a_look_at_changed_results_is_recorded(extended_study):
    """A look is a reading of the results of a study.

    `record_look` records a look only if the study has changed, and returns whether it did.
    """
    # Look 2: arms were added to study.json after look 1.
    assert ledger.record_look(extended_study)

    # Look 3: a run is planned.
    append_line(extended_study / 'plan.jsonl', {'run': 'b', 'directory': 'runs/b'})
    assert ledger.record_look(extended_study)

    # Look 4: the run has losses of documents. Then nothing changes, so there is no look.
    write_atomic(extended_study / 'runs/b/documents.json', '{}')
    assert ledger.record_look(extended_study)
    assert not ledger.record_look(extended_study)

    # Look 5: the run has an evaluation. Training losses are no results, so they make no look.
    metrics = extended_study / 'runs/b/metrics.jsonl'
    write_atomic(metrics, '{"kind": "train", "loss": 2.0}\n')
    assert not ledger.record_look(extended_study)
    write_atomic(metrics, '{"kind": "eval", "val_loss": [2.0]}\n')
    assert ledger.record_look(extended_study)
    last_entry = read_ledger(extended_study).entries[-1]
    assert last_entry['look'] == 5


def with_another_margin(line):
    """A line of a ledger with an edited margin and the hash that fits it."""
    entry = json.loads(line) | {'margin': 0.05}
    entry |= {'hash': ledger.digest_of_entry(entry)}
    return json.dumps(entry) + '\n'


def assert_ledger_is_refused(study, problem):
    def accept(study):
        ledger.accept(study, ['commits'], 'x')

    message = rf'ledger\.jsonl,? {problem}.*restore'
    for function in (read_ledger, ledger.record_look, accept):
        with pytest.raises(ReportError, match=message):
            function(study)


@pytest.mark.parametrize(
    ('change', 'problem'),
    [
        pytest.param(
            lambda a, b, c, d: [a.replace('0.005', '0.05'), b, c, d],
            'line 1 was edited',
            id='margin edited',
        ),
        pytest.param(
            lambda a, b, c, d: [with_another_margin(a), b, c, d],
            'line 2 does not follow',
            id='margin and hash edited',
        ),
        pytest.param(
            lambda a, b, c, d: [a, c, b, d],
            'line 2 does not follow',
            id='lines swapped',
        ),
        pytest.param(
            lambda a, b, c, d: [b, c, d],
            'line 1 does not follow',
            id='first line removed',
        ),
        pytest.param(
            lambda a, b, c, d: [a, c, d],
            'line 2 does not follow',
            id='second line removed',
        ),
        pytest.param(
            lambda a, b, c, d: [a, b, c, d[:-9]],
            'line 4 is damaged',
            id='last line cut',
        ),
        pytest.param(
            lambda a, b, c, d: [a, b, c, d, '[]\n'],
            'line 5 is damaged',
            id='line added',
        ),
        pytest.param(
            lambda a, b, c, d: [],
            'does not exist, or declares no study',
            id='all lines removed',
        ),
    ],
)
def test_a_ledger_that_was_changed_names_the_line(extended_study, change, problem):
    path = extended_study / 'ledger.jsonl'
    # `change` gets the four lines of the ledger.
    lines = path.read_text().splitlines(keepends=True)
    changed_lines = change(*lines)
    path.write_text(''.join(changed_lines))

    assert_ledger_is_refused(extended_study, problem)


def test_a_ledger_that_was_deleted_is_refused(extended_study):
    (extended_study / 'ledger.jsonl').unlink()
    assert_ledger_is_refused(extended_study, 'does not exist, or declares no study')


def replace_text(path, old, new):
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ('file', 'old', 'new'),
    [
        pytest.param('results.jsonl', '2.0', '1.9', id='loss'),
        pytest.param('results.jsonl', '0.25', '0.75', id='outside metric'),
        pytest.param('results.jsonl', 'From outside.', 'Of another.', id='description'),
        pytest.param('runs/a/metrics.jsonl', '2.0', '1.9', id='evaluation'),
        pytest.param('plan.jsonl', 'runs/a', 'runs/b', id='directory of a run'),
    ],
)
def test_a_run_whose_files_changed_after_a_look_is_altered(study_with_a_look, file, old, new):
    replace_text(study_with_a_look / file, old, new)
    add_run(study_with_a_look, 'c')

    assert_run_a_is_altered(study_with_a_look)


def test_a_run_whose_documents_were_deleted_is_altered(study_with_a_look):
    (study_with_a_look / 'runs/a/documents.json').unlink()
    add_run(study_with_a_look, 'c')

    assert_run_a_is_altered(study_with_a_look)


def assert_run_a_is_altered(study):
    """Run a differs from the first look at it, so that no further look is recorded."""
    entries = (study / 'ledger.jsonl').read_bytes()
    assert altered_runs(study) == {'a': 1}
    assert not ledger.record_look(study)
    assert (study / 'ledger.jsonl').read_bytes() == entries


def test_runs_may_be_added_after_a_look(study_with_a_look):
    add_run(study_with_a_look, 'b')

    assert not altered_runs(study_with_a_look)
    assert ledger.record_look(study_with_a_look)
    entry = read_ledger(study_with_a_look).entries[-1]
    assert entry['look'] == 2
    assert entry['runs'].keys() == {'a', 'b'}


def test_durations_of_runs_may_change_after_a_look(study_with_a_look):
    add_run(study_with_a_look, 'b')
    results = study_with_a_look / 'results.jsonl'
    replace_text(results, '"seconds": 1.0', '"seconds": 9.0')

    assert not altered_runs(study_with_a_look)
    assert ledger.record_look(study_with_a_look)


def test_a_run_that_is_gone_after_a_look_is_altered(study_with_a_look):
    (study_with_a_look / 'plan.jsonl').unlink()
    add_run(study_with_a_look, 'b')

    assert altered_runs(study_with_a_look) == {'a': 1}


def test_accepting_in_an_absent_study_makes_no_directory(tmp_path):
    study = tmp_path / 'absent'
    with pytest.raises(ReportError, match='ledger.jsonl does not exist'):
        ledger.accept(study, ['commits'], 'docs alone differ')
    assert not study.exists()
