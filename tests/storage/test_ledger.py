"""A ledger: lines that are only appended, each holding the hash of the one before it."""

import datetime
import json

import pytest

from qkattn.errors import ReportError
from qkattn.storage import ledger
from qkattn.storage.files import write_atomic


def arm(variant, control=None):
    return {'variant': variant, 'size': 'd_model=32', 'corpus': 'stdlib', 'control': control}


ARMS = [arm('qk/vo'), arm('qk/no_o'), arm('qk/no_o', 'equal_shape')]
STUDY = {'baseline': 'qk/vo', 'arms': ARMS, 'seeds': [0, 1], 'looks': [], 'margin': 0.005}


@pytest.fixture
def directory(tmp_path):
    """A study that was declared, looked at, extended and accepted."""
    (tmp_path / 'study.json').write_text(json.dumps(STUDY))
    ledger.declare(tmp_path, STUDY)
    for name in ('plan.jsonl', 'results.jsonl'):
        (tmp_path / name).write_text('{"directory": "runs/a"}\n')
    ledger.look(tmp_path)
    larger = STUDY | {'arms': [*ARMS, arm('qk/no_v'), arm('qk/no_v', 'equal_shape')]}
    (tmp_path / 'study.json').write_text(json.dumps(larger))
    ledger.declare(tmp_path, larger)
    ledger.accept(tmp_path, 'uncommitted', 'a typo in docs')
    return tmp_path


def test_a_ledger_says_what_was_declared_and_when(directory):
    kept = ledger.read(directory / 'ledger.jsonl')
    assert [entry['event'] for entry in kept.entries] == [
        *('declared', 'looked', 'arms_added', 'accepted')
    ]
    assert kept.entries[0]['family'] == 1 and kept.family == 2
    assert kept.post_hoc == {
        ('qk/no_v', 'd_model=32', 'stdlib', control) for control in (None, 'equal_shape')
    }
    assert kept.arms == {tuple(arm.values()) for arm in ARMS} | kept.post_hoc
    assert kept.accepted == {'uncommitted': 'a typo in docs'}
    assert kept.first_look == kept.entries[1]['time'] and kept.entries[1]['look'] == 1
    assert kept.looked_files.keys() == {*('study.json', 'plan.jsonl', 'results.jsonl', 'logs')}
    assert kept.declaration == ledger.digest(json.loads((directory / 'study.json').read_text()))
    times = [datetime.datetime.fromisoformat(entry['time']) for entry in kept.entries]
    assert times == sorted(times) and all(time.tzinfo is datetime.UTC for time in times)


def test_changed_settings_are_listed_and_make_all_arms_post_hoc_after_a_look(directory):
    study = json.loads((directory / 'study.json').read_text()) | {'margin': 0.01}
    ledger.declare(directory, study, ['margin: 0.005 -> 0.01'])
    ledger.declare(directory, study)  # is entered once
    kept = ledger.read(directory / 'ledger.jsonl')
    *_, entry = kept.entries
    assert (entry['event'], entry['changes']) == ('changed', ['margin: 0.005 -> 0.01'])
    assert kept.entries[-2]['event'] == 'accepted' and kept.declaration == ledger.digest(study)
    assert kept.post_hoc == kept.arms and kept.family == 2


def test_what_is_declared_or_looked_at_again_is_entered_once(directory):
    before = (directory / 'ledger.jsonl').read_bytes()
    study = json.loads((directory / 'study.json').read_text())
    ledger.declare(directory, study | {'command': 'another'})  # no part of a declaration
    ledger.accept(directory, 'uncommitted', 'a typo in docs')
    assert (directory / 'ledger.jsonl').read_bytes() == before
    assert ledger.look(directory)  # the study has grown since the first look
    (directory / 'lock').unlink()
    assert not ledger.look(directory) and not (directory / 'lock').exists()
    assert ledger.read(directory / 'ledger.jsonl').entries[-1]['look'] == 2
    (directory / 'results.jsonl').write_text('{"seed": 3}\n')
    assert ledger.look(directory)
    write_atomic(directory / 'runs/a/documents.json', '{}')
    assert ledger.look(directory) and not ledger.look(directory)
    write_atomic(directory / 'runs/a/metrics.jsonl', '{"kind": "train", "loss": 2.0}\n')
    assert not ledger.look(directory)
    kept = ledger.read(directory / 'ledger.jsonl')
    assert kept.entries[-1]['look'] == 4 and len(kept.entries) == 7
    write_atomic(directory / 'runs/a/metrics.jsonl', '{"kind": "eval", "val_loss": [2.0]}\n')
    assert ledger.look(directory)


