"""A ledger: lines that are only appended, each holding the hash of the one before it."""

import json

import pytest

from qkattn.errors import ReportError
from qkattn.storage import ledger
from qkattn.storage.files import write_atomic


def arm_key(variant, control=None):
    return {'variant': variant, 'size': 'd_model=32', 'corpus': 'stdlib', 'control': control}


ARMS = [arm_key('qk/vo'), arm_key('qk/no_o'), arm_key('qk/no_o', 'equal_shape')]
STUDY = {'baseline': 'qk/vo', 'arms': ARMS, 'seeds': [0, 1], 'margin': 0.005}
STUDY |= {'tuning': {'seeds': [8]}}
LARGER = STUDY | {'arms': [*ARMS, arm_key('qk/no_v'), arm_key('qk/no_v', 'equal_shape')]}


def append_line(path, line):
    with path.open('a') as lines:
        lines.write(json.dumps(line) + '\n')


def add_run(extended_study, name):
    """Writes a planned run with a result and logs."""
    result = {'run': name, 'status': 'finished', 'val_loss': 2.0, 'seconds': 1.0}
    metric = {'role': 'score', 'description': 'From outside.'}
    result |= {'outside_metrics': {'top_3': metric}, 'val_top_3': 0.25}
    append_line(extended_study / 'plan.jsonl', {'run': name, 'directory': f'runs/{name}'})
    append_line(extended_study / 'results.jsonl', result)
    write_atomic(extended_study / f'runs/{name}/documents.json', '{}')
    write_atomic(
        extended_study / f'runs/{name}/metrics.jsonl', '{"kind": "eval", "val_loss": [2.0]}\n'
    )


@pytest.fixture
def study_with_a_look(tmp_path):
    """A study of one run that was declared and looked at."""
    (tmp_path / 'study.json').write_text(json.dumps(STUDY))
    ledger.declare(tmp_path, STUDY)
    add_run(tmp_path, 'a')
    assert ledger.record_look(tmp_path)
    assert not altered_runs(tmp_path)
    return tmp_path


@pytest.fixture
def extended_study(study_with_a_look):
    """The study after two arms were added and uncommitted code was accepted."""
    (study_with_a_look / 'study.json').write_text(json.dumps(LARGER))
    ledger.declare(study_with_a_look, LARGER)
    ledger.accept(study_with_a_look, ['uncommitted', 'uncommitted'], 'a typo in docs')
    return study_with_a_look


def read_ledger(extended_study):
    return ledger.read(extended_study / 'ledger.jsonl')


def altered_runs(extended_study):
    """Runs whose files differ from what a look saw: the number of that look by run."""
    return read_ledger(extended_study).altered(ledger.run_digests(extended_study))


def test_a_ledger_has_an_entry_for_each_event_and_sums_them_up(extended_study):
    kept = read_ledger(extended_study)
    events = [entry['event'] for entry in kept.entries]
    assert events == ['declared', 'looked', 'arms_added', 'accepted']
    assert kept.entries[0]['family'] == 1
    assert kept.family == 2

    # The arm was added after the first look, and its control with it.
    added = ('qk/no_v', 'd_model=32', 'stdlib')
    assert kept.post_hoc == {(*added, None), (*added, 'equal_shape')}
    assert kept.arms == {tuple(arm.values()) for arm in ARMS} | kept.post_hoc
    assert kept.accepted == {'uncommitted': 'a typo in docs'}
    assert kept.first_look == kept.entries[1]['time']
    assert kept.entries[1]['look'] == 1
    assert kept.looked_files.keys() == {'study.json', 'plan.jsonl', 'results.jsonl', 'logs'}
    assert kept.declaration == ledger.declaration_digest(LARGER) != ledger.declaration_digest(STUDY)


def test_arms_of_a_study_without_verdicts_are_never_post_hoc(study_with_a_look):
    ledger.declare(study_with_a_look, LARGER | {'tuning': None})
    assert not read_ledger(study_with_a_look).post_hoc
    assert read_ledger(study_with_a_look).family == 2


def test_a_declaration_and_an_acceptance_are_entered_once(extended_study):
    before = (extended_study / 'ledger.jsonl').read_bytes()
    ledger.declare(extended_study, LARGER | {'command': 'another'})  # no part of a declaration
    ledger.accept(extended_study, ['uncommitted'], 'a typo in docs')
    assert (extended_study / 'ledger.jsonl').read_bytes() == before


