"""A ledger: lines that are only appended, each holding the hash of the one before it."""

import json

import pytest

from qkattn.errors import ReportError
from qkattn.storage import ledger
from qkattn.storage.files import write_atomic


def arm(variant, control=None):
    return {'variant': variant, 'size': 'd_model=32', 'corpus': 'stdlib', 'control': control}


ARMS = [arm('qk/vo'), arm('qk/no_o'), arm('qk/no_o', 'equal_shape')]
STUDY = {'baseline': 'qk/vo', 'arms': ARMS, 'seeds': [0, 1], 'margin': 0.005}
STUDY |= {'tuning': {'seeds': [8]}}
LARGER = STUDY | {'arms': [*ARMS, arm('qk/no_v'), arm('qk/no_v', 'equal_shape')]}


def append(path, line):
    with path.open('a') as lines:
        lines.write(json.dumps(line) + '\n')


def run_of(directory, name):
    """Writes a planned run with a result and logs."""
    result = {'run': name, 'status': 'finished', 'val_loss': 2.0, 'seconds': 1.0}
    metric = {'role': 'score', 'description': 'From outside.'}
    result |= {'outside_metrics': {'top_3': metric}, 'val_top_3': 0.25}
    append(directory / 'plan.jsonl', {'run': name, 'directory': f'runs/{name}'})
    append(directory / 'results.jsonl', result)
    write_atomic(directory / f'runs/{name}/documents.json', '{}')
    write_atomic(directory / f'runs/{name}/metrics.jsonl', '{"kind": "eval", "val_loss": [2.0]}\n')


@pytest.fixture
def looked(tmp_path):
    """A study of one run that was declared and looked at."""
    (tmp_path / 'study.json').write_text(json.dumps(STUDY))
    ledger.declare(tmp_path, STUDY)
    run_of(tmp_path, 'a')
    assert ledger.record_look(tmp_path) and not altered(tmp_path)
    return tmp_path


@pytest.fixture
def directory(looked):
    """The study, extended and accepted."""
    (looked / 'study.json').write_text(json.dumps(LARGER))
    ledger.declare(looked, LARGER)
    ledger.accept(looked, ['uncommitted', 'uncommitted'], 'a typo in docs')
    return looked


def read(directory):
    return ledger.read(directory / 'ledger.jsonl')


def altered(directory):
    return read(directory).altered(ledger.run_digests(directory))


def test_a_ledger_says_what_was_declared(directory):
    kept = read(directory)
    events = [entry['event'] for entry in kept.entries]
    assert events == ['declared', 'looked', 'arms_added', 'accepted']
    assert kept.entries[0]['family'] == 1 and kept.family == 2
    added = ('qk/no_v', 'd_model=32', 'stdlib')
    assert kept.post_hoc == {(*added, None), (*added, 'equal_shape')}
    assert kept.arms == {tuple(arm.values()) for arm in ARMS} | kept.post_hoc
    assert kept.accepted == {'uncommitted': 'a typo in docs'}
    assert kept.first_look == kept.entries[1]['time'] and kept.entries[1]['look'] == 1
    assert kept.looked_files.keys() == {*('study.json', 'plan.jsonl', 'results.jsonl', 'logs')}
    assert kept.declaration == ledger.declaration_digest(LARGER) != ledger.declaration_digest(STUDY)


def test_arms_of_a_study_without_verdicts_are_never_post_hoc(looked):
    ledger.declare(looked, LARGER | {'tuning': None})
    assert not read(looked).post_hoc and read(looked).family == 2