def test_what_cannot_be_accepted_is_refused(directory):
    before = (directory / 'ledger.jsonl').read_bytes()
    for code, why in (('dirty', 'x'), ('commits', ' ')):
        with pytest.raises(ReportError, match=f'accept={code!r} .* takes uncommitted or commits'):
            ledger.accept(directory, code, why)
    assert (directory / 'ledger.jsonl').read_bytes() == before


def test_arms_that_are_added_before_a_look_are_not_post_hoc(tmp_path):
    ledger.declare(tmp_path, STUDY)
    ledger.declare(tmp_path, STUDY | {'arms': [*ARMS, arm('qk/no_v')]})
    kept = ledger.read(tmp_path / 'ledger.jsonl')
    assert [entry['event'] for entry in kept.entries] == ['declared', 'arms_added']
    assert kept.entries[1]['post_hoc'] is False and kept.entries[1]['family'] == 2
    assert not kept.post_hoc and kept.first_look is None and not kept.looked_files


def edited(lines):
    return [lines[0].replace('0.005', '0.05'), *lines[1:]]


def rewritten(lines):
    """The first line edited and given the hash that belongs to it."""
    entry = json.loads(lines[0])
    entry['margin'] = 0.05
    entry['hash'] = ledger.digest_of_entry(entry)
    return [json.dumps(entry) + '\n', *lines[1:]]


@pytest.mark.parametrize(
    ('change', 'number'),
    [
        (edited, 1),
        (rewritten, 2),
        (lambda lines: [lines[0], lines[2], lines[1], lines[3]], 2),
        (lambda lines: lines[1:], 1),
        (lambda lines: lines[:1] + lines[2:], 2),
        (lambda lines: [*lines[:3], lines[3][:-9]], 4),
        (lambda lines: [*lines, 'x\n'], 5),
        (lambda lines: [*lines, '[]\n'], 5),
        (lambda lines: [*lines, lines[0]], 5),
        (lambda lines: [*lines, lines[-1].replace('accepted', 'unknown')], 5),
    ],
    ids=[
        *('edited', 'rewritten', 'reordered', 'first gone', 'middle gone', 'cut off'),
        *('no JSON', 'no object', 'repeated', 'unknown event'),
    ],
)
def test_a_ledger_that_was_changed_names_the_line(directory, change, number):
    path = directory / 'ledger.jsonl'
    write_atomic(path, ''.join(change(path.read_text().splitlines(keepends=True))))
    with pytest.raises(ReportError, match=rf'ledger\.jsonl, line {number} .*restore'):
        ledger.read(path)
    before = path.read_bytes()
    with pytest.raises(ReportError, match='restore'):
        ledger.append(path, 'accepted', code='commits', why='x')
    assert path.read_bytes() == before


def test_a_ledger_that_does_not_exist_or_is_empty_says_what_to_do(directory):
    path = directory / 'ledger.jsonl'
    path.write_text('')
    with pytest.raises(ReportError, match=r'ledger\.jsonl, line 1 is missing.*restore'):
        ledger.read(path)
    path.unlink()
    with pytest.raises(ReportError, match=r'ledger\.jsonl does not exist.*restore.*new directory'):
        ledger.read(path)
    with pytest.raises(ReportError, match='does not exist'):
        ledger.look(directory)