def test_a_look_is_entered_where_a_plan_documents_or_evaluations_have_changed(extended_study):
    """`look` returns whether it has added an entry. Training losses alone make none."""
    assert ledger.record_look(extended_study)  # arms were added since the first look
    (extended_study / 'lock').unlink()
    assert not ledger.record_look(extended_study)
    assert not (extended_study / 'lock').exists()  # nothing was locked to find that out

    append_line(extended_study / 'plan.jsonl', {'run': 'b', 'directory': 'runs/b'})
    assert ledger.record_look(extended_study)

    write_atomic(extended_study / 'runs/b/documents.json', '{}')
    assert ledger.record_look(extended_study)
    assert not ledger.record_look(extended_study)

    metrics = extended_study / 'runs/b/metrics.jsonl'
    write_atomic(metrics, '{"kind": "train", "loss": 2.0}\n')
    assert not ledger.record_look(extended_study)
    write_atomic(metrics, '{"kind": "eval", "val_loss": [2.0]}\n')
    assert ledger.record_look(extended_study)
    assert read_ledger(extended_study).entries[-1]['look'] == 5


def with_rewritten_first_line(lines):
    """The first line edited and given the hash that belongs to it."""
    entry = json.loads(lines[0]) | {'margin': 0.05}
    return [json.dumps(entry | {'hash': ledger.digest_of_entry(entry)}) + '\n', *lines[1:]]


@pytest.mark.parametrize(
    ('change', 'problem'),
    [
        (lambda lines: [lines[0].replace('0.005', '0.05'), *lines[1:]], 'line 1 was edited'),
        (with_rewritten_first_line, 'line 2 does not follow'),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], 'line 2 does not follow'),
        (lambda lines: lines[1:], 'line 1 does not follow'),
        (lambda lines: lines[:1] + lines[2:], 'line 2 does not follow'),
        (lambda lines: [*lines[:3], lines[3][:-9]], 'line 4 is damaged'),
        (lambda lines: [*lines, '[]\n'], 'line 5 is damaged'),
        (lambda lines: [], 'does not exist, or declares no study'),
        (None, 'does not exist, or declares no study'),
    ],
)
def test_a_ledger_that_was_changed_names_the_line(extended_study, change, problem):
    path = extended_study / 'ledger.jsonl'
    lines = path.read_text().splitlines(keepends=True)
    path.unlink() if change is None else path.write_text(''.join(change(lines)))
    for call in (read_ledger, ledger.record_look, lambda d: ledger.accept(d, ['commits'], 'x')):
        with pytest.raises(ReportError, match=rf'ledger\.jsonl,? {problem}.*restore'):
            call(extended_study)


def replace_text(extended_study, file, old, new):
    text = (extended_study / file).read_text()
    assert old in text
    (extended_study / file).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    'change',
    [
        lambda d: replace_text(d, 'results.jsonl', '2.0', '1.9'),
        lambda d: replace_text(d, 'results.jsonl', '0.25', '0.75'),
        lambda d: replace_text(d, 'results.jsonl', 'From outside.', 'Of another.'),
        lambda d: replace_text(d, 'runs/a/metrics.jsonl', '2.0', '1.9'),
        lambda d: (d / 'runs/a/documents.json').unlink(),
        lambda d: replace_text(d, 'plan.jsonl', 'runs/a', 'runs/b'),
    ],
)
def test_a_run_whose_files_changed_after_a_look_is_altered(study_with_a_look, change):
    change(study_with_a_look)
    add_run(study_with_a_look, 'c')
    entries = (study_with_a_look / 'ledger.jsonl').read_bytes()
    assert altered_runs(study_with_a_look) == {'a': 1}
    assert not ledger.record_look(study_with_a_look)
    assert (study_with_a_look / 'ledger.jsonl').read_bytes() == entries


def test_runs_may_be_added_after_a_look(study_with_a_look):
    add_run(study_with_a_look, 'b')
    # Times are no part of what a look sees.
    replace_text(study_with_a_look, 'results.jsonl', '"seconds": 1.0', '"seconds": 9.0')
    assert not altered_runs(study_with_a_look)
    assert ledger.record_look(study_with_a_look)
    entry = read_ledger(study_with_a_look).entries[-1]
    assert entry['look'] == 2
    assert entry['runs'].keys() == {'a', 'b'}


def test_a_run_that_is_gone_after_a_look_is_altered(study_with_a_look):
    (study_with_a_look / 'plan.jsonl').unlink()
    add_run(study_with_a_look, 'b')
    assert altered_runs(study_with_a_look) == {'a': 1}


def test_accepting_in_an_absent_study_makes_no_directory(tmp_path):
    with pytest.raises(ReportError, match='ledger.jsonl does not exist'):
        ledger.accept(tmp_path / 'absent', ['commits'], 'docs alone differ')
    assert not (tmp_path / 'absent').exists()