def test_what_is_declared_or_looked_at_again_is_entered_once(directory):
    before = (directory / 'ledger.jsonl').read_bytes()
    ledger.declare(directory, LARGER | {'command': 'another'})  # no part of a declaration
    ledger.accept(directory, ['uncommitted'], 'a typo in docs')
    assert (directory / 'ledger.jsonl').read_bytes() == before
    assert ledger.record_look(directory)  # the study has grown since the first look
    (directory / 'lock').unlink()
    assert not ledger.record_look(directory) and not (directory / 'lock').exists()
    append(directory / 'plan.jsonl', {'run': 'b', 'directory': 'runs/b'})
    assert ledger.record_look(directory)
    write_atomic(directory / 'runs/b/documents.json', '{}')
    assert ledger.record_look(directory) and not ledger.record_look(directory)
    write_atomic(directory / 'runs/b/metrics.jsonl', '{"kind": "train", "loss": 2.0}\n')
    assert not ledger.record_look(directory)
    write_atomic(directory / 'runs/b/metrics.jsonl', '{"kind": "eval", "val_loss": [2.0]}\n')
    assert ledger.record_look(directory) and read(directory).entries[-1]['look'] == 5


def rewritten(lines):
    """The first line edited and given the hash that belongs to it."""
    entry = json.loads(lines[0]) | {'margin': 0.05}
    return [json.dumps(entry | {'hash': ledger.digest_of_entry(entry)}) + '\n', *lines[1:]]


@pytest.mark.parametrize(
    ('change', 'problem'),
    [
        (lambda lines: [lines[0].replace('0.005', '0.05'), *lines[1:]], 'line 1 was edited'),
        (rewritten, 'line 2 does not follow'),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], 'line 2 does not follow'),
        (lambda lines: lines[1:], 'line 1 does not follow'),
        (lambda lines: lines[:1] + lines[2:], 'line 2 does not follow'),
        (lambda lines: [*lines[:3], lines[3][:-9]], 'line 4 is damaged'),
        (lambda lines: [*lines, '[]\n'], 'line 5 is damaged'),
        (lambda lines: [], 'does not exist, or declares no study'),
        (None, 'does not exist, or declares no study'),
    ],
)
def test_a_ledger_that_was_changed_names_the_line(directory, change, problem):
    path = directory / 'ledger.jsonl'
    lines = path.read_text().splitlines(keepends=True)
    path.unlink() if change is None else path.write_text(''.join(change(lines)))
    for call in (read, ledger.record_look, lambda d: ledger.accept(d, ['commits'], 'x')):
        with pytest.raises(ReportError, match=rf'ledger\.jsonl,? {problem}.*restore'):
            call(directory)


def replace(directory, file, old, new):
    text = (directory / file).read_text()
    assert old in text
    (directory / file).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    'change',
    [
        lambda d: replace(d, 'results.jsonl', '2.0', '1.9'),
        lambda d: replace(d, 'results.jsonl', '0.25', '0.75'),
        lambda d: replace(d, 'results.jsonl', 'From outside.', 'Of another.'),
        lambda d: replace(d, 'runs/a/metrics.jsonl', '2.0', '1.9'),
        lambda d: (d / 'runs/a/documents.json').unlink(),
        lambda d: replace(d, 'plan.jsonl', 'runs/a', 'runs/b'),
    ],
)
def test_what_a_look_saw_of_a_run_may_not_change(looked, change):
    change(looked)
    run_of(looked, 'c')
    entries = (looked / 'ledger.jsonl').read_bytes()
    assert altered(looked) == {'a': 1} and not ledger.record_look(looked)
    assert (looked / 'ledger.jsonl').read_bytes() == entries


def test_runs_may_be_added_after_a_look(looked):
    run_of(looked, 'b')
    replace(looked, 'results.jsonl', '"seconds": 1.0', '"seconds": 9.0')
    assert not altered(looked) and ledger.record_look(looked)
    entry = read(looked).entries[-1]
    assert entry['look'] == 2 and entry['runs'].keys() == {'a', 'b'}


def test_no_run_may_go_after_a_look(looked):
    (looked / 'plan.jsonl').unlink()
    run_of(looked, 'b')
    assert altered(looked) == {'a': 1}


def test_a_study_that_is_not_there_is_not_made(tmp_path):
    with pytest.raises(ReportError, match='ledger.jsonl does not exist'):
        ledger.accept(tmp_path / 'absent', ['commits'], 'docs alone differ')
    assert not (tmp_path / 'absent').exists()