def test_a_missing_last_line_shows_in_the_files_alone(directory):
    """The chain of what is left is whole; study.json is not what its last line declares."""
    path = directory / 'ledger.jsonl'
    path.write_text(''.join(path.read_text().splitlines(keepends=True)[:2]))
    study = json.loads((directory / 'study.json').read_text())
    assert ledger.read(path).declaration == ledger.digest(STUDY) != ledger.digest(study)
    assert ledger.digest(STUDY) != ledger.digest(STUDY | {'margin': 0.01})


def run_of(directory, name, loss=2.0):
    """Writes a planned run with a result and logs."""
    for file, line in (
        ('plan.jsonl', {'run': name, 'directory': f'runs/{name}'}),
        ('results.jsonl', {'run': name, 'status': 'finished', 'val_loss': loss, 'seconds': 1.0}),
    ):
        with (directory / file).open('a') as lines:
            lines.write(json.dumps(line) + '\n')
    write_atomic(directory / f'runs/{name}/documents.json', '{}')
    write_atomic(directory / f'runs/{name}/metrics.jsonl', '{"kind": "eval", "val_loss": [2.0]}\n')


def altered(directory):
    return ledger.read(directory / 'ledger.jsonl').altered(ledger.seen(directory))


def replace(directory, file, old, new):
    text = (directory / file).read_text()
    assert old in text
    (directory / file).write_text(text.replace(old, new))


@pytest.mark.parametrize(
    'change',
    [
        lambda d: replace(d, 'results.jsonl', '2.0', '1.9'),
        lambda d: replace(d, 'results.jsonl', 'finished', 'diverged'),
        lambda d: replace(d, 'runs/a/metrics.jsonl', '2.0', '1.9'),
        lambda d: (d / 'runs/a/documents.json').unlink(),
        lambda d: (d / 'results.jsonl').write_text(''),
        lambda d: replace(d, 'plan.jsonl', 'runs/a', 'runs/b'),
    ],
)
def test_what_a_look_saw_of_a_run_may_not_change(tmp_path, change):
    ledger.declare(tmp_path, STUDY)
    run_of(tmp_path, 'a')
    assert ledger.look(tmp_path) and not altered(tmp_path)
    change(tmp_path)
    run_of(tmp_path, 'c')
    entries = (tmp_path / 'ledger.jsonl').read_bytes()
    assert altered(tmp_path) == {'a': 1} and not ledger.look(tmp_path)
    assert (tmp_path / 'ledger.jsonl').read_bytes() == entries


def test_runs_are_added_after_a_look_and_replaced_where_settings_change(tmp_path):
    ledger.declare(tmp_path, STUDY)
    run_of(tmp_path, 'a')
    assert ledger.look(tmp_path)
    run_of(tmp_path, 'b')
    replace(tmp_path, 'results.jsonl', '"seconds": 1.0', '"seconds": 9.0')
    assert not altered(tmp_path) and ledger.look(tmp_path)
    *_, entry = ledger.read(tmp_path / 'ledger.jsonl').entries
    assert entry['look'] == 2 and entry['runs'].keys() == {'a', 'b'}
    (tmp_path / 'plan.jsonl').unlink()
    run_of(tmp_path, 'b')
    assert altered(tmp_path) == {'a': 1}
    ledger.declare(tmp_path, STUDY | {'margin': 0.01}, ['margin: 0.005 -> 0.01'])
    assert not altered(tmp_path)


def test_a_look_of_an_earlier_version_is_as_it_is(tmp_path, monkeypatch):
    ledger.declare(tmp_path, STUDY)
    run_of(tmp_path, 'a')
    with monkeypatch.context() as earlier:
        earlier.setitem(ledger.FIELDS, 'looked', ('look', 'files'))
        files = ledger.digests(tmp_path)
        ledger.append(tmp_path / 'ledger.jsonl', 'looked', look=1, files=files)
    assert not ledger.look(tmp_path)
    replace(tmp_path, 'results.jsonl', '2.0', '1.9')
    assert not altered(tmp_path) and ledger.look(tmp_path)
